"""What the draw may need of all that was read so far: in each group the pieces of the smallest sampling keys.

A group is a length interval; with weights it is one source in an interval. While documents are added, the
shares of the groups in `target_tokens` are known better and better, and more pieces compete for them. So the
limits below which a piece is kept only ever fall. What is kept therefore depends on the set of documents
alone, not on when they came or what was dropped before. It never holds more than the target and a reserve.
"""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pod.data.args import DataArgs
from pod.data.balance.length_intervals import bounds_of, interval_of, kept_quotas, reserve
from pod.data.balance.sampling_keys import sampling_keys_of
from pod.data.tokens.token_file import PIECE

ALL = np.uint64(2**64 - 1)
HELD_OUT_SHARE = 0.2
"""Share of the documents that can be held out at most, so that a small corpus keeps text to train on."""
SAMPLE = 1024
"""How many pieces that are too short or too long to train are kept, to tell how many there are."""
COPIES = 256
"""How many equal pieces are counted."""


class LengthGroups:
    """The groups among which sampling keys decide, numbered by interval, then source.

    Behind them follow the groups that are no part of the draw.

    Attributes:
        bounds: starts of the intervals and the context.
        least: tokens of the shortest piece.
        short: number of the group of pieces below `least`.
        long: number of the group of documents that `long_documents="skip"` leaves out.
        held: first number of the held-out text.
    """

    def __init__(self, args: DataArgs):
        bounds = bounds_of(args)
        self.bounds = bounds[1:] if args.short_documents == "drop" else bounds
        self.least = max(args.min_tokens, self.bounds[0])
        self.sources = len(args.sources) if args.weights else 1
        self.intervals = len(self.bounds) - 1
        self.count = self.intervals * self.sources
        self.short, self.long, self.held = range(self.count, self.count + 3)
        self.total = self.held + self.sources
        self.skips_long = args.long_documents == "skip"

    def of(self, pieces: np.ndarray, place: int) -> np.ndarray:
        """Group of each piece, int64 [n], when documents below `place` are held out."""
        source = pieces["source"].astype(np.int64) if self.sources > 1 else np.zeros(len(pieces), np.int64)
        group = interval_of(pieces["length"], self.bounds) * self.sources + source
        group[pieces["length"] < self.least] = self.short
        if self.skips_long:
            group[pieces["document"] > self.bounds[-1]] = self.long
        held = pieces["place"] < place
        group[held] = self.held + source[held]
        return group

    def ends(self, group: int) -> list[int]:
        """Shortest and longest length of a group."""
        return self.bounds[group // self.sources :][:2]


@dataclass
class Limits:
    """Largest sampling key kept in each group, uint64 [all groups], and the place of the held-out text.

    Documents below the place are held out.
    """

    sampling_keys: np.ndarray
    place: int


class Counted(NamedTuple):
    """How many pieces and tokens everything that was read holds.

    The numbers are exact where nothing was dropped. Elsewhere they follow from the share that is kept.
    """

    documents: np.ndarray
    """Pieces, float64 [all groups, sources]; whole documents where they are left out for their length."""
    tokens: np.ndarray
    copies: int


class Reservoir:
    """The pieces that a draw of all that was added may need, and the pieces held out.

    Args:
        limits: the limits of more documents than are added here.
    """

    def __init__(self, args: DataArgs, seed: int, held_out_tokens: int, limits: Limits | None = None):
        self.args, self.seed, self.held_out_tokens = args, seed, held_out_tokens
        self.groups = LengthGroups(args)
        most = int(HELD_OUT_SHARE * 2**64) if held_out_tokens else 0
        self.limits = deepcopy(limits) if limits else Limits(np.full(self.groups.total, ALL), most)
        self.pieces = np.empty(0, PIECE)
        """Sorted by group, sampling key and order of adding, as `prune` left them."""
        self.group = np.empty(0, np.int64)
        """The group of each of the pieces."""
        self.num_added = 0
        """Tokens added since `prune`."""
        self.held_out_full = not held_out_tokens
        self._added: list[np.ndarray] = []

    def cut(self, documents: np.ndarray) -> np.ndarray:
        """Cut documents of any length into pieces and a rest.

        Documents and pieces are both PIECE records; the documents have digests in place of sampling keys.
        """
        context = self.args.context_length
        number, cut = _cuts(documents["length"], context)
        pieces = documents[number]
        pieces["sampling_key"] = sampling_keys_of(pieces["sampling_key"], cut, self.seed)
        pieces["start"] += cut.astype(np.uint64) * np.uint64(context)
        pieces["document"] = pieces["length"]
        pieces["length"] = np.minimum(pieces["length"] - cut * context, context)
        pieces["first"] = cut == 0
        return pieces

    def may_need(self, digests: np.ndarray, places: np.ndarray, most: np.ndarray, source: int) -> np.ndarray:
        """Whether any piece of documents of at most `most` tokens can be kept, bool [n]; all arrays [n]."""
        context = self.args.context_length
        reach = self._reach(source)
        if reach[0] == ALL:
            return np.ones(len(most), bool)
        number, cut = _cuts(most, context)
        sampling_keys = sampling_keys_of(digests[number], cut, self.seed)
        longest = np.minimum(most[number] - cut * context, context)
        wanted = places < np.uint64(self.limits.place)
        found = sampling_keys <= reach[interval_of(longest, self.groups.bounds)]
        wanted[number[found]] = True
        if self.groups.skips_long:
            # One that is too long must be seen to be counted.
            wanted |= most > context
        return wanted

    def _reach(self, source: int) -> np.ndarray:
        """Largest sampling key kept of a piece of at most each interval's length, uint64 [intervals]."""
        groups = self.groups
        sampling_keys = self.limits.sampling_keys[: groups.count].reshape(groups.intervals, groups.sources)
        return np.maximum.accumulate(sampling_keys[:, source if groups.sources > 1 else 0])

    def add(self, pieces: np.ndarray) -> None:
        """Add pieces from `cut`; those above the limits are dropped."""
        group = self.groups.of(pieces, self.limits.place)
        pieces = pieces[pieces["sampling_key"] <= self.limits.sampling_keys[group]]
        self.num_added += int(pieces["length"].sum(dtype=np.int64))
        self._added.append(pieces)

    def prune(self) -> None:
        """Find the limits anew and drop what lies above."""
        groups, limits = self.groups, self.limits
        pieces = np.concatenate([self.pieces, *self._added])
        self._added = []
        self.num_added = 0
        self._hold_out(pieces)
        group = groups.of(pieces, limits.place)
        # stable: of equal pieces the first one stays first
        order = np.lexsort((pieces["sampling_key"], group))
        pieces, group = pieces[order], group[order]
        pieces["copy"], rank = self._copies(pieces["sampling_key"], group)
        own = ~pieces["copy"]
        self._lower_limits(pieces[own], group[own])
        kept = (pieces["sampling_key"] <= limits.sampling_keys[group]) & (rank < COPIES)
        self.pieces, self.group = pieces[kept], group[kept]

    def _lower_limits(self, pieces: np.ndarray, group: np.ndarray) -> None:
        """Lower the limits of the groups to the pieces that are needed.

        Args:
            pieces, group: all pieces that are no copies, sorted by group and sampling key, and their groups.
        """
        groups, limits = self.groups, self.limits.sampling_keys
        sampling_keys = pieces["sampling_key"]
        lengths = pieces["length"].astype(np.int64)
        supply = np.bincount(group, weights=lengths, minlength=groups.count)[: groups.count]
        quotas = kept_quotas(supply.astype(np.int64).reshape(groups.intervals, -1), self.args)
        starts = np.searchsorted(group, np.arange(groups.held + 1)).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            last = start + self._needed(number, lengths[start:stop], quotas)
            if last < stop:
                limits[number] = min(limits[number], sampling_keys[last - 1])
        # Pieces that are too short are known if the first interval would keep them: all documents reach that
        # one.
        shortest = [groups.short, *range(groups.sources)]
        limits[groups.short] = limits[shortest].min()

    @property
    def is_full(self) -> bool:
        """Whether every group and the held-out text have all that is asked for, and more to choose from."""
        return self.held_out_full and bool((self.limits.sampling_keys[: self.groups.count] < ALL).all())

    def training(self) -> tuple[np.ndarray, np.ndarray]:
        """The kept pieces that may be drawn and their groups, both [n].

        There are no copies, also not between sources with weights.
        """
        own = np.flatnonzero((self.group < self.groups.count) & ~self.pieces["copy"])
        if self.args.deduplicate and self.groups.sources > 1:
            own = own[np.sort(np.unique(self.pieces["sampling_key"][own], return_index=True)[1])]
        return self.pieces[own], self.group[own]

    def held_out(self) -> list[np.ndarray]:
        """The pieces of each held-out document, in the order of their places."""
        held = self.pieces[(self.group >= self.groups.held) & ~self.pieces["copy"]]
        if self.args.deduplicate:
            # also between sources with weights
            held = held[np.unique(held["sampling_key"], return_index=True)[1]]
        held = held[np.lexsort((held["start"], held["work_shard"]))]
        documents = np.split(held, np.flatnonzero(held["first"])[1:]) if len(held) else []
        return sorted(documents, key=lambda pieces: (int(pieces["place"][0]), int(pieces["sampling_key"][0])))

    def counted(self, num_sources: int) -> Counted:
        """Pieces and tokens of all that was added, held-out text in its own group."""
        limits = self.limits.sampling_keys
        share = np.where(limits < ALL, limits / 2.0**64, 1.0)[self.group]
        sampled = (limits[self.group] == ALL) | (self.pieces["sampling_key"] < limits[self.group])
        copy = self.pieces["copy"]
        at = self.group * num_sources + self.pieces["source"]
        size = len(limits) * num_sources

        def count(values: np.ndarray) -> np.ndarray:
            found = np.bincount(at, weights=np.where(sampled & ~copy, values / share, 0), minlength=size)
            return found.reshape(-1, num_sources)

        copies = int((1 / share)[sampled & copy].sum())
        documents = np.where(self.group == self.groups.long, self.pieces["first"], True)
        return Counted(count(documents), count(self.pieces["length"]), copies)

    def _copies(self, sampling_keys: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the sorted pieces are copies, and how many equal pieces stand before each.

        A copy equals the piece before it (bool [n]). The counts are int64 [n].
        """
        copy = np.zeros(len(sampling_keys), bool)
        if self.args.deduplicate:
            copy[1:] = (sampling_keys[1:] == sampling_keys[:-1]) & (group[1:] == group[:-1])
        at = np.arange(len(sampling_keys))
        return copy, at - np.maximum.accumulate(np.where(copy, 0, at))

    def _hold_out(self, pieces: np.ndarray) -> None:
        """Lower the held-out limit to the documents that are needed.

        Each document counts with the context's length at most.
        """
        own = pieces[pieces["first"] & (pieces["place"] < self.limits.place)]
        own = own[np.unique(own["sampling_key"], return_index=True)[1]]
        own = own[np.argsort(own["place"], kind="stable")]
        total = np.cumsum(own["length"], dtype=np.int64)
        last = int(np.searchsorted(total, self.held_out_tokens))
        if last < len(own):
            # All documents of one place stand on one side.
            self.limits.place, self.held_out_full = int(own["place"][last]) + 1, True

    def _needed(self, number: int, lengths: np.ndarray, quotas: list[int]) -> int:
        """How many of a group's pieces, in the order of their sampling keys, are kept."""
        if number >= self.groups.count:
            return SAMPLE
        high = self.groups.ends(number)[1]
        # The groups before it leave less than one piece to a group. Else the last of them that is not dry had
        # taken it.
        most = quotas[number] + high
        that_fit = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), most, side="right"))
        return that_fit + 1 + reserve(high)


def _cuts(lengths: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each piece comes from: (number of the document, number of the piece in it), int64 [pieces].

    Args:
        lengths: tokens of the documents, [n].
    """
    counts = np.maximum(1, -(-lengths.astype(np.int64) // context))
    number = np.repeat(np.arange(len(lengths)), counts)
    return number, np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
