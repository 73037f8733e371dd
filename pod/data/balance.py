"""Draws documents so that every length interval gives the same number of tokens (the training recipe of METHODS.md §1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

TOLERANCE = 0.001
"""Share of an interval's quota below which no better document is looked for."""
MAX_SWAPS = 16


@dataclass
class IntervalReport:
    """One length interval [low, high) (the last one [low, high]) before and after the draw."""

    low: int
    """Shortest document in tokens."""
    high: int
    """First length of the next interval; in the last interval the longest document."""
    documents_before: int = 0
    tokens_before: int = 0
    documents_after: int = 0
    """Documents drawn; repeated ones count each time."""
    tokens_after: int = 0
    quota: int = 0
    """Tokens asked for."""
    ran_dry: bool = False
    """The interval holds fewer tokens than an equal share of the target."""
    passes: float = 0.0
    """Tokens drawn / tokens there are; above 1 = documents repeated."""

    @property
    def name(self) -> str:
        """`1K–2K`"""
        return f"{_short(self.low)}–{_short(self.high)}"

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {"name": self.name, **asdict(self)}


def interval_bounds(shortest: int, context_length: int) -> list[int]:
    """Lower bounds of the intervals and the context: [1, shortest, 2·shortest, …, context_length]."""
    bounds, bound = [1], shortest
    while bound < context_length:
        bounds.append(bound)
        bound *= 2
    if len(bounds) == 1 and shortest > 1:
        bounds.append(shortest)
    return [*bounds, context_length]


def interval_of(lengths: np.ndarray, bounds: list[int]) -> np.ndarray:
    """Interval number of each length; int64. A length equal to the context belongs to the last interval."""
    return np.clip(np.searchsorted(bounds, lengths, side="right") - 1, 0, len(bounds) - 2)


def draw(
    lengths: np.ndarray,
    *,
    bounds: list[int],
    target_tokens: int | None,
    exhausted: str,
    seed: int,
    first_interval: int = 0,
) -> tuple[np.ndarray, list[IntervalReport]]:
    """Indices of the drawn documents, int64, shuffled over all intervals, and the report per interval.

    lengths [N] in tokens; `first_interval=1` leaves out the documents below the shortest interval. `exhausted` as in
    `DataArgs`. Deterministic in `seed`. Raises `ValueError` when nothing can be drawn.
    """
    members, reports = _group(lengths, bounds, first_interval)
    _set_quotas(reports, target_tokens, exhausted)
    drawn = []
    for number, (indices, report) in enumerate(zip(members, reports, strict=True)):
        rng = np.random.default_rng(np.random.SeedSequence([seed, number, report.low]))
        chosen = _draw_interval(indices, lengths, report.quota, rng, repeat=exhausted == "repeat")
        drawn.append(chosen)
        report.documents_after = len(chosen)
        report.tokens_after = int(lengths[chosen].sum())
        report.passes = report.tokens_after / report.tokens_before if report.tokens_before else 0.0
    everything = np.concatenate(drawn)
    if not len(everything):
        raise ValueError(
            "the draw is empty: every document is longer than its interval's share; raise data.target_tokens"
        )
    return np.random.default_rng(np.random.SeedSequence([seed, 2**31])).permutation(everything), reports


def _group(
    lengths: np.ndarray, bounds: list[int], first: int
) -> tuple[list[np.ndarray], list[IntervalReport]]:
    which = interval_of(lengths, bounds)
    members = [np.flatnonzero(which == number) for number in range(first, len(bounds) - 1)]
    reports = [
        IntervalReport(low, high) for low, high in zip(bounds[first:], bounds[first + 1 :], strict=False)
    ]
    for indices, report in zip(members, reports, strict=True):
        report.documents_before = len(indices)
        report.tokens_before = int(lengths[indices].sum())
    return members, reports


