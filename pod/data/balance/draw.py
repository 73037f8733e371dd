"""Draws the training pieces: in each group those with the smallest sampling keys, until its quota is met."""

import itertools
from dataclasses import dataclass

import numpy as np

from pod.data.args import DataArgs
from pod.data.balance.length_intervals import IntervalReport, ShareReport, choose, set_quotas, share_out
from pod.data.balance.reservoir import Counted, LengthGroups, Reservoir
from pod.data.balance.sampling_keys import ORDER, hash_of_seed, splitmix64


@dataclass
class Drawn:
    """The drawn pieces, and reports about the draw."""

    pieces: np.ndarray
    """PIECE [n], in the order of packing. A piece that is drawn several times is listed as often."""
    intervals: list[IntervalReport]
    """One report per length interval."""
    shares: list[ShareReport]
    """One report per source in each interval, sorted by interval, then source."""
    counted: Counted
    """Numbers of pieces and tokens in everything that was read, drawn or not."""


def draw(reservoir: Reservoir, args: DataArgs, seed: int) -> Drawn:
    """Draw the training pieces from those that the reservoir kept.

    The settings `target_tokens`, `exhausted` and `weights` decide how many tokens come from each interval and
    source. The drawn pieces are then put in random order, by a second sampling key. The result depends on the
    kept pieces, the settings and `seed` alone.

    Raises:
        ValueError: nothing can be drawn, or an interval without documents is needed (see `set_quotas`).
    """
    pieces, group = reservoir.training()
    counted = reservoir.counted(len(args.sources))
    lengths = pieces["length"].astype(np.int64)
    count = reservoir.groups.count
    supply = np.bincount(group, weights=lengths, minlength=count).astype(np.int64)
    supply = supply.reshape(reservoir.groups.intervals, -1)
    intervals, shares = _reports(reservoir, counted, args)
    set_quotas(intervals, supply.sum(axis=1), args)
    starts = np.searchsorted(group, np.arange(count + 1))
    drawn: list[tuple[int, np.ndarray]] = []
    for number, report in enumerate(intervals):
        groups = _groups(report, shares[number], supply[number], args)
        carry = 0
        for one in sorted(groups, key=_Group.freedom):
            at = number * len(groups) + one.source
            start = int(starts[at])
            stop = int(starts[at + 1])
            passes = one.draw(lengths[start:stop], carry)
            carry += one.quota - int(lengths[start + passes[-1]].sum())
            drawn += [(nth, start + positions) for nth, positions in enumerate(passes)]
    _count(drawn, pieces, group, intervals, shares, reservoir)
    found = _shuffled(drawn, pieces, seed)
    if not len(found):
        raise ValueError(
            "no document was drawn: each is longer than its interval's share of data.target_tokens; raise "
            "data.target_tokens"
        )
    return Drawn(found, intervals, [share for row in shares for share in row], counted)


@dataclass
class _Group:
    """The pieces that compete for one quota: those of an interval, or of one source in it with weights."""

    source: int
    """Index of the source in `sources`; 0 without weights."""
    high: int
    """Upper bound of the interval in tokens."""
    tokens: int
    """Tokens of all pieces."""
    whole: int
    """How often all pieces are drawn, before `quota` more tokens are drawn."""
    quota: int
    """Tokens to draw after the whole passes."""

    def freedom(self) -> tuple[int, int]:
        """A sort key: groups with a freer choice of pieces come later.

        They can make up for the tokens that the earlier groups miss. A choice is free when many tokens are to
        be drawn and many are left over.
        """
        return min(self.quota, self.tokens - self.quota), self.source

    def draw(self, lengths: np.ndarray, carry: int) -> list[np.ndarray]:
        """Draw from the group's pieces.

        Args:
            lengths: tokens of the group's pieces, [n], sorted by sampling key.
            carry: tokens that the earlier groups of the interval missed; they are drawn here beyond the
                quota.

        Returns:
            Positions of the drawn pieces, one array for each pass: `whole` times all pieces, then the choice.
        """
        everything = np.arange(len(lengths))
        wanted = self.quota + carry
        last = everything if wanted >= self.tokens else choose(lengths, wanted, self.high)
        passes = [everything] * self.whole
        passes.append(last)
        return passes


