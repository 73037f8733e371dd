"""The interface between the decoder and a cache: one `Step` per forward pass, one `CacheLayer` per layer.

This file also squeezes padding out of a batch, whatever side it is on, so that layers see left-aligned rows
of real tokens.
"""

import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .attend import Segments, SharedQK, Source, span, takes_gradients
from .decode import DecodeBuffers
from .rope import ropes_on
from .sinks import Sink


@dataclass
class Selection:
    """Tokens that a lead holds, for the followers in later layers, when the lead dropped others (SnapKV).

    Attributes:
        positions: ``[B, n]``, the positions of the tokens held, ascending.
        scored: when decoding, the lead's logits ``[B, G, n]``, and bool ``[B, n]``: True = a token is
            proximal. Else None.
        kept: slots ``[B, w]`` that the lead chose to keep when the prompt ended. None = all.
    """

    positions: Tensor
    scored: tuple[Tensor, Tensor] | None = None
    kept: Tensor | None = None

    def move(self, device: torch.device) -> None:
        """Move the tensors to a device, in place."""
        self.positions = self.positions.to(device)
        if self.scored is not None:
            logits, near = self.scored
            self.scored = logits.to(device), near.to(device)
        if self.kept is not None:
            self.kept = self.kept.to(device)


@dataclass
class LeadState:
    """What the leads of a pass hand to their followers in later layers. Dictionaries are by KV head.

    Attributes:
        queries: the lead's queries ``[B, G, m, d]``, rotated, as they were when it attended.
        keys: the lead's keys ``[B, 1, n, d]``, rotated, as they were when it attended.
        buffers: when decoding, the logits of distant tokens; see ``DecodeBuffers``.
        selections: for methods whose leads choose the tokens that their block holds (SnapKV).
        read: for methods whose leads choose the tokens that a decoded token reads (Quest): slots
            ``[B, G, n]`` (None = all), and the lead's logits there.
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Source] = field(default_factory=dict)
    buffers: DecodeBuffers | None = None
    selections: dict[int, Selection] = field(default_factory=dict)
    read: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def take(self, heads: Sequence[int], length: int) -> SharedQK:
        """The leads' queries, and keys of the first ``length`` tokens, for followers at these KV heads."""
        tensors = [span(self.keys[head], 0, length) for head in heads]
        return SharedQK(torch.cat([self.queries[head] for head in heads], 1), torch.cat(tensors, 1))

    def move(self, device: torch.device, length: int, heads: Container[int]) -> None:
        """Move what the leads at these KV heads left to a device, and forget that of all other KV heads.

        Args:
            device: where to move it.
            length: tokens of the longest row. Keys that are no tensor are turned into one of so many tokens.
            heads: the KV heads that later layers will ask for.
        """
        self.queries = {head: q.to(device) for head, q in self.queries.items() if head in heads}
        kept = {head: keys for head, keys in self.keys.items() if head in heads}
        self.keys = {head: span(keys, 0, length).to(device) for head, keys in kept.items()}
        self.selections = {head: one for head, one in self.selections.items() if head in heads}
        for selection in self.selections.values():
            selection.move(device)
        self.read = {
            head: (None if slots is None else slots.to(device), logits.to(device))
            for head, (slots, logits) in self.read.items()
            if head in heads
        }
        if self.buffers is not None and self.buffers.logits.device != device:
            has_any = any(head in heads for head in range(self.buffers.logits.shape[1]))
            self.buffers = buffers_on(self.buffers, device, heads) if has_any else None


def buffers_on(buffers: DecodeBuffers, device: torch.device, heads: Container[int]) -> DecodeBuffers:
    """Buffers of the same sizes on another device, with the numbers of these KV heads.

    The numbers of other heads, and all partial results, are not copied.
    """
    moved: dict[str, Tensor | None] = {}
    for name in ("logits", "distant_lse", "weights", "weight_sums"):
        old = getattr(buffers, name)
        if old is None:
            moved[name] = None
            continue
        new = torch.empty_like(old, device=device)
        for head in range(buffers.logits.shape[1]):
            if head in heads:
                new[:, head].copy_(old[:, head])
        moved[name] = new
    for name in ("partial_out", "partial_lse"):
        moved[name] = torch.empty_like(getattr(buffers, name), device=device)
    return replace(buffers, **moved)


@dataclass
class Agreed:
    """A decision that the first layer of a pass takes for all layers, on whatever devices they are.

    Attributes:
        sizes: how many tokens every layer and KV head keeps, ``[L][H]``. None = not decided yet.
    """

    sizes: Sequence | None = None


