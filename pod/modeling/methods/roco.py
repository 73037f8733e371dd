"""RoCo (Ren and Zhu, 2024): drop the token with the lowest *mean* attention, unless attention varies a lot.

Accumulated attention favours old tokens, because more queries could see them. RoCo divides by the number of
those queries. A token whose weight has a large standard deviation may matter again. So a share of the budget
goes to the tokens with the largest deviation: ``protect_prefill`` when a prompt ends, ``protect_decode``
after a decoded token. Sinks and recent tokens are kept too. Mean and deviation come from the sums of weights
and of squared weights, averaged over the query heads of a group.
"""

from fractions import Fraction

import torch
from torch import Tensor

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods.base import Builder, Request, cache_of, round_half_up
from pod.modeling.methods.h2o import AccumulatingLayer, choose_slots
from pod.modeling.methods.ranking import best_slots
from pod.modeling.model.config import PodConfig
from pod.modeling.model.step import Step


class RocoLayer(AccumulatingLayer):
    """A layer that keeps sinks, recent tokens, tokens of varying attention, and those with the highest mean.

    ``statistics`` also has ``squares`` (sums of squared weights) and ``positions`` (int32). The number of
    queries that could see a token follows from its position.

    Attributes:
        protected: how many tokens are kept for their deviation: when a prompt ends, and after a decoded
            token.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__(config, layer_idx, request.quantizer)
        params, budget = request.params, request.budget
        self.sinks = params["num_sink_tokens"]
        self.recents = params["num_recent_tokens"]
        self.budget = budget
        shares = [params["protect_prefill"], params["protect_decode"]]
        # 0.3 means three tenths, so that 0.3 of 5 tokens are 2
        self.protected = [round_half_up(Fraction(str(share)) * budget) for share in shares]
        most = max(self.protected)
        if self.sinks + self.recents + most > budget:
            raise ValueError(
                f"roco: budget = {budget} is less than {self.sinks} sinks, {self.recents} recent and {most} "
                "protected tokens together: raise the budget or lower num_sink_tokens, num_recent_tokens or "
                "the protected share"
            )

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        keys = self.lead_keys.read(self.held)
        sums, squares = attention_column_sums(q, keys, scale=self.scale, squares=True)
        self._observe(self.group_mean(sums), self.group_mean(squares), step)

    def observe_decode(self, weights: Tensor, step: Step) -> None:
        self._observe(weights.mean(2), weights.square().mean(2), step)

    def _observe(self, sums: Tensor, squares: Tensor, step: Step) -> None:
        self.accumulate("attention", sums)
        self.accumulate("squares", squares)
        seen = step.max_length
        new = torch.arange(seen - step.num_new, seen, dtype=torch.int32, device=sums.device)
        new = new.expand(*sums.shape[:2], -1)
        known = self.statistics.get("positions", new[..., :0])
        self.statistics["positions"] = torch.cat((known, new), dim=2)

    def evict(self, step: Step) -> None:
        if self.held <= self.budget:
            return
        counts = step.max_length - self.statistics["positions"]
        mean, variance = mean_and_variance(self.statistics["attention"], self.statistics["squares"], counts)
        of_prefill, of_decode = self.protected
        protected = of_decode if step.is_decode else of_prefill
        candidates = slice(self.sinks, self.held - self.recents)
        protect_largest(mean[..., candidates], variance[..., candidates], protected)
        self.keep(*choose_slots(mean, self.budget, self.sinks, self.recents))


def mean_and_variance(sums: Tensor, squares: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each token's attention weight over the queries that could see it.

    The variance ranks tokens in the same order as the standard deviation.

    Args:
        sums: ``[B, H, n]``, sums of weights.
        squares: ``[B, H, n]``, sums of squared weights.
        counts: ``[B, H, n]``, how many queries could see each token.
    """
    mean = sums / counts
    return mean, (squares / counts - mean.square()).clamp(min=0)


def protect_largest(scores: Tensor, variance: Tensor, count: int) -> None:
    """Set the scores of the ``count`` slots with the largest variance to infinity, in place.

    Scores and variance are ``[B, H, n]``. In a tie the lower slot wins.
    """
    if count:
        scores.scatter_(2, best_slots(variance, count), float("inf"))


BUILDERS = {"roco": Builder(build=cache_of(RocoLayer))}
