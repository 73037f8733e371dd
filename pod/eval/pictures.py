"""The report's pictures as SVG text. Small canvases with large type, because a phone shows them 360 pixels wide."""

import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

COLORS = {
    "full": "#333333",
    "pod": "#0b6e4f",
    "pod-unadapted": "#e07a1f",
    "streamingllm": "#3a6ea5",
    "snapkv": "#a23b72",
}
_SPARE_COLORS = ["#7a5195", "#bc5090", "#ef5675", "#ffa600", "#003f5c"]
_PARTS = ["#0b6e4f", "#7fc8a9", "#e07a1f", "#a23b72", "#8d99ae", "#333333"]
_RIGHT_OR_WRONG = LinearSegmentedColormap.from_list(
    "right", ["#f2b8b0", "#fbeec2", "#a9d9bd"]
)  # dark text stays readable
_STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "pod",
    "svg.fonttype": "path",
}


def color(method: str) -> str:
    """The same colour for a method in every picture."""
    return COLORS.get(method) or _SPARE_COLORS[sum(map(ord, method)) % len(_SPARE_COLORS)]


def perplexity_by_position(results: dict[str, dict]) -> str | None:
    """Perplexity over the end of each position bucket, with 95 % intervals, or None when no method has it."""
    curves = {
        name: result["parts"]["perplexity"]["buckets"]
        for name, result in results.items()
        if _has(result, "perplexity")
    }
    if not curves:
        return None
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
        for number, (name, buckets) in enumerate(curves.items()):
            shift = 1 + 0.025 * (
                number - (len(curves) - 1) / 2
            )  # side by side, so that intervals do not hide one another
            ends = [bucket["end"] * shift for bucket in buckets]
            values = [bucket["perplexity"] for bucket in buckets]
            errors = _error_bars(buckets)
            axes.errorbar(
                ends, values, yerr=errors, label=name, color=color(name), marker="o", capsize=3, linewidth=1.8
            )
        axes.set_xscale("log", base=2)
        values = [value for buckets in curves.values() for bucket in buckets for value in _heights(bucket)]
        if max(values) > 6 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ends = sorted({bucket["end"] for buckets in curves.values() for bucket in buckets})
        axes.set_xticks(ends, [f"{end:,}" for end in ends])
        axes.minorticks_off()
        axes.set_xlabel("end of the scored span (tokens)")
        axes.set_ylabel("perplexity")
        axes.grid(axis="y", alpha=0.25)
        figure.legend(loc="outside upper center", frameon=False, ncols=3, fontsize=10)
        return _svg(figure)


def _heights(bucket: dict) -> list[float]:
    return [bucket["perplexity"], *(bucket["ci95"] or ())]


def _error_bars(buckets: list[dict]) -> list[list[float]] | None:
    if any(bucket["ci95"] is None for bucket in buckets):
        return None
    low = [bucket["perplexity"] - bucket["ci95"][0] for bucket in buckets]
    high = [bucket["ci95"][1] - bucket["perplexity"] for bucket in buckets]
    return [[max(0.0, value) for value in low], [max(0.0, value) for value in high]]


def bytes_by_part(speed_row: dict) -> str:
    """Stacked bars of the bytes that each method's cache holds, by part. speed_row: one length of the speed run."""
    methods = speed_row["methods"]
    parts: dict[str, list[float]] = {}
    for index, row in enumerate(methods.values()):
        for part, size in row["bytes_by_part"].items():
            parts.setdefault(part, [0.0] * len(methods))[index] = size / 1e6
    largest = max(sum(column) for column in zip(*parts.values(), strict=True))
    visible = {part: sizes for part, sizes in parts.items() if max(sizes) >= 0.005 * largest}
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 0.55 * len(methods) + 1.7), layout="constrained")
        left = [0.0] * len(methods)
        for number, (part, sizes) in enumerate(visible.items()):
            axes.barh(
                list(methods), sizes, left=left, label=part, color=_PARTS[number % len(_PARTS)], height=0.62
            )
            left = [start + size for start, size in zip(left, sizes, strict=True)]
        for name, end in zip(methods, left, strict=True):
            axes.text(end + 0.01 * largest, name, f"{end:.3g}", va="center", fontsize=10)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.13 * largest)
        axes.set_xlabel(f"MB held for one sequence of {speed_row['length']:,} tokens")
        figure.legend(loc="outside upper center", frameon=False, ncols=3, fontsize=10)
        return _svg(figure)


def passkey_maps(results: dict[str, dict]) -> str | None:
    """One depth × length heat map per method, or None when no method has passkey results."""
    cells = {
        name: result["parts"]["passkey"]["cells"]
        for name, result in results.items()
        if _has(result, "passkey")
    }
    if not cells:
        return None
    columns = min(3, len(cells))
    rows = -(-len(cells) // columns)
    with plt.rc_context(_STYLE | {"font.size": 10}):
        figure, grid = plt.subplots(
            rows,
            columns,
            figsize=(5.2, 2.3 * rows),
            layout="constrained",
            squeeze=False,
            sharex=True,
            sharey=True,
        )
        for axes in grid.flat[len(cells) :]:
            axes.remove()
        for number, (axes, (name, entries)) in enumerate(zip(grid.flat, cells.items(), strict=False)):
            _passkey_map(axes, name, entries)
            axes.tick_params(labelleft=number % columns == 0, labelbottom=number + columns >= len(cells))
        figure.supylabel("depth of the key", fontsize=10)
        figure.supxlabel("prompt length (tokens)", fontsize=10)
        return _svg(figure)


def _passkey_map(axes: Any, name: str, entries: list[dict]) -> None:
    lengths = sorted({cell["length"] for cell in entries})
    depths = sorted({cell["depth"] for cell in entries})
    shares = [[float("nan")] * len(lengths) for _ in depths]
    for cell in entries:
        row, column = depths.index(cell["depth"]), lengths.index(cell["length"])
        shares[row][column] = cell["correct"] / cell["prompts"]
        text = f"{cell['correct']}/{cell['prompts']}"
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color="black")
    axes.imshow(shares, vmin=0, vmax=1, cmap=_RIGHT_OR_WRONG, aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_title(name, fontsize=10, color=color(name))


def training_curve(metrics: Path) -> str | None:
    """Loss over steps from metrics.jsonl (`step`, `loss`), raw and as a running mean; None when there is too little."""
    points = _read_points(metrics)
    if len(points) < 2:
        return None
    steps, losses = zip(*points, strict=True)
    smooth, value = [], losses[0]
    for loss in losses:
        value += 0.1 * (loss - value)
        smooth.append(value)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
        axes.plot(steps, losses, color=COLORS["pod"], alpha=0.3, linewidth=1, label="each step")
        axes.plot(steps, smooth, color=COLORS["pod"], linewidth=2, label="running mean")
        axes.set_xlabel("training step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(axis="y", alpha=0.25)
        axes.legend(frameon=False, fontsize=10)
        return _svg(figure)


def _read_points(metrics: Path) -> list[tuple[float, float]]:
    points = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        if isinstance(record, dict) and isinstance(record.get("loss"), (int, float)) and "step" in record:
            points.append((record["step"], record["loss"]))
    return points


def _has(result: dict, part: str) -> bool:
    return part in result.get("parts", {})


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]
