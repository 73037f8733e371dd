"""Decoder layers for one token per row in few launches: what the modules compute, with all that stands between products fused."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pod.engine.layers import StaticLayer, StaticStep
from pod.kernels.step import HeadNorms
from pod.modeling.shipped.attention import PodAttention
from pod.modeling.shipped.llama import PodDecoderLayer, PodMLP
from pod.modeling.shipped.norm import RMSNorm

_SILU = type(ACT2FN["silu"])


def obstacle(model: Any, hidden_states: Tensor) -> str | None:
    """Why the layers must run as their modules' own ``forward``; None when they need not.

    Linear layers are called as modules: adapters and hooks on them do not matter.
    """
    if torch.compiler.is_compiling():
        return "a compiler fuses what it sees"
    if torch.is_autocast_enabled(hidden_states.device.type):
        return "autocast chooses dtypes"
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "forward hooks on all modules"
    if getattr(model, "on_attention", None) is not None:
        return "on_attention looks at every layer"
    reasons = (_changed(*one, hidden_states.dtype) for one in _passed_over(model))
    return next((reason for reason in reasons if reason is not None), None)


def _passed_over(model: Any) -> Iterator[tuple[nn.Module, type]]:
    """Modules whose ``forward`` is not called, each with the class that it must have."""
    yield model.norm, RMSNorm
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from ((layer, PodDecoderLayer), (attention, PodAttention), (mlp, PodMLP), (mlp.act_fn, _SILU))
        norms = layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm
        yield from ((norm, RMSNorm) for norm in norms if norm is not None)


def _changed(module: nn.Module, expected: type, dtype: torch.dtype) -> str | None:
    if type(module) is not expected:
        return f"{type(module).__name__} in place of {expected.__name__}"
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return f"a hook on a {expected.__name__}"
    if expected is RMSNorm and module.weight.dtype != dtype:
        return f"norms in {module.weight.dtype}, hidden states in {dtype}"
    return None


def run_layers(model: Any, hidden_states: Tensor, step: StaticStep) -> Tensor:
    """As ``PodModel.run_layers`` with ``step``: ``[B, 1, hidden]`` to the same, final norm included."""
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
    """``[B, 1, hidden]`` to the same."""
    assert attention.k_proj is not None and attention.v_proj is not None, "a layer without keys of its own"
    shape = x.shape[0], -1, attention.head_dim
    q, k, v = (project(x).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
    return attention.o_proj(static.attend_new(q, k, v, step.tables, norms, step).flatten(1)[:, None])
