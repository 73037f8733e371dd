"""Run one decoded token per row through the decoder's layers, always in the same tensors.

``StaticStep`` has the tensors that layers share, ``StaticLayer`` computes attention with one layer's buffers,
and ``run_layers`` runs all layers with fused operations between their matrix products.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pod.kernels import fused
from pod.kernels.fused import HeadNorms, NewToken
from pod.modeling.model import decode
from pod.modeling.model.attend import Tokens
from pod.modeling.model.decode import DecodeCall
from pod.modeling.model.decoder_layer import PodAttention, PodDecoderLayer, PodMLP, RMSNorm
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.sinks import Sink

_STORED = ("keys", "window_keys", "values")
"""Names of a layer's buffers, which ``DecodeCall`` and ``NewToken`` use too."""


@dataclass
class StaticStep:
    """The tensors that all layers share when a token is decoded. They are the same in every step.

    Attributes:
        layers: one ``StaticLayer`` per decoder layer.
        past: ``[B]`` int64, tokens per row before the step.
        lengths: ``[B]`` int64, tokens per row, the new one included.
        tables: for each layer, cos and sin ``[B, d / 2]`` of the rotation at position ``past``; set for each
            step.
        sink: the constant sink of the layer that attends now, see ``Step``.
    """

    layers: list["StaticLayer"]
    past: Tensor
    tables: Sequence[tuple[Tensor, ...]] = ()
    sink: Sink | None = None

    def __post_init__(self):
        self.lengths = self.past + 1

    def place(self, past: Tensor | int) -> None:
        """Set the position of the next token, which comes behind ``past`` tokens per row."""
        if isinstance(past, Tensor):
            self.past.copy_(past)
        else:
            self.past.fill_(past)
        torch.add(self.past, 1, out=self.lengths)


