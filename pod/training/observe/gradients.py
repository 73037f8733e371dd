"""Gradient norms by kind of weight, from the shares of the gradients that ZeRO leaves on each rank."""

import math
from typing import Any

import torch
from torch import nn

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
        squares: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
        trained = set()
        for name, parameter in trainer.engine.module.named_parameters():
            if parameter.requires_grad:
                group = group_of(name)
                trained.add(group)
                squares[group] += local_square(parameter, trainer.engine.optimizer)
        totals = trainer.mesh.sum(list(squares.values()))
        self.norms = {
            f"grad_norm_{group}": math.sqrt(total)
            for group, total in zip(squares, totals, strict=True)
            if group in trained and math.isfinite(total)
        }

    def observe(self, trainer: Any, step: int) -> dict[str, float]:
        return self.norms if step else {}


def local_square(parameter: nn.Parameter, optimizer: Any) -> float:
    """Sum of squares of this rank's share of a reduced gradient; 0 when it has none.

    For use between the last backward of a step and its update, under ZeRO 1, 2 and 3.
    """
    if getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False):
        # Offloaded gradients are already in host memory or on a disk; their norms were taken on the way.
        norm = optimizer.norm_for_param_grads.get(optimizer.get_param_id(parameter))
        return 0.0 if norm is None else float(norm) ** 2
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_grad

        gradient = safe_get_local_grad(parameter)
    else:
        gradient = _fragment(parameter)
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient.float(), dtype=torch.float64)) ** 2


def _fragment(parameter: Any) -> torch.Tensor | None:
    """The part of a gradient that lies in this rank's partition under ZeRO 1 and 2; None when there is none."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    address = mapping.lp_fragment_address
    if (
        gradient.numel() == parameter.numel()
    ):  # DeepSpeed's BF16_Optimizer holds the whole gradient on each rank
        gradient = gradient.narrow(0, address.start, address.numel)
    return gradient
