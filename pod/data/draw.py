"""Draws the training pieces of a selection, by length interval and, with weights, by source.

Every piece has a lot: a hash of its key and the seed. Of each group the pieces with the smallest lots are drawn until the quota
is reached. Two scans over the pieces on disk do it: one sums up tokens by lot, one takes the pieces with lots below the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pod.data.args import DataArgs
from pod.data.balance import (
    IntervalReport,
    ShareReport,
    bounds_of,
    choose,
    interval_of,
    reserve,
    set_quotas,
    share_out,
)
from pod.data.documents import splitmix64

CHUNK_PIECES = 1 << 16
"""Pieces read at a time; the result does not depend on it."""
_BINS = 1 << 12
_MOST_BINS = 1 << 22
_LOT, _ORDER = 1, 2  # what a hash of the seed is for
_CANDIDATE = np.dtype([("number", "<i8"), ("key", "<u8"), ("length", "<u4"), ("source", "<u2")])


class Pieces(Protocol):
    """What is needed of a `pod.data.select.Selection`."""

    @property
    def num_pieces(self) -> int: ...

    def pieces(self, start: int, stop: int) -> np.ndarray:
        """PIECE records [start, stop)."""
        ...


@dataclass
class Drawn:
    """The drawn pieces in the order of training, and how the draw went."""

    numbers: np.ndarray
    """int64 [n]: numbers of the pieces; repeated ones come several times."""
    lengths: np.ndarray
    """uint32 [n]: their tokens."""
    intervals: list[IntervalReport]
    shares: list[ShareReport]
    """By interval, then source; empty without weights."""
    sources: list[dict[str, int]]
    """`documents_after` and `tokens_after` of each source."""


def draw(pieces: Pieces, args: DataArgs, seed: int, *, chunk_pieces: int = CHUNK_PIECES) -> Drawn:
    """Draw pieces by `target_tokens`, `exhausted` and `weights`; the order is a second lot over all of them.

    Equal lots (identical documents) come in reading order. Deterministic in `seed` and independent of `chunk_pieces`.
    Memory: about 40 bytes per drawn piece. Raises `ValueError` when nothing can be drawn.
    """
    scan = _Scan(pieces, args, seed, chunk_pieces)
    reports, groups, tokens_by_lot, documents_by_lot = _survey(scan)
    set_quotas(reports, args.target_tokens, args.exhausted)
    for number, report in enumerate(reports):
        _set_group_quotas(groups[number], report, args)
    cuts = np.array(
        [
            _cut_bin(tokens_by_lot[group.number], documents_by_lot[group.number], group, len(scan.weights))
            for interval in groups
            for group in interval
        ]
    )
    candidates = _candidates(scan, cuts)
    drawn, lots = [], []
    for report, interval in zip(reports, groups, strict=True):
        carry = 0
        for group in sorted(interval, key=_Group.richness):
            parts, carry = _draw_group(group, candidates[group.number], carry, scan)
            candidates[group.number] = candidates[group.number][:0]
            for pass_number, part in enumerate(parts):
                drawn.append(part)
                lots.append(splitmix64(part["key"] ^ hash_of_seed(seed, _ORDER + pass_number)))
        report.documents_after = sum(group.documents_after for group in interval)
        report.tokens_after = sum(group.tokens_after for group in interval)
        report.passes = report.tokens_after / report.tokens_before if report.tokens_before else 0.0
    everything, lot = np.concatenate(drawn), np.concatenate(lots)
    if not len(everything):
        raise ValueError(
            "the draw is empty: every document is longer than its interval's share; raise data.target_tokens"
        )
    order = np.lexsort((everything["number"], lot))
    return Drawn(
        everything["number"][order],
        everything["length"][order],
        reports,
        [group.report(report, args) for report, one in zip(reports, groups, strict=True) for group in one]
        if args.weights
        else [],
        _by_source(everything, len(args.sources)),
    )


def hash_of_seed(seed: int, purpose: int) -> np.uint64:
    """A number that makes lots of one seed and purpose independent of all others."""
    return np.uint64(splitmix64(splitmix64(seed % 2**64) ^ splitmix64(purpose)))


@dataclass
class _Group:
    """The pieces of one interval, with weights those of one source."""

    number: int
    source: int
    high: int
    weight: float
    documents_before: int
    tokens_before: int
    whole: int = 0
    """Times that all pieces are drawn, before `quota` tokens are drawn once more."""
    quota: int = 0
    ran_dry: bool = False
    documents_after: int = 0
    tokens_after: int = 0

    def richness(self) -> tuple[bool, int, int]:
        """Sorts those that can best make up for what the others miss to the end."""
        return (self.quota < self.tokens_before, self.documents_before, self.source)

    def report(self, interval: IntervalReport, args: DataArgs) -> ShareReport:
        return ShareReport(
            interval.name,
            self.source,
            self.weight,
            documents_before=self.documents_before,
            tokens_before=self.tokens_before,
            documents_after=self.documents_after,
            tokens_after=self.tokens_after,
            quota=self.whole * self.tokens_before + self.quota,
            ran_dry=self.ran_dry,
        )


@dataclass
class _Scan:
    """Walks over the pieces on disk, as often as asked."""

    pieces: Pieces
    args: DataArgs
    seed: int
    size: int

    def __post_init__(self) -> None:
        self.first_interval = 1 if self.args.short_documents == "drop" else 0
        self.bounds = bounds_of(self.args)
        self.lot_hash = hash_of_seed(self.seed, _LOT)
        self.weights = self.args.weights or [1.0]
        self.num_groups = (len(self.bounds) - 1 - self.first_interval) * len(self.weights)
        self.bins = _BINS
        while self.bins * self.num_groups > _MOST_BINS and self.bins > 1:
            self.bins //= 2
        self.shift = np.uint64(64 - (self.bins.bit_length() - 1))

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """(number of the first piece, PIECE records, their groups, the bins of their lots)"""
        for start in range(0, self.pieces.num_pieces, self.size):
            pieces = self.pieces.pieces(start, min(start + self.size, self.pieces.num_pieces))
            group = interval_of(pieces["length"], self.bounds) - self.first_interval
            if self.args.weights:
                group = group * len(self.weights) + pieces["source"]
            yield start, pieces, group, self.bin_of(self.lots(pieces["key"]))

    def lots(self, keys: np.ndarray) -> np.ndarray:
        return splitmix64(keys ^ self.lot_hash)

    def bin_of(self, lots: np.ndarray) -> np.ndarray:
        return (lots >> self.shift).astype(np.int64) if self.bins > 1 else np.zeros(len(lots), np.int64)


def _survey(scan: _Scan) -> tuple[list[IntervalReport], list[list[_Group]], np.ndarray, np.ndarray]:
    """The intervals and their groups with what there is, and tokens and documents int64 [groups, bins] by lot."""
    shape = scan.num_groups, scan.bins
    tokens, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for _, pieces, group, lot_bin in scan:
        used, at = np.unique(group * scan.bins + lot_bin, return_inverse=True)
        tokens.reshape(-1)[used] += np.bincount(at, weights=pieces["length"]).astype(np.int64)
        documents.reshape(-1)[used] += np.bincount(at)
    lows = scan.bounds[scan.first_interval : -1]
    highs = scan.bounds[scan.first_interval + 1 :]
    reports, groups = [], []
    total = sum(scan.weights)
    for number, (low, high) in enumerate(zip(lows, highs, strict=True)):
        interval = []
        for source, weight in enumerate(scan.weights):
            at = number * len(scan.weights) + source
            interval.append(
                _Group(at, source, high, weight / total, int(documents[at].sum()), int(tokens[at].sum()))
            )
        report = IntervalReport(low, high)
        report.documents_before = sum(group.documents_before for group in interval)
        report.tokens_before = sum(group.tokens_before for group in interval)
        reports.append(report)
        groups.append(interval)
    return reports, groups, tokens, documents


def _set_group_quotas(groups: list[_Group], report: IntervalReport, args: DataArgs) -> None:
    """Divide an interval's quota over its sources by weight; a dry source leaves its rest to the others."""
    supply = [group.tokens_before for group in groups]
    whole, rest = 0, report.quota
    if args.exhausted == "repeat" and report.tokens_before:
        whole, rest = divmod(report.quota, report.tokens_before)
    weights = [group.weight for group in groups]
    for group, quota in zip(groups, share_out(rest, supply, weights), strict=True):
        group.whole, group.quota = whole, quota
        group.ran_dry = group.tokens_before < int(group.weight * report.quota)


