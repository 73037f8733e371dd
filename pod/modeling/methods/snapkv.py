"""SnapKV (Li et al., 2024): at the end of the prompt each KV head keeps the tokens that the prompt's end attends to.

``exact`` prefill: the whole prompt is held until it ends, however it is chunked, then every layer keeps ``budget``
tokens: the last ``window`` ones and the best of the rest by the pooled sum of their attention. Decoded tokens are all
kept. In ``streaming`` prefill every chunk of the prompt counts as its end.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.held import HeldLayer
from pod.modeling.methods.ranking import check_ranking, ranking_parameters, snapkv_slots
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.shared_selection import shared_cache
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import NATIVE, Codec


class SnapLayer(HeldLayer):
    """Keeps the last queries of the running prompt to rank by.

    Args:
        budget: tokens of a KV head in this layer; window, kernel, pool: see the method's parameters.
    """

    def __init__(
        self,
        config: PodConfig,
        layer_idx: int,
        budget: int,
        window: int,
        kernel: int,
        pool: str,
        codec: Codec = NATIVE,
    ):
        self.budget, self.window, self.kernel, self.pool = budget, window, kernel, pool
        super().__init__(config, layer_idx, codec)

    def clear(self) -> None:
        super().clear()
        self.observed: Tensor | None = None  # last queries of the unfinished prompt, [B, Hq, <= window, d]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().parts()
        if self.observed is not None:
            yield "bookkeeping", self.observed

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        if self.observed is not None:
            self.observed = self.observed.index_select(0, index.to(self.observed.device))

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        queries = q if self.observed is None else torch.cat((self.observed, q), dim=2)
        self.observed = queries[:, :, -self.window :].clone()

    def evict(self, step: Step) -> None:
        if not step.ends_prompt or self.observed is None:
            return
        queries, self.observed = self.observed, None
        if self.held > self.budget:
            keys = self.lead_keys.read(self.held)
            self.keep(snapkv_slots(queries, keys, self.budget, self.kernel, self.pool, self.scale))


def _build(config: PodConfig, request: Request) -> PodCache:
    values = {name: request.params[name] for name in ("window", "kernel", "pool")}
    check_ranking("snapkv", request.tokens, **values)

    if request.layout == "pod":
        budgets = [[request.tokens] * config.num_key_value_heads] * config.num_hidden_layers
        return shared_cache(config, request, lambda seen: budgets, lambda layer, head: 0, chunks_of(request))

    def make_layer(config: PodConfig, layer_idx: int) -> SnapLayer:
        return SnapLayer(config, layer_idx, request.tokens, codec=request.codec, **values)

    return GroupedCache(config, make_layer, request.spec, chunks=chunks_of(request))


METHOD = Method(
    name="snapkv",
    paper="SnapKV (Li et al., 2024)",
    frees="prompt tokens that the end of the prompt does not attend to; decoded tokens stay",
    axis="selection",
    build=_build,
    parameters=ranking_parameters(window=32, kernel=5, pool="avg") | PREFILL_PARAMETERS,
    takes_budget=True,
)
