"""``WindowBuffer``: the keys or values of a window, which are the first tokens and a ring of recent ones.

No code frees the tokens that fall out of a window. A window has a fixed number of slots, and
``WindowBuffer.append`` writes a new token over the one that has just left it.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from .attend import take_heads
from .kv_buffer import KVBuffer
from .packed import Stored


class WindowBuffer(KVBuffer):
    """Keys or values ``[B, h, slots, d]`` of a window. See ``KVBuffer`` for the methods.

    Slots ``0 … n_s-1`` hold the first tokens (*sinks*), which stay. Behind them is a ring: slot
    ``n_s + (p - n_s) mod n_r`` holds token ``p``, which is overwritten by token ``p + n_r``.

    Example, with one row, one head and ``d = 1``:

        >>> buffer = WindowBuffer(num_sink_tokens=1, num_recent_tokens=2)
        >>> buffer.append(torch.tensor([0.0, 1, 2, 3]).view(1, 1, 4, 1), past=0)
        >>> buffer.read(4).flatten()  # token 0 is the sink; tokens 2 and 3 are the ring
        tensor([0., 3., 2.])

    Args:
        num_sink_tokens: ``n_s``, number of first tokens that are kept for good.
        num_recent_tokens: ``n_r``, slots of the ring.
    """

    has_window = True

    def __init__(self, num_sink_tokens: int, num_recent_tokens: int):
        super().__init__()
        self.num_sink_tokens = num_sink_tokens
        self.num_recent_tokens = num_recent_tokens
        self.limit = num_sink_tokens + num_recent_tokens

    def used_slots(self, length: int) -> int:
        return min(length, self.limit)

    def runs(self, start: int, stop: int, length: int) -> list[tuple[int, int, int]]:
        if length <= self.limit:
            found = [(start, start, stop - start)]
        else:
            n_s, n_r = self.num_sink_tokens, self.num_recent_tokens
            first = max(start, n_s, length - n_r)
            wrap = stop - (stop - n_s) % n_r
            recent = ((first, min(wrap, stop)), (max(first, wrap), stop))
            found = [(start, start, min(stop, n_s) - start)]
            found += [(begin, n_s + (begin - n_s) % n_r, end - begin) for begin, end in recent]
        return [run for run in found if run[2] > 0]

    def reserve(self, slots: int) -> None:
        """Allocate all slots that the window can ever use, whatever ``slots`` is."""
        super().reserve(self.limit)

    def append(self, x: Tensor, past: int) -> None:
        """Write new tokens ``[B, h, m, d]`` behind the ``past`` tokens that every row has.

        In a full window, they overwrite the tokens that fall out of it: token ``p`` takes the slot of token
        ``p - n_r``, unless that is a sink. That is how a window forgets; nothing is freed.
        """
        length = past + x.shape[2]
        slots = self.used_slots(length)
        if self.data is None or self.data.shape[2] < slots:
            self._grow(x, slots)
        for position, slot, count in self.runs(past, length, length):
            self.data[:, :, slot : slot + count] = x[:, :, position - past : position - past + count]

    def append_and_read(self, x: Tensor, past: int) -> Stored:
        self.append(x, past)
        return self.read(past + 1)

    def read(self, length: int) -> Tensor:
        return self.data[:, :, : self.used_slots(length)]

    def check_integrity(self) -> None:
        """Check that the buffer has no more slots than its window."""
        assert self.is_empty or self.shape[2] <= self.limit, f"{self.shape[2]} slots, at most {self.limit}"


class Recent:
    """Tokens of a window and of the chunk behind it, in the order of their positions: a ``TokenSource``.

    Tokens that have left the window read as zeros. No query sees them.

    Args:
        window: the buffer of the window.
        new: ``[B, h, m, d]``, the chunk, not stored yet.
        rows: ``(past, counts)`` of each row: tokens that it has, and tokens of the chunk.
    """

    def __init__(self, window: KVBuffer, new: Tensor, rows: Sequence[tuple[int, int]]):
        self.window, self.new, self.past = window, new, [past for past, _ in rows]
        self.held = None if window.is_empty else window.read(max(self.past))

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, n, d)``, with the ``n`` of the longest row."""
        batch, heads, m, head_dim = self.new.shape
        return batch, heads, max(self.past) + m, head_dim

    def rows(self, rows: slice) -> "Recent":
        """The same for these rows only."""
        part = copy(self)
        part.new = self.new[rows]
        part.past = self.past[rows]
        part.held = None if self.held is None else self.held[rows]
        return part

    def heads(self, heads: Sequence[int]) -> "Recent":
        """The same for these KV heads only, numbered as in ``new``."""
        part = copy(self)
        part.new = take_heads(self.new, heads)
        part.held = None if self.held is None else take_heads(self.held, heads)
        return part

    def span(self, start: int, stop: int) -> Tensor:
        """Tokens at positions ``start … stop-1``, ``[B, h, stop - start, d]``; zeros behind a shorter row."""
        past = self.past[0]
        if len(set(self.past)) > 1:
            rows = [self.rows(slice(i, i + 1)).span(start, stop) for i in range(len(self.past))]
            return torch.cat([F.pad(row, (0, 0, 0, stop - start - row.shape[2])) for row in rows])
        chunk = self.new[:, :, max(start - past, 0) : max(stop - past, 0)]
        if start >= past or self.held is None:
            return chunk
        out = self.new.new_zeros(*self.new.shape[:2], min(stop, past) - start, self.new.shape[3])
        for position, slot, count in self.window.runs(start, min(stop, past), past):
            out[:, :, position - start : position - start + count] = self.held[:, :, slot : slot + count]
        return torch.cat((out, chunk), dim=2)
