"""Keeps what the draw may need of all documents: in each group the pieces with the smallest sampling keys.

A group is a length interval; with weights it is one source in an interval. The more documents are added, the
better the shares of the groups in `target_tokens` are known, and the more pieces compete for them. So the
limits below which a piece is kept only ever fall. What is kept therefore depends on the set of documents
alone, not on when they came or what was dropped before. The reservoir never holds more than the target and a
reserve.
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
"""The limit of a group of which nothing has been dropped yet."""
HELD_OUT_SHARE = 0.2
"""Share of the documents that can be held out at most, so that a small corpus keeps text to train on."""
SAMPLE = 1024
"""How many of the pieces that are left out for their length are kept, to estimate how many there are."""
COPIES = 256
"""How many equal pieces are kept at most, to count the copies."""


class LengthGroups:
    """The groups among which sampling keys decide, numbered by interval, then source.

    Behind them follow groups that take no part in the draw: too short, too long, held out.

    Attributes:
        bounds: starts of the intervals in tokens, then the context length.
        least: tokens of the shortest piece that can be drawn.
        sources: number of sources that are told apart; 1 without weights.
        intervals: number of length intervals.
        count: number of groups that can be drawn from.
        short: number of the group of pieces below `least`.
        long: number of the group of documents that `long_documents="skip"` leaves out.
        held: number of the first group of held-out text; there is one for each of `sources`.
        total: number of all groups.
        skips_long: whether `long_documents` is "skip".
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

    def of(self, pieces: np.ndarray, held_out_limit: int) -> np.ndarray:
        """Group of each piece, int64 [n].

        Args:
            pieces: PIECE [n].
            held_out_limit: see `Limits.held_out_limit`.
        """
        source = pieces["source"].astype(np.int64) if self.sources > 1 else np.zeros(len(pieces), np.int64)
        group = interval_of(pieces["length"], self.bounds) * self.sources + source
        group[pieces["length"] < self.least] = self.short
        if self.skips_long:
            group[pieces["document"] > self.bounds[-1]] = self.long
        held = pieces["held_out_key"] < held_out_limit
        group[held] = self.held + source[held]
        return group

    def ends(self, group: int) -> list[int]:
        """The bounds in tokens of a group's length interval: its start and the start of the next one."""
        return self.bounds[group // self.sources :][:2]


@dataclass
class Limits:
    """The limits that decide which pieces are kept, and which documents are held out."""

    sampling_keys: np.ndarray
    """Largest sampling key that is kept in each group, uint64 [all groups]."""
    held_out_limit: int
    """Documents whose `PIECE["held_out_key"]` is below this number are held out."""


class Counted(NamedTuple):
    """Numbers of pieces and tokens in everything that was read.

    They are exact for groups of which nothing was dropped. For the others they are estimated from the share
    that was kept.
    """

    documents: np.ndarray
    """Pieces, float64 [all groups, sources]. Documents that are left out as too long count once each."""
    tokens: np.ndarray
    """Tokens, float64 [all groups, sources]."""
    copies: int
    """Pieces that equal another piece which was read."""


class Reservoir:
    """The pieces that the draw may need of all documents that were added, and the pieces held out.

    Args:
        args: settings of the recipe's `data` section.
        seed: seed of the sampling keys.
        held_out_tokens: tokens of whole documents to hold out of the draw.
        limits: limits to start from, which another reservoir found from other documents of the same sources.
            None keeps everything at first.
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
        """Cut each document into pieces of the context length; its last piece has the tokens that remain.

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

    def may_need(
        self, digests: np.ndarray, held_out_keys: np.ndarray, most: np.ndarray, source: int
    ) -> np.ndarray:
        """Whether any piece of each document may be kept, bool [n]. Other documents need not be tokenised.

        Args:
            digests: digests of the documents, uint64 [n].
            held_out_keys: their keys for the held-out split, uint64 [n].
            most: tokens that they have at most, int64 [n].
            source: index of the source of all of them.
        """
        context = self.args.context_length
        reach = self._reach(source)
        if reach[0] == ALL:
            return np.ones(len(most), bool)
        number, cut = _cuts(most, context)
        sampling_keys = sampling_keys_of(digests[number], cut, self.seed)
        longest = np.minimum(most[number] - cut * context, context)
        wanted = held_out_keys < np.uint64(self.limits.held_out_limit)
        found = sampling_keys <= reach[interval_of(longest, self.groups.bounds)]
        wanted[number[found]] = True
        if self.groups.skips_long:
            # A document that may be too long must be tokenised, so that it is counted.
            wanted |= most > context
        return wanted

    def _reach(self, source: int) -> np.ndarray:
        """For each interval, the largest sampling key kept in it or in a shorter one, uint64 [intervals]."""
        groups = self.groups
        sampling_keys = self.limits.sampling_keys[: groups.count].reshape(groups.intervals, groups.sources)
        return np.maximum.accumulate(sampling_keys[:, source if groups.sources > 1 else 0])

    def add(self, pieces: np.ndarray) -> None:
        """Add pieces from `cut`; those above the limits are dropped."""
        group = self.groups.of(pieces, self.limits.held_out_limit)
        pieces = pieces[pieces["sampling_key"] <= self.limits.sampling_keys[group]]
        self.num_added += int(pieces["length"].sum(dtype=np.int64))
        self._added.append(pieces)

    def prune(self) -> None:
        """Lower the limits as far as all pieces added until now allow, and drop the pieces above them."""
        groups, limits = self.groups, self.limits
        pieces = np.concatenate([self.pieces, *self._added])
        self._added = []
        self.num_added = 0
        self._hold_out(pieces)
        group = groups.of(pieces, limits.held_out_limit)
        # stable: of equal pieces the first one stays first
        order = np.lexsort((pieces["sampling_key"], group))
        pieces = pieces[order]
        group = group[order]
        pieces["copy"], rank = self._copies(pieces["sampling_key"], group)
        own = ~pieces["copy"]
        self._lower_limits(pieces[own], group[own])
        kept = (pieces["sampling_key"] <= limits.sampling_keys[group]) & (rank < COPIES)
        self.pieces = pieces[kept]
        self.group = group[kept]

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
        # `may_need` compares every document with the limit of the first interval at least. So too short
        # pieces are sure to be seen only below that limit, and only these may be counted.
        shortest = [groups.short, *range(groups.sources)]
        limits[groups.short] = limits[shortest].min()

    @property
    def is_full(self) -> bool:
        """Whether the held-out text is complete, and every group has more pieces than the draw can need."""
        return self.held_out_full and bool((self.limits.sampling_keys[: self.groups.count] < ALL).all())

    def training(self) -> tuple[np.ndarray, np.ndarray]:
        """The kept pieces that may be drawn and their groups, both [n].

        Copies are left out. With weights, so are copies of pieces in another source.
        """
        own = np.flatnonzero((self.group < self.groups.count) & ~self.pieces["copy"])
        if self.args.deduplicate and self.groups.sources > 1:
            own = own[np.sort(np.unique(self.pieces["sampling_key"][own], return_index=True)[1])]
        return self.pieces[own], self.group[own]

    def held_out(self) -> list[np.ndarray]:
        """The pieces of each held-out document. Documents are sorted by `held_out_key`."""
        held = self.pieces[(self.group >= self.groups.held) & ~self.pieces["copy"]]
        if self.args.deduplicate:
            # With weights, also copies between sources.
            held = held[np.unique(held["sampling_key"], return_index=True)[1]]
        held = held[np.lexsort((held["start"], held["work_shard"]))]
        documents = np.split(held, np.flatnonzero(held["first"])[1:]) if len(held) else []
        return sorted(
            documents, key=lambda pieces: (int(pieces["held_out_key"][0]), int(pieces["sampling_key"][0]))
        )

    def counted(self, num_sources: int) -> Counted:
        """Count the pieces and tokens of all that was added. Held-out text has its own groups."""
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
        """Lower the held-out limit until only as many documents are held out as are needed.

        A document counts with the tokens of its first piece, so with the context length at most.
        """
        own = pieces[pieces["first"] & (pieces["held_out_key"] < self.limits.held_out_limit)]
        own = own[np.unique(own["sampling_key"], return_index=True)[1]]
        own = own[np.argsort(own["held_out_key"], kind="stable")]
        total = np.cumsum(own["length"], dtype=np.int64)
        last = int(np.searchsorted(total, self.held_out_tokens))
        if last < len(own):
            # + 1: documents with the same key are all held out, or none of them.
            self.limits.held_out_limit = int(own["held_out_key"][last]) + 1
            self.held_out_full = True

    def _needed(self, number: int, lengths: np.ndarray, quotas: list[int]) -> int:
        """How many of a group's pieces, in the order of their sampling keys, are kept."""
        if number >= self.groups.count:
            return SAMPLE
        high = self.groups.ends(number)[1]
        # The draw may carry over tokens from the groups before this one, but less than one piece: if it were
        # more, the last of them that is not dry had drawn another piece.
        most = quotas[number] + high
        that_fit = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), most, side="right"))
        return that_fit + 1 + reserve(high)


def _cuts(lengths: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """For each piece: the number of its document, and its number within the document, both int64 [pieces].

    Args:
        lengths: tokens of the documents, [n].
    """
    counts = np.maximum(1, -(-lengths.astype(np.int64) // context))
    number = np.repeat(np.arange(len(lengths)), counts)
    return number, np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
