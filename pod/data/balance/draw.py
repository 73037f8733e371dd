"""Draws the training pieces: in each group those with the smallest sampling keys, until its quota is met."""

import itertools
from dataclasses import dataclass

import numpy as np

from pod.data.args import DataArgs
from pod.data.balance.length_intervals import IntervalReport, ShareReport, choose, set_quotas, share_out
from pod.data.balance.reservoir import Counted, Reservoir
from pod.data.balance.sampling_keys import ORDER, hash_of_seed, splitmix64


@dataclass
class Drawn:
    """The drawn pieces, and how the draw went."""

    pieces: np.ndarray
    """PIECE [n] in the order of training; repeated ones come several times."""
    intervals: list[IntervalReport]
    shares: list[ShareReport]
    """By interval, then source."""
    counted: Counted
    """What everything that was read holds."""


def draw(reservoir: Reservoir, args: DataArgs, seed: int) -> Drawn:
    """Draw from the kept pieces by `target_tokens`, `exhausted` and `weights`.

    The order is a second sampling key over all drawn pieces. The draw is deterministic in `seed`.

    Raises:
        ValueError: when nothing can be drawn.
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
            start, stop = starts[number * len(groups) + one.source :][:2].tolist()
            passes = one.draw(lengths[start:stop], carry)
            carry += one.quota - int(lengths[start + passes[-1]].sum())
            drawn += [(nth, start + at) for nth, at in enumerate(passes)]
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
    """The pieces that compete for one quota: those of an interval, with weights those of one source in it."""

    source: int
    high: int
    """Upper bound of the interval in tokens."""
    tokens: int
    whole: int
    """How often all pieces are drawn, before `quota` tokens are drawn once more."""
    quota: int

    def freedom(self) -> tuple[int, int]:
        """A sort key: groups that can best make up for what the others miss come last.

        Those are the groups with much to choose and much to leave.
        """
        return min(self.quota, self.tokens - self.quota), self.source

    def draw(self, lengths: np.ndarray, carry: int) -> list[np.ndarray]:
        """Positions of the drawn pieces among the group's pieces, pass after pass.

        `carry` tokens more than the quota are wanted.
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
    """The groups of an interval with their quotas; fills in the quotas of its shares."""
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
    """The intervals and, in each, the sources, with what everything that was read holds of them."""
    bounds, total = reservoir.groups.bounds, sum(args.weights)
    shape = reservoir.groups.intervals, reservoir.groups.sources, len(args.sources)
    documents, tokens = (
        np.rint(values[: reservoir.groups.count].reshape(shape).sum(axis=1)).astype(np.int64).tolist()
        for values in (counted.documents, counted.tokens)
    )
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


def _count(
    drawn: list[tuple[int, np.ndarray]],
    pieces: np.ndarray,
    group: np.ndarray,
    intervals: list[IntervalReport],
    shares: list[list[ShareReport]],
    reservoir: Reservoir,
) -> None:
    """Add what was drawn to the reports."""
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
