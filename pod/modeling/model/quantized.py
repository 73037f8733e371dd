"""Buffers whose old tokens are packed to 2, 4 or 8 bits. The newest stay *native*: in the model's dtype.

``packed.py`` has the format and says when tokens are packed. *Pending* and *at rest*: see ``kv_buffer.py``.

Keys are grouped per channel over ``group_size`` consecutive tokens, because keys have outlier channels.
Values, and keys of buffers that evict single tokens, are grouped per token over channels, because tokens of a
per-channel group can only leave together. In a window, a group leaves when all of its tokens have left.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .attend import Segments
from .kv_buffer import KVBuffer, replaced, take_slots
from .packed import Packed, Packing, tiles
from .packed_bytes import packed_slots
from .window_buffer import WindowBuffer

_SLACK = 128  # tensors grow by 1/128 of their length


class Codes:
    """Packed tokens at slots 0, 1, …, in tensors that grow.

    Args:
        limit: the most slots that there may be. None = any number.
        capacity: slots allocated when the first token is written.

    Attributes:
        tensors: codes, zeros and scales, as ``Packing.pack`` returns them. Empty before the first token.
        version: how often the tensors were replaced.
    """

    version = 0
    tensors: tuple[Tensor, ...] = replaced()

    def __init__(self, packing: Packing, limit: int | None = None, capacity: int = 0):
        self.packing, self.limit, self.capacity = packing, limit, capacity
        self.tensors = ()

    @property
    def slots(self) -> int:
        """How many slots are allocated, used or not."""
        return self.tensors[0].shape[2] if self.tensors else 0

    def _at(self, start: int, stop: int) -> list[Tensor]:
        """Codes, zeros and scales of slots ``start … stop - 1``, as views."""
        shared = self.packing.shared
        entries = slice(start // shared, stop // shared)
        return [x[:, :, slice(start, stop) if i == 0 else entries] for i, x in enumerate(self.tensors)]

    def reserve(self, like: Tensor, slots: int) -> None:
        """Allocate at least ``slots`` slots for tokens ``[b, h, …, d]``, and copy those held.

        Up to ``capacity``, all of it is allocated. Beyond it, 1/128 more than ``slots``, at most ``limit``.
        """
        if slots <= self.slots:
            return
        group = self.packing.group_size
        reserved = -(-self.capacity // group) * group
        wanted = reserved if slots <= reserved else slots + slots // _SLACK // group * group
        wanted = wanted if self.limit is None else min(wanted, self.limit)
        old = self._at(0, self.slots)
        self.tensors = self.packing.allocate(like, wanted)
        if not old:
            return
        for new, held in zip(self._at(0, old[0].shape[2]), old, strict=True):
            new.copy_(held)

    def write(self, x: Tensor, start: int, mask: Tensor | None = None) -> None:
        """Pack ``[b, h, m, d]`` into the slots from ``start`` on, where ``mask`` ``[b, h, m]`` is True."""
        self.reserve(x, start + x.shape[2])
        for first, last in tiles(x, 0, x.shape[2], self.packing.group_size):
            packed = self.packing.pack(x[:, :, first:last])
            for target, new in zip(self._at(start + first, start + last), packed, strict=True):
                target.copy_(new if mask is None else torch.where(mask[:, :, first:last, None], new, target))

    def read(self, start: int, out: Tensor) -> None:
        """Unpack the slots from ``start`` on into ``out`` ``[b, h, m, d]``."""
        self.packing.unpack_span(self.tensors, start, start + out.shape[2], out)

    def keep(self, index: Tensor) -> None:
        """Keep only the slots ``index`` ``[b, h, w]`` and free all others. Codes are not quantized again.

        It is for groups over channels only: tokens of a group over tokens cannot be separated.
        """
        assert not self.packing.per_channel, "tokens of a group share its scale"
        held = self.tensors if index.shape[2] else ()
        self.tensors = tuple(x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in held)

    def overwrite(self, slots: Tensor, x: Tensor, mask: Tensor) -> None:
        """Pack ``[b, h, c, d]`` into slots ``[b, h, c]`` where ``mask`` is True (groups over channels)."""
        assert not self.packing.per_channel, "tokens of a group share its scale"
        if not self.tensors:
            return
        for tensor, new in zip(self.tensors, self.packing.pack(x), strict=True):
            _put(tensor, slots, new, mask)


class Newest:
    """The native tokens of a buffer, at positions ``first … stop - 1``: pending, or at rest in a ring.

    Pending tokens lie in a tensor that grows. At rest they are few, in a ring that keeps its address.

    Args:
        room: slots of the ring. Position ``p`` is at slot ``p mod room``.
        start: position of the first token that will be appended.

    Attributes:
        ring: ``[b, h, room, d]``. None = the tokens were never at rest.
        pending: ``[b, h, slots, d]``, the tokens in order from slot 0 on. None = at rest. A slot that was
            read is never written again, so views that were given out stay valid.
        version: how often one of the tensors was replaced.
    """

    version = 0
    ring: Tensor | None = replaced()
    pending: Tensor | None = replaced()

    def __init__(self, room: int, start: int = 0):
        self.room = room
        self.first = self.stop = start
        self.ring = None
        self.pending = None

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def is_empty(self) -> bool:
        return self.ring is None and self.pending is None

    @property
    def data(self) -> Tensor:
        """The tensor ``[b, h, slots, d]`` that holds the tokens now: ``pending`` or the ring."""
        if self.pending is not None:
            return self.pending[:, :, : len(self)]
        assert self.ring is not None, "empty buffer"
        return self.ring

    @property
    def start(self) -> int:
        """Position of the token at slot 0 of ``data``: position ``p`` is at ``(p - start) mod slots``."""
        return 0 if self.pending is None else self.first

    def view(self, first: int, stop: int) -> Tensor:
        """Tokens ``first … stop - 1``, ``[b, h, stop - first, d]``: a view if pending, else a copy."""
        assert self.first <= first <= stop <= self.stop
        if self.pending is not None:
            return self.pending[:, :, first - self.first : stop - self.first]
        return self.data[:, :, torch.arange(first, stop, device=self.data.device) % self.room]

    def append(self, x: Tensor) -> None:
        """Append ``[b, h, m, d]``: a single token to the ring if a slot is free there, else as pending."""
        stop = self.stop + x.shape[2]
        held = len(self)
        if self.pending is None and self.ring is not None and x.shape[2] == 1 and held < self.room:
            self.ring[:, :, self.stop % self.room] = x[:, :, 0]
        else:
            self._make_room(x, stop - self.first)[:, :, held : held + x.shape[2]] = x
        self.stop = stop

    def _make_room(self, x: Tensor, slots: int) -> Tensor:
        """Make the tokens pending, in ``slots`` slots (1/128 more if they grow), and return ``pending``."""
        if self.pending is None or self.pending.shape[2] < slots:
            slack = slots // _SLACK if self.tensors() else 0
            grown = x.new_zeros(*x.shape[:2], slots + slack, x.shape[3])
            if self.tensors():
                grown[:, :, : len(self)] = self.view(self.first, self.stop)
            self.pending = grown
        return self.pending

    def replace(self, x: Tensor, first: int) -> None:
        """Replace all tokens by ``x`` ``[b, h, m, d]``, pending, the first of them at position ``first``."""
        self.pending, self.first, self.stop = x, first, first + x.shape[2]

    def crop(self, stop: int) -> None:
        """Forget the positions from ``stop`` on."""
        assert stop >= self.first
        self.stop = min(self.stop, stop)

    def rest(self, first: int) -> None:
        """Bring the tokens to rest: free those before position ``first``, move the others into the ring."""
        assert self.stop - first <= self.room
        if self.pending is not None:
            rest = self.view(first, self.stop)
            if self.ring is None:
                self.ring = rest.new_zeros(*rest.shape[:2], self.room, rest.shape[3])
            self.ring[:, :, torch.arange(first, self.stop, device=rest.device) % self.room] = rest
            self.pending = None
        self.first = first

    def write(self, positions: Tensor, x: Tensor, mask: Tensor) -> None:
        """Overwrite positions ``[b, h, c]`` with ``[b, h, c, d]`` where ``mask`` is True; see ``_put``."""
        _put(self.data, (positions - self.start) % max(1, self.data.shape[2]), x, mask)

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.ring, self.pending) if x is not None]


class _PackedBuffer(KVBuffer):
    """Base of the buffers of this file: packed tokens in ``codes``, native ones in ``newest``.

    A token has the same slot as in a ``KVBuffer`` with the same arguments. At least the ``residual`` newest
    tokens stay native.
    """

    def _hold(self, codes: Codes, residual: int) -> None:
        """Begin with no tokens: ``codes`` for older ones, a ring for the newest ones."""
        self.codes, self.packing, self.residual = codes, codes.packing, residual
        self.newest = Newest(residual + self.packing.group_size, start=self.num_sink_tokens)

    @property
    def length(self) -> int:
        """Tokens per row that are held. A window counts all tokens that were appended to it."""
        return self.newest.stop

    @property
    def is_empty(self) -> bool:
        return self.newest.is_empty

    @property
    def shape(self) -> tuple[int, ...]:
        """``(b, h, used slots, d)``."""
        batch, heads, _, head_dim = self.newest.data.shape
        return batch, heads, self.used_slots(self.length), head_dim

    @property
    def dtype(self) -> torch.dtype:
        return self.newest.data.dtype

    @property
    def num_croppable(self) -> int:
        """See ``KVBuffer``. Only native tokens can be taken back."""
        return len(self.newest)

    @property
    def num_ahead(self) -> int:
        """See ``KVBuffer``. A group of tokens is packed as soon as the ring of native tokens is full."""
        return self.newest.room - len(self.newest) - 1

    def crop(self, length: int) -> None:
        self.newest.crop(length)

    def view(self, length: int) -> Tensor | Packed:
        return self.stored

    def num_packed(self, length: int) -> int:
        """``P(length)`` of ``packed.py``: tokens behind the sinks that are packed after ``flush(length)``."""
        past_sinks = length - self.num_sink_tokens - self.residual
        return max(0, past_sinks // self.packing.group_size) * self.packing.group_size

    def append_ragged(self, x: Tensor, segments: Segments) -> None:
        raise ValueError(
            "packed buffers take rows that are alike, here rows of one length: "
            "leave capacity out, or pad no row"
        )

    def tensors(self) -> list[Tensor]:
        return [*self.codes.tensors, *self.newest.tensors()]

    def versioned(self) -> tuple[Any, ...]:
        return self, self.codes, self.newest


class PackedTokens(_PackedBuffer):
    """A buffer of every token, at slots 0, 1, …. See ``KVBuffer`` for the methods.

    The first tokens are packed, the others native. ``keep`` can leave one head with more packed tokens than
    another. Slots below ``newest.first`` are packed in every head, and slots from ``packed_stop`` on are
    native in every head. A slot between these two is packed in some heads and native in others.

    Args:
        capacity: number of tokens whose codes are allocated from the start, at a fixed address. 0 = the
            tensors of codes grow as tokens come.

    Attributes:
        packed_lengths: how many tokens are packed, int32 ``[b]``, or ``[b, h]`` while heads differ. None = no
            token was ever packed, and no capacity was given.
        packed_stop: the largest of ``packed_lengths``, or a number above it.
    """

    packed_lengths: Tensor | None = replaced()

    def __init__(self, packing: Packing, residual: int, capacity: int = 0):
        super().__init__()
        self._hold(Codes(packing, capacity=capacity), residual)
        self.packed_lengths = None
        self.packed_stop = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """``(b, h, slots, d)``. The slots are those in use or, with a capacity, those allocated."""
        batch, heads, used, head_dim = super().shape
        return batch, heads, self.codes.slots if self.is_static else used, head_dim

    @property
    def is_static(self) -> bool:
        """Whether a capacity was given, so that tokens keep their address, as decode kernels need."""
        return self.codes.capacity > 0

    @property
    def is_at_rest(self) -> bool:
        """See ``KVBuffer``. Without a capacity, tokens stay pending until the first of them are packed."""
        return not self.is_empty and self.newest.pending is None

    @property
    def stored(self) -> Tensor | Packed:
        """What attention reads, valid until the buffer changes: a native tensor while nothing is packed."""
        if self.packed_lengths is None:
            return self.newest.view(0, self.length)
        codes, zero, scale = self.codes.tensors
        size, bounds = self.packing.group_size, (self.newest.first, self.packed_stop)
        rest = size, self.packing.per_channel, bounds, self.newest.start
        return Packed(codes, zero, scale, self.newest.data, self.packed_lengths, *rest)

    @property
    def target(self) -> Tensor:
        """The ring ``[b, h, R, d]`` of native tokens, to which a decode engine writes each decoded token."""
        assert self.is_at_rest, "a prompt is running"
        return self.newest.data

    def reserve(self, slots: int) -> None:
        """Raise the capacity to ``slots`` tokens, and allocate their codes if there are codes already."""
        self.codes.capacity = max(self.codes.capacity, slots)
        if self.codes.tensors:
            self.codes.reserve(self.newest.data, self.codes.capacity)

    def append(self, x: Tensor, past: int) -> None:
        assert past == self.length, "tokens are appended in order"
        self.newest.append(x)
        if self.is_static:
            self.reserve(self.length)
            self._start_packing(x)

    def _start_packing(self, x: Tensor) -> None:
        """Allocate codes and ``packed_lengths`` for tokens ``[b, h, …, d]``, if there are none yet."""
        self.codes.reserve(x, max(1, self.codes.capacity))
        if self.packed_lengths is None:
            self.packed_lengths = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)

    def read(self, length: int) -> Tensor:
        """The first ``length`` tokens, ``[b, h, length, d]``: a view while nothing is packed, else a copy."""
        stored = self.stored
        return stored.span(0, length) if isinstance(stored, Packed) else stored[:, :, :length]

    def _is_native(self, first: int, stop: int) -> Tensor | None:
        """Whether slots ``first … stop - 1`` are native, ``[b, h, stop - first]``. None where heads agree."""
        if self.packed_lengths is None or self.packed_lengths.ndim == 1:
            return None
        return torch.arange(first, stop, device=self.packed_lengths.device) >= self.packed_lengths[..., None]

    def flush(self, length: int) -> None:
        """Pack the oldest native tokens, so that ``P(length)`` tokens are packed; see ``packed.py``."""
        if self.is_empty:
            return
        self.newest.stop = length  # a decode engine writes into the ring without a call of append
        first, stop = self.newest.first, self.num_packed(length)
        if stop <= first and self.newest.pending is None:
            return  # most decoded tokens end here
        if stop > first:
            new = self.newest.view(first, stop)
            self.codes.write(new, first, self._is_native(first, stop))
            self._start_packing(new)
            self.packed_stop = max(self.packed_stop, stop)
            self._set_lengths(stop)
        if self.packed_lengths is not None:
            self.newest.rest(max(first, stop))

    def _set_lengths(self, least: int) -> None:
        """Record that at least ``least`` tokens of every head are packed now."""
        assert self.packed_lengths is not None
        self.packed_lengths.clamp_(min=least)
        if self.packed_stop == least and self.packed_lengths.ndim == 2:
            self.packed_lengths = self.packed_lengths[:, 0].clone()

    def keep(self, index: Tensor, length: int) -> None:
        """See ``KVBuffer.keep``. Codes are copied, not quantized again."""
        assert length == self.length and not self.is_static, "capacity is for caches that drop no token"
        newest, old_first = self.newest.view(self.newest.first, length), self.newest.first
        first = 0
        if self.packed_lengths is not None:
            lengths = self.packed_lengths.view(index.shape[0], -1, 1)
            counts = (index < lengths).sum(-1, dtype=torch.int32)
            first, self.packed_stop = self._bounds_after(counts, length - index.shape[2], index.shape[2])
            self.packed_lengths = counts if self.packed_stop else None
            self.codes.keep(index[..., : self.packed_stop].clamp(max=self.codes.slots - 1))
            self.newest.ring = None
            if self.packed_lengths is not None:
                self._set_lengths(first)
        slots = (index[..., first:] - old_first).clamp(min=0)
        self.newest.replace(take_slots(newest, slots) if slots.shape[2] else newest[:, :, :0].clone(), first)

    def _bounds_after(self, counts: Tensor, dropped: int, held: int) -> tuple[int, int]:
        """A lower and an upper bound on the packed tokens of a head, after ``keep`` dropped so many of each.

        If one was dropped, as after a decoded token, the bounds follow from the old ones and the ``held``
        tokens, and the host need not wait for the device. Otherwise the host reads ``counts`` ``[b, h]``.
        """
        if dropped == 1:
            return max(0, self.newest.first - 1), min(self.packed_stop, held)
        least, most = torch.stack(counts.aminmax()).tolist()
        return least, most

    def keep_places(self, places: Tensor, length: int) -> None:
        self.keep(places % length, length)

    def write(self, slots: Tensor, x: Tensor) -> None:
        """See ``KVBuffer.write``. A token written to a packed slot is packed, one to a native slot is not."""
        assert not self.is_static, "capacity is for caches that merge no token"
        lengths = 0 if self.packed_lengths is None else self.packed_lengths.view(slots.shape[0], -1, 1)
        is_native = slots >= lengths
        self.codes.overwrite(slots, x, ~is_native)
        self.newest.write(slots, x, is_native)

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.packed_lengths is None else [self.packed_lengths])

    def check_integrity(self) -> None:
        first, stop, most, room = self.newest.first, self.newest.stop, self.packed_stop, self.codes.slots
        assert first <= most <= max(stop, first), f"{first}, {most}, {stop} are packed, tokens"
        if self.packed_lengths is not None:
            least = int(self.packed_lengths.min())
            largest = int(self.packed_lengths.max())
            assert first <= least <= largest <= most, f"{least, largest} tokens are packed, not {first, most}"
            assert room >= most, f"room for {room} of {most} packed"
        if self.newest.tensors():
            slots = self.newest.data.shape[2]
            assert slots >= stop - first, f"{slots} slots hold {stop - first} native tokens"


class QuantizedWindow(_PackedBuffer, WindowBuffer):
    """A window, that is sinks and then a ring of recent tokens, of which the older recent ones are packed.

    Sinks and the newest tokens are native. ``P(n)`` counts tokens from the last sink on. Packed tokens have a
    ring of their own, of whole groups (``packed_slots``). A group stays until all of its tokens have left the
    window, and ``read`` leaves out those that have. It puts every token into the slot that it has in a native
    ``KVBuffer``.
    """

    sinks: Tensor | None = replaced()
    """The first tokens, ``[b, h, <= num_sink_tokens, d]``. None = nothing was ever written."""

    def __init__(self, packing: Packing, residual: int, num_sink_tokens: int, num_recent_tokens: int):
        super().__init__(num_sink_tokens, num_recent_tokens)
        self.ring = packed_slots(num_recent_tokens, residual, packing.group_size)
        self._hold(Codes(packing, limit=self.ring), residual)
        assert num_recent_tokens > self.newest.room
        self.sinks = None

    @property
    def length(self) -> int:
        sinks = 0 if self.sinks is None else self.sinks.shape[2]
        return sinks + self.newest.stop - self.num_sink_tokens

    def append(self, x: Tensor, past: int) -> None:
        assert past == self.length, "tokens are appended in order"
        sinks = x[:, :, : max(0, self.num_sink_tokens - past)]
        if self.sinks is None or sinks.shape[2]:
            self.sinks = sinks.clone() if self.sinks is None else torch.cat((self.sinks, sinks), dim=2)
        x = x[:, :, sinks.shape[2] :]
        self.newest.append(x)
        newest, expired = self.newest, self._first_of_group(self.newest.stop - self.num_recent_tokens)
        if expired - newest.first > self.num_recent_tokens // _SLACK:
            newest.replace(newest.view(expired, newest.stop).clone(), expired)

    @property
    def num_croppable(self) -> int:
        """See ``KVBuffer``. Only native tokens can be taken back; sinks only while nothing is packed."""
        return self.length if self.newest.first == self.num_sink_tokens else len(self.newest)

    def crop(self, length: int) -> None:
        self.newest.crop(max(length, self.num_sink_tokens))
        if self.sinks is not None:
            self.sinks = self.sinks[:, :, :length]

    def _oldest(self) -> int:
        """Position of the oldest recent token that the window still holds."""
        return max(self.num_sink_tokens, self.length - self.num_recent_tokens)

    def _first_of_group(self, position: int) -> int:
        """Position of the first token of the group that a position behind the sinks belongs to."""
        return position - (position - self.num_sink_tokens) % self.packing.group_size

    def _runs(self, first: int, stop: int, *sizes: int) -> Iterator[tuple[slice, int]]:
        """Cut the positions ``[first, stop)`` wherever a ring of one of these sizes wraps.

        Each run is given as its positions and the distance of the first one from the last sink.
        """
        while first < stop:
            behind = first - self.num_sink_tokens
            end = min([stop, *(first + size - behind % size for size in sizes)])
            yield slice(first, end), behind
            first = end

    def read(self, length: int) -> Tensor:
        """See ``KVBuffer.read``. It is always a copy, and ``length`` must be that of every row."""
        assert length == self.length and self.sinks is not None
        out = self.sinks.new_empty(self.shape)
        out[:, :, : self.sinks.shape[2]] = self.sinks
        oldest, recent = self._oldest(), self.num_recent_tokens
        for positions, behind in self._runs(oldest, self.newest.first, self.ring, recent):
            self.codes.read(behind % self.ring, self._slots(out, positions, behind))
        for positions, behind in self._runs(max(oldest, self.newest.first), self.newest.stop, recent):
            self._slots(out, positions, behind).copy_(self.newest.view(positions.start, positions.stop))
        return out

    def _slots(self, out: Tensor, positions: slice, behind: int) -> Tensor:
        """The slots of ``out`` for a run of ``_runs``, as a view."""
        start = self.num_sink_tokens + behind % self.num_recent_tokens
        return out[:, :, start : start + positions.stop - positions.start]

    def flush(self, length: int) -> None:
        """Pack the oldest native tokens, so that ``P(length)`` tokens were packed; see ``packed.py``."""
        stop = self.num_sink_tokens + self.num_packed(length)
        if self.is_empty or stop <= self.newest.first:
            return
        first = max(self._first_of_group(self._oldest()), self.newest.first)
        for positions, behind in self._runs(first, stop, self.ring):
            self.codes.write(self.newest.view(positions.start, positions.stop), behind % self.ring)
        self.newest.rest(stop)

    def tensors(self) -> list[Tensor]:
        return super().tensors() + ([] if self.sinks is None else [self.sinks])


def _put(target: Tensor, slots: Tensor, x: Tensor, mask: Tensor) -> None:
    """Write tokens ``x`` ``[b, h, c, d]`` into slots ``[b, h, c]`` of ``target``, where ``mask`` is True.

    If a slot occurs twice in a head, its tokens must be equal. The host does not wait to learn where the mask
    is True, so every entry writes something. An entry whose mask is False repeats one of its head whose mask
    is True. In a head without any, it writes the token that is in its slot already.
    """
    if not target.shape[2]:
        return
    if slots.shape[2] > 1:
        columns = torch.arange(slots.shape[2], device=slots.device)
        columns = torch.where(mask, columns, mask.byte().argmax(2, keepdim=True))
        slots = slots.gather(2, columns)
        mask = mask.gather(2, columns)
        x = x.gather(2, columns[..., None].expand_as(x))
    places = slots.clamp(max=target.shape[2] - 1)[..., None].expand(-1, -1, -1, target.shape[3])
    target.scatter_(2, places, torch.where(mask[..., None], x.to(target.dtype), target.gather(2, places)))
