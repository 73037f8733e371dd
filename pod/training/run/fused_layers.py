"""Layers of a model in training whose operations are one kernel each."""

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from pod.modeling.model.decoder_layer import PodMLP, RMSNorm, rms_norm
from pod.modeling.model.rope import rotate_whole


def fuse_layers(model: Any) -> None:
    """Let a PodForCausalLM compute norms, rotary embedding and gated activations in one kernel each.

    This holds for forward and backward. `torch.compile` compiles these functions when they are first used.
    Without it, each of their operations reads and writes all activations, and float32 copies are kept for
    backward. Values differ by rounding only.
    """
    activation = ACT2FN[model.config.hidden_act]

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    norm = torch.compile(rms_norm, dynamic=True)
    rotation = torch.compile(rotate_whole, dynamic=True)
    gate = torch.compile(gated, dynamic=True)
    model.model.rotate = lambda x, tables: rotation(x, *tables)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.norm = norm
        elif isinstance(module, PodMLP):
            module.gate = gate
