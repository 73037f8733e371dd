"""Rows for evaluation during training, made of the held-out text that lies beside the prepared rows."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pod.data.rows.held_out import map_held_out
from pod.data.rows.loader import shifted_labels

Rows = dict[str, Tensor]
"""`input_ids`, `labels` (shifted), `doc_ids` (-1 = padding), each int64 [rows, length]."""
FILLS = {"input_ids": 0, "labels": -100, "doc_ids": -1}


def held_out_rows(dataset: Any, count: int) -> Rows:
    """At most `count` rows of `dataset.context_length` tokens, the same in every run; ValueError without held-out text.

    Documents of at least that length come first, one row from the beginning of each, so that every position has context;
    the other rows are packed with shorter documents in the order of the file, the last document of a row cut.
    """
    length, documents = dataset.context_length, _documents(dataset)
    rows = [[document[:length]] for document in documents if len(document) >= length][:count]
    rows += _packed([x for x in documents if 0 < len(x) < length], length, count - len(rows))
    tokens = np.full((len(rows), length), dataset.manifest["pad_token_id"], dtype=np.int64)
    docs = np.full(tokens.shape, -1, dtype=np.int64)
    for at, row in enumerate(rows):
        filled = np.concatenate(row)
        tokens[at, : len(filled)] = filled
        docs[at, : len(filled)] = np.repeat(np.arange(len(row)), [len(document) for document in row])
    found = {"input_ids": tokens, "labels": shifted_labels(tokens, docs), "doc_ids": docs}
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _documents(dataset: Any) -> list[np.ndarray]:
    """The held-out documents, mapped from their file."""
    documents = map_held_out(dataset.path, dataset.manifest)
    if not documents:
        raise ValueError(
            "train.eval_every_steps needs held-out text, and this data has none: prepare the data again with "
            "data.held_out_tokens empty or above 0, or set train.eval_every_steps to 0"
        )
    return documents


def _packed(documents: Sequence[np.ndarray], length: int, count: int) -> Iterator[list[np.ndarray]]:
    """Rows of documents shorter than a row, one after the other; the last row may have room left."""
    row: list[np.ndarray] = []
    made = filled = 0
    for document in documents:
        if made >= count:
            return
        row.append(document[: length - filled])
        filled += len(row[-1])
        if filled == length:
            yield row
            row, filled, made = [], 0, made + 1
    if row and made < count:
        yield row


def padded_row(token_ids: Sequence[int], answer: int, length: int) -> Rows:
    """One document as a row of `length` tokens; only its last `answer` tokens are labels."""
    tokens, end = torch.tensor([token_ids]), len(token_ids)
    labels = torch.full_like(tokens, FILLS["labels"])
    labels[0, end - 1 - answer : end - 1] = tokens[0, end - answer :]
    row = {"input_ids": tokens, "labels": labels, "doc_ids": torch.zeros_like(tokens)}
    return lengthened(row, length)


def lengthened(rows: Rows, length: int) -> Rows:
    """Rows with padding up to `length` tokens."""
    more = length - rows["input_ids"].shape[1]
    return {
        name: torch.nn.functional.pad(value, (0, more), value=FILLS[name]) for name, value in rows.items()
    }
