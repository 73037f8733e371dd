"""The tables of a report: methods by tasks, one task in detail, tasks of a suite, heat maps, and whatever a payload brings along."""

from dataclasses import dataclass
from typing import Any

from pod.eval.judge.verdicts import Against, Payload
from pod.eval.report.merge import (
    SUITE,
    Comparison,
    Entry,
    byte_share,
    combined,
    dense_bytes,
    held_rows,
    payload_of,
    suite_of,
)
from pod.eval.report.page import Cell, HeatMap, Table

NONE = Cell("–")
_TITLES = {
    "perplexity": "Perplexity by position",
    "passkey": "Passkey retrieval",
    "niah": "Needle in a haystack",
}
MOST_COLUMNS = 12


@dataclass(frozen=True)
class Column:
    """A task, or the tasks of one suite, which are shown as their mean."""

    title: str
    tasks: tuple[str, ...]


def columns(comparison: Comparison) -> list[Column]:
    """What the overview compares: single tasks, and suites of two or more tasks, in the order of the recipes."""
    return [
        Column(tasks[0] if len(tasks) == 1 else f"{_plain(name)} ({len(tasks)} tasks)", tasks)
        for name, tasks in comparison.suites().items()
    ]


def short_name(task: str) -> str:
    """A task's name inside the table of its suite."""
    found = SUITE.fullmatch(task)
    return found.group(2) if found and suite_of(task) else task


def title_of(task: str) -> str:
    """The head of a task's section."""
    return _TITLES.get(task, _plain(task))


def _plain(name: str) -> str:
    return name.removeprefix("pod_").replace("_", " ")


def is_ours(entry: Entry) -> bool:
    """Whether a row stands out: PoD as it is meant to be used."""
    return entry.method == "pod"


def ours(entries: list[Entry]) -> set[int]:
    """Numbers of the rows that stand out."""
    return {number for number, entry in enumerate(entries) if is_ours(entry)}


# -- cells ---------------------------------------------------------------------------------------------------


def value_text(payload: Payload, value: float) -> str:
    """Scores as 0 to 100, perplexity with two decimals."""
    if payload["kind"] != "nll":
        return f"{100 * value:.1f}"
    return f"{value:.2f}" if payload["metric"] == "perplexity" else f"{value:.4g}"


def value_cell(payload: Payload | None) -> Cell:
    """The number of a payload with its interval."""
    if payload is None or payload["value"] is None:
        return NONE
    interval = payload.get("ci95")
    small = "" if interval is None else "[" + ", ".join(value_text(payload, end) for end in interval) + "]"
    return Cell(value_text(payload, payload["value"]), small, payload["value"])


def change_text(against: Against) -> str:
    """Change of perplexity in percent, of scores in points."""
    return f"{against.delta:+.1%}" if against.relative else f"{100 * against.delta:+.1f}"


def change_cell(against: Against | None) -> Cell:
    """Δ to the base, its paired interval, and the p value that holds for the page."""
    if against is None:
        return NONE
    small = interval_text(against)
    if against.adjusted is not None:
        small = f"{small}\n{p_text(against.adjusted)}"
    return Cell(change_text(against), small, against.delta, against.mark)


def interval_text(against: Against) -> str:
    """The 95 % interval of a change."""
    if against.estimate.interval is None:
        return ""
    low, high = against.estimate.interval
    if against.relative:
        return f"[{low:+.1%}, {high:+.1%}]"
    return f"[{100 * low:+.1f}, {100 * high:+.1f}]"


