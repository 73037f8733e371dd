"""Which documents train and which are held out, and how long ones are cut: from the parts' indices to pieces on disk.

Only the indices are read (28 bytes a document), never the tokens. Memory does not grow with the corpus, but for one bit per
document that marks the exact duplicates (a thousand million documents: 125 MB): digests are compared two million at a time,
and a larger corpus is scanned as often as that needs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.args import DataArgs
from pod.data.balance import bounds_of
from pod.data.documents import PIECE, splitmix64
from pod.data.token_store import Part
from pod.files import atomic_stream, explain_disk_full, read_json, write_json

CHUNK_DOCUMENTS = 1 << 16
"""Documents (or pieces) read at a time; the result does not depend on it."""
SCAN_DOCUMENTS = 1 << 21
"""Documents whose digests are compared in one scan, about; the result does not depend on it."""

_PLACED = np.dtype([("place", "<u8"), ("piece", PIECE)])
_PIECES, _HELD_OUT, _DONE = "pieces.bin", "held_out.bin", "select.json"


@dataclass
class Counts:
    """What became of the documents of one source, or of all."""

    capped: int = 0
    """Documents beyond `max_documents`; everything else counts only those before."""
    duplicates: int = 0
    """Documents left out because an identical text came before, in any source."""
    other_split: int = 0
    """Documents held out from training."""
    documents: int = 0
    """Documents for training, before they are cut."""
    tokens: int = 0
    """Their tokens, boundary tokens included."""
    cut_documents: int = 0
    """Documents longer than the context that were cut into pieces."""
    skipped_long: int = 0
    """Documents left out because they are longer than the context."""
    skipped_long_tokens: int = 0
    dropped_short: int = 0
    """Pieces left out because they are shorter than `min_tokens` or the shortest interval."""
    dropped_short_tokens: int = 0
    fingerprint: str = ""
    """SHA-256 over the digests of the source's documents in reading order; over the sources' fingerprints for all."""


@dataclass(frozen=True)
class Selection:
    """The training pieces and the held-out documents, on disk in `folder`."""

    folder: Path
    num_pieces: int
    num_held_out: int
    held_out_tokens: int
    total: Counts
    sources: list[Counts] = field(default_factory=list)

    @classmethod
    def open(cls, folder: str | Path) -> Selection:
        """A finished selection. Raises `ValueError` when there is none or its files are not whole."""
        folder = Path(folder)
        told = read_json(folder / _DONE)
        for name, count in ((_PIECES, told["num_pieces"]), (_HELD_OUT, told["num_held_out"])):
            file = folder / name
            if not file.is_file() or file.stat().st_size != count * PIECE.itemsize:
                raise ValueError(f"{file} is missing or not whole: delete {folder / _DONE} and select again")
        told["total"] = Counts(**told["total"])
        told["sources"] = [Counts(**counts) for counts in told["sources"]]
        return cls(folder, **told)

    def pieces(self, start: int, stop: int) -> np.ndarray:
        """PIECE records [start, stop) in reading order."""
        return _read(self.folder / _PIECES, PIECE, start, min(stop, self.num_pieces))

    def held_out(self, start: int, stop: int) -> np.ndarray:
        """PIECE records [start, stop) of the held-out documents, uncut, ordered by their place in the split."""
        return _read(self.folder / _HELD_OUT, PIECE, start, min(stop, self.num_held_out))

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """PIECE records of any numbers, in the order given."""
        numbers = np.asarray(numbers, dtype=np.int64)
        order = np.argsort(numbers, kind="stable")
        with open(self.folder / _PIECES, "rb") as stream:
            descriptor, size = stream.fileno(), PIECE.itemsize
            found = b"".join(os.pread(descriptor, size, at) for at in (numbers[order] * size).tolist())
        taken = np.empty(len(numbers), PIECE)
        taken[order] = np.frombuffer(found, PIECE)
        return taken

    def as_dict(self) -> dict[str, Any]:
        """For `select.json` and the manifest."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def select(
    parts: Sequence[Part],
    args: DataArgs,
    folder: str | Path,
    *,
    chunk_documents: int = CHUNK_DOCUMENTS,
    scan_documents: int = SCAN_DOCUMENTS,
) -> Selection:
    """Choose the documents of `parts` (in reading order) and write `pieces.bin`, `held_out.bin` and, last, `select.json`.

    In this order a document is left out because it is beyond `max_documents` of its source or an exact duplicate of an
    earlier one; then it is held out or, cut by the policies, becomes pieces. A finished selection in `folder` is opened as
    it is. Raises `ValueError` for a document longer than the context under `long_documents="error"`, `OSError` when the
    disk is full.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _DONE).exists():
        return Selection.open(folder)
    scan = _Scan(parts, args, chunk_documents)
    with explain_disk_full(folder / _PIECES, written=folder):
        marked = _duplicates(scan, scan_documents)
        sources, num_pieces = _write_pieces(scan, marked, folder / _PIECES)
        total = _add_up(sources)
        held_out_tokens = _write_held_out(scan, marked, total.other_split, scan_documents, folder / _HELD_OUT)
        selection = Selection(folder, num_pieces, total.other_split, held_out_tokens, total, sources)
        write_json(folder / _DONE, selection.as_dict())
    return selection


@dataclass
class _Chunk:
    """Neighbouring documents of one part, those beyond `max_documents` cut off."""

    part_number: int
    part: Part
    first: int
    """Ordinal of the first document in its part."""
    ordinal: int
    """Ordinal of the first document in the corpus."""
    documents: np.ndarray
    starts: np.ndarray
    """int64: where the tokens of each document start in the part."""
    capped: int
    """Documents cut off."""


@dataclass
class _Scan:
    """Walks over the indices of all parts, as often as asked."""

    parts: Sequence[Part]
    args: DataArgs
    size: int

    @property
    def num_documents(self) -> int:
        return sum(part.num_documents for part in self.parts)

    def __iter__(self) -> Iterator[_Chunk]:
        limit = self.args.max_documents
        seen = [0] * len(self.args.sources)
        ordinal = 0
        for number, part in enumerate(self.parts):
            start = 0
            for first in range(0, part.num_documents, self.size):
                stop = min(first + self.size, part.num_documents)
                room = stop - first if limit is None else max(0, limit - seen[part.source])
                kept = min(stop, first + room)
                documents = part.index(first, kept)
                stops = start + np.cumsum(documents["tokens"], dtype=np.int64)
                starts = stops - documents["tokens"]
                yield _Chunk(number, part, first, ordinal, documents, starts, stop - kept)
                start = int(stops[-1]) if len(stops) else start
                seen[part.source] += stop - first
                ordinal += stop - first

    def fates(self, marked: np.ndarray) -> Iterator[tuple[_Chunk, np.ndarray, np.ndarray]]:
        """(chunk, bool: is an exact duplicate, bool: is held out)"""
        for chunk in self:
            duplicate = _bits(marked, chunk.ordinal, len(chunk.documents))
            held = chunk.documents["place"].astype(np.float64) / 2.0**64 < self.args.held_out_fraction
            yield chunk, duplicate, held & ~duplicate


def _duplicates(scan: _Scan, scan_documents: int) -> np.ndarray:
    """uint8 with the bit of every document set whose digest came before."""
    marked = np.zeros(-(-scan.num_documents // 8), np.uint8)
    num_scans = max(1, -(-scan.num_documents // scan_documents)) if scan.args.deduplicate else 0
    for number in range(num_scans):
        digests, ordinals = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)]
        for chunk in scan:
            own = np.flatnonzero(chunk.documents["digest"][:, 1] % np.uint64(num_scans) == number)
            digests.append(chunk.documents["digest"][own])
            ordinals.append(chunk.ordinal + own)
        repeated = np.concatenate(ordinals)[_repeats(np.concatenate(digests))]
        np.bitwise_or.at(marked, repeated >> 3, (1 << (repeated & 7)).astype(np.uint8))
    return marked


def _repeats(digests: np.ndarray) -> np.ndarray:
    """Positions int64 of the rows [n, 2] that equal an earlier one."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of equal digests the first one stays first
    ordered = digests[order]
    return order[1:][(ordered[1:] == ordered[:-1]).all(axis=1)]


