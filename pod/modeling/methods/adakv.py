"""Ada-KV (Feng et al., 2024): SnapKV with one budget per layer, which its KV heads share by their scores.

When a prompt ends, SnapKV's scores of all heads of a layer are ranked together. A head that has ``f`` of the
layer's best ``heads · budget`` tokens keeps its best ``(1 - safeguard) f + safeguard · budget`` tokens
(Algorithms 1 and 2; in the authors' code the safeguard is ``floor_alpha``). Cumulative sums are rounded, so
that all heads together hold exactly ``heads · budget`` tokens. Heads hold different numbers of tokens,
without padding to the longest.
"""

from fractions import Fraction

import torch
from torch import Tensor

from pod.modeling.methods.base import Builder, cache_of, round_sums
from pod.modeling.methods.ranking import best_slots
from pod.modeling.methods.shared_selection import SharedSelectionLayer
from pod.modeling.model.step import Step


class AdaLayer(SharedSelectionLayer):
    """A layer for a single row, because rows would give their heads different numbers of tokens.

    For the same reason, every head is a head group of its own.
    """

    def alike(self, head: int) -> int:
        return head

    def choose(self, step: Step) -> list[Tensor | None]:
        held = [group.held for group in self.head_groups]
        total = self.budget * len(self.head_groups)
        if sum(held) <= total:
            return [None] * len(held)
        scores = [group.scores(step) for group in self.head_groups]
        owners = torch.arange(len(held)).repeat_interleave(torch.tensor(held))
        best = best_slots(torch.cat([x.flatten() for x in scores]), total).cpu()
        found = owners[best].bincount(minlength=len(held)).tolist()
        safeguard = Fraction(str(self.params["safeguard"]))
        sizes = round_sums((1 - safeguard) * own + safeguard * self.budget for own in found)
        return [best_slots(x, size) for x, size in zip(scores, sizes, strict=True)]


BUILDERS = {"adakv": Builder(build=cache_of(AdaLayer, rowwise=True))}
