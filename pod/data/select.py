"""Which documents train and which are held out, and how long ones are cut: from the parts' indices to pieces on disk.

Only the indices are read (28 bytes a document), never the tokens. Memory does not grow with the corpus, but for one bit per
document that marks the exact duplicates (a thousand million documents: 125 MB); identical digests are brought together by
writing them into buckets on disk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pod.data.args import DataArgs
from pod.data.balance import bounds_of
from pod.data.documents import PIECE, splitmix64
from pod.files import atomic_stream, explain_disk_full, read_json, write_json

CHUNK_DOCUMENTS = 1 << 16
"""Documents (or pieces) read at a time; the result does not depend on it."""
BUCKET_DOCUMENTS = 1 << 17
"""Documents whose digests are compared at a time; the result does not depend on it."""

Removed = Mapping[int, np.ndarray] | Sequence[np.ndarray]
"""Part number → ordinals of documents in that part; asked once per part and scan."""

_PREFIX_BITS = 16
_DIGEST = np.dtype([("digest", "<u8", (2,)), ("ordinal", "<u8")])
_PLACED = np.dtype([("place", "<u8"), ("piece", PIECE)])
_PIECES, _HELD_OUT, _DONE = "pieces.bin", "held_out.bin", "select.json"


class PartIndex(Protocol):
    """What is needed of a part of the token store (`pod.data.token_store.Part`)."""

    @property
    def name(self) -> str:
        """The part's unit, for messages."""
        ...

    @property
    def source(self) -> int:
        """Index in `DataArgs.sources`."""
        ...

    @property
    def num_documents(self) -> int: ...

    def index(self, start: int, stop: int) -> np.ndarray:
        """DOCUMENT records [start, stop) in reading order."""
        ...


@dataclass
class Counts:
    """What became of the documents of one source, or of all."""

    capped: int = 0
    """Documents beyond `max_documents`; everything else counts only those before."""
    near_duplicates: int = 0
    """Documents left out because a nearly identical one is kept."""
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
        return {name.name: _plain(getattr(self, name.name)) for name in fields(self) if name.name != "folder"}


def select(
    parts: Sequence[PartIndex],
    args: DataArgs,
    folder: str | Path,
    removed: Removed | None = None,
    *,
    chunk_documents: int = CHUNK_DOCUMENTS,
    bucket_documents: int = BUCKET_DOCUMENTS,
) -> Selection:
    """Choose the documents of `parts` (in reading order) and write `pieces.bin`, `held_out.bin` and, last, `select.json`.

    In this order a document is left out because it is beyond `max_documents` of its source, named in `removed` (near
    duplicates: part number → ordinals of documents in that part), or an exact duplicate of an earlier one; then it is held
    out or, cut by the policies, becomes pieces. A finished selection in `folder` is opened as it is. Raises `ValueError` for
    a document longer than the context under `long_documents="error"`, `OSError` when the disk is full.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _DONE).exists():
        return Selection.open(folder)
    scan = _Scan(parts, args, {} if removed is None else removed, chunk_documents)
    with explain_disk_full(folder / _PIECES, written=folder):
        survey = _survey(scan, args)
        marked = np.zeros(-(-scan.num_documents // 8), np.uint8)
        if args.deduplicate:
            _mark_duplicates(scan, survey, folder, marked, bucket_documents)
        sources, num_pieces, num_held_out, held_out_tokens = _write(
            scan, args, survey, folder, marked, bucket_documents
        )
        for counts, fingerprint in zip(sources, survey.fingerprints, strict=True):
            counts.fingerprint = fingerprint
        selection = Selection(folder, num_pieces, num_held_out, held_out_tokens, _add_up(sources), sources)
        write_json(folder / _DONE, selection.as_dict())
    return selection


@dataclass
class _Chunk:
    """Neighbouring documents of one part, those beyond `max_documents` cut off."""

    part_number: int
    part: PartIndex
    first: int
    """Ordinal of the first document in its part."""
    ordinal: int
    """Ordinal of the first document in the corpus."""
    documents: np.ndarray
    near: np.ndarray
    """bool: is a near duplicate."""
    capped: int
    """Documents cut off."""


@dataclass
class _Scan:
    """Walks over the indices of all parts, as often as asked."""

    parts: Sequence[PartIndex]
    args: DataArgs
    removed: Removed
    size: int

    @property
    def num_documents(self) -> int:
        return sum(part.num_documents for part in self.parts)

    def __iter__(self) -> Iterator[_Chunk]:
        limit = self.args.max_documents
        seen = [0] * len(self.args.sources)
        ordinal = 0
        for number, part in enumerate(self.parts):
            removed = self._removed_of(number, part)
            for first in range(0, part.num_documents, self.size):
                stop = min(first + self.size, part.num_documents)
                room = stop - first if limit is None else max(0, limit - seen[part.source])
                kept = min(stop, first + room)
                near = np.zeros(kept - first, bool)
                low, high = np.searchsorted(removed, [first, kept])
                near[removed[low:high] - first] = True
                documents = part.index(first, kept)
                yield _Chunk(number, part, first, ordinal, documents, near, stop - kept)
                seen[part.source] += stop - first
                ordinal += stop - first

    def _removed_of(self, number: int, part: PartIndex) -> np.ndarray:
        given = self.removed.get(number, ()) if isinstance(self.removed, Mapping) else self.removed[number]
        removed = np.unique(np.asarray(given, dtype=np.int64))
        if len(removed) and removed[-1] >= part.num_documents:
            raise ValueError(
                f"near duplicates name document {removed[-1]} of {part.name}, which has {part.num_documents}: they were "
                "found on other data, delete them and run again"
            )
        return removed


@dataclass
class _Survey:
    """Result of the first scan: how many documents have each 16-bit prefix, and the sources' fingerprints."""

    digests: np.ndarray
    places: np.ndarray
    fingerprints: list[str]


