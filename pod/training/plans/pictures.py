"""Pictures of what was measured, of the plan made from it, and of all savings (paper Figures 1d and 5)."""

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from pod.files import atomic_write_bytes
from pod.modeling.retrieval_heads import RetrievalHeads
from pod.modeling.shipped.sharing import SharingPlan

MAX_LABELLED_HEADS = 16  # curves that a legend can still tell apart
BLOCK_COLOURS = matplotlib.color_sequences["Set2"][:7]  # the eighth is grey
SINGLE_COLOUR = "#d5d5d5"
ROLE_COLOURS = {"leads": "#1f3b73", "followers": "#e08214", "windows": "#b8d7ef"}
ROLE_MEANINGS = {"leads": "lead", "followers": "follow", "windows": "keep their window"}
FORBIDDEN_COLOURS = ("#b8d7ef", "#e08214", "#7a9a3a")


def save_similarity_pictures(
    folder: str | os.PathLike[str], similarity: ArrayLike, num_key_value_heads: int, subject: str
) -> list[Path]:
    """Write adjacent_similarity.png and similarity_heads.png; `subject` names the model in the titles."""
    values = np.asarray(similarity, dtype=np.float64)
    figures = {
        "adjacent_similarity.png": adjacent_similarity(values, num_key_value_heads, subject),
        "similarity_heads.png": head_maps(values, num_key_value_heads, subject),
    }
    return [save_picture(figure, Path(folder) / name) for name, figure in figures.items()]


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
    _finish_maps(figure, grid, image, "similarity (1 − JSD₂): 1 = identical, 0 = disjoint", "layer")
    figure.suptitle(f"Attention similarity between layers\n{subject}", fontsize=12)
    return figure


def _finish_maps(figure: Figure, grid: NDArray[Any], image: Any, meaning: str, columns: str) -> None:
    """Axes of a grid of maps over layers, and a bar that says what their colours mean."""
    for axes in grid.flat:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(labelsize=8)
    figure.colorbar(image, ax=list(grid.flat), shrink=0.8, pad=0.02, aspect=30).set_label(meaning)
    figure.supxlabel(columns, fontsize=11)
    figure.supylabel("layer", fontsize=11)


def cost_maps(
    follow: NDArray[np.float64] | None, window: NDArray[np.float64] | None, plan: SharingPlan, subject: str
) -> Figure:
    """What it costs each layer to follow each lower one, a map per KV head, and to keep its window, a map of all; dots where the
    plan does it.

    follow: ``[L, L, H]``, read where lead < layer; window: ``[L, H]``. By place, None = not priced.
    """
    assert follow is not None or window is not None
    maps = _follow_maps(follow, plan) if follow is not None else []
    if window is not None:
        dots = [
            (head, layer)
            for layer, row in enumerate(plan.lead)
            for head, lead in enumerate(row)
            if lead is None
        ]
        maps.append(("window, by KV head", np.ma.asarray(window), dots))
    columns = math.ceil(math.sqrt(len(maps)))
    rows = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(3.9 * columns + 1.1, 3.9 * rows + 0.9), layout="constrained")
    grid: NDArray[Any] = figure.subplots(rows, columns, squeeze=False)
    shown = np.concatenate([values.compressed() for _, values, _ in maps])
    shown = shown[shown > 0]
    low, high = (np.quantile(shown, share) for share in (0.02, 0.98)) if shown.size else (0.1, 1.0)
    norm = LogNorm(vmin=max(low, high * 1e-6, 1e-12), vmax=max(high, 1e-11), clip=True)
    image = None
    for axes in grid.flat[len(maps) :]:
        axes.set_visible(False)
    for axes, (title, values, dots) in zip(grid.flat, maps, strict=False):
        shape = values.shape
        image = axes.imshow(
            np.maximum(values, norm.vmin or 0),
            norm=norm,
            origin="lower",
            cmap="viridis_r",
            aspect=shape[1] / shape[0],
        )
        if dots:
            axes.plot(*zip(*dots, strict=True), linestyle="", marker="o", color="black", markersize=2.5)
        axes.set_title(title, fontsize=9)
    _finish_maps(figure, grid, image, "cost (logarithmic)", "lead, or KV head")
    figure.suptitle(f"What roles cost; dots: what the plan does\n{subject}", fontsize=12)
    return figure


