"""``Ranking``: how leads rank the tokens that they hold when a prompt ends; and SnapKV's ranking."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods.base import Request
from pod.modeling.model.config import PodConfig
from pod.modeling.model.kv_buffer import take_rows_of
from pod.modeling.model.step import Step

_POOLS = {"avg": F.avg_pool1d, "max": F.max_pool1d}


def best_slots(scores: Tensor, count: int) -> Tensor:
    """The slots ``[…, count]`` with the largest scores ``[…, n]``, in ascending order.

    If scores are equal, the lower slot wins. For example, the two best slots of the scores 5, 1, 7 are 0, 2.
    """
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values


class Ranking:
    """Observes the queries of one prompt, and then scores the tokens that leads hold when it ends.

    A ranking is made anew for each prompt. Its tensors are all ``[B, …]``. Their bytes count as bookkeeping.
    """

    before_rope = False
    """Whether queries are observed before their rotation."""

    def observe(self, q: Tensor, step: Step) -> None:
        """Take note of the queries ``[B, Hq, m, d]`` of a chunk of the prompt."""
        raise NotImplementedError

    def scores(self, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        """The scores ``[B, H, n]`` of the tokens held when the prompt ends.

        The tokens with the largest scores are kept. A score is infinite for a token that stays in any case.

        Args:
            keys: ``[B, H, n, d]``, rotated.
            values: ``[B, H, n, d]``.
            step: the last pass of the prompt.
        """
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """All tensors that are attributes."""
        return [x for x in vars(self).values() if isinstance(x, Tensor)]

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        take_rows_of(self, index)


class LastQueries(Ranking):
    """Keeps the last ``count`` queries of a prompt, for subclasses and others that score with them.

    Attributes:
        observed: ``[B, Hq, <= count, d]``. None before the first chunk.
    """

    def __init__(self, count: int):
        self.count = count
        self.observed: Tensor | None = None  # [B, Hq, <= count, d]

    def observe(self, q: Tensor, step: Step) -> None:
        queries = q if self.observed is None else torch.cat((self.observed, q), dim=2)
        self.observed = queries[:, :, max(0, queries.shape[2] - self.count) :].clone()


class EndAttention(LastQueries):
    """SnapKV's ranking, by the attention from the last queries of a prompt.

    The tokens of these queries stay. The tokens before them rank by the attention from these queries, summed
    over the queries, averaged over the query heads of a group, and pooled over neighbouring tokens.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.kernel = request.params["kernel"]
        self.pool = request.params["pool"]
        if self.kernel % 2 == 0:
            raise ValueError(f"{request.spec}: kernel = {self.kernel} must be odd")
        super().__init__(request.below_budget("window"))
        self.scale = config.head_dim**-0.5

    def scores(self, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        assert self.observed is not None, "a prompt has a token"
        recent = self.observed.shape[2]
        n = keys.shape[2]
        scores = attention_column_sums(self.observed, keys, scale=self.scale)[..., : n - recent]
        scores = scores.unflatten(1, (keys.shape[1], -1)).mean(2)
        scores = _POOLS[self.pool](scores, self.kernel, stride=1, padding=self.kernel // 2)
        return F.pad(scores, (0, recent), value=math.inf)
