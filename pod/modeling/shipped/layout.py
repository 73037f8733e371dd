"""The PoD layout of one cache layer: full keys for leads, window keys for followers, all values (paper §2.2)."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .attention import BACKENDS, attend_by_role, merge_heads, split_heads, take_heads
from .blocked import Source, blocked_attention
from .cache_layer import CacheLayer, Step
from .config import PodConfig
from .gate import skip_distant
from .packed_tokens import Packed
from .sharing import is_followed
from .stores import NATIVE, Codec, Store
from .strips import strip_attention


class PodCacheLayer(CacheLayer):
    """Keys and values of one layer. A dense model is the plan in which every head leads.

    A lead leaves its queries for its followers in ``step.shared``; when decoding, it leaves its logits instead:
    one buffer ``[B, H, G, n]`` goes from layer to layer, leads rewrite their heads, followers only the proximal
    columns, so that no distant key is read twice in a step.

    Attributes:
        tau: gate above which a follower's query head leaves out its distant tokens when decoding; None = never.
        capacity: tokens that native stores have room for from the start; 0 = they grow as tokens come.
    """

    evicts = False
    tau: float | None = None
    capacity = 0

    def __init__(self, config: PodConfig, layer_idx: int, codec: Codec = NATIVE):
        super().__init__()
        self.codec = codec
        self.layer_idx = layer_idx
        self.lead = config.sharing_plan.lead
        self.leads, self.followers = split_heads(self.lead[layer_idx], layer_idx)
        self.num_sink_tokens = config.num_sink_tokens
        self.num_recent_tokens = config.num_recent_tokens
        self.scale = config.head_dim**-0.5
        self.groups = config.num_key_value_groups
        self.clear()

    def clear(self) -> None:
        self.all_values = self.codec.tokens("values", self.evicts)
        self.lead_keys = self.codec.tokens("keys", self.evicts)
        self.window_keys = self.codec.window("keys", self.num_sink_tokens, self.num_recent_tokens)
        self.reserve(self.capacity)

    def reserve(self, capacity: int) -> None:
        """Hold room for ``capacity`` tokens, so that the tensors stay where they are while it suffices."""
        self.capacity = capacity
        for store in self._stores().values() if capacity else ():
            store.reserve(capacity)

    def _stores(self) -> dict[str, Store]:
        return {"keys": self.lead_keys, "window_keys": self.window_keys, "values": self.all_values}

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        for name, store in self._stores().items():
            yield from ((name, tensor) for tensor in store.tensors())

    def select_rows(self, index: Tensor) -> None:
        for store in self._stores().values():
            store.select_rows(index)

    def predicted_nbytes(self, length: int) -> int:
        return sum(store.predicted_nbytes(length) for store in self._stores().values() if not store.is_empty)

    def settle(self, step: Step) -> None:
        if step.ends_prompt or step.is_decode:
            for store in self._stores().values():
                store.settle(max_length(step))

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        return self.attend_rotated(step.rope(q), step.rope(k), v, step)

    def attend_rotated(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Store and attend, for queries and keys that are already rotated."""
        append_new(self.all_values, v, step)
        if self.leads:
            append_new(self.lead_keys, take_heads(k, self.leads), step)
        if step.num_new == 1 and step.all_real:
            if self.followers:
                append_new(self.window_keys, take_heads(k, self.followers), step)
            return self._decode(q, step)
        self._share_queries(q, step)
        if is_fresh(step) and step.backend is not BACKENDS["reference"]:
            out = self._prefill(q, k, v, step)
        else:
            out = self._attend_blocked(q, k, step)
        if self.followers:
            append_new(self.window_keys, take_heads(k, self.followers), step)
        self._drop_queries(step)
        return out

    def _share_queries(self, q: Tensor, step: Step) -> None:
        """Keys are shared as read now: a codec packs them when this layer settles, before its followers attend."""
        followed = [head for head in self.leads if is_followed(self.lead, self.layer_idx, head)]
        if not followed:
            return
        keys = self.lead_keys.read(max_length(step))
        for head in followed:
            index = self.leads.index(head)
            q_head = q[:, head * self.groups : (head + 1) * self.groups].clone()
            step.shared[head] = (q_head, keys[:, index : index + 1])

    def _drop_queries(self, step: Step) -> None:
        for head in self.followers:
            if not is_followed(self.lead, self.layer_idx, head):
                step.shared.pop(head)

    def _lead_queries_and_keys(self, step: Step) -> tuple[Tensor, Tensor]:
        """What this layer's followers share: ``[B, h·G, m, d]`` queries and ``[B, h, length, d]`` keys."""
        queries, keys = zip(*(step.shared[head] for head in self.followers), strict=True)
        return torch.cat(queries, dim=1), torch.cat(keys, dim=1)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """First pass over an empty cache: the training kernels on the rows as documents."""
        doc_ids = documents(step)
        heads, windows = (self.leads, self.followers), (self.num_sink_tokens, self.num_recent_tokens)
        from_step = partial(self._lead_queries_and_keys, step)
        return attend_by_role(q, k, v, heads, from_step, windows, step.backend, doc_ids)

    def _attend_blocked(self, q: Tensor, k: Tensor, step: Step) -> Tensor:
        """Any chunk behind any past, ragged or not."""
        length = max_length(step)
        parts = []

        def causal(query: Tensor) -> Tensor:
            return torch.arange(length, device=query.device) <= query[..., None]

        if self.leads:
            keys, values = self.lead_keys.read(length), take_heads(self.all_values.read(length), self.leads)
            if step.uniform_past is not None and step.backend is not BACKENDS["reference"]:
                out = strip_attention(take_heads(q, self.leads, self.groups), keys, values, self.scale)
            else:
                source = Source(self._grouped(q, self.leads), keys, values, causal)
                out = blocked_attention([source], step.positions, self.scale)
            parts.append((self.leads, out))
        if self.followers:
            sources = [self._own_source(q, k, step, length), self._distant_source(step, length)]
            parts.append((self.followers, blocked_attention(sources, step.positions, self.scale)))
        return merge_heads(parts, self.groups)

    def _grouped(self, q: Tensor, heads: list[int]) -> Tensor:
        return take_heads(q, heads, self.groups).unflatten(1, (len(heads), self.groups))

    def _own_source(self, q: Tensor, k: Tensor, step: Step, length: int) -> Source:
        """Proximal tokens with this layer's own keys: the window before the chunk, and the chunk."""
        keys, positions = take_heads(k, self.followers), step.positions
        if not self.window_keys.is_empty:
            before = self.window_keys.slot_positions(step.past)
            keys = torch.cat((self.window_keys.read(int(step.past.max())), keys), dim=2)
            positions = torch.cat((before, positions), dim=1)
        values = take_heads(self.all_values.read(length), self.followers)
        index = positions.clamp(0, length - 1)[:, None, :, None]
        values = values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))

        def proximal(query: Tensor) -> Tensor:
            key, query = positions[:, None], query[..., None]
            near = (key < self.num_sink_tokens) | (query - key < self.num_recent_tokens)
            return (key >= 0) & (key <= query) & near

        return Source(self._grouped(q, self.followers), keys, values, proximal)

    def _distant_source(self, step: Step, length: int) -> Source:
        """Distant tokens with the lead's queries and keys, and this layer's values."""
        queries, keys = self._lead_queries_and_keys(step)

        def distant(query: Tensor) -> Tensor:
            slot = torch.arange(length, device=query.device)
            return (slot >= self.num_sink_tokens) & (slot <= query[..., None] - self.num_recent_tokens)

        queries = queries.unflatten(1, (len(self.followers), self.groups))
        values = take_heads(self.all_values.read(length), self.followers)
        return Source(queries, keys, values, distant)

    def _decode(self, q: Tensor, step: Step) -> Tensor:
        """One new token per row. Reads: lead keys, window keys, the logits buffer and values."""
        length = max_length(step)
        q = q.unflatten(1, (-1, self.groups)).squeeze(3) * self.scale
        logits = self._logits_buffer(q, length, step)
        if self.leads:
            own = _scores(take_heads(q, self.leads), self.lead_keys, length)
            if step.uniform_past is None:
                behind = torch.arange(length, device=q.device) >= step.lengths[:, None]
                own = own.masked_fill(behind[:, None, None], float("-inf"))
            _put_heads(logits, self.leads, slice(0, length), own)
        if self.followers:
            own = take_heads(q, self.followers) @ self.window_keys.read(length).transpose(2, 3)
            if step.uniform_past is None:
                self._scatter_window(logits, own, step)
            else:
                for columns, slots in self._window_columns(length):
                    _put_heads(logits, self.followers, columns, own[..., slots])
        weights = logits[..., :length].softmax(-1)
        self.observe_weights(weights)
        if self.tau is not None and self.followers:
            sinks, recent = self.num_sink_tokens, self.num_recent_tokens
            skip_distant(weights, self.followers, step.lengths, sinks, recent, self.tau)
        return _weighted(weights, self.all_values, q.dtype).flatten(1, 2).unsqueeze(2)

    def observe_weights(self, weights: Tensor) -> None:
        """Attention ``[B, H, G, length]`` of one new token per row, for methods that rank tokens by it."""

    def _logits_buffer(self, q: Tensor, length: int, step: Step) -> Tensor:
        """``[B, H, G, length + 1]`` that goes from layer to layer; the last column takes what has no position."""
        logits = step.shared.get("logits")
        if logits is None or logits.shape[-1] != length + 1:
            compute = torch.promote_types(q.dtype, torch.float32)
            logits = torch.empty(*q.shape[:3], length + 1, dtype=compute, device=q.device)
            step.shared["logits"] = logits
        return logits

    def _scatter_window(self, logits: Tensor, own: Tensor, step: Step) -> None:
        """Put window logits ``[B, h, G, slots]`` to the columns of their positions, which differ by row."""
        positions = self.window_keys.slot_positions(step.lengths)
        columns = torch.where(positions < 0, logits.shape[-1] - 1, positions)[:, None, None]
        for index, head in enumerate(self.followers):
            target = own[:, index].unsqueeze(1).to(logits.dtype)
            logits[:, head : head + 1].scatter_(3, columns.expand_as(target), target)

    def _window_columns(self, length: int) -> list[tuple[slice, slice]]:
        """Pairs (columns = positions, slots of the window) after ``length`` tokens."""
        sinks, recent = self.num_sink_tokens, self.num_recent_tokens
        if length <= sinks + recent:
            return [(slice(0, length), slice(0, length))]
        wrap = (length - sinks) % recent  # ring slots before this one hold the newest `wrap` tokens
        return [
            (slice(0, sinks), slice(0, sinks)),
            (slice(length - recent, length - wrap), slice(sinks + wrap, sinks + recent)),
            (slice(length - wrap, length), slice(sinks, sinks + wrap)),
        ]


