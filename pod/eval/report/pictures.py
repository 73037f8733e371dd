"""The report's pictures as SVG text. Small canvases with large type, because a phone shows them 360 pixels wide."""

import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

COLORS = {
    "full": "#333333",
    "pod": "#0b6e4f",
    "pod-unadapted": "#e07a1f",
    "streamingllm": "#3a6ea5",
    "snapkv": "#a23b72",
    "h2o": "#8c564b",
    "razor": "#b8860b",
    "d2o": "#2a9d8f",
    "pyramidkv": "#7a5195",
    "simlayerkv": "#ef5675",
    "pod+snapkv": "#6b8e23",
}
_SPARE_COLORS = ["#7a5195", "#b8860b", "#ef5675", "#2a9d8f", "#003f5c", "#8c564b", "#6b8e23"]
_PARTS = ["#0b6e4f", "#7fc8a9", "#e07a1f", "#a23b72", "#8d99ae", "#333333"]
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">"]
_STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "pod",
    "svg.fonttype": "path",
}


def color(method: str) -> str:
    """The same colour for a method in every picture, whatever its budget and run."""
    name = method.partition(" · ")[0].partition("@")[0]
    return COLORS.get(name) or _SPARE_COLORS[sum(map(ord, name)) % len(_SPARE_COLORS)]


def perplexity_by_position(curves: dict[str, list[dict]]) -> str:
    """Perplexity over the end of each position bucket, with 95 % intervals. curves: the buckets of each method."""
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


def decode_speed(speed_row: dict) -> str:
    """Bars of decode speed, with the slowest and fastest repeat. speed_row: one length of the speed run."""
    methods = speed_row["methods"]
    rates = [row["decode_tokens_per_second"] for row in methods.values()]
    values = [rate["median"] for rate in rates]
    spread = [
        [rate["median"] - rate["min"] for rate in rates],
        [rate["max"] - rate["median"] for rate in rates],
    ]
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 0.5 * len(methods) + 1.1), layout="constrained")
        axes.barh(
            list(methods), values, xerr=spread, color=[color(name) for name in methods], height=0.6, capsize=3
        )
        for name, rate in zip(methods, rates, strict=True):
            axes.text(rate["max"] * 1.02, name, f"{rate['median']:.3g}", va="center", fontsize=10)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(rate["max"] for rate in rates))
        axes.set_xlabel(f"tokens per second after {speed_row['length']:,} tokens")
        return _svg(figure)


def score_over_bytes(points: list[dict[str, Any]], y_label: str, higher_is_better: bool) -> str:
    """Score against the share of the dense cache's bytes. points: {label, family, share, value, ci95 or None}, in row order.

    Points of one family (a method at several budgets) are joined by a line; the dotted staircase joins those that no other beats.
    """
    families: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        families.setdefault(point["family"], []).append(point)
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
        shifted, best = _side_by_side(points), undominated(points, higher_is_better)
        shares, values = [100 * shifted[point["label"]] for point in best], [point["value"] for point in best]
        axes.step(shares, values, where="post", color="#8d99ae", linestyle=":", linewidth=1.4, zorder=1)
        for number, (name, members) in enumerate(families.items()):
            members = sorted(members, key=lambda point: point["share"])
            shares = [100 * shifted[point["label"]] for point in members]
            values = [point["value"] for point in members]
            style: Any = {"color": color(name), "marker": _MARKERS[number % len(_MARKERS)]}
            axes.errorbar(
                shares, values, yerr=_point_errors(members), label=name, capsize=3, linewidth=1.6, **style
            )
        axes.set_xlabel("KV bytes held (% of the dense cache)")
        axes.set_ylabel(y_label)
        axes.set_xlim(left=0)
        heights = [point["value"] for point in points]
        if not higher_is_better and min(heights) > 0 and max(heights) > 6 * min(heights):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.minorticks_off()
        axes.grid(alpha=0.25)
        figure.legend(loc="outside upper center", frameon=False, ncols=3, fontsize=10)
        return _svg(figure)


def undominated(points: list[dict[str, Any]], higher_is_better: bool) -> list[dict[str, Any]]:
    """The points that no other one beats in bytes and score, by growing bytes."""
    sign = 1 if higher_is_better else -1
    best: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda point: (point["share"], -sign * point["value"])):
        if not best or sign * point["value"] > sign * best[-1]["value"]:
            best.append(point)
    return best


def _side_by_side(points: list[dict[str, Any]]) -> dict[str, float]:
    """Shares by label, those of equal bytes moved apart by 1.5 points so that no interval hides another."""
    shown: dict[str, float] = {}
    near: dict[int, list[dict[str, Any]]] = {}
    for point in points:
        near.setdefault(round(50 * point["share"]), []).append(point)
    for group in near.values():
        for number, point in enumerate(group):
            shown[point["label"]] = point["share"] + 0.015 * (number - (len(group) - 1) / 2)
    return shown


def _point_errors(points: list[dict[str, Any]]) -> list[list[float]] | None:
    if any(point["ci95"] is None for point in points):
        return None
    return [
        [max(0.0, point["value"] - point["ci95"][0]) for point in points],
        [max(0.0, point["ci95"][1] - point["value"]) for point in points],
    ]


def curve(curves: dict[str, dict[str, Any]]) -> str:
    """One line per method. curves: {label: {x, y, low, high, x_label, y_label, log_x, reference}}; what is None in y is left out."""
    first = next(iter(curves.values()))
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
        for label, line in curves.items():
            kept = [index for index, value in enumerate(line["y"]) if value is not None]
            xs, ys = [line["x"][index] for index in kept], [line["y"][index] for index in kept]
            axes.plot(
                xs, ys, color=color(label), marker="o" if len(xs) < 30 else None, linewidth=1.6, label=label
            )
            low, high = line.get("low"), line.get("high")
            if low and high and all(low[index] is not None and high[index] is not None for index in kept):
                band = [low[index] for index in kept], [high[index] for index in kept]
                axes.fill_between(xs, *band, color=color(label), alpha=0.12, linewidth=0)
            if line.get("reference") is not None:
                axes.axhline(line["reference"], color=color(label), linestyle="--", linewidth=1)
        if first.get("log_x"):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlabel(first["x_label"])
        axes.set_ylabel(first["y_label"])
        axes.grid(alpha=0.25)
        figure.legend(loc="outside upper center", frameon=False, ncols=3, fontsize=10)
        return _svg(figure)


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


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]
