"""StreamingLLM (Xiao et al., 2024): first tokens as attention sinks, a window of recent tokens, nothing between.

Keys are stored before RoPE and rotated at their index *in the cache*, so that positions never exceed the window and
the input may be unbounded. The prompt is masked the same way, which makes the result independent of its chunking.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from pod.modeling.blocked import Source, blocked_attention
from pod.modeling.cache import CacheLayer, PodCache, Step
from pod.modeling.config import PodConfig
from pod.modeling.methods.base import Method, Request
from pod.modeling.rope import rotate
from pod.modeling.stores import TokenStore

_SMALLEST_CHUNK = 64


class StreamingLayer(CacheLayer):
    """Sinks and a ring of recent tokens; keys un-rotated."""

    def __init__(self, config: PodConfig, num_sink_tokens: int, num_recent_tokens: int):
        super().__init__()
        self.num_sink_tokens = num_sink_tokens
        self.num_recent_tokens = num_recent_tokens
        self.scale = config.head_dim**-0.5
        self.groups = config.num_key_value_groups
        self.clear()

    def clear(self) -> None:
        self.keys_store = TokenStore(self.num_sink_tokens, self.num_recent_tokens)
        self.values_store = TokenStore(self.num_sink_tokens, self.num_recent_tokens)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("keys", tensor) for tensor in self.keys_store.tensors())
        yield from (("values", tensor) for tensor in self.values_store.tensors())

    def select_rows(self, index: Tensor) -> None:
        self.keys_store.select_rows(index)
        self.values_store.select_rows(index)

    def predicted_nbytes(self, length: int) -> int:
        batch, heads, _, head_dim = self.values_store.data.shape
        slots = min(length, self.num_sink_tokens + self.num_recent_tokens)
        return 2 * batch * heads * slots * head_dim * self.values_store.data.element_size()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Chunk by chunk, so that a long prompt costs its length times the window."""
        size = max(self.num_recent_tokens, _SMALLEST_CHUNK)
        outputs = []
        for start in range(0, step.num_new, size):
            rows = slice(start, min(start + size, step.num_new))
            chunk = dataclasses.replace(
                step,
                past=step.past + step.counts.clamp(max=start),
                counts=(step.counts - start).clamp(0, size),
                num_new=rows.stop - start,
                shared=step.shared.setdefault(f"chunk at {start}", {}),
            )
            outputs.append(self._attend_chunk(q[:, :, rows], k[:, :, rows], v[:, :, rows], chunk))
        return torch.cat(outputs, dim=2)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        keys, values, positions = k, v, step.positions
        if not self.keys_store.is_empty:
            before = self.keys_store.slot_positions(step.past)
            keys = torch.cat((self.keys_store.data[:, :, : before.shape[1]], k), dim=2)
            values = torch.cat((self.values_store.data[:, :, : before.shape[1]], v), dim=2)
            positions = torch.cat((before, positions), dim=1)
        sources = [
            self._recent(q, keys, values, positions, step),
            self._sinks(q, keys, values, positions, step),
        ]
        out = blocked_attention(sources, step.positions, self.scale)
        for store, x in ((self.keys_store, k), (self.values_store, v)):
            store.append_ragged(x, step.past, step.counts)
        return out

    def _recent(self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, step: Step) -> Source:
        """Window tokens: only distances matter, so positions are counted from the oldest token of the window."""
        oldest = (step.past - self.num_recent_tokens).clamp(min=0)[:, None]
        queries = _turn(q, "recent queries", step, step.positions - oldest)
        keys = _turn(keys, "recent keys", step, (positions - oldest).clamp(min=0))

        def visible(query: Tensor) -> Tensor:
            key, query = positions[:, None], query[..., None]
            return (key >= self.num_sink_tokens) & (key <= query) & (query - key < self.num_recent_tokens)

        return Source(queries.unflatten(1, (-1, self.groups)), keys, values, visible)

    def _sinks(self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, step: Step) -> Source:
        """First tokens, seen from the query's index in the cache: at most ``n_s + n_r - 1``."""
        sinks = torch.arange(min(self.num_sink_tokens, positions.shape[1]), device=q.device)
        column = torch.where(
            sinks < step.past[:, None], sinks, positions.shape[1] - step.num_new + sinks - step.past[:, None]
        )
        column = column.clamp(0, positions.shape[1] - 1)
        index = column[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        keys, values = keys.gather(2, index), values.gather(2, index)
        held = positions.gather(1, column)
        last = self.num_sink_tokens + self.num_recent_tokens - 1
        queries = _turn(q, "sink queries", step, step.positions.clamp(max=last))
        keys = _turn(keys, "sink keys", step, sinks[None])

        def visible(query: Tensor) -> Tensor:
            return ((held == sinks)[:, None]) & (sinks <= query[..., None])

        return Source(queries.unflatten(1, (-1, self.groups)), keys, values, visible)


def _turn(x: Tensor, name: str, step: Step, position_ids: Tensor) -> Tensor:
    """Rotate with tables that all layers of a pass share: their positions are the same."""
    if name not in step.shared:
        step.shared[name] = step.rope.tables(position_ids)
    return rotate(x, step.shared[name])


def _build(config: PodConfig, request: Request) -> PodCache:
    num_sink_tokens = request.params["num_sink_tokens"]
    if num_sink_tokens < 0 or request.tokens <= num_sink_tokens:
        raise ValueError(
            f"streamingllm: budget = {request.tokens} must exceed num_sink_tokens = {num_sink_tokens}: raise the budget"
        )
    recent = request.tokens - num_sink_tokens
    return PodCache(
        config, lambda config, _: StreamingLayer(config, num_sink_tokens, recent), spec=request.spec
    )


METHOD = Method(
    name="streamingllm",
    paper="StreamingLLM (Xiao et al., 2024)",
    frees="keys and values of all tokens but the first and the recent ones",
    axis="selection",
    build=_build,
    parameters={"num_sink_tokens": (4, "first tokens that are always kept (tokens)")},
    takes_budget=True,
    refuses={"pod": "a window has no distant token whose keys a block could share"},
)