def _scores(q: Tensor, keys: Store, length: int) -> Tensor:
    """``[B, h, G, length]`` of ``q`` ``[B, h, G, d]``; packed keys are read as they are."""
    if not isinstance(stored := keys.stored, Packed):
        return q @ keys.read(length).transpose(2, 3)
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    out = q.new_empty(*q.shape[:3], length)
    stored.scores(q, out)
    return out


def _weighted(weights: Tensor, values: Store, dtype: torch.dtype) -> Tensor:
    """Sums ``[B, H, G, d]`` of all values with ``weights`` ``[B, H, G, n]``."""
    length = weights.shape[3]
    if not isinstance(stored := values.stored, Packed):
        return weights.to(dtype) @ values.read(length)
    return stored.weighted(weights, 0, length).to(dtype)


def _put_heads(logits: Tensor, heads: list[int], columns: slice, values: Tensor) -> None:
    """Write ``[B, h, G, c]`` into these heads and columns: through a view when the heads are neighbours."""
    if heads[-1] - heads[0] == len(heads) - 1:
        logits[:, heads[0] : heads[-1] + 1, :, columns] = values
    else:
        logits[:, heads, :, columns] = values.to(logits.dtype)


def append_new(store: Store, x: Tensor, step: Step) -> None:
    """Store the new tokens ``[B, h, m, d]`` of a pass."""
    if step.uniform_past is None:
        store.append_ragged(x, step.past, step.counts)
    else:
        store.append(x, step.uniform_past)


def max_length(step: Step) -> int:
    """Tokens of the longest row after the pass."""
    return int(step.lengths.max()) if step.uniform_past is None else step.uniform_past + step.num_new


def documents(step: Step) -> Tensor | None:
    """``doc_ids`` ``[B, m]`` that hide the garbage behind shorter rows; None when there is none."""
    if step.uniform_past is not None:
        return None
    return -(torch.arange(step.num_new, device=step.counts.device) >= step.counts[:, None]).long()


def is_fresh(step: Step) -> bool:
    """Whether no row has a token yet."""
    return not bool(step.past.any()) if step.uniform_past is None else step.uniform_past == 0
