"""Decoder layers of one new token per row, over the preallocated stores of a cache; nothing asks the device for a number."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pod.modeling.methods.quantized import PackedTokens
from pod.modeling.shipped import decode
from pod.modeling.shipped.decode import DecodeCall
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.packed import Stored
from pod.modeling.shipped.sharing import is_followed
from pod.modeling.shipped.stores import Store, TokenStore


@dataclass
class StaticStep:
    """What the layers of one decoded token share; the same tensors in every step.

    Attributes:
        layers: one ``StaticLayer`` per decoder layer.
        past: ``[B]`` int64 tokens per row before the step.
        rope: rotation at ``past``; set for each step.
    """

    layers: list["StaticLayer"]
    past: Tensor
    rope: Any = None

    def __post_init__(self):
        for layer in self.layers:
            layer.step = weakref.ref(self)  # not a cycle, which would keep the cache's tensors

    @property
    def lengths(self) -> Tensor:
        """``[B]`` tokens per row, the new one included."""
        return self.past + 1


_HANDLES = itertools.count()
_LAYERS: weakref.WeakValueDictionary[int, "StaticLayer"] = weakref.WeakValueDictionary()


@torch.library.custom_op("pod::attend_static", mutates_args=())
def _attend_static(q: Tensor, k: Tensor, v: Tensor, handle: int) -> Tensor:
    """A layer's attention as one opaque call. It writes into the cache, of which the compiler knows nothing: it must not copy it."""
    layer = _LAYERS[handle]
    step = layer.step()
    assert step is not None
    return layer.attend_rotated(q, k, v, step)


@_attend_static.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


StaticStore = TokenStore | PackedTokens
"""Stores that say where a token goes (``target``, ``slots_of``) and what kernels read (``stored``)."""


def static(store: Store) -> StaticStore:
    """A store of a cache that an engine serves."""
    assert isinstance(store, StaticStore)
    return store


def is_at_rest(store: Store) -> bool:
    """Whether a store holds tokens where kernels read them: one in which a prompt is running does not."""
    return not store.is_empty and not (isinstance(store, PackedTokens) and not store.is_at_rest)


class StaticLayer:
    """One layer: writes the new key and value where the cache expects them, and calls the decode kernel.

    Args:
        layer: the cache's layer, with room reserved and at least one token stored.
        buffers: what leads leave for their followers; one for all layers.
        backend: of ``pod.modeling.shipped.decode``.
    """

    def __init__(self, layer: PodCacheLayer, buffers: decode.DecodeBuffers, backend: str):
        self.layer, self.buffers, self.backend = layer, buffers, backend
        self.values = static(layer.all_values)
        self.keys = static(layer.lead_keys) if layer.leads else None
        self.window_keys = static(layer.window_keys) if layer.followers else None
        device = self.values.target.device
        followed = [h for h in layer.leads if is_followed(layer.lead, layer.layer_idx, h)]
        self.roles = decode.make_roles(layer.leads, layer.followers, followed, device)
        self.leads = torch.tensor(layer.leads, device=device)
        self.followers = torch.tensor(layer.followers, device=device)
        self.rows = torch.arange(self.values.shape[0], device=device)[:, None]
        self.step: Callable[[], StaticStep | None] = lambda: None
        self.handle = next(_HANDLES)
        _LAYERS[self.handle] = self

    def can_be_recorded(self) -> bool:
        """Whether the backend that decodes here asks the device nothing, as a CUDA graph wants it: ``grouped`` reads the lengths."""
        if self.backend not in ("auto", "triton"):
            return False
        batch, heads, _, head_dim = self.values.shape
        q = self.values.target.new_empty(batch, heads * self.layer.groups, head_dim)
        lengths = torch.ones(batch, dtype=torch.long, device=q.device)
        windows = self.layer.num_sink_tokens, self.layer.num_recent_tokens
        numbers = self.layer.scale, self.layer.tau
        call = DecodeCall(q, *self._stored(), lengths, self.roles, self.buffers, *windows, *numbers, q)
        return decode.choose_decoder(call, self.backend) is decode.DECODERS["triton"]

    def _stored(self) -> tuple[Stored | None, Tensor | None, Stored]:
        """Keys, window keys (always native) and values."""
        keys = None if self.keys is None else self.keys.stored
        return keys, None if self.window_keys is None else self.window_keys.target, self.values.stored

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: StaticStep) -> Tensor:
        """As ``CacheLayer.attend`` for ``m = 1``: ``[B, Hq, 1, d]``."""
        q, k = step.rope(q), step.rope(k)
        if torch.compiler.is_compiling():
            return torch.ops.pod.attend_static(q, k, v, self.handle)
        return self.attend_rotated(q, k, v, step)

    def attend_rotated(self, q: Tensor, k: Tensor, v: Tensor, step: StaticStep) -> Tensor:
        """Store and attend, for queries and keys that are already rotated."""
        self._write(self.values, v, None, step.past)
        if self.keys is not None:
            self._write(self.keys, k, self.leads, step.past)
        if self.window_keys is not None:
            self._write(self.window_keys, k, self.followers, step.past)
        out = decode.pod_decode(
            q[:, :, 0],
            *self._stored(),
            step.lengths,
            self.roles,
            self.buffers,
            self.layer.num_sink_tokens,
            self.layer.num_recent_tokens,
            scale=self.layer.scale,
            tau=self.layer.tau,
            backend=self.backend,
        )
        return out.unsqueeze(2)

    def settle(self, length: int) -> None:
        """Let packed stores pack, outside of any graph; nothing to do in most steps."""
        for store in (self.values, self.keys):
            if isinstance(store, PackedTokens):
                store.settle(length)

    def _write(self, store: StaticStore, x: Tensor, heads: Tensor | None, past: Tensor) -> None:
        """Put ``[B, h, 1, d]`` (of these heads; None = all) to the slot of each row's next token."""
        if heads is not None and len(heads) != x.shape[1]:
            x = x.index_select(1, heads)
        columns = torch.arange(x.shape[1], device=x.device)
        store.target[self.rows, columns, store.slots_of(past)[:, None]] = x[:, :, 0]
