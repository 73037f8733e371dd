"""One cache layer of a model with window attention (Beltagy et al., 2020): a ring of the most recent tokens."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from .attention import BACKENDS
from .blocked import Source, blocked_attention
from .cache_layer import CacheLayer, Step
from .config import PodConfig
from .layout import append_new, documents, is_fresh, max_length
from .stores import NATIVE, Codec

_SMALLEST_CHUNK = 64


class WindowCacheLayer(CacheLayer):
    """The last ``num_recent_tokens`` keys and values, the current token included; keys keep their rotation.

    A query at position i sees ``i - j < num_recent_tokens`` in any pass, so the result depends on no chunking.
    """

    def __init__(self, config: PodConfig, layer_idx: int, codec: Codec = NATIVE):
        super().__init__()
        self.codec = codec
        self.num_recent_tokens = config.num_recent_tokens
        self.scale = config.head_dim**-0.5
        self.groups = config.num_key_value_groups
        self.clear()

    def clear(self) -> None:
        self.keys_store = self.codec.window("keys", 0, self.num_recent_tokens)
        self.values_store = self.codec.window("values", 0, self.num_recent_tokens)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("window_keys", tensor) for tensor in self.keys_store.tensors())
        yield from (("window_values", tensor) for tensor in self.values_store.tensors())

    def select_rows(self, index: Tensor) -> None:
        self.keys_store.select_rows(index)
        self.values_store.select_rows(index)

    def predicted_nbytes(self, length: int) -> int:
        stores = self.keys_store, self.values_store
        return sum(store.predicted_nbytes(length) for store in stores if not store.is_empty)

    def settle(self, step: Step) -> None:
        if step.ends_prompt or step.is_decode:
            self.keys_store.settle(max_length(step))
            self.values_store.settle(max_length(step))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope(q), step.rope(k)
        if step.num_new == 1 and step.all_real:
            self._append(k, v, step)
            return self._decode(q, step)
        if is_fresh(step) and step.backend is not BACKENDS["reference"]:
            out = step.backend.window_attention(q, k, v, self.num_recent_tokens, doc_ids=documents(step))
            self._append(k, v, step)
            return out
        size = max(self.num_recent_tokens, _SMALLEST_CHUNK)  # a chunk costs its length times the window
        outputs = []
        for start in range(0, step.num_new, size):
            rows = slice(start, min(start + size, step.num_new))
            outputs.append(
                self._attend_chunk(q[:, :, rows], k[:, :, rows], v[:, :, rows], _part(step, start, rows.stop))
            )
        return torch.cat(outputs, dim=2)

    def _append(self, k: Tensor, v: Tensor, step: Step) -> None:
        append_new(self.keys_store, k, step)
        append_new(self.values_store, v, step)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """The window before the chunk, and the chunk."""
        keys, values, positions = k, v, step.positions
        past = int(step.past.max())
        if past:
            keys = torch.cat((self.keys_store.read(past), k), dim=2)
            values = torch.cat((self.values_store.read(past), v), dim=2)
            positions = torch.cat((self.keys_store.slot_positions(step.past), positions), dim=1)

        def visible(query: Tensor) -> Tensor:
            key, query = positions[:, None], query[..., None]
            return (key >= 0) & (key <= query) & (query - key < self.num_recent_tokens)

        source = Source(q.unflatten(1, (-1, self.groups)), keys, values, visible)
        out = blocked_attention([source], step.positions, self.scale)
        self._append(k, v, step)
        return out

    def _decode(self, q: Tensor, step: Step) -> Tensor:
        """One new token per row: the ring holds exactly its window, in an order that does not matter."""
        length = max_length(step)
        q = q.unflatten(1, (-1, self.groups)).squeeze(3) * self.scale
        logits = (q @ self.keys_store.read(length).transpose(2, 3)).to(
            torch.promote_types(q.dtype, torch.float32)
        )
        if step.uniform_past is None:
            empty = self.keys_store.slot_positions(step.lengths) < 0
            logits = logits.masked_fill(empty[:, None, None], float("-inf"))
        weights = logits.softmax(-1).to(q.dtype)
        return (weights @ self.values_store.read(length)).flatten(1, 2).unsqueeze(2)


def _part(step: Step, start: int, end: int) -> Step:
    """The pass over columns ``start … end`` of a chunk."""
    return dataclasses.replace(
        step,
        past=step.past + step.counts.clamp(max=start),
        counts=(step.counts - start).clamp(0, end - start),
        num_new=end - start,
        uniform_past=None if step.uniform_past is None else step.uniform_past + start,
    )
