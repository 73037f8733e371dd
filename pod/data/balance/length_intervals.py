"""Equal tokens per length interval, as in the training data of the PoD paper (arXiv:2412.02252, §3).

Here are the intervals, their quotas, and the choice of pieces that meet a quota.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pod.data.args import DataArgs

TOLERANCE = 0.001
"""Share of a quota that may be missing before `choose` looks for a better choice of the last pieces."""
NOTED_DEVIATION = 0.005
"""Share of an interval's quota that may be missing without a note."""
_RESERVE = 32
"""Most pieces on each side of the end of a draw that may be exchanged."""
_SUBSET_BYTES = 32 * 2**20
"""Memory in bytes that the sums of these pieces may take, roughly."""


@dataclass
class IntervalReport:
    """One length interval [low, high) (the last one [low, high]) before and after the draw."""

    low: int
    """Tokens of the shortest document that belongs to the interval."""
    high: int
    """First length of the next interval; in the last interval the longest document."""
    documents_before: int = 0
    """Documents read."""
    tokens_before: int = 0
    """Tokens of the documents read."""
    documents_after: int = 0
    """Documents drawn; repeated ones count each time."""
    tokens_after: int = 0
    """Tokens drawn."""
    quota: int = 0
    """Tokens that the draw should take."""
    ran_dry: bool = False
    """The interval holds fewer tokens than an equal share of the target."""
    passes: float = 0.0
    """Tokens drawn / tokens there are. Above 1, documents are repeated."""

    @property
    def name(self) -> str:
        """The bounds as text, such as `1K–2K`."""
        return interval_name(self.low, self.high)

    def as_dict(self) -> dict[str, Any]:
        """The report as the manifest stores it: the name and all fields."""
        return {"name": self.name, **asdict(self)}


@dataclass
class ShareReport:
    """One source in one length interval, before and after the draw."""

    interval: str
    """Name of the interval."""
    source: int
    """Index in `sources`."""
    weight: float | None
    """Share of the interval's tokens that the source should give (all sources: 1); None without weights."""
    documents_before: int = 0
    """Documents read."""
    tokens_before: int = 0
    """Tokens of the documents read."""
    documents_after: int = 0
    """Documents drawn; repeated ones count each time."""
    tokens_after: int = 0
    """Tokens drawn."""
    quota: int = 0
    """Tokens that the draw should take, after dry sources left theirs to the others; 0 without weights."""
    ran_dry: bool = False
    """The source holds fewer tokens of the interval than its weight asks for."""


def bounds_of(args: DataArgs) -> list[int]:
    """Tokens at which each length interval starts, and at the end the context length.

    They follow from `intervals` or `shortest_interval`. Example: `shortest_interval=1024` and a context of
    4,096 tokens give [1, 1024, 2048, 4096].
    """
    if args.intervals:
        return [1, *args.intervals, args.context_length]
    doublings = max(1, math.ceil(math.log2(args.context_length / args.shortest_interval)))
    return [1, *(args.shortest_interval << number for number in range(doublings)), args.context_length]


def interval_of(lengths: np.ndarray, bounds: list[int]) -> np.ndarray:
    """Interval number of each length; int64. A length equal to the context belongs to the last interval.

    Args:
        lengths: tokens, [n].
        bounds: as `bounds_of` gives them.
    """
    return np.clip(np.searchsorted(bounds, lengths, side="right") - 1, 0, len(bounds) - 2)


def kept_quotas(supply: np.ndarray, args: DataArgs) -> list[int]:
    """Tokens of each group that the draw may need in the end, in the order of the groups.

    A group that already has more tokens than this number will not need more of them later: for such a group
    the number never rises when more documents are read. So its tokens beyond the number can be dropped.

    Args:
        supply: the tokens that are known so far, [intervals, groups in each].
    """
    held = supply.sum(axis=1)
    level = share = share_of(args, len(supply))
    if args.exhausted == "redistribute":
        level = int(fill_equally(held, share * len(supply)).max())
    weights = args.weights or [1.0]
    return [
        math.ceil(most)
        for row, wanted in zip(supply.tolist(), np.minimum(held, level).tolist(), strict=True)
        for most in _shares(wanted, row, weights)
    ]


