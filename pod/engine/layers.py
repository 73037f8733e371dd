"""Decoder layers of one new token per row, over the preallocated stores of a cache; nothing asks the device for a number."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pod.engine.packed import StaticPackedStore
from pod.kernels import decode
from pod.kernels import step as step_kernels
from pod.kernels.decode_types import Call, Stored
from pod.kernels.step import HeadNorms, NewToken
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.sharing import is_followed
from pod.modeling.shipped.stores import Store, TokenStore


@dataclass
class StaticStep:
    """What the layers of one decoded token share; the same tensors in every step.

    Attributes:
        layers: one ``StaticLayer`` per decoder layer.
        past: ``[B]`` int64 tokens per row before the step.
        lengths: ``[B]`` int64 tokens per row, the new one included.
        tables: cos and sin ``[B, d]`` at ``past``; set for each step.
    """

    layers: list["StaticLayer"]
    past: Tensor
    tables: tuple[Tensor, ...] = ()

    def __post_init__(self):
        self.lengths = self.past + 1
        for layer in self.layers:
            layer.step = weakref.ref(self)  # not a cycle, which would keep the cache's tensors

    def place(self, past: Tensor | int) -> None:
        """The next token stands behind ``past`` tokens per row."""
        self.past.copy_(past) if isinstance(past, Tensor) else self.past.fill_(past)
        torch.add(self.past, 1, out=self.lengths)

    def advance(self) -> None:
        """To the token after this one."""
        self.past.add_(1)
        self.lengths.add_(1)


_HANDLES = itertools.count()
_LAYERS: weakref.WeakValueDictionary[int, "StaticLayer"] = weakref.WeakValueDictionary()


@torch.library.custom_op("pod::attend_static", mutates_args=())
def _attend_static(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, handle: int) -> Tensor:
    """A layer's attention as one opaque call. It writes into the cache, of which the compiler knows nothing: it must not copy it."""
    layer = _LAYERS[handle]
    step = layer.step()
    assert step is not None
    return layer.attend_new(q, k, v, (cos, sin), None, step)


@_attend_static.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, handle: int) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


StaticStore = TokenStore | StaticPackedStore
"""Stores that say where a token goes (``target``) and what kernels read (``stored``)."""


def static(store: Store) -> StaticStore:
    """A store of a cache that an engine serves."""
    assert isinstance(store, StaticStore)
    return store


def is_at_rest(store: Store) -> bool:
    """Whether a store holds tokens where kernels read them: one in which a prompt is running does not."""
    return not store.is_empty and not (isinstance(store, StaticPackedStore) and store.pending is not None)


class StaticLayer:
    """One layer: writes the new key and value where the cache expects them, and calls the decode kernel.

    Args:
        layer: the cache's layer, with room reserved and at least one token stored.
        buffers: what leads leave for their followers; one for all layers.
        backend: of ``pod.kernels.decode``.
    """

    def __init__(self, layer: PodCacheLayer, buffers: decode.DecodeBuffers, backend: str):
        self.layer, self.buffers, self.backend = layer, buffers, backend
        self.values = static(layer.all_values)
        self.keys = static(layer.lead_keys) if layer.leads else None
        self.window_keys = static(layer.window_keys) if layer.followers else None
        device = self.values.target.device
        followed = [h for h in layer.leads if is_followed(layer.lead, layer.layer_idx, h)]
        self.roles = decode.make_roles(layer.leads, layer.followers, followed, device)
        self.operations = step_kernels.choose(self.values.target, backend)
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
        call = Call(q, *self._stored(), lengths, self.roles, self.buffers, *windows, *numbers, q)
        return decode.choose(call, self.backend) is decode.BACKENDS["triton"]

    def _stored(self) -> tuple[Stored | None, Tensor | None, Stored]:
        """Keys, window keys (always native) and values."""
        keys = None if self.keys is None else self.keys.stored
        return keys, None if self.window_keys is None else self.window_keys.target, self.values.stored

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: StaticStep) -> Tensor:
        """As ``CacheLayer.attend`` for ``m = 1``: ``[B, Hq, 1, d]``."""
        q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
        if torch.compiler.is_compiling():
            return torch.ops.pod.attend_static(q, k, v, *step.tables, self.handle).unsqueeze(2)
        return self.attend_new(q, k, v, step.tables, None, step).unsqueeze(2)

    def attend_new(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: tuple[Tensor, ...],
        norms: HeadNorms | None,
        step: StaticStep,
    ) -> Tensor:
        """Norm, rotate, store and attend for the new token of each row: ``[B, Hq, d]`` to the same."""
        q = self.operations.rotate_and_store(q, k, v, tables, norms, self.roles, self._target(step.past))
        return decode.pod_decode(
            q,
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

    def _target(self, past: Tensor) -> NewToken:
        keys = None if self.keys is None else self.keys.target
        window_keys = None if self.window_keys is None else self.window_keys.target
        return NewToken(past, keys, window_keys, self.values.target, self.layer.num_sink_tokens)

    def settle(self, length: int) -> None:
        """Let packed stores pack, outside of any graph; nothing to do in most steps."""
        for store in (self.values, self.keys):
            if isinstance(store, StaticPackedStore):
                store.settle(length)
