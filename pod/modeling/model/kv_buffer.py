"""Growing tensors that hold keys or values of a group of heads, token ``p`` of a row at a fixed slot.

A layer never makes a ``KVBuffer`` itself. It asks its ``KVQuantizer`` for one, and so works with packed keys
and values as well.

No code frees the tokens that fall out of a window. A window has a fixed number of slots, and
``KVBuffer.append`` writes a new token over the one that has just left it.
"""

import sys
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attend import Segments, Source, take_heads
from .packed import Stored

# a buffer grows by 1/128 of its length: that is under 1 % of the bytes, and appending stays cheap
_SLACK = 128


def take_slots(x: Tensor, slots: Tensor) -> Tensor:
    """A copy of the slots ``[B, h, w]`` of ``[B, h, n, d]``.

    Whole tokens are copied at a time, which on CPU is ten times as fast as ``gather``.
    """
    batch, heads, n, head_dim = x.shape
    if x.stride()[2:] != (head_dim, 1) or x.stride(0) != heads * x.stride(1) or x.stride(1) % head_dim:
        x = x.contiguous()
    row, head = x.stride(0) // head_dim, x.stride(1) // head_dim
    tokens = x.as_strided(((batch - 1) * row + (heads - 1) * head + n, head_dim), (head_dim, 1))
    return tokens.index_select(0, places_of(slots, head).flatten()).view(*slots.shape, head_dim)


def places_of(slots: Tensor, room: int) -> Tensor:
    """The slots ``[B, h, w]`` of ``[B, h, room, …]`` as numbers of its tokens, counted through all heads."""
    heads = numbers(slots.shape[0] * slots.shape[1], slots.device)
    return torch.add(slots, heads.view(*slots.shape[:2], 1), alpha=room)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def numbers(count: int, device: torch.device) -> Tensor:
    """``0 … count-1``. It must not be written to."""
    return torch.arange(count, device=device)


def first_and_last(first: int, last: int, length: int, device: torch.device) -> Tensor:
    """The numbers of the first and the last so many of ``length`` tokens, int64 ``[first + last]``."""
    begin = torch.arange(first, device=device)
    end = torch.arange(length - last, length, device=device)
    return torch.cat((begin, end))


def take_rows_of(holder: Any, index: Tensor) -> None:
    """Replace every tensor ``[B, …]`` of ``holder`` by its rows ``index``.

    The tensors are those in its attributes, in tuples there, and in objects there.
    """
    for name, value in list(vars(holder).items()):
        if isinstance(value, Tensor):
            setattr(holder, name, value.index_select(0, index.to(value.device)))
        elif isinstance(value, tuple):
            setattr(holder, name, tuple(x.index_select(0, index.to(x.device)) for x in value))
        elif hasattr(value, "__dict__"):
            take_rows_of(value, index)


class _Replaced:
    """An attribute that adds 1 to its holder's ``version`` whenever it is assigned.

    It is read like any other attribute.
    """

    def __set_name__(self, owner: type, name: str):
        self.name = name

    def __set__(self, holder: Any, value: Any) -> None:
        vars(holder)[self.name] = value
        holder.version += 1


def replaced() -> Any:
    """For an attribute that is a tensor which the decode engine knows by its address, or has such tensors.

    A new tensor has a new address, and the engine learns of it from the holder's ``version``. Writing into a
    tensor leaves it where it is, and the version too. The class, or one above it, has ``version = 0``.
    """
    return _Replaced()