@dataclass
class Step:
    """What the layers of a cache share during one pass over new tokens.

    Attributes:
        layers: the cache's layers. In the pass of a group of rows, the layers of that group.
        past: ``[B]`` real tokens per row before the pass.
        counts: ``[B]`` real tokens that the pass feeds per row.
        num_new: ``m``, width of the left-aligned chunk (rows with fewer tokens end in garbage).
        columns: columns of the pass as the caller fed them, padding included.
        uniform_past: the value of ``past`` if it is the same in all rows and every row feeds ``m`` tokens.
            Else None.
        ends_prompt: whether the prompt, or a chunk after which the method compresses, is complete after this
            pass.
        all_real: whether no row feeds padding in this pass.
        is_decode: whether this is one new token behind a non-empty cache, outside an announced prompt.
        starts: ``[B]``, the column of the pass with each row's first token of this chunk. None = the chunk is
            the whole pass.
        schedule, chunk_index, is_last_chunk: the method's plan of the chunks of this prompt, the index of the
            chunk that is being fed, and whether it is the last one. None, 0, True for methods that do not
            chunk.
        ropes, backend: the rotation of each layer, and the name of the attention backend. The model sets
            them.
        sink: the constant sink of the layer that attends now, which sets it. None = it has none.
        lead: what leads hand to their followers.
        groups: the pass of each group of rows, with the indices ``[b]`` of its rows in the batch.
        agreed: what the first layer decides for all layers.
        copies: the copies of this pass for other devices, by device, and this one itself. Empty while all
            layers are on one device.
    """

    layers: list
    past: Tensor
    counts: Tensor
    num_new: int
    columns: int
    uniform_past: int | None
    ends_prompt: bool
    is_decode: bool
    all_real: bool
    starts: Tensor | None = None
    schedule: Any = None
    chunk_index: int = 0
    is_last_chunk: bool = True
    ropes: Any = None
    backend: str = "auto"
    sink: Sink | None = None
    lead: LeadState = field(default_factory=LeadState)
    groups: list[tuple["Step", Tensor]] = field(default_factory=list)
    agreed: Agreed = field(default_factory=Agreed)
    copies: dict[torch.device, "Step"] = field(init=False, default_factory=dict, repr=False)

    def on(self, device: torch.device, heads: Container[int] | None = None) -> "Step":
        """The copy of this pass for layers on ``device``. Tensors that leads left for followers move there.

        Args:
            device: the device of the layers.
            heads: KV heads whose leads still have followers in later layers. None = any. What the leads of
                other heads left is forgotten.
        """
        if device == self.past.device and not self.copies:
            return self
        length = self.max_length  # read first, so that no copy reads it from its device again
        found = self._at(device)
        every = range(sys.maxsize)
        for step in (found, *(part for part, _ in found.groups)):
            step.lead.move(device, length, every if heads is None else heads)
        return found

    def _at(self, device: torch.device) -> "Step":
        """The copy of the pass for a device, made when it is first needed."""
        self.copies.setdefault(self.past.device, self)
        if device not in self.copies:
            self.copies[device] = self._copy(device)
        return self.copies[device]

    def _copy(self, device: torch.device) -> "Step":
        ropes = None if self.ropes is None else ropes_on(self.ropes, device)
        copied = replace(
            self,
            past=self.past.to(device),
            counts=self.counts.to(device),
            starts=None if self.starts is None else self.starts.to(device),
            ropes=ropes,
            groups=[(part._at(device), rows.to(device)) for part, rows in self.groups],
        )
        copied.copies = self.copies
        if "rows" in vars(self):
            vars(copied)["rows"] = self.rows  # read once for all devices
        return copied

    @property
    def sizes(self) -> Sequence | None:
        """How many tokens every layer and KV head keeps; see ``Agreed``."""
        return self.agreed.sizes

    @sizes.setter
    def sizes(self, sizes: Sequence) -> None:
        self.agreed.sizes = sizes

    @cached_property
    def positions(self) -> Tensor:
        """``[B, m]``, the position of each new token in its row."""
        return self.past[:, None] + torch.arange(self.num_new, device=self.past.device)

    @cached_property
    def lengths(self) -> Tensor:
        """``[B]``, the real tokens per row after the pass."""
        return self.past + self.counts

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """``(past, counts)`` of every row, as integers. They are read from the device once in a pass."""
        if self.uniform_past is not None:
            return [(self.uniform_past, self.num_new)] * self.past.shape[0]
        past, counts = torch.stack((self.past, self.counts)).tolist()
        return list(zip(past, counts, strict=True))

    @cached_property
    def segments(self) -> Segments:
        """Each row's old and new tokens, for ``attend``."""
        return Segments.of_rows(*zip(*self.rows, strict=True))

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest row after the pass."""
        return max(sum(row) for row in self.rows)

    @cached_property
    def is_fresh(self) -> bool:
        """Whether no row has a token yet."""
        return not any(past for past, _ in self.rows)

    @property
    def chunk_backend(self) -> str:
        """The backend for a chunk behind tokens that are held: ``auto``, unless ``reference`` was set.

        Tokens that are held may be in a form, such as packed, that the backend which was set does not take.
        """
        return self.backend if self.is_fresh or self.backend == "reference" else "auto"

    def merging_backend(self, *tensors: Tensor) -> str:
        """The backend for calls whose results ``attend.merge`` combines.

        If one of the tensors takes a gradient, it is ``reference``, whose log-sum-exps have gradients.
        """
        return "reference" if self.backend == "reference" or takes_gradients(*tensors) else "auto"


class CacheLayer(CacheLayerMixin):
    """One layer of a cache, and the interface of a method.

    A method implements ``attend``, ``clear`` and ``kv_buffers``. If it drops tokens, it overrides ``flush``.
    """

    is_compileable = False
    is_croppable = False
    """Whether ``crop`` can take tokens back.

    It is not inherited: every subclass must set it, because ``crop`` knows nothing of what a subclass adds.
    """
    extra_slots = 0
    """How many tokens that left the window a ring still holds, so that as many can be taken back."""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_croppable = vars(cls).get("is_croppable", False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Store the new tokens, and compute the attention of their queries.

        Args:
            q: ``[B, Hq, m, d]``, not rotated.
            k, v: ``[B, H, m, d]``, not rotated.
            step: positions, rotation, and what leads hand to followers.

        Returns:
            The output ``[B, Hq, m, d]``.
        """
        raise NotImplementedError

    def flush(self, step: Step) -> None:
        """Compress, if a prompt has ended (``step.ends_prompt``) or a token was decoded (``step.is_decode``).

        It is called after every ``attend``. It is also called, with ``num_new`` 0, when a prompt ends without
        a new token of these rows. Here it calls ``KVBuffer.flush`` of every buffer; a method that drops
        tokens does that first.
        """
        if step.ends_prompt or step.is_decode:
            for buffer in self.kv_buffers().values():
                buffer.flush(step.max_length)

    def kv_buffers(self) -> dict[str, Any]:
        """Every buffer of the layer, by the part of ``nbytes_by_part`` that its bytes count towards.

        If several buffers belong to one part, their names are ``part of x``, with any ``x``.
        """
        return {}

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the layer holds, with the name of the part that its bytes count towards."""
        for name, buffer in self.kv_buffers().items():
            yield from ((name.partition(" of ")[0], tensor) for tensor in buffer.tensors())

    @property
    def device(self) -> torch.device | None:
        """The device of the layer's tensors. None while it has none."""
        return next((tensor.device for _, tensor in self.parts()), None)

    def select_rows(self, index: Tensor) -> None:
        """Replace the batch by its rows ``index`` ``[B']``: keep, repeat or reorder rows."""
        for buffer in self.kv_buffers().values():
            buffer.select_rows(index)

    def most_croppable(self, length: int, longest: int) -> int:
        """How many of the last tokens of a row can be taken back.

        Args:
            length: tokens of the row now.
            longest: the most tokens that the row has ever had, before it was cropped. The tokens behind
                ``length`` are gone, but in a ring they have overwritten older ones.
        """
        if not self.is_croppable:
            return 0
        most = length
        for buffer in self.kv_buffers().values():
            if not buffer.is_empty:
                most = min(most, buffer.num_croppable)
                if buffer.has_window and longest > buffer.used_slots(longest):
                    most = min(most, length + self.extra_slots - longest)
        return most

    def most_ahead(self, length: int) -> int:
        """How many tokens a pass may feed behind the next one, if all of these may have to be taken back.

        Taking them back leaves the layer as if they had never been fed. -1 = the next token itself already
        overwrites or packs one that does not come back.

        Args:
            length: tokens of the rows now.
        """
        most = min(buffer.num_ahead for buffer in self.kv_buffers().values()) - 1
        for buffer in self.kv_buffers().values():
            if buffer.has_window:
                room = buffer.used_slots(sys.maxsize) - length - 1
                most = min(most, max(room, self.extra_slots or -1))
        return most

    def crop(self, length: int) -> None:
        """Forget all tokens of each row but the first ``length``."""
        if self.is_croppable:  # else there is nothing to take back
            for buffer in self.kv_buffers().values():
                buffer.crop(length)

    def check_integrity(self, where: str, lengths: Tensor | None) -> None:
        """Check that the buffers hold as many rows and tokens as the cache counts.

        For a method that drops tokens, only the number of rows is checked.

        Args:
            where: name of the layer, with which messages begin.
            lengths: ``[B]``, tokens of each row. None = the cache is empty.

        Raises:
            AssertionError: they do not.
        """
        for name, buffer in self.kv_buffers().items():
            held = {tensor.shape[0] for tensor in buffer.tensors()}
            if lengths is None:
                assert not held, f"{where}: {name} of an empty cache"
            elif self.is_croppable:
                buffer.check_tokens(lengths, f"{where}: {name}")
            else:
                assert held <= {len(lengths)}, f"{where}: {name} holds {held} rows, the cache {len(lengths)}"

    def clear(self) -> None:
        """Forget all tokens, and make empty buffers."""
        raise NotImplementedError

    def _refuse(self, *args, **kwargs) -> Any:
        raise ValueError("only PodForCausalLM fills a PoD cache: pass none (load_model of pod-kv converts)")

    # Models of transformers would call these methods; they raise ValueError.
    lazy_initialization = update = get_mask_sizes = get_seq_length = _refuse

    def get_max_length(self) -> int:
        return -1


