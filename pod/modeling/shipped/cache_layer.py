"""The interface between the decoder and a cache: one `Step` per forward pass, one `CacheLayer` per decoder layer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


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
        shared: what lead layers leave for their followers, by name or KV head; emptied with the step.
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
    backend: Any = None
    shared: dict = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        """``[B, m]`` position of each new token in its row."""
        return self.past[:, None] + torch.arange(self.num_new, device=self.past.device)

    @property
    def lengths(self) -> Tensor:
        """``[B]`` real tokens per row after the pass."""
        return self.past + self.counts


class CacheLayer(CacheLayerMixin):
    """One layer of a cache. A method implements ``attend``, ``settle``, ``parts``, ``select_rows``, ``clear`` and
    ``predicted_nbytes``."""

    is_compileable = False
    is_croppable = False

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

        Nothing is to be done unless ``step.ends_prompt`` or ``step.is_decode``.
        """

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that the layer holds, with the name of the part it counts towards."""
        raise NotImplementedError

    def select_rows(self, index: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    def predicted_nbytes(self, length: int) -> int:
        """Bytes that the method's rule needs for rows of ``length`` tokens, without growth slack."""
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
