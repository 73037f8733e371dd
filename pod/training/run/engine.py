"""The DeepSpeed engine of a run: its settings, and what a model keeps for its backward."""

from typing import Any

import torch

from pod.training.args import TrainArgs
from pod.training.run.carry import set_carry

REDUCE_BUCKET_ELEMENTS = 50_000_000
PREFETCH_ELEMENTS = 50_000_000


def gradient_scale(args: TrainArgs, mesh: Any) -> float:
    """What a rank's loss must be multiplied by so that the gradients that DeepSpeed averages become sums.

    With `reduce_scatter`, stage 3 divides by the number of ranks (`stage3.py`, `__avg_scatter_grads`), stages 1 and 2 by
    the number of ranks over the sequence-parallel size (`stage_1_and_2.py`, `average_tensor`). Micro-batches are summed.
    """
    return float(mesh.world_size if args.zero_stage == 3 else mesh.dp_size)


def deepspeed_config(args: TrainArgs) -> dict[str, Any]:
    """The engine's settings. `reduce_scatter` fixes the scale of gradients, see `gradient_scale`."""
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
        # stages 1 and 2 would update with NaN in bfloat16 without the check
        "bf16": {"enabled": args.dtype == "bfloat16", "check_grad_overflow": args.zero_stage < 3},
        "communication_data_type": reduce_dtype,
        "seq_parallel_communication_data_type": reduce_dtype,
        "data_types": {"grad_accum_dtype": reduce_dtype},
        "zero_optimization": zero,
        # PyTorch's own AdamW updates there too: DeepSpeed's needs a compiler on every machine
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def save_activations(model: Any, args: TrainArgs, row_length: int) -> None:
    """Set what a PodForCausalLM keeps for its backward: checkpoints, carry, feed-forward tiles.

    Args:
        row_length: tokens of the longest row over all ranks of a sequence-parallel group.
    """
    if args.gradient_checkpointing == "full":
        # The first name is transformers' newer one; both checkpoint without re-entering autograd.
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    set_carry(model, args.carry, args.offload_checkpoints)
    for layer in model.model.layers:
        layer.mlp.train_tiles = args.mlp_tiles(row_length)
