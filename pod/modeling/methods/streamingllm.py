"""StreamingLLM (Xiao et al., 2024): first tokens as attention sinks, a window of recent tokens, nothing between.

Keys are stored before RoPE and rotated at their index *in the cache*: a sink is never farther than the window is wide, and
the input may be unbounded. The prompt is masked the same way, which makes the result independent of its chunking.
"""

from pod.modeling.methods.windowed import SinkLayer, sinks_method


class StreamingLayer(SinkLayer):
    """Behind a full window every query has the last index of the cache, ``n_s + n_r - 1``, towards the sinks."""

    lag = 0


METHOD = sinks_method("streamingllm", "StreamingLLM (Xiao et al., 2024)", StreamingLayer)
