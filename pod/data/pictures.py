"""The picture of a prepared data set: tokens and documents per length interval, before and after the draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEFORE, AFTER, WANTED = "#9aa5b1", "#1f6f8b", "#c0392b"


def draw_lengths(manifest: dict[str, Any], path: Path) -> None:
    """Write a PNG from the manifest's `intervals`: left what the sources hold, right what was drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    intervals = manifest["intervals"]
    names = [interval["name"] for interval in intervals]
    width = max(8.0, 2 * (1.1 * len(names) + 1.2))
    figure = Figure(figsize=(min(width, 18.0), 4.2), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axis, when, color in ((left, "before", BEFORE), (right, "after", AFTER)):
        tokens = [interval[f"tokens_{when}"] for interval in intervals]
        bars = axis.bar(names, tokens, color=color, width=0.7)
        labels = [
            f"{short_number(count)}\n{short_number(interval[f'documents_{when}'])} docs"
            for count, interval in zip(tokens, intervals, strict=True)
        ]
        axis.bar_label(bars, labels, fontsize=8, padding=2)
        axis.set_ylim(0, 1.22 * max([*tokens, 1]))
        axis.set_xlabel("document length [tokens]")
        axis.set_ylabel("tokens in the interval")
        axis.yaxis.set_major_formatter(lambda value, _: short_number(value))
        axis.spines[["top", "right"]].set_visible(False)
    equal = manifest["balance"]["equal_share_tokens"]
    right.axhline(
        equal, color=WANTED, linewidth=1, linestyle="--", label=f"equal share: {short_number(equal)}"
    )
    right.set_ylim(0, 1.15 * max(right.get_ylim()[1], equal))
    right.legend(loc="upper right", fontsize=8, frameon=False)
    left.set_title(
        f"before: {short_number(sum(i['tokens_before'] for i in intervals))} tokens in the sources",
        fontsize=10,
    )
    right.set_title(
        f"after: {short_number(manifest['num_tokens'])} tokens in {manifest['num_rows']} rows of "
        f"{manifest['context_length']}, padding {100 * manifest['padding_share']:.2f} %",
        fontsize=10,
    )
    figure.savefig(path)


def short_number(value: float) -> str:
    """1234567 → `1.23M`; three digits at most."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:  # 999,999 is 1M, not 1e+03k
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
