"""H2O (Zhang et al., 2023): keep recent tokens and heavy hitters, which got the most attention so far.

The score of a token in a KV head is the sum of the attention that it got from every query that could see it
(its own included), averaged over the query heads of the group. Sums go on growing over later prompts and
decoded tokens, as long as the token stays.

The file also has the code that H2O shares with RoCo and D2O: sums of attention per token, computed without an
``n x n`` matrix, and the choice of the tokens that stay.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.model.config import PodConfig
from pod.modeling.model.grouped import slot_logits, weigh_slots
from pod.modeling.model.kv_buffer import numbers, places_of
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.step import Step


class AccumulatingLayer(PodCacheLayer):
    """A dense layer that drops tokens by statistics of each token, for rows of equal length (``rows.py``).

    Every slot holds a token. Every row and KV head holds equally many, in the order of their positions. Keys
    keep their rotation. A method overrides ``evict``, which calls ``keep``. If it needs other statistics than
    sums of attention, it also overrides ``observe_prompt`` and ``observe_decode``.

    Attributes:
        held: tokens held by each row and KV head.
        statistics: tensors ``[B, H, held]`` by name; ``keep`` drops the entries of dropped tokens.
            ``attention`` is the sum over queries, in at least fp32. A statistic that does not belong to
            tokens is ``[B, …, 1]``.
    """

    evicts = True

    def clear(self) -> None:
        super().clear()
        self.lead_keys.is_tight = self.all_values.is_tight = True
        self.held = 0
        self.statistics: dict[str, Tensor] = {}

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().parts()
        yield from (("statistics", tensor) for tensor in self.statistics.values())

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        self.statistics = {name: x.index_select(0, index.to(x.device)) for name, x in self.statistics.items()}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.ropes[self.layer_idx].pair(q, k)
        in_slots = replace(step, uniform_past=self.held)
        self.held += step.num_new
        self.weights: Tensor | None = None
        out = self.attend_rotated(q, k, v, in_slots)
        weights, self.weights = self.weights, None
        if step.is_decode:
            assert weights is not None
            self.observe_decode(weights, step)
        else:
            self.observe_prompt(q, step)
        return out

    def _decode(self, q: Tensor, step: Step) -> Tensor:
        logits = slot_logits(q, self.lead_keys.stored, self.held, self.scale)
        self.weights = logits.softmax(-1)
        return weigh_slots(self.weights, self.all_values.stored, q.dtype)

    def flush(self, step: Step) -> None:
        if step.ends_prompt or step.is_decode:
            self.evict(step)
            for buffer in (self.lead_keys, self.all_values):
                buffer.flush(self.held)

    def evict(self, step: Step) -> None:
        """Choose the tokens that stay, and call ``keep``. It runs after a prompt, chunk or decoded token."""
        raise NotImplementedError

    def keep(self, kept: Tensor | None, dropped: Tensor) -> None:
        """Keep the slots ``kept`` and free the slots ``dropped``, which ``choose_slots`` returned."""
        if kept is None:
            later = numbers(self.held - 1, dropped.device) >= dropped
            places = _first_places(*dropped.shape[:2], self.held, dropped.device) + later
        else:
            places = places_of(kept, self.held)
        for buffer in (self.lead_keys, self.all_values):
            buffer.keep_places(places, self.held)
        for name, x in self.statistics.items():
            if x.shape[2] == self.held:  # it belongs to tokens; more than one token is held here
                self.statistics[name] = x.flatten().index_select(0, places.flatten()).view(places.shape)
        self.held = places.shape[2]

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        """Add the rotated queries ``[B, Hq, m, d]`` of a chunk of a prompt to the statistics.

        ``lead_keys.read(held)`` already has the chunk's keys.
        """
        sums = attention_column_sums(q, self.lead_keys.read(self.held), scale=self.scale)
        self.accumulate("attention", self.group_mean(sums))

    def observe_decode(self, weights: Tensor, step: Step) -> None:
        """Add a decoded token's attention ``[B, H, G, held]`` to the tokens held, itself included."""
        self.accumulate("attention", weights.mean(2))

    def group_mean(self, sums: Tensor) -> Tensor:
        """The mean over the query heads of each group: ``[B, Hq, n]`` to ``[B, H, n]``."""
        return sums.unflatten(1, (-1, self.groups)).mean(2)

    def accumulate(self, name: str, addition: Tensor) -> None:
        """Add ``addition`` ``[B, H, held]`` to the statistic ``name``, which is made if it does not exist.

        Tokens that are new since the last call come last in ``addition``. This tensor becomes the statistic
        itself, and is changed in place.
        """
        if name in self.statistics:
            known = self.statistics[name]
            addition[..., : known.shape[2]].add_(known)
        self.statistics[name] = addition


def choose_slots(scores: Tensor, count: int, num_first: int, num_last: int) -> tuple[Tensor | None, Tensor]:
    """Choose slots to keep: the first, the last, and those with the best scores between them.

    Args:
        scores: ``[B, H, n]``; in a tie the lower slot stays.
        count: number of slots to keep, ``num_first + num_last <= count < n``.
        num_first: how many of the first slots are kept in any case.
        num_last: how many of the last slots are kept in any case.

    Returns:
        The slots kept ``[B, H, count]``, ascending, and the slots dropped ``[B, H, n - count]``, worst last.
        If only one slot is dropped, as after a decoded token, the first result is None, which saves sorting.
    """
    n = scores.shape[2]
    between = scores[..., num_first : n - num_last]
    if n - count == 1:
        last = num_first + between.shape[2] - 1
        return None, last - between.flip(-1).argmin(dim=-1, keepdim=True)
    scores = F.pad(between, (num_first, num_last), value=math.inf)
    kept, dropped = scores.argsort(dim=-1, descending=True, stable=True).split((count, n - count), dim=-1)
    return kept.sort(dim=-1).values, dropped


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _first_places(batch: int, heads: int, held: int, device: torch.device) -> Tensor:
    """The result of ``places_of`` for the slots ``0 … held - 2`` of each head, ``[B, H, held - 1]``."""
    return places_of(numbers(held - 1, device).expand(batch, heads, -1), held)


class H2OLayer(AccumulatingLayer):
    """A layer in which every KV head drops the tokens with the least accumulated attention.

    It does so when a prompt ends and after each decoded token, until ``budget`` tokens are left (section 4,
    Algorithm 1). The most recent tokens always stay.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__(config, layer_idx, request.quantizer)
        budget, recents = request.budget, request.params["num_recent_tokens"]
        recents = budget // 2 if recents is None else recents
        if not 1 <= recents < budget:
            raise ValueError(
                f"h2o: budget = {budget} must be at least 2 and more than num_recent_tokens = {recents}: "
                "one token is no recent one"
            )
        self.budget, self.recents = budget, recents

    def evict(self, step: Step) -> None:
        if self.held > self.budget:
            self.keep(*choose_slots(self.statistics["attention"], self.budget, 0, self.recents))


BUILDERS = {"h2o": Builder(build=cache_of(H2OLayer))}