def p_text(value: float) -> str:
    """A p value."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def missing_cell(entry: Entry, task: str) -> Cell:
    """Why there is no number."""
    if task in entry.failed or "" in entry.failed:
        return Cell("failed", tone="failed")
    return Cell("not run") if task in entry.refused else NONE


# -- the overview --------------------------------------------------------------------------------------------


def overview(comparison: Comparison) -> Table:
    """Every method: its value on each task or suite with Δ to full, bytes, saving, speed."""
    shown = columns(comparison)[:MOST_COLUMNS]
    length = common_length(comparison.entries)
    timed = any(run.speed for run in comparison.runs)
    heads = ["method", "KV MB", "saved", *[column.title for column in shown]]
    rows = []
    for entry in comparison.entries:
        cells = [_overview_cell(comparison, entry, column) for column in shown]
        row = [Cell(entry.label), *_byte_cells(entry, length), *cells]
        rows.append(row + (_speed_cells(entry) if timed else []))
    return Table(
        heads + (["tokens/s", "× full"] if timed else []), rows, ours=ours(comparison.entries), cards=True
    )


def _overview_cell(comparison: Comparison, entry: Entry, column: Column) -> Cell:
    payload = combined(entry, column.tasks)
    if payload is None:
        return missing_cell(entry, column.tasks[0]) if len(column.tasks) == 1 else NONE
    cell = value_cell(payload)
    against = comparison.against(entry, column.tasks)
    if against is not None:
        small = f"{change_text(against)}\n{interval_text(against)}"
        return Cell(cell.text, small, cell.sort, against.mark)
    return cell


def common_length(entries: list[Entry]) -> int | None:
    """The longest length (tokens) at which every row that has bytes has them."""
    lengths = [{row["length"] for row in _whole_rows(entry)} for entry in entries]
    lengths = [found for found in lengths if found]
    return max(set.intersection(*lengths), default=None) if lengths else None


def _whole_rows(entry: Entry) -> list[dict[str, Any]]:
    """Stated bytes of caches that reached their length; where answers ended early, only if there is nothing else."""
    rows = [row for row in held_rows(entry) if row["bytes"]]
    return [row for row in rows if row.get("held_tokens", row["length"]) >= row["length"]] or rows


def bytes_at(entry: Entry, length: int | None) -> dict[str, Any] | None:
    """The stated bytes at a length, else at the row's longest; the largest where several tasks state it."""
    rows = _whole_rows(entry)
    if not rows:
        return None
    there = [row for row in rows if row["length"] == length]
    wanted = there or [row for row in rows if row["length"] == max(row["length"] for row in rows)]
    return max(wanted, key=lambda row: row["bytes"])


def saving_of(row: dict[str, Any]) -> float:
    """Share of the dense bytes that is saved; what an empty answer or bookkeeping adds counts as nothing saved."""
    return max(0.0, 1 - row["bytes"] / dense_bytes(row))


def _byte_cells(entry: Entry, length: int | None) -> list[Cell]:
    row = bytes_at(entry, length)
    if row is None:
        return [NONE, NONE]
    budget = f"{row['budget_tokens']:,} tokens" if row.get("budget_tokens") else ""
    if row["length"] != length:
        budget = f"at {row['length']:,} tokens"
    saving = saving_of(row)
    return [Cell(f"{row['bytes'] / 1e6:.1f}", budget, row["bytes"]), Cell(f"{saving:.0%}", sort=saving)]


def speed_of(entry: Entry) -> tuple[int, dict[str, Any]] | None:
    """(length, speeds) of a row at the longest length of its run's speed measurement."""
    rows = [row for row in entry.run.speed if entry.method in row["methods"]]
    if not rows:
        return None
    longest = max(rows, key=lambda row: row["length"])
    return longest["length"], longest["methods"][entry.method]


def _speed_cells(entry: Entry) -> list[Cell]:
    found = speed_of(entry)
    if found is None:
        return [NONE, NONE]
    rate, ratio = found[1]["decode_tokens_per_second"], found[1].get("speed_over_full")
    ratio_cell = NONE if ratio is None else Cell(f"{ratio['median']:.2f}", sort=ratio["median"])
    return [Cell(f"{rate['median']:.1f}", sort=rate["median"]), ratio_cell]


# -- one task, one suite -------------------------------------------------------------------------------------


