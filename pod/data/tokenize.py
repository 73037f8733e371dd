"""Documents → token ids: boundary tokens, duplicates, the held-out split, and a spool on disk for the second pass."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from tqdm import tqdm

from pod.data.args import DataArgs
from pod.data.sources import Document, SourceReport, load_documents
from pod.data.tokenizers import (
    BoundaryTokens,
    Encoder,
    load_tokenizer,
    opening_bytes,
    tokenizer_sha256,
    vocabulary_size,
)

__all__ = [
    "BoundaryTokens",
    "ReadReport",
    "Split",
    "TokenSpool",
    "in_split",
    "load_tokenizer",
    "read_into_spool",
    "select_documents",
    "split_position",
    "tokenize_documents",
    "tokenizer_sha256",
    "vocabulary_size",
]

Split = Literal["train", "held_out", "all"]
BATCH_CHARACTERS = 2_000_000
BATCH_DOCUMENTS = 256


def split_position(text: str) -> float:
    """Where a document stands in [0, 1): a hash of its first 48 words, case, marks and spacing ignored.

    Copies of a text that differ in layout or at the end stand at the same place, hence on the same side of the split.
    """
    digest = hashlib.sha256(opening_bytes(text)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def in_split(text: str, split: Split, held_out_fraction: float) -> bool:
    """Whether a document belongs to `train`, `held_out` or `all`; independent of seed, order and other documents."""
    return split == "all" or (split_position(text) < held_out_fraction) == (split == "held_out")


@dataclass
class ReadReport:
    """What pass 1 read, for the manifest."""

    sources: list[SourceReport] = field(default_factory=list)
    duplicates: int = 0
    """Documents left out because an identical text came before."""
    other_split: int = 0
    """Documents that belong to the other side of the held-out split."""
    documents: int = 0
    """Documents tokenised."""
    tokens: int = 0
    """Their tokens, boundary tokens included."""
    fingerprint: str = ""
    """SHA-256 over the digests of all documents read, in order."""


def select_documents(args: DataArgs, split: Split, report: ReadReport) -> Iterator[Document]:
    """The documents of `split`, without exact duplicates if so asked; fills `report`."""
    seen: set[bytes] = set()
    everything = hashlib.sha256()
    documents = load_documents(
        args.sources,
        text_field=args.text_field,
        include=args.include,
        unreadable=args.unreadable,
        max_documents=args.max_documents,
        reports=report.sources,
    )
    for document in documents:
        digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
        everything.update(digest)
        if args.deduplicate and digest[:16] in seen:
            report.duplicates += 1
            continue
        seen.add(digest[:16])
        if in_split(document.text, split, args.held_out_fraction):
            yield document
        else:
            report.other_split += 1
    report.fingerprint = everything.hexdigest()


def tokenize_documents(
    documents: Iterable[Document], tokenizer: Any, boundary: BoundaryTokens
) -> Iterator[tuple[Document, np.ndarray]]:
    """(document, its tokens int32 [n] with boundary tokens), batched for fast tokenizers, in the order given."""
    encode = Encoder(tokenizer)
    for batch in _batches(documents):
        encoded = encode([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            yield document, np.array([*boundary.before, *ids, *boundary.after], dtype=np.int32)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class TokenSpool:
    """Tokens of all documents on disk, so that memory holds only their lengths (8 bytes a document).

    `append` in pass 1, `close`, then `tokens(start, stop)` in pass 2. A piece is a slice of the spool, one training
    document; a long document can be several pieces.
    """

    def __init__(self, folder: Path):
        self.file = folder / "spool.bin"
        self._stream: IO[bytes] | None = open(self.file, "wb")  # noqa: SIM115 - closed by close()
        self._tokens: np.ndarray | None = None
        self.size = 0

    def append(self, tokens: np.ndarray) -> int:
        """Write int32 tokens; returns where they start."""
        assert self._stream is not None, "the spool is closed"
        start = self.size
        self._stream.write(tokens.astype(np.int32, copy=False).tobytes())
        self.size += len(tokens)
        return start

    def close(self) -> None:
        """End pass 1 and map the file for reading."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self.size:
            self._tokens = np.memmap(self.file, dtype=np.int32, mode="r", shape=(self.size,))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """int32 [stop - start]"""
        assert self._tokens is not None, "the spool is still being written or empty"
        return self._tokens[start:stop]

    def remove(self) -> None:
        """Delete the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._tokens = None
        self.file.unlink(missing_ok=True)


@dataclass
class Pieces:
    """Training documents in the spool: `starts`, `lengths` int64 [num_pieces], plus what the policies left out."""

    starts: np.ndarray
    lengths: np.ndarray
    cut_documents: int = 0
    skipped_long: int = 0
    skipped_long_tokens: int = 0
    dropped_short: int = 0
    dropped_short_tokens: int = 0


def read_into_spool(
    args: DataArgs, tokenizer: Any, folder: Path, report: ReadReport
) -> tuple[TokenSpool, Pieces]:
    """Pass 1: read, split, tokenise and spool the training documents; long and short ones by their policies.

    Raises `ValueError` for a document longer than the context under `long_documents="error"`.
    """
    spool = TokenSpool(folder)
    boundary = BoundaryTokens.from_policy(args.boundary_tokens, tokenizer)
    starts: list[int] = []
    lengths: list[int] = []
    pieces = Pieces(np.empty(0), np.empty(0))
    documents = select_documents(args, "train", report)
    try:
        with tqdm(unit=" tokens", unit_scale=True, desc="tokenise", mininterval=1) as progress:
            for document, tokens in tokenize_documents(documents, tokenizer, boundary):
                report.documents += 1
                report.tokens += len(tokens)
                progress.update(len(tokens))
                for first, last in _cut(document, len(tokens), args, pieces):
                    starts.append(spool.append(tokens[first:last]))
                    lengths.append(last - first)
        spool.close()
    except BaseException:
        spool.remove()
        raise
    pieces.starts, pieces.lengths = np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
    return spool, pieces


def _cut(document: Document, length: int, args: DataArgs, pieces: Pieces) -> list[tuple[int, int]]:
    """[start, stop) of the pieces that training may use of a document of `length` tokens."""
    context = args.context_length
    if length > context:
        if args.long_documents == "error":
            raise ValueError(
                f"document {document.name} has {length} tokens, the context holds {context}: "
                "set data.long_documents to cut or skip, or a longer data.context_length"
            )
        if args.long_documents == "skip":
            pieces.skipped_long += 1
            pieces.skipped_long_tokens += length
            return []
        pieces.cut_documents += 1
    kept = []
    for start in range(0, length, context):
        stop = min(start + context, length)
        # A single token has no next token to predict.
        if stop - start < 2 or (args.short_documents == "drop" and stop - start < args.shortest_interval):
            pieces.dropped_short += 1
            pieces.dropped_short_tokens += stop - start
        else:
            kept.append((start, stop))
    return kept
