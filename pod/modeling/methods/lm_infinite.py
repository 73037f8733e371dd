"""LM-Infinite (Han et al., 2024): StreamingLLM's tokens seen through a Λ-shaped mask at distances of at most ``n_s + n_r``.

Recent tokens are nearer than that by themselves, so only sinks are affected. Keys are stored before RoPE.
"""

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.windowed import (
    WINDOW_REFUSES_POD,
    WindowedLayer,
    sinks_and_recents,
    windowed_cache,
)
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig


class LambdaLayer(WindowedLayer):
    """A sink is at its own distance while that is at most ``n_s + n_r``, and at this limit ever after."""

    def sink_distances(self, positions: Tensor) -> Tensor:
        sinks = torch.arange(self.num_sink_tokens, device=positions.device)
        return (positions[:, None] - sinks).clamp(max=self.limit)

    def sink_logits(self, q: Tensor, keys: Tensor, past: int, turn) -> Tensor:
        logits = self.products(turn(q, range(self.limit, self.limit + 1)), turn(keys, range(1)))
        near = min(q.shape[2], self.limit + self.num_sink_tokens - past)  # queries that have a nearer sink
        if near <= 0:
            return logits
        own = self.products(turn(q[:, :, :near], range(past, past + near)), turn(keys, range(keys.shape[2])))
        positions = torch.arange(past, past + near, device=q.device)[:, None]
        is_near = positions - torch.arange(keys.shape[2], device=q.device) < self.limit
        return torch.cat((torch.where(is_near, own, logits[:, :, :near]), logits[:, :, near:]), dim=2)


def _build(config: PodConfig, request: Request) -> PodCache:
    return windowed_cache(LambdaLayer, config, request, *sinks_and_recents(request))


METHOD = Method(
    name="lm_infinite",
    paper="LM-Infinite (Han et al., 2024)",
    frees="keys and values of all tokens but the first and the recent ones",
    axis="selection",
    build=_build,
    parameters={"num_sink_tokens": (4, "first tokens that are always kept (tokens)")},
    takes_budget=True,
    refuses=WINDOW_REFUSES_POD,
)