class StaticLayer:
    """One layer: writes the new keys and values into the slots of the cache, and calls the decode kernel.

    Args:
        layer: the cache's layer, with slots allocated and at least one token stored.
        buffers: the logits that leads leave for their followers; the same for all layers.
        backend: ``auto`` or the name of a decode implementation.

    Attributes:
        best: the fastest operations that can run here.
        operations: the operations that run: ``best``, or the plain ones of ``fused.REFERENCE``.
    """

    def __init__(self, layer: PodCacheLayer, buffers: decode.DecodeBuffers, backend: str):
        self.layer, self.buffers, self.backend = layer, buffers, backend
        self.roles, self.kv_buffers = layer.roles, layer.kv_buffers()
        # Backends that other packages registered have no such operations, and get the fastest ones.
        is_ours = backend == "triton" or backend not in decode.RECORDABLE
        self.best = fused.choose(self._any_target(), backend if is_ours else "auto")
        self.operations = self.best

    def can_be_recorded(self) -> bool:
        """Whether the backend never waits for the device (``grouped`` does, to read the lengths)."""
        if self.backend not in ("auto", *decode.RECORDABLE):
            return False
        like = self._any_target()
        q = like.new_empty(like.shape[0], self.roles.num_heads * self.layer.groups, like.shape[3])
        lengths = torch.ones(like.shape[0], dtype=torch.long, device=q.device)
        call = DecodeCall(**self._call(q, lengths), out=q)
        chosen = decode.choose_decoder(call, self.backend)
        return any(chosen is decode.DECODERS.get(name) for name in decode.RECORDABLE)

    def _any_target(self) -> Tensor:
        """The target of the first buffer, ``[B, h, slots, d]``, for its batch, head size, dtype, device."""
        return next(iter(self.kv_buffers.values())).target

    def _call(self, q: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Arguments of ``pod_decode``, by name."""
        held = {name: self.kv_buffers[name].stored if name in self.kv_buffers else None for name in _STORED}
        return held | {
            "near": self._near(),
            "q": q,
            "lengths": lengths,
            "roles": self.roles,
            "buffers": self.buffers,
            "num_sink_tokens": self.layer.num_sink_tokens,
            "num_recent_tokens": self.layer.num_recent_tokens,
            "scale": self.layer.scale,
            "tau": self.layer.tau,
        }

    def _near(self) -> Tokens | None:
        """Keys and values of the heads that keep their windows, as tensors to read and write. None = none."""
        if not self.roles.windows:
            return None
        return Tokens(*(self.kv_buffers[name].target for name in ("near_keys", "near_values")))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: StaticStep) -> Tensor:
        """The same as ``CacheLayer.attend`` with ``m = 1``: ``[B, Hq, 1, d]``."""
        return self.attend_new(q[:, :, 0], k[:, :, 0], v[:, :, 0], None, step).unsqueeze(2)

    def attend_new(
        self, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms | None, step: StaticStep
    ) -> Tensor:
        """Norm, rotate, store and attend, for the new token of each row.

        Args:
            q: ``[B, Hq, d]``, neither normed nor rotated.
            k, v: ``[B, H, d]``.
            norms: norms of the heads. None = the model has none, or they were applied.
            step: the shared tensors.

        Returns:
            The output ``[B, Hq, d]``.
        """
        held = {name: self.kv_buffers[name].target if name in self.kv_buffers else None for name in _STORED}
        sinks = self.layer.num_sink_tokens
        target = NewToken(past=step.past, **held, num_sink_tokens=sinks, near=self._near())
        tables = step.tables[self.layer.layer_idx]
        q = self.operations.rotate_and_store(q, k, v, tables, norms, self.roles, target)
        return decode.pod_decode(**self._call(q, step.lengths), sink=step.sink, backend=self.backend)

    def flush(self, length: int) -> None:
        """Flush the buffers after a step. This happens outside of graphs, and most steps pack no token."""
        for buffer in self.kv_buffers.values():
            buffer.flush(length)


# -- whole layers --------------------------------------------------------------------------------------------

_SILU = type(ACT2FN["silu"])
_PLAIN = {
    "num_experts": 0,
    "norm_placement": "before",
    "qk_norm_across_heads": False,
    "norm_offset": 0.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
}
"""Fields of the configuration with the values that ``run_layers`` assumes."""


def obstacle(model: Any, hidden_states: Tensor) -> str | None:
    """Why ``run_layers`` cannot replace the modules' own ``forward``. None = it can.

    Linear layers are called as modules in any case, so adapters and hooks on them are no obstacle.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        return "autocast chooses dtypes"
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "forward hooks on all modules"
    if different := [name for name, value in _PLAIN.items() if getattr(model.config, name) != value]:
        return f"{different[0]} of the model"
    reasons = (_changed(*one, hidden_states.dtype) for one in _passed_over(model))
    return next((reason for reason in reasons if reason is not None), None)


def _passed_over(model: Any) -> Iterator[tuple[nn.Module, type]]:
    """The modules whose ``forward`` ``run_layers`` does not call, each with the class that it must have."""
    yield model.norm, RMSNorm
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from ((layer, PodDecoderLayer), (attention, PodAttention), (mlp, PodMLP), (mlp.act_fn, _SILU))
        norms = layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm
        yield from ((norm, RMSNorm) for norm in norms if norm is not None)


def _changed(module: nn.Module, expected: type, dtype: torch.dtype) -> str | None:
    """How a module differs from what ``run_layers`` assumes: class, hooks, dtype. None = it does not."""
    if type(module) is not expected:
        return f"{type(module).__name__} in place of {expected.__name__}"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return f"a hook on a {expected.__name__}"
    if expected is RMSNorm and module.weight.dtype != dtype:
        return f"norms in {module.weight.dtype}, hidden states in {dtype}"
    return None


def run_layers(model: Any, hidden_states: Tensor, step: StaticStep) -> Tensor:
    """All layers and the final norm for one new token per row, ``[B, 1, hidden]`` to the same shape.

    It computes the same as ``PodModel.run_layers``.
    """
    x, delta, operations = hidden_states, None, step.layers[0].operations
    for layer, static in zip(model.layers, step.layers, strict=True):
        norm = layer.input_layernorm
        x, normed = operations.add_norm(x, delta, norm.weight, norm.eps)
        attended = _attend(layer.self_attn, normed, static, step)
        norm, mlp = layer.post_attention_layernorm, layer.mlp
        x, normed = operations.add_norm(x, attended, norm.weight, norm.eps)
        delta = mlp.down_proj(operations.gate(mlp.gate_proj(normed), mlp.up_proj(normed)))
    return operations.add_norm(x, delta, model.norm.weight, model.norm.eps)[1]


def _attend(attention: PodAttention, x: Tensor, static: StaticLayer, step: StaticStep) -> Tensor:
    """The attention of one layer, with its projections: ``[B, 1, hidden]`` to the same shape."""
    assert attention.k_proj is not None and attention.v_proj is not None, "a layer without keys of its own"
    shape = x.shape[0], -1, attention.head_dim
    step.sink, sink_keys = attention.constants()
    q = attention.q_proj(x).view(shape)
    k = attention.k_proj(x).view(shape)
    if sink_keys is not None:
        k = k - sink_keys.to(k.dtype)
    v = attention.v_proj(x).view(shape)
    norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
    return attention.o_proj(static.attend_new(q, k, v, norms, step).flatten(1)[:, None])
