"""Pictures of prepared data: tokens per length interval before and after the draw, how full the rows are, who gave what."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pod.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER, DRY, WANTED = "#9aa5b1", "#1f6f8b", "#d98e04", "#c0392b"
SOURCE_COLORS = (
    "#1f6f8b", "#d98e04", "#5b8c5a", "#a23b72", "#6c757d", "#2e4057", "#f2c14e", "#8fb8de", "#b56576", "#3a7d44",
)  # fmt: skip
SIDE_BY_SIDE = 9
"""Most intervals for which before and after stand beside each other; more of them stand one above the other."""
LABELLED_TWICE = 14
"""Most intervals whose bars have room for the number of documents too."""
LETTER_INCHES = 0.095
"""Width of a letter of an interval's name."""
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
"""Keeps the line of the equal share out of the labels."""
SHARE_LABEL = 0.04
"""A piece of a stacked bar below this share is too narrow for its number."""


def draw_all(manifest: dict[str, Any], packing: dict[str, Any], folder: Path) -> list[Path]:
    """Write `lengths.png`, `packing.png` and, when the manifest tells sources apart, `sources.png`; returns their paths.

    `packing` as in `pod.data.inspect.packing`. Raises `OSError` when `folder` cannot be written.
    """
    drawn = []
    if manifest.get("intervals"):
        drawn.append(folder / "lengths.png")
        draw_lengths(manifest, drawn[-1])
    drawn.append(folder / "packing.png")
    draw_packing(manifest, packing, drawn[-1])
    shares = source_shares((manifest.get("read") or {}).get("sources") or [], manifest.get("weights") or [])
    if shares:
        drawn.append(folder / "sources.png")
        draw_sources(shares, drawn[-1])
    return drawn


def draw_lengths(manifest: dict[str, Any], path: Path) -> None:
    """Write a PNG from the manifest's `intervals`: left (or above) what the sources hold, right (below) what was drawn."""
    intervals = manifest["intervals"]
    count = len(intervals)
    stacked = count > SIDE_BY_SIDE
    panels = 1 if stacked else 2
    width = min(max(11.0, panels * (1.1 * count + 1.2)), 18.0)
    figure = _figure(width, 8.0 if stacked else 4.4)
    above, below = figure.subplots(*((2, 1) if stacked else (1, 2)))
    for axis, when, color in ((above, "before", BEFORE), (below, "after", AFTER)):
        _interval_bars(axis, intervals, when, color)
        if max(len(interval["name"]) for interval in intervals) * count * LETTER_INCHES > width / panels - 1:
            axis.tick_params(axis="x", labelrotation=45, labelsize=8)
    equal = manifest["balance"]["equal_share_tokens"]
    below.axhline(equal, color=WANTED, linewidth=1.2, linestyle="--", zorder=0.5)
    below.set_ylim(0, max(below.get_ylim()[1], 1.25 * equal))
    above.set_title(
        f"before: {short_number(sum(i['tokens_before'] for i in intervals))} tokens in the sources",
        fontsize=10,
    )
    below.set_title(
        f"after: {short_number(manifest['num_tokens'])} tokens in {manifest['num_rows']:,} rows of "
        f"{manifest['context_length']:,}, padding {100 * manifest['padding_share']:.2f} %",
        fontsize=10,
    )
    _lengths_legend(figure, intervals, equal)
    _save(figure, path)


def _interval_bars(axis: Axes, intervals: Sequence[dict[str, Any]], when: str, color: str) -> None:
    names = [interval["name"] for interval in intervals]
    tokens = [interval[f"tokens_{when}"] for interval in intervals]
    colors = [DRY if when == "after" and interval.get("ran_dry") else color for interval in intervals]
    bars = axis.bar(names, tokens, color=colors, width=0.7)
    labels = []
    for interval, amount in zip(intervals, tokens, strict=True):
        label = short_number(amount)
        if len(names) <= LABELLED_TWICE:
            documents = interval[f"documents_{when}"]
            label += f"\n{short_number(documents)} doc{'' if documents == 1 else 's'}"
        if when == "after" and interval.get("passes", 0) > 1.005:
            label += f"\n×{interval['passes']:.2g}"
        labels.append(label)
    axis.bar_label(bars, labels, fontsize=8 if len(names) <= 24 else 6, padding=3, bbox=LABEL_BOX)
    axis.set_ylim(0, 1.25 * max([*tokens, 1]))
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_xlabel("document length [tokens]")
    axis.set_ylabel("tokens in the interval")
    axis.yaxis.set_major_formatter(lambda value, _: short_number(value))
    axis.spines[["top", "right"]].set_visible(False)


