"""Where the lead queries and keys of PoD wait for their backward: on the device, in host memory, or nowhere.

A layer with leads hands their queries and keys on to the layers that follow: these tensors are `shared_qk`.
Activation checkpointing keeps the inputs of every layer until its backward: a hidden state, and `shared_qk`.
At a saving of 35 %, `shared_qk` takes as much memory as about 0.4 hidden states per layer.

- `keep` leaves `shared_qk` on the device.
- `offload` copies each tensor to host memory once, whatever the number of layers that read it. It fetches the
  tensor back for the backward of its block.
- `recompute` projects `shared_qk` again, from the hidden state of the lead's layer. That layer's own
  checkpoint holds this state anyway.

A head with a window inside a block hands `shared_qk` on without reading it. The checkpoint of its layer
therefore holds a placeholder that takes no memory.

All modes work through saved-tensor hooks around the checkpoint call. The graph, the gradients and the values
that a backward sees do not change. Hidden states can wait in host memory as well
(`train.offload_checkpoints`), with one copy each way per layer.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pod.modeling.model.decoder_layer import ForwardContext, SharedQKTensors, next_shared_qk
from pod.modeling.model.sharing import Lead, is_followed, roles_of

Getter = Callable[[], Tensor]
"""A function that returns a tensor which a checkpoint kept; the tensor is on the device."""


def host_copy(x: Tensor) -> Tensor:
    """A copy in host memory, pinned when it comes from a GPU.

    The copy is ordered with the current stream; nothing waits for it.
    """
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    return host.copy_(x, non_blocking=x.is_cuda)


def device_copy(host: Tensor, device: torch.device) -> Tensor:
    """A copy of `host` on `device`: the way back from `host_copy`.

    On the CPU it is a copy too, so that memory figures mean the same there.
    """
    return torch.empty_like(host, device=device, pin_memory=False).copy_(host, non_blocking=host.is_pinned())


def lead_shared_qk(layer: Any, hidden_states: Tensor, context: ForwardContext) -> SharedQKTensors:
    """The `shared_qk` that a layer with leads hands on, computed from the layer's input `[B, n, hidden]`.

    The operations are the same as in the layer's forward, so the bits are the same.
    """
    attention = layer.self_attn
    q, k, v = attention._project(layer.attention_input(hidden_states))
    if context.sequence_parallel is not None:
        q, k, v = context.sequence_parallel.to_heads(attention.layer_idx, q, k, v)
    nothing = (None,) * (2 * len(context.lead[0]))
    rope = context.ropes[attention.layer_idx]
    if attention.layout == "cla":
        return (rope(k), v, *nothing[2:])
    return next_shared_qk(rope(q), rope(k), context.lead, attention.layer_idx, nothing)


def leads_that_end(lead: Lead, layer_idx: int) -> list[int]:
    """Lead layers that have a head whose last follower is this layer, highest first."""
    ends = {lead[layer_idx][head] or 0 for head in roles_of(lead, layer_idx).last}
    return sorted(ends, reverse=True)


@dataclass(eq=False)
class _Entry:
    """What is known of one tensor of `shared_qk`.

    The autograd graphs of the layers that read the tensor hold this entry. It is freed with the last of them.
    """

    storage: StorageWeakRef  # while this reference lives, no other tensor gets the same `_identity`
    host: Tensor | None = None  # its copy in host memory
    value: Tensor | None = None  # on the device, from the first backward of its readers to the last
    readers: int = 0  # layers that read the tensor
    reads: int = 0  # readers that had their backward

    def take(self) -> Tensor:
        """The value for the backward of one more reader. After the last reader it is no longer held here."""
        value = self.value
        if value is None:
            raise RuntimeError(
                "train.shared_qk=recompute needs a backward pass that begins at the model's output: take "
                "gradients of the whole output, or set train.shared_qk=offload"
            )
        self.reads += 1
        if self.reads == self.readers:
            self.value, self.reads = None, 0
        return value


def _identity(x: Tensor) -> tuple:
    """A key that is equal for all aliases of one tensor, while the tensor's storage is referred to.

    Hooks get an alias: a detached tensor.
    """
    # Strides are left out: a view may have another stride in a dimension of one element.
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.dtype


class KeptSharedQK:
    """`train.shared_qk=keep`, and what is common to all modes.

    It tells which of the tensors that a checkpoint saves are `shared_qk`, and which is the layer's hidden
    state.

    Args:
        offload_inputs: keep hidden states in host memory.
    """

    def __init__(self, offload_inputs: bool = False):
        self.offload_inputs, self.to_host, self.to_device = offload_inputs, host_copy, device_copy
        self._entries: weakref.WeakValueDictionary[tuple, _Entry] = weakref.WeakValueDictionary()

    @contextlib.contextmanager
    def saving(
        self, layer: nn.Module, hidden_states: Tensor, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> Iterator[None]:
        """Use it around the checkpoint call of one decoder layer; the arguments are those of the layer."""
        if not torch.is_grad_enabled():
            yield
            return
        row = context.lead[layer.self_attn.layer_idx]  # type: ignore[union-attr, index]
        is_read = {
            _identity(x): row[slot // 2] is not None for slot, x in enumerate(shared_qk) if x is not None
        }
        input_identity = _identity(hidden_states)
        layer_input = self._layer_input(layer, hidden_states.detach(), context, shared_qk)

        def pack(x: Tensor) -> Tensor | Getter:
            identity = _identity(x)
            if identity not in is_read:
                return layer_input if identity == input_identity else x
            if is_read[identity]:
                return self._pack(x)
            return x.new_zeros(()).expand(x.shape)  # the layer hands it on unread: any values will do

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x if isinstance(x, Tensor) else x()):
            yield

    def _layer_input(self, layer: Any, hidden_states: Tensor, *others: Any) -> Getter:
        """What a checkpoint keeps instead of the layer's hidden state: a function that gives it back."""
        if not self.offload_inputs:
            return lambda: hidden_states
        host, device = self.to_host(hidden_states), hidden_states.device
        return lambda: self.to_device(host, device)

    def _pack(self, x: Tensor) -> Tensor | Getter:
        """What a checkpoint keeps instead of a tensor of `shared_qk` that its layer reads."""
        return x

    def _entry(self, x: Tensor) -> _Entry:
        """The entry of a tensor of `shared_qk`, which is made when it is first asked for."""
        return self._entries.setdefault(_identity(x), _Entry(StorageWeakRef(x.untyped_storage())))