def _follow_maps(
    follow: NDArray[np.float64], plan: SharingPlan
) -> list[tuple[str, Any, list[tuple[int, int]]]]:
    num_layers, _, heads = follow.shape
    lower = np.tril(np.ones((num_layers, num_layers), dtype=bool), k=-1)  # [layer, lead]
    maps = []
    for head in range(heads):
        pairs = [(layer, row[head]) for layer, row in enumerate(plan.lead)]
        dots = [(lead, layer) for layer, lead in pairs if lead not in (None, layer)]
        maps.append((f"follow, KV head {head}", np.ma.masked_where(~lower, follow[:, :, head].T), dots))
    return maps


def head_score_maps(heads: RetrievalHeads, subject: str) -> Figure:
    """Induction and echo scores, layer × query head (RazorAttention §3.3); dots: heads chosen for either, whose KV heads keep all."""
    maps = {"what followed (induction)": heads.induction, "earlier copies (echo)": heads.echo}
    width = 2.4 + 0.22 * len(heads.echo[0])
    figure = Figure(figsize=(2 * width, 2 + 0.17 * len(heads.echo)), layout="constrained")
    grid: NDArray[Any] = figure.subplots(1, len(maps), squeeze=False, sharex=True, sharey=True)
    dots = [(head, layer) for layer, chosen in enumerate(heads.query_heads) for head in chosen]
    image = None
    for axes, (name, scores) in zip(grid.flat, maps.items(), strict=True):
        image = axes.imshow(scores, vmin=0, vmax=1, origin="lower", cmap="viridis", aspect="auto")
        axes.plot(*np.array(dots).reshape(-1, 2).T, linestyle="", marker="o", color="crimson", markersize=3)
        axes.set_title(name, fontsize=9)
    _finish_maps(figure, grid, image, "mean attention, 0 to 1", "query head")
    figure.suptitle(f"Heads that look far back; dots: those chosen\n{subject}", fontsize=12)
    return figure


def pareto_picture(curve: dict[str, Any], subject: str) -> Figure:
    """Saving → least cost, also with a role or packing forbidden, above how many heads of each layer have each role along the
    curve and which layers are packed.

    curve: from `pareto`.
    """
    points = curve["points"]
    saving = np.array([100 * point["saving"] for point in points])
    panels = [
        (ROLE_COLOURS[x], ROLE_MEANINGS[x], [point["per_layer"][x] for point in points]) for x in ROLE_COLOURS
    ]
    heads = sum(layers[0][0] for _, _, layers in panels)
    if any(point["packed_layers"] for point in points):
        places = range(len(points[0]["per_layer"]["leads"]))
        flags = [[heads * (layer in point["packed_layers"]) for layer in places] for point in points]
        panels.append((FORBIDDEN_COLOURS[2], "hold 4 bits", flags))
    figure = Figure(figsize=(10, 7 + 2 * len(panels)), layout="constrained")
    axes: NDArray[Any] = figure.subplots(
        2 + len(panels), 1, sharex=True, height_ratios=(3, 1.5, *(2 for _ in panels))
    )
    _draw_curves(axes[0], curve, saving)
    shares = [[point[role] for point in points] for role in ROLE_COLOURS]
    axes[1].stackplot(
        saving, *shares, colors=list(ROLE_COLOURS.values()), labels=[ROLE_MEANINGS[x] for x in ROLE_COLOURS]
    )
    axes[1].set_ylabel("(layer, KV head)\npairs that …")
    axes[1].legend(loc="lower left", fontsize=9)
    edges = np.concatenate([saving[:1], (saving[1:] + saving[:-1]) / 2, saving[-1:]])
    for place, (colour, meaning, layers) in zip(axes[2:], panels, strict=True):
        counts = np.array(layers).T  # [L, points]
        colours = LinearSegmentedColormap.from_list(meaning, ["white", colour], N=heads + 1)
        image = place.pcolormesh(
            edges, np.arange(len(counts) + 1) - 0.5, counts, cmap=colours, vmin=-0.5, vmax=heads + 0.5
        )
        place.set_ylabel("layer")
        place.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        bar = figure.colorbar(image, ax=place, pad=0.01, ticks=MaxNLocator(5, integer=True))
        bar.set_label(f"KV heads that\n{meaning}")
    for place in axes:
        place.axvline(100 * curve["chosen"]["saving"], color="crimson", linewidth=1.2)
    length = curve["budget_length"]
    where = f"at {length:,} tokens" if length else "of long sequences"
    axes[-1].set_xlabel(f"share of KV bytes saved {where} (%)", fontsize=11)
    figure.suptitle(f"The least cost of every saving, and who pays it\n{subject}", fontsize=12)
    return figure


