"""Where the lead queries and keys of PoD wait for their backward: on the device, in host memory, or nowhere.

Activation checkpointing keeps the inputs of every layer until its backward: a hidden state, and the carry of lead
queries and keys that its followers read. Over all layers the carry is worth about 0.4 hidden states per layer at a
saving of 35 %. `keep` leaves it there. `offload` copies each tensor to host memory once, whatever the number of
layers that read it, and fetches it back for the backward of its block. `recompute` drops it and projects it again
from the hidden state at the lead's layer, which that layer's own checkpoint holds anyway. A window between the layers
of a block hands the carry on without reading it: its checkpoint holds an empty stand-in of the same shape.

All work through saved-tensor hooks around the checkpoint call, so that the graph and its gradients stay as they are;
the values that a layer's backward sees are the ones of its forward. In each of them the hidden states that checkpoints
keep can wait in host memory as well (`train.offload_checkpoints`): one copy each way per layer.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pod.modeling.shipped.attention import Carry, ForwardContext, next_carry
from pod.modeling.shipped.sharing import Lead, is_followed

Key = tuple[int, int]
"""Lead layer, and position in the carry: one carried tensor of a forward pass."""


def host_copy(x: Tensor) -> Tensor:
    """A copy in host memory, pinned when it comes from a GPU; ordered with the current stream, not waited for."""
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=x.is_cuda)


def device_copy(host: Tensor, device: torch.device) -> Tensor:
    """The way back. A copy on the CPU too, so that memory figures mean the same there."""
    return torch.empty_like(host, device=device, pin_memory=False).copy_(host, non_blocking=host.is_pinned())


@dataclass(eq=False)
class _Entry:
    """One carried tensor of a pass: held by the graph of the layers that read it, and gone with the last of them.

    Attributes:
        readers: layers that read it.
        reads: how many of them had their backward.
        value: the tensor on the device, from the first of these backwards to the last one.
        host: its copy in host memory, None when it is recomputed.
    """

    device: torch.device
    readers: int = 0
    reads: int = 0
    value: Tensor | None = None
    host: Tensor | None = None

    def take(self) -> Tensor:
        """The value for one more backward; the last one lets go of it."""
        value = self.value
        if value is None:
            raise RuntimeError(
                "train.carry=recompute needs the backward of a block's last layer before that of the others: take "
                "gradients of the whole model's output, or set train.carry=offload"
            )
        self.reads += 1
        if self.reads == self.readers:
            self.value, self.reads = None, 0
        return value


@dataclass(eq=False)
class _Kept:
    """A hidden state that a checkpoint keeps: on the device, or as a copy in host memory."""

    tensor: Tensor
    device: torch.device
    copied: bool
    to_device: Callable[[Tensor, torch.device], Tensor]

    def get(self) -> Tensor:
        """It on the device; what comes back from host memory lives as long as its reader wants it."""
        return self.to_device(self.tensor, self.device) if self.copied else self.tensor


@dataclass(eq=False)
class _Source:
    """How to compute the carry of a lead layer again, and for which entries."""

    layer: nn.Module
    hidden_states: _Kept
    context: ForwardContext
    entries: dict[int, _Entry]
    autocast: dict[str, Any]

    def recompute(self) -> None:
        """Fill the entries. Called on all ranks, also by those whose heads need nothing: it gathers and exchanges."""
        with torch.no_grad(), torch.autocast(**self.autocast):
            carry = lead_carry(self.layer, self.hidden_states.get(), self.context)
        for slot, entry in self.entries.items():
            entry.value = carry[slot]


@dataclass(eq=False)
class _LayerInput:
    """The hidden state that a checkpoint holds, and what must be recomputed before its layer runs again."""

    hidden_states: _Kept
    sources: list[_Source]


def lead_carry(layer: Any, hidden_states: Tensor, context: ForwardContext) -> Carry:
    """What a lead layer hands on, from its input: the same operations as in its forward, hence the same bits."""
    attention = layer.self_attn
    q, k, v = attention._project(layer.input_layernorm(hidden_states))
    if context.sequence_parallel is not None:
        q, k, v = context.sequence_parallel.to_heads(attention.layer_idx, q, k, v)
    nothing = (None,) * (2 * len(context.lead[0]))
    if attention.layout == "cla":
        return (context.rope(k), v, *nothing[2:])
    return next_carry(context.rope(q), context.rope(k), context.lead, attention.layer_idx, nothing)


def leads_that_end(lead: Sequence[Sequence[int | None]], layer_idx: int) -> list[int]:
    """Lead layers, highest first, that have a head whose last follower is this layer."""
    ends = {
        owner
        for head, owner in enumerate(lead[layer_idx])
        if owner is not None and owner != layer_idx and not is_followed(lead, layer_idx, head)
    }
    return sorted(ends, reverse=True)


@dataclass(eq=False)
class _Pass:
    """One forward pass. It holds entries weakly: the graph owns them."""

    context: Callable[[], ForwardContext | None]
    entries: weakref.WeakValueDictionary = field(default_factory=weakref.WeakValueDictionary)
    lead_inputs: dict[int, _Kept] = field(default_factory=dict)

    def entry(self, key: Key, device: torch.device) -> _Entry:
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = _Entry(device)
        return entry


class KeptCarry:
    """`train.carry=keep`, and what is common to all modes: tell which of the tensors that a checkpoint saves are the carry
    or the layer's hidden state, and which of a pass.

    Args:
        offload_inputs: keep hidden states in host memory.
        to_host: copies a tensor to host memory.
        to_device: copies it back to a device.
    """

    def __init__(
        self,
        offload_inputs: bool = False,
        to_host: Callable[[Tensor], Tensor] = host_copy,
        to_device: Callable[[Tensor, torch.device], Tensor] = device_copy,
    ):
        self.offload_inputs, self.to_host, self.to_device = offload_inputs, to_host, to_device
        self._pass = _Pass(lambda: None)

    @contextlib.contextmanager
    def saving(
        self, layer: nn.Module, hidden_states: Tensor, context: ForwardContext, carry: Carry
    ) -> Iterator[None]:
        """Around the checkpoint call of one decoder layer."""
        if not torch.is_grad_enabled():
            yield
            return
        if self._pass.context() is not context:
            self._pass = _Pass(weakref.ref(context))
        layer_idx: Any = layer.self_attn.layer_idx  # type: ignore[union-attr]
        row = context.lead[layer_idx]
        keys = {
            _identity(tensor): None if row[slot // 2] is None else (row[slot // 2], slot)
            for slot, tensor in enumerate(carry)
            if tensor is not None
        }
        input_identity = _identity(hidden_states)
        layer_input = self._layer_input(layer, self._keep(hidden_states), context, carry)

        def pack(x: Tensor) -> Any:
            identity = _identity(x)
            if identity not in keys:
                return layer_input if identity == input_identity else x
            key = keys[identity]
            if key is None:  # handed on and not read, so that any values do
                return x.new_zeros(()).expand(x.shape)
            return self._pack(self._pass.entry(key, x.device), x)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield

    def _keep(self, hidden_states: Tensor) -> _Kept:
        hidden_states = hidden_states.detach()
        held = self.to_host(hidden_states) if self.offload_inputs else hidden_states
        return _Kept(held, hidden_states.device, self.offload_inputs, self.to_device)

    def _layer_input(self, layer, kept: _Kept, context, carry: Carry) -> _LayerInput:
        return _LayerInput(kept, [])

    def _pack(self, entry: _Entry, x: Tensor) -> Any:
        return x

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Entry):
            return self._fetch(packed)
        if isinstance(packed, _LayerInput):
            for source in packed.sources:
                source.recompute()
            return packed.hidden_states.get()
        return packed

    def _fetch(self, entry: _Entry) -> Tensor:
        return entry.take()


def _identity(x: Tensor) -> tuple:
    """Equal for aliases of one tensor; hooks get a detached one. Valid while the tensor lives."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


