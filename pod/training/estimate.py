"""What a training run will need, before it is started: memory per rank, host memory, disk, communication, time.

    python -m pod.training.estimate --config configs/llama3_8b_32k_pod.yaml --nodes 4 --gpus-per-node 8 --device h100

All figures are computed from shapes; nothing is allocated and no network is needed.
"""

from torch import nn

from pod.training.args import TrainArgs
from pod.training.loss import MEBIBYTE
from pod.training.memory import (
    BYTES,
    PREFETCH_ELEMENTS,
    REDUCE_BUCKET_ELEMENTS,
    checkpoint_disk_bytes,
    host_bytes,
    mlp_tiles,
    nvme_bytes,
    rank_tokens,
    training_bytes,
)
from pod.training.shapes import Lead, Shapes, carried_heads, open_heads

__all__ = [
    "BYTES",
    "PREFETCH_ELEMENTS",
    "REDUCE_BUCKET_ELEMENTS",
    "Shapes",
    "carried_heads",
    "checkpoint_bytes",
    "checkpoint_disk_bytes",
    "describe",
    "host_bytes",
    "mlp_tiles",
    "nvme_bytes",
    "open_heads",
    "rank_tokens",
    "training_bytes",
]


def checkpoint_bytes(module: nn.Module, dtype: str) -> int:
    """Disk bytes of one checkpoint of all ranks: master weights and two moments in fp32, plus 1 MiB of the rest."""
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return 12 * trained + MEBIBYTE


def describe(shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int, world_size: int) -> str:
    """The estimate as text for `--dry-run`."""
    parts = training_bytes(shapes, lead, args, context_length, world_size)
    dp = world_size // args.sequence_parallel_size
    rows = args.micro_batch_size * args.gradient_accumulation_steps * dp
    trained = shapes.lora_parameters(args) if args.method == "lora" else shapes.parameters
    host = host_bytes(shapes, lead, args, context_length, world_size)
    lines = [
        f"{world_size} ranks = {dp} data parallel x {args.sequence_parallel_size} sequence parallel",
        f"{rows} rows of {context_length} tokens per step = {rows * context_length:,} tokens; "
        f"{args.max_steps} steps = {rows * context_length * args.max_steps:,} tokens",
        f"{shapes.parameters:,} parameters, {trained:,} trained",
        "memory per rank:",
        *(f"  {name:<15} {_gib(value)}" for name, value in parts.items()),
        f"  {'sum':<15} {_gib(sum(parts.values()))}",
        *(["host memory per rank:"] if host else []),
        *(f"  {name:<15} {_gib(value)}" for name, value in host.items()),
        f"disk per checkpoint: {_gib(12 * trained + MEBIBYTE)}, {args.keep_last} kept, one more while writing",
    ]
    return "\n".join(lines)


def _gib(value: int) -> str:
    return f"{value / 2**30:9.3f} GiB"
