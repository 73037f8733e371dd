"""The report's pictures as SVG text.

Canvases are small and their type is large, because a phone shows them 360 pixels wide.
"""

import contextlib
import io
import itertools
import json
import math
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, PercentFormatter, StrMethodFormatter

from pod.eval.report.page import is_share
from pod.notation import cut_budget

COLORS = (
    {"full": "#333333", "pod": "#0b6e4f", "pod-unadapted": "#e07a1f", "streamingllm": "#3a6ea5"}
    | {"snapkv": "#a23b72", "h2o": "#8c564b", "razor": "#b8860b", "d2o": "#2a9d8f", "pyramidkv": "#7a5195"}
    | {"simlayerkv": "#ef5675", "pod+snapkv": "#6b8e23"}
)
_SPARE_COLORS = ["#7a5195", "#b8860b", "#ef5675", "#2a9d8f", "#003f5c", "#8c564b", "#6b8e23"]
_MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">"]
_STYLE: Any = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
_styled = matplotlib.rc_context(_STYLE | {"svg.hashsalt": "pod", "svg.fonttype": "path"})
_WIDTH = 4.5  # inches
_LINE = 0.2  # inches that a line of labels takes


def _canvas(height: float) -> tuple[Figure, Axes]:
    """A canvas of `height` inches."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _finished(figure: Figure, axes: Axes, x_label: str, y_label: str) -> str:
    """The figure as SVG text, with its labels and a legend.

    The legend stands above the axes, and the canvas grows by its height. It has as many columns as fit beside
    each other, given the longest name.
    """
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.25)
    handles, names = axes.get_legend_handles_labels()
    if names:
        names = [textwrap.fill(str(name), 46) for name in names]
        longest = max(len(line) for name in names for line in name.splitlines())
        columns = min(3, len(names), max(1, int(_WIDTH * 72 / (6.2 * longest + 42))))
        lines = math.ceil(sum(name.count("\n") + 1 for name in names) / columns)
        figure.set_figheight(figure.get_figheight() + _LINE * lines)
        place: Any = {"loc": "outside upper center", "ncols": columns}
        figure.legend(handles, names, frameon=False, fontsize=10, **place)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def color(method: str) -> str:
    """The colour of a method: the same in every picture, whatever its budget and run."""
    name, _ = cut_budget(method.partition(" · ")[0])
    return COLORS.get(name) or _SPARE_COLORS[sum(map(ord, name)) % len(_SPARE_COLORS)]


def _errors(values: list[float], intervals: list[list[float] | None]) -> Any:
    """Lengths of error bars below and above. None unless every value has an interval."""
    return None if None in intervals else np.abs(np.transpose(np.array(intervals)) - values)


def _log_if_wide(axes: Axes, values: list[float]) -> None:
    """A logarithmic scale for positive values that span more than a factor of 6."""
    if min(values) > 0 and max(values) > 6 * min(values):
        axes.set_yscale("log")
        steps = (1, 2, 5) if max(values) < 200 * min(values) else (1,)
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=steps))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()


@_styled
def perplexity_by_position(curves: dict[str, list[dict]]) -> str:
    """Perplexity of each position bucket with 95 % intervals.

    Each bucket has a slot on the x axis, where the methods stand side by side.

    Args:
        curves: by method, the `buckets` of its payload.
    """
    figure, axes = _canvas(3.3)
    ends = sorted({bucket["end"] for buckets in curves.values() for bucket in buckets})
    heights: list[float] = []
    for number, (name, buckets) in enumerate(curves.items()):
        aside = 0.7 * ((number + 0.5) / len(curves) - 0.5)
        slots = [ends.index(bucket["end"]) + aside for bucket in buckets]
        values = [b["perplexity"] for b in buckets]
        intervals = [b["ci95"] for b in buckets]
        bars = _errors(values, intervals)
        style: Any = {"color": color(name), "marker": _MARKERS[number % len(_MARKERS)], "linestyle": "none"}
        axes.errorbar(slots, values, yerr=bars, label=name, capsize=3, linewidth=1.6, **style)
        heights += values + [end for ends_of in intervals for end in ends_of or ()]
    _log_if_wide(axes, heights)
    axes.set_xticks(range(len(ends)), [f"{end:,}" for end in ends])
    return _finished(figure, axes, "end of the scored span (tokens)", "perplexity")


@_styled
def score_over_bytes(points: list[dict[str, Any]], y_label: str, higher_is_better: bool) -> str:
    """Score against the share of the dense cache's bytes.

    A thin line joins each point with its name at the right. A dotted line shows the best measured value at
    these bytes or fewer. It is no verdict: chance may explain a difference.

    Args:
        points: {label, family, share, value, ci95 or None}, in row order. Points of one family (a method at
            several budgets) are joined. Points with equal coordinates are one marker with all their names.
    """
    figure, axes = _canvas(3.8)
    best = best_so_far(points, higher_is_better)
    ends = [100 * point["share"] for point in best], [point["value"] for point in best]
    axes.step(*ends, where="post", color="#8d99ae", linestyle=":", linewidth=1.4, zorder=1)
    markers: dict[str, str] = {}
    places: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for point in sorted(points, key=lambda point: point["share"]):
        places.setdefault((100 * point["share"], point["value"]), []).append(point)
        markers.setdefault(point["family"], _MARKERS[len(markers) % len(_MARKERS)])
    for family in markers:
        members = [place for place, of in places.items() if family in {point["family"] for point in of}]
        axes.plot(*zip(*members, strict=True), color=color(family), linewidth=1.4, zorder=2)
    for (share, value), found in places.items():
        shade = color(found[0]["family"])
        bar = _errors([value], [found[0]["ci95"]])
        axes.errorbar([share], [value], yerr=bar, fmt="none", color=shade, alpha=0.35, linewidth=1.2)
        axes.plot([share], [value], color=shade, marker=markers[found[0]["family"]], zorder=3)
    if not higher_is_better:
        ends_of = [end for point in points for end in point["ci95"] or ()]
        _log_if_wide(axes, [*(point["value"] for point in points), *ends_of])
    names = {place: ", ".join(point["label"] for point in found) for place, found in places.items()}
    _names_at_the_right(figure, axes, names)
    return _finished(figure, axes, "KV cache memory (% of the dense cache)", y_label)


def _names_at_the_right(figure: Figure, axes: Axes, names: dict[tuple[float, float], str]) -> None:
    """Print the names of points in a column beside the axes, in the order of the points' heights.

    Names do not overlap.

    Args:
        names: by the coordinates of a point.
    """
    inside = max(figure.get_figheight() - 0.8, _LINE * len(names))
    figure.set_figheight(inside + 0.8)
    axes.autoscale_view()
    height = (axes.transData + axes.transAxes.inverted()).transform
    rows = sorted(names, key=lambda place: (height(place)[1], place[0]))
    gap = 0.98 * _LINE / inside
    spots = [float(height(place)[1]) for place in rows]
    for index in range(1, len(spots)):  # each at its height or above the one before …
        spots[index] = max(spots[index], spots[index - 1] + gap)
    for index in reversed(range(len(spots))):  # … and pushed down again where that leaves the axes
        spots[index] = min(spots[index], 1 - gap * (len(spots) - 1 - index))
    line = {"arrowstyle": "-", "linewidth": 0.6, "color": "#8d99ae", "shrinkB": 3, "relpos": (0, 0.5)}
    style: Any = {"textcoords": "axes fraction", "va": "center", "fontsize": 9, "arrowprops": line}
    for place, spot in zip(rows, spots, strict=True):
        axes.annotate(textwrap.shorten(names[place], 44, placeholder=" …"), place, (1.06, spot), **style)


def best_so_far(points: list[dict[str, Any]], higher_is_better: bool) -> list[dict[str, Any]]:
    """In the order of their bytes, the points with a better measured value than every point of fewer bytes.

    This is no verdict: chance may explain the difference.
    """
    sign = 1 if higher_is_better else -1
    best: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda point: (point["share"], -sign * point["value"])):
        if not best or sign * point["value"] > sign * best[-1]["value"]:
            best.append(point)
    return best


@_styled
def curve(curves: dict[str, dict[str, Any]]) -> str:
    """One line per method.

    Args:
        curves: {label: {x, y, low, high, x_label, y_label, log_x}}; where y is None, the point is left out.
    """
    figure, axes = _canvas(3.4)
    first = next(iter(curves.values()))
    for number, (label, line) in enumerate(curves.items()):
        unknown = [None] * len(line["x"])
        xs = np.array(line["x"], dtype=float)
        ys = np.array(line["y"], dtype=float)
        low = np.array(line.get("low") or unknown, dtype=float)
        high = np.array(line.get("high") or unknown, dtype=float)
        kept = ~np.isnan(ys)
        marker: Any = _MARKERS[number % len(_MARKERS)] if kept.sum() < 30 else None
        axes.plot(xs[kept], ys[kept], linewidth=1.6, label=label, color=color(label), marker=marker)
        axes.fill_between(xs[kept], low[kept], high[kept], color=color(label), alpha=0.12, linewidth=0)
    drawn = [value for line in curves.values() for value in line["y"] if value is not None]
    if is_share(first["y_label"], drawn):
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if first.get("log_x"):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return _finished(figure, axes, first["x_label"], first["y_label"])


def training_curve(metrics: Path) -> str | None:
    """Loss over steps from metrics.jsonl (`step`, `loss`), raw and as a running mean.

    Returns: None if fewer than two steps have a loss.
    """
    points = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        # ValueError: the last line of a run that was killed; KeyError: steps without a loss
        with contextlib.suppress(ValueError, KeyError):
            record = json.loads(line)
            points.append((record["step"], record["loss"]))
    if len(points) < 2:
        return None
    steps, losses = zip(*points, strict=True)
    smooth = itertools.accumulate(losses, lambda mean, loss: mean + 0.1 * (loss - mean))
    common = {"x": steps, "x_label": "training step", "y_label": "loss (nats per token)"}
    return curve({"each step": {"y": losses, **common}, "running mean": {"y": [*smooth], **common}})
