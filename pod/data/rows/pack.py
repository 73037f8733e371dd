"""Packs whole documents into rows of the context's size."""

from bisect import bisect_left, insort

import numpy as np


def best_fit_rows(lengths: np.ndarray, context_length: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into rows by best-fit decreasing, `window` documents at a time.

    Of each window, the longest document is placed first. A document goes into the fullest row that still has
    space for it. Rows that are not full stay open for the next window: at most `window` of them, the fullest
    are closed first. Every document is in exactly one row. Of equally long documents the earlier one is
    placed first; of equally full rows the earlier one is taken.

    Args:
        lengths: tokens of each document, [N], from 1 to context_length.

    Returns:
        (documents int64 [N], starts int64 [rows + 1]). Row r holds the documents numbered
        `documents[starts[r] : starts[r + 1]]`. Rows are numbered in the order in which they are closed.

    Raises:
        ValueError: a document is empty or longer than a row.
    """
    _check(lengths, context_length)
    rows = _PackedRows(context_length)
    order = np.empty(len(lengths), np.int64)
    row_of = np.empty(len(lengths), np.int64)
    for start in range(0, len(lengths), window):
        some = np.asarray(lengths[start : start + window], dtype=np.int64)
        longest_first = np.argsort(-some, kind="stable")
        order[start : start + window] = start + longest_first
        row_of[start : start + window] = [rows.put(length) for length in some[longest_first].tolist()]
        rows.close_fullest(len(rows.open) - window)
    rows.close_fullest(len(rows.open))
    rank = np.argsort(rows.closed)
    row_of = rank[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=len(rank)))])
    return order[np.argsort(row_of, kind="stable")], starts


def one_per_row(lengths: np.ndarray, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each document into a row of its own, in the order given. Returns and raises as `best_fit_rows`."""
    _check(lengths, context_length)
    return np.arange(len(lengths)), np.arange(len(lengths) + 1)


class _PackedRows:
    """The rows while they are filled.

    Attributes:
        open: (free tokens, number of the row) of each open row, the fullest first.
        closed: the numbers of the other rows, in the order in which they were closed.
    """

    def __init__(self, context_length: int):
        self.context_length = context_length
        self.open: list[tuple[int, int]] = []
        self.closed: list[int] = []

    def put(self, length: int) -> int:
        """Put a document of `length` tokens into a row, and return the number of the row.

        It is the fullest open row with enough free tokens, else a new one. A row that is then full is closed.
        """
        at = bisect_left(self.open, (length, 0))
        if at < len(self.open):
            room, row = self.open.pop(at)
        else:
            room, row = self.context_length, len(self.open) + len(self.closed)
        if room > length:
            insort(self.open, (room - length, row))
        else:
            self.closed.append(row)
        return row

    def close_fullest(self, number: int) -> None:
        """Close `number` rows, those with the fewest free tokens."""
        if number > 0:
            self.closed += [row for _, row in self.open[:number]]
            del self.open[:number]


def _check(lengths: np.ndarray, context_length: int) -> None:
    if len(lengths) and (lengths.min() < 1 or lengths.max() > context_length):
        raise ValueError(
            f"documents of {lengths.min()} to {lengths.max()} tokens cannot be packed whole into rows of "
            f"{context_length}: cut or skip the long ones first"
        )