# -- padding -------------------------------------------------------------------------------------------------


@dataclass
class Compaction:
    """Maps padded columns to left-aligned real tokens and back.

    Attributes:
        mask: ``[B, n]`` bool, True = token.
        counts: ``[B]`` real tokens per row.
        index: ``[B, m]``, the column of the t-th real token of each row, ``m = max(1, *counts)``. In a row
            with fewer tokens, the last entries are arbitrary columns and must be ignored.
    """

    mask: Tensor
    counts: Tensor
    index: Tensor

    @property
    def doc_ids(self) -> Tensor:
        """``[B, m]``: 0 for the real tokens of a row, -1 for the columns behind them."""
        behind = torch.arange(self.index.shape[1], device=self.index.device) >= self.counts[:, None]
        return -behind.long()

    def scatter(self, x: Tensor) -> Tensor:
        """Put left-aligned tokens ``[B, m, c]`` back into their columns ``[B, n, c]``; padding gets zeros."""
        mask = self.mask.to(x.device)  # the last layer may lie on another device than the first
        rank = (mask.long().cumsum(1) - 1).clamp(min=0)
        restored = x.gather(1, rank[..., None].expand(-1, -1, x.shape[-1]))
        return restored.masked_fill(~mask[..., None], 0.0)

    def padded_positions(self, past: Tensor | int) -> Tensor:
        """``[B, n]``, the position of each column's token in its row, counted on from ``past`` per row."""
        start = past[:, None] if isinstance(past, Tensor) else past
        return self.mask.long().cumsum(1) - 1 + start