class OffloadedCarry(KeptCarry):
    """`train.carry=offload`."""

    def _pack(self, entry: _Entry, x: Tensor) -> Any:
        if entry.host is None:
            entry.host = self.to_host(x)
        entry.readers += 1
        return entry

    def _fetch(self, entry: _Entry) -> Tensor:
        if entry.value is None:
            assert entry.host is not None, "an entry without a copy"
            entry.value = self.to_device(entry.host, entry.device)
        return entry.take()


class RecomputedCarry(KeptCarry):
    """`train.carry=recompute`.

    A lead's carry is projected again right before the backward of a layer in which one of its blocks ends, for the
    heads whose block ends there. The plan of the whole model decides, not that of this rank's heads: the projections
    gather weights (ZeRO-3) and exchange heads (Ulysses), so all ranks must do it at the same places.

    Args:
        layers: the decoder layers.
        lead: plan of the whole model, lead[layer][kv_head].
        others: as in `KeptCarry`.
    """

    def __init__(self, layers: Any, lead: Lead, **others: Any):
        super().__init__(**others)
        self.layers, self.lead = layers, lead
        self.ends = [leads_that_end(lead, layer) for layer in range(len(lead))]

    def _layer_input(self, layer, kept: _Kept, context, carry: Carry) -> _LayerInput:
        layer_idx, state = layer.self_attn.layer_idx, self._pass
        if any(layer_idx in ends for ends in self.ends):
            state.lead_inputs[layer_idx] = kept
        sources = [self._source(owner, layer_idx, context, carry) for owner in self.ends[layer_idx]]
        for owner in self.ends[layer_idx]:
            if not any(owner in ends for ends in self.ends[layer_idx + 1 :]):
                del state.lead_inputs[owner]  # from here on the graph holds it
        return _LayerInput(kept, sources)

    def _source(self, owner, layer_idx, context, carry) -> _Source:
        """Recomputation of the carry of layer `owner` for the heads whose block ends at `layer_idx`."""
        entries = {}
        for slot, tensor in enumerate(carry):
            head = slot // 2
            ends_here = not is_followed(context.lead, layer_idx, head)
            if tensor is not None and context.lead[layer_idx][head] == owner and ends_here:
                entries[slot] = self._pass.entry((owner, slot), tensor.device)
        device = self._pass.lead_inputs[owner].device.type
        autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        return _Source(self.layers[owner], self._pass.lead_inputs[owner], context, entries, autocast)

    def _pack(self, entry: _Entry, x: Tensor) -> Any:
        entry.readers += 1
        return entry


def set_carry(model: Any, mode: str, offload_checkpoints: bool = False) -> None:
    """Make a PodForCausalLM train with `train.carry` = mode; its layers must be checkpointed.

    Args:
        offload_checkpoints: let the layers' hidden states wait in host memory.

    Raises:
        ValueError: an unknown mode.
    """
    decoder = model.model
    if mode == "keep":
        decoder.carry_memory = KeptCarry(True) if offload_checkpoints else None
    elif mode == "offload":
        decoder.carry_memory = OffloadedCarry(offload_checkpoints)
    elif mode == "recompute":
        decoder.carry_memory = RecomputedCarry(
            decoder.layers, decoder.lead, offload_inputs=offload_checkpoints
        )
    else:
        raise ValueError(f"train.carry is {mode!r}, allowed are keep, offload and recompute")
