"""Table, JSON and picture of the rows that adaptation_smollm2.py has measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pod.eval.results import environment
from pod.eval.stats import paired_change, wilson_interval
from pod.files import atomic_write_text, read_json, write_json

RESAMPLES = 2000
LONGEST_BAR = 14.0  # perplexity; beyond it the number alone tells
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "adaptation_smollm2.png"


def assemble(kept: Path, results: Path, order: Sequence[str]) -> None:
    """Write adaptation_smollm2.json and .md into `results` and the picture into docs/images; says what is missing."""
    found = {name: read_json(kept / f"{name}.json") for name in order if (kept / f"{name}.json").is_file()}
    rows = [add_change(without_folders(row), found.get("dense")) for row in found.values()]
    content = {"schema": 1, "benchmark": "adaptation_smollm2", "environment": environment(), "rows": rows}
    write_json(results / "adaptation_smollm2.json", content)
    atomic_write_text(results / "adaptation_smollm2.md", table(rows))
    draw(rows, PICTURE)
    missing = [name for name in order if name not in found]
    print(f"{len(rows)} rows written; not measured: {', '.join(missing) or 'none'}")


def without_folders(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the name of its plan in place of the plan's path on the machine that measured it."""
    model = {key: Path(value).name if key == "plan" else value for key, value in row["model"].items()}
    return row | {"model": model}


def add_change(row: dict[str, Any], dense: dict[str, Any] | None) -> dict[str, Any]:
    """The row with its change of perplexity against the dense model that was trained on the same tokens, paired by sequence."""
    if dense is None:
        return row
    losses, base = row["sequence_losses"], dense["sequence_losses"]
    return row | {"change": paired_change(losses, base, [1] * len(losses), RESAMPLES)}


def passkeys(row: dict[str, Any]) -> tuple[int, int]:
    """Keys found and asked for, over all lengths and depths."""
    shares = [share for depths in row["passkey"].values() for share in depths.values()]
    each = row["passkeys_per_cell"]
    return round(sum(shares) * each), len(shares) * each


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line per row."""
    lines = [
        "| row | saving | MB after 2,048 tokens | perplexity | last 1,024 positions | change against dense, 95 % | passkeys, 95 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        right, asked = passkeys(row)
        low, high = wilson_interval(right, asked)
        lines.append(
            f"| {row['name']} | {row['asymptotic_saving']:.1%} | {row['bytes'] / 1e6:.1f} | {row['perplexity']:.2f} | "
            f"{row['perplexity_last_1024']:.2f} | {change_text(row)} | {right} of {asked} ({low:.0%}–{high:.0%}) |"
        )
    return "\n".join(lines) + "\n"


def change_text(row: dict[str, Any]) -> str:
    """`+3.1 % (2.0 … 4.4)`, or a dash."""
    change = row.get("change")
    if change is None or change["ci95"] is None:
        return "–"
    low, high = change["ci95"]
    return f"{100 * change['change']:+.1f} % ({100 * low:+.1f} … {100 * high:+.1f})"


def draw(rows: Sequence[dict[str, Any]], target: Path) -> None:
    """Left: perplexity before (hollow) and after adaptation (filled) by saving and plan. Right: ways to adapt, other layouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_name = {row["name"]: row for row in rows}
    for color, kind in zip(("C3", "C0", "C2"), ("greedy", "dp", "retrieval"), strict=True):
        for suffix, fill in ((", untrained", "none"), ("", color)):
            cells = [by_name.get(f"{kind} {percent}%{suffix}") for percent in (30, 35, 40, 45)]
            if kind == "retrieval" and not suffix:
                cells[1] = by_name.get("full")
            points = [(100 * cell["asymptotic_saving"], cell["perplexity"]) for cell in cells if cell]
            label = f"{kind}, {'before' if suffix else 'after'} adaptation"
            left.plot(*zip(*points, strict=True), marker="o", color=color, markerfacecolor=fill, label=label,
                      linestyle=":" if suffix else "-") if points else None  # fmt: skip
    left.set_yscale("log", subs=[])
    left.set_yticks([6, 8, 10, 15, 20, 30, 40], ["6", "8", "10", "15", "20", "30", "40"])
    left.set_xticks([30, 35, 40, 45])
    left.set_xlabel("saving of KV bytes in the limit (%)")
    left.set_ylabel("perplexity, positions 256 to 2,047")
    if "dense" in by_name:
        left.axhline(by_name["dense"]["perplexity"], color="0.5", linewidth=1, label="dense, same tokens")
    left.legend(fontsize=8)
    others = [row for row in rows if "%" not in row["name"]]
    right.barh(
        [row["name"] for row in others], [min(row["perplexity"], LONGEST_BAR) for row in others], color="C0"
    )
    for place, row in enumerate(others):
        found, asked = passkeys(row)
        label = f" {row['perplexity']:.2f}; {row['bytes'] / 1e6:.0f} MB; passkeys {found}/{asked}"
        right.text(min(row["perplexity"], LONGEST_BAR), place, label, va="center", fontsize=8)
    right.set_xlim(0, 2 * LONGEST_BAR)
    right.invert_yaxis()
    right.set_xlabel("perplexity after training on the same tokens")
    figure.suptitle("SmolLM2-135M adapted on 49,000 tokens: plans by saving, ways to adapt, other layouts")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
