"""PyramidKV (Cai et al., 2024): SnapKV with budgets that fall linearly from the first layer to the last.

The first layer cannot hold more than the tokens seen. If its budget exceeds them, the line is made flatter,
down to SnapKV's equal budgets when nothing can be dropped. The mean over the layers is always the budget.
(kvpress's implementation flattens in this way. That of the authors' group jumps to equal budgets for prompts
below twice the budget.)
"""

from collections.abc import Sequence
from fractions import Fraction

from pod.modeling.methods.base import Builder, cache_of, round_half_up, round_sums
from pod.modeling.methods.shared_selection import SharedSelectionLayer, free_own_keys
from pod.modeling.model.sharing import Lead


def layer_budgets(budget: int, num_layers: int, beta: int, smallest: int, seen: int) -> list[int]:
    """Tokens per layer, first layer first: an arithmetic sequence that falls to about ``budget / beta``.

    Its mean is always ``budget``. The last layer gets at least ``smallest`` tokens. The first layer gets at
    most ``seen``, the tokens seen when the prompt ends. Cumulative sums are rounded, so that all layers
    together get exactly ``num_layers * budget``.
    """
    last = max(smallest, round_half_up(Fraction(budget, beta)))
    first = min(2 * budget - last, max(seen, budget))
    if num_layers == 1 or first <= budget:
        return [budget] * num_layers
    fall = Fraction(2 * (first - budget), num_layers - 1)
    return round_sums(first - fall * layer for layer in range(num_layers))


def block_budgets(budgets: Sequence[int], budget: int, window: int, lead: Lead) -> list[list[int]]:
    """The budget ``[L][H]`` of each layer and KV head in tokens, under a sharing plan.

    A head gets the budget of the layer that it follows. The result is rescaled so that over all layers each
    KV head holds as many tokens as without sharing. Without sharing, it is the layer's own budget. Heads that
    keep their windows get ``window`` tokens here, which nothing reads.

    No lead is above its followers, and budgets fall from layer to layer. So before rescaling, the budgets add
    up to the total or more, and rescaling makes no budget larger than the tokens seen.

    Args:
        budgets: from ``layer_budgets``.
        budget: mean of the budgets.
        window: tokens of the observation window, which always stay.
        lead: the plan, ``[L][H]``.
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
    """A layer with SnapKV's ranking, in which each block keeps as many tokens as the layer of its lead."""

    def alike(self, head: int) -> tuple:
        return self.lead[self.layer_idx][head], *(row[head] for row in self.lead if row[head] is not None)

    def budgets(self, seen: int) -> list[list[int]]:
        window = self.params["window"]
        sizes = layer_budgets(self.budget, len(self.lead), self.params["beta"], window + 1, seen)
        return block_budgets(sizes, self.budget, window, self.lead)


BUILDERS = {"pyramidkv": Builder(build=cache_of(PyramidLayer, after_layers=free_own_keys))}