def share_of(args: DataArgs, num_intervals: int) -> int:
    """Tokens that each interval gets when none runs dry."""
    assert args.target_tokens is not None, "without a target nothing is prepared"
    return args.target_tokens // num_intervals


def set_quotas(reports: list[IntervalReport], supply: np.ndarray, args: DataArgs) -> None:
    """Fill in `quota` and `ran_dry` of all intervals.

    Args:
        supply: the tokens of each interval that are kept, [intervals].

    Raises:
        ValueError: there are no documents at all; or an interval is empty, and `exhausted` is not
            `redistribute`.
    """
    if not supply.sum():
        raise ValueError(
            "no document is left to draw from: set data.long_documents to cut or data.short_documents to "
            "keep, lower data.shortest_interval, data.min_tokens or data.held_out_tokens, or add sources"
        )
    share = share_of(args, len(reports))
    empty = [report.name for report, tokens in zip(reports, supply, strict=True) if not tokens]
    if empty and args.exhausted != "redistribute":
        raise ValueError(
            f"no document has {', '.join(empty)} tokens and data.exhausted={args.exhausted!r} needs all "
            "intervals: use 'redistribute', a larger data.shortest_interval or sources with such documents"
        )
    if args.exhausted == "repeat":
        quotas = np.full(len(reports), share)
    elif args.exhausted == "stop":
        quotas = np.full(len(reports), min(share, int(supply.min())))
    else:
        quotas = fill_equally(supply, share * len(reports))
    for report, tokens, quota in zip(reports, supply.tolist(), quotas.tolist(), strict=True):
        report.ran_dry, report.quota = tokens < share, quota


