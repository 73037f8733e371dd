"""The parallel layout of a training: choose the fastest one that fits, and describe it as text.

The choice is made by the estimates of memory, traffic and time. The text is a table (`table`), which a run
prints at its start. `--dry-run` also shows the parts of its sums (`details`).

A recipe fixes the tokens per step, so that every layout reads the same rows in the same order under the same
schedule. Fields that the recipe leaves null are derived here; fields that it pins are kept. Of the layouts
that take at most `NEAR` times as long as the fastest one, the simplest is taken. Nothing depends on chance,
so all ranks come to the same layout.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pod.modeling.model import flash_version
from pod.modeling.model.sharing import Lead, roles_of
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict.attention_backend import attention_backend
from pod.training.predict.memory_estimate import (
    Parts,
    TrainingJob,
    World,
    checkpoint_disk_bytes,
    host_bytes,
    start_bytes,
    training_bytes,
)
from pod.training.predict.reserve import reserve
from pod.training.predict.shapes import Shapes, shared_qk_heads
from pod.training.predict.step_time import (
    CPU_CORE,
    DEVICES,
    LINK_EFFICIENCY,
    Device,
    StepTime,
    bfloat16_speed,
    known_device,
    rank_attention_flops,
    step_time,
)
from pod.training.run.mesh import check_world_size, local_world_size, planned_world_size
from pod.training.run.run_control import MOST_LOST, work_at_risk
from pod.training.run.ulysses import kv_head_repeats
from pod.units import GIB

# Share of a GPU's memory that may be used, with the reserve; 5 % are for gaps in the allocator's segments.
FIT = 0.95
FIT_CPU = 0.92  # share of a CPU's memory that may be used; other processes need memory too
# Share of a machine's memory that offloading may take; 10 % are for processes, pinning and the page cache.
HOST_SHARE = 0.9
NEAR = 1.02  # a simpler layout may take so many times as long as the fastest one
MOST_MICRO_BATCH = 8  # rows; larger micro-batches are tried only where no smaller one is possible
TILES = (0, 16_384, 4096)  # the values of mlp_tile_tokens that are tried
DERIVED = tuple(name for name in TrainArgs.__annotations__ if name != "max_steps")
"""Fields of section `train` that are derived where a recipe leaves them null."""


@dataclass(frozen=True)
class Machine:
    """Where a run takes place.

    Attributes:
        world: number of ranks and machines.
        device: the device of one rank, with its `memory_gib`.
        host_gib: memory of one machine.
    """

    world: World
    device: Device
    host_gib: float

    @property
    def has_gpu(self) -> bool:
        return self.device.name != CPU_CORE.name


@dataclass(frozen=True)
class ParallelLayout:
    """A layout and what it needs.

    Attributes:
        job: the job, with nothing left to derive.
        machine: where it would run.
        time: of one step.
        pinned: names of the fields that the recipe fixed.
    """

    job: TrainingJob
    machine: Machine
    time: StepTime
    pinned: frozenset[str]

    @cached_property
    def memory(self) -> Parts:
        """Bytes of one rank on its device at the peak of a step, by part."""
        return training_bytes(self.job)

    @cached_property
    def host(self) -> Parts:
        """Bytes of one rank in host memory, by part."""
        return host_bytes(self.job)

    @property
    def needed_bytes(self) -> int:
        """Most bytes of one rank on its device, at the start or at the peak of a step."""
        return max(start_bytes(self.job), sum(self.memory.values()))

    @cached_property
    def reserve(self) -> Parts:
        """Bytes of one rank on its device beside all tensors, by part: fixed figures, see `reserve.py`."""
        return reserve(self.job.args, self.job.world, self.machine.has_gpu)

    @property
    def share(self) -> float:
        """Share of the device's memory that is needed, with the reserve."""
        return (self.needed_bytes + sum(self.reserve.values())) / GIB / self.machine.device.memory_gib

    @property
    def limit(self) -> float:
        """The largest `share` that still fits."""
        return FIT if self.machine.has_gpu else FIT_CPU

    @property
    def host_bytes_per_machine(self) -> int:
        """Bytes of all ranks of one machine in its host memory, for offloading."""
        return sum(self.host.values()) * self.machine.world.per_machine

    @property
    def fits(self) -> bool:
        """Whether the layout fits into the devices' memory and into host memory."""
        fits_host = self.host_bytes_per_machine <= HOST_SHARE * self.machine.host_gib * GIB
        return self.share <= self.limit and fits_host