def _lengths_legend(figure: Figure, intervals: Sequence[dict[str, Any]], equal: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    share = f"equal share: {short_number(equal)} tokens"
    entries: list[Any] = [Line2D([], [], color=WANTED, linewidth=1.2, linestyle="--", label=share)]
    if any(interval.get("ran_dry") for interval in intervals):
        entries.append(Patch(color=DRY, label="ran dry: the sources hold less than the share"))
    if any(interval.get("passes", 0) > 1.005 for interval in intervals):
        entries.append(
            Line2D(
                [],
                [],
                linestyle="",
                marker="$×n$",
                markersize=13,
                color="black",
                label="times a document is used",
            )
        )
    figure.legend(handles=entries, loc="outside lower right", ncols=len(entries), fontsize=8, frameon=False)


def draw_packing(manifest: dict[str, Any], packing: dict[str, Any], path: Path) -> None:
    """Write a PNG: left rows by their number of documents, right rows by their share of padding."""
    rows = max(manifest["num_rows"], 1)
    figure = _figure(12.0, 4.2)
    left, right = figure.subplots(1, 2)
    classes = count_classes(packing["documents_per_row"])
    _share_bars(left, [name for name, _ in classes], [count for _, count in classes], rows, AFTER)
    left.set_xlabel("documents in a row")
    left.set_title(f"{packing['mean_documents_per_row']:.2f} documents in a row on average", fontsize=10)
    padding = packing["padding_classes"]
    _share_bars(
        right, [entry["name"] for entry in padding], [entry["rows"] for entry in padding], rows, BEFORE
    )
    right.set_xlabel("padding in a row, of its length")
    right.set_title(
        f"{100 * packing['padding_share']:.2f} % padding over {manifest['num_rows']:,} rows of "
        f"{manifest['context_length']:,} tokens",
        fontsize=10,
    )
    _save(figure, path)


def _share_bars(axis: Axes, names: Sequence[str], counts: Sequence[int], total: int, color: str) -> None:
    bars = axis.bar(names, [100 * count / total for count in counts], color=color, width=0.7)
    labels = [f"{100 * count / total:.3g} %\n{short_number(count)}" if count else "0" for count in counts]
    axis.bar_label(bars, labels, fontsize=8, padding=2)
    axis.set_ylim(0, 1.2 * max([100 * count / total for count in counts], default=1))
    axis.set_ylabel("share of all rows [%]")
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def source_shares(
    sources: Sequence[dict[str, Any]], weights: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Tokens of each source in each interval and in all: [{name, sources: {label: {before, after, wanted}}}].

    `sources` and `weights` as in the manifest (`read.sources`, `weights`); without weights only the row over all lengths.
    `wanted` is the share that `data.weights` asks for, None where it asks for none. [] for a single source.
    """
    specs = [source["source"] for source in sources]
    if len(specs) < 2 or any("tokens_after" not in source for source in sources):
        return []
    labels = [spec if specs.count(spec) == 1 else f"{number}: {spec}" for number, spec in enumerate(specs, 1)]
    shares: dict[str, dict[str, Any]] = {}
    for entry in weights:
        row = shares.setdefault(entry["interval"], {})
        row[labels[entry["source"]]] = {
            "before": entry["tokens_before"],
            "after": entry["tokens_after"],
            "wanted": entry["weight"],
        }
    shares["all"] = {
        label: {"before": source["train_tokens"], "after": source["tokens_after"], "wanted": None}
        for label, source in zip(labels, sources, strict=True)
    }
    return [{"name": name, "sources": row} for name, row in shares.items()]


def draw_sources(shares: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG of what share each source has in each interval (`source_shares`): in the sources, and drawn."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    specs = list(dict.fromkeys(spec for interval in shares for spec in interval["sources"]))
    colors = {spec: SOURCE_COLORS[number % len(SOURCE_COLORS)] for number, spec in enumerate(specs)}
    shown = _label_specs(specs)
    figure = _figure(13.0, 1.6 + 0.36 * len(shares) + 0.2 * len(specs))
    left, right = figure.subplots(1, 2, sharey=True)
    _stacked(left, shares, "before", colors)
    _stacked(right, shares, "after", colors)
    has_weights = _wanted_marks(right, shares)
    left.set_title("tokens in the sources", fontsize=10)
    right.set_title("tokens drawn", fontsize=10)
    left.set_ylabel("document length [tokens]")
    left.set_ylim(len(shares) - 0.4, -0.6)
    entries: list[Any] = [Patch(color=colors[spec], label=shown[spec]) for spec in specs]
    if has_weights:
        mark = Line2D([], [], linestyle="", marker="|", markersize=9, markeredgewidth=2, color="black")
        mark.set_label("where data.weights put the border")
        entries.append(mark)
    figure.legend(handles=entries, loc="outside lower left", ncols=2, fontsize=8, frameon=False)
    _save(figure, path)


def _stacked(axis: Axes, shares: Sequence[dict[str, Any]], when: str, colors: dict[str, str]) -> None:
    names = [interval["name"] for interval in shares]
    totals = [sum(source[when] for source in interval["sources"].values()) for interval in shares]
    starts = [0.0] * len(shares)
    for spec, color in colors.items():
        parts = [
            100 * interval["sources"].get(spec, {}).get(when, 0) / max(total, 1)
            for interval, total in zip(shares, totals, strict=True)
        ]
        bars = axis.barh(names, parts, left=starts, color=color, height=0.7)
        labels = [f"{part:.3g}" if part >= 100 * SHARE_LABEL else "" for part in parts]
        axis.bar_label(bars, labels, label_type="center", fontsize=8, color=_ink(color))
        starts = [start + part for start, part in zip(starts, parts, strict=True)]
    for row, total in enumerate(totals):
        axis.annotate(short_number(total), (101, row), va="center", fontsize=8, annotation_clip=False)
    axis.set_xlim(0, 100)
    axis.set_xlabel("share of the interval [%], its tokens at the right")
    axis.spines[["top", "right"]].set_visible(False)


def _wanted_marks(axis: Axes, shares: Sequence[dict[str, Any]]) -> bool:
    """A tick at each border between sources as the weights want it."""
    marked = False
    for row, interval in enumerate(shares):
        border = 0.0
        for source in list(interval["sources"].values())[:-1]:
            if source["wanted"] is None:
                break
            border += 100 * source["wanted"]
            axis.plot([border, border], [row - 0.45, row + 0.45], color="black", linewidth=2)
            marked = True
    return marked


def _label_specs(specs: Sequence[str]) -> dict[str, str]:
    """Source specs short enough for a legend, still different from each other."""
    short = {spec: spec if len(spec) <= 70 else f"{spec[:32]}…{spec[-37:]}" for spec in specs}
    if len(set(short.values())) == len(specs):
        return short
    return {spec: f"{number}: {short[spec]}" for number, spec in enumerate(specs, start=1)}


def _ink(color: str) -> str:
    """Black on light colours, white on dark ones (luma of ITU-R BT.601)."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def count_classes(histogram: dict[int, int]) -> list[tuple[str, int]]:
    """Rows by their number of documents: 1, 2, 3–4, 5–8, …, from the first class to the last that has rows."""
    if not histogram:
        return []
    found, low, high = [], 1, 1
    while low <= max(histogram):
        rows = sum(count for documents, count in histogram.items() if low <= documents <= high)
        found.append((str(low) if low == high else f"{low:,}–{high:,}", rows))
        low, high = high + 1, 2 * high
    while not found[0][1]:
        found.pop(0)
    return found


def short_number(value: float) -> str:
    """1234567 → `1.23M`; three digits at most."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999,999 is 1M, not 1e+03k
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _figure(width: float, height: float) -> Figure:
    """A figure of that size in inches that no window and no global state knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    # without the version of matplotlib, which would make the same picture differ
    figure.savefig(buffer, format="png", metadata={"Software": None})
    atomic_write_bytes(path, buffer.getvalue())
