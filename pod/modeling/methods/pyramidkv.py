"""PyramidKV (Cai et al., 2024): SnapKV with budgets that fall linearly from the first layer to the last."""

from itertools import pairwise

from pod.modeling.cache import PodCache
from pod.modeling.config import PodConfig
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.snapkv import SnapLayer, check_ranking, ranking_parameters
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of


def layer_budgets(budget: int, num_layers: int, beta: int, smallest: int) -> list[int]:
    """Tokens per layer, first layer first: an arithmetic sequence with mean ``budget`` down to about ``budget / beta``.

    The last layer gets at least ``smallest`` tokens. Cumulative sums are rounded, so that all layers together get
    exactly ``num_layers * budget``.
    """
    last = max(smallest, round(budget / beta))
    if num_layers == 1 or last >= budget:
        return [budget] * num_layers
    first = 2 * budget - last
    ends = [0.0]
    for layer in range(num_layers):
        ends.append(ends[-1] + first - (first - last) * layer / (num_layers - 1))
    return [round(end) - round(start) for start, end in pairwise(ends)]


def _build(config: PodConfig, request: Request) -> PodCache:
    values = {name: request.params[name] for name in ("window", "kernel", "pool")}
    check_ranking("pyramidkv", request.tokens, **values)
    beta = request.params["beta"]
    if beta < 1:
        raise ValueError(f"pyramidkv: beta = {beta} must be at least 1")
    budgets = layer_budgets(request.tokens, config.num_hidden_layers, beta, values["window"] + 1)

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
