"""H2O (Zhang et al., 2023): recent tokens, and those that got the most attention so far (the heavy hitters).

When a prompt ends, and after each decoded token, every KV head drops the tokens with the least accumulated attention
(section 4, Algorithm 1) until ``budget`` are left, the most recent ones apart. Attention is accumulated over the prompt and
over decoding, mean over the query heads of a group; rows of a batch never mix. Keys keep their positions.
"""

from pod.modeling.methods.accumulate import REFUSES_POD, AccumulatingLayer, choose_slots
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, cache_of
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step


class H2OLayer(AccumulatingLayer):
    """Heavy hitters and recent tokens, ``budget`` in all."""

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__(config, layer_idx, request.codec)
        budget, recents = request.budget, request.params["num_recent_tokens"]
        recents = budget // 2 if recents is None else recents
        if not 1 <= recents < budget:
            raise ValueError(
                f"h2o: budget = {budget} must be at least 2 and more than num_recent_tokens = {recents}: one token is no recent one"
            )
        self.budget, self.recents = budget, recents

    def evict(self, step: Step) -> None:
        if self.held > self.budget:
            self.keep(*choose_slots(self.statistics["attention"], self.budget, 0, self.recents))


METHOD = Method(
    name="h2o",
    paper="H2O (Zhang et al., 2023)",
    frees="keys and values of all tokens but the recent ones and those with the most accumulated attention",
    axis="selection",
    build=cache_of(H2OLayer),
    parameters={
        "num_recent_tokens": (None, "last tokens, always kept; None = half of the budget (tokens)", 1),
    }
    | PREFILL_PARAMETERS,
    takes_budget=True,
    refuses=REFUSES_POD,
)
