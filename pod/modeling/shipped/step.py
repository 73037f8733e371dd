"""The interface between the decoder and a cache: one `Step` per forward pass, one `CacheLayer` per decoder layer."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .attend import Lead, Segments, Source, span, takes_gradients
from .decode import DecodeBuffers
from .integrity import check_tokens
from .stores import RaggedRows


@dataclass
class Selection:
    """What a lead that holds chosen tokens leaves for its followers in a pass.

    Attributes:
        positions: ``[B, n]``, ascending.
        scored: when decoding, logits ``[B, G, n]`` and which tokens ``[B, n]`` are proximal.
        kept: slots ``[B, w]`` that the lead chose when the prompt ended; None = all.
        reach: how many of the first and of the last tokens are proximal for the next query, in any row.
    """

    positions: Tensor
    scored: tuple[Tensor, Tensor] | None = None
    kept: Tensor | None = None
    reach: tuple[int, int] = (0, 0)


@dataclass
class LeadState:
    """What the leads of a pass leave for the layers that follow them, by KV head.

    Attributes:
        queries: ``[B, G, m, d]``; keys: ``[B, 1, n, d]``, as they were when the lead attended.
        buffers: when decoding, the logits of distant tokens and what belongs to them.
        selections: where leads choose the tokens of their blocks.
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Source] = field(default_factory=dict)
    buffers: DecodeBuffers | None = None
    selections: dict[int, Selection] = field(default_factory=dict)

    def take(self, heads: Sequence[int], length: int) -> Lead:
        """The lead queries and keys of these KV heads and ``length`` tokens, for all heads of a call."""
        tensors = [span(self.keys[head], 0, length) for head in heads]
        return Lead(torch.cat([self.queries[head] for head in heads], 1), torch.cat(tensors, 1))


