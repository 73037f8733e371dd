"""Packs whole documents into rows of the context's size."""

from __future__ import annotations

import bisect

import numpy as np


def pack_best_fit(lengths: np.ndarray, context_length: int, window: int) -> list[list[int]]:
    """Rows of document indices by best-fit decreasing, `window` documents at a time.

    lengths [N] in tokens, each in 1..context_length. Within a window the longest document goes first, each into the
    fullest row that still holds it; rows with room stay open for the next window (at most `window` of them, the fullest
    are closed first). Every document is in exactly one row. Ties: the earlier document, the earlier row.
    """
    _check(lengths, context_length)
    closed: list[list[int]] = []
    rows: dict[int, list[int]] = {}
    room: list[tuple[int, int]] = []  # (tokens left, row number), sorted
    next_row = 0
    for start in range(0, len(lengths), window):
        order = start + np.argsort(-lengths[start : start + window], kind="stable")
        for index in order.tolist():
            length = int(lengths[index])
            at = bisect.bisect_left(room, (length, -1))
            if at == len(room):
                left, row = context_length, next_row
                rows[row] = []
                next_row += 1
            else:
                left, row = room.pop(at)
            rows[row].append(index)
            if left > length:
                bisect.insort(room, (left - length, row))
            else:
                closed.append(rows.pop(row))
        for _, row in room[: max(0, len(room) - window)]:
            closed.append(rows.pop(row))
        del room[: max(0, len(room) - window)]
    closed.extend(rows[row] for _, row in room)
    return closed


def pack_one_per_row(lengths: np.ndarray, context_length: int) -> list[list[int]]:
    """Rows of one document each, in the order given."""
    _check(lengths, context_length)
    return [[index] for index in range(len(lengths))]


def padding_share(lengths: np.ndarray, num_rows: int, context_length: int) -> float:
    """Share of all row positions that hold no token, 0..1."""
    return 1 - float(lengths.sum()) / (num_rows * context_length)


def _check(lengths: np.ndarray, context_length: int) -> None:
    if len(lengths) and (lengths.min() < 1 or lengths.max() > context_length):
        raise ValueError(
            f"documents of {lengths.min()} to {lengths.max()} tokens cannot be packed whole into rows of {context_length}: "
            "cut or skip the long ones first"
        )
