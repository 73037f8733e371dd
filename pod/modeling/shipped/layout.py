"""What a model's own attention holds in one layer: PoD (dense without a plan), cross-layer attention, a window."""

from collections.abc import Callable

import torch
from torch import Tensor

from .attend import CAUSAL, Lead, Source, Tokens, Visibility, attend, merge_heads, take_heads, takes_gradients
from .attention import is_followed, split_heads
from .config import PodConfig
from .decode import Roles, make_buffers, pod_decode
from .grouped import attend_slots
from .step import CacheLayer, Step
from .stores import NATIVE, Codec, Recent, TokenStore, take_slots


class PodCacheLayer(CacheLayer):
    """The PoD layout (paper §2.2): full keys for leads, window keys for followers, all values. A dense model is the plan in
    which every head leads.

    A lead leaves its queries and keys for its followers in ``step.lead``; when decoding, it leaves the logits of distant tokens
    instead, so that no distant key is read twice in a step.

    Attributes:
        extra_slots: see ``CacheLayer``; for the window keys of followers.
        tau: gate above which a follower's query head leaves out its distant tokens when decoding; None = never.
        capacity: tokens that stores have room for from the start, and come to rest in at once; 0 = they grow as tokens come.
    """

    is_croppable = True
    evicts = False
    tau: float | None = None
    capacity = 0

    def __init__(self, config: PodConfig, layer_idx: int, codec: Codec = NATIVE, extra_slots: int = 0):
        super().__init__()
        self.codec, self.extra_slots = codec, extra_slots
        self.layer_idx = layer_idx
        self.lead = config.sharing_plan.lead
        self.leads, self.followers = split_heads(self.lead[layer_idx], layer_idx)
        self.followed = [head for head in self.leads if is_followed(self.lead, layer_idx, head)]
        self.num_sink_tokens = config.num_sink_tokens
        self.num_recent_tokens = config.num_recent_tokens
        self.scale = config.head_dim**-0.5
        self.groups = config.num_key_value_groups
        self.clear()

    def clear(self) -> None:
        self.roles = None  # on the device of the first decoded token
        self.all_values = self.codec.tokens("values", self.evicts)
        self.lead_keys = self.codec.tokens("keys", self.evicts)
        ring = self.num_recent_tokens + self.extra_slots
        self.window_keys = self.codec.window("keys", self.num_sink_tokens, ring)
        self.reserve(self.capacity)

    def reserve(self, capacity: int) -> None:
        """Hold room for ``capacity`` tokens, so that the tensors stay where they are while it suffices."""
        self.capacity = capacity
        for store in self.stores().values() if capacity else ():
            store.reserve(capacity)

    def stores(self) -> dict[str, TokenStore]:
        stores = {"keys": self.lead_keys, "window_keys": self.window_keys, "values": self.all_values}
        return stores if self.followers else {name: stores[name] for name in ("keys", "values")}

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope.pair(q, k)
        out = self.attend_rotated(q, k, v, step)
        if self.capacity:
            self.settle(step)
        return out

    def attend_rotated(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """TokenStore and attend, for queries and keys that are already rotated."""
        append_new(self.all_values, v, step)
        if self.leads:
            append_new(self.lead_keys, take_heads(k, self.leads), step)
        if step.num_new == 1 and step.all_real and not takes_gradients(q, k, v):
            if self.followers:
                append_new(self.window_keys, take_heads(k, self.followers), step)
            return self._decode(q, step)
        for head in self.followed:
            step.lead.queries[head] = take_heads(q, [head], self.groups).clone()
            step.lead.keys[head] = take_heads(self.lead_keys.view(step.max_length), [self.leads.index(head)])
        out = self._prefill(q, k, v, step) if step.is_fresh else self._attend_chunk(q, k, step)
        if self.followers:
            append_new(self.window_keys, take_heads(k, self.followers), step)
        for head in self.followers:
            if not is_followed(self.lead, self.layer_idx, head):
                del step.lead.queries[head], step.lead.keys[head]
        return out

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """First pass over an empty cache: as without one."""
        lead = None
        if self.followers:
            lead = step.lead.take(self.followers, step.max_length)._replace(heads=tuple(self.followers))
        see = self._visibility(lead)
        return attend(q, Tokens(k, v), lead, see, step.segments, self.scale, step.backend)[0]

    def _visibility(self, lead: Lead | None) -> Visibility:
        return CAUSAL if lead is None else Visibility(self.num_sink_tokens, self.num_recent_tokens)

    def _attend_chunk(self, q: Tensor, k: Tensor, step: Step) -> Tensor:
        """Any chunk behind any past, ragged or not."""
        values, parts = self.all_values.view(step.max_length), []
        for heads, lead in ((self.leads, None), (self.followers, step.lead.take)):
            if not heads:
                continue
            if lead:  # the window before the chunk, and the chunk
                keys: Source = Recent(self.window_keys, take_heads(k, heads), step.rows)
            else:
                keys = self.lead_keys.view(step.max_length)
            taken = lead(heads, step.max_length) if lead else None
            tokens = Tokens(keys, take_heads(values, heads))
            own, see = take_heads(q, heads, self.groups), self._visibility(taken)
            out, _ = attend(own, tokens, taken, see, step.segments, self.scale, step.chunk_backend)
            parts.append((heads, out))
        return merge_heads(parts, self.groups)

    def _decode(self, q: Tensor, step: Step) -> Tensor:
        """One new token per row. Reads: lead keys, window keys, the leads' logits and values."""
        values = self.all_values.stored
        room = max(values.shape[2], step.max_length)
        if step.lead.buffers is None or step.lead.buffers.capacity < room:
            size = q.shape[0], q.shape[1] // self.groups, self.groups, q.shape[3], room
            step.lead.buffers = make_buffers(*size, q.dtype, q.device)
        if self.roles is None:
            self.roles = Roles(self.leads, self.followers, self.followed, q.device)
        keys = self.lead_keys.stored if self.leads else None
        near = self._window(step) if self.followers else None
        shared = step.lengths, self.roles, step.lead.buffers, self.num_sink_tokens, self.num_recent_tokens
        rows = [sum(row) for row in step.rows]
        out = pod_decode(q[:, :, 0], keys, near, values, *shared, scale=self.scale, tau=self.tau, rows=rows)
        return out.unsqueeze(2)

    def _window(self, step: Step) -> Tensor:
        """Window keys ``[B, h, n_s + n_r, d]`` as decoding reads them: of a larger ring, a copy."""
        held = self.window_keys.read(step.max_length)
        if not self.extra_slots:
            return held
        n_s, n_r = self.num_sink_tokens, self.num_recent_tokens
        slots = torch.arange(min(step.max_length, n_s + n_r), device=held.device)
        newest = step.lengths[:, None] - 1
        positions = newest - (newest - slots) % n_r
        ring = (n_s + (positions - n_s) % (n_r + self.extra_slots)).clamp(max=held.shape[2] - 1)
        slots = torch.where(slots < n_s, slots, ring)
        return take_slots(held, slots[:, None].expand(-1, held.shape[1], -1))


def append_new(store: TokenStore, x: Tensor, step: Step) -> None:
    """TokenStore the new tokens ``[B, h, m, d]`` of a pass."""
    if step.uniform_past is None:
        store.append_ragged(x, step.segments)
    else:
        store.append(x, step.uniform_past)


class ClaCacheLayer(PodCacheLayer):
    """Cross-layer attention (Brandon et al., 2024): the lead of a block stores, its followers read.

    Followers find their lead in ``step.layers``, so that rows can be regrouped and copied as for any other layer.
    """

    is_croppable = True

    def __init__(self, config: PodConfig, layer_idx: int, codec: Codec = NATIVE):
        super().__init__(config, layer_idx, codec)
        sources = [row[0] for row in config.sharing_plan.lead]
        self.source_layer = sources[layer_idx]
        self.is_last_of_block = sources[layer_idx + 1 : layer_idx + 2] != [self.source_layer]
        # with its keys and values in place every layer attends as a dense one
        self.lead = tuple((i,) * config.num_key_value_heads for i in range(len(sources)))
        self.leads, self.followers, self.followed = list(range(config.num_key_value_heads)), [], []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """See ``CacheLayer.attend``; a follower gets ``k`` and ``v`` of no heads."""
        if self.source_layer == self.layer_idx:
            return super().attend(q, k, v, step)
        return step.layers[self.source_layer].attend_again(step.rope(q), step)

    def attend_again(self, q: Tensor, step: Step) -> Tensor:
        """Rotated queries ``[B, Hq, m, d]`` of a follower on what this lead stored in the same pass."""
        if step.num_new == 1 and step.all_real and not takes_gradients(q):
            return self._decode(q, step)
        tokens = Tokens(self.lead_keys.view(step.max_length), self.all_values.view(step.max_length))
        return attend(q, tokens, None, CAUSAL, step.segments, self.scale, step.chunk_backend)[0]

    def settle(self, step: Step) -> None:
        """A lead's tokens come to rest when the last layer of its block has read them."""
        if self.is_last_of_block:
            PodCacheLayer.settle(step.layers[self.source_layer], step)


class WindowCacheLayer(CacheLayer):
    """Window attention (Beltagy et al., 2020): the last ``num_recent_tokens`` keys and values, the current token included;
    keys keep their rotation.

    A query at position i sees ``i - j < num_recent_tokens`` in any pass, so the result depends on no chunking.
    """

    is_croppable = True
    num_sink_tokens = 0

    def __init__(self, config: PodConfig, layer_idx: int, codec: Codec = NATIVE, num_recent_tokens: int = 0):
        super().__init__()
        self.codec = codec
        self.num_recent_tokens = num_recent_tokens or config.num_recent_tokens
        self.scale = config.head_dim**-0.5
        self.groups = config.num_key_value_groups
        self.clear()

    def clear(self) -> None:
        windows = self.num_sink_tokens, self.num_recent_tokens
        self.keys_store, self.values_store = (self.codec.window(x, *windows) for x in ("keys", "values"))

    def stores(self) -> dict[str, TokenStore]:
        return {"window_keys": self.keys_store, "window_values": self.values_store}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope.pair(q, k)
        if step.num_new == 1 and step.all_real:
            self._append(k, v, step)  # the ring is exactly the window, in an order that does not matter
            stored = self.keys_store.read(step.max_length), self.values_store.read(step.max_length)
            held = None if step.uniform_past is not None else step.lengths
            return attend_slots(q, *stored, self.scale, held)[0]
        tokens: Tokens = Tokens(k, v)
        if not step.is_fresh:
            tokens = Tokens(Recent(self.keys_store, k, step.rows), Recent(self.values_store, v, step.rows))
        see = Visibility(num_recent_tokens=self.num_recent_tokens)
        out, _ = attend(q, tokens, None, see, step.segments, self.scale, step.chunk_backend)
        self._append(k, v, step)
        return out

    def _append(self, k: Tensor, v: Tensor, step: Step) -> None:
        append_new(self.keys_store, k, step)
        append_new(self.values_store, v, step)


LAYOUT_LAYERS: dict[str, Callable[..., CacheLayer]] = {
    "pod": PodCacheLayer,
    "cla": ClaCacheLayer,
    "window": WindowCacheLayer,
}
"""``(config, layer_idx, codec) -> CacheLayer`` for each ``PodConfig.layout``."""
