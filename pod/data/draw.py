"""Draws the training pieces of a selection, by length interval and, with weights, by source.

Every piece has a lot: a hash of its key and the seed. Of each group the pieces with the smallest lots are drawn until the quota
is reached. Two scans over the pieces on disk do it: one sums up tokens by lot, one takes the pieces with lots below the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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
from pod.data.selection import Selection

CHUNK_PIECES = 1 << 16
"""Pieces read at a time; the result does not depend on it."""
_BINS = 1 << 12
_MOST_BINS = 1 << 20
_LOT, _ORDER = 1, 2  # what a hash of the seed is for; pass n of the draw is ordered by _ORDER + n


@dataclass
class Drawn:
    """The drawn pieces in the order of training, and how the draw went."""

    numbers: np.ndarray
    """int64 [n]: numbers of the pieces; repeated ones come several times."""
    lengths: np.ndarray
    """uint32 [n]: their tokens."""
    intervals: list[IntervalReport]
    shares: list[ShareReport]
    """By interval, then source."""


def draw(pieces: Selection, args: DataArgs, seed: int, *, chunk_pieces: int = CHUNK_PIECES) -> Drawn:
    """Draw pieces by `target_tokens`, `exhausted` and `weights`; the order is a second lot over all of them.

    Deterministic in `seed` and independent of `chunk_pieces`. Equal lots (of identical documents) come in the order of
    intervals, sources and reading. Memory: about 40 bytes per drawn piece. Raises `ValueError` when nothing can be drawn.
    """
    scan = _Scan(pieces, args, seed, chunk_pieces)
    survey = _survey(scan)
    set_quotas(survey.reports, args.target_tokens, args.exhausted)
    groups = _groups(scan, survey)
    candidates = _candidates(scan, groups, survey)
    for report, interval in zip(survey.reports, groups, strict=True):
        carry = 0
        for group in sorted(interval, key=_Group.freedom):
            carry = _draw_group(group, candidates, carry, scan)
        for group in interval:
            _count(group, candidates, survey.shares)
        number = interval[0].interval
        report.documents_after = sum(share.documents_after for share in survey.shares[number])
        report.tokens_after = sum(share.tokens_after for share in survey.shares[number])
        report.passes = report.tokens_after / report.tokens_before if report.tokens_before else 0.0
    numbers, lengths = _shuffled(groups, candidates, seed)
    if not len(numbers):
        raise ValueError(
            "the draw is empty: every document is longer than its interval's share; raise data.target_tokens"
        )
    return Drawn(numbers, lengths, survey.reports, [share for row in survey.shares for share in row])


def hash_of_seed(seed: int, purpose: int) -> np.uint64:
    """A number that makes the lots of one seed and purpose independent of all others."""
    return np.uint64(splitmix64(splitmix64(seed % 2**64) ^ splitmix64(purpose)))


@dataclass
class _Scan:
    """Walks over the pieces on disk, as often as asked."""

    pieces: Selection
    args: DataArgs
    seed: int
    size: int

    def __post_init__(self) -> None:
        self.first_interval = 1 if self.args.short_documents == "drop" else 0
        self.bounds = bounds_of(self.args)
        self.num_intervals = len(self.bounds) - 1 - self.first_interval
        self.num_sources = len(self.args.sources)
        self.groups_per_interval = self.num_sources if self.args.weights else 1
        self.num_groups = self.num_intervals * self.groups_per_interval
        self.bins = _BINS
        while self.bins * self.num_groups > _MOST_BINS and self.bins > 2:
            self.bins //= 2
        self.shift = np.uint64(65 - self.bins.bit_length())
        self.lot_hash = hash_of_seed(self.seed, _LOT)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """(number of the first piece, PIECE records, their groups, the bins of their lots)"""
        for start in range(0, self.pieces.num_pieces, self.size):
            pieces = self.pieces.pieces(start, min(start + self.size, self.pieces.num_pieces))
            group = interval_of(pieces["length"], self.bounds) - self.first_interval
            assert group.min() >= 0, "the selection holds pieces that short_documents='drop' leaves out"
            if self.args.weights:
                group = group * self.num_sources + pieces["source"]
            yield start, pieces, group, (self.lots(pieces["key"]) >> self.shift).astype(np.int64)

    def lots(self, keys: np.ndarray) -> np.ndarray:
        return splitmix64(keys ^ self.lot_hash)


@dataclass
class _Survey:
    """Result of the first scan."""

    tokens: np.ndarray
    """int64 [groups, bins of lots]"""
    documents: np.ndarray
    reports: list[IntervalReport]
    shares: list[list[ShareReport]]
    """[intervals][sources]"""


def _survey(scan: _Scan) -> _Survey:
    tokens = np.zeros((scan.num_groups, scan.bins), np.int64)
    documents = np.zeros_like(tokens)
    by_source = np.zeros((2, scan.num_intervals, scan.num_sources), np.int64)
    for _, pieces, group, lot_bin in scan:
        lengths = pieces["length"].astype(np.int64)
        np.add.at(tokens, (group, lot_bin), lengths)
        np.add.at(documents, (group, lot_bin), 1)
        where = group // scan.groups_per_interval, pieces["source"]
        np.add.at(by_source[0], where, 1)
        np.add.at(by_source[1], where, lengths)
    reports, shares = [], []
    total = sum(scan.args.weights)
    for number in range(scan.num_intervals):
        low, high = scan.bounds[scan.first_interval + number : scan.first_interval + number + 2]
        counts = by_source[:, number].tolist()
        report = IntervalReport(low, high, documents_before=sum(counts[0]), tokens_before=sum(counts[1]))
        reports.append(report)
        weights = [weight / total for weight in scan.args.weights] or [None] * scan.num_sources
        shares.append(
            [
                ShareReport(report.name, source, weight, documents_before=some, tokens_before=held)
                for source, (weight, some, held) in enumerate(zip(weights, *counts, strict=True))
            ]
        )
    return _Survey(tokens, documents, reports, shares)


@dataclass
class _Group:
    """The pieces among which lots decide: those of one interval, with weights of one source in it."""

    number: int
    interval: int
    high: int
    """Upper bound of the interval in tokens."""
    tokens: int
    whole: int
    """Times that all pieces are drawn, before `quota` tokens are drawn once more."""
    quota: int
    cut: int = 0
    """Bins of lots in which the draw may look."""
    positions: list[np.ndarray] = field(default_factory=list)
    """Of the drawn pieces among the candidates, one array per pass."""

    def freedom(self) -> tuple[int, int]:
        """Sorts to the end those that can best make up for what the others miss: with much to choose and to leave."""
        return min(self.quota, self.tokens - self.quota), self.number


def _groups(scan: _Scan, survey: _Survey) -> list[list[_Group]]:
    """The groups of each interval with their quotas; fills in those of the survey's shares."""
    groups = []
    for number, (report, shares) in enumerate(zip(survey.reports, survey.shares, strict=True)):
        whole, rest = 0, report.quota
        if scan.args.exhausted == "repeat" and report.tokens_before:
            whole, rest = divmod(report.quota, report.tokens_before)
        quotas = [rest]
        if scan.args.weights:
            quotas = share_out(rest, [share.tokens_before for share in shares], scan.args.weights)
            for share, quota in zip(shares, quotas, strict=True):
                share.quota = whole * share.tokens_before + quota
                share.ran_dry = share.tokens_before < int((share.weight or 0) * report.quota)
        interval = []
        for at, quota in enumerate(quotas, start=number * len(quotas)):
            documents, tokens = survey.documents[at], survey.tokens[at]
            high = scan.bounds[scan.first_interval + number + 1]
            group = _Group(at, number, high, int(tokens.sum()), whole, quota)
            group.cut = _cut_bin(tokens, documents, group)
            interval.append(group)
        groups.append(interval)
    return groups


