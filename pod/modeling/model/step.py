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
    """What a lead that holds chosen tokens leaves for its followers in a pass.

    Attributes:
        positions: ``[B, n]``, the positions of the chosen tokens, ascending.
        scored: when decoding, logits ``[B, G, n]``, and ``[B, n]`` that says which tokens are proximal.
        kept: slots ``[B, w]`` that the lead chose when the prompt ended. None = all.
    """

    positions: Tensor
    scored: tuple[Tensor, Tensor] | None = None
    kept: Tensor | None = None

    def move(self, device: torch.device) -> None:
        """Put the tensors onto a device."""
        self.positions = self.positions.to(device)
        if self.scored is not None:
            logits, near = self.scored
            self.scored = logits.to(device), near.to(device)
        if self.kept is not None:
            self.kept = self.kept.to(device)


@dataclass
class LeadState:
    """What the leads of a pass leave for the layers that follow them, by KV head.

    Attributes:
        queries: ``[B, G, m, d]``, as they were when the lead attended.
        keys: ``[B, 1, n, d]``, as they were when the lead attended.
        buffers: when decoding, the logits of distant tokens and what belongs to them.
        selections: for leads that choose the tokens of their blocks.
        read: for leads that choose what a decoded token reads: slots ``[B, G, n]`` (None = all), and the
            logits there.
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Source] = field(default_factory=dict)
    buffers: DecodeBuffers | None = None
    selections: dict[int, Selection] = field(default_factory=dict)
    read: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)

    def take(self, heads: Sequence[int], length: int) -> SharedQK:
        """The lead queries and keys of these KV heads and ``length`` tokens, for all heads of a call."""
        tensors = [span(self.keys[head], 0, length) for head in heads]
        return SharedQK(torch.cat([self.queries[head] for head in heads], 1), torch.cat(tensors, 1))

    def move(self, device: torch.device, length: int, heads: Container[int]) -> None:
        """Put what these KV heads left onto a device, and forget the rest: no later layer asks for it.

        Args:
            device: where to put it.
            length: tokens of the longest row. Keys in another form than a tensor move as tensors of so many
                tokens.
            heads: the KV heads.
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
    """Buffers of the same sizes on another device, with what these KV heads left in them.

    The rest is scratch.
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
    """What the first layer that asks decides for all layers of a pass, whatever their devices.

    Attributes:
        sizes: tokens that every layer keeps.
    """

    sizes: Sequence | None = None


@dataclass
class Step:
    """What the layers of a cache share during one pass over new tokens.

    Attributes:
        layers: the cache's layers; in a group of rows, the group's layers.
        past: ``[B]`` real tokens per row before the pass.
        counts: ``[B]`` real tokens that the pass feeds per row.
        num_new: ``m``, width of the left-aligned chunk (rows with fewer tokens end in garbage).
        columns: columns of the pass as the caller fed them, padding included.
        uniform_past: the common value of ``past`` when all rows agree and every row feeds ``m`` tokens. Else
            None.
        ends_prompt: whether the prompt, or a chunk after which the method compresses, is complete after this
            pass.
        all_real: whether no row feeds padding in this pass.
        is_decode: whether this is one new token behind a non-empty cache, outside an announced prompt.
        starts: ``[B]``, the column of the pass at which each row's first token of this chunk stands. None =
            the chunk is the whole pass.
        schedule, chunk_index, is_last_chunk: the method's chunks of this prompt, the one being fed, and
            whether it is the prompt's last. None, 0, True for methods that do not chunk.
        ropes, backend: the model sets them.
        sink: what stands for the first tokens in heads that keep their windows. The layer that attends now
            sets its own. None = nothing.
        lead: what lead layers leave for their followers.
        groups: the passes of groups of rows, with the rows ``[b]`` of each.
        agreed: what the first layer that asks decides for all.
        copies: the pass as layers on other devices see it, by device, with this one. Empty while all layers
            lie on one device.
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
        """The pass as layers on a device see it. What leads left for their followers moves there.

        Args:
            device: the device of the layers.
            heads: KV heads whose leads have followers to come. None = any. What other heads left is
                forgotten.
        """
        if device == self.past.device and not self.copies:
            return self
        length = self.max_length  # read first, so that no copy reads it from its device again
        found, every = self._at(device), range(sys.maxsize)
        for step in (found, *(part for part, _ in found.groups)):
            step.lead.move(device, length, every if heads is None else heads)
        return found

    def _at(self, device: torch.device) -> "Step":
        """The copy of the pass for a device."""
        self.copies.setdefault(self.past.device, self)
        if device not in self.copies:
            self.copies[device] = self._copy(device)
        return self.copies[device]

    def _copy(self, device: torch.device) -> "Step":
        ropes = self.ropes and ropes_on(self.ropes, device)
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
        """Tokens that every layer keeps, where the first layer that asks decides for all."""
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
        """``(past, counts)`` of every row. It is read from the device once in a pass."""
        if self.uniform_past is not None:
            return [(self.uniform_past, self.num_new)] * self.past.shape[0]
        past, counts = torch.stack((self.past, self.counts)).tolist()
        return list(zip(past, counts, strict=True))

    @cached_property
    def segments(self) -> Segments:
        """What every row holds and gets, for ``attend``."""
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
        """The backend that attends behind a past.

        There tokens may have a form that the backend which was asked for does not take.
        """
        return self.backend if self.is_fresh or self.backend == "reference" else "auto"

    def merging_backend(self, *tensors: Tensor) -> str:
        """The backend that attends parts of one softmax.

        Where a gradient is taken, it is one whose log-sum-exps have gradients.
        """
        return "reference" if self.backend == "reference" or takes_gradients(*tensors) else "auto"