def _groups(
    report: IntervalReport, shares: list[ShareReport], supply: np.ndarray, args: DataArgs
) -> list[_Group]:
    """The groups of an interval with their quotas. Also sets `quota` and `ran_dry` of each of its `shares`.

    Args:
        supply: kept tokens of each group in the interval, [groups].
    """
    total = int(supply.sum())
    whole, rest = 0, report.quota
    if args.exhausted == "repeat" and total:
        whole, rest = divmod(report.quota, total)
    quotas = [rest]
    if args.weights:
        quotas = share_out(rest, supply.tolist(), args.weights)
        for share, tokens, quota in zip(shares, supply.tolist(), quotas, strict=True):
            share.quota = whole * tokens + quota
            share.ran_dry = tokens < int((share.weight or 0) * report.quota)
    return [
        _Group(source, report.high, tokens, whole, quota)
        for source, (tokens, quota) in enumerate(zip(supply.tolist(), quotas, strict=True))
    ]


def _reports(
    reservoir: Reservoir, counted: Counted, args: DataArgs
) -> tuple[list[IntervalReport], list[list[ShareReport]]]:
    """A report for each interval, and for each source in each interval, with the numbers of what was read."""
    bounds, total = reservoir.groups.bounds, sum(args.weights)
    documents = _by_interval(counted.documents, reservoir.groups)
    tokens = _by_interval(counted.tokens, reservoir.groups)
    weights = [weight / total for weight in args.weights] or [None] * len(args.sources)
    intervals, shares = [], []
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        report = IntervalReport(low, high, sum(documents[number]), sum(tokens[number]))
        intervals.append(report)
        shares.append(
            [
                ShareReport(report.name, source, weight, documents[number][source], tokens[number][source])
                for source, weight in enumerate(weights)
            ]
        )
    return intervals, shares


def _by_interval(counted: np.ndarray, groups: LengthGroups) -> list[list[int]]:
    """Numbers of what was read in each interval, for each source.

    Args:
        counted: float64 [all groups, sources].
    """
    drawn_from = counted[: groups.count]
    by_group = drawn_from.reshape(groups.intervals, groups.sources, -1)
    by_interval = by_group.sum(axis=1)
    return np.rint(by_interval).astype(np.int64).tolist()


def _count(
    drawn: list[tuple[int, np.ndarray]],
    pieces: np.ndarray,
    group: np.ndarray,
    intervals: list[IntervalReport],
    shares: list[list[ShareReport]],
    reservoir: Reservoir,
) -> None:
    """Add the drawn documents and tokens to the reports.

    Args:
        drawn: (number of the pass, positions of the pieces drawn in it).
        pieces: the kept pieces, to which the positions refer.
        group: the group of each kept piece.
    """
    size = len(shares[0])
    for _, positions in drawn:
        at = (group[positions] // reservoir.groups.sources) * size + pieces["source"][positions]
        lengths = pieces["length"][positions]
        documents = np.bincount(at, minlength=len(shares) * size).tolist()
        tokens = np.bincount(at, weights=lengths, minlength=len(shares) * size).tolist()
        for share, some, held in zip((one for row in shares for one in row), documents, tokens, strict=True):
            share.documents_after += some
            share.tokens_after += int(held)
    for report, row in zip(intervals, shares, strict=True):
        report.documents_after = sum(share.documents_after for share in row)
        report.tokens_after = sum(share.tokens_after for share in row)
        report.passes = report.tokens_after / report.tokens_before if report.tokens_before else 0.0


def _shuffled(drawn: list[tuple[int, np.ndarray]], pieces: np.ndarray, seed: int) -> np.ndarray:
    """All drawn pieces, ordered by a second sampling key."""
    found = pieces[np.concatenate([positions for _, positions in drawn])]
    sampling_keys = [
        splitmix64(pieces["sampling_key"][positions] ^ hash_of_seed(seed, ORDER + nth))
        for nth, positions in drawn
    ]
    return found[np.argsort(np.concatenate(sampling_keys), kind="stable")]
