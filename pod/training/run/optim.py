"""AdamW parameter groups and the learning-rate schedule."""

import math

import torch
from torch import nn

from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs


def learning_rate(step: int, args: TrainArgs) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then a cosine to `min_lr_ratio` of the peak.

    A pure function of the step, so that a resumed run needs no scheduler state.
    """
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    last = max(1, args.max_steps - args.warmup_steps - 1)
    progress = min(1.0, (step - args.warmup_steps) / last)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return args.learning_rate * (args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine)


def make_optimizer(module: nn.Module, args: TrainArgs) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; matrices decay, vectors (norms, biases) do not.

    Raises:
        ValueError: when nothing is trainable.
    """
    groups: dict[float, list[nn.Parameter]] = {args.weight_decay: [], 0.0: []}
    for one in module.parameters():
        if one.requires_grad:
            groups[args.weight_decay if len(bridge.shape_of(one)) >= 2 else 0.0].append(one)
    if not any(groups.values()):
        raise ValueError("no parameter is trainable: check train.method and train.lora_target_modules")
    return torch.optim.AdamW(
        [{"params": ones, "weight_decay": decay} for decay, ones in groups.items() if ones],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )
