"""Is prepared data whole? Every byte against its checksum, every count against the manifest, shard by shard.

Memory: one shard's document lengths and 16 MB of tokens, whatever the size of the data.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.manifest import (
    MANIFEST_NAME,
    REPAIR,
    SHARD_ARRAYS,
    check_file,
    check_manifest_bytes,
    listed_files,
    open_array,
    read_manifest,
)

PICTURES = ("lengths.png", "packing.png", "sources.png")
CHUNK_BYTES = 16 * 2**20
_PNG = b"\x89PNG\r\n\x1a\n"

Advance = Callable[[int], object]


class DamagedData(ValueError):
    """A data folder that this program wrote and that is not whole any more; the message names the file in one line."""


@dataclass(frozen=True)
class ShardIndex:
    """Where the documents of a shard lie: `lengths` int64 [documents], `starts` int64 [rows + 1] into it, by row."""

    lengths: np.ndarray
    starts: np.ndarray

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens of each row without its padding, int64 [rows]."""
        sums = np.concatenate([[0], np.cumsum(self.lengths)])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    @property
    def row_documents(self) -> np.ndarray:
        """Documents of each row, int64 [rows]."""
        return np.diff(self.starts)


def open_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a data folder.

    Raises `DamagedData` when it is broken or gone, `ValueError` when `folder` is something else or of another version.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: give the folder that launch/prepare_data.py wrote")
    has_shards = any(folder.glob("shard-*.npy"))
    if not (folder / MANIFEST_NAME).is_file() and not has_shards:
        inside = folder / "data"
        is_run = (inside / MANIFEST_NAME).is_file()
        hint = f"did you mean {inside}?" if is_run else "give the folder that launch/prepare_data.py wrote"
        raise ValueError(f"{folder} holds no prepared data (no {MANIFEST_NAME}): {hint}")
    try:
        return read_manifest(folder)
    except ValueError as error:
        # A manifest of another version is whole; anything else that goes wrong beside shards is damage.
        other_version = re.search(r"schema version \d", str(error))
        kind = DamagedData if has_shards and not other_version else ValueError
        raise kind(" ".join(str(error).split())) from None


def verify(folder: Path, manifest: dict[str, Any], advance: Advance = lambda count: None) -> Iterator[str]:
    """One line for each damage of the data in `folder`; nothing when it is whole. `advance(bytes)` is called while reading."""
    faults = _fault(check_manifest_bytes, folder, manifest)
    if faults:  # what it says of the other files cannot be trusted
        yield faults[0]
        return
    yield from _strangers(folder, manifest)
    totals: np.ndarray | None = np.zeros(3, dtype=np.int64)
    for shard in manifest["shards"]:
        index, lines = _check_index(folder, shard, manifest, advance)
        yield from lines
        yield from _check_tokens(folder, shard, manifest, index, advance)
        if index is None:
            totals = None
        elif totals is not None:
            totals += (shard["rows"], index.lengths.sum(), len(index.lengths))
    if totals is not None:
        yield from _check_totals(folder, manifest, totals.tolist())
    in_shards = {shard[name]["file"] for shard in manifest["shards"] for name in SHARD_ARRAYS}
    others = [entry for entry in listed_files(manifest) if entry["file"] not in in_shards]
    damages = [line for entry in others for line in _check_bytes(folder, entry, advance)]
    yield from damages or _check_held_out(folder, manifest)
    for name in PICTURES:
        if (folder / name).is_file() and not png_is_whole((folder / name).read_bytes()):
            yield f"{folder / name} is damaged: draw it again with pod-data inspect {folder} --pictures"


def changed_sources(manifest: dict[str, Any]) -> Iterator[str]:
    """One line for each source that is not any more what was read: other files, sizes or change times.

    Sources with relative paths are looked for from the current folder. Raises `ValueError` when the manifest does not know.
    """
    from pod.data.args import DataArgs
    from pod.data.job import source_states

    request = manifest.get("request") or {}
    before = (request.get("reading") or {}).get("sources")
    if before is None:
        raise ValueError("this manifest does not say in which state the sources were: prepare the data again")
    settings = request["settings"]
    for number, (spec, state) in enumerate(before):
        one = {**settings, "sources": [spec], "weights": settings["weights"][number : number + 1]}
        try:
            ((_, now),) = source_states(DataArgs(**one))
        except (ValueError, OSError) as error:
            yield f"source {spec!r} cannot be found any more: {' '.join(str(error).split())}"
            continue
        if now != state:
            yield f"source {spec!r} is not what was read: its files, their sizes or their change times are others"