class KVBuffer:
    """Keys or values ``[B, h, slots, d]``, in full or of a window.

    In full, slot = position. A window is sinks, then a ring of recent tokens. The methods are what a layer
    may do with a buffer, whatever the form in which a quantizer holds it. ``past`` and ``length`` are tokens
    per row, equal in all rows. Only ``append_ragged`` takes rows that differ.

    Args:
        num_sink_tokens, num_recent_tokens: None stores every token. Otherwise slots ``0 … n_s-1`` hold the
            first tokens and slot ``n_s + (p - n_s) mod n_r`` holds token ``p``: older tokens are overwritten.

    Attributes:
        data: ``[B, h, slots reserved, d]``. Use ``read`` for the slots in use. None = nothing was ever
            written.
        is_tight: whether ``keep`` follows every token. It would free room for later tokens at once, so none
            is reserved.
        version: how often a tensor of this object was replaced.
    """

    version = 0
    data: Tensor = replaced()
    num_croppable = sys.maxsize
    """How many of the last tokens ``crop`` can forget, as far as their form goes.

    What a ring overwrites, its layer knows.
    """
    num_ahead = sys.maxsize
    """How many tokens can come before others take another form."""

    def __init__(self, num_sink_tokens: int | None = None, num_recent_tokens: int | None = None):
        self.is_tight = False
        self.has_window = num_recent_tokens is not None
        self.num_sink_tokens = num_sink_tokens or 0
        self.num_recent_tokens = num_recent_tokens or 0
        self._reserved = 0
        self.data = None  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def limit(self) -> int:
        """The number of slots of a window. Without a window, more than any sequence has."""
        return self.num_sink_tokens + self.num_recent_tokens if self.has_window else sys.maxsize

    @property
    def is_empty(self) -> bool:
        return self.data is None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, slots reserved, d)``."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def stored(self) -> Stored:
        """What decoding reads: ``[B, h, slots reserved, d]``."""
        return self.data

    @property
    def target(self) -> Tensor:
        """``[B, h, slots, d]``, to which an engine writes a decoded token."""
        return self.data

    @property
    def is_at_rest(self) -> bool:
        """Whether there are tokens, and no running prompt has tokens that will take another form."""
        return not self.is_empty

    def used_slots(self, length: int) -> int:
        """Slots in use after ``length`` tokens."""
        return min(length, self.limit)

    def runs(self, start: int, stop: int, length: int) -> list[tuple[int, int, int]]:
        """Where tokens ``start … stop-1`` of ``length`` are.

        Returns:
            ``(position, slot, tokens)`` of each run of neighbours that are held.
        """
        if length <= self.limit:
            found = [(start, start, stop - start)]
        else:
            n_s, n_r = self.num_sink_tokens, self.num_recent_tokens
            first, wrap = max(start, n_s, length - n_r), stop - (stop - n_s) % n_r
            recent = ((first, min(wrap, stop)), (max(first, wrap), stop))
            found = [(start, start, min(stop, n_s) - start)]
            found += [(begin, n_s + (begin - n_s) % n_r, end - begin) for begin, end in recent]
        return [run for run in found if run[2] > 0]

    def reserve(self, slots: int) -> None:
        """Hold room for ``slots`` tokens, so that the tensors stay where they are while it suffices.

        A window holds room for all that it can hold. The room is made at once, or when the first token comes.
        """
        self._reserved = self.limit if self.has_window else slots
        if not self.is_empty:
            self._grow(self.data, self._reserved)

    def _grow(self, like: Tensor, slots: int) -> Tensor:
        if self.is_empty:
            self.data = like.new_empty(like.shape[0], like.shape[1], 0, like.shape[3])
        if self.data.shape[2] < slots:
            slack = 0 if self.is_tight or slots <= self._reserved else max(1, slots // _SLACK)
            wanted = max(min(slots + slack, self.limit), self._reserved)
            self.data = F.pad(self.data, (0, 0, 0, wanted - self.data.shape[2]))
        return self.data

    def append(self, x: Tensor, past: int) -> None:
        """Write ``[B, h, m, d]`` when every row has ``past`` tokens and gets ``m`` more.

        In a full window, the new tokens overwrite those that fall out of it: token ``p`` takes the slot of
        token ``p - n_r``, unless that is one of the first ``n_s`` tokens, which stay. That is how a window
        forgets; nothing is freed. ``runs`` gives the slots.
        """
        length = past + x.shape[2]
        if self.is_tight and not self.is_empty and past == self.data.shape[2]:
            self.data = torch.cat((self.data, x), dim=2)
            return
        data = self._grow(x, self.used_slots(length))
        for position, slot, count in self.runs(past, length, length):
            data[:, :, slot : slot + count] = x[:, :, position - past : position - past + count]

    def append_and_read(self, x: Tensor, past: int) -> Stored:
        """Write a decoded token ``[B, h, 1, d]``, and give what it attends to.

        That is ``stored``, or the slots in use of a window.
        """
        self.append(x, past)
        return self.read(past + 1) if self.has_window else self.stored

    def append_ragged(self, x: Tensor, segments: Segments) -> None:
        """Write the new tokens ``[B, h, m, d]`` of each row behind those that it has.

        ``segments`` say how many they are.
        """
        if segments.all:
            data = self._grow(x, self.used_slots(max(segment.keys[1] for segment in segments.all)))
            key = KVBuffer, self.num_sink_tokens, self.limit
            rows, columns, slots = segments.derived(key, lambda: self._places(segments).to(x.device))
            data[rows, :, slots] = x[rows, :, columns]

    def _places(self, segments: Segments) -> Tensor:
        """Row, column in the pass and slot of every new token that the buffer will hold, int64 ``[3, t]``."""
        found, step = [], torch.tensor([[0], [1], [1]])
        for segment in segments.all:
            past, length = segment.past, segment.keys[1]
            for position, slot, count in self.runs(past, length, length):
                for row in range(*segment.rows):
                    start = torch.tensor([[row], [position - past], [slot]])
                    found.append(start + step * torch.arange(count))
        return torch.cat(found, dim=1)

    def read(self, length: int) -> Tensor:
        """The slots in use ``[B, h, used slots, d]``, after at most ``length`` tokens per row.

        It is a view, or a copy that the caller must not keep.
        """
        return self.data[:, :, : self.used_slots(length)]

    def view(self, length: int) -> Source:
        """The same for ``attend``, which reads what it needs.

        It gives the tokens as they are now, whatever is stored or packed later.
        """
        return self.read(length)

    def observe(self, q: Tensor, step: Any) -> None:
        """Look at rotated queries ``[B, Hq, m, d]`` of a prompt's chunk, for forms that go by them."""

    def flush(self, length: int) -> None:
        """Bring the buffer into the form in which it rests: the prompt has ended, or a token was decoded."""

    def keep(self, index: Tensor, length: int) -> None:
        """Hold only the slots ``index`` ``[B, h, w]`` of the ``length`` in use, as slots ``0 … w-1``.

        The rest is freed.
        """
        self.data = take_slots(self.data, index)

    def keep_ends(self, first: int, last: int, length: int) -> None:
        """Hold only the first and the last so many of the ``length`` slots in use."""
        batch, heads, _, _ = self.shape
        index = first_and_last(first, last, length, self.tensors()[0].device)
        self.keep(index.expand(batch, heads, -1), length)

    def keep_places(self, places: Tensor, length: int) -> None:
        """``keep`` of a tight buffer, by numbers ``[B, h, w]`` from ``places_of``.

        The numbers then serve several buffers.
        """
        assert self.data.shape[2] == length, "a tight buffer has no room"
        flat = self.data.flatten(0, 2).index_select(0, places.flatten())
        self.data = flat.view(*places.shape, -1)

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Overwrite slots ``[B, h, c]`` with ``[B, h, c, d]``."""
        self.data.scatter_(2, slots[..., None].expand_as(x), x.to(self.dtype))

    def crop(self, length: int) -> None:
        """Forget the tokens behind the first ``length`` of each row.

        Here later ones are written over them.
        """

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        take_rows_of(self, index)

    def tensors(self) -> list[Tensor]:
        return [] if self.is_empty else [self.data]

    def versioned(self) -> tuple[Any, ...]:
        """The objects that hold the tensors.

        While no ``version`` changes, all tensors stay where they are.
        """
        return (self,)

    def check_tokens(self, lengths: Tensor, where: str) -> None:
        """Check that the slots of all tokens of rows of ``lengths`` ``[B]`` are there and hold numbers.

        Raises:
            AssertionError: they are not, or hold NaN.
        """
        used = [self.used_slots(length) for length in lengths.tolist()]
        if not self.is_empty:
            batch, _, slots, _ = self.shape
            assert batch == len(used), f"{where} holds {batch} rows, the cache {len(used)}"
            assert slots >= max(used), f"{where} has {slots} slots, {max(used)} are in use"
            tokens = self.read(max(lengths.tolist()))
            for row, count in enumerate(used):
                assert not bool(tokens[row, :, :count].isnan().any()), f"{where}, row {row}: NaN"

    def check_integrity(self) -> None:
        """Check the buffer itself. Raise ``AssertionError`` with what is wrong."""
        assert self.is_empty or self.shape[2] <= self.limit, f"{self.shape[2]} slots, at most {self.limit}"


class KVQuantizer:
    """How keys and values are held: it makes the buffers of a layer. This one holds them as computed.

    Attributes:
        is_in_place: whether tokens stay where they are while there is room, as the decode engine wants it.
        comes_to_rest: whether ``flush`` brings the tokens of its buffers into another form.
    """

    is_in_place: bool = True
    comes_to_rest = False

    def of_layer(self, layer_idx: int) -> "KVQuantizer":
        """The quantizer of a layer, where layers differ."""
        return self

    def in_place(self, capacity: int) -> "KVQuantizer":
        """A quantizer whose buffers keep tokens in place, with room for ``capacity`` tokens.

        Raises:
            ValueError: no decode kernel reads this form.
        """
        return self

    def tokens(self, part: str, evicts: bool = False) -> KVBuffer:
        """A buffer of tokens at slots 0, 1, ….

        Args:
            part: ``keys`` or ``values``.
            evicts: whether ``keep`` will be used.
        """
        return KVBuffer()

    def window(self, part: str, num_sink_tokens: int, num_recent_tokens: int) -> KVBuffer:
        """A buffer of the first and the most recent tokens."""
        return KVBuffer(num_sink_tokens, num_recent_tokens)


NATIVE = KVQuantizer()


class Recent:
    """Tokens of a window and the chunk behind it, in the order of their positions: a ``TokenSource``.

    What has left the window is read as zeros, which no query sees.

    Args:
        window: a buffer of sinks and a ring.
        new: ``[B, h, m, d]``, the chunk, not stored yet.
        rows: ``(past, counts)`` of each row.
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
        """These rows."""
        part = copy(self)
        part.new, part.past = self.new[rows], self.past[rows]
        part.held = None if self.held is None else self.held[rows]
        return part

    def heads(self, heads: Sequence[int]) -> "Recent":
        """These heads."""
        part = copy(self)
        part.new = take_heads(self.new, heads)
        part.held = None if self.held is None else take_heads(self.held, heads)
        return part

    def span(self, start: int, stop: int) -> Tensor:
        """Tokens ``[B, h, stop - start, d]``, with zeros behind the tokens of a shorter row."""
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
