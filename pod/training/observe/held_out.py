"""Rows for evaluation during training, made of the held-out text that lies beside the prepared rows."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pod.data.loader import shifted_labels
from pod.data.publish import HELD_OUT_LENGTHS, HELD_OUT_TOKENS

Rows = dict[str, Tensor]
"""`input_ids`, `labels` (shifted), `doc_ids` (-1 = padding), each int64 [rows, length]."""


def held_out_rows(dataset: Any, count: int) -> Rows:
    """At most `count` rows of `dataset.context_length` tokens, the same in every run.

    Documents of at least that length come first, one row from the beginning of each, so that every position has context;
    the other rows are packed with shorter documents in the order of the file, the last document of a row cut.

    Raises:
        ValueError: nothing was held out when the data was prepared.
    """
    length = dataset.context_length
    documents = _Documents(dataset)
    long = np.flatnonzero(documents.lengths >= length)[:count]
    rows = [[documents[int(index)][:length]] for index in long]
    rows += _packed(documents, length, count - len(rows))
    tokens = np.full((len(rows), length), dataset.manifest["pad_token_id"], dtype=np.int64)
    docs = np.full(tokens.shape, -1, dtype=np.int64)
    for at, row in enumerate(rows):
        filled = np.concatenate(row)
        tokens[at, : len(filled)] = filled
        docs[at, : len(filled)] = np.repeat(np.arange(len(row)), [len(document) for document in row])
    return {
        "input_ids": torch.from_numpy(tokens),
        "labels": torch.from_numpy(shifted_labels(tokens, docs)),
        "doc_ids": torch.from_numpy(docs),
    }


class _Documents:
    """The held-out documents, mapped from their file."""

    def __init__(self, dataset: Any):
        held_out = dataset.manifest.get("held_out") or {}
        if not held_out.get("documents"):
            raise ValueError(
                "train.eval_every_steps and train.gate_every_steps need held-out text, and this data has none: set "
                "data.held_out_fraction above 0 and prepare the data again, or set them to 0"
            )
        folder = dataset.path
        self.lengths = np.load(folder / HELD_OUT_LENGTHS, allow_pickle=False)
        self.ends = np.cumsum(self.lengths)
        self.tokens = np.memmap(folder / HELD_OUT_TOKENS, dtype=held_out["token_dtype"], mode="r")

    def __getitem__(self, index: int) -> np.ndarray:
        end = int(self.ends[index])
        return np.asarray(self.tokens[end - int(self.lengths[index]) : end])


def _packed(documents: _Documents, length: int, count: int) -> Iterator[list[np.ndarray]]:
    """Rows of documents shorter than a row, one after the other; the last row may have room left."""
    row: list[np.ndarray] = []
    room, made = length, 0
    for index in np.flatnonzero((documents.lengths < length) & (documents.lengths > 0)):
        if made >= count:
            return
        row.append(documents[int(index)][:room])
        room -= len(row[-1])
        if room == 0:
            yield row
            row, room, made = [], length, made + 1
    if row and made < count:
        yield row


def padded_row(token_ids: list[int], answer: int, length: int) -> Rows:
    """One document as a row of `length` tokens; only its last `answer` tokens are labels."""
    tokens = torch.zeros(1, length, dtype=torch.long)
    docs, labels = torch.full_like(tokens, -1), torch.full_like(tokens, -100)
    end = len(token_ids)
    tokens[0, :end], docs[0, :end] = torch.tensor(token_ids), 0
    if answer:
        labels[0, end - 1 - answer : end - 1] = tokens[0, end - answer : end]
    return {"input_ids": tokens, "labels": labels, "doc_ids": docs}


def lengthened(rows: Rows, length: int) -> Rows:
    """Rows with padding up to `length` tokens."""
    more = length - rows["input_ids"].shape[1]
    fills = {"input_ids": 0, "labels": -100, "doc_ids": -1}
    return {
        name: torch.nn.functional.pad(value, (0, more), value=fills[name]) for name, value in rows.items()
    }
