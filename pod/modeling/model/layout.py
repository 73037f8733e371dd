"""Cache layers of a model's own attention: PoD, dense, windowed (``PodCacheLayer``), or cross-layer (CLA).

A dense model and window attention are PoD with a plan in which every head leads, or keeps its window.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .attend import CAUSAL, Tokens, Visibility, attend, merge_heads, take_heads, takes_gradients
from .config import PodConfig
from .decode import make_buffers, pod_decode
from .grouped import attend_slots
from .kv_buffer import KVBuffer, replaced, take_slots
from .kv_quantizer import NATIVE, KVQuantizer
from .sharing import roles_of
from .sinks import add_sink
from .step import CacheLayer, Step
from .window_buffer import Recent


class PodCacheLayer(CacheLayer):
    """One layer under a sharing plan (paper §2.2).

    It holds the keys of every token for leads, those of the window for followers, and the values of every
    token for both. For heads that keep their windows it holds sinks and recent tokens. A dense model is the
    plan in which every head leads.

    A lead leaves its queries and keys for its followers in ``step.lead``. When decoding, it leaves the logits
    of distant tokens instead, so that no distant key is read twice in a step.

    Args:
        config: the model's configuration, with its sharing plan and windows.
        layer_idx: index of the layer.
        quantizer: makes the buffers.
        extra_slots, tau: see the attributes.

    Attributes:
        extra_slots: how many tokens that left the window the rings of followers and windows still hold, so
            that as many can be taken back.
        tau: threshold on the gate. A follower's query head whose gate reaches it leaves out its distant
            tokens when decoding; see ``DecodeCall.tau``. None = never.
        capacity: how many tokens buffers have slots for from the start. With a capacity, ``attend`` calls
            ``flush`` itself, so that tokens come to rest at once. 0 = buffers grow as tokens come.
        all_values: values of every token, for leads and followers.
        lead_keys: keys of every token, for leads.
        window_keys: keys of the window, for followers.
        near_keys, near_values: keys and values of the window, for heads that keep their windows.
        skips: statistics on ``tau``, one list per row. None = they are not recorded. Each token decoded here
            adds a tuple: tokens seen, how many query heads of followers had a gate of at least ``tau``, and
            in how many KV heads all of them did. The numbers mean nothing while no token is distant.
            Recording them reads window keys twice. A decode engine records nothing.
        version: how often one of the buffers was replaced.
    """

    version = 0
    all_values: KVBuffer = replaced()
    lead_keys: KVBuffer = replaced()
    window_keys: KVBuffer = replaced()
    near_keys: KVBuffer = replaced()
    near_values: KVBuffer = replaced()
    is_croppable = True
    evicts = False
    capacity = 0
    skips: list[list[tuple[int, ...]]] | None = None

    def __init__(
        self,
        config: PodConfig,
        layer_idx: int,
        quantizer: KVQuantizer = NATIVE,
        extra_slots: int = 0,
        tau: float | None = None,
    ):
        super().__init__()
        self.quantizer, self.extra_slots, self.tau = quantizer.of_layer(layer_idx), extra_slots, tau
        self.layer_idx = layer_idx
        self.lead = config.sharing_plan.lead
        self.roles = roles_of(self.lead, layer_idx)
        self.num_sink_tokens, self.num_recent_tokens = config.windows_of(layer_idx)
        self.scale = config.head_dim**-0.5
        self.groups = config.num_key_value_groups
        self.clear()

    def clear(self) -> None:
        self.all_values = self.quantizer.tokens("values", self.evicts)
        self.lead_keys = self.quantizer.tokens("keys", self.evicts)
        windows = self.num_sink_tokens, self.num_recent_tokens + self.extra_slots
        self.window_keys = self.quantizer.window("keys", *windows)
        self.near_keys = self.quantizer.window("keys", *windows)
        self.near_values = self.quantizer.window("values", *windows)
        self.skips = None if self.skips is None else []
        self.reserve(self.capacity)

    def reserve(self, capacity: int) -> None:
        """Allocate slots for ``capacity`` tokens (0 = none). Up to so many, tensors keep their address."""
        self.capacity = capacity
        if not capacity:
            return
        for buffer in self.kv_buffers().values():
            buffer.reserve(capacity)

    def kv_buffers(self) -> dict[str, KVBuffer]:
        roles = self.roles
        found = {
            "keys": (self.lead_keys, roles.leads),
            "window_keys": (self.window_keys, roles.followers),
            "values": (self.all_values, roles.held),
            "near_keys": (self.near_keys, roles.windows),
            "near_values": (self.near_values, roles.windows),
        }
        return {name: buffer for name, (buffer, heads) in found.items() if heads}

    def versioned(self) -> tuple[Any, ...]:
        """This layer, and the objects that hold the tensors of its buffers; see ``KVBuffer.versioned``."""
        return self, *(item for buffer in self.kv_buffers().values() for item in buffer.versioned())

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.ropes[self.layer_idx].pair(q, k)
        out = self.attend_rotated(q, k, v, step)
        if self.capacity:
            self.flush(step)
        return out

    def attend_rotated(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Do what ``attend`` does, with queries and keys that are already rotated."""
        roles = self.roles
        if roles.held:
            append_new(self.all_values, take_heads(v, roles.held), step)
        if roles.leads:
            append_new(self.lead_keys, take_heads(k, roles.leads), step)
        if step.num_new == 1 and step.all_real and not takes_gradients(q, k, v):
            self._append_windows(k, v, step)
            return self._decode(q, step)
        for head in roles.followed:
            step.lead.queries[head] = take_heads(q, [head], self.groups).clone()
            step.lead.keys[head] = take_heads(self.lead_keys.view(step.max_length), [roles.leads.index(head)])
        out = self._prefill(q, k, v, step) if step.is_fresh else self._attend_chunk(q, k, v, step)
        self._append_windows(k, v, step)
        for head in roles.last:
            del step.lead.queries[head], step.lead.keys[head]
        return out

    def _append_windows(self, k: Tensor, v: Tensor, step: Step) -> None:
        """Store the new tokens ``[B, H, m, d]`` in all windows: of followers, and of heads that keep them."""
        if self.roles.followers:
            append_new(self.window_keys, take_heads(k, self.roles.followers), step)
        self._append_near(k, v, step)

    def _append_near(self, k: Tensor, v: Tensor, step: Step) -> None:
        """Store the new tokens ``[B, H, m, d]`` for heads that keep their windows."""
        if self.roles.windows:
            for buffer, x in ((self.near_keys, k), (self.near_values, v)):
                append_new(buffer, take_heads(x, self.roles.windows), step)

    @property
    def _visibility(self) -> Visibility:
        return Visibility(self.num_sink_tokens, self.num_recent_tokens)

    def _prefill(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention of the first pass over an empty cache: the same as without a cache."""
        followers = self.roles.followers
        lead = step.lead.take(followers, step.max_length) if followers else None
        options = {"scale": self.scale, "backend": step.backend, "roles": self.roles, "sink": step.sink}
        return attend(q, Tokens(k, v), lead, self._visibility, step.segments, **options)[0]

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention of a chunk when the cache holds tokens already; rows may have unequal lengths."""
        roles = filter(None, (self.roles.leads, self.roles.followers, self.roles.windows))
        return merge_heads([(heads, self._attend_role(heads, q, k, v, step)) for heads in roles], self.groups)

    def _attend_role(self, heads: Sequence[int], q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """``_attend_chunk`` for the KV heads of one role."""
        lead = step.lead.take(heads, step.max_length) if heads == self.roles.followers else None
        see = CAUSAL if heads == self.roles.leads else self._visibility
        tokens = self._tokens(heads, k, v, step)
        own = take_heads(q, heads, self.groups)
        sink = None
        if step.sink is not None and heads == self.roles.windows:
            sink = step.sink.of_heads(heads)
        options = {"scale": self.scale, "backend": step.chunk_backend, "sink": sink}
        return attend(own, tokens, lead, see, step.segments, **options)[0]

    def _tokens(self, heads: Sequence[int], k: Tensor, v: Tensor, step: Step) -> Tokens:
        """All tokens, old and new, that the heads of a role attend to with their own keys.

        The chunk ``k``, ``v`` ``[B, H, m, d]`` is read only for windows, which do not hold it yet.
        """
        k = take_heads(k, heads)
        v = take_heads(v, heads)
        roles = self.roles
        rows = step.rows
        if heads == roles.windows:
            return Tokens(Recent(self.near_keys, k, rows), Recent(self.near_values, v, rows))
        values = take_heads(self.all_values.view(step.max_length), [roles.held.index(h) for h in heads])
        if heads == roles.leads:
            return Tokens(self.lead_keys.view(step.max_length), values)
        return Tokens(Recent(self.window_keys, k, rows), values)

    def _decode(self, q: Tensor, step: Step) -> Tensor:
        """Attention of one new token per row, ``[B, Hq, 1, d]``, which all buffers hold already."""
        roles = self.roles
        values = self.all_values.stored if roles.held else None
        if step.lead.buffers is None:
            size = q.shape[0], q.shape[1] // self.groups, self.groups, q.shape[3], step.max_length
            step.lead.buffers = make_buffers(*size, q.dtype, q.device)
        keys = self.lead_keys.stored if roles.leads else None
        window_keys = self._window(self.window_keys, step) if roles.followers else None
        near = None
        if roles.windows:
            near = Tokens(*(self._window(buffer, step) for buffer in (self.near_keys, self.near_values)))
        shared = step.lengths, roles, step.lead.buffers, self.num_sink_tokens, self.num_recent_tokens
        rows = [sum(row) for row in step.rows]
        options = {"scale": self.scale, "tau": self.tau, "rows": rows, "near": near, "sink": step.sink}
        out = pod_decode(q[:, :, 0], keys, window_keys, values, *shared, **options).unsqueeze(2)
        if self.skips is not None and self.tau is not None and window_keys is not None:
            self.skips = self.skips or [[] for _ in rows]
            skipped = self._gates(q, window_keys, step) >= self.tau
            heads = skipped.sum((1, 2)).tolist()
            groups = skipped.all(2).sum(1).tolist()
            for row, *found in zip(self.skips, rows, heads, groups, strict=True):
                row.append(tuple(found))
        return out

    def _decode_near(self, q: Tensor, step: Step) -> Tensor:
        """Attention of one query per row to the windows, for the heads that keep them."""
        keys = self.near_keys.read(step.max_length)
        values = self.near_values.read(step.max_length)
        out, lse, _ = attend_slots(take_heads(q, self.roles.windows, self.groups), keys, values, self.scale)
        if step.sink is None:
            return out
        return add_sink(out, lse, *step.sink.of_heads(self.roles.windows).columns())[0]

    def _gates(self, q: Tensor, window_keys: Tensor, step: Step) -> Tensor:
        """The gates ``sigmoid(lse_P - lse_D)`` of the followers' query heads, ``[B, followers, G]``."""
        heads, buffers = self.roles.followers, step.lead.buffers
        assert buffers is not None, "made in this pass"
        own = take_heads(q, heads, self.groups)
        near = attend_slots(own, window_keys, window_keys, self.scale)[1].squeeze(2)
        return torch.sigmoid(near.unflatten(1, (len(heads), -1)) - buffers.distant_lse[:, heads])

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        if self.skips:
            self.skips = [list(self.skips[row]) for row in index.tolist()]

    def _window(self, buffer: KVBuffer, step: Step) -> Tensor:
        """A window ``[B, h, n_s + n_r, d]`` with tokens at the slots that ``pod_decode`` expects.

        With ``extra_slots``, whose rings are larger, it is a copy.
        """
        held = buffer.read(step.max_length)
        if not self.extra_slots:
            return held
        n_s, n_r = self.num_sink_tokens, self.num_recent_tokens
        slots = torch.arange(min(step.max_length, n_s + n_r), device=held.device)
        newest = step.lengths[:, None] - 1
        positions = newest - (newest - slots) % n_r
        ring = (n_s + (positions - n_s) % (n_r + self.extra_slots)).clamp(max=held.shape[2] - 1)
        slots = torch.where(slots < n_s, slots, ring)
        return take_slots(held, slots[:, None].expand(-1, held.shape[1], -1))


def append_new(buffer: KVBuffer, x: Tensor, step: Step) -> None:
    """Write the new tokens ``x`` ``[B, h, m, d]`` of a pass into a buffer, whether or not rows are alike."""
    if step.uniform_past is None:
        buffer.append_ragged(x, step.segments)
    else:
        buffer.append(x, step.uniform_past)


class ClaCacheLayer(PodCacheLayer):
    """Cross-layer attention (Brandon et al., 2024): in a block of layers, only the first stores tokens.

    The later layers have queries only, and attend to the tokens of the first one. They find it in
    ``step.layers``, so that rows can be regrouped and copied as for any other layer.

    Attributes:
        source_layer: the layer whose tokens this one reads: the first of its block.
        is_last_of_block: whether the next layer belongs to another block.
    """

    is_croppable = True

    def __init__(self, config: PodConfig, layer_idx: int, quantizer: KVQuantizer = NATIVE):
        super().__init__(config, layer_idx, quantizer)
        sources = [row[0] or 0 for row in config.sharing_plan.lead]
        self.source_layer = sources[layer_idx]
        self.is_last_of_block = sources[layer_idx + 1 : layer_idx + 2] != [self.source_layer]
        # once keys and values are in place, every layer attends as a dense one does
        self.lead = tuple((i,) * config.num_key_value_heads for i in range(len(sources)))
        self.roles = roles_of(self.lead, layer_idx)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """See ``CacheLayer.attend``. In a layer that stores nothing, ``k`` and ``v`` have no heads."""
        if self.source_layer == self.layer_idx:
            return super().attend(q, k, v, step)
        source, own = step.layers[self.source_layer], q.device
        q = step.ropes[self.layer_idx](q)
        device = source.device if step.copies else own
        if device == own:
            return source.attend_again(q, step)
        # queries and outputs move between devices, being one chunk; keys and values are all tokens seen
        return source.attend_again(q.to(device), step.on(device, ())).to(own)

    def attend_again(self, q: Tensor, step: Step) -> Tensor:
        """Attention of a later layer's queries to the tokens that this layer holds.

        Args:
            q: ``[B, Hq, m, d]``, rotated.
            step: the pass in which this layer stored its new tokens.
        """
        if step.num_new == 1 and step.all_real and not takes_gradients(q):
            return self._decode(q, step)
        tokens = Tokens(self.lead_keys.view(step.max_length), self.all_values.view(step.max_length))
        return attend(q, tokens, None, CAUSAL, step.segments, self.scale, step.chunk_backend)[0]

    def flush(self, step: Step) -> None:
        """Flush a block's buffers when its last layer has read them, so that all its layers read the same."""
        if self.is_last_of_block:
            PodCacheLayer.flush(step.layers[self.source_layer], step)


LAYOUT_LAYERS: dict[str, Callable[..., PodCacheLayer]] = {
    "pod": PodCacheLayer,
    "cla": ClaCacheLayer,
    "window": PodCacheLayer,
}
"""The class of cache layers for each ``PodConfig.layout``, made from config, layer index and quantizer."""