def task_table(comparison: Comparison, task: str) -> Table:
    """Every method on one task: value, Δ, answered and skipped samples, share of the dense bytes, further metrics."""
    entries = comparison.measured(task)
    kinds = {entry.parts[task]["kind"] for entry in entries}
    metric = next(entry.parts[task]["metric"] for entry in entries)
    extra = list(dict.fromkeys(name for entry in entries for name in entry.parts[task].get("metrics") or {}))
    heads = ["method", metric.replace("_", " "), "Δ to full"]
    heads += ["gained / lost"] if "binary" in kinds else []
    heads += ["samples", "skipped", "of dense bytes", *extra]
    rows = [_task_row(comparison, entry, task, "binary" in kinds, extra) for entry in entries]
    return Table(heads, rows, ours=ours(entries))


def _task_row(comparison: Comparison, entry: Entry, task: str, binary: bool, extra: list[str]) -> list[Cell]:
    payload, against = entry.parts[task], comparison.against(entry, (task,))
    share = byte_share(entry, task)
    row = [Cell(entry.label), value_cell(payload), change_cell(against)]
    if binary:
        known = against is not None and against.gained is not None
        row.append(
            Cell(f"{against.gained} / {against.lost}", sort=against.gained) if known and against else NONE
        )
    answered, skipped = len(payload["samples"]), len(payload["skipped"])
    paired = "" if against is None or against.common == answered else f"{against.common:,} paired"
    row += [Cell(f"{answered:,}", paired, answered), Cell(f"{skipped:,}", sort=skipped)]
    row.append(NONE if share is None else Cell(f"{share:.0%}", sort=share))
    return row + [_metric_cell(payload, name) for name in extra]


def _metric_cell(payload: Payload, name: str) -> Cell:
    found = (payload.get("metrics") or {}).get(name)
    if found is None:
        return NONE
    value, interval = (found.get("value"), found.get("ci95")) if isinstance(found, dict) else (found, None)
    if value is None:
        return NONE
    raw = isinstance(found, dict) and found.get("percent") is False
    percent = payload["kind"] != "nll" and not raw and 0 <= value <= 1
    form = (lambda number: f"{100 * number:.1f}") if percent else (lambda number: f"{number:.4g}")
    return Cell(form(value), "" if not interval else f"[{form(interval[0])}, {form(interval[1])}]", value)


def suite_table(comparison: Comparison, tasks: tuple[str, ...]) -> Table:
    """Tasks of a suite as rows, methods as columns, the mean last; each cell with Δ to full."""
    entries = [entry for entry in comparison.entries if any(task in entry.parts for task in tasks)]
    rows = []
    for task in tasks:
        metric = next(entry.parts[task]["metric"] for entry in comparison.measured(task))
        cells = [_overview_cell(comparison, entry, Column(task, (task,))) for entry in entries]
        rows.append([Cell(short_name(task), metric.replace("_", " ")), *cells])
    means = [_overview_cell(comparison, entry, Column("mean", tasks)) for entry in entries]
    rows.append([Cell("mean of the tasks"), *means])
    return Table(["task", *[entry.label for entry in entries]], rows, ours={len(rows) - 1})


def subtask_table(comparison: Comparison, task: str) -> Table | None:
    """Subtasks of a group as rows, methods as columns, each with Δ to full on the same samples."""
    entries = [entry for entry in comparison.measured(task) if entry.parts[task].get("subtasks")]
    names = list(dict.fromkeys(name for entry in entries for name in entry.parts[task]["subtasks"]))
    if not names:
        return None
    rows = []
    for name in names:
        cells = [_subtask_cell(comparison, entry, task, name) for entry in entries]
        metric = next(
            (
                entry.parts[task]["subtasks"][name].get("metric", "")
                for entry in entries
                if name in entry.parts[task]["subtasks"]
            ),
            "",
        )
        rows.append([Cell(short_name(name), metric.replace("_", " ")), *cells])
    return Table(["part", *[entry.label for entry in entries]], rows)


def _subtask_cell(comparison: Comparison, entry: Entry, task: str, name: str) -> Cell:
    own = payload_of(entry, (task,), name)
    if own is None:
        return NONE
    cell, against = value_cell(own), comparison.against(entry, (task,), name)
    if against is None:
        return cell
    small = f"{change_text(against)}\n{interval_text(against)}"
    return Cell(cell.text, small, cell.sort, against.mark)


