"""``KVBuffer``: growing tensors that hold the keys, or the values, of some KV heads of one layer.

A *slot* is an index along the token dimension of such a tensor. Token ``p`` of a row has one fixed slot.

A layer never makes a ``KVBuffer`` itself. It asks its ``KVQuantizer`` (``kv_quantizer.py``) for one, and so
works with packed keys and values as well. ``window_buffer.py`` has the buffer of a window.

**Pending and at rest.** Some buffers store older tokens in another form than the one in which they came:
in 4 bits (``quantized.py``), or with fewer channels (ThinK). While a prompt is fed, all its tokens keep the
model's dtype and are called *pending*. ``flush``, called when the prompt has ended, converts the older ones.
From then on the buffer is *at rest*, and ``flush`` after each decoded token keeps it there. A plain
``KVBuffer`` has one form only, so its ``flush`` does nothing.
"""

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attend import Segments, Source
from .packed import Stored

# a buffer grows by 1/128 of its length: that is under 1 % of the bytes, and appending stays cheap
_SLACK = 128


def take_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Copy chosen tokens: ``out[b, h, i] = x[b, h, slots[b, h, i]]``.

    Whole tokens are copied at a time, which on CPU is ten times as fast as ``gather``. The slots are not
    checked: one that is not below ``n`` may read a token of another head.

    Args:
        x: ``[B, h, n, d]``.
        slots: int64 ``[B, h, w]``.

    Returns:
        ``[B, h, w, d]``.
    """
    batch, heads, n, head_dim = x.shape
    if x.stride()[2:] != (head_dim, 1) or x.stride(0) != heads * x.stride(1) or x.stride(1) % head_dim:
        x = x.contiguous()
    row = x.stride(0) // head_dim
    head = x.stride(1) // head_dim
    tokens = x.as_strided(((batch - 1) * row + (heads - 1) * head + n, head_dim), (head_dim, 1))
    return tokens.index_select(0, places_of(slots, head).flatten()).view(*slots.shape, head_dim)


def places_of(slots: Tensor, room: int) -> Tensor:
    """Turn slots of each head into indices into a tensor whose rows, heads and slots are flattened.

    Slot ``s`` of head ``j`` of row ``b`` gets the index ``(b · h + j) · room + s``.

    Args:
        slots: int64 ``[B, h, w]``.
        room: slots of each head in the tensor, which is ``[B, h, room, …]``.

    Returns:
        int64 ``[B, h, w]``.
    """
    heads = numbers(slots.shape[0] * slots.shape[1], slots.device)
    return torch.add(slots, heads.view(*slots.shape[:2], 1), alpha=room)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def numbers(count: int, device: torch.device) -> Tensor:
    """``0 … count-1``, int64. The tensor is cached and shared, so it must not be written to."""
    return torch.arange(count, device=device)


def first_and_last(first: int, last: int, length: int, device: torch.device) -> Tensor:
    """Indices of the ``first`` first and the ``last`` last of ``length`` tokens, int64 ``[first + last]``.

    ``first_and_last(2, 3, 10, device)`` is ``[0, 1, 7, 8, 9]``.
    """
    begin = torch.arange(first, device=device)
    end = torch.arange(length - last, length, device=device)
    return torch.cat((begin, end))


def take_rows_of(holder: Any, index: Tensor) -> None:
    """Replace every tensor ``[B, …]`` that ``holder`` has by the rows ``index`` of it.

    A tensor may be an attribute, an element of a tuple that is an attribute, or belong in the same way to an
    object that is an attribute.
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
    """Declare an attribute that holds a tensor, or a tuple of tensors, whose address the decode engine notes.

    Assigning a new tensor changes the address, so it adds 1 to the ``version`` of the object, which the
    engine reads. Writing into the tensor changes neither. The class, or a base class, must define
    ``version = 0``.
    """
    return _Replaced()


