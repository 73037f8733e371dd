"""Growing tensors that hold keys or values of a group of heads, token ``p`` of a row at a fixed slot.

A layer never makes a store itself: it asks a codec for one, and so works with packed keys and values as well.
"""

import sys
from collections.abc import Sequence
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from .attend import Source
from .packed import Stored

_SLACK = 128  # a store grows by 1/128 of its length: under 1 % of the bytes, and appending stays cheap


class Store(Protocol):
    """What a layer may do with keys or values ``[B, h, slots, d]``, whatever the form in which they are held.

    ``past`` and ``length`` are tokens per row, equal in all rows; only ``append_ragged`` takes rows that differ.
    """

    has_window: bool

    @property
    def is_empty(self) -> bool: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, slots reserved, d)``."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    def used_slots(self, length: int) -> int: ...

    def slot_positions(self, lengths: Tensor) -> Tensor: ...

    def reserve(self, slots: int) -> None:
        """Hold room for ``slots`` tokens, so that the tensors stay where they are while it suffices."""
        ...

    def append(self, x: Tensor, past: int) -> None: ...

    def append_ragged(self, x: Tensor, past: Tensor, counts: Tensor) -> None: ...

    def append_one(self, x: Tensor, past: Tensor, length: int) -> None: ...

    def read(self, length: int) -> Tensor:
        """``[B, h, used slots, d]``: a view, or a copy that the caller must not keep."""
        ...

    def view(self, length: int) -> Source:
        """The same for ``attend``, which reads what it needs: as the tokens are now, whatever is stored or packed later."""
        ...

    @property
    def stored(self) -> Stored:
        """What decoding reads: ``[B, h, slots reserved, d]``."""
        ...

    def settle(self, length: int) -> None:
        """The prompt has ended, or a token was decoded: bring the store into the form in which it rests."""
        ...

    def keep(self, index: Tensor, length: int) -> None:
        """Hold only the slots ``index`` ``[B, h, w]`` of the ``length`` in use, as slots ``0 … w-1``; free the rest."""
        ...

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Overwrite slots ``[B, h, c]`` with ``[B, h, c, d]``."""
        ...

    def select_rows(self, index: Tensor) -> None: ...

    def tensors(self) -> list[Tensor]: ...

    def predicted_nbytes(self, length: int) -> int:
        """Bytes by the rule, without growth slack."""
        ...


class Codec(Protocol):
    """How keys and values are held: makes the stores of a layer."""

    def tokens(self, part: str, evicts: bool = False) -> Store:
        """A store of tokens at slots 0, 1, …; ``part`` is ``keys`` or ``values``; ``evicts``: ``keep`` will be used."""
        ...

    def window(self, part: str, num_sink_tokens: int, num_recent_tokens: int) -> Store:
        """A store of the first and the most recent tokens."""
        ...


def take_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Slots ``[B, h, w]`` of ``[B, h, n, d]``, copied. Whole tokens at a time: on CPU ten times as fast as ``gather``."""
    batch, heads, n, head_dim = x.shape
    if x.stride()[2:] != (head_dim, 1) or x.stride(0) % head_dim or x.stride(1) % head_dim:
        x = x.contiguous()
    row, head = x.stride(0) // head_dim, x.stride(1) // head_dim
    tokens = x.as_strided(((batch - 1) * row + (heads - 1) * head + n, head_dim), (head_dim, 1))
    first = torch.arange(batch, device=x.device)[:, None] * row + torch.arange(heads, device=x.device) * head
    return tokens.index_select(0, (slots + first[..., None]).flatten()).view(*slots.shape, head_dim)


