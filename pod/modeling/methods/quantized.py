"""Stores whose old tokens are packed to 4 or 8 bits; the newest stay as they came (as KIVI, Liu et al., 2024).

**What is packed when.** While a prompt runs its tokens stay native, so that attention inside it is exact and does not
depend on its chunks. When it ends, and after every decoded token, ``settle`` packs so that of ``n`` tokens held the first
``P(n) = ⌊(n - residual) / group_size⌋ · group_size`` are packed (none if negative): ``residual`` to
``residual + group_size - 1`` tokens stay native, the same ones for keys and values. Whether a token is packed thus depends
on the tokens of its own row alone. Tokens are packed once; ``keep`` copies codes.

**Groups.** Keys of a store that never evicts are grouped per channel over ``group_size`` consecutive tokens, because keys
have outlier channels. Values, keys of evicting stores and keys in windows are grouped per token over channels: tokens of
a per-channel group can only leave together.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pod.modeling.methods.packing import PackedTokens, Packing
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.stores import Codec, Store, TokenStore, take_slots

_SLACK = 128


class NativeTail:
    """The newest tokens of a store, at slots ``first … stop - 1``.

    Args:
        room: slots reserved once older tokens were packed, so that a rest of this size is never copied to grow.
        start: slot of the first token.
    """

    def __init__(self, room: int, start: int = 0):
        self.room, self.start = room, start
        self.first = self.stop = start
        self.data: Tensor | None = None  # [b, h, capacity, d]

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def shape(self) -> torch.Size:
        assert self.data is not None, "empty store"
        return self.data.shape

    def capacity_for(self, count: int, slack: int = 0) -> int:
        """Slots reserved for ``count`` tokens."""
        return self.room if self.first > self.start and count <= self.room else count + slack

    def view(self, first: int, stop: int) -> Tensor:
        """``[b, h, stop - first, d]``."""
        assert self.data is not None and self.first <= first <= stop <= self.stop
        return self.data[:, :, first - self.first : stop - self.first]

    def _hold(self, x: Tensor, capacity: int) -> None:
        self.data = x.new_zeros(*x.shape[:2], capacity, x.shape[3])
        self.data[:, :, : x.shape[2]] = x

    def append(self, x: Tensor) -> None:
        if self.data is None:
            self.data = x.new_empty(*x.shape[:2], 0, x.shape[3])
        count = len(self) + x.shape[2]
        if count > self.data.shape[2]:
            self._hold(self.view(self.first, self.stop), self.capacity_for(count, max(1, count // _SLACK)))
        self.stop += x.shape[2]
        self.view(self.stop - x.shape[2], self.stop).copy_(x)

    def drop(self, first: int) -> None:
        """Free the slots before ``first``."""
        rest = self.view(first, self.stop)
        self.first = first
        # a new tensor, so that views that were read stay as they are
        self._hold(rest, self.capacity_for(rest.shape[2]))

    def replace(self, x: Tensor, first: int) -> None:
        """Hold ``x`` at slots ``first …`` instead."""
        self.first, self.stop = first, first + x.shape[2]
        self._hold(x, self.capacity_for(x.shape[2]))

    def select_rows(self, index: Tensor) -> None:
        if self.data is not None:
            self.data = self.data.index_select(0, index.to(self.data.device))


class _PackedStore(TokenStore):
    """What the stores of this file share: a packed part and a native tail. Slots are those of the native store."""

    def __init__(self, packing: Packing, residual: int, num_sink_tokens=None, num_recent_tokens=None):
        super().__init__(num_sink_tokens, num_recent_tokens)
        self.packing, self.residual = packing, residual
        self.tail = NativeTail(residual + packing.group_size)
        self.packed = PackedTokens(packing)

    @property
    def length(self) -> int:
        """Tokens per row: held, and in a window seen."""
        return self.tail.stop

    @property
    def is_empty(self) -> bool:
        return self.tail.data is None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(b, h, used slots, d)``."""
        batch, heads, _, head_dim = self.tail.shape
        return batch, heads, self.used_slots(self.length), head_dim

    @property
    def dtype(self) -> torch.dtype:
        assert self.tail.data is not None, "empty store"
        return self.tail.data.dtype

    def num_packed(self, length: int) -> int:
        """``P(length)``: slots packed when ``length`` tokens have settled."""
        past_sinks = length - self.num_sink_tokens - self.residual
        return max(0, past_sinks // self.packing.group_size) * self.packing.group_size

    def reserve(self, slots: int) -> None:
        raise ValueError("packed stores grow as tokens come: pass capacity to pod.make_cache instead")

    def append_ragged(self, x: Tensor, past: Tensor, counts: Tensor) -> None:
        raise ValueError("packed stores take rows that are alike: use a GroupedCache, which splits the batch")

    def select_rows(self, index: Tensor) -> None:
        self.tail.select_rows(index)
        self.packed.select_rows(index)

    def tensors(self) -> list[Tensor]:
        return self.packed.tensors() + ([] if self.tail.data is None else [self.tail.data])

    def _nbytes(self, packed: int, native: int) -> int:
        batch, heads, _, head_dim = self.shape
        token = head_dim * self.dtype.itemsize
        return int(batch * heads * (packed * self.packing.token_nbytes(head_dim) + native * token))


class QuantizedStore(_PackedStore):
    """Every token held, at slots 0, 1, …; see ``TokenStore`` for the methods.

    Slots below ``tail.first`` are packed and those from ``packed_stop`` on native, in every row and head. ``keep`` can
    leave one head with more packed tokens than another: between the two it depends on ``boundary`` ``[b, h]``, the
    first native slot of each row and head (None = ``tail.first`` for all).
    """

    def __init__(self, packing: Packing, residual: int):
        super().__init__(packing, residual)
        self.boundary: Tensor | None = None
        self.packed_stop = 0

    def append(self, x: Tensor, past: int) -> None:
        """``[b, h, m, d]`` behind the ``past`` tokens held."""
        assert past == self.length, "tokens are appended in order"
        self.tail.append(x)

    def read(self, length: int) -> Tensor:
        """``[b, h, length, d]``: a view while nothing is packed, else a copy."""
        if not self.packed_stop:
            return self.tail.view(0, length)
        out = self.tail.view(self.tail.first, self.tail.stop).new_empty(self.shape)
        self.packed.read(0, out[:, :, : self.packed_stop])
        if self.boundary is None:
            out[:, :, self.tail.first :] = self.tail.view(self.tail.first, self.tail.stop)
        else:
            native = self._is_native(self.tail.first, self.tail.stop)[..., None]
            mixed = out[:, :, self.tail.first :]
            mixed.copy_(torch.where(native, self.tail.view(self.tail.first, self.tail.stop), mixed))
        return out[:, :, :length]

    view = read

    @property
    def stored(self) -> Tensor:
        return self.read(self.length)

    def _is_native(self, first: int, stop: int) -> Tensor:
        """``[b, h, stop - first]``: whether these slots are native; only with a boundary."""
        assert self.boundary is not None
        return torch.arange(first, stop, device=self.boundary.device) >= self.boundary[..., None]

    def settle(self, length: int) -> None:
        """Pack what left the residual window of the ``length`` tokens held."""
        first, stop = self.tail.first, self.num_packed(length)
        if self.is_empty or stop <= first:
            return
        mask = None if self.boundary is None else self._is_native(first, stop)
        self.packed.write(self.tail.view(first, stop), first, mask)
        self.packed_stop = max(self.packed_stop, stop)
        if self.boundary is not None:
            self._set_boundary(self.boundary.clamp(min=stop))
        self.tail.drop(stop)

    def _set_boundary(self, boundary: Tensor) -> None:
        lowest, self.packed_stop = (int(x) for x in boundary.aminmax())
        self.boundary = None if lowest == self.packed_stop else boundary.to(torch.int32)

    def keep(self, index: Tensor, length: int) -> None:
        """Hold only the slots ``index`` ``[b, h, w]``, which must ascend; packed ones are copied, not packed again."""
        assert length == self.length
        if not self.packed_stop:
            self.tail.replace(take_slots(self.tail.view(0, length), index), 0)
            return
        boundary = self.tail.first if self.boundary is None else self.boundary[..., None]
        is_packed = index < boundary
        tail, old_first = self.tail.view(self.tail.first, length), self.tail.first
        self._set_boundary(is_packed.sum(-1))
        self.packed.keep(index[..., : self.packed_stop].clamp(max=self.packed.capacity - 1))
        first = self.packed_stop if self.boundary is None else int(self.boundary.min())
        self.tail.replace(take_slots(tail, (index[..., first:] - old_first).clamp(min=0)), first)

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Overwrite slots ``[b, h, c]`` with ``[b, h, c, d]``: packed ones are packed anew, alone."""
        boundary = self.tail.first if self.boundary is None else self.boundary[..., None]
        is_native = slots >= boundary
        if self.packed_stop:
            self.packed.overwrite(slots, x, ~is_native)
        assert self.tail.data is not None
        _put(self.tail.data, slots - self.tail.first, x, is_native)

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        if self.boundary is not None:
            self.boundary = self.boundary.index_select(0, index.to(self.boundary.device))

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.boundary is None else [self.boundary])

    def predicted_nbytes(self, length: int) -> int:
        """Bytes when ``length`` tokens have settled: ``P(length)`` of them packed (more where ``keep`` left more), room
        for ``residual + group_size`` native."""
        packed = self.num_packed(length)
        native = self.tail.room if max(packed, self.tail.first) else length
        return self._nbytes(max(packed, self.packed_stop), native)


class QuantizedWindow(_PackedStore):
    """First tokens, then a ring of recent ones: sinks and the newest tokens native, the rest of the ring packed.

    ``P(n)`` counts from the last sink. Packed tokens have a ring of their own of ``num_recent_tokens - residual`` slots,
    since the newest ``residual`` are never in it; ``read`` puts everything to the slots of the native store.
    """

    def __init__(self, packing: Packing, residual: int, num_sink_tokens: int, num_recent_tokens: int):
        super().__init__(packing, residual, num_sink_tokens, num_recent_tokens)
        assert num_recent_tokens > self.tail.room and not packing.per_channel
        self.ring = num_recent_tokens - residual  # slots of the packed ring
        self.packed = PackedTokens(packing, limit=self.ring)
        self.tail = NativeTail(self.tail.room, start=num_sink_tokens)
        self.sinks: Tensor | None = None  # [b, h, <= num_sink_tokens, d]

    @property
    def length(self) -> int:
        sinks = 0 if self.sinks is None else self.sinks.shape[2]
        return sinks + self.tail.stop - self.num_sink_tokens

    def append(self, x: Tensor, past: int) -> None:
        """``[b, h, m, d]`` behind ``past`` tokens per row."""
        assert past == self.length, "tokens are appended in order"
        sinks = x[:, :, : max(0, self.num_sink_tokens - past)]
        if self.sinks is None or sinks.shape[2]:
            self.sinks = sinks.clone() if self.sinks is None else torch.cat((self.sinks, sinks), dim=2)
        x = x[:, :, sinks.shape[2] :]
        expired = self.tail.stop + x.shape[2] - self.num_recent_tokens
        if expired >= self.tail.stop:
            self.tail.replace(x[:, :, expired - self.tail.stop :], expired)
            return
        if expired - self.tail.first > self.num_recent_tokens // _SLACK:
            self.tail.drop(expired)
        self.tail.append(x)

    def _oldest(self) -> int:
        """Position of the oldest token in the ring."""
        return max(self.num_sink_tokens, self.length - self.num_recent_tokens)

    def _runs(self, first: int, stop: int, *sizes: int) -> Iterator[tuple[slice, int]]:
        """``[first, stop)`` cut where a ring of any of these sizes wraps: (positions, place behind the last sink)."""
        while first < stop:
            behind = first - self.num_sink_tokens
            end = min([stop, *(first + size - behind % size for size in sizes)])
            yield slice(first, end), behind
            first = end

    def read(self, length: int) -> Tensor:
        """``[b, h, used slots, d]`` after ``length`` tokens per row: a copy, in the slots of the native store."""
        assert length == self.length and self.sinks is not None
        out = self.sinks.new_empty(self.shape)
        out[:, :, : self.sinks.shape[2]] = self.sinks
        oldest, recent = self._oldest(), self.num_recent_tokens
        for positions, behind in self._runs(oldest, self.tail.first, self.ring, recent):
            self.packed.read(behind % self.ring, self._slots(out, positions, behind))
        for positions, behind in self._runs(max(oldest, self.tail.first), self.tail.stop, recent):
            self._slots(out, positions, behind).copy_(self.tail.view(positions.start, positions.stop))
        return out

    def _slots(self, out: Tensor, positions: slice, behind: int) -> Tensor:
        start = self.num_sink_tokens + behind % self.num_recent_tokens
        return out[:, :, start : start + positions.stop - positions.start]

    def settle(self, length: int) -> None:
        """Pack what left the residual window."""
        stop = self.num_sink_tokens + self.num_packed(length)
        if self.is_empty or stop <= self.tail.first:
            return
        for positions, behind in self._runs(max(self._oldest(), self.tail.first), stop, self.ring):
            self.packed.write(self.tail.view(positions.start, positions.stop), behind % self.ring)
        self.tail.drop(stop)

    def keep(self, index: Tensor, length: int) -> None:
        raise NotImplementedError(
            "a window holds the first and the last tokens: use Codec.tokens to choose others"
        )

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Overwrite slots ``[b, h, c]`` with ``[b, h, c, d]``: packed ones are packed anew, alone."""
        assert self.sinks is not None and self.tail.data is not None
        newest = self.length - 1
        positions = torch.where(
            slots < self.num_sink_tokens, slots, newest - (newest - slots) % self.num_recent_tokens
        )
        is_sink, is_native = slots < self.num_sink_tokens, positions >= self.tail.first
        _put(self.sinks, positions, x, is_sink)
        _put(self.tail.data, positions - self.tail.first, x, is_native)
        if self.tail.first > self.num_sink_tokens:
            self.packed.overwrite((positions - self.num_sink_tokens) % self.ring, x, ~is_sink & ~is_native)

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        if self.sinks is not None:
            self.sinks = self.sinks.index_select(0, index.to(self.sinks.device))

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.sinks is None else [self.sinks])

    def predicted_nbytes(self, length: int) -> int:
        """Bytes when ``length`` tokens have settled."""
        packed = min(self.num_packed(length), self.ring)
        sinks = min(length, self.num_sink_tokens)
        return self._nbytes(packed, sinks + (self.tail.room if packed else length - sinks))


