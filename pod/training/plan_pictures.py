"""Pictures of a similarity measurement and of the plan made from it (paper Figures 1d and 5)."""

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from pod.files import atomic_write_bytes
from pod.modeling.shipped.sharing import SharingPlan

MAX_LABELLED_HEADS = 16  # curves that a legend can still tell apart
BLOCK_COLOURS = matplotlib.color_sequences["Set2"][:7]  # the eighth is grey
SINGLE_COLOUR = "#ececec"


def save_pictures(
    folder: str | os.PathLike[str], similarity: ArrayLike, plan: SharingPlan, subject: str
) -> list[Path]:
    """Write adjacent_similarity.png, similarity_heads.png and blocks.png; `subject` names the model in the titles."""
    values = np.asarray(similarity, dtype=np.float64)
    figures = {
        "adjacent_similarity.png": adjacent_similarity(values, plan.num_key_value_heads, subject),
        "similarity_heads.png": head_maps(values, plan.num_key_value_heads, subject),
        "blocks.png": block_picture(plan, subject),
    }
    return [_save(figure, Path(folder) / name) for name, figure in figures.items()]


def adjacent_similarity(values: NDArray[np.float64], num_key_value_heads: int, subject: str) -> Figure:
    """Similarity of each layer with the one below it: one thin curve per query head, the mean on top.

    values: ``[L, L, Hq]``.
    """
    num_layers, _, num_heads = values.shape
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    layers = np.arange(1, num_layers)
    adjacent = values[layers, layers - 1]  # [L - 1, Hq]
    group = num_heads // num_key_value_heads
    colours = _colours(num_key_value_heads)
    for head in range(num_heads):
        axes.plot(layers, adjacent[:, head], color=colours[head // group], linewidth=0.9, alpha=0.55)
    axes.plot(layers, adjacent.mean(axis=1), color="black", linewidth=2.4, marker="o", markersize=3.5)
    threshold = axes.axhline(0.5, color="dimgrey", linestyle="--", linewidth=1.4)
    handles = [Line2D([], [], color="black", linewidth=2.4, marker="o", markersize=3.5), threshold]
    labels = [f"mean of {num_heads} query heads", "0.5, the paper's threshold"]
    if num_key_value_heads <= MAX_LABELLED_HEADS:
        handles += [Line2D([], [], color=colour) for colour in colours]
        labels += [f"query heads of KV head {head}" for head in range(num_key_value_heads)]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(3, len(labels)), fontsize=9, frameon=False
    )
    axes.set(xlabel="layer", ylabel="similarity with the layer below (1 − JSD₂)", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(15, integer=True))
    axes.set_title(f"Attention similarity of neighbouring layers\n{subject}", fontsize=12)
    axes.grid(alpha=0.25)
    return figure


def head_maps(values: NDArray[np.float64], num_key_value_heads: int, subject: str) -> Figure:
    """One layer × layer heat map per query head, heads of one KV head side by side. values: ``[L, L, Hq]``."""
    num_heads = values.shape[2]
    group = num_heads // num_key_value_heads
    groups_per_row = math.ceil(math.sqrt(num_heads) / group)  # for a picture about as wide as high
    columns = min(group * groups_per_row, num_heads)
    rows = math.ceil(num_heads / columns)
    figure = Figure(figsize=(2.5 * columns + 1.1, 2.55 * rows + 0.9), layout="constrained")
    grid: NDArray[Any] = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for head, axes in enumerate(grid.flat):
        if head >= num_heads:
            axes.set_visible(False)
            continue
        image = axes.imshow(values[:, :, head], vmin=0, vmax=1, origin="lower", cmap="viridis")
        axes.set_title(f"query head {head} (KV head {head // group})", fontsize=9)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(labelsize=8)
    assert image is not None
    bar = figure.colorbar(image, ax=list(grid.flat), shrink=0.8, pad=0.02, aspect=30)
    bar.set_label("similarity (1 − JSD₂): 1 = identical, 0 = disjoint")
    figure.supxlabel("layer", fontsize=11)
    figure.supylabel("layer", fontsize=11)
    figure.suptitle(f"Attention similarity between layers\n{subject}", fontsize=12)
    return figure


def save_cost_picture(
    folder: str | os.PathLike[str], costs: ArrayLike, plan: SharingPlan, name: str, subject: str
) -> Path:
    """Write costs.png: `cost_maps` of the cost `name`."""
    figure = cost_maps(np.asarray(costs, dtype=np.float64), plan, name, subject)
    return _save(figure, Path(folder) / "costs.png")


def cost_maps(costs: NDArray[np.float64], plan: SharingPlan, name: str, subject: str) -> Figure:
    """What it costs each layer to follow each lower one, a map per KV head, with dots where the plan does it.

    costs: ``[L, L, H]``, read where lead < layer.
    """
    num_layers, _, heads = costs.shape
    columns = math.ceil(math.sqrt(heads))
    rows = math.ceil(heads / columns)
    figure = Figure(figsize=(3.9 * columns + 1.1, 3.9 * rows + 0.9), layout="constrained")
    grid: NDArray[Any] = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    follows = np.tril(np.ones((num_layers, num_layers), dtype=bool), k=-1)  # [layer, lead]
    shown = costs[follows.T & (costs > 0).any(axis=-1)]
    low, high = (np.quantile(shown, share) for share in (0.02, 0.98)) if shown.size else (0.1, 1.0)
    norm = LogNorm(vmin=max(low, high * 1e-6, 1e-12), vmax=max(high, 1e-11), clip=True)
    image = None
    for head, axes in enumerate(grid.flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        values = np.ma.masked_where(~follows, np.maximum(costs[:, :, head].T, norm.vmin or 0))
        image = axes.imshow(values, norm=norm, origin="lower", cmap="viridis_r")
        pairs = [(row[head], layer) for layer, row in enumerate(plan.lead) if row[head] != layer]
        if pairs:
            axes.plot(*zip(*pairs, strict=True), linestyle="", marker="o", color="black", markersize=2.5)
        axes.set_title(f"KV head {head}", fontsize=9)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
    assert image is not None
    bar = figure.colorbar(image, ax=list(grid.flat), shrink=0.8, pad=0.02, aspect=30)
    bar.set_label(f"cost `{name}` (logarithmic)")
    figure.supxlabel("lead", fontsize=11)
    figure.supylabel("layer that follows", fontsize=11)
    figure.suptitle(f"What sharing costs; dots: pairs of the plan\n{subject}", fontsize=12)
    return figure


def block_picture(plan: SharingPlan, subject: str) -> Figure:
    """The paper's Figure 5: a column per KV head, a colour per block, leads marked; single layers are grey."""
    heads, layers = plan.num_key_value_heads, plan.num_layers
    cell = 0.28 if layers <= 40 else 0.2  # inches
    figure = Figure(figsize=(max(6.5, 0.62 * heads + 1.6), cell * layers + 2.0), layout="constrained")
    axes = figure.add_subplot()
    for head in range(heads):
        shared = 0
        for block in plan.blocks(head):
            colour = SINGLE_COLOUR
            if len(block) > 1:
                colour = BLOCK_COLOURS[shared % len(BLOCK_COLOURS)]
                shared += 1
            _draw_block(axes, head, block, colour)
    axes.set(xlim=(-0.5, heads - 0.5), ylim=(-0.5, layers - 0.5), xlabel="KV head", ylabel="layer")
    axes.set_xticks(range(heads))
    axes.set_yticks(range(0, layers, 1 if layers <= 40 else 5))
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    num_blocks = sum(len(plan.blocks(head)) for head in range(heads))
    axes.set_title(
        f"Layers that share attention to distant tokens\n{subject}\n"
        f"KV saving {plan.asymptotic_saving:.1%}, {num_blocks} blocks",
        fontsize=11,
    )
    handles = [
        Line2D([], [], linestyle="", marker="o", color="black", markersize=6),
        Rectangle((0, 0), 1, 1, facecolor=BLOCK_COLOURS[0], edgecolor="white"),
        Rectangle((0, 0), 1, 1, facecolor=SINGLE_COLOUR, edgecolor="white"),
    ]
    labels = ["lead of the block", "a block (colours only separate neighbours)", "layer on its own"]
    figure.legend(handles, labels, loc="outside lower center", ncols=1, fontsize=9, frameon=False)
    return figure


def _draw_block(axes: Axes, head: int, block: Sequence[int], colour: Any) -> None:
    for layer in block:
        axes.add_patch(Rectangle((head - 0.45, layer - 0.5), 0.9, 1, facecolor=colour, linewidth=0))
    axes.add_patch(
        Rectangle(
            (head - 0.45, block[0] - 0.5), 0.9, len(block), fill=False, edgecolor="white", linewidth=1.5
        )
    )
    if len(block) > 1:
        axes.plot(head, block[0], marker="o", color="black", markersize=4)


def _colours(count: int) -> list[Any]:
    if count <= 10:
        return list(matplotlib.color_sequences["tab10"][:count])
    return list(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


def _save(figure: Figure, path: Path) -> Path:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    atomic_write_bytes(path, buffer.getvalue())
    return path
