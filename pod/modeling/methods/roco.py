"""RoCo (Ren and Zhu, 2024): drop the token with the lowest *mean* attention, unless its attention varies a lot.

Accumulated attention favours old tokens, which more queries could see; RoCo divides by the number of those queries. A
token whose weight has a large standard deviation may matter again: the share ``protect_prefill`` (when a prompt ends) or
``protect_decode`` (after a decoded token) of the budget with the largest deviation is kept, as are sinks and recent tokens.
Mean and deviation come from the sums of weights and of squared weights, mean over the query heads of a group.
"""

import torch
from torch import Tensor

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods.accumulate import AccumulatingLayer, choose_slots, round_half_up
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, chunks_of
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import NATIVE, Codec


class RocoLayer(AccumulatingLayer):
    """Sinks, recent tokens, tokens of varying attention, and the best of the rest by mean attention.

    ``statistics`` also has ``squares`` (sums of squared weights) and ``positions`` (int32), from which the number of queries
    that could see a token follows.

    Args:
        budget: tokens of a KV head, of which the first ``sinks`` and the last ``recents`` are never dropped.
        protected: tokens protected by their deviation, when a prompt ends and after a decoded token.
    """

    def __init__(
        self,
        config: PodConfig,
        layer_idx: int,
        budget: int,
        sinks: int,
        recents: int,
        protected: tuple[int, int],
        codec: Codec = NATIVE,
    ):
        self.budget, self.sinks, self.recents, self.protected = budget, sinks, recents, protected
        super().__init__(config, layer_idx, codec)

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        sums, squares = attention_column_sums(
            q, self.lead_keys.read(self.held), scale=self.scale, squares=True
        )
        self._observe(self.group_mean(sums), self.group_mean(squares), step)

    def observe_decode(self, weights: Tensor, step: Step) -> None:
        self._observe(weights.mean(2), weights.square().mean(2), step)

    def _observe(self, sums: Tensor, squares: Tensor, step: Step) -> None:
        self.accumulate("attention", sums)
        self.accumulate("squares", squares)
        seen = (step.uniform_past or 0) + step.num_new
        new = torch.arange(seen - step.num_new, seen, dtype=torch.int32, device=sums.device)
        new = new.expand(*sums.shape[:2], -1)
        known = self.statistics.get("positions", new[..., :0])
        self.statistics["positions"] = torch.cat((known, new), dim=2)

    def evict(self, step: Step) -> None:
        if self.held <= self.budget:
            return
        assert step.uniform_past is not None
        counts = step.uniform_past + step.num_new - self.statistics["positions"]
        mean, variance = mean_and_variance(self.statistics["attention"], self.statistics["squares"], counts)
        protected = self.protected[step.is_decode]
        candidates = slice(self.sinks, self.held - self.recents)
        protect_largest(mean[..., candidates], variance[..., candidates], protected)
        kept, _ = choose_slots(mean, self.budget, self.sinks, self.recents)
        self.keep(kept)


def mean_and_variance(sums: Tensor, squares: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (which ranks as the standard deviation does) of a token's weight over ``counts`` queries."""
    mean = sums / counts
    return mean, (squares / counts - mean.square()).clamp(min=0)


def protect_largest(scores: Tensor, variance: Tensor, count: int) -> None:
    """Set the scores ``[B, H, n]`` of the ``count`` slots with the largest variance to infinity; the lower slot wins ties."""
    if count:
        largest = variance.argsort(dim=-1, descending=True, stable=True)[..., :count]
        scores.scatter_(2, largest, float("inf"))


def _build(config: PodConfig, request: Request) -> PodCache:
    budget, params = request.tokens, request.params
    sinks, recents = params["num_sink_tokens"], params["num_recent_tokens"]
    if sinks < 0 or recents < 1:
        raise ValueError(
            f"roco: num_sink_tokens = {sinks} must be at least 0, num_recent_tokens = {recents} at least 1"
        )
    shares = params["protect_prefill"], params["protect_decode"]
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"roco: protect_prefill, protect_decode = {shares} must lie between 0 and 1")
    protected = round_half_up(shares[0], budget), round_half_up(shares[1], budget)
    if sinks + recents + max(protected) > budget:
        raise ValueError(
            f"roco: budget = {budget} is less than {sinks} sinks, {recents} recent and {max(protected)} protected "
            "tokens together: raise the budget or lower num_sink_tokens, num_recent_tokens or the protected share"
        )

    def make_layer(config: PodConfig, layer_idx: int) -> RocoLayer:
        return RocoLayer(config, layer_idx, budget, sinks, recents, protected, request.codec)

    return GroupedCache(config, make_layer, request.spec, chunks=chunks_of(request))


METHOD = Method(
    name="roco",
    paper="RoCo (Ren and Zhu, 2024)",
    frees="keys and values of the tokens with the lowest mean attention, unless it varies a lot",
    axis="selection",
    build=_build,
    parameters={
        "num_sink_tokens": (4, "first tokens, always kept (tokens)"),
        "num_recent_tokens": (10, "last tokens, always kept (tokens)"),
        "protect_prefill": (0.1, "share of the budget protected by deviation when a prompt ends"),
        "protect_decode": (0.3, "share of the budget protected by deviation after a decoded token"),
    }
    | PREFILL_PARAMETERS,
    takes_budget=True,
    refuses={
        "pod": "roco drops a token per decoded token in each layer by that layer's own statistics, while followers of a "
        "PoD block use the lead's keys and logits slot by slot"
    },
)