def _put(target: Tensor, slots: Tensor, x: Tensor, mask: Tensor) -> None:
    """Write ``[b, h, c, d]`` into slots ``[b, h, c]`` where ``mask`` is True."""
    rows, heads, columns = mask.nonzero(as_tuple=True)
    target[rows, heads, slots[rows, heads, columns]] = x[rows, heads, columns].to(target.dtype)


@dataclass(frozen=True)
class QuantizedCodec:
    """Makes stores of ``bits`` bits per number; see the top of this file.

    Attributes:
        bits: 4 or 8.
        group_size: numbers that share a scale, and tokens packed at a time.
        residual: newest tokens that stay native.
    """

    bits: int
    group_size: int
    residual: int

    def tokens(self, part: str, evicts: bool = False) -> Store:
        return QuantizedStore(self._packing(per_channel=part == "keys" and not evicts), self.residual)

    def window(self, part: str, num_sink_tokens: int, num_recent_tokens: int) -> Store:
        """Native when the ring is not larger than what a packed one holds natively."""
        if num_recent_tokens <= self.residual + self.group_size:
            return TokenStore(num_sink_tokens, num_recent_tokens)
        return QuantizedWindow(
            self._packing(per_channel=False), self.residual, num_sink_tokens, num_recent_tokens
        )

    def _packing(self, per_channel: bool) -> Packing:
        return Packing(bits=self.bits, group_size=self.group_size, per_channel=per_channel)


def make_codec(name: str, bits: int, config: PodConfig, group_size: int, residual: int) -> Codec:
    """The codec of a model.

    Raises:
        ValueError: sizes that do not fit each other or the model's ``head_dim``.
    """
    head_dim = config.head_dim
    fitting = [size for size in range(2, head_dim + 1) if head_dim % size == 0]
    if group_size < 2:
        raise ValueError(f"{name}: group_size = {group_size} must be at least 2; 32 and 64 are usual")
    if group_size < head_dim and head_dim % group_size:
        raise ValueError(
            f"{name}: group_size = {group_size} does not divide head_dim = {head_dim}; it can be "
            f"{', '.join(map(str, fitting))}"
        )
    if residual < 0:
        raise ValueError(f"{name}: residual = {residual} must be at least 0 tokens")
    if bits == 4 and head_dim % 2:
        raise ValueError(f"{name}: head_dim = {head_dim} is odd, and two codes share a byte; use int8")
    return QuantizedCodec(bits, group_size, residual)
