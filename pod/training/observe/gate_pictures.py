"""Picture of the gates of a training run: the last measurement by layer and head, and the way there."""

import os
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from pod.training.observe.trackers import read_records
from pod.training.plans.pictures import save_picture


def save_gate_picture(records: str | os.PathLike[str], picture: str | os.PathLike[str]) -> Path:
    """Draw the measurements of gates.jsonl as a PNG."""
    return save_picture(gate_picture(read_records(Path(records))), Path(picture))


def gate_picture(records: list[dict[str, Any]]) -> Figure:
    """Left: mean gate of the last record, layer x KV head, leads and windows marked. Right: means of layers over the steps."""
    last = records[-1]
    gates = np.array(last["gate"], dtype=np.float64)  # null becomes NaN
    lead = _leads(last)
    height = min(max(3.6, 0.24 * len(gates) + 1.6), 14)
    figure = Figure(figsize=(10.5, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _heat_map(figure, left, gates, lead)
    left.set_title(f"after step {last['step']}", fontsize=11)
    _curves(figure, right, records)
    figure.suptitle("Gate: share of attention that stays with sinks and recent tokens", fontsize=12)
    return figure


def _heat_map(figure: Figure, axes: Axes, gates: NDArray[np.float64], lead: NDArray[np.float64]) -> None:
    layers, heads = gates.shape
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#dddddd")
    image = axes.imshow(
        np.ma.masked_invalid(gates), vmin=0, vmax=1, origin="lower", cmap=colours, aspect="auto"
    )
    for marker, marked in (("o", lead == np.arange(layers)[:, None]), ("s", np.isnan(lead))):
        for layer, head in zip(*np.nonzero(marked), strict=True):
            axes.plot(
                head,
                layer,
                marker=marker,
                markersize=4,
                markerfacecolor="white",
                markeredgecolor="black",
                markeredgewidth=0.8,
            )
    axes.set(xlabel="KV head (○ leads, □ keeps its window, others follow)", ylabel="layer")
    axes.set_xticks(range(heads) if heads <= 16 else range(0, heads, 4))
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.set_label("mean gate: 1 = distant tokens unused")


def _curves(figure: Figure, axes: Axes, records: list[dict[str, Any]]) -> None:
    """One thin line per layer that has followers (their mean), coloured by depth, and the mean over all followers."""
    steps = [record["step"] for record in records]
    values = np.stack([_followers(record) for record in records])  # [records, layers, heads], NaN for others
    shown = [layer for layer in range(values.shape[1]) if np.isfinite(values[:, layer]).any()]
    colours = matplotlib.colormaps["plasma"]
    marker = "o" if len(steps) < 30 else ""
    for layer in shown:
        colour = colours(0.05 + 0.85 * layer / max(1, values.shape[1] - 1))
        axes.plot(
            steps,
            _means(values[:, layer]),
            color=colour,
            linewidth=1,
            alpha=0.8,
            marker=marker,
            markersize=2.5,
        )
    axes.set(xlabel="step", ylim=(0, 1.02), ylabel="mean gate of followers")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.grid(alpha=0.25)
    axes.margins(x=0.03)
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    if not shown:
        axes.text(0.5, 0.5, "no followers", transform=axes.transAxes, ha="center", color="dimgrey")
        return
    whole = _means(values.reshape(len(steps), -1))
    axes.plot(steps, whole, color="black", linewidth=2.2, marker=marker, markersize=4)
    handles = [
        Line2D([], [], color="black", linewidth=2.2),
        Line2D([], [], color=colours(0.05 + 0.85 * shown[0] / max(1, values.shape[1] - 1))),
        Line2D([], [], color=colours(0.05 + 0.85 * shown[-1] / max(1, values.shape[1] - 1))),
    ]
    labels = ["mean of all followers", f"layer {shown[0]}", f"layer {shown[-1]}"]
    count = 1 + min(2, len(shown))
    axes.legend(handles[:count], labels[:count], fontsize=8, loc="lower left", framealpha=0.85)


def _followers(record: dict[str, Any]) -> NDArray[np.float64]:
    gates, lead = np.array(record["gate"], dtype=np.float64), _leads(record)
    return np.where((lead == np.arange(len(lead))[:, None]) | np.isnan(lead), np.nan, gates)


def _leads(record: dict[str, Any]) -> NDArray[np.float64]:
    """The plan, NaN for windows."""
    return np.array(record["lead"], dtype=np.float64)


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over the last axis [records, …] without NaN; NaN where there is nothing else."""
    finite = np.isfinite(values)
    counts = finite.sum(-1)
    return np.where(counts, np.where(finite, values, 0).sum(-1) / np.maximum(counts, 1), np.nan)