class CacheLayer(CacheLayerMixin):
    """One layer of a cache.

    A method implements ``attend``, ``clear`` and ``kv_buffers``, and ``flush`` if it compresses.
    """

    is_compileable = False
    is_croppable = False
    """Whether tokens can be taken back.

    Every class says so for itself, as ``crop`` knows nothing of what a class adds.
    """
    extra_slots = 0
    """How many tokens a ring holds behind its window, so that as many can be taken back."""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_croppable = vars(cls).get("is_croppable", False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Store the new tokens and attend.

        Args:
            q: ``[B, Hq, m, d]``, not rotated.
            k, v: ``[B, H, m, d]``, not rotated.
            step: positions, rotation and what lead layers share.

        Returns:
            ``[B, Hq, m, d]``.
        """
        raise NotImplementedError

    def flush(self, step: Step) -> None:
        """Compress.

        It is called after ``attend``, and with ``num_new`` 0 when a prompt ends without a new token of these
        rows. Nothing is to be done unless ``step.ends_prompt`` or ``step.is_decode``. Then buffers come to
        rest.
        """
        if step.ends_prompt or step.is_decode:
            for buffer in self.kv_buffers().values():
                buffer.flush(step.max_length)

    def kv_buffers(self) -> dict[str, Any]:
        """Every buffer that the layer has, by the name of the part that it counts towards.

        Where a part has several buffers, their names are ``part of x``.
        """
        return {}

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the layer holds, with the name of the part it counts towards."""
        for name, buffer in self.kv_buffers().items():
            yield from ((name.partition(" of ")[0], tensor) for tensor in buffer.tensors())

    @property
    def device(self) -> torch.device | None:
        """Where the layer's tensors are. None while it has none."""
        return next((tensor.device for _, tensor in self.parts()), None)

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for buffer in self.kv_buffers().values():
            buffer.select_rows(index)

    def most_croppable(self, length: int, longest: int) -> int:
        """How many of the last tokens of rows of ``length`` can be taken back.

        Args:
            length: tokens of the rows now.
            longest: tokens that the rows had before a ``crop``. They have been written over older ones.
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
        """How many tokens behind the next one can be fed in a pass and taken back, as if they never came.

        -1 = never again.
        """
        most = min(buffer.num_ahead for buffer in self.kv_buffers().values()) - 1
        for buffer in self.kv_buffers().values():
            if buffer.has_window:
                room = buffer.used_slots(sys.maxsize) - length - 1
                most = min(most, max(room, self.extra_slots or -1))
        return most

    def crop(self, length: int) -> None:
        """Forget the tokens behind the first ``length`` of each row."""
        if self.is_croppable:  # else there is nothing to take back
            for buffer in self.kv_buffers().values():
                buffer.crop(length)

    def check_integrity(self, where: str, lengths: Tensor | None) -> None:
        """Check that the buffers hold rows of ``lengths`` ``[B]`` tokens.

        What a method drops is its own affair.

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
        """Forget everything."""
        raise NotImplementedError

    def _refuse(self, *args, **kwargs) -> Any:
        raise ValueError("only PodForCausalLM fills a PoD cache: pass none (load_model of pod-kv converts)")

    # What transformers asks of a layer is refused.
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
        index: ``[B, m]``, the column of the t-th real token of each row, ``m = max(counts, 1)``. The tail of
            shorter rows holds arbitrary columns and must be ignored.
    """

    mask: Tensor
    counts: Tensor
    index: Tensor

    @property
    def doc_ids(self) -> Tensor:
        """``[B, m]``: 0 for real tokens, -1 behind them."""
        behind = torch.arange(self.index.shape[1], device=self.index.device) >= self.counts[:, None]
        return -behind.long()

    def scatter(self, x: Tensor) -> Tensor:
        """``[B, m, c]`` back to ``[B, n, c]`` with zeros on padding."""
        mask = self.mask.to(x.device)  # the last layer may lie on another device than the first
        rank = (mask.long().cumsum(1) - 1).clamp(min=0)
        restored = x.gather(1, rank[..., None].expand(-1, -1, x.shape[-1]))
        return restored.masked_fill(~mask[..., None], 0.0)

    def padded_positions(self, past: Tensor | int) -> Tensor:
        """``[B, n]``, the position of each column's token in its row, after ``past`` tokens per row."""
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
    """Check that positions of a caller are those that mask and cache imply, wherever there is a token.

    Raises:
        ValueError: one of them is another.
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
