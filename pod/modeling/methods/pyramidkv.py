"""PyramidKV (Cai et al., 2024): SnapKV with budgets that fall linearly from the first layer to the last.

The first layer cannot hold more than the tokens seen: where its share exceeds them, the line is flatter, down to SnapKV's
equal budgets when nothing can be dropped, and all layers together hold what they were given. (Of the two implementations by
the authors' group and by kvpress, the latter flattens in this way; the former jumps to equal budgets below twice the budget.)
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from typing import Any

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.ranking import check_ranking, ranking_parameters
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.shared_selection import shared_cache
from pod.modeling.methods.snapkv import SnapLayer
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step


def layer_budgets(budget: int, num_layers: int, beta: int, smallest: int, seen: int) -> list[int]:
    """Tokens per layer, first layer first: an arithmetic sequence with mean ``budget`` down to about ``budget / beta``.

    The last layer gets at least ``smallest`` tokens, the first one at most ``seen``, the tokens seen when the prompt ends; the
    mean stays. Cumulative sums are rounded, so that all layers together get exactly ``num_layers * budget``.
    """
    last = max(smallest, _nearest(Fraction(budget, beta)))
    first = min(2 * budget - last, max(seen, budget))
    if num_layers == 1 or first <= budget:
        return [budget] * num_layers
    fall = Fraction(2 * (first - budget), num_layers - 1)
    ends = map(
        _nearest, accumulate((first - fall * layer for layer in range(num_layers)), initial=Fraction(0))
    )
    return [end - start for start, end in pairwise(ends)]


def block_budgets(
    budgets: Sequence[int], budget: int, window: int, lead: tuple[tuple[int, ...], ...]
) -> list[list[int]]:
    """Tokens ``[L][H]`` when blocks share a selection: the lead layer's budget, rescaled to the same total per head.

    No lead is above its layer, so the budgets of the leads add up to the total or more: none grows beyond the tokens seen.
    """
    spare = len(lead) * (budget - window)
    totals = [sum(budgets[layer[head]] - window for layer in lead) for head in range(len(lead[0]))]
    return [
        [window + (budgets[own] - window) * spare // total for own, total in zip(layer, totals, strict=True)]
        for layer in lead
    ]


def _nearest(x: Fraction) -> int:
    """The nearest integer, halves up."""
    return floor(x + Fraction(1, 2))


class PyramidLayer(SnapLayer):
    """SnapKV in one layer, with this layer's budget for the tokens seen.

    Args:
        pyramid: ``budget``, ``num_layers``, ``beta`` and ``smallest`` of ``layer_budgets``.
        values: ``window``, ``kernel``, ``pool`` and ``codec`` of ``SnapLayer``.
    """

    def __init__(self, config: PodConfig, layer_idx: int, pyramid: dict[str, int], **values: Any):
        super().__init__(config, layer_idx, pyramid["budget"], **values)
        self.pyramid = pyramid

    def evict(self, step: Step) -> None:
        if step.ends_prompt:
            if step.sizes is None:
                step.sizes = layer_budgets(**self.pyramid, seen=step.max_length)
            self.budget = step.sizes[self.layer_idx]
        super().evict(step)


def _build(config: PodConfig, request: Request) -> PodCache:
    values = {name: request.params[name] for name in ("window", "kernel", "pool")}
    check_ranking("pyramidkv", request.tokens, **values)
    beta = request.params["beta"]
    if beta < 1:
        raise ValueError(f"pyramidkv: beta = {beta} must be at least 1")
    pyramid = {
        "budget": request.tokens,
        "num_layers": config.num_hidden_layers,
        "beta": beta,
        "smallest": values["window"] + 1,
    }
    if request.layout == "pod":
        lead = config.sharing_plan.lead

        def budgets(seen: int) -> list[list[int]]:
            return block_budgets(layer_budgets(**pyramid, seen=seen), request.tokens, values["window"], lead)

        def alike(layer: int, head: int) -> tuple:
            return lead[layer][head], *sorted(row[head] for row in lead)

        return shared_cache(config, request, budgets, alike, chunks_of(request))

    def make_layer(config: PodConfig, layer_idx: int) -> PyramidLayer:
        return PyramidLayer(config, layer_idx, pyramid, codec=request.codec, **values)

    return GroupedCache(config, make_layer, request.spec, chunks=chunks_of(request))


METHOD = Method(
    name="pyramidkv",
    paper="PyramidKV (Cai et al., 2024)",
    frees="prompt tokens that the end of the prompt does not attend to, more of them in higher layers",
    axis="selection",
    build=_build,
    parameters=ranking_parameters(window=8, kernel=7, pool="max")
    | {"beta": (20, "mean budget over the last layer's")}
    | PREFILL_PARAMETERS,
    takes_budget=True,
)