def document_positions(doc_ids: Tensor) -> Tensor:
    """The position of every token inside its document, int64 ``[B, n]``.

    Args:
        doc_ids: ``[B, n]``. Equal ids are contiguous.
    """
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def compaction_of(attention_mask: Tensor, n: int) -> Compaction | None:
    """The compaction of the last ``n`` columns of a padding mask (nonzero = token).

    None when there is no padding.
    """
    mask = attention_mask[:, -n:].bool()
    if mask.all():
        return None
    counts = mask.sum(1)
    order = torch.argsort((~mask).long(), dim=1, stable=True)
    return Compaction(mask=mask, counts=counts, index=order[:, : max(1, int(counts.max()))])


def check_positions(position_ids: Tensor, expected: Tensor, attention_mask: Tensor | None) -> None:
    """Check that a caller's ``position_ids`` are those that follow from the mask and the cache.

    Columns of padding are not checked.

    Args:
        position_ids: ``[B, n]``, or a shape that broadcasts to it.
        expected: ``[B, n]``, the positions that follow from mask and cache.
        attention_mask: ``[B, columns]``, of which the last ``n`` are read. None = no padding.

    Raises:
        ValueError: a token has another position; the message names the first such token.
    """
    given, expected = torch.broadcast_tensors(position_ids.to(expected.device), expected)
    wrong = given != expected
    if attention_mask is not None:
        wrong &= attention_mask[:, -expected.shape[1] :].bool()
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"position_ids{list(place)} = {given[place]}, but mask and cache make it {expected[place]}: "
            "leave position_ids out, or feed the tokens that continue"
        )