def _draw_curves(axes: Axes, curve: dict[str, Any], saving: NDArray[np.float64]) -> None:
    points = curve["points"]
    axes.plot(
        saving, _positive([x["cost"] for x in points]), color="black", linewidth=2.2, label="allowed roles"
    )
    for name, colour in zip(points[0]["cost_without"], FORBIDDEN_COLOURS, strict=False):
        costs = _positive([x["cost_without"][name] for x in points])
        label = f"without {name.replace('_', ' ')}"
        axes.plot(saving, costs, color=colour, linewidth=1.8, linestyle="--", label=label)
    units = [point["units"] for point in points].index(curve["chosen"]["units"])
    marked = _positive([points[units]["cost"]])
    axes.plot(saving[units : units + 1], marked, marker="o", color="crimson", linestyle="", label="the plan")
    axes.set_yscale("log")
    axes.set_ylabel(f"cost `{curve['cost']}`, summed over pairs")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9)


def _positive(costs: Sequence[float | None]) -> NDArray[np.float64]:
    """What a logarithmic axis can show."""
    return np.array([cost if cost and cost > 0 else np.nan for cost in costs])


def block_picture(plan: SharingPlan, subject: str) -> Figure:
    """The paper's Figure 5: a column per KV head, a colour per block, leads marked; leads that nobody follows are grey, windows
    are hollow."""
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
        for layer in (layer for layer, row in enumerate(plan.lead) if row[head] is None):
            axes.add_patch(
                Rectangle(
                    (head - 0.41, layer - 0.4), 0.82, 0.8, fill=False, edgecolor="#9a9a9a", linewidth=0.8
                )
            )
    axes.set(xlim=(-0.5, heads - 0.5), ylim=(-0.5, layers - 0.5), xlabel="KV head", ylabel="layer")
    axes.set_xticks(range(heads))
    axes.set_yticks(range(0, layers, 1 if layers <= 40 else 5))
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(
        f"What layers do about distant tokens\n{subject.replace('; ', chr(10))}\nKV saving {plan.asymptotic_saving:.1%}: {plan.num_leads} lead, "
        f"{plan.num_followers} follow, {plan.num_windows} keep their window",
        fontsize=11,
    )
    handles = [
        Line2D([], [], linestyle="", marker="o", color="black", markersize=6),
        Rectangle((0, 0), 1, 1, facecolor=BLOCK_COLOURS[0], edgecolor="white"),
        Rectangle((0, 0), 1, 1, facecolor=SINGLE_COLOUR, edgecolor="white"),
        Rectangle((0, 0), 1, 1, fill=False, edgecolor="#9a9a9a"),
    ]
    labels = [
        "lead of a block",
        "a block (colours only separate neighbours)",
        "leads alone",
        "keeps its window: sinks and recent tokens",
    ]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    return figure


def _draw_block(axes: Axes, head: int, block: Sequence[int], colour: Any) -> None:
    for layer in block:
        axes.add_patch(Rectangle((head - 0.45, layer - 0.5), 0.9, 1, facecolor=colour, linewidth=0))
    for first, count in _runs(block):
        axes.add_patch(
            Rectangle((head - 0.45, first - 0.5), 0.9, count, fill=False, edgecolor="white", linewidth=1.5)
        )
    if len(block) > 1:
        axes.plot(head, block[0], marker="o", color="black", markersize=4)


def _runs(block: Sequence[int]) -> list[tuple[int, int]]:
    """First layer and number of layers of each run; windows may stand between."""
    starts = [i for i, layer in enumerate(block) if not i or layer != block[i - 1] + 1]
    return [(block[i], j - i) for i, j in zip(starts, [*starts[1:], len(block)], strict=True)]


def _colours(count: int) -> list[Any]:
    if count <= 10:
        return list(matplotlib.color_sequences["tab10"][:count])
    return list(matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count)))


def save_picture(figure: Figure, path: Path) -> Path:
    """Write a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    atomic_write_bytes(path, buffer.getvalue())
    return path