def _set_quotas(reports: list[IntervalReport], target_tokens: int | None, exhausted: str) -> None:
    supply = np.array([report.tokens_before for report in reports])
    if not supply.sum():
        raise ValueError(
            "no document is left to draw from: set data.long_documents to cut or data.short_documents to keep, lower "
            "data.shortest_interval or add sources"
        )
    if target_tokens is None:
        share = int(supply.max() if exhausted == "redistribute" else supply.min())
    else:
        share = target_tokens // len(reports)
    for report in reports:
        report.ran_dry = report.tokens_before < share
    empty = [report.name for report in reports if not report.tokens_before]
    if empty and exhausted != "redistribute":
        raise ValueError(
            f"no document has {', '.join(empty)} tokens and data.exhausted={exhausted!r} needs all intervals: "
            "use 'redistribute', a larger data.shortest_interval or sources with such documents"
        )
    if exhausted == "repeat":
        quotas = np.full(len(reports), share)
    elif exhausted == "stop":
        quotas = np.full(len(reports), min(share, int(supply.min())))
    else:
        quotas = _fill_equally(supply, share * len(reports))
    for report, quota in zip(reports, quotas, strict=True):
        report.quota = int(quota)


def _fill_equally(supply: np.ndarray, total: int) -> np.ndarray:
    """Quotas that sum to min(total, supply): an equal level for all, capped by what each interval has."""
    quotas = np.zeros_like(supply)
    left = min(total, int(supply.sum()))
    while left > 0:
        unfilled = np.flatnonzero(quotas < supply)
        step = max(1, left // len(unfilled))
        for number in unfilled:
            added = min(step, int(supply[number] - quotas[number]), left)
            quotas[number] += added
            left -= added
    return quotas


def _draw_interval(
    indices: np.ndarray, lengths: np.ndarray, quota: int, rng: np.random.Generator, repeat: bool
) -> np.ndarray:
    """Documents of one interval, in random order, whose tokens come as close to `quota` from below as whole documents can."""
    supply = int(lengths[indices].sum())
    if not supply or not quota:
        return indices[:0]
    whole, rest = divmod(quota, supply)
    if not repeat and whole:
        whole, rest = 1, 0
    parts = [rng.permutation(indices) for _ in range(whole)]
    if rest:
        parts.append(_draw_part(rng.permutation(indices), lengths, rest))
    return np.concatenate(parts)


def _draw_part(order: np.ndarray, lengths: np.ndarray, quota: int) -> np.ndarray:
    """A part of `order` with nearly `quota` tokens: its longest fitting head, then single documents exchanged or added."""
    fits = np.cumsum(lengths[order]) <= quota
    count = int(fits.sum())
    inside, outside = list(order[:count]), list(order[count:])
    gap = quota - int(lengths[inside].sum()) if count else quota
    outside.sort(key=lambda index: (lengths[index], index))
    for _ in range(MAX_SWAPS):
        if gap <= TOLERANCE * quota or not outside:
            break
        gain, leaving, entering = _best_exchange(inside, outside, lengths, gap)
        if not gain:
            break
        gap -= gain
        entered = outside.pop(entering)
        if leaving is not None:
            left = inside.pop(leaving)
            at = np.searchsorted([(lengths[index]) for index in outside], lengths[left])
            outside.insert(int(at), left)
        inside.append(entered)
    return np.array(inside, dtype=np.int64)


def _best_exchange(
    inside: list[int], outside: list[int], lengths: np.ndarray, gap: int
) -> tuple[int, int | None, int]:
    """(tokens gained ≤ gap, position that leaves or None, position that enters); gain 0 = nothing helps."""
    sizes = lengths[np.array(outside)]
    leaving = np.concatenate([[0], lengths[np.array(inside, dtype=np.int64)]])
    enters = np.searchsorted(sizes, leaving + gap, side="right") - 1
    gains = np.where(enters >= 0, sizes[np.maximum(enters, 0)] - leaving, 0)
    best = int(np.argmax(gains))
    if gains[best] <= 0:
        return 0, None, 0
    return int(gains[best]), (None if best == 0 else best - 1), int(enters[best])


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
