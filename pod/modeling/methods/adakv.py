"""Ada-KV (Feng et al., 2024): SnapKV whose KV heads share the budget of their layer by how much of its best they hold.

When a prompt ends, SnapKV's scores of all heads of a layer are ranked together. A head that has ``f`` of the layer's best
``heads · budget`` tokens keeps its best ``(1 - safeguard) f + safeguard · budget`` (Algorithms 1 and 2; in the authors' code the
safeguard is ``floor_alpha``). Cumulative sums are rounded, so that all heads together hold what they were given. Heads hold
different numbers of tokens and nothing else.
"""

from fractions import Fraction
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request, round_half_up
from pod.modeling.methods.ranking import best_slots, ranking_parameters
from pod.modeling.methods.shared_selection import SharedSelectionLayer
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, cache_of
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step


def head_budgets(found: list[int], held: list[int], safeguard: Fraction) -> list[int]:
    """Tokens of each head that has ``found`` of the layer's best tokens; never more than it holds."""
    equal = Fraction(sum(found), len(found))
    sizes = (safeguard * equal + (1 - safeguard) * count for count in found)
    ends = map(round_half_up, accumulate(sizes, initial=Fraction(0)))
    return [min(end - start, most) for (start, end), most in zip(pairwise(ends), held, strict=True)]


class AdaLayer(SharedSelectionLayer):
    """Sees one row at a time, because what a head gets depends on what it attends to. Every head is a bank of its own."""

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.safeguard = Fraction(str(request.params["safeguard"]))
        super().__init__(config, layer_idx, request)

    def alike(self, head: int) -> int:
        return head

    def choose(self, step: Step) -> list[Tensor | None]:
        held, total = [bank.held for bank in self.banks], self.budget * len(self.banks)
        scores = [bank.scores(step.max_length) if sum(held) > total else None for bank in self.banks]
        ranked = [x.flatten() for x in scores if x is not None]
        if not ranked:
            return [None] * len(held)
        owners = torch.arange(len(held)).repeat_interleave(torch.tensor(held))
        best = best_slots(torch.cat(ranked), total).cpu()
        found = owners[best].bincount(minlength=len(held)).tolist()
        sizes = head_budgets(found, held, self.safeguard)
        pairs = zip(scores, sizes, held, strict=True)
        return [None if x is None or size == most else best_slots(x, size) for x, size, most in pairs]


METHOD = Method(
    name="adakv",
    paper="Ada-KV (Feng et al., 2024), Algorithms 1 and 2, with SnapKV's scores",
    frees="prompt tokens that the end of the prompt does not attend to, fewer of them in heads that attend to many",
    axis="selection",
    build=cache_of(AdaLayer, rowwise=True),
    parameters=ranking_parameters(window=32, kernel=7, pool="max")
    | {"safeguard": (0.2, "share of the budget that every head has, whatever the others need", 0, 1)}
    | PREFILL_PARAMETERS,
    takes_budget=True,
    refuses={
        "pod": "a lead that wins tokens from the heads of its layer would win them in every layer of its block, where none of the "
        "other heads has lost them"
    },
)
