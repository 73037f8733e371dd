"""Writes packed rows as shards plus manifest (the format is described in `pod.data.loader`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.loader import FORMAT, MANIFEST_NAME, SCHEMA_VERSION
from pod.files import atomic_dir, sha256_file, write_json

ROW_BYTES_PER_TOKEN = 8  # int32 token + int32 document index
DEFAULT_SHARD_BYTES = 128 * 2**20

Row = list[np.ndarray]
"""One packed row: the token arrays of its documents, in order."""


def fill_row(documents: Row, context_length: int, pad_token_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and document indices of one row, each int32 [context]; padding has document index -1."""
    tokens = np.full(context_length, pad_token_id, dtype=np.int32)
    docs = np.full(context_length, -1, dtype=np.int32)
    start = 0
    for index, document in enumerate(documents):
        stop = start + len(document)
        assert stop <= context_length, "a packed row is longer than the context"
        tokens[start:stop] = document
        docs[start:stop] = index
        start = stop
    return tokens, docs


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

    `details` is merged into the manifest. Raises `OSError` when the disk is full, `ValueError` when there is no row;
    in both cases nothing is left behind and an older `path` stays as it was.
    """
    with atomic_dir(path) as folder:
        write_into(
            Path(folder),
            rows,
            context_length=context_length,
            vocab_size=vocab_size,
            tokenizer_sha256=tokenizer_sha256,
            pad_token_id=pad_token_id,
            details=details,
            shard_bytes=shard_bytes,
        )


def write_into(
    folder: Path,
    rows: Iterable[Row],
    *,
    context_length: int,
    vocab_size: int,
    tokenizer_sha256: str,
    pad_token_id: int = 0,
    details: dict[str, Any] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """`write_packed_rows` into an existing folder that the caller makes atomic; the manifest is written last."""
    rows_per_shard = max(1, shard_bytes // (ROW_BYTES_PER_TOKEN * context_length))
    shards, num_rows, num_tokens, num_documents = [], 0, 0, 0
    for batch in _batches(rows, rows_per_shard):
        filled = [fill_row(row, context_length, pad_token_id) for row in batch]
        tokens, docs = (np.stack(arrays) for arrays in zip(*filled, strict=True))
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(
                f"token ids {tokens.min()}..{tokens.max()} do not fit a vocabulary of {vocab_size}: wrong tokenizer"
            )
        stem = f"shard-{len(shards):05d}"
        entry: dict[str, Any] = {"rows": len(batch)}
        for part, array in (("tokens", tokens), ("docs", docs)):
            file = folder / f"{stem}.{part}.npy"
            # Not an open_memmap: a full disk would be a SIGBUS there, here it is an OSError.
            with open(file, "wb") as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)
            entry[part] = {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}
        shards.append(entry)
        num_rows += len(batch)
        num_tokens += int((docs >= 0).sum())
        num_documents += sum(len(row) for row in batch)
    if not num_rows:
        raise ValueError("no packed row to write: the sources hold no document that the data settings keep")
    manifest = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "context_length": context_length,
        "num_rows": num_rows,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "padding_share": 1 - num_tokens / (num_rows * context_length),
        "vocab_size": vocab_size,
        "tokenizer_sha256": tokenizer_sha256,
        "pad_token_id": pad_token_id,
        **(details or {}),
        "shards": shards,
    }
    write_json(folder / MANIFEST_NAME, manifest)


def _batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
