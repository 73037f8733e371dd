"""What a planned run is and needs, as text: one table at the start of a run, the parts behind it for `--dry-run`."""

from collections.abc import Mapping
from dataclasses import replace

from pod.modeling.shipped.sharing import roles_of
from pod.training.predict.memory import checkpoint_disk_bytes, start_bytes
from pod.training.predict.planner import DERIVED, GIB, HOST_SHARE, Fit
from pod.training.predict.step_time import LINK_EFFICIENCY, attention_flops


def table(fit: Fit, data_tokens: int | None) -> str:
    """One line per subject; `*` marks what the recipe pinned.

    Args:
        data_tokens: of the prepared rows, padding included; None = not known yet.
    """
    job, device, time = fit.job, fit.machine.device, fit.time
    hours = [seconds * job.args.max_steps / 3600 for seconds in (time.overlapped, time.sequential)]
    verdict = "fits" if fit.fits else "DOES NOT FIT"
    usable = f"{HOST_SHARE * fit.machine.host_gib:.1f} usable GiB"
    lines = {
        "what": _what(fit),
        "data": _data(fit, data_tokens),
        "ranks": _ranks(fit),
        "layout": layout_line(fit),
        "memory": f"{_gib(fit.needed_bytes)} of {device.memory_gib:.1f} GiB per rank ({fit.share:.0%}): {verdict}",
        "start": f"{_gib(start_bytes(job))} GiB per rank while weights arrive and the optimizer is made",
        "host": f"{_gib(fit.host_bytes_per_machine)} of {usable} per machine for what is offloaded",
        "time": f"{hours[0]:,.1f} to {hours[1]:,.1f} hours on {device.name}, {time.expected:,.2f} s a step",
    }
    return _lines(lines)


def _what(fit: Fit) -> str:
    args, rows, length = fit.job.args, fit.job.rows_per_step, fit.job.context_length
    asked = "max_steps" + ("; total_tokens is not used" if args.total_tokens else "")
    if args.total_tokens and args.max_steps == args.total_tokens // (rows * length):
        asked = f"total_tokens {args.total_tokens:,}"
    trained = f"{fit.job.shapes.parameters:,} parameters, {fit.job.shapes.trained_parameters(args):,} trained"
    return f"{args.max_steps:,} steps ({asked}) of {rows} x {length:,} = {rows * length:,} tokens; {trained}"


def _data(fit: Fit, data_tokens: int | None) -> str:
    tokens = fit.job.args.max_steps * fit.job.rows_per_step * fit.job.context_length
    if not data_tokens:
        return f"{tokens:,} tokens of data that is not prepared yet"
    return f"{tokens:,} tokens of {data_tokens:,} = {tokens / data_tokens:.2f} epochs"


def _ranks(fit: Fit) -> str:
    world, size = fit.job.world, fit.job.args.sequence_parallel_size
    machines = f" on {world.nodes} machines" if world.nodes > 1 else ""
    return f"{world.size} ranks{machines} = {world.size // size} data parallel x {size} sequence parallel"


def layout_line(fit: Fit) -> str:
    """Every field of the how that is not off, as a recipe would pin it; `*` behind what it pinned."""
    values = {name: getattr(fit.job.args, name) for name in DERIVED}
    return ", ".join(
        f"{name} {value}{'*' if name in fit.pinned else ''}"
        for name, value in values.items()
        if value not in ("none", False, 0) or name in fit.pinned or name == "gradient_checkpointing"
    )


def details(fit: Fit) -> str:
    """The parts of the table's sums: plan, memory, host memory, disk, time."""
    job, args, device, time = fit.job, fit.job.args, fit.machine.device, fit.time
    disk = _gib(checkpoint_disk_bytes(job.shapes.trained_parameters(args)))
    figures = f"{device.tflops(args.dtype):g} TFLOP/s x {device.efficiency:g}, links x {LINK_EFFICIENCY:g}"
    lines = {
        "plan": _plan(fit),
        "peak": _parts(fit.memory) + " GiB per rank",
        "offload": _parts(fit.host) + " GiB of host memory per rank",
        "disk": f"{disk} GiB per checkpoint, {args.keep_last} kept, one more while writing",
        "step": ", ".join(f"{name} {seconds:,.3f}" for name, seconds in time.parts.items())
        + f" s at {figures}: {time.overlapped:,.3f} with traffic behind arithmetic, {time.sequential:,.3f} without",
    }
    return _lines({name: text for name, text in lines.items() if not text.startswith(" ")})


def _plan(fit: Fit) -> str:
    job, size = fit.job, fit.job.args.sequence_parallel_size
    roles = [roles_of(job.lead, layer) for layer in range(job.shapes.layers)]
    leads, follow, windows = (
        sum(len(getattr(one, kind)) for one in roles) for kind in ("leads", "followers", "windows")
    )
    alone = attention_flops(replace(job, args=replace(job.args, sequence_parallel_size=1)))
    share = attention_flops(job) * size / alone
    return (
        f"{leads} (layer, KV head) pairs lead, {follow} follow, {windows} keep their window; attention waits in each layer for "
        f"{share:.2f} x an even share"
    )


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(value)}" for name, value in parts.items() if value)


def _gib(value: int) -> str:
    return f"{value / GIB:,.2f}"


def _lines(texts: Mapping[str, str]) -> str:
    return "\n".join(f"{name:<8}{text}" for name, text in texts.items())
