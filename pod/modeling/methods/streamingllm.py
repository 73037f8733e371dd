"""StreamingLLM (Xiao et al., 2024): first tokens as attention sinks, a window of recent tokens, nothing between.

Keys are stored before RoPE and rotated at their index *in the cache*: a sink is never farther than the window is wide, and
the input may be unbounded. The prompt is masked the same way, which makes the result independent of its chunking.
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


class StreamingLayer(WindowedLayer):
    """Behind a full window every query has the last index of the cache, ``n_s + n_r - 1``, towards the sinks."""

    def sink_distances(self, positions: Tensor) -> Tensor:
        sinks = torch.arange(self.num_sink_tokens, device=positions.device)
        return (self.limit - 1 - sinks).expand(positions.shape[0], -1)

    def sink_logits(self, q: Tensor, keys: Tensor, past: int, turn) -> Tensor:
        return self.products(
            turn(q, range(self.limit - 1, self.limit)), turn(keys, range(self.num_sink_tokens))
        )


def _build(config: PodConfig, request: Request) -> PodCache:
    return windowed_cache(StreamingLayer, config, request, *sinks_and_recents(request))


METHOD = Method(
    name="streamingllm",
    paper="StreamingLLM (Xiao et al., 2024)",
    frees="keys and values of all tokens but the first and the recent ones",
    axis="selection",
    build=_build,
    parameters={"num_sink_tokens": (4, "first tokens that are always kept (tokens)")},
    takes_budget=True,
    refuses=WINDOW_REFUSES_POD,
)
