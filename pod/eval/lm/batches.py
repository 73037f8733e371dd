"""Batches of encoded requests.

They are fixed from all requests before any is answered, so that an answer is the same on any number of ranks.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pod.eval.answer.answer_cache import in_batches
from pod.eval.answer.budget import CacheSpan
from pod.eval.lm.requests import Encoded, span_of


@dataclass(frozen=True, kw_only=True)
class ScoredContext:
    """A *unit*: a context and the continuations that are scored after one prefill of it.

    Attributes:
        context, continuations: token ids.
        owners: for each continuation the number of its request.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]

    @property
    def span(self) -> CacheSpan:
        """The size of the cache that it needs."""
        return span_of(len(self.context), max(len(ids) for ids in self.continuations))

    @property
    def holds_out(self) -> bool:
        """Whether the last context token can be held out of the prompt.

        It cannot if the context is one token (BOS), because that is the whole prompt.
        """
        return len(self.context) > 1


def units_of(encoded: Sequence[Encoded], one_shot: bool = False) -> list[ScoredContext]:
    """Scoring requests as units. Skipped requests are left out.

    The choices of a document that have the same context are one unit. Whole texts are cut into blocks, each a
    unit.

    Args:
        one_shot: make units for a forward pass without a cache: every continuation is a unit of its own, and
            whole texts are cut into windows.
    """
    found: dict[Any, tuple[tuple[int, ...], list[tuple[int, ...]], list[int]]] = {}
    for number, item in enumerate(encoded):
        parts = item.windows if one_shot and item.windows else item.blocks()
        for place, (context, continuation) in enumerate(parts if item.skipped is None else ()):
            shared = item.kind == "loglikelihood" and not one_shot
            name = (item.unit, context) if shared else (number, place)
            _, continuations, owners = found.setdefault(name, (context, [], []))
            continuations.append(continuation)
            owners.append(number)
    return [ScoredContext(context=c, continuations=tuple(t), owners=tuple(o)) for c, t, o in found.values()]


def unit_batches(units: Sequence[ScoredContext], batch_size: int) -> list[list[ScoredContext]]:
    """Batches of at most `batch_size` continuations, unless one unit has more. The longest come first.

    Units of different lengths may share a batch, because every row of a cache has its own budget.
    """
    groups: dict[bool, list[list[ScoredContext]]] = {}
    for unit in sorted(units, key=lambda unit: unit.span, reverse=True):
        batches = groups.setdefault(unit.holds_out, [[]])
        if batches[-1] and sum(len(u.continuations) for u in [*batches[-1], unit]) > batch_size:
            batches.append([])
        batches[-1].append(unit)
    return [batch for batches in groups.values() for batch in batches]


def generation_batches(items: Sequence[Encoded], batch_size: int) -> list[list[Encoded]]:
    """Batches of generation requests with the same settings. The longest come first."""

    def kind(item: Encoded) -> tuple[bool, int, str]:
        settings = json.dumps(item.settings, sort_keys=True, default=str)
        return bool(item.num_asked), item.new_tokens, settings

    return in_batches(sorted(items, key=lambda item: item.span, reverse=True), batch_size, kind)


def forward_batches(
    units: Sequence[ScoredContext], batch_size: int, in_order: bool
) -> list[list[ScoredContext]]:
    """Batches of units with one continuation each, which one forward pass scores together.

    They equal the batches of lm-eval's HFLM, because the last bits of a score depend on its batch. Units that
    differ only in the last token of their continuation are one row. Rows are sorted by length, the longest
    first.

    Args:
        in_order: keep the order of the units, as for windows of whole texts.
    """
    if in_order:
        return in_batches(units, batch_size)
    rows: dict[tuple[int, ...], list[ScoredContext]] = {}
    for unit in units:
        rows.setdefault(unit.context + unit.continuations[0][:-1], []).append(unit)

    def order(units: list[ScoredContext]) -> tuple[int, tuple[int, ...]]:
        longest = max(units, key=lambda unit: len(unit.continuations[0]))
        tokens = longest.context + longest.continuations[0]
        return -len(tokens), tokens

    chunks = in_batches(sorted(rows.values(), key=order), batch_size)
    return [[unit for row in chunk for unit in row] for chunk in chunks]


def spans_of(encoded: Sequence[Encoded]) -> set[CacheSpan]:
    """The sizes of all caches that a model class needs for these requests, none of which may be skipped."""
    generated = {item.span for item in encoded if item.kind == "generate_until"}
    scored = units_of([item for item in encoded if item.kind != "generate_until"])
    return generated | {unit.span for unit in scored}