class TokenStore:
    """``[B, h, slots, d]`` with slot = position, or with a window: sinks, then a ring of recent tokens.

    Args:
        num_sink_tokens, num_recent_tokens: None stores every token. Otherwise slots ``0 … n_s-1`` hold the first
            tokens and slot ``n_s + (p - n_s) mod n_r`` holds token ``p``: older tokens are overwritten.
    """

    def __init__(self, num_sink_tokens: int | None = None, num_recent_tokens: int | None = None):
        self.has_window = num_recent_tokens is not None
        self.num_sink_tokens = num_sink_tokens or 0
        self.num_recent_tokens = num_recent_tokens or 0
        self._reserved = 0
        self._data: Tensor | None = None

    @property
    def limit(self) -> int:
        """Number of slots of a window; without one, more than any sequence."""
        return self.num_sink_tokens + self.num_recent_tokens if self.has_window else sys.maxsize

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self._data is None

    @property
    def data(self) -> Tensor:
        """``[B, h, capacity, d]``; use ``read`` for the slots in use."""
        assert self._data is not None, "empty store"
        return self._data

    @data.setter
    def data(self, value: Tensor) -> None:
        self._data = value

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, capacity, d)``."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def stored(self) -> Tensor:
        """What decode kernels read; a decoded token is written to ``target``."""
        return self.data

    @property
    def target(self) -> Tensor:
        """``[B, h, capacity, d]``."""
        return self.data

    def slots_of(self, position_ids: Tensor) -> Tensor:
        """Slot of each position."""
        if not self.has_window:
            return position_ids
        ring = self.num_sink_tokens + (position_ids - self.num_sink_tokens) % self.num_recent_tokens
        return torch.where(position_ids < self.limit, position_ids, ring)

    def used_slots(self, length: int) -> int:
        """Slots in use after ``length`` tokens."""
        return min(length, self.limit)

    def slot_positions(self, lengths: Tensor) -> Tensor:
        """Position held by each used slot after ``lengths`` ``[B]`` tokens per row: ``[B, slots]``, -1 = empty."""
        slots = torch.arange(self.used_slots(int(lengths.max())), device=lengths.device)
        newest = lengths[:, None] - 1
        if not self.has_window:
            positions = slots.expand(lengths.shape[0], -1)
        else:
            behind = (newest - slots) % self.num_recent_tokens
            positions = torch.where(slots < self.num_sink_tokens, slots, newest - behind)
            positions = positions.masked_fill(
                (slots >= self.num_sink_tokens) & (positions < self.num_sink_tokens), -1
            )
        return positions.masked_fill(positions > newest, -1)

    def reserve(self, slots: int) -> None:
        """Hold room for ``slots`` tokens (a window: for all that it can hold), at once or when the first token comes."""
        self._reserved = self.limit if self.has_window else slots
        if not self.is_empty:
            self._grow(self.data, self._reserved)

    def _grow(self, like: Tensor, slots: int) -> Tensor:
        if self.is_empty:
            self.data = like.new_empty(like.shape[0], like.shape[1], 0, like.shape[3])
        if self.data.shape[2] < slots:
            slack = 0 if slots <= self._reserved else max(1, slots // _SLACK)
            wanted = max(min(slots + slack, self.limit), self._reserved)
            grown = self.data.new_zeros(*self.data.shape[:2], wanted, self.data.shape[3])
            grown[:, :, : self.data.shape[2]] = self.data
            self.data = grown
        return self.data

    def append(self, x: Tensor, past: int) -> None:
        """Write ``[B, h, m, d]`` when every row has ``past`` tokens and gets ``m`` more."""
        length = past + x.shape[2]
        data = self._grow(x, self.used_slots(length))
        if length <= self.limit:
            data[:, :, past:length] = x
            return
        sinks = min(max(self.num_sink_tokens - past, 0), x.shape[2])
        data[:, :, past : past + sinks] = x[:, :, :sinks]
        first = max(past + sinks, length - self.num_recent_tokens)
        x = x[:, :, first - past :]
        slot = self.num_sink_tokens + (first - self.num_sink_tokens) % self.num_recent_tokens
        before_wrap = min(x.shape[2], self.limit - slot)
        data[:, :, slot : slot + before_wrap] = x[:, :, :before_wrap]
        data[:, :, self.num_sink_tokens : self.num_sink_tokens + x.shape[2] - before_wrap] = x[
            :, :, before_wrap:
        ]

    def append_ragged(self, x: Tensor, past: Tensor, counts: Tensor) -> None:
        """Write the first ``counts[b]`` of ``[B, h, m, d]`` behind ``past[b]`` tokens of each row."""
        steps = torch.arange(x.shape[2], device=x.device)
        position_ids = past[:, None] + steps
        keep = steps < counts[:, None]
        if self.has_window:
            overwritten = position_ids < (past + counts - self.num_recent_tokens)[:, None]
            keep = keep & ~(overwritten & (position_ids >= self.num_sink_tokens))
        data = self._grow(x, self.used_slots(int((past + counts).max())))
        rows, columns = keep.nonzero(as_tuple=True)
        data[rows, :, self.slots_of(position_ids)[rows, columns]] = x[rows, :, columns]

    def append_one(self, x: Tensor, past: Tensor, length: int) -> None:
        """Write a token ``[B, h, 1, d]`` behind ``past[b]`` tokens of each row, after which the longest has ``length``."""
        self._grow(x, self.used_slots(length))
        self.write(self.slots_of(past)[:, None, None].expand(-1, x.shape[1], 1), x)

    def read(self, length: int) -> Tensor:
        """View of the used slots after at most ``length`` tokens per row."""
        return self.data[:, :, : self.used_slots(length)]

    view = read

    def settle(self, length: int) -> None:
        """Nothing to do: tokens rest as they came."""

    def keep(self, index: Tensor, length: int) -> None:
        """Hold only the slots ``index`` ``[B, h, w]``, as slots ``0 … w-1``; the rest is freed."""
        self.data = take_slots(self.data, index)

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Overwrite slots ``[B, h, c]`` with ``[B, h, c, d]``."""
        self.data.scatter_(2, slots[..., None].expand_as(x), x.to(self.dtype))

    def predicted_nbytes(self, length: int) -> int:
        """Bytes of the slots in use after ``length`` tokens."""
        batch, heads, _, head_dim = self.shape
        return batch * heads * self.used_slots(length) * head_dim * self.data.element_size()

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        if not self.is_empty:
            self.data = self.data.index_select(0, index.to(self.data.device))

    def tensors(self) -> list[Tensor]:
        return [] if self.is_empty else [self.data]


class NativeCodec:
    """Keys and values as the model computes them."""

    def tokens(self, part: str, evicts: bool = False) -> Store:
        return TokenStore()

    def window(self, part: str, num_sink_tokens: int, num_recent_tokens: int) -> Store:
        return TokenStore(num_sink_tokens, num_recent_tokens)


NATIVE: Codec = NativeCodec()


class Recent:
    """Tokens of a window and the chunk behind it, in the order of their positions: a ``TokenSource``.

    What has left the window is read as zeros, which no query sees.

    Args:
        window: store of sinks and a ring; new: ``[B, h, m, d]``, not stored yet.
        rows: ``(past, counts)`` of each row.
    """

    def __init__(self, window: Store, new: Tensor, rows: Sequence[tuple[int, int]]):
        self.new, self.past = new, [past for past, _ in rows]
        self.held = None if window.is_empty else window.read(max(self.past))
        lengths = torch.tensor(self.past, device=new.device)
        self.places = None if self.held is None else window.slot_positions(lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, n, d)``, ``n`` the longest row's."""
        batch, heads, m, head_dim = self.new.shape
        return batch, heads, max(self.past) + m, head_dim

    def rows(self, rows: slice) -> "Recent":
        """These rows."""
        part = copy(self)
        part.new, part.past = self.new[rows], self.past[rows]
        if self.held is not None and self.places is not None:
            part.held, part.places = self.held[rows], self.places[rows]
        return part

    def span(self, start: int, stop: int) -> Tensor:
        """``[B, h, stop - start, d]`` of rows with the same past."""
        past = self.past[0]
        chunk = self.new[:, :, max(start - past, 0) : max(stop - past, 0)]
        before = range(start, min(stop, past))
        if not len(before) or self.held is None or self.places is None:
            return chunk
        place = self.places[0]
        wanted = (place >= before.start) & (place < before.stop)
        out = self.new.new_zeros(*self.new.shape[:2], len(before), self.new.shape[3])
        out[:, :, place[wanted] - before.start] = self.held[:, :, : len(place)][:, :, wanted]
        return torch.cat((out, chunk), dim=2)