class OffloadedSharedQK(KeptSharedQK):
    """`train.shared_qk=offload`.

    A tensor of `shared_qk` is copied to host memory when its first reader is checkpointed. It comes back for
    the first backward of its readers, and is on the device until the last one.
    """

    def _pack(self, x: Tensor) -> Getter:
        entry = self._entry(x)
        if entry.host is None:
            entry.host = self.to_host(x)
        host, device = entry.host, x.device
        entry.readers += 1

        def fetch() -> Tensor:
            if entry.value is None:
                entry.value = self.to_device(host, device)
            return entry.take()

        return fetch


class RecomputedSharedQK(KeptSharedQK):
    """`train.shared_qk=recompute`.

    A lead's `shared_qk` is projected again right before the backward of a layer in which one of its blocks
    ends, for the heads whose block ends there.

    Args:
        lead: the plan of the whole model, not that of this rank's heads. The projections gather weights
            (ZeRO-3) and exchange heads (Ulysses), so all ranks must make them in the same layers.
    """

    def __init__(self, layers: Any, lead: Lead, offload_inputs: bool = False):
        super().__init__(offload_inputs)
        self.layers = layers
        self.ends = [leads_that_end(lead, layer) for layer in range(len(lead))]
        self._lead_inputs: dict[int, Getter] = {}

    def _layer_input(
        self, layer: Any, hidden_states: Tensor, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> Getter:
        index = layer.self_attn.layer_idx
        get = super()._layer_input(layer, hidden_states, context, shared_qk)
        if any(index in ends for ends in self.ends):
            self._lead_inputs[index] = get
        device = hidden_states.device.type
        again = [self._again(owner, index, context, shared_qk, device) for owner in self.ends[index]]
        for owner in self.ends[index]:
            if not any(owner in ends for ends in self.ends[index + 1 :]):
                del self._lead_inputs[owner]  # no later layer asks for it: from here on, the graph holds it

        def get_after_recomputing() -> Tensor:
            for recompute in again:
                recompute()
            return get()

        return get_after_recomputing

    def _again(
        self, owner: int, index: int, context: ForwardContext, shared_qk: SharedQKTensors, device: str
    ) -> Callable[[], None]:
        """A function that computes layer `owner`'s part again, for heads whose block ends at `index`."""
        entries = {
            slot: self._entry(x)
            for slot, x in enumerate(shared_qk)
            if x is not None
            and context.lead[index][slot // 2] == owner
            and not is_followed(context.lead, index, slot // 2)
        }
        layer = self.layers[owner]
        get = self._lead_inputs[owner]
        enabled = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device)

        def recompute() -> None:
            with torch.no_grad(), torch.autocast(device, dtype, enabled):
                values = lead_shared_qk(layer, get(), context)
            for slot, entry in entries.items():
                entry.value = values[slot]

        return recompute

    def _pack(self, x: Tensor) -> Getter:
        entry = self._entry(x)
        entry.readers += 1
        return entry.take


def set_shared_qk_memory(model: Any, mode: str, offload_checkpoints: bool = False) -> None:
    """Make a PodForCausalLM train with `train.shared_qk` = mode; its layers must be checkpointed.

    Args:
        offload_checkpoints: let the hidden states of the checkpoints wait in host memory.
    """
    decoder = model.model
    if mode == "recompute":
        decoder.shared_qk_memory = RecomputedSharedQK(decoder.layers, decoder.lead, offload_checkpoints)
    elif mode == "offload":
        decoder.shared_qk_memory = OffloadedSharedQK(offload_checkpoints)
    else:
        decoder.shared_qk_memory = KeptSharedQK(True) if offload_checkpoints else None
