"""LM-Infinite (Han et al., 2024): StreamingLLM's tokens seen through a Λ-shaped mask at distances of at most ``n_s + n_r``.

Recent tokens are nearer than that by themselves, so only sinks are affected. Keys are stored before RoPE.
"""

from pod.modeling.methods.windowed import SinkLayer, sinks_method


class LambdaLayer(SinkLayer):
    """A sink is at its own distance while that is at most ``n_s + n_r``, and at this limit ever after."""

    lag = 1


METHOD = sinks_method("lm_infinite", "LM-Infinite (Han et al., 2024)", LambdaLayer)
