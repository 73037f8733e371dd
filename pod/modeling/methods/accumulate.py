"""What methods that add up attention share: sums per held token, without ``n x n``, and the choice of what stays.

The score of a token in a KV head is the attention that it got from every query that could see it (its own included),
averaged over the query heads of the group. The sums of tokens that stay survive evictions and later prompts.
"""

from fractions import Fraction
from math import floor

import torch
from torch import Tensor

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods.held import HeldLayer
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import numbers


class AccumulatingLayer(HeldLayer):
    """Keeps ``statistics["attention"]``, ``[B, H, held]`` in at least fp32: the sum of attention over queries."""

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        sums = attention_column_sums(q, self.lead_keys.read(self.held), scale=self.scale)
        self.accumulate("attention", self.group_mean(sums))

    def observe_decode(self, weights: Tensor, step: Step) -> None:
        self.accumulate("attention", weights.mean(2))

    def group_mean(self, sums: Tensor) -> Tensor:
        """``[B, Hq, n]`` to ``[B, H, n]``."""
        return sums.unflatten(1, (-1, self.groups)).mean(2)

    def accumulate(self, name: str, addition: Tensor) -> None:
        """Add a new tensor ``[B, H, held]`` to a statistic; new tokens, and a new statistic, start at 0."""
        if name in self.statistics:
            known = self.statistics[name]
            addition[..., : known.shape[2]].add_(known)
        self.statistics[name] = addition


def choose_slots(scores: Tensor, count: int, num_first: int, num_last: int) -> tuple[Tensor, Tensor]:
    """Keep the first and the last slots, and of those between the best.

    Args:
        scores: ``[B, H, n]``; in a tie the lower slot stays.
        count: slots to keep, ``num_first + num_last <= count < n``.

    Returns:
        Slots kept ``[B, H, count]``, ascending, and slots dropped ``[B, H, n - count]``, worst last.
    """
    n = scores.shape[2]
    between = scores[..., num_first : n - num_last]
    if n - count == 1:
        return _drop_one(between, num_first, n)
    order = between.argsort(dim=-1, descending=True, stable=True) + num_first
    chosen, dropped = order.split((count - num_first - num_last, n - count), dim=-1)
    slots = torch.arange(n, device=scores.device).expand(*scores.shape[:2], -1)
    kept = torch.cat((slots[..., :num_first], chosen.sort(dim=-1).values, slots[..., n - num_last :]), dim=-1)
    return kept, dropped


def _drop_one(between: Tensor, num_first: int, n: int) -> tuple[Tensor, Tensor]:
    """``choose_slots`` of a decode step: the lowest score goes, of equally low ones the last; no sorting."""
    last = between.shape[2] - 1
    worst = num_first + last - between.flip(-1).argmin(dim=-1, keepdim=True)
    slots = numbers(n - 1, between.device)
    return slots + (slots >= worst), worst


def round_half_up(share: float, count: int) -> int:
    """``share`` of ``count`` tokens as a number of tokens; 0.3 means three tenths, so that 0.3 of 5 tokens are 2."""
    return floor(Fraction(str(share)) * count + Fraction(1, 2))
