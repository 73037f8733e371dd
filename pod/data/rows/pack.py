"""Packs whole documents into rows of the context's size."""

import heapq

import numpy as np

_WORD = 512  # rooms per integer of the two-level set: two cheap operations instead of one on a long integer


def best_fit_rows(lengths: np.ndarray, context_length: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows by best-fit decreasing, `window` documents at a time: (documents int64 [N], starts int64 [rows + 1]).

    Row r holds the documents numbered `documents[starts[r] : starts[r + 1]]`. lengths [N] in tokens, each in
    1..context_length. Within a window the longest document goes first, each into the fullest row that still holds it; rows
    with room stay open for the next window (at most `window` of them, the fullest are closed first). Every document is in
    exactly one row. Ties: the earlier document, the earlier row. Rows are numbered in the order in which they are closed.
    """
    _check(lengths, context_length)
    num_documents = len(lengths)
    open_rows = _OpenRows(context_length)
    order = np.empty(num_documents, np.int64)
    row_of = np.empty(num_documents, np.int32 if num_documents < 2**31 else np.int64)
    for start in range(0, num_documents, window):
        some = np.asarray(lengths[start : start + window], dtype=np.int64)
        longest_first = np.argsort(-some, kind="stable")
        order[start : start + window] = start + longest_first
        row_of[start : start + window] = open_rows.place(some[longest_first].tolist())
        open_rows.close_fullest(open_rows.count - window)
    open_rows.close_fullest(open_rows.count)
    rank = np.empty(len(open_rows.closed), row_of.dtype)
    rank[open_rows.closed] = np.arange(len(rank))
    row_of = rank[row_of]
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=len(rank)))])
    return order[np.argsort(row_of, kind="stable")], starts


def one_per_row(lengths: np.ndarray, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one document each, in the order given; as `best_fit_rows`."""
    _check(lengths, context_length)
    return np.arange(len(lengths)), np.arange(len(lengths) + 1)


class _OpenRows:
    """Rows with room left, found by their room: per room a heap of row numbers, and the set of rooms in use as bits.

    The bits lie in words of `_WORD` rooms, and `top` says which words are not empty, so that the smallest room of at least
    n tokens costs a few operations on short integers.
    """

    def __init__(self, context_length: int):
        self.context_length = context_length
        self.rows: list[list[int]] = [[] for _ in range(context_length + 1)]
        self.words = [0] * (context_length // _WORD + 1)
        self.top = 0
        self.count = 0
        self.next_row = 0
        self.closed: list[int] = []

    def place(self, lengths: list[int]) -> list[int]:
        """Row number for each document, placed one after the other; opens rows as needed and notes the full ones."""
        context, rows, words, top = self.context_length, self.rows, self.words, self.top
        push, pop = heapq.heappush, heapq.heappop
        count, next_row = self.count, self.next_row
        placed = []
        for length in lengths:
            number, bit = divmod(length, _WORD)
            bits = words[number] >> bit
            if bits:
                room = length + (bits & -bits).bit_length() - 1
            else:
                later = top >> (number + 1)
                if later:
                    number += (later & -later).bit_length()
                    bits = words[number]
                    room = number * _WORD + (bits & -bits).bit_length() - 1
                else:
                    room = 0
            if room:
                heap = rows[room]
                row = pop(heap)
                count -= 1
                if not heap:
                    words[number] &= ~(1 << room % _WORD)
                    if not words[number]:
                        top &= ~(1 << number)
                room -= length
            else:
                row = next_row
                next_row += 1
                room = context - length
            placed.append(row)
            if room:
                heap = rows[room]
                if not heap:
                    number, bit = divmod(room, _WORD)
                    words[number] |= 1 << bit
                    top |= 1 << number
                push(heap, row)
                count += 1
            else:
                self.closed.append(row)
        self.top, self.count, self.next_row = top, count, next_row
        return placed

    def close_fullest(self, number: int) -> None:
        """Close `number` rows, those with the least room first."""
        while number > 0:
            word = (self.top & -self.top).bit_length() - 1
            bits = self.words[word]
            bit = (bits & -bits).bit_length() - 1
            heap = self.rows[word * _WORD + bit]
            while heap and number > 0:
                self.closed.append(heapq.heappop(heap))
                self.count -= 1
                number -= 1
            if not heap:
                self.words[word] &= ~(1 << bit)
                if not self.words[word]:
                    self.top &= ~(1 << word)


def _check(lengths: np.ndarray, context_length: int) -> None:
    if len(lengths) and (lengths.min() < 1 or lengths.max() > context_length):
        raise ValueError(
            f"documents of {lengths.min()} to {lengths.max()} tokens cannot be packed whole into rows of {context_length}: "
            "cut or skip the long ones first"
        )