def _survey(scan: _Scan, args: DataArgs) -> _Survey:
    digests = np.zeros(1 << _PREFIX_BITS, np.int64)
    places = np.zeros(1 << _PREFIX_BITS, np.int64)
    hashes = [hashlib.sha256() for _ in args.sources]
    for chunk in scan:
        documents = chunk.documents
        hashes[chunk.part.source].update(documents["digest"].tobytes())
        digests += np.bincount(_prefix(documents["digest"][~chunk.near, 0]), minlength=len(digests))
        held = documents["place"][_is_held_out(documents, args) & ~chunk.near]
        places += np.bincount(_prefix(held), minlength=len(places))
    return _Survey(digests, places, [one.hexdigest() for one in hashes])


def _mark_duplicates(
    scan: _Scan, survey: _Survey, folder: Path, marked: np.ndarray, bucket_documents: int
) -> None:
    """Set the bit of every document whose digest came before."""
    with _Buckets(folder / "digests.tmp", _DIGEST, survey.digests, bucket_documents) as buckets:
        for chunk in scan:
            kept = np.flatnonzero(~chunk.near)
            records = np.empty(len(kept), _DIGEST)
            records["digest"] = chunk.documents["digest"][kept]
            records["ordinal"] = chunk.ordinal + kept
            buckets.add(_prefix(records["digest"][:, 0]), records)
        for number in range(len(buckets)):
            seen = np.empty((0, 2), np.uint64)
            for records in buckets.blocks(number):
                repeated, seen = _repeated(seen, records)
                np.bitwise_or.at(marked, repeated >> 3, (1 << (repeated & 7)).astype(np.uint8))


