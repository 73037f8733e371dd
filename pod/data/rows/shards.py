"""Writes packed rows as shards plus manifest.

The format is described in `pod.data.rows.manifest`.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pod.data.rows.manifest import (
    FORMAT,
    MANIFEST_CHECKSUM,
    MANIFEST_NAME,
    SCHEMA_VERSION,
    SHARD_ARRAYS,
    data_id,
    manifest_checksum,
    token_dtype,
)
from pod.files import atomic_dir, sha256_file, write_json

DEFAULT_SHARD_BYTES = 128 * 2**20
"""Bytes of tokens in one shard, at most. A shard has one row at least."""
HEADER_BYTES = 128
"""Size of the `.npy` header of every array."""

Row = Sequence[np.ndarray]
"""One packed row: the token arrays of its documents, in order."""


def rows_per_shard(context_length: int, vocab_size: int, shard_bytes: int = DEFAULT_SHARD_BYTES) -> int:
    """Rows whose tokens fit into `shard_bytes`, at least one."""
    return max(1, shard_bytes // (token_dtype(vocab_size).itemsize * context_length))


def write_shard(
    folder: str | Path,
    number: int,
    rows: Iterable[Row],
    *,
    context_length: int,
    vocab_size: int,
    pad_token_id: int = 0,
) -> dict[str, Any]:
    """Write `rows` as shard `number` of `folder`, and return its manifest entry: counts, sizes and checksums.

    The files get their names when all three are complete and on the disk. When a call was killed at any
    moment, the next call writes the same bytes. The shard counts as written once the caller has stored the
    entry. Writing needs memory for one row and 4 bytes per document.

    Raises:
        ValueError: a token id is outside the vocabulary, or there is no row.
        OSError: the system's own error; the caller explains it, because it knows what the folder is for.
    """
    folder = Path(folder)
    stem = f"shard-{number:05d}"
    if not 0 <= pad_token_id < vocab_size:
        raise ValueError(
            f"pad_token_id {pad_token_id} is not in a vocabulary of {vocab_size}: wrong tokenizer"
        )
    temporary = {name: folder / f".{stem}.{name}.npy.tmp" for name in SHARD_ARRAYS}
    try:
        with open(temporary["tokens"], "wb") as stream:
            lengths, counts = _write_rows(stream, rows, context_length, vocab_size, pad_token_id)
            _complete(stream, token_dtype(vocab_size), (len(counts), context_length))
        starts = np.concatenate([[0], np.cumsum(counts)])
        for name, array in (("lengths", lengths.astype("<i4")), ("starts", starts.astype("<i8"))):
            with open(temporary[name], "wb") as stream:
                stream.write(bytes(HEADER_BYTES) + array.tobytes())
                _complete(stream, array.dtype, array.shape)
        entry: dict[str, Any] = {
            "rows": len(counts),
            "documents": len(lengths),
            "num_tokens": int(lengths.sum()),
        }
        for name, file in temporary.items():
            size, checksum = file.stat().st_size, sha256_file(file)
            entry[name] = {"file": f"{stem}.{name}.npy", "bytes": size, "sha256": checksum}
        for name, file in temporary.items():
            os.replace(file, folder / entry[name]["file"])
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return entry


def write_manifest(
    folder: str | Path,
    entries: Sequence[dict[str, Any]],
    *,
    context_length: int,
    vocab_size: int,
    tokenizer_sha256: str,
    pad_token_id: int = 0,
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the manifest of a folder of shards, and return it.

    Args:
        entries: what `write_shard` returned for each shard, in order.
        details: more content of the manifest. Every `{"file", "bytes", "sha256"}` in it names a file that is
            later checked like the shards.

    Raises:
        ValueError: there are no entries.
    """
    folder = Path(folder)
    if not entries:
        raise ValueError(
            "there is nothing to write: the data settings leave out every document of the sources"
        )
    rows = sum(entry["rows"] for entry in entries)
    tokens = sum(entry["num_tokens"] for entry in entries)
    manifest = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "context_length": context_length,
        "num_rows": rows,
        "num_tokens": tokens,
        "num_documents": sum(entry["documents"] for entry in entries),
        "padding_share": 1 - tokens / (rows * context_length),
        "vocab_size": vocab_size,
        "token_dtype": token_dtype(vocab_size).name,
        "tokenizer_sha256": tokenizer_sha256,
        "pad_token_id": pad_token_id,
        **(details or {}),
        "shards": list(entries),
    }
    manifest = json.loads(json.dumps(manifest))  # as it will be read again: lists, string keys
    manifest["id"] = data_id(manifest)
    manifest[MANIFEST_CHECKSUM] = manifest_checksum(manifest)
    write_json(folder / MANIFEST_NAME, manifest)
    return manifest


