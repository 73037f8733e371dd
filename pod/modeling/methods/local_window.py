"""Local window: the prompt is read with full attention, then only the most recent ``budget`` tokens stay, and slide on.

A decoded token attends to what is held and to itself before the oldest token leaves. Keys keep their positions. A running
prompt is held whole, beside the window, until it ends; in ``streaming`` prefill, until its chunk ends.
"""

from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.sliding import SlidingLayer
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of
from pod.modeling.methods.windowed import WINDOW_REFUSES_POD
from pod.modeling.shipped.attend import Tokens
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step


class LocalLayer(SlidingLayer):
    """No sinks, and a window of one size."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope.pair(q, k)
        if step.is_decode:
            return self.tokens.attend_decode(q, Tokens(k, v), self.scale)[0]
        return self.tokens.attend_prompt(q, Tokens(k, v), step)

    def settle(self, step: Step) -> None:
        if step.ends_prompt and not step.is_decode:
            self.tokens.trim(self.num_recent_tokens)
        super().settle(step)


def _build(config: PodConfig, request: Request) -> PodCache:
    def make_layer(config: PodConfig, layer_idx: int) -> LocalLayer:
        return LocalLayer(config, 0, request.tokens, request.codec)

    return GroupedCache(config, make_layer, request.spec, chunks=chunks_of(request))


METHOD = Method(
    name="local_window",
    paper="Local window, a baseline of the D2O paper (Wan et al., 2024)",
    frees="keys and values of all tokens but the recent ones, once the prompt has ended",
    axis="selection",
    build=_build,
    parameters=PREFILL_PARAMETERS,
    takes_budget=True,
    refuses=WINDOW_REFUSES_POD,
)