# -- what payloads bring along -------------------------------------------------------------------------------


def heat_maps(comparison: Comparison, task: str) -> list[HeatMap]:
    """Depth × length of every method whose payload has cells."""
    entries = [entry for entry in comparison.measured(task) if entry.parts[task].get("cells")]
    everywhere = [cell for entry in entries for cell in entry.parts[task]["cells"]]
    lengths = sorted({cell["length"] for cell in everywhere})
    depths = sorted({cell["depth"] for cell in everywhere})
    return [_heat_map(entry.label, entry.parts[task]["cells"], lengths, depths) for entry in entries]


def _heat_map(label: str, cells: list[dict[str, Any]], lengths: list[int], depths: list[float]) -> HeatMap:
    found = {(cell["length"], cell["depth"]): cell for cell in cells}
    shares: list[list[float | None]] = []
    texts: list[list[str]] = []
    for depth in depths:
        row = [found.get((length, depth)) for length in lengths]
        shares.append([None if cell is None else _share(cell) for cell in row])
        texts.append(["" if cell is None else _share_text(cell) for cell in row])
    heads = [f"{length:,}" if length < 10_000 else f"{length / 1024:.4g}K" for length in lengths]
    return HeatMap(label, "depth", heads, [f"{depth:.0%}" for depth in depths], shares, texts)


def _share(cell: dict[str, Any]) -> float | None:
    if "correct" in cell:
        return cell["correct"] / cell["prompts"]
    return cell.get("value")


def _share_text(cell: dict[str, Any]) -> str:
    if "correct" in cell:
        return f"{cell['correct']}/{cell['prompts']}"
    return "–" if cell.get("value") is None else f"{100 * cell['value']:.0f}"


def extra_tables(entry: Entry, task: str) -> list[Table]:
    """Tables that a payload brings: `tables` (title, columns, rows) and `rows` (dicts) with `columns` (key → head)."""
    payload = entry.parts[task]
    tables = [
        Table(
            [str(column) for column in table["columns"]],
            [[plain_cell(value) for value in row] for row in table["rows"]],
            title=f"{entry.label}: {table['title']}" if table.get("title") else entry.label,
        )
        for table in payload.get("tables") or []
    ]
    rows, heads = payload.get("rows"), payload.get("columns")
    if rows and isinstance(heads, dict):
        body = [[plain_cell(row.get(key)) for key in heads] for row in rows]
        tables.append(Table([str(head) for head in heads.values()], body, title=entry.label))
    return tables


def plain_cell(value: Any) -> Cell:
    """Text or a number of any task."""
    if value is None:
        return NONE
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Cell(str(value))
    if isinstance(value, int):
        return Cell(f"{value:,}", sort=float(value))
    return Cell(f"{value:.4g}", sort=value)


# -- perplexity by position ----------------------------------------------------------------------------------


def bucket_table(comparison: Comparison, task: str = "perplexity") -> Table | None:
    """Perplexity of every position bucket with its change, methods as rows; None without buckets or where the buckets differ."""
    entries = [entry for entry in comparison.measured(task) if entry.parts[task].get("buckets")]
    spans = [[(row["first"], row["end"]) for row in entry.parts[task]["buckets"]] for entry in entries]
    if not spans or any(span != spans[0] for span in spans):
        return None
    heads = ["method", *[f"{first:,}–{end - 1:,}" for first, end in spans[0]]]
    rows = []
    for entry in entries:
        cells = [_bucket_cell(comparison, entry, task, number) for number in range(len(spans[0]))]
        rows.append([Cell(entry.label), *cells])
    return Table(heads, rows, ours=ours(entries))


def _bucket_cell(comparison: Comparison, entry: Entry, task: str, number: int) -> Cell:
    value = entry.parts[task]["buckets"][number]["perplexity"]
    against = comparison.against(entry, (task,), number)
    if against is None:
        return Cell(f"{value:.2f}", sort=value)
    return Cell(f"{value:.2f}", f"({change_text(against)})", value, against.mark)