@dataclass
class Step:
    """What the layers of a cache share during one pass over new tokens.

    Attributes:
        layers: the cache's layers; in a group of rows, the group's layers.
        past: ``[B]`` real tokens per row before the pass; ``counts`` ``[B]`` real tokens fed by it.
        num_new: ``m``, width of the left-aligned chunk (rows with fewer tokens end in garbage).
        columns: columns of the pass as the caller fed them, padding included.
        uniform_past: the common value of ``past`` when all rows agree and every row feeds ``m`` tokens, else None.
        ends_prompt: whether the prompt, or a chunk after which the method compresses, is complete after this pass.
        all_real: whether no row feeds padding in this pass.
        is_decode: one new token behind a non-empty cache, outside an announced prompt.
        starts: ``[B]`` column of the pass at which each row's first token of this piece stands; None = the whole pass.
        schedule, chunk_index, is_last_chunk: the method's chunks of this prompt, the one being fed, and whether it
            is the prompt's last; None, 0, True for methods that do not chunk.
        rope, backend: set by the model.
        lead: what lead layers leave for their followers.
        groups: the passes of groups of rows, with the rows ``[b]`` of each.
        sizes: tokens that every layer keeps, where the first layer that asks decides for all.
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
    rope: Any = None
    backend: str = "auto"
    lead: LeadState = field(default_factory=LeadState)
    groups: list[tuple["Step", Tensor]] = field(default_factory=list)
    sizes: Sequence | None = None

    @property
    def positions(self) -> Tensor:
        """``[B, m]`` position of each new token in its row."""
        return self.past[:, None] + torch.arange(self.num_new, device=self.past.device)

    @property
    def lengths(self) -> Tensor:
        """``[B]`` real tokens per row after the pass."""
        return self.past + self.counts

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """``(past, counts)`` of every row; read from the device once in a pass."""
        if self.uniform_past is not None:
            return [(self.uniform_past, self.num_new)] * self.past.shape[0]
        return list(zip(self.past.tolist(), self.counts.tolist(), strict=True))

    @cached_property
    def segments(self) -> Segments:
        """What every row holds and gets, for ``attend``."""
        return Segments.of_rows(*zip(*self.rows, strict=True), device=self.past.device)

    @cached_property
    def ragged(self) -> RaggedRows:
        """The same for stores, when rows differ."""
        return RaggedRows(self.rows, self.past.device)

    @property
    def max_length(self) -> int:
        """Tokens of the longest row after the pass."""
        return max(sum(row) for row in self.rows)

    @property
    def is_fresh(self) -> bool:
        """Whether no row has a token yet."""
        return not any(past for past, _ in self.rows)

    @property
    def chunk_backend(self) -> str:
        """What attends behind a past: backends for whole sequences only leave it to ``auto``."""
        return self.backend if self.is_fresh or self.backend == "reference" else "auto"

    def merging_backend(self, *tensors: Tensor) -> str:
        """What attends parts of one softmax: where a gradient is taken, one whose log-sum-exps have gradients."""
        return "reference" if self.backend == "reference" or takes_gradients(*tensors) else "auto"


class CacheLayer(CacheLayerMixin):
    """One layer of a cache. A method implements ``attend``, ``clear`` and ``stores``, and ``settle`` if it compresses."""

    is_compileable = False
    is_croppable = False
    """Whether tokens can be taken back; every class says so for itself, as ``crop`` knows nothing of what it adds."""
    extra_slots = 0
    """Tokens that a ring holds behind its window, so that as many can be taken back."""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_croppable = vars(cls).get("is_croppable", False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Store the new tokens and attend.

        Args:
            q: ``[B, Hq, m, d]``; k, v: ``[B, H, m, d]``; none of them rotated.
            step: positions, rotation and what lead layers share.

        Returns:
            ``[B, Hq, m, d]``.
        """
        raise NotImplementedError

    def settle(self, step: Step) -> None:
        """Compress: called after ``attend``, and with ``num_new`` 0 when a prompt ends without a new token of these rows.

        Nothing is to be done unless ``step.ends_prompt`` or ``step.is_decode``; then stores come to rest.
        """
        if step.ends_prompt or step.is_decode:
            for store in self.stores().values():
                store.settle(step.max_length)

    def stores(self) -> dict[str, Any]:
        """Every store that the layer has, by the name of the part that it counts towards."""
        return {}

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the layer holds, with the name of the part it counts towards."""
        for name, store in self.stores().items():
            yield from ((name, tensor) for tensor in store.tensors())

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        for store in self.stores().values():
            store.select_rows(index)

    def most_croppable(self, length: int, longest: int) -> int:
        """How many of the last tokens of rows of ``length`` can be taken back.

        Args:
            longest: tokens that the rows had before a ``crop``, which have been written over older ones.
        """
        if not self.is_croppable:
            return 0
        most = length
        for store in self.stores().values():
            if not store.is_empty:
                most = min(most, store.num_croppable)
                if store.has_window and longest > store.used_slots(longest):
                    most = min(most, length + self.extra_slots - longest)
        return most

    def most_ahead(self, length: int) -> int:
        """How many tokens behind the next one can be fed in a pass and taken back, as if they never came; -1 = never again."""
        most = min(store.num_ahead for store in self.stores().values()) - 1
        for store in self.stores().values():
            if store.has_window:
                room = store.used_slots(sys.maxsize) - length - 1
                most = min(most, max(room, self.extra_slots or -1))
        return most

    def crop(self, length: int) -> None:
        """Forget the tokens behind the first ``length`` of each row."""
        for store in (
            self.stores().values() if self.is_croppable else ()
        ):  # else there is nothing to take back
            if not store.is_empty:
                store.crop(length)

    def check_integrity(self, where: str, lengths: Tensor | None) -> None:
        """Raise ``AssertionError`` unless the stores hold rows of ``lengths`` ``[B]`` tokens; what a method drops is its own."""
        for name, store in self.stores().items():
            held = {tensor.shape[0] for tensor in store.tensors()}
            if lengths is None:
                assert not held, f"{where}: {name} of an empty cache"
            elif self.is_croppable:
                check_tokens(store, lengths, f"{where}: {name}")
            else:
                assert held <= {len(lengths)}, f"{where}: {name} holds {held} rows, the cache {len(lengths)}"

    def predicted_nbytes(self, length: int) -> int:
        """Bytes that the method's rule needs for rows of ``length`` tokens, without growth slack."""
        return sum(store.predicted_nbytes(length) for store in self.stores().values() if not store.is_empty)

    def clear(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    # What transformers asks of a layer; the bookkeeping of lengths is the cache's.
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise ValueError("PoD caches are filled by PodModel.forward only")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise ValueError(
            "PoD caches attend themselves: they work with PodForCausalLM, not with a stock model"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise ValueError("PoD models build no attention mask")

    def get_seq_length(self) -> int:
        raise ValueError("ask the cache, not a layer, for its length")

    def get_max_length(self) -> int:
        return -1