def _cut_bin(tokens: np.ndarray, documents: np.ndarray, group: _Group, num_sources: int) -> int:
    """Number of bins, from the smallest lots on, that hold every piece the group's draw may look at."""
    if group.whole:
        return len(tokens)
    # What the groups before may leave to this one: each less than one piece.
    most = group.quota + num_sources * group.high
    last = int(np.searchsorted(np.cumsum(tokens), most, side="right"))
    behind = np.cumsum(documents[last + 1 :])
    return last + 2 + int(np.searchsorted(behind, reserve(group.high)))


def _candidates(scan: _Scan, cuts: np.ndarray) -> list[np.ndarray]:
    """By group the pieces in the bins before the cut, in reading order."""
    found: list[list[np.ndarray]] = [[] for _ in cuts]
    for start, pieces, group, lot_bin in scan:
        taken = np.flatnonzero(lot_bin < cuts[group])
        if not len(taken):
            continue
        some = np.empty(len(taken), _CANDIDATE)
        some["number"] = start + taken
        for name in ("key", "length", "source"):
            some[name] = pieces[name][taken]
        order = np.argsort(group[taken], kind="stable")
        some, numbers = some[order], group[taken][order]
        for number, first, last in _runs(numbers):
            found[number].append(some[first:last])
    joined = []
    for parts in found:
        joined.append(np.concatenate([*parts, np.empty(0, _CANDIDATE)]))
        parts.clear()
    return joined


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(value, start, stop) of the runs of equal values of a sorted array."""
    values, starts, counts = np.unique(numbers, return_index=True, return_counts=True)
    yield from zip(values.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)


def _draw_group(
    group: _Group, candidates: np.ndarray, carry: int, scan: _Scan
) -> tuple[list[np.ndarray], int]:
    """The drawn pieces, one array per pass, and the tokens still missing, which the next group tries to add."""
    parts = [candidates] * group.whole
    wanted = group.quota + carry
    chosen = candidates[:0]
    if wanted:
        chosen = candidates[np.argsort(scan.lots(candidates["key"]), kind="stable")]
        chosen = chosen[choose(chosen["length"], wanted, group.high)]
    parts.append(chosen)
    group.documents_after = sum(len(part) for part in parts)
    group.tokens_after = sum(int(part["length"].sum(dtype=np.int64)) for part in parts)
    return parts, wanted - int(chosen["length"].sum(dtype=np.int64))


def _by_source(drawn: np.ndarray, num_sources: int) -> list[dict[str, int]]:
    documents = np.bincount(drawn["source"], minlength=num_sources)
    tokens = np.bincount(drawn["source"], weights=drawn["length"], minlength=num_sources)
    return [
        {"documents_after": int(count), "tokens_after": int(total)}
        for count, total in zip(documents, tokens, strict=True)
    ]