def write_packed_rows(
    path: str | Path,
    rows: Iterable[Row],
    *,
    context_length: int,
    vocab_size: int,
    tokenizer_sha256: str,
    pad_token_id: int = 0,
    details: dict[str, Any] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write `rows` to folder `path` in one atomic step (a temporary sibling folder, renamed when complete).

    After an error nothing is left behind, and an older `path` stays as it was.

    Args:
        details: more content of the manifest, as in `write_manifest`.
        shard_bytes: bytes of tokens in one shard, at most.

    Raises:
        OSError: the disk is full.
        ValueError: there is no row.
    """
    sizes: dict[str, int] = {
        "context_length": context_length,
        "vocab_size": vocab_size,
        "pad_token_id": pad_token_id,
    }
    with atomic_dir(path) as folder:
        shards = _batches(rows, rows_per_shard(context_length, vocab_size, shard_bytes))
        entries = [write_shard(folder, number, batch, **sizes) for number, batch in enumerate(shards)]
        write_manifest(folder, entries, tokenizer_sha256=tokenizer_sha256, details=details, **sizes)


def _batches(rows: Iterable[Row], size: int) -> Iterator[Iterator[Row]]:
    """`rows` in runs of `size`, each to be read to its end before the next one is asked for."""
    stream = iter(rows)
    for first in stream:
        yield itertools.chain([first], itertools.islice(stream, size - 1))


def _write_rows(
    stream: BinaryIO, rows: Iterable[Row], context_length: int, vocab_size: int, pad_token_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Write the tokens of `rows`, and leave HEADER_BYTES before them for the header.

    Returns:
        Tokens of each document, int32 [documents], and documents of each row, int64 [rows].
    """
    stream.write(bytes(HEADER_BYTES))
    filled = np.empty(context_length, dtype=token_dtype(vocab_size))
    lengths, counts = [], []
    for row in rows:
        own = np.array([len(document) for document in row], dtype=np.int32)
        assert len(own) and own.min() >= 1, "a packed row holds documents, and a document holds tokens"
        tokens = np.concatenate(row)
        assert len(tokens) <= context_length, "a packed row is longer than the context"
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(
                f"token ids {tokens.min()}..{tokens.max()} do not fit a vocabulary of {vocab_size}: "
                "wrong tokenizer"
            )
        filled[: len(tokens)] = tokens
        filled[len(tokens) :] = pad_token_id
        stream.write(filled.data)
        lengths.append(own)
        counts.append(len(own))
    if not counts:
        raise ValueError("there is nothing to write: a shard needs at least one row")
    return np.concatenate(lengths), np.array(counts, dtype=np.int64)


def _complete(stream: BinaryIO, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Write the `.npy` header (format 1.0) into the first HEADER_BYTES of the stream, and wait for the disk.

    NumPy's own writer needs the number of rows beforehand, and its padding has changed between releases.
    """
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    stream.seek(0)
    stream.write(magic + text.encode().ljust(HEADER_BYTES - 11) + b"\n")
    stream.flush()
    os.fsync(stream.fileno())
