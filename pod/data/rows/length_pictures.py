"""The picture of prepared data: tokens per length interval, in the sources and drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pod.data.rows.manifest import pieces
from pod.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE_NAME = "lengths.png"
BEFORE, AFTER, DRY, WANTED = "#9aa5b1", "#1f6f8b", "#d98e04", "#c0392b"
"""Colours: tokens read, tokens drawn, drawn in an interval that ran dry, and the line of equal shares."""
INCHES_PER_BAR = 1.1


def draw_lengths(manifest: dict[str, Any], path: Path) -> None:
    """Write a PNG of the manifest's `intervals`: the tokens read in the upper part, those drawn in the lower.

    Raises:
        OSError: when it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # unlike a figure of pyplot, it has no window and no global state

    intervals = manifest["intervals"]
    width = max(8.0, INCHES_PER_BAR * len(intervals) + 1.5)
    figure = Figure(figsize=(width, 6.4), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    for axis, when in ((above, "before"), (below, "after")):
        _bars(axis, intervals, when, pieces(manifest))
    equal = manifest["balance"]["equal_share_tokens"]
    below.axhline(equal, color=WANTED, linewidth=1.2, linestyle="--", zorder=0.5)
    below.set_ylim(0, max(below.get_ylim()[1], 1.25 * equal))
    total = sum(one["tokens_before"] for one in intervals)
    above.set_title(f"in the sources: {short_number(total)} tokens", fontsize=10)
    below.set_title(
        f"drawn: {short_number(manifest['num_tokens'])} tokens in {manifest['num_rows']:,} rows of "
        f"{manifest['context_length']:,} (dashed: equal share, {short_number(equal)}; "
        "orange: the sources hold less)",
        fontsize=10,
    )
    below.set_xlabel("document length [tokens]")
    buffer = io.BytesIO()
    # The version of matplotlib is left out: with it, equal pictures would be different files.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    atomic_write_bytes(path, buffer.getvalue())


def _bars(axis: Axes, intervals: list[dict[str, Any]], when: str, what: str) -> None:
    tokens = [one[f"tokens_{when}"] for one in intervals]
    color = BEFORE if when == "before" else AFTER
    colors = [DRY if when == "after" and one["ran_dry"] else color for one in intervals]
    bars = axis.bar([one["name"] for one in intervals], tokens, color=colors, width=0.7)
    labels = [
        f"{short_number(amount)}\n{short_number(one[f'documents_{when}'])} {what}"
        + (f" ×{one['passes']:.2g}" if when == "after" and one["passes"] > 1.005 else "")
        for one, amount in zip(intervals, tokens, strict=True)
    ]
    axis.bar_label(bars, labels, fontsize=8, padding=3)
    axis.set_ylim(0, 1.3 * max([*tokens, 1]))
    axis.set_ylabel("tokens in the interval")
    axis.yaxis.set_major_formatter(lambda value, _: short_number(value))
    axis.spines[["top", "right"]].set_visible(False)


def short_number(value: float) -> str:
    """A number as text of at most three digits: 1234567 → `1.23M`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999,999 is 1M, not 1e+03k
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def short_bytes(num_bytes: float) -> str:
    """A number of bytes as text: 1234567 → `1.23MB`."""
    return short_number(num_bytes).replace("B", "G") + "B"
