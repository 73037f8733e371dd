"""How weights are updated: DeepSpeed's settings, AdamW, its learning rate."""

import math
from typing import Any

import torch
from torch import nn

from pod.modeling.model.sinks import is_constant
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs

REDUCE_BUCKET_ELEMENTS = 50_000_000
PREFETCH_ELEMENTS = 50_000_000


def deepspeed_config(args: TrainArgs) -> dict[str, Any]:
    """Settings of DeepSpeed's engine.

    `reduce_scatter` decides by which number the engine divides gradients. `loss.loss_scale` undoes that.
    """
    reduce_dtype = "fp32" if args.reduce_dtype == "float32" else "bf16"
    cuda = torch.cuda.is_available()
    offloads = {"offload_optimizer": args.offload_optimizer, "offload_param": args.offload_parameters}
    zero = {
        "stage": args.zero_stage,
        "reduce_scatter": True,
        "overlap_comm": cuda,
        "reduce_bucket_size": REDUCE_BUCKET_ELEMENTS,
        "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
    } | {name: {"device": "cpu", "pin_memory": cuda} for name, place in offloads.items() if place == "cpu"}
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        # Without the check, stages 1 and 2 would update with NaN in bfloat16.
        "bf16": {"enabled": args.dtype == "bfloat16", "check_grad_overflow": args.zero_stage < 3},
        "communication_data_type": reduce_dtype,
        "seq_parallel_communication_data_type": reduce_dtype,
        "data_types": {"grad_accum_dtype": reduce_dtype},
        "zero_optimization": zero,
        # PyTorch's AdamW updates on the CPU too: DeepSpeed's needs a compiler on every machine.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def learning_rate(step: int, args: TrainArgs) -> float:
    """Learning rate of optimizer step `step` (counted from 0).

    It warms up linearly, then falls along a cosine to `min_lr_ratio` of the peak. A resumed run needs no
    state of a scheduler.
    """
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / args.warmup_steps
    last = max(1, args.max_steps - args.warmup_steps - 1)
    progress = min(1.0, (step - args.warmup_steps) / last)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return args.learning_rate * (args.min_lr_ratio + (1 - args.min_lr_ratio) * cosine)


def make_optimizer(module: nn.Module, args: TrainArgs) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters.

    Matrices decay; vectors (norms, biases) and constant sinks do not.

    Raises:
        ValueError: nothing is trainable.
    """
    groups: dict[float, list[nn.Parameter]] = {args.weight_decay: [], 0.0: []}
    for name, one in module.named_parameters():
        if one.requires_grad:
            decays = len(bridge.shape_of(one)) >= 2 and not is_constant(name)
            groups[args.weight_decay if decays else 0.0].append(one)
    if not any(groups.values()):
        raise ValueError("no parameter is trainable: check train.method and train.lora_target_modules")
    return torch.optim.AdamW(
        [{"params": ones, "weight_decay": decay} for decay, ones in groups.items() if ones],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )
