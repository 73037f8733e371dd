"""Packed rows on disk: the file format, its validation, and the order in which training reads them.

A data folder holds `manifest.json` and, per shard, two plain `.npy` arrays that are memory-mapped:
`shard-00000.tokens.npy` int32 [rows, context] and `shard-00000.docs.npy` int32 [rows, context] with the index of the
document inside its row (0, 1, 2, … contiguous; -1 = padding, only at the end of a row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pod.files import read_json, sha256_file

FORMAT = "pod-packed-rows"
SCHEMA_VERSION = 1
IGNORED_LABEL = -100
MANIFEST_NAME = "manifest.json"
_REQUIRED = {
    "context_length": int,
    "num_rows": int,
    "num_tokens": int,
    "vocab_size": int,
    "tokenizer_sha256": str,
    "shards": list,
}
_REPAIR = "prepare the data again with launch/prepare_data.py"


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Permutation of `range(num_rows)`, int64 read-only, a function of (num_rows, seed, epoch) only.

    It sorts raw PCG64 output, which NumPy keeps stable across releases (`Generator.permutation` is not), so that a
    run can be resumed after an upgrade.
    """
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed and epoch must be >= 0, got seed={seed}, epoch={epoch}")
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def shifted_labels(tokens: np.ndarray, docs: np.ndarray) -> np.ndarray:
    """Next-token labels of packed rows.

    tokens, docs [..., context] → int64 [..., context]: `tokens[t + 1]` where token t + 1 belongs to the same document
    as token t, else -100 (last token of a document, padding, end of the row).
    """
    labels = np.full(tokens.shape, IGNORED_LABEL, dtype=np.int64)
    same = (docs[..., 1:] == docs[..., :-1]) & (docs[..., :-1] >= 0)
    np.copyto(labels[..., :-1], tokens[..., 1:], where=same, casting="safe")
    return labels


class PackedDataset:
    """Read-only, memory-mapped packed rows; a map-style data set that `torch.utils.data.DataLoader` accepts.

    `path` is a folder written by `pod.data.prepare`. `context_length`, `tokenizer_sha256` and `vocab_size` state what
    the caller needs and are refused when the data was prepared for something else (`vocab_size`: the model's, which
    must cover every token id). Sizes of all files are always checked; `verify=True` also reads every byte and compares checksums.

    Raises `ValueError` in one line for a missing or foreign manifest, a missing, truncated or changed shard, and data
    prepared for another context or tokenizer.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        context_length: int | None = None,
        tokenizer_sha256: str | None = None,
        vocab_size: int | None = None,
        verify: bool = False,
    ):
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.context_length: int = self.manifest["context_length"]
        self._check_request(context_length, tokenizer_sha256, vocab_size)
        self._tokens: list[np.ndarray] = []
        self._docs: list[np.ndarray] = []
        for shard in self.manifest["shards"]:
            self._tokens.append(self._open(shard, "tokens", verify))
            self._docs.append(self._open(shard, "docs", verify))
        self._starts = np.cumsum([0] + [len(shard) for shard in self._tokens])
        if len(self) != self.manifest["num_rows"]:
            raise ValueError(
                f"{self.path}: the shards hold {len(self)} rows, the manifest says "
                f"{self.manifest['num_rows']}: {_REPAIR}"
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`: `input_ids`, `doc_ids`, `labels`, each int64 [context]; labels are already shifted."""
        return {name: value[0] for name, value in self.rows([index]).items()}

    def rows(self, indices: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """Rows `indices` as one batch: `input_ids`, `doc_ids`, `labels`, each int64 [len(indices), context]."""
        located = [self._locate(int(index)) for index in indices]
        tokens = np.stack([self._tokens[shard][row] for shard, row in located])
        docs = np.stack([self._docs[shard][row] for shard, row in located])
        return {
            "input_ids": torch.from_numpy(tokens.astype(np.int64)),
            "doc_ids": torch.from_numpy(docs.astype(np.int64)),
            "labels": torch.from_numpy(shifted_labels(tokens, docs)),
        }

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Order in which epoch `epoch` reads the rows: a permutation of `range(len(self))`, int64."""
        return epoch_order(len(self), seed, epoch)

    def cursor(self, seed: int = 0, position: int = 0) -> RowCursor:
        """A `RowCursor` over these rows; `position` = rows consumed so far (all data-parallel ranks together)."""
        return RowCursor(len(self), seed=seed, position=position)

    def rows_for_step(
        self, step: int, data_parallel_rank: int, data_parallel_size: int, rows_per_step: int, seed: int = 0
    ) -> np.ndarray:
        """Row indices, int64 [rows_per_step / data_parallel_size], of one data-parallel rank in step `step` (from 0).

        `rows_per_step` counts the rows of all data-parallel ranks together; with it fixed, a step reads the same rows
        on any number of ranks. Steps run on across the end of an epoch: every row is read exactly once per epoch.
        """
        cursor = self.cursor(seed, step * rows_per_step)
        return cursor.peek(rows_per_step, data_parallel_rank, data_parallel_size)

    def _locate(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.path}")
        index %= len(self)
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, index - int(self._starts[shard])

    def _check_request(
        self, context_length: int | None, tokenizer_sha256: str | None, vocab_size: int | None
    ) -> None:
        if context_length is not None and context_length != self.context_length:
            raise ValueError(
                f"{self.path} was prepared for a context of {self.context_length} tokens, {context_length} asked for: "
                f"set data.context_length to {self.context_length} or {_REPAIR}"
            )
        if tokenizer_sha256 is not None and tokenizer_sha256 != self.manifest["tokenizer_sha256"]:
            raise ValueError(
                f"{self.path} was prepared with another tokenizer (sha256 {self.manifest['tokenizer_sha256'][:12]}, "
                f"the model's is {tokenizer_sha256[:12]}): use that tokenizer's model or {_REPAIR}"
            )
        if vocab_size is not None and vocab_size < self.manifest["vocab_size"]:
            raise ValueError(
                f"{self.path} holds token ids up to {self.manifest['vocab_size'] - 1}, the model's vocabulary has "
                f"{vocab_size}: use the model whose tokenizer made the data or {_REPAIR}"
            )

    def _open(self, shard: dict[str, Any], part: str, verify: bool) -> np.ndarray:
        entry = shard[part]
        file = self.path / entry["file"]
        if file.parent != self.path:
            raise ValueError(
                f"{self.path / MANIFEST_NAME}: shard file {entry['file']!r} lies outside the folder"
            )
        if not file.is_file():
            raise ValueError(f"{file} is missing: {_REPAIR}")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ValueError(f"{file} has {size} bytes, the manifest says {entry['bytes']}: {_REPAIR}")
        if verify and sha256_file(file) != entry["sha256"]:
            raise ValueError(f"{file} does not match its checksum (changed or damaged): {_REPAIR}")
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{file} is not a readable .npy array ({error}): {_REPAIR}") from error
        expected = (shard["rows"], self.context_length)
        if array.shape != expected or array.dtype != np.int32:
            raise ValueError(
                f"{file} holds {array.dtype} {list(array.shape)}, expected int32 {list(expected)}: {_REPAIR}"
            )
        return array


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The checked manifest of data folder `path`; `ValueError` when it is missing, foreign or of another schema version."""
    path = Path(path)
    file = path / MANIFEST_NAME
    if not file.is_file():
        raise ValueError(
            f"{path} holds no {MANIFEST_NAME}: run launch/prepare_data.py first or set another output_dir"
        )
    manifest = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{file} is not a manifest of packed rows (no format {FORMAT!r}): {_REPAIR}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{file} has schema version {manifest.get('schema_version')}, this program reads {SCHEMA_VERSION}: {_REPAIR}"
        )
    for name, kind in _REQUIRED.items():
        if not isinstance(manifest.get(name), kind):
            raise ValueError(f"{file} lacks {name!r} ({kind.__name__}): {_REPAIR}")
    for shard in manifest["shards"]:
        complete = all(
            {"file", "bytes", "sha256"} <= shard.get(part, {}).keys() for part in ("tokens", "docs")
        )
        if "rows" not in shard or not complete:
            raise ValueError(f"{file} has an incomplete shard entry: {_REPAIR}")
    return manifest