def this_machine(
    ranks: int | None = None, per_machine: int | None = None, device: Device | None = None
) -> Machine:
    """The launcher's ranks on this machine's devices, or other ranks and devices that are to be estimated.

    Args:
        ranks: number of all ranks; None = those of the launcher.
        per_machine: ranks of each machine; None = those of the launcher, or at most 8 where `ranks` is given.
        device: the device of each rank; None = this machine's.

    Raises:
        ValueError: the number of ranks is no multiple of those of a machine.
    """
    size = ranks or planned_world_size()
    if not per_machine:
        per_machine = local_world_size() if ranks is None else min(size, 8)
    world = World(size, per_machine)
    host = host_memory_bytes() / GIB
    if device is not None:
        return Machine(world, device, device.host_gib * world.per_machine)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        known = known_device(properties.name) or DEVICES["a100"]
        found = dataclasses.replace(known, name=properties.name, memory_gib=properties.total_memory / GIB)
        return Machine(world, found, host)
    cores = (os.cpu_count() or 1) / world.per_machine
    slow = CPU_CORE.fp32_tflops * bfloat16_speed()
    bf16 = CPU_CORE.bf16_tflops if slow > CPU_CORE.fp32_tflops else slow
    speed = {"bf16_tflops": bf16 * cores, "fp32_tflops": CPU_CORE.fp32_tflops * cores}
    return Machine(world, dataclasses.replace(CPU_CORE, memory_gib=host / world.per_machine, **speed), host)