def _cut_bin(tokens: np.ndarray, documents: np.ndarray, group: _Group) -> int:
    """Number of bins, from the smallest lots on, that hold every piece the group's draw may look at."""
    if group.whole:
        return len(tokens)
    # The groups before leave less than one piece to this one: else the last of them that is not dry had taken it.
    most = group.quota + group.high
    last = int(np.searchsorted(np.cumsum(tokens), most, side="right"))
    behind = np.cumsum(documents[last + 1 :])
    return last + 2 + int(np.searchsorted(behind, reserve(group.high)))


class _Candidates:
    """The pieces in the bins before their group's cut, group after group, each in reading order. 22 bytes a piece."""

    def __init__(self, counts: np.ndarray):
        self.stops = np.cumsum(counts)
        self.starts = self.stops - counts
        size = int(self.stops[-1])
        self.numbers = np.empty(size, np.int64)
        self.keys = np.empty(size, np.uint64)
        self.lengths = np.empty(size, np.uint32)
        self.sources = np.empty(size, np.uint16)


def _candidates(scan: _Scan, groups: list[list[_Group]], survey: _Survey) -> _Candidates:
    cuts = np.array([group.cut for interval in groups for group in interval])
    counts = [counts[:cut].sum() for counts, cut in zip(survey.documents, cuts, strict=True)]
    found = _Candidates(np.array(counts, dtype=np.int64))
    filled = found.starts.copy()
    for start, pieces, group, lot_bin in scan:
        taken = np.flatnonzero(lot_bin < cuts[group])
        order = np.argsort(group[taken], kind="stable")
        taken = taken[order]
        numbers, firsts, sizes = np.unique(group[taken], return_index=True, return_counts=True)
        at = np.arange(len(taken)) + np.repeat(filled[numbers] - firsts, sizes)
        filled[numbers] += sizes
        found.numbers[at] = start + taken
        found.keys[at] = pieces["key"][taken]
        found.lengths[at] = pieces["length"][taken]
        found.sources[at] = pieces["source"][taken]
    assert (filled == found.stops).all(), "the two scans over the pieces saw different pieces"
    return found