def _repeated(seen: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ordinals int64 of records whose digest is in `seen` or in an earlier record, all digests so far)"""
    digests = np.concatenate([seen, records["digest"]])
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of equal digests the first one stays first
    digests = digests[order]
    repeats = np.concatenate([[False], (digests[1:] == digests[:-1]).all(axis=1)])
    return records["ordinal"][order[repeats] - len(seen)].astype(np.int64), digests[~repeats]


def _write(
    scan: _Scan, args: DataArgs, survey: _Survey, folder: Path, marked: np.ndarray, bucket_documents: int
) -> tuple[list[Counts], int, int, int]:
    """Counts per source, number of pieces, of held-out documents and of their tokens."""
    sources = [Counts() for _ in args.sources]
    num_pieces, start = 0, 0
    with (
        _Buckets(folder / "held_out.tmp", _PLACED, survey.places, bucket_documents) as held_out,
        atomic_stream(folder / _PIECES) as stream,
    ):
        for chunk in scan:
            counts, documents = sources[chunk.part.source], chunk.documents
            counts.capped += chunk.capped
            start = start if chunk.first else 0
            starts = start + np.cumsum(documents["tokens"], dtype=np.int64) - documents["tokens"]
            start += int(documents["tokens"].sum(dtype=np.int64))
            duplicate = _bits(marked, chunk.ordinal, len(documents)) & ~chunk.near
            held = _is_held_out(documents, args) & ~chunk.near & ~duplicate
            counts.near_duplicates += int(chunk.near.sum())
            counts.duplicates += int(duplicate.sum())
            counts.other_split += int(held.sum())
            placed = np.empty(int(held.sum()), _PLACED)
            placed["place"] = documents["place"][held]
            placed["piece"] = _pieces(chunk, np.flatnonzero(held), starts)
            held_out.add(_prefix(placed["place"]), placed)
            train = np.flatnonzero(~(chunk.near | duplicate | held))
            pieces = _cut(chunk, train, starts, args, counts)
            stream.write(pieces.tobytes())
            num_pieces += len(pieces)
        with atomic_stream(folder / _HELD_OUT) as held_stream:
            num_held_out, held_out_tokens = _write_held_out(held_out, held_stream)
    return sources, num_pieces, num_held_out, held_out_tokens


def _pieces(chunk: _Chunk, which: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """One PIECE for each document of the chunk numbered in `which`."""
    pieces = np.empty(len(which), PIECE)
    pieces["part"], pieces["source"] = chunk.part_number, chunk.part.source
    pieces["length"], pieces["start"] = chunk.documents["tokens"][which], starts[which]
    pieces["key"] = splitmix64(chunk.documents["digest"][which, 0] ^ splitmix64(0))
    return pieces


def _cut(chunk: _Chunk, which: np.ndarray, starts: np.ndarray, args: DataArgs, counts: Counts) -> np.ndarray:
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
    pieces = _pieces(chunk, which[document], starts)
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


def _write_held_out(buckets: _Buckets, stream: Any) -> tuple[int, int]:
    """Number and tokens of the held-out documents, written in the order of their places."""
    number = tokens = 0
    for bucket in range(len(buckets)):
        placed = np.concatenate([*buckets.blocks(bucket), np.empty(0, _PLACED)])
        pieces = placed["piece"][np.argsort(placed["place"], kind="stable")]
        stream.write(pieces.tobytes())
        number += len(pieces)
        tokens += int(pieces["length"].sum(dtype=np.int64))
    return number, tokens


class _Buckets:
    """Records sorted into buckets by the 16-bit prefix of a hash, in a file that is deleted in the end.

    counts [65536]: how many records of each prefix will come at most. A bucket holds neighbouring prefixes, about
    `limit` records, in the order in which they were added.
    """

    def __init__(self, file: Path, dtype: np.dtype, counts: np.ndarray, limit: int):
        self.file, self.dtype, self.limit = file, dtype, limit
        first = np.cumsum(counts) - counts
        _, of_prefix = np.unique(first // limit, return_inverse=True)
        self.of_prefix = of_prefix.astype(np.uint16)
        sizes = np.bincount(of_prefix, weights=counts).astype(np.int64)
        self.starts = np.cumsum(sizes) - sizes
        self.filled = np.zeros(len(sizes), np.int64)

    def __enter__(self) -> _Buckets:
        self.descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        self.file.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self.starts)

    def add(self, prefixes: np.ndarray, records: np.ndarray) -> None:
        """Append records, each to the bucket of its prefix."""
        if not len(records):
            return
        buckets = self.of_prefix[prefixes]
        order = np.argsort(buckets, kind="stable")
        data = records[order].tobytes()
        numbers, firsts, sizes = np.unique(buckets[order], return_index=True, return_counts=True)
        places = self.starts[numbers] + self.filled[numbers]
        self.filled[numbers] += sizes
        width = self.dtype.itemsize
        for place, first, size in zip(places.tolist(), firsts.tolist(), sizes.tolist(), strict=True):
            _write_at(self.descriptor, data[first * width : (first + size) * width], place * width)

    def blocks(self, number: int) -> Iterator[np.ndarray]:
        """The records of a bucket, at most `limit` at a time."""
        start, filled = int(self.starts[number]), int(self.filled[number])
        for first in range(start, start + filled, self.limit):
            yield _read(self.file, self.dtype, first, min(first + self.limit, start + filled))


def _write_at(descriptor: int, data: bytes, place: int) -> None:
    while data:  # pwrite may write less than asked, near a full disk
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written


def _read(file: Path, dtype: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.fromfile(file, dtype, count=max(0, stop - start), offset=start * dtype.itemsize)


def _prefix(values: np.ndarray) -> np.ndarray:
    return (values >> np.uint64(64 - _PREFIX_BITS)).astype(np.int64)


def _is_held_out(documents: np.ndarray, args: DataArgs) -> np.ndarray:
    return documents["place"].astype(np.float64) / 2.0**64 < args.held_out_fraction


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


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [asdict(one) for one in value]
    return asdict(value) if isinstance(value, Counts) else value