def host_memory_bytes() -> int:
    """Bytes of memory of this machine, or of this process's control group when that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        file = Path("/sys/fs/cgroup") / name
        if file.is_file() and (text := file.read_text(encoding="utf-8").strip()).isdigit():
            total = min(total, int(text))
    return total


def choose_layout(
    recipe: TrainRecipe, shapes: Shapes, lead: Lead, context_length: int, machine: Machine
) -> ParallelLayout:
    """The fastest layout that fits, or a simpler one that is nearly as fast.

    Where no layout fits, it is the one that comes nearest to the memory that there is; its `fits` is False.

    Raises:
        ValueError: no layout agrees with tokens per step, ranks, heads and pinned fields; the message names
            what is allowed.
    """
    splits = row_splits(recipe, shapes, context_length, machine.world.size)
    pinned = frozenset(name for name in DERIVED if getattr(recipe, name) is not None)
    given: dict[str, Any] = _given(recipe) | {"max_steps": recipe.steps(context_length)}
    attention = attention_backend(shapes, recipe.dtype, machine.has_gpu)
    layouts = []
    for split, memory in itertools.product(splits, memory_settings(recipe, lead, machine)):
        settings: dict[str, Any] = {**given, **split, **memory}
        args = TrainArgs(**settings)
        job = TrainingJob(shapes, lead, args, context_length, machine.world, attention)
        layouts.append(ParallelLayout(job, machine, step_time(job, machine.device), pinned))
    layouts.sort(key=lambda layout: (layout.time.expected, simplicity(layout.job.args)))
    fastest = next((layout for layout in layouts if layout.fits), None)
    if fastest is None:
        return min(
            layouts,
            key=lambda layout: max(layout.share, layout.host_bytes_per_machine / GIB / machine.host_gib),
        )
    least = fastest.time.expected
    near = [layout for layout in layouts if layout.fits and layout.time.expected <= NEAR * least]
    return min(near, key=lambda layout: simplicity(layout.job.args))


def check_fits(layout: ParallelLayout) -> None:
    """Raise ValueError when a layout needs more than there is; the message says what would help."""
    if layout.fits:
        return
    needed, device = layout.needed_bytes / GIB, layout.machine.device
    kept = sum(layout.reserve.values()) / GIB
    usable = layout.limit * device.memory_gib - kept
    rule = f"{layout.limit:.0%} of {device.name}" + (f", less a reserve of {kept:.1f}" if kept else "")
    host = layout.host_bytes_per_machine / GIB
    host_usable = HOST_SHARE * layout.machine.host_gib
    pins = ", ".join(f"{name}={getattr(layout.job.args, name)}" for name in sorted(layout.pinned))
    at_host = f", and {host:.1f} of {host_usable:.1f} usable GiB of host memory" if host > host_usable else ""
    raise ValueError(
        f"no layout fits: the closest one needs {needed:.1f} of {usable:.1f} usable GiB per rank ({rule})"
        f"{at_host}: use more ranks, shorter rows or train.method=lora"
        + (f", or remove these settings from the recipe: {pins}" if pins else "")
    )


def row_splits(recipe: TrainRecipe, shapes: Shapes, context_length: int, ranks: int) -> list[dict[str, int]]:
    """All ways to deal the rows of a step to the ranks.

    Returns:
        For each way `sequence_parallel_size`, `micro_batch_size` and `gradient_accumulation_steps`.

    Raises:
        ValueError: there is no way, or ranks, rows or heads do not allow a pinned field.
    """
    rows = recipe.rows_per_step(context_length)
    if recipe.sequence_parallel_size is not None:
        check_world_size(ranks, recipe.sequence_parallel_size)
        kv_head_repeats(shapes.query_heads, shapes.kv_heads, recipe.sequence_parallel_size)
    splits = [
        {
            "sequence_parallel_size": size,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": rows // groups // micro,
        }
        for size in _divisors(ranks)
        if size <= min(shapes.query_heads, context_length) and rows % (groups := ranks // size) == 0
        for micro in _divisors(rows // groups)
    ]
    if not splits:
        raise ValueError(
            f"{rows} rows of {context_length} tokens per step cannot be split over {ranks} ranks: rows "
            f"times sequence_parallel_size (at most {shapes.query_heads}, the query heads) must be a "
            f"multiple of {ranks}; change train.tokens_per_step or the number of ranks"
        )
    for name in ("sequence_parallel_size", "micro_batch_size", "gradient_accumulation_steps"):
        value = getattr(recipe, name)
        allowed = sorted({split[name] for split in splits})
        if value is not None and value not in allowed:
            raise ValueError(
                f"train.{name} is {value}, but {rows} rows of {context_length} tokens per step on {ranks} "
                f"ranks allow only {', '.join(map(str, allowed))}: use one of these, or null"
            )
        splits = [split for split in splits if value in (None, split[name])]
    if recipe.micro_batch_size:
        return splits
    small = [split for split in splits if split["micro_batch_size"] <= MOST_MICRO_BATCH]
    return small or splits


def memory_settings(recipe: TrainRecipe, lead: Lead, machine: Machine) -> Iterator[dict[str, Any]]:
    """All combinations of the fields that decide what is kept, recomputed, divided and offloaded.

    `TrainArgs` accepts each of them, and fields that the recipe pins have the pinned value. Without a GPU
    nothing is offloaded: it would stay in the same memory.
    """
    modes = ["keep", "recompute", "offload"] if shared_qk_heads(lead) else ["keep"]
    derived: dict[str, Any] = {
        "gradient_checkpointing": ("none", "full"),
        "shared_qk": [mode for mode in modes if machine.has_gpu or mode != "offload"],
        "mlp_tile_tokens": TILES,
        "offload_checkpoints": (False, True) if machine.has_gpu else (False,),
        "zero_stage": (1, 2, 3),
        "offload_optimizer": ("none", "cpu") if machine.has_gpu else ("none",),
        "offload_parameters": ("none", "cpu") if machine.has_gpu else ("none",),
    }
    choices = [
        options if getattr(recipe, name) is None else (getattr(recipe, name),)
        for name, options in derived.items()
    ]
    for values in itertools.product(*choices):
        settings = dict(zip(derived, values, strict=True))
        if _go_together(recipe, settings):
            yield settings


def _go_together(recipe: TrainRecipe, settings: dict[str, Any]) -> bool:
    """Whether `TrainArgs` accepts these settings."""
    try:
        TrainArgs(**_given(recipe) | settings)
    except ValueError:
        return False
    return True


def _given(recipe: TrainRecipe) -> dict[str, Any]:
    """The fields that a recipe does not leave null."""
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(TrainRecipe)}
    return {name: value for name, value in values.items() if value is not None}


def simplicity(args: TrainArgs) -> tuple[Any, ...]:
    """A key for sorting layouts: a lower one is simpler.

    Whether anything is moved to host memory or recomputed counts first, then how finely work is divided.
    """
    moved = [args.offload_parameters, args.offload_optimizer]
    return (
        sum(place != "none" for place in moved) + args.offload_checkpoints,
        ("keep", "recompute", "offload").index(args.shared_qk),
        args.gradient_checkpointing == "full",
        args.mlp_tile_tokens > 0,
        args.sequence_parallel_size,
        args.zero_stage,
        args.micro_batch_size,
        -args.mlp_tile_tokens,
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def table(layout: ParallelLayout, data_tokens: int | None, target_tokens: int | None = None) -> str:
    """The layout as text, a line per subject (data, memory, time, …); `*` follows what the recipe pinned.

    Args:
        data_tokens: tokens of the prepared rows, padding included; None = there are no rows yet.
        target_tokens: tokens that will be prepared when there are no rows yet; None = not known.
    """
    job, device, time = layout.job, layout.machine.device, layout.time
    duration = range_of_time(time.overlapped * job.args.max_steps, time.sequential * job.args.max_steps)
    share = f"{layout.share:.0%}"
    verdict = "fits" if layout.fits else "DOES NOT FIT"
    usable = f"{HOST_SHARE * layout.machine.host_gib:.1f} usable GiB"
    is_slow = device.tflops(job.args.dtype) < device.fp32_tflops
    hint = "; this CPU multiplies faster in float32: set train.dtype=float32" if is_slow else ""
    lines = {
        "what": _what(layout),
        "data": _data(layout, data_tokens, target_tokens),
        "ranks": _ranks(layout),
        "layout": layout_line(layout),
        "kernels": _kernels(layout),
        "memory": f"{_memory(layout)} of {device.memory_gib:.1f} GiB per rank ({share}): {verdict}",
        "reserve": f"{_parts(layout.reserve)} GiB per rank, stated (train.memory_reserve_gib)",
        "start": f"{_gib(start_bytes(job))} GiB per rank while weights load and the optimizer is made",
        "host": f"{_gib(layout.host_bytes_per_machine)} of {usable} per machine for offloaded tensors",
        "time": f"{duration} on {device.name}, {time.expected:,.2f} s a step{hint}",
        "saves": _saves(job.args, work_at_risk(job.args, time.expected)),
    }
    if not layout.reserve:
        del lines["reserve"]
    return _lines(lines)


def _memory(layout: ParallelLayout) -> str:
    """GiB of a rank's tensors, and of the reserve beside them, as text."""
    kept = sum(layout.reserve.values())
    return _gib(layout.needed_bytes) + (f" + {_gib(kept)} reserved" if kept else "")