@dataclass
class RowCursor:
    """The position in the endless stream of rows: epoch after epoch, each in its own order, no row left out.

    The whole state is `position`, the number of rows that all data-parallel ranks together have consumed since the
    start. Saving that integer and starting a new cursor from it continues at the very next row, on any rank count.
    """

    num_rows: int
    """Rows of the data set."""
    seed: int = 0
    """Seed of the epoch orders."""
    position: int = 0
    """Rows consumed so far, over all epochs and ranks."""

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise ValueError(f"a data set with {self.num_rows} rows cannot be iterated: prepare data first")
        if self.position < 0:
            raise ValueError(f"the row cursor must be >= 0, got {self.position}")

    @property
    def epoch(self) -> int:
        """Epoch of the next row."""
        return self.position // self.num_rows

    def peek(self, count: int, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> np.ndarray:
        """Row indices, int64 [count / data_parallel_size], that this data-parallel rank reads of the next `count` rows.

        Rank r takes the r-th contiguous block. All ranks of one sequence-parallel group pass the same
        `data_parallel_rank` and read the same rows.
        """
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data-parallel rank {data_parallel_rank} is not in 0..{data_parallel_size - 1}")
        if count < 1 or count % data_parallel_size:
            raise ValueError(
                f"{count} rows per step cannot be split over {data_parallel_size} data-parallel ranks: "
                f"use a multiple of {data_parallel_size}"
            )
        share = count // data_parallel_size
        start = self.position + data_parallel_rank * share
        stream = range(start, start + share)
        return np.array(
            [epoch_order(self.num_rows, self.seed, at // self.num_rows)[at % self.num_rows] for at in stream],
            dtype=np.int64,
        )

    def take(self, count: int, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> np.ndarray:
        """`peek`, then advance by `count` rows (the whole step's, not this rank's share)."""
        rows = self.peek(count, data_parallel_rank, data_parallel_size)
        self.position += count
        return rows

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint stores."""
        return {"position": self.position, "seed": self.seed, "num_rows": self.num_rows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state` was saved; `ValueError` if it belongs to other data (another number of rows)."""
        if state["num_rows"] != self.num_rows:
            raise ValueError(
                f"the checkpoint was trained on data with {state['num_rows']} rows, this data has {self.num_rows}: "
                "resume with the same prepared data"
            )
        self.position, self.seed = int(state["position"]), int(state["seed"])
