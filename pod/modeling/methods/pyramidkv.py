"""PyramidKV (Cai et al., 2024): SnapKV with budgets that fall linearly from the first layer to the last.

The first layer cannot hold more than the tokens seen: where its share exceeds them, the line is flatter, down to SnapKV's
equal budgets when nothing can be dropped, and all layers together hold what they were given. (Of the two implementations by
the authors' group and by kvpress, the latter flattens in this way; the former jumps to equal budgets below twice the budget.)
"""

from collections.abc import Sequence
from fractions import Fraction

from pod.modeling.methods.base import PREFILL_PARAMETERS, Method, cache_of, round_half_up, round_sums
from pod.modeling.methods.ranking import ranking_parameters
from pod.modeling.methods.shared_selection import SharedSelectionLayer, free_own_keys
from pod.modeling.shipped.sharing import Lead


def layer_budgets(budget: int, num_layers: int, beta: int, smallest: int, seen: int) -> list[int]:
    """Tokens per layer, first layer first: an arithmetic sequence with mean ``budget`` down to about ``budget / beta``.

    The last layer gets at least ``smallest`` tokens, the first one at most ``seen``, the tokens seen when the prompt ends; the
    mean stays. Cumulative sums are rounded, so that all layers together get exactly ``num_layers * budget``.
    """
    last = max(smallest, round_half_up(Fraction(budget, beta)))
    first = min(2 * budget - last, max(seen, budget))
    if num_layers == 1 or first <= budget:
        return [budget] * num_layers
    fall = Fraction(2 * (first - budget), num_layers - 1)
    return round_sums(first - fall * layer for layer in range(num_layers))


def block_budgets(budgets: Sequence[int], budget: int, window: int, lead: Lead) -> list[list[int]]:
    """Tokens ``[L][H]``: the lead layer's budget, rescaled to the same total per head; without sharing the layer's own. Heads
    that keep their windows have none.

    No lead is above its layer, so the budgets of the leads add up to the total or more: none grows beyond the tokens seen.
    """
    sizes = [[0 if own is None else budgets[own] - window for own in layer] for layer in lead]
    columns = list(zip(*lead, strict=True))
    spare = [(len(owners) - owners.count(None)) * (budget - window) for owners in columns]
    totals = [max(1, sum(sizes_of_head)) for sizes_of_head in zip(*sizes, strict=True)]
    return [
        [window + size * most // total for size, most, total in zip(layer, spare, totals, strict=True)]
        for layer in sizes
    ]


class PyramidLayer(SharedSelectionLayer):
    """SnapKV's ranking, by which each block keeps as many tokens as its lead's layer."""

    def alike(self, head: int) -> tuple:
        return self.lead[self.layer_idx][head], *(row[head] for row in self.lead if row[head] is not None)

    def budgets(self, seen: int) -> list[list[int]]:
        window = self.params["window"]
        sizes = layer_budgets(self.budget, len(self.lead), self.params["beta"], window + 1, seen)
        return block_budgets(sizes, self.budget, window, self.lead)


METHOD = Method(
    name="pyramidkv",
    paper="PyramidKV (Cai et al., 2024)",
    frees="prompt tokens that the end of the prompt does not attend to, more of them in higher layers",
    build=cache_of(PyramidLayer, after_layers=free_own_keys),
    parameters=ranking_parameters(window=8, kernel=7, pool="max")
    | {"beta": (20, "mean budget over the last layer's", 1)}
    | PREFILL_PARAMETERS,
    takes_budget=True,
)