def total_bytes(manifest: dict[str, Any]) -> int:
    """Bytes of all files that the manifest names."""
    return sum(entry["bytes"] for entry in listed_files(manifest))


def read_index(folder: Path, shard: dict[str, Any], manifest: dict[str, Any]) -> ShardIndex:
    """The document bounds of one shard, in memory.

    Raises `DamagedData` when they are not arrays of the right size or do not say in which row each document is.
    """
    lines = [
        line for name in ("starts", "lengths") for line in _fault(check_file, folder, shard[name], False)
    ]
    if lines:
        raise DamagedData(lines[0])
    try:
        starts, lengths = (open_array(folder, manifest, shard, name) for name in ("starts", "lengths"))
    except ValueError as error:
        raise DamagedData(" ".join(str(error).split())) from None
    index = ShardIndex(np.array(lengths, dtype=np.int64), np.array(starts, dtype=np.int64))
    faults = list(_index_faults(folder, shard, index, manifest["context_length"]))
    if faults:
        raise DamagedData(faults[0])
    return index


def png_is_whole(data: bytes) -> bool:
    """A PNG against the checksums that it carries (CRC-32 of every chunk, RFC 2083 §3.2)."""
    if not data.startswith(_PNG):
        return False
    at, kind = len(_PNG), b""
    while at + 12 <= len(data) and kind != b"IEND":
        (size,) = struct.unpack(">I", data[at : at + 4])
        end = at + 8 + size
        kind = data[at + 4 : at + 8]
        if data[end : end + 4] != struct.pack(">I", zlib.crc32(data[at + 4 : end])):
            return False
        at = end + 4
    return kind == b"IEND" and at == len(data)