def _write_pieces(scan: _Scan, marked: np.ndarray, file: Path) -> tuple[list[Counts], int]:
    """Counts per source, and the number of pieces for training, which are written in reading order."""
    sources, num_pieces = [Counts() for _ in scan.args.sources], 0
    hashes = [hashlib.sha256() for _ in sources]
    with atomic_stream(file) as stream:
        for chunk, duplicate, held in scan.fates(marked):
            counts = sources[chunk.part.source]
            hashes[chunk.part.source].update(chunk.documents["digest"].tobytes())
            counts.capped += chunk.capped
            counts.duplicates += int(duplicate.sum())
            counts.other_split += int(held.sum())
            pieces = _cut(chunk, np.flatnonzero(~(duplicate | held)), scan.args, counts)
            stream.write(pieces.tobytes())
            num_pieces += len(pieces)
    for counts, one in zip(sources, hashes, strict=True):
        counts.fingerprint = one.hexdigest()
    return sources, num_pieces


def _write_held_out(scan: _Scan, marked: np.ndarray, count: int, scan_documents: int, file: Path) -> int:
    """Write the `count` held-out documents, ordered by their place; returns their tokens."""
    num_scans, tokens = -(-count // scan_documents), 0
    with atomic_stream(file) as stream:
        for number in range(num_scans):
            found = [np.empty(0, _PLACED)]
            for chunk, _, held in scan.fates(marked):
                of_scan = chunk.documents["place"] / 2.0**64 / scan.args.held_out_fraction * num_scans
                own = np.flatnonzero(held & (np.minimum(of_scan.astype(np.int64), num_scans - 1) == number))
                placed = np.empty(len(own), _PLACED)
                placed["place"], placed["piece"] = chunk.documents["place"][own], _pieces(chunk, own)
                found.append(placed)
            placed = np.concatenate(found)
            pieces = placed["piece"][np.argsort(placed["place"], kind="stable")]
            stream.write(pieces.tobytes())
            tokens += int(pieces["length"].sum(dtype=np.int64))
    return tokens


def _pieces(chunk: _Chunk, which: np.ndarray) -> np.ndarray:
    """One PIECE for each document of the chunk numbered in `which`."""
    pieces = np.empty(len(which), PIECE)
    pieces["part"], pieces["source"] = chunk.part_number, chunk.part.source
    pieces["length"], pieces["start"] = chunk.documents["tokens"][which], chunk.starts[which]
    pieces["key"] = splitmix64(chunk.documents["digest"][which, 0] ^ splitmix64(0))
    return pieces


def _cut(chunk: _Chunk, which: np.ndarray, args: DataArgs, counts: Counts) -> np.ndarray:
    """PIECE records that training may use of the documents numbered in `which`; counts what the policies leave out."""
    context = args.context_length
    lengths = chunk.documents["tokens"][which].astype(np.int64)
    counts.documents += len(which)
    counts.tokens += int(lengths.sum())
    long = lengths > context
    if long.any() and args.long_documents == "error":
        at = int(np.argmax(long))
        raise ValueError(
            f"document {chunk.first + which[at] + 1} of {chunk.part.name} has {lengths[at]} tokens, the context holds "
            f"{context}: set data.long_documents to cut or skip, or a longer data.context_length"
        )
    if args.long_documents == "skip":
        counts.skipped_long += int(long.sum())
        counts.skipped_long_tokens += int(lengths[long].sum())
        which, lengths = which[~long], lengths[~long]
    else:
        counts.cut_documents += int(long.sum())
    num_cuts = np.maximum(1, -(-lengths // context))
    document = np.repeat(np.arange(len(which)), num_cuts)
    cut = np.arange(len(document)) - np.repeat(np.cumsum(num_cuts) - num_cuts, num_cuts)
    pieces = _pieces(chunk, which[document])
    pieces["start"] += (cut * context).astype(np.uint64)
    pieces["length"] = np.minimum(lengths[document] - cut * context, context)
    pieces["key"] = splitmix64(
        chunk.documents["digest"][which[document], 0] ^ splitmix64(cut.astype(np.uint64))
    )
    least = args.min_tokens if args.short_documents == "keep" else max(args.min_tokens, bounds_of(args)[1])
    short = pieces["length"] < least
    counts.dropped_short += int(short.sum())
    counts.dropped_short_tokens += int(pieces["length"][short].sum(dtype=np.int64))
    return pieces[~short]


def _read(file: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.fromfile(file, dtype, count=max(0, stop - start), offset=start * dtype.itemsize)


def _bits(marked: np.ndarray, start: int, count: int) -> np.ndarray:
    """Bits [start, start + count), bool."""
    some = np.unpackbits(marked[start // 8 : (start + count + 7) // 8], bitorder="little")
    return some[start % 8 : start % 8 + count].astype(bool)


def _add_up(sources: list[Counts]) -> Counts:
    names = [one.name for one in fields(Counts) if one.name != "fingerprint"]
    total = Counts()
    for name in names:
        setattr(total, name, sum(getattr(counts, name) for counts in sources))
    total.fingerprint = hashlib.sha256("".join(one.fingerprint for one in sources).encode()).hexdigest()
    return total
