"""What a training run will need, before it is started: memory per rank, host memory, disk, communication, time.

    python -m pod.training.predict.estimate --config configs/llama3_8b_32k_pod.yaml --nodes 4 --gpus-per-node 8 --device h100

All figures are computed from shapes; nothing is allocated and no network is needed.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from pod.training.args import TrainArgs
from pod.training.predict.communication import Traffic, World, communication
from pod.training.predict.devices import DEVICES, Device, get_device
from pod.training.predict.memory import (
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
from pod.training.predict.shapes import Lead, Shapes, carried_heads, heads_by_role, open_heads
from pod.training.predict.step_time import EFFICIENCY, LINK_EFFICIENCY, StepTime, attention_flops, step_time
from pod.training.run.loss import MEBIBYTE
from pod.training.run.mesh import check_world_size

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


def checkpoint_bytes(module: nn.Module, dtype: str, zero_stage: int = 3) -> int:
    """Disk bytes of one checkpoint of all ranks: master weights and two moments in fp32, below stage 3 the weights too, plus 1 MiB."""
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return (12 + (BYTES[dtype] if zero_stage < 3 else 0)) * trained + MEBIBYTE


def describe(
    shapes: Shapes,
    lead: Lead,
    args: TrainArgs,
    context_length: int,
    world_size: int,
    gpus_per_node: int | None = None,
    device: Device | None = None,
    efficiency: float = EFFICIENCY,
) -> str:
    """The estimate as text.

    Args:
        gpus_per_node: ranks of a machine; None = all ranks are on one.
        device: figures for times and whether it fits; None = neither is said.
        efficiency: share of the device's peak that arithmetic reaches.

    Raises:
        ValueError: ranks that form no groups or cannot lie on such machines.
    """
    check_world_size(world_size, args.sequence_parallel_size)
    world = World(world_size, gpus_per_node or world_size)
    lines = [
        *_run_lines(shapes, args, context_length, world),
        *_plan_lines(shapes, lead, args, context_length),
        *_memory_lines(shapes, lead, args, context_length, world, device),
    ]
    traffic = communication(shapes, lead, args, context_length, world)
    if traffic:
        lines += ["communication per step, received by each rank:", *map(_traffic_line, traffic)]
    if device is not None:
        time = step_time(shapes, lead, args, context_length, world, device, efficiency)
        lines += _time_lines(time, args, context_length, world, device, efficiency)
    return "\n".join(lines)


def _run_lines(shapes: Shapes, args: TrainArgs, context_length: int, world: World) -> list[str]:
    groups = world.size // args.sequence_parallel_size
    rows = args.micro_batch_size * args.gradient_accumulation_steps * groups
    machines = f" on {world.nodes} machines" if world.nodes > 1 else ""
    return [
        f"{world.size} ranks{machines} = {groups} data parallel x {args.sequence_parallel_size} sequence parallel",
        f"{rows} rows of {context_length} tokens per step = {rows * context_length:,} tokens; "
        f"{args.max_steps} steps = {rows * context_length * args.max_steps:,} tokens",
        f"{shapes.parameters:,} parameters, {shapes.trained_parameters(args):,} trained",
    ]


def _plan_lines(shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int) -> list[str]:
    leads, follow, windows = (
        sum(map(len, heads))
        for heads in zip(*(heads_by_role(lead, layer) for layer in range(len(lead))), strict=True)
    )
    lines = []
    if follow or windows:
        lines.append(f"{leads} (layer, KV head) pairs lead, {follow} follow, {windows} keep their window")
    if args.sequence_parallel_size > 1:
        alone = attention_flops(shapes, lead, replace(args, sequence_parallel_size=1), context_length)
        waited = attention_flops(shapes, lead, args, context_length) * args.sequence_parallel_size
        lines.append(
            f"attention waits in each layer for the rank that has most to do: {waited / alone:.2f} x an even share"
        )
    return lines


def _memory_lines(
    shapes: Shapes, lead: Lead, args: TrainArgs, context_length: int, world: World, device: Device | None
) -> list[str]:
    parts = training_bytes(shapes, lead, args, context_length, world.size)
    host = host_bytes(shapes, lead, args, context_length, world.size)
    files = nvme_bytes(shapes, args, world.size)
    total = sum(parts.values())
    lines = ["memory per rank at the peak of a step:"]
    lines += [_part_line(name, value) for name, value in parts.items() if value]
    lines.append(_part_line("sum", total))
    if device is not None:
        share = total / 2**30 / device.memory_gib
        verdict = (
            "does not fit" if share > 1 else "leaves little for the allocator" if share > 0.92 else "fits"
        )
        lines.append(f"  {verdict}: {share:.0%} of {device.memory_gib:.0f} GiB ({device.name})")
    if host:
        lines += ["host memory per rank:", *(_part_line(name, value) for name, value in host.items())]
        if world.local_size > 1:
            per_machine = min(world.size, world.local_size) * sum(host.values())
            lines.append(_part_line("per machine", per_machine))
    if files:
        lines += [
            "files per rank in offload_folder:",
            *(_part_line(name, value) for name, value in files.items()),
        ]
    each = checkpoint_disk_bytes(shapes, args)
    lines.append(f"disk per checkpoint: {_gib(each)}, {args.keep_last} kept, one more while writing")
    return lines


def _part_line(name: str, value: int) -> str:
    return f"  {name:<26} {_gib(value)}"


def _traffic_line(traffic: Traffic) -> str:
    return f"  {traffic.kind:<26} {_gib(traffic.inside)} inside a machine, {_gib(traffic.between)} from other machines"


def _time_lines(
    time: StepTime, args: TrainArgs, context_length: int, world: World, device: Device, efficiency: float
) -> list[str]:
    groups = world.size // args.sequence_parallel_size
    tokens = args.micro_batch_size * args.gradient_accumulation_steps * groups * context_length
    hours = [seconds * args.max_steps / 3600 for seconds in (time.overlapped, time.sequential)]
    return [
        f"time per step on {device.name} ({device.tflops(args.dtype):g} TFLOP/s x {efficiency:g}, "
        f"{device.node_gbps:g} GB/s inside, {device.network_gbps:g} GB/s between machines, links x {LINK_EFFICIENCY:g}):",
        *(f"  {name:<26} {seconds:9.3f} s" for name, seconds in time.parts.items()),
        f"  {'step':<26} {time.overlapped:9.3f} s with traffic behind arithmetic, {time.sequential:.3f} s without",
        f"  {tokens / time.overlapped / world.size:,.0f} tokens/s per device at best; {args.max_steps} steps take "
        f"{hours[0]:,.1f} to {hours[1]:,.1f} hours, {hours[0] * world.size:,.0f} to {hours[1] * world.size:,.0f} device hours",
    ]


def _gib(value: int) -> str:
    return f"{value / 2**30:9.3f} GiB"


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: the estimate of a recipe on machines that need not be at hand."""
    options = _parser().parse_args(argv)
    from pod.recipe import load_recipe
    from pod.training.run.start_model import model_config, source_config

    try:
        recipe = load_recipe(options.config, options.set)
        _, note = source_config(recipe.model)
        config, plan = model_config(recipe.model, recipe.output_dir, recipe.explore.target_saving or 0.35)
        figures = {
            "memory_gib": options.memory_gib,
            "node_gbps": options.node_gbps,
            "network_gbps": options.network_gbps,
        }
        if options.tflops:
            figures |= {"bf16_tflops": options.tflops, "fp32_tflops": options.tflops}
        device = replace(
            get_device(options.device), **{name: value for name, value in figures.items() if value}
        )
        world_size = options.nodes * options.gpus_per_node
        text = describe(
            Shapes.from_config(config),
            plan.lead,
            recipe.train,
            recipe.data.context_length,
            world_size,
            options.gpus_per_node,
            device,
            options.efficiency,
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if note:
        print(f"note: {note}")
    if plan.provenance.get("stand_in"):
        saved = f"{plan.asymptotic_saving:.0%} of distant tokens' keys and values"
        print(f"note: no plan yet: estimated with one that saves {saved}")
    print(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="recipe (YAML)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override of the recipe"
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="ranks of a machine")
    parser.add_argument("--device", default="h100", help=f"figures of one device: {', '.join(DEVICES)}")
    parser.add_argument("--tflops", type=float, help="peak in train.dtype, instead of the device's")
    parser.add_argument("--memory-gib", type=float, help="memory of a device, instead of its own")
    parser.add_argument("--node-gbps", type=float, help="GB/s one way between devices of a machine")
    parser.add_argument("--network-gbps", type=float, help="GB/s one way per device between machines")
    parser.add_argument(
        "--efficiency", type=float, default=EFFICIENCY, help="share of the peak that is reached"
    )
    return parser


if __name__ == "__main__":
    main()