def _strangers(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    known = {entry["file"] for entry in listed_files(manifest)} | {MANIFEST_NAME, *PICTURES}
    for file in sorted(folder.iterdir()):
        if file.name not in known:
            yield f"{file} does not belong to the data (the manifest does not name it): move it away"


def _check_totals(folder: Path, manifest: dict[str, Any], totals: list[int]) -> Iterator[str]:
    """Counts over all shards [rows, tokens, documents] against what the manifest says in several places."""
    file = folder / MANIFEST_NAME
    rows, tokens, documents = totals
    for name, found in (("num_rows", rows), ("num_tokens", tokens), ("num_documents", documents)):
        if manifest[name] != found:
            yield f"{file} says {name} {manifest[name]:,}, the shards hold {found:,}"
    share = 1 - tokens / (rows * manifest["context_length"])
    if abs(manifest.get("padding_share", share) - share) > 1e-9:
        yield f"{file} says padding_share {manifest['padding_share']:.6f}, the shards have {share:.6f}"
    intervals = manifest.get("intervals") or []
    for name, found in (("tokens", tokens), ("documents", documents)):
        drawn = sum(interval[f"{name}_after"] for interval in intervals)
        if intervals and drawn != found:
            yield f"{file} says {drawn:,} {name} drawn in its intervals, the shards hold {found:,}"


def _check_index(
    folder: Path, shard: dict[str, Any], manifest: dict[str, Any], advance: Advance
) -> tuple[ShardIndex | None, list[str]]:
    """The document bounds of a shard, None when they cannot be used, and what is wrong with them."""
    lines = [line for name in ("lengths", "starts") for line in _check_bytes(folder, shard[name], advance)]
    if lines:
        return None, lines
    try:
        index = read_index(folder, shard, manifest)
    except DamagedData as error:
        return None, [str(error)]
    tokens = int(index.lengths.sum())
    if shard.get("num_tokens", tokens) != tokens:
        file = folder / shard["lengths"]["file"]
        return index, [f"{file} sums to {tokens:,} tokens, the manifest says {shard['num_tokens']:,}"]
    return index, []


def _index_faults(
    folder: Path, shard: dict[str, Any], index: ShardIndex, context_length: int
) -> Iterator[str]:
    """What would make a reader of these bounds fail or mix documents up."""
    starts_file, lengths_file = (folder / shard[name]["file"] for name in ("starts", "lengths"))
    if index.starts[0] != 0 or index.starts[-1] != len(index.lengths):
        yield (
            f"{starts_file} goes from {index.starts[0]} to {index.starts[-1]}, expected 0 to {len(index.lengths)}: {REPAIR}"
        )
        return
    empty = np.flatnonzero(index.row_documents < 1)
    if len(empty):
        yield f"{starts_file}: {len(empty):,} rows have no document, the first is row {empty[0]}: {REPAIR}"
        return
    wrong = np.flatnonzero(index.lengths < 1)
    if len(wrong):
        first = f"document {wrong[0]} with {index.lengths[wrong[0]]}"
        yield f"{lengths_file}: {len(wrong):,} documents have no tokens, the first is {first}: {REPAIR}"
        return
    long = np.flatnonzero(index.row_tokens > context_length)
    if len(long):
        yield (
            f"{lengths_file}: {len(long):,} rows hold more than {context_length:,} tokens, the first is row {long[0]} with "
            f"{index.row_tokens[long[0]]:,}: {REPAIR}"
        )


def _check_tokens(
    folder: Path, shard: dict[str, Any], manifest: dict[str, Any], index: ShardIndex | None, advance: Advance
) -> Iterator[str]:
    """One pass over the token file: checksum, ids inside the vocabulary, padding behind the documents."""
    faults = _fault(check_file, folder, shard["tokens"], False)
    faults = faults or _fault(open_array, folder, manifest, shard, "tokens")
    if faults:
        yield faults[0]
        return
    context, rows, pad = manifest["context_length"], shard["rows"], manifest["pad_token_id"]
    file = folder / shard["tokens"]["file"]
    mapped = open_array(folder, manifest, shard, "tokens")
    used = index.row_tokens if index is not None else np.full(rows, context)
    rows_per_chunk = max(1, CHUNK_BYTES // (context * mapped.itemsize))
    digest, above, dirty = hashlib.sha256(), 0, 0
    with open(file, "rb") as stream:
        digest.update(stream.read(file.stat().st_size - mapped.nbytes))
        for first in range(0, rows, rows_per_chunk):
            data = stream.read(min(rows_per_chunk, rows - first) * context * mapped.itemsize)
            digest.update(data)
            advance(len(data))
            tokens = np.frombuffer(data, mapped.dtype).reshape(-1, context)
            above += int((tokens >= manifest["vocab_size"]).sum())
            for row in np.flatnonzero(used[first : first + len(tokens)] < context):
                dirty += bool((tokens[row, used[first + row] :] != pad).any())
    if digest.hexdigest() != shard["tokens"]["sha256"]:
        yield f"{file} does not match its checksum (changed or damaged): {REPAIR}"
        return
    if above:
        yield f"{file} holds {above:,} token ids above {manifest['vocab_size'] - 1:,}, the last of the vocabulary: {REPAIR}"
    if dirty:
        yield f"{file}: {dirty:,} rows hold other ids than padding behind their last document: {REPAIR}"


def _check_held_out(folder: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Counts and token ids of the held-out text, whose files match their checksums."""
    told = manifest.get("held_out") or {}
    files = {entry["file"].split(".")[1]: folder / entry["file"] for entry in told.get("files", [])}
    if not {"tokens", "lengths"} <= files.keys():
        return
    try:
        lengths = np.load(files["lengths"], mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        yield f"{files['lengths']} is not a readable .npy array ({' '.join(str(error).split())}): {REPAIR}"
        return
    dtype = np.dtype(told["token_dtype"]).newbyteorder("<")
    found = len(lengths), int(lengths.sum())
    stored = files["tokens"].stat().st_size / dtype.itemsize
    if (told["documents"], told["tokens"]) != found or stored != found[1]:
        yield (
            f"{files['lengths']} says {found[1]:,} tokens of {found[0]:,} documents, {files['tokens'].name} holds {stored:,.0f}, "
            f"the manifest says {told['tokens']:,} of {told['documents']:,}: {REPAIR}"
        )
    above = 0
    with open(files["tokens"], "rb") as stream:
        while data := stream.read(CHUNK_BYTES // 8 * 8):
            tokens = np.frombuffer(data, dtype, count=len(data) // dtype.itemsize)
            above += int((tokens >= manifest["vocab_size"]).sum())
    if above:
        yield f"{files['tokens']} holds {above:,} token ids above {manifest['vocab_size'] - 1:,}, the last of the vocabulary: {REPAIR}"


def _check_bytes(folder: Path, entry: dict[str, Any], advance: Advance) -> list[str]:
    """A file against its size and checksum: [] or one line."""
    lines = _fault(check_file, folder, entry, True)
    advance(entry["bytes"])
    return lines


def _fault(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """The message of a check that raises `ValueError` or `OSError`, as a list of one line; [] when all is well."""
    try:
        check(*arguments)
    except (ValueError, OSError) as error:
        return [" ".join(str(error).split())]
    return []
