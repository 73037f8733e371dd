"""Gradient norms by kind of weight, from the shares of the gradients that ZeRO leaves on each rank."""

import math
from typing import Any

import torch

from pod.training import deepspeed_bridge as bridge
from pod.training.observe.observers import Observer

GROUPS = ("embedding", "attention", "mlp", "norms", "lora")


def group_of(name: str) -> str:
    """The kind of the weight `name` of a PodForCausalLM (or of its `peft` wrapper): one of GROUPS."""
    if "lora_" in name:
        return "lora"
    if "embed_tokens" in name or "lm_head" in name or "loss_head" in name:
        return "embedding"
    if "norm" in name:  # q_norm and k_norm of an attention too
        return "norms"
    return "attention" if "self_attn" in name else "mlp"


class GradientNorms(Observer):
    """`grad_norm_<group>` of every step that is recorded: 2-norms before clipping, over all ranks.

    Each rank adds up the squares of its own shares; one all-reduce of five numbers, no gradient is gathered.
    Together they are `grad_norm`, whose square is the sum of theirs.
    """

    def __init__(self) -> None:
        self.norms: dict[str, float] = {}

    @torch.no_grad()
    def before_update(self, trainer: Any) -> None:
        self.norms = {}
        if not trainer.monitor.logs(trainer.state.step + 1):
            return
        zero = torch.zeros((), dtype=torch.float64, device=trainer.mesh.device)
        squares: dict[str, torch.Tensor] = dict.fromkeys(GROUPS, zero)
        trained = set()
        for name, parameter in trainer.engine.module.named_parameters():
            if parameter.requires_grad:
                group = group_of(name)
                trained.add(group)
                squares[group] = squares[group] + bridge.local_square(parameter, trainer.engine)
        totals = trainer.mesh.sum(torch.stack(list(squares.values())).tolist())  # waits for the device, once
        self.norms = {
            f"grad_norm_{group}": math.sqrt(total)
            for group, total in zip(squares, totals, strict=True)
            if group in trained and math.isfinite(total)
        }

    def observe(self, trainer: Any, step: int) -> dict[str, float]:
        return self.norms if step else {}
