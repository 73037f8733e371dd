"""Local window: the prompt is read with full attention, then only the most recent ``budget`` tokens stay, and slide on.

A decoded token attends to what is held and to itself before the oldest token leaves. Keys keep their positions. A running
prompt is held whole, beside the window, until it ends; in ``streaming`` prefill, until its chunk ends.
"""

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.sliding import SlidingLayer
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, cache_of
from pod.modeling.methods.windowed import WINDOW_REFUSES_POD
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step


class LocalLayer(SlidingLayer):
    """No sinks, and a window of one size."""

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__(config, 0, request.budget, request.codec)

    def settle(self, step: Step) -> None:
        if step.ends_prompt and not step.is_decode:
            self.tokens.trim(self.num_recent_tokens)
        super().settle(step)


METHOD = Method(
    name="local_window",
    paper="Local window, a baseline of the D2O paper (Wan et al., 2024)",
    frees="keys and values of all tokens but the recent ones, once the prompt has ended",
    axis="selection",
    build=cache_of(LocalLayer),
    parameters=PREFILL_PARAMETERS,
    takes_budget=True,
    refuses=WINDOW_REFUSES_POD,
)
