"""SnapKV (Li et al., 2024): at the end of the prompt each KV head keeps the tokens that the prompt's end attends to.

``exact`` prefill: the whole prompt is held until it ends, however it is chunked, then every layer keeps ``budget``
tokens: the last ``window`` ones and the best of the rest by the pooled sum of their attention. Decoded tokens are all
kept. In ``streaming`` prefill every chunk of the prompt counts as its end.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.modeling.cache import PodCache, Step
from pod.modeling.config import PodConfig
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.held import HeldLayer, best_slots
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of
from pod.modeling.statistics import attention_column_sums
from pod.modeling.stores import NATIVE, Codec

_POOLS = {"avg": F.avg_pool1d, "max": F.max_pool1d}


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
            self.keep(self.choose(queries, self.lead_keys.read(self.held)))

    def choose(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Slots to keep ``[B, H, budget]`` of ``[B, H, n, d]`` keys, by the prompt's last queries ``[B, Hq, w, d]``."""
        n = keys.shape[2]
        scores = attention_column_sums(queries, keys, scale=self.scale)[..., : n - self.window]
        scores = scores.unflatten(1, (keys.shape[1], -1)).mean(2)  # of the group, before pooling
        scores = _POOLS[self.pool](scores, self.kernel, stride=1, padding=self.kernel // 2)
        recent = torch.arange(n - self.window, n, device=keys.device).expand(*keys.shape[:2], -1)
        return torch.cat((best_slots(scores, self.budget - self.window), recent), dim=-1)


def check_ranking(name: str, budget: int, window: int, kernel: int, pool: str) -> None:
    """Raise ``ValueError`` for values that SnapKV's ranking cannot use."""
    if pool not in _POOLS:
        raise ValueError(f"{name}: pool = {pool!r}; choose one of {', '.join(_POOLS)}")
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"{name}: kernel = {kernel} must be odd and positive")
    if window < 1 or budget <= window:
        raise ValueError(f"{name}: budget = {budget} must exceed window = {window} >= 1: raise the budget")


def ranking_parameters(window: int, kernel: int, pool: str) -> dict:
    """Declarations of SnapKV's parameters with these defaults."""
    return {
        "window": (window, "observation window at the end of the prompt, always kept (tokens)"),
        "kernel": (kernel, "width of the pooling over neighbouring tokens (tokens)"),
        "pool": (pool, "avg or max"),
    }


def _build(config: PodConfig, request: Request) -> PodCache:
    values = {name: request.params[name] for name in ("window", "kernel", "pool")}
    check_ranking("snapkv", request.tokens, **values)

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