def range_of_time(least: float, most: float) -> str:
    """Two times as text, in the largest unit of which the longer time has at least two.

    Args:
        least, most: seconds.
    """
    unit, size = _unit_of_time(most)
    return f"{least / size:,.1f} to {most / size:,.1f} {unit}"


def _unit_of_time(seconds: float) -> tuple[str, int]:
    """The largest unit of which a time has at least two, and the seconds of this unit."""
    if seconds >= 7200:
        return "hours", 3600
    if seconds >= 120:
        return "minutes", 60
    return "seconds", 1


def _what(layout: ParallelLayout) -> str:
    """Steps, tokens and parameters of the run."""
    args, rows, length = layout.job.args, layout.job.rows_per_step, layout.job.context_length
    asked = "max_steps" + ("; total_tokens is not used" if args.total_tokens else "")
    if args.total_tokens and args.max_steps == args.total_tokens // (rows * length):
        asked = f"total_tokens {args.total_tokens:,}"
    trained = (
        f"{layout.job.shapes.parameters:,} parameters, {layout.job.shapes.trained_parameters(args):,} trained"
    )
    return f"{args.max_steps:,} steps ({asked}) of {rows} x {length:,} = {rows * length:,} tokens; {trained}"


def _data(layout: ParallelLayout, data_tokens: int | None, target_tokens: int | None) -> str:
    """How often the run reads its data."""
    tokens = layout.job.args.max_steps * layout.job.rows_per_step * layout.job.context_length
    known = data_tokens or target_tokens
    if not known:
        return f"{tokens:,} tokens of data that is not prepared yet"
    state = "" if data_tokens else " (data not prepared yet)"
    return f"{tokens:,} tokens of {known:,} = {tokens / known:.2f} epochs{state}"


