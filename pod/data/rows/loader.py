"""Packed rows in training: memory-mapped shards, labels, documents.

The format is described in `pod.data.rows.manifest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pod.data.rows.manifest import (
    REPAIR,
    SHARD_ARRAYS,
    check_file,
    listed_files,
    open_array,
    read_manifest,
)
from pod.data.rows.order import RowCursor

if TYPE_CHECKING:
    import torch

IGNORED_LABEL = -100
"""The label of a position that the loss leaves out."""
OPEN_SHARDS = 64
"""Shards that stay mapped at a time. Each holds three file descriptors; a process often may have 1,024."""


class _Shard(NamedTuple):
    """The arrays of one shard, as `pod.data.rows.manifest` describes them."""

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray


def shifted_labels(tokens: np.ndarray, docs: np.ndarray) -> np.ndarray:
    """Next-token labels of packed rows, int64 [..., context].

    A label is `tokens[t + 1]` where token t + 1 belongs to the same document as token t, else -100 (last
    token of a document, padding, end of the row).

    Args:
        tokens, docs: [..., context].
    """
    labels = np.full(tokens.shape, IGNORED_LABEL, dtype=np.int64)
    same = (docs[..., 1:] == docs[..., :-1]) & (docs[..., :-1] >= 0)
    np.copyto(labels[..., :-1], tokens[..., 1:], where=same, casting="safe")
    return labels


class PackedDataset:
    """Read-only, memory-mapped packed rows.

    It is a map-style data set that `torch.utils.data.DataLoader` accepts. Sizes of all files are checked;
    `pod.data.rows.verify` reads every byte.

    Args:
        path: a folder written by `pod.data.run.prepare`.
        tokenizer_sha256: the tokenizer that the caller needs. Data prepared for another one is refused.
        vocab_size: the model's size. It must cover every token id, else the data is refused.

    Raises:
        ValueError: in one line: the manifest is missing or not ours, a file is missing or truncated, or the
            data was prepared for another tokenizer or a larger vocabulary.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer_sha256: str | None = None,
        vocab_size: int | None = None,
    ):
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.context_length: int = self.manifest["context_length"]
        self._check_request(tokenizer_sha256, vocab_size)
        for entry in listed_files(self.manifest):
            check_file(self.path, entry, verify=False)
        shards = self.manifest["shards"]
        for number in range(len(shards)):
            self._open(number)
        self._starts = np.cumsum([0] + [shard["rows"] for shard in shards])
        for name in ("rows", "documents"):
            held = sum(shard[name] for shard in shards)
            expected = self.manifest[f"num_{name}"]
            if held != expected:
                raise ValueError(
                    f"{self.path}: the shards have {held} {name}, but the manifest says {expected}: {REPAIR}"
                )
        self._shard = lru_cache(OPEN_SHARDS)(self._open)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`: `input_ids`, `doc_ids`, `labels`, each int64 [context]; labels are already shifted."""
        return {name: value[0] for name, value in self.rows([index]).items()}

    def __getstate__(self) -> dict[str, Any]:
        # A worker of a DataLoader opens the files itself; pickled maps would carry their content.
        return {name: value for name, value in self.__dict__.items() if name != "_shard"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shard = lru_cache(OPEN_SHARDS)(self._open)

    def rows(self, indices: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """Rows `indices` as one batch: `input_ids`, `doc_ids`, `labels`, each int64 [len(indices), context].

        `doc_ids` number the documents of a row from 0; -1 is padding. The position of a token, for RoPE and
        for the windows of attention, is counted from the start of its document. The model derives it from
        `doc_ids`.

        Raises:
            IndexError: for a row that does not exist.
            ValueError: for a row that is damaged.
        """
        import torch  # takes a second, and preparing needs none

        tokens = np.empty((len(indices), self.context_length), dtype=np.int64)
        docs = np.full(tokens.shape, -1, dtype=np.int64)
        for at, index in enumerate(indices):
            lengths, row = self.row(int(index))
            tokens[at] = row
            docs[at, : lengths.sum()] = np.repeat(np.arange(len(lengths)), lengths)
        return {
            "input_ids": torch.from_numpy(tokens),
            "doc_ids": torch.from_numpy(docs),
            "labels": torch.from_numpy(shifted_labels(tokens, docs)),
        }

    def documents(self, index: int) -> list[np.ndarray]:
        """The token ids of each document of row `index`, in order, without padding.

        They are uint16 or uint32 [tokens].
        """
        lengths, row = self.row(index)
        return np.split(np.asarray(row[: lengths.sum()]), np.cumsum(lengths)[:-1])

    def cursor(self, seed: int = 0, position: int = 0) -> RowCursor:
        """A `RowCursor` over these rows.

        Args:
            position: rows consumed so far (all data-parallel ranks together).
        """
        return RowCursor(len(self), seed=seed, position=position)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of the documents of a row, int32 [documents], and its tokens, [context], padding included.

        Raises:
            IndexError: for a row that does not exist.
            ValueError: for a damaged row.
        """
        number, at = self._locate(index)
        tokens, lengths, starts = self._shard(number)
        first = int(starts[at])
        stop = int(starts[at + 1])
        own = lengths[max(first, 0) : max(stop, 0)]
        row = tokens[at]
        # One comparison per row, so that a damaged file stops here and not as an index error inside a GPU
        # kernel.
        fits = 0 <= first < stop <= len(lengths) and own.min() >= 1 and own.sum() <= self.context_length
        if not fits or row.max() >= self.manifest["vocab_size"]:
            shard = self.manifest["shards"][number]
            raise ValueError(
                f"row {at} of {self.path / shard['tokens']['file']} is damaged (wrong document lengths, or "
                f"a token id outside the vocabulary): {REPAIR}"
            )
        return own, row

    def _locate(self, index: int) -> tuple[int, int]:
        """Number of the shard that holds row `index`, and number of the row in it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} does not exist: {self.path} has {len(self)} rows")
        index %= len(self)
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, index - int(self._starts[shard])

    def _open(self, number: int) -> _Shard:
        shard = self.manifest["shards"][number]
        return _Shard(*(open_array(self.path, self.manifest, shard, name) for name in SHARD_ARRAYS))

    def _check_request(self, tokenizer_sha256: str | None, vocab_size: int | None) -> None:
        """Refuse data of another tokenizer, and token ids beyond the model's vocabulary (ValueError)."""
        if tokenizer_sha256 is not None and tokenizer_sha256 != self.manifest["tokenizer_sha256"]:
            raise ValueError(
                f"{self.path} was prepared with another tokenizer (sha256 "
                f"{self.manifest['tokenizer_sha256'][:12]}, the model's is {tokenizer_sha256[:12]}): "
                f"use the model of the data's tokenizer, or {REPAIR}"
            )
        if vocab_size is not None and vocab_size < self.manifest["vocab_size"]:
            raise ValueError(
                f"{self.path} has token ids up to {self.manifest['vocab_size'] - 1}, but the model's "
                f"vocabulary has only {vocab_size}: use the model of the data's tokenizer, or {REPAIR}"
            )