class KVBuffer:
    """Keys or values ``[B, h, slots, d]`` of every token.

    Token ``p`` is at slot ``p``, until ``keep`` drops tokens.

    These methods are all that a layer may do with a buffer, whatever the form in which a quantizer holds it.
    ``past`` and ``length`` count tokens per row, and are equal in all rows. Only ``append_ragged`` takes rows
    that differ. Callers are layers, not users: a wrong argument is a bug, which is an ``AssertionError`` or
    an error of torch.

    Attributes:
        data: ``[B, h, slots reserved, d]``. Use ``read`` for the slots in use. None = nothing was ever
            written.
        is_tight: whether the layer calls ``keep`` after every token. ``keep`` frees unused slots, so that
            reserving any for later tokens would be in vain.
        version: how often a tensor of this object was replaced.
    """

    version = 0
    data: Tensor = replaced()
    num_croppable = sys.maxsize
    """How many of the last tokens ``crop`` can forget, given the form in which they are stored.

    Tokens that a ring has overwritten are not considered here: ``CacheLayer.most_croppable`` counts them.
    """
    num_ahead = sys.maxsize
    """How many tokens can be decoded before ``flush`` would convert older ones to another form."""

    has_window = False
    """Whether the buffer holds only a window of the tokens (``WindowBuffer``)."""
    num_sink_tokens = 0
    """Number of first tokens that a window keeps for good. Without a window, 0."""
    limit: int = sys.maxsize
    """The most slots that the buffer can have: those of its window, or else any number."""

    def __init__(self) -> None:
        self.is_tight = False
        self._reserved = 0
        self.data = None  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def is_empty(self) -> bool:
        """Whether no token was ever written."""
        return self.data is None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(B, h, slots reserved, d)``."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which ``read`` gives tokens."""
        return self.data.dtype

    @property
    def stored(self) -> Stored:
        """The tokens in the form that decoding reads, ``[B, h, slots reserved, d]``: a view, not a copy."""
        return self.data

    @property
    def target(self) -> Tensor:
        """The tensor ``[B, h, slots, d]`` into which a decode engine writes each decoded token itself."""
        return self.data

    @property
    def is_at_rest(self) -> bool:
        """Whether there are tokens and none of them is pending (see the top of this file).

        Decode engines start only then, because ``flush`` would replace the tensors of pending tokens.
        """
        return not self.is_empty

    def used_slots(self, length: int) -> int:
        """The number of slots in use after ``length`` tokens."""
        return length

    def runs(self, start: int, stop: int, length: int) -> list[tuple[int, int, int]]:
        """The slots of tokens ``start … stop-1``, when ``length`` tokens have been written.

        Returns:
            ``(position, slot, tokens)`` of each run of tokens whose positions and slots are both consecutive.
            Tokens that were overwritten are left out.
        """
        return [(start, start, stop - start)] if stop > start else []

    def reserve(self, slots: int) -> None:
        """Allocate at least ``slots`` slots, so that the tensors keep their address up to so many tokens.

        In an empty buffer, the allocation waits for the first token.
        """
        self._reserved = slots
        if not self.is_empty:
            self._grow(self.data, slots)

    def _grow(self, like: Tensor, slots: int) -> Tensor:
        if self.is_empty:
            self.data = like.new_empty(like.shape[0], like.shape[1], 0, like.shape[3])
        if self.data.shape[2] < slots:
            slack = 0 if self.is_tight or slots <= self._reserved else max(1, slots // _SLACK)
            wanted = max(min(slots + slack, self.limit), self._reserved)
            self.data = F.pad(self.data, (0, 0, 0, wanted - self.data.shape[2]))
        return self.data

    def append(self, x: Tensor, past: int) -> None:
        """Write new tokens ``[B, h, m, d]`` behind the ``past`` tokens that every row has."""
        if self.is_tight and not self.is_empty and past == self.data.shape[2]:
            self.data = torch.cat((self.data, x), dim=2)
            return
        length = past + x.shape[2]
        self._grow(x, length)[:, :, past:length] = x

    def append_and_read(self, x: Tensor, past: int) -> Stored:
        """Write a decoded token ``[B, h, 1, d]``, and return the keys or values that it attends to.

        These are ``stored``, or the slots in use of a window.
        """
        self.append(x, past)
        return self.stored

    def append_ragged(self, x: Tensor, segments: Segments) -> None:
        """Write new tokens ``[B, h, m, d]``, when rows have, or get, unequally many tokens.

        Args:
            x: the new tokens of each row, left-aligned.
            segments: how many tokens each row has, and how many it gets.

        Raises:
            ValueError: the buffer is a packed one, which takes only rows of one length.
        """
        if segments.all:
            data = self._grow(x, self.used_slots(max(segment.keys[1] for segment in segments.all)))
            key = KVBuffer, self.num_sink_tokens, self.limit
            rows, columns, slots = segments.derived(key, lambda: self._places(segments).to(x.device))
            data[rows, :, slots] = x[rows, :, columns]

    def _places(self, segments: Segments) -> Tensor:
        """Row, column of ``x`` and slot of every new token that the buffer will hold, int64 ``[3, t]``."""
        found, step = [], torch.tensor([[0], [1], [1]])
        for segment in segments.all:
            past, length = segment.past, segment.keys[1]
            for position, slot, count in self.runs(past, length, length):
                for row in range(*segment.rows):
                    start = torch.tensor([[row], [position - past], [slot]])
                    found.append(start + step * torch.arange(count))
        return torch.cat(found, dim=1)

    def read(self, length: int) -> Tensor:
        """The slots in use ``[B, h, used slots, d]``, when the longest row has ``length`` tokens.

        The result is a view or a copy, and is valid until the next write to the buffer.
        """
        return self.data[:, :, :length]

    def view(self, length: int) -> Source:
        """The slots in use as a source for ``attend``, which unpacks only the parts that it reads.

        The source gives the tokens as they are now, even if tokens are appended or packed before it is read.
        """
        return self.read(length)

    def observe(self, q: Tensor, step: Any) -> None:
        """Take note of the rotated queries ``[B, Hq, m, d]`` of a chunk of a prompt.

        Only ThinK uses them: they decide which channels its keys lose. Here nothing happens.
        """

    def flush(self, length: int) -> None:
        """Convert older tokens to the form in which they are stored for good, such as 4 bits.

        The layer calls it when a prompt has ended and after every decoded token. The buffer is then at rest
        (see the top of this file). Here nothing happens, because there is one form only.

        Args:
            length: tokens per row that were written, or that ``keep`` left.
        """

    def keep(self, index: Tensor, length: int) -> None:
        """Keep only chosen tokens and free all others. Slot ``index[b, h, i]`` becomes slot ``i``.

        It is for buffers of ``KVQuantizer.tokens(…, evicts=True)``, not for windows.

        Args:
            index: int64 ``[B, h, w]``, the slots to keep, ascending in each head. They are not checked.
            length: number of slots in use before the call. Afterwards ``w`` slots are in use.
        """
        self.data = take_slots(self.data, index)

    def keep_ends(self, first: int, last: int, length: int) -> None:
        """``keep`` the ``first`` first and the ``last`` last of the ``length`` slots in use."""
        batch, heads, _, _ = self.shape
        index = first_and_last(first, last, length, self.tensors()[0].device)
        self.keep(index.expand(batch, heads, -1), length)

    def keep_places(self, places: Tensor, length: int) -> None:
        """Do what ``keep`` does, given indices ``[B, h, w]`` from ``places_of(slots, length)``.

        So a layer computes the indices once for its keys and its values. The buffer must be tight
        (``is_tight``), so that it has exactly ``length`` slots.
        """
        assert self.data.shape[2] == length, "a tight buffer has no room"
        flat = self.data.flatten(0, 2).index_select(0, places.flatten())
        self.data = flat.view(*places.shape, -1)

    def write(self, slots: Tensor, x: Tensor) -> None:
        """Overwrite slots ``[B, h, c]`` with the tokens ``[B, h, c, d]``."""
        self.data.scatter_(2, slots[..., None].expand_as(x), x.to(self.dtype))

    def crop(self, length: int) -> None:
        """Forget all tokens of each row but the first ``length``.

        Here nothing needs to be done: later tokens are written over them.
        """

    def select_rows(self, index: Tensor) -> None:
        """Replace the batch by its rows ``index`` ``[B']``: keep, repeat or reorder rows."""
        take_rows_of(self, index)

    def tensors(self) -> list[Tensor]:
        """All tensors that the buffer holds, as ``nbytes`` counts them."""
        return [] if self.is_empty else [self.data]

    def versioned(self) -> tuple[Any, ...]:
        """The objects that hold the tensors, each with a ``version``.

        While no ``version`` changes, no tensor changes its address.
        """
        return (self,)

    def check_tokens(self, lengths: Tensor, where: str) -> None:
        """Check that the buffer has a slot for every token of every row, and that no token is NaN.

        An empty buffer passes.

        Args:
            lengths: int64 ``[B]``, tokens of each row.
            where: name of the buffer, with which the message begins.

        Raises:
            AssertionError: the batch has another size, slots are missing, or a token holds NaN.
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
        """Check that the buffer agrees with itself. Here there is nothing to check.

        Raises:
            AssertionError: it does not; the message says what is wrong.
        """
