"""Growing tensors that hold keys or values of a group of heads, token ``p`` of a row at a fixed slot."""

import sys

import torch
from torch import Tensor

_SLACK = 128  # a store grows by 1/128 of its length: under 1 % of the bytes, and appending stays cheap


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

    def _reserve(self, like: Tensor, slots: int) -> Tensor:
        if self.is_empty:
            self.data = like.new_empty(like.shape[0], like.shape[1], 0, like.shape[3])
        if self.data.shape[2] < slots:
            wanted = min(slots + max(1, slots // _SLACK), self.limit)
            grown = self.data.new_zeros(*self.data.shape[:2], wanted, self.data.shape[3])
            grown[:, :, : self.data.shape[2]] = self.data
            self.data = grown
        return self.data

    def append(self, x: Tensor, past: int) -> None:
        """Write ``[B, h, m, d]`` when every row has ``past`` tokens and gets ``m`` more."""
        length = past + x.shape[2]
        data = self._reserve(x, self.used_slots(length))
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
        data = self._reserve(x, self.used_slots(int((past + counts).max())))
        rows, columns = keep.nonzero(as_tuple=True)
        data[rows, :, self.slots_of(position_ids)[rows, columns]] = x[rows, :, columns]

    def read(self, length: int) -> Tensor:
        """View of the used slots after at most ``length`` tokens per row."""
        return self.data[:, :, : self.used_slots(length)]

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        if not self.is_empty:
            self.data = self.data.index_select(0, index.to(self.data.device))

    def tensors(self) -> list[Tensor]:
        return [] if self.is_empty else [self.data]
