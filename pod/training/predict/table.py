"""What a planned run is and needs, as text: one table at the start of a run, the parts behind it for `--dry-run`."""

from dataclasses import replace

from pod.training.predict.communication import Traffic, communication
from pod.training.predict.memory import Parts, checkpoint_disk_bytes, nvme_bytes
from pod.training.predict.planner import GIB, HOST_SHARE, Fit
from pod.training.predict.shapes import heads_by_role
from pod.training.predict.step_time import LINK_EFFICIENCY, attention_flops


def table(fit: Fit, data_tokens: int | None) -> str:
    """One line per subject; `*` marks what the recipe pinned.

    Args:
        data_tokens: of the prepared rows, padding included; None = not known yet.
    """
    job, machine, time = fit.job, fit.machine, fit.time
    hours = [seconds * job.args.max_steps / 3600 for seconds in (time.overlapped, time.sequential)]
    verdict = "fits" if fit.fits else "DOES NOT FIT"
    lines = [
        ("what", _what(fit)),
        ("data", _data(fit, data_tokens)),
        ("ranks", _ranks(fit)),
        ("layout", layout_line(fit)),
        (
            "memory",
            f"{_gib(fit.memory)} of {machine.device.memory_gib:.1f} GiB per rank ({fit.share:.0%}): {verdict}",
        ),
        ("host", _host(fit)),
        (
            "time",
            f"{hours[0]:,.1f} to {hours[1]:,.1f} hours on {machine.device.name}, {time.expected:,.2f} s a step",
        ),
    ]
    return "\n".join(f"{name:<7} {text}" for name, text in lines)


def _what(fit: Fit) -> str:
    job, args = fit.job, fit.job.args
    tokens = job.rows_per_step * job.context_length
    asked = "max_steps" + ("; total_tokens is not used" if args.total_tokens else "")
    if args.total_tokens and args.max_steps == args.total_tokens // tokens:
        asked = f"total_tokens {args.total_tokens:,}"
    return (
        f"{args.max_steps:,} steps ({asked}) of {job.rows_per_step} rows of {job.context_length:,} tokens = {tokens:,} a "
        f"step; {job.shapes.parameters:,} parameters, {job.shapes.trained_parameters(args):,} trained"
    )


def _data(fit: Fit, data_tokens: int | None) -> str:
    tokens = fit.job.args.max_steps * fit.job.rows_per_step * fit.job.context_length
    of_data = (
        f"of {data_tokens:,} = {tokens / data_tokens:.2f} epochs"
        if data_tokens
        else "of data that is not prepared yet"
    )
    return f"{tokens:,} tokens {of_data}"


def _ranks(fit: Fit) -> str:
    world, size = fit.job.world, fit.job.args.sequence_parallel_size
    machines = f" on {world.nodes} machines" if world.nodes > 1 else ""
    return f"{world.size} ranks{machines} = {world.size // size} data parallel x {size} sequence parallel"


def layout_line(fit: Fit) -> str:
    """Every field of the how that is not off, `*` behind what the recipe pinned."""
    names = {
        "sequence_parallel_size": "sequence parallel",
        "micro_batch_size": "micro-batch",
        "gradient_accumulation_steps": "accumulation",
        "zero_stage": "ZeRO",
        "gradient_checkpointing": "checkpointing",
        "carry": "carry",
        "mlp_tile_tokens": "MLP tiles",
        "offload_checkpoints": "checkpoints to host",
        "offload_optimizer": "optimizer to",
        "offload_parameters": "parameters to",
    }
    shown = {name: getattr(fit.job.args, name) for name in names}
    off = ("none", False, 0)
    return ", ".join(
        f"{names[name]} {value}{'*' if name in fit.pinned else ''}"
        for name, value in shown.items()
        if value not in off or name in fit.pinned or name == "gradient_checkpointing"
    )


def _host(fit: Fit) -> str:
    usable = HOST_SHARE * fit.machine.host_gib
    return (
        f"{fit.host_bytes_per_machine / GIB:.1f} of {usable:.1f} usable GiB per machine for what is offloaded"
    )


def details(fit: Fit) -> str:
    """The parts of the table's sums: plan, memory, host memory, files, disk, communication, time."""
    job, args, device = fit.job, fit.job.args, fit.machine.device
    lines = [*_plan_lines(fit), "memory per rank at the peak of a step:", *_part_lines(fit.memory)]
    for title, parts in (
        ("host memory per rank:", fit.host),
        ("files per rank in offload_folder:", nvme_bytes(job)),
    ):
        lines += [title, *_part_lines(parts)] if parts else []
    disk = checkpoint_disk_bytes(job.shapes.trained_parameters(args), args) / GIB
    lines.append(f"disk per checkpoint: {disk:.3f} GiB, {args.keep_last} kept, one more while writing")
    traffic = communication(job)
    if traffic:
        lines += ["communication per step, received by each rank:", *map(_traffic_line, traffic)]
    lines += [
        f"time per step on {device.name} ({device.tflops(args.dtype):g} TFLOP/s x {device.efficiency:g}, {device.node_gbps:g} "
        f"GB/s inside, {device.network_gbps:g} GB/s between machines, links x {LINK_EFFICIENCY:g}):",
        *(f"  {name:<26} {seconds:9.3f} s" for name, seconds in fit.time.parts.items()),
        f"  {'step':<26} {fit.time.overlapped:9.3f} s with traffic behind arithmetic, {fit.time.sequential:.3f} s without",
    ]
    return "\n".join(lines)


def _plan_lines(fit: Fit) -> list[str]:
    job, size = fit.job, fit.job.args.sequence_parallel_size
    roles = [heads_by_role(job.lead, layer) for layer in range(job.shapes.layers)]
    leads, follow, windows = (sum(map(len, heads)) for heads in zip(*roles, strict=True))
    lines = []
    if follow or windows:
        lines.append(f"{leads} (layer, KV head) pairs lead, {follow} follow, {windows} keep their window")
    if size > 1:
        alone = attention_flops(replace(job, args=replace(job.args, sequence_parallel_size=1)))
        share = attention_flops(job) * size / alone
        lines.append(
            f"attention waits in each layer for the rank that has most to do: {share:.2f} x an even share"
        )
    return lines


def _part_lines(parts: Parts) -> list[str]:
    shown = {name: value for name, value in parts.items() if value} | {"sum": sum(parts.values())}
    return [f"  {name:<26} {value / GIB:9.3f} GiB" for name, value in shown.items()]


def _traffic_line(traffic: Traffic) -> str:
    inside, between = traffic.inside / GIB, traffic.between / GIB
    return f"  {traffic.kind:<26} {inside:9.3f} GiB inside a machine, {between:9.3f} GiB from other machines"


def _gib(parts: Parts) -> str:
    return f"{sum(parts.values()) / GIB:.1f}"
