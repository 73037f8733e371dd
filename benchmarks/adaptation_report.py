"""Table, JSON and picture of the rows that adaptation_smollm2.py has measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pod.eval.results import environment
from pod.eval.stats import paired_change, wilson_interval
from pod.files import atomic_write_text, read_json, write_json

RESAMPLES = 2000
LONGEST_BAR = 14.0  # perplexity; beyond it the number alone tells
HIGHEST = 9.0  # perplexity; plans beyond it are no choice
SAVINGS = (30, 35, 40, 45)
LABELS = {
    "greedy": "greedy, similarity",
    "dp": "dp, similarity",
    "distant": "distant",
    "output": "output",
    "projected": "projected",
    "loss": "loss",
    "refined": "loss, refined",
    "retrieval": "projected + retrieval",
}
COLORS = dict(zip(LABELS, ("C3", "C0", "C7", "C8", "C1", "C4", "C9", "C2"), strict=True))
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
    """Plans by saving before and after adaptation; ways to adapt and other layouts; costs of plans after it: perplexity, passkeys."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.8), layout="constrained")
    (upper, ways), (costs, keys) = figure.subplots(2, 2)
    by_name = {row["name"]: row for row in rows}
    draw_before_and_after(upper, by_name)
    draw_ways(ways, [row for row in rows if "%" not in row["name"]])
    draw_costs(costs, keys, by_name)
    figure.suptitle("SmolLM2-135M adapted on 49,000 tokens: plans by saving, ways to adapt, other layouts")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def cells(by_name: dict[str, dict[str, Any]], kind: str, suffix: str = "") -> list[dict[str, Any]]:
    """Rows of one kind of plan by saving; two of them stand in the table under another name."""
    names = {percent: f"{kind} {percent}%{suffix}" for percent in SAVINGS}
    other = {"retrieval": "full", "loss": "full, plan by loss"}
    if not suffix and kind in other:
        names[35] = other[kind]
    return [by_name[name] for name in names.values() if name in by_name]


def savings_axis(axes: Any) -> None:
    """The common x axis."""
    axes.set_xticks(SAVINGS)
    axes.set_xlabel("saving of KV bytes in the limit (%)")


def draw_before_and_after(axes: Any, by_name: dict[str, dict[str, Any]]) -> None:
    """Perplexity before (hollow) and after adaptation (filled) by saving and plan, logarithmic."""
    for kind in ("greedy", "dp", "retrieval"):
        for suffix in (", untrained", ""):
            points = [
                (100 * row["asymptotic_saving"], row["perplexity"]) for row in cells(by_name, kind, suffix)
            ]
            if points:
                color = COLORS[kind]
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    color=color,
                    markerfacecolor="none" if suffix else color,
                    linestyle=":" if suffix else "-",
                    label=f"{LABELS[kind]}, {'before' if suffix else 'after'}",
                )
    axes.set_yscale("log", subs=[])
    axes.set_yticks([6, 8, 10, 15, 20, 30, 40], ["6", "8", "10", "15", "20", "30", "40"])
    savings_axis(axes)
    axes.set_ylabel("perplexity, positions 256 to 2,047")
    axes.set_title("before and after adaptation", fontsize=10)
    if "dense" in by_name:
        axes.axhline(by_name["dense"]["perplexity"], color="0.5", linewidth=1, label="dense, same tokens")
    axes.legend(fontsize=8)


def draw_ways(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Ways to adapt and other layouts."""
    lengths = [min(row["perplexity"], LONGEST_BAR) for row in rows]
    axes.barh([row["name"] for row in rows], lengths, color="C0")
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        found, asked = passkeys(row)
        label = f" {row['perplexity']:.2f}; {row['bytes'] / 1e6:.0f} MB; passkeys {found}/{asked}"
        axes.text(length, place, label, va="center", fontsize=8)
    axes.set_xlim(0, 2 * LONGEST_BAR)
    axes.invert_yaxis()
    axes.set_xlabel("perplexity after training on the same tokens")
    axes.set_title("ways to adapt at 35 %, other layouts", fontsize=10)


def draw_costs(left: Any, right: Any, by_name: dict[str, dict[str, Any]]) -> None:
    """What plans by each cost come to after adaptation: perplexity up to HIGHEST, and passkeys found."""
    for kind in COLORS:
        rows = cells(by_name, kind)
        if not rows:
            continue
        x = [100 * row["asymptotic_saving"] for row in rows]
        style = {"marker": "o", "color": COLORS[kind], "label": LABELS[kind], "markersize": 4}
        left.plot(x, [row["perplexity"] for row in rows], **style)
        right.plot(x, [passkeys(row)[0] for row in rows], **style)
    if "dense" in by_name:
        left.axhline(by_name["dense"]["perplexity"], color="0.5", linewidth=1)
    left.set_ylim(5.8, HIGHEST)
    left.set_ylabel("perplexity")
    left.set_title(f"costs after adaptation (lines that end lie above {HIGHEST:g})", fontsize=10)
    right.set_ylim(-0.5, 20.5)
    right.set_yticks(range(0, 21, 5))
    right.set_ylabel("passkeys found of 20")
    right.set_title("the same plans: passkeys", fontsize=10)
    for axes in (left, right):
        savings_axis(axes)
    right.legend(fontsize=8)