def _draw_group(group: _Group, candidates: _Candidates, carry: int, scan: _Scan) -> int:
    """Fill in the drawn positions; returns the tokens still missing, which the next group tries to add."""
    start, stop = int(candidates.starts[group.number]), int(candidates.stops[group.number])
    wanted = group.quota + carry
    group.positions = [np.arange(start, stop)] * group.whole
    if wanted >= group.tokens:
        group.positions.append(np.arange(start, stop))
        return wanted - group.tokens
    order = np.argsort(scan.lots(candidates.keys[start:stop]), kind="stable")
    chosen = order[choose(candidates.lengths[start:stop][order], wanted, group.high)]
    group.positions.append(start + chosen)
    return wanted - int(candidates.lengths[group.positions[-1]].sum(dtype=np.int64))


def _count(group: _Group, candidates: _Candidates, shares: list[list[ShareReport]]) -> None:
    """Add what was drawn to the reports of its sources."""
    row = shares[group.interval]
    for positions in group.positions:
        sources = candidates.sources[positions]
        documents = np.bincount(sources, minlength=len(row))
        tokens = np.bincount(sources, weights=candidates.lengths[positions], minlength=len(row))
        for share, some, held in zip(row, documents.tolist(), tokens.tolist(), strict=True):
            share.documents_after += some
            share.tokens_after += int(held)


def _shuffled(
    groups: list[list[_Group]], candidates: _Candidates, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and lengths of all drawn pieces, ordered by a second lot. Empties `candidates` as it goes, to save memory."""
    drawn = [
        (number, positions)
        for interval in groups
        for group in interval
        for number, positions in enumerate(group.positions)
    ]
    everything = np.concatenate([positions for _, positions in drawn])
    passes = [(number, len(positions)) for number, positions in drawn]
    drawn.clear()
    for interval in groups:
        for group in interval:
            group.positions = []
    numbers = candidates.numbers[everything]
    del candidates.numbers, candidates.sources
    lengths = candidates.lengths[everything]
    lots = candidates.keys[everything]
    del candidates.lengths, candidates.keys, everything
    start = 0
    for number, count in passes:
        for first in range(start, start + count, CHUNK_PIECES):
            some = slice(first, min(first + CHUNK_PIECES, start + count))
            lots[some] = splitmix64(lots[some] ^ hash_of_seed(seed, _ORDER + number))
        start += count
    order = np.argsort(lots, kind="stable")
    del lots
    numbers = numbers[order]
    return numbers, lengths[order]
