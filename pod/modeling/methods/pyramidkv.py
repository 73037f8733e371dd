"""PyramidKV (Cai et al., 2024): SnapKV with budgets that fall linearly from the first layer to the last."""

from fractions import Fraction
from itertools import pairwise
from math import floor

from pod.modeling.cache import PodCache
from pod.modeling.config import PodConfig
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.ranking import check_ranking, ranking_parameters
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.shared_selection import shared_cache
from pod.modeling.methods.snapkv import SnapLayer
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of


def layer_budgets(budget: int, num_layers: int, beta: int, smallest: int) -> list[int]:
    """Tokens per layer, first layer first: an arithmetic sequence with mean ``budget`` down to about ``budget / beta``.

    The last layer gets at least ``smallest`` tokens. Cumulative sums are rounded, so that all layers together get
    exactly ``num_layers * budget``.
    """
    last = max(smallest, _nearest(Fraction(budget, beta)))
    if num_layers == 1 or last >= budget:
        return [budget] * num_layers
    first = 2 * budget - last
    falls = [first - Fraction((first - last) * layer, num_layers - 1) for layer in range(num_layers)]
    ends = [_nearest(sum(falls[:layer], Fraction(0))) for layer in range(num_layers + 1)]
    return [end - start for start, end in pairwise(ends)]


def block_budgets(
    budgets: list[int], budget: int, window: int, lead: tuple[tuple[int, ...], ...]
) -> list[list[int]]:
    """Tokens ``[L][H]`` when blocks share a selection: the lead layer's budget, rescaled to the same total per head."""
    spare = len(budgets) * (budget - window)
    rows = []
    for layer in lead:
        totals = [sum(budgets[other[head]] - window for other in lead) for head in range(len(layer))]
        rows.append(
            [window + (budgets[own] - window) * spare // totals[head] for head, own in enumerate(layer)]
        )
    return rows


def _nearest(x: Fraction) -> int:
    """The nearest integer, halves up."""
    return floor(x + Fraction(1, 2))


def _build(config: PodConfig, request: Request) -> PodCache:
    values = {name: request.params[name] for name in ("window", "kernel", "pool")}
    check_ranking("pyramidkv", request.tokens, **values)
    beta = request.params["beta"]
    if beta < 1:
        raise ValueError(f"pyramidkv: beta = {beta} must be at least 1")
    budgets = layer_budgets(request.tokens, config.num_hidden_layers, beta, values["window"] + 1)

    if request.layout == "pod":
        lead = config.sharing_plan.lead
        per_head = block_budgets(budgets, request.tokens, values["window"], lead)
        return shared_cache(config, request, per_head, chunks_of(request))

    def make_layer(config: PodConfig, layer_idx: int) -> SnapLayer:
        return SnapLayer(config, layer_idx, budgets[layer_idx], codec=request.codec, **values)

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