def fill_equally(supply: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` tokens equally among intervals, but give none more than it has.

    Example: a total of 120 for intervals with 10, 100 and 100 tokens gives 10, 55 and 55.

    Args:
        supply: the tokens of each interval, int64 [intervals].

    Returns:
        The quotas, int64 [intervals]. Their sum is `total`, or all of `supply` if that is less.
    """
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


def share_out(quota: int, supply: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Divide `quota` among sources in the ratio of `weights`, in whole tokens.

    A source that has fewer tokens than its share gives all it has. The others give the missing tokens, in the
    ratio of their weights. The sum is min(quota, sum of supply). The arithmetic is exact. The few tokens that
    are left after rounding down go to the first sources that have more.

    Args:
        supply: the tokens that each source has.
    """
    given = [math.floor(share) for share in _shares(quota, supply, weights)]
    # Rounding down leaves fewer tokens than there are sources that can give one more.
    left = min(quota, sum(supply)) - sum(given)
    room = [number for number, most in enumerate(supply) if given[number] < most]
    for number in room[:left]:
        given[number] += 1
    return given


def _shares(quota: int, supply: Sequence[int], weights: Sequence[float]) -> list[Fraction]:
    """Exact shares of `quota`: the weight of each source times a common level, at most its supply."""
    # 0.1 is a tenth, not the double nearest to it
    exact = [Fraction(repr(float(weight))) for weight in weights]
    given = [Fraction(0)] * len(supply)
    left = Fraction(min(quota, sum(supply)))
    active = [number for number in range(len(supply)) if supply[number]]
    while active and left:
        total = sum(exact[number] for number in active)
        dry = [number for number in active if left * exact[number] >= supply[number] * total]
        for number in dry or active:
            given[number] = Fraction(supply[number]) if dry else left * exact[number] / total
        if not dry:
            break
        left -= sum(supply[number] for number in dry)
        active = [number for number in active if number not in dry]
    return given


def choose(lengths: np.ndarray, quota: int, longest: int) -> np.ndarray:
    """Choose pieces that together have nearly `quota` tokens, and never more.

    Pieces are taken from the first one on, as many as fit. When more than 0.1 % of the quota is then missing,
    the last `reserve(longest)` pieces that were taken and as many pieces after them are chosen anew, so that
    their sum is the largest that fits. Of equally good choices, the one with the earlier pieces is taken.

    Args:
        lengths: the lengths in the order of the draw.
        longest: the upper bound of the interval.

    Returns:
        Positions of the chosen pieces, ascending, int64.
    """
    totals = np.cumsum(lengths, dtype=np.int64)
    count = int(np.searchsorted(totals, quota, side="right"))
    have = int(totals[count - 1]) if count else 0
    if count == len(lengths) or quota - have <= TOLERANCE * quota:
        return np.arange(count)
    first = max(0, count - reserve(longest))
    around = lengths[first : count + reserve(longest)].tolist()
    room = quota - (int(totals[first - 1]) if first else 0)
    chosen = np.array(_fullest(around, room), dtype=np.int64)
    return np.concatenate([np.arange(first), first + chosen])


def reserve(longest: int) -> int:
    """How many pieces before and behind the end of a draw may be exchanged: 4 to 32.

    There are fewer for longer pieces, because `_fullest` needs more memory for their sums.
    """
    return max(4, min(_RESERVE, math.isqrt(2 * _SUBSET_BYTES // longest)))


def _fullest(lengths: list[int], room: int) -> list[int]:
    """Positions whose lengths have the largest sum of at most `room` tokens.

    Of choices with the same sum, the one that leaves out positions at the end is taken.
    """
    mask = (1 << (room + 1)) - 1
    reachable = [1]  # bit s of entry i: some of the first i lengths sum to s
    for length in lengths:
        reachable.append((reachable[-1] | reachable[-1] << length) & mask)
    total = reachable[-1].bit_length() - 1
    chosen = []
    for position in range(len(lengths) - 1, -1, -1):
        if not reachable[position] >> total & 1:
            chosen.append(position)
            total -= lengths[position]
    return chosen[::-1]


def balance_report(
    args: DataArgs, intervals: list[IntervalReport], shares: list[ShareReport]
) -> dict[str, Any]:
    """How equal the intervals came out, as the manifest stores it under `balance`.

    Returns:
        `equal_share_tokens`, `largest_deviation` (relative to that share), and `notes`: lines that name each
        interval or source that ran dry, and each interval that misses its quota by more than 0.5 %.
    """
    after = [interval.tokens_after for interval in intervals]
    share = max(1, share_of(args, len(intervals)))
    what = {
        "stop": "all intervals are reduced to the scarcest one",
        "repeat": "its documents are used {:.1f} times",
        "redistribute": "the missing tokens come from the other intervals",
    }[args.exhausted]
    notes = [
        f"interval {interval.name} ran dry: it has {interval.tokens_before:,} tokens, but its share is "
        f"{max(share, interval.quota):,}; {what.format(interval.passes)}"
        for interval in intervals
        if interval.ran_dry
    ]
    for interval in intervals:
        missing = 1 - interval.tokens_after / interval.quota if interval.quota else 0
        if missing > NOTED_DEVIATION:
            notes.append(
                f"interval {interval.name} has {interval.tokens_after:,} tokens, {100 * missing:.1f} % less "
                f"than its quota of {interval.quota:,}: no choice of whole documents comes closer"
            )
    quotas = {interval.name: interval.quota for interval in intervals}
    for one in shares:
        if one.ran_dry:
            notes.append(
                f"interval {one.interval}: source {args.sources[one.source]!r} ran dry: it has "
                f"{one.tokens_before:,} tokens, but its share is "
                f"{round((one.weight or 0) * quotas[one.interval]):,}; the missing tokens come from the "
                "other sources"
            )
    deviation = max(abs(tokens - share) for tokens in after) / share
    return {"equal_share_tokens": share, "largest_deviation": deviation, "notes": notes}


def interval_name(low: int, high: int) -> str:
    """Text for an interval from `low` to `high` tokens: 1024 and 2048 give `1K–2K`."""
    return f"{_short(low)}–{_short(high)}"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