def _kernels(layout: ParallelLayout) -> str:
    """What runs attention: its backend, and on GPUs the FlashAttention behind `flash`."""
    attention = layout.job.attention
    if attention != "flash" or not layout.machine.has_gpu:
        return f"attention {attention}"
    return f"attention flash, {flash_version.describe(flash_version.asked() or flash_version.SHIPPED)}"


def _saves(args: TrainArgs, seconds: float) -> str:
    """How much work can be lost between two checkpoints, and a hint when it is much."""
    unit, size = _unit_of_time(seconds)
    digits = 1 if unit == "hours" else 0
    at_risk = f"{seconds / size:,.{digits}f} {unit}"
    is_long = args.save_every_steps is not None and seconds > 2 * MOST_LOST
    hint = f"; save_every_steps=null saves every {MOST_LOST / 60:.0f} minutes" if is_long else ""
    return f"at most {at_risk} of work between two checkpoints{hint}"


def _ranks(layout: ParallelLayout) -> str:
    """Numbers of ranks and machines, and how the ranks form groups."""
    world, size = layout.job.world, layout.job.args.sequence_parallel_size
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    machines = f" on {world.nodes} machines" if world.nodes > 1 else ""
    return f"{ranks}{machines} = {world.size // size} data parallel x {size} sequence parallel"


def layout_line(layout: ParallelLayout) -> str:
    """Every derived field that is switched on, with its value; `*` follows what the recipe pinned."""
    values = {name: getattr(layout.job.args, name) for name in DERIVED}
    return ", ".join(
        f"{name} {value}{'*' if name in layout.pinned else ''}"
        for name, value in values.items()
        if value not in ("none", False, 0) or name in layout.pinned or name == "gradient_checkpointing"
    )


def details(layout: ParallelLayout) -> str:
    """The parts of the table's sums: plan, memory, host memory, disk, time."""
    job, args, device, time = layout.job, layout.job.args, layout.machine.device, layout.time
    disk = _gib(checkpoint_disk_bytes(job.shapes.trained_parameters(args)))
    figures = f"{device.tflops(args.dtype):g} TFLOP/s x {device.efficiency:g}, links x {LINK_EFFICIENCY:g}"
    parts = ", ".join(f"{name} {seconds:,.3f}" for name, seconds in time.parts.items())
    lines = {
        "plan": _plan(layout),
        "peak": _parts(layout.memory) + " GiB per rank",
    }
    if any(layout.host.values()):
        lines["offload"] = _parts(layout.host) + " GiB of host memory per rank"
    lines["disk"] = f"{disk} GiB per checkpoint, {args.keep_last} kept, one more while writing"
    lines["step"] = (
        f"{parts} s at {figures}: {time.overlapped:,.3f} if traffic overlaps compute, "
        f"{time.sequential:,.3f} if not"
    )
    return _lines(lines)


def _plan(layout: ParallelLayout) -> str:
    """The roles of the plan's heads, and how evenly the ranks share attention."""
    job, size = layout.job, layout.job.args.sequence_parallel_size
    roles = [roles_of(job.lead, layer) for layer in range(job.shapes.layers)]
    leads = sum(len(one.leads) for one in roles)
    follow = sum(len(one.followers) for one in roles)
    windows = sum(len(one.windows) for one in roles)
    alone = rank_attention_flops(replace(job, args=replace(job.args, sequence_parallel_size=1)))
    share = rank_attention_flops(job) * size / alone
    return (
        f"{leads} (layer, KV head) pairs lead, {follow} follow, {windows} keep their window; the busiest "
        f"rank computes {share:.2f} x an even share of attention"
    )


def _parts(parts: Mapping[str, int]) -> str:
    """Bytes by part as text, in GiB; parts of 0 bytes are left out."""
    return ", ".join(f"{name} {_gib(value)}" for name, value in parts.items() if value)


def _gib(value: int) -> str:
    return f"{value / GIB:,.2f}"


def _lines(texts: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<8}{text}" for name, text in texts.items())
