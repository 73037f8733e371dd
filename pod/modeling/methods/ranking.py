"""SnapKV's ranking of tokens by the attention of the last queries, and its parameters."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods.base import Parameter, Request

_POOLS = {"avg": F.avg_pool1d, "max": F.max_pool1d}


def snapkv_slots(queries: Tensor, keys: Tensor, budget: int, kernel: int, pool: str, scale: float) -> Tensor:
    """Slots to keep ``[B, H, budget]`` of ``[B, H, n, d]`` keys, by the prompt's last queries ``[B, Hq, w, d]``.

    Kept are the last ``w`` tokens and, of those before them, the best by their attention from these queries: summed
    over queries, averaged over the query heads of a group, pooled over neighbours.
    """
    n, w = keys.shape[2], queries.shape[2]
    scores = attention_column_sums(queries, keys, scale=scale)[..., : n - w]
    scores = scores.unflatten(1, (keys.shape[1], -1)).mean(2)
    scores = _POOLS[pool](scores, kernel, stride=1, padding=kernel // 2)
    recent = torch.arange(n - w, n, device=keys.device).expand(*keys.shape[:2], -1)
    return torch.cat((best_slots(scores, budget - w), recent), dim=-1)


def best_slots(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best slots of ``[…, n]`` in ascending order; of equal scores the lower slot wins."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values


def check_ranking(request: Request) -> None:
    """Raise ``ValueError`` for values that SnapKV's ranking cannot use."""
    window, kernel = request.params["window"], request.params["kernel"]
    if kernel % 2 == 0:
        raise ValueError(f"{request.spec}: kernel = {kernel} must be odd")
    if request.tokens <= window:
        raise ValueError(
            f"{request.spec}: budget = {request.tokens} must exceed window = {window}: raise the budget"
        )


def ranking_parameters(window: int, kernel: int, pool: str) -> dict:
    """Declarations of SnapKV's parameters with these defaults."""
    return {
        "window": (window, "observation window at the end of the prompt, always kept (tokens)", 1),
        "kernel": (kernel, "width of the pooling over neighbouring tokens (tokens)", 1),
        "pool": Parameter(pool, "avg or max", choices=tuple(_POOLS)),
    }


class LastQueries:
    """The last ``count`` queries of a running prompt, which a layer names among its stores."""

    def __init__(self, count: int):
        self.count = count
        self.observed: Tensor | None = None  # [B, Hq, <= count, d]

    def add(self, q: Tensor) -> None:
        """Of a chunk ``[B, Hq, m, d]``."""
        queries = q if self.observed is None else torch.cat((self.observed, q), dim=2)
        self.observed = queries[:, :, max(0, queries.shape[2] - self.count) :].clone()

    def take(self) -> Tensor | None:
        """What was observed, which is forgotten."""
        queries, self.observed = self.observed, None
        return queries

    def tensors(self) -> list[Tensor]:
        return [] if self.observed is None else [self.observed]

    def select_rows(self, index: Tensor) -> None:
        if self.observed is not None:
            self.observed = self.observed.index_select(0, index.to(self.observed.device))
