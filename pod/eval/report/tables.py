"""The tables of a report: methods by tasks, one task in detail, tasks of a suite, heat maps, and whatever a payload brings along."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pod.eval.judge.verdicts import Against, Payload
from pod.eval.report.merge import (
    Comparison,
    Entry,
    Part,
    Tasks,
    byte_share,
    held_rows,
    payload_of,
)
from pod.eval.report.names import categories_of, plain, short_name
from pod.eval.report.page import NONE, Cell, Table, cell, is_share, shade

_TITLES = {
    "perplexity": "Perplexity by position",
    "passkey": "Passkey retrieval",
    "niah": "Needle in a haystack",
}
MOST_COLUMNS = 12
_Row = tuple[str, str, Tasks, Part]  # name, small text, and what it asks for


def title_of(task: str) -> str:
    """The head of a task's section."""
    return _TITLES.get(task, plain(task))


def ours(entries: list[Entry]) -> set[int]:
    """Numbers of the rows that stand out: PoD as it is meant to be used."""
    return {number for number, entry in enumerate(entries) if entry.method == "pod"}


# -- numbers as text -----------------------------------------------------------------------------------------


def percent(value: float, sign: str = "", unit: str = "%") -> str:
    """A share times 100 with one decimal, with two below 0.1, and `<0.01` for what would round to nothing. sign: "+" to print it."""
    size = abs(100 * value)
    if 0 < size < 0.005:
        return f"{'-' if value < 0 else sign}<0.01{unit}"
    return f"{100 * value + 0.0:{sign}.{2 if 0 < size < 0.1 else 1}f}{unit}"


def value_text(payload: Payload, value: float) -> str:
    """Scores as 0 to 100, perplexity with two decimals."""
    if payload["kind"] != "nll":
        return f"{100 * value:.1f}"
    return f"{value:.2f}" if payload["metric"] == "perplexity" else f"{value:.4g}"


def delta_text(against: Against, value: float | None = None) -> str:
    """A change (default: the measured one) of perplexity in percent, of scores in points."""
    return percent(against.delta if value is None else value, "+", "%" if against.relative else "")


def change_lines(against: Against) -> list[str]:
    """The change with the verdict, in words, and its 95 % interval."""
    ends = against.estimate.interval
    interval = "" if ends is None else f"[{', '.join(delta_text(against, end) for end in ends)}]"
    return [f"{delta_text(against)} {against.mark}".rstrip(), interval]


def p_text(value: float) -> str:
    """A p value."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def column_form(values: Sequence[float], share: bool) -> Callable[[float], str]:
    """How all numbers of a column are printed: one unit, as many decimals for all; `<` where a number would read as 0.

    share: they are 0 to 1 (changes: -1 to 1) and printed in percent.
    """
    if share:
        return percent
    largest = max(map(abs, values), default=0.0)
    digits = 0 if largest >= 1000 else 1 if largest >= 100 else 2 if largest >= 1 else 4
    least = 10.0**-digits

    def form(value: float) -> str:
        if 0 < abs(value) < least / 2:
            return f"{'-' if value < 0 else ''}<{least:.{digits}f}"
        return f"{value:,.{digits}f}"

    return form


# -- cells ---------------------------------------------------------------------------------------------------


def number_cell(value: Any, ends: Sequence[float] | None, form: Callable[[Any], str]) -> Cell:
    """A number over its interval, if it has one."""
    if value is None:
        return NONE
    return Cell(form(value), f"[{', '.join(map(form, ends))}]" if ends else "", float(value))


def value_cell(payload: Payload) -> Cell:
    """The number of a payload with its interval."""
    return number_cell(payload["value"], payload.get("ci95"), lambda value: value_text(payload, value))


def change_cell(against: Against | None) -> Cell:
    """Δ to the base with its verdict, its paired interval, and the p value that holds for the page."""
    if against is None:
        return NONE
    text, interval = change_lines(against)
    p = "" if against.adjusted is None else f"\n{p_text(against.adjusted)}"
    return Cell(text, interval + p, against.delta, against.mark)


def result_cell(
    comparison: Comparison, entry: Entry, tasks: Tasks, part: Part = None, short: bool = False
) -> Cell:
    """A row's number on a task, on a part of it or on the mean of several, over its change; else why there is none.

    short: without intervals.
    """
    payload = payload_of(entry, tasks, part)
    if payload is None or payload["value"] is None:
        if tasks[0] in entry.failed:
            return Cell("failed", tone="failed")
        return Cell("not run") if tasks[0] in entry.refused else NONE
    found, against = value_cell(payload), comparison.against(entry, tasks, part)
    if against is None:
        return replace(found, small="") if short else found
    lines = change_lines(against)
    return replace(found, small=f"({lines[0]})" if short else "\n".join(lines), tone=against.mark)


# -- the overview --------------------------------------------------------------------------------------------


def overview(comparison: Comparison) -> Table:
    """Every method: its value on each task or suite with Δ to full, bytes, saving, speed."""
    columns, entries = list(comparison.columns().items())[:MOST_COLUMNS], comparison.entries
    length, timed = common_length(entries), any(entry.speed for entry in entries)
    rows = []
    for entry in entries:
        cells = [result_cell(comparison, entry, tasks) for _, tasks in columns]
        rows.append([Cell(entry.label), *_byte_cells(entry, length), *cells])
        if timed:
            speed = speed_of(entry) or {}
            rows[-1].append(cell(median(speed.get("decode_tokens_per_second")), "{:.1f}"))
            rows[-1].append(cell(median(speed.get("speed_over_full")), "{:.2f}"))
    heads = ["method", "KV MB", "saved", *[title for title, _ in columns]]
    heads += ["tokens/s", "× full"] if timed else []
    return Table(heads, rows, ours=ours(entries), kind="cards")


def common_length(entries: list[Entry]) -> int | None:
    """The longest length (tokens) at which every row that has bytes has them."""
    lengths = [found for entry in entries if (found := {row["length"] for row in _whole_rows(entry)})]
    return max(set.intersection(*lengths), default=None) if lengths else None


def _whole_rows(entry: Entry) -> list[dict[str, Any]]:
    """Stated bytes of caches that reached their length; where answers ended early, only if there is nothing else."""
    rows = held_rows(entry)
    return [row for row in rows if row["held_tokens"] >= row["length"]] or rows


def bytes_at(entry: Entry, length: int | None) -> dict[str, Any] | None:
    """The stated bytes at a length, else at the row's longest; the largest where several tasks state it."""
    rows = _whole_rows(entry)
    return max(rows, key=lambda row: (row["length"] == length, row["length"], row["bytes"]), default=None)


def saving_of(row: dict[str, Any]) -> float:
    """Share of the dense bytes that is saved; what an empty answer or bookkeeping adds counts as nothing saved."""
    return max(0.0, 1 - row["bytes"] / row["dense"])


def _byte_cells(entry: Entry, length: int | None) -> list[Cell]:
    row = bytes_at(entry, length)
    if row is None:
        return [NONE, NONE]
    budget = f"{row['budget_tokens']:,} tokens" if row.get("budget_tokens") else ""
    if row["length"] != length:
        budget = f"at {row['length']:,} tokens"
    return [Cell(f"{row['bytes'] / 1e6:.1f}", budget, row["bytes"]), cell(saving_of(row), "{:.0%}")]


def speed_of(entry: Entry) -> dict[str, Any] | None:
    """Speeds of a row at the longest length of its runs' speed measurements."""
    return max(entry.speed, key=lambda row: row["length"], default=None)


def median(value: Any) -> Any:
    """A number, or the median of several repeats."""
    return value.get("median") if isinstance(value, dict) else value


# -- one task, one suite -------------------------------------------------------------------------------------


def task_table(comparison: Comparison, task: str) -> Table:
    """Every method on one task: value, Δ, answered and skipped samples, share of the dense bytes, further metrics."""
    entries = comparison.measured(task)
    payloads = [entry.parts[task] for entry in entries]
    binary = any(payload["kind"] == "binary" for payload in payloads)
    extra = list(dict.fromkeys(name for payload in payloads for name in payload.get("metrics") or {}))
    heads = ["method", payloads[0]["metric"].replace("_", " "), "Δ to full"]
    heads += ["gained / lost"] if binary else []
    heads += ["samples", "skipped", "of dense bytes", *extra]
    rows = [_task_row(comparison, entry, task, binary) for entry in entries]
    for name in extra:
        for row, found in zip(rows, _metric_cells(payloads, name), strict=True):
            row.append(found)
    return Table(heads, rows, ours=ours(entries))


def _task_row(comparison: Comparison, entry: Entry, task: str, binary: bool) -> list[Cell]:
    payload, against = entry.parts[task], comparison.against(entry, (task,))
    row = [Cell(entry.label), value_cell(payload), change_cell(against)]
    if binary:
        gained = None if against is None else against.gained
        row.append(cell(gained, f"{{}} / {against and against.lost}"))
    answered = len(payload["samples"])
    paired = "" if against is None or against.common == answered else f"{against.common:,} paired"
    row += [cell(answered, "{:,}", paired), cell(len(payload["skipped"]), "{:,}")]
    return [*row, cell(byte_share(entry, task), "{:.0%}")]


def _metric_cells(payloads: list[Payload], name: str) -> list[Cell]:
    """A further metric of all rows, in one unit: 0 to 100 where it is a share in every row."""
    found = [(payload.get("metrics") or {}).get(name) for payload in payloads]
    found = [one if isinstance(one, dict) else {"value": one} for one in found]
    values = [value for one in found if (value := one.get("value")) is not None]
    raw = any(payload["kind"] == "nll" for payload in payloads)
    raw = raw or any(one.get("percent") is False for one in found)
    share = not raw and all(0 <= value <= 1 for value in values)
    form = (lambda value: percent(value, unit="")) if share else column_form(values, False)
    return [number_cell(one.get("value"), one.get("ci95"), form) for one in found]


def suite_table(comparison: Comparison, tasks: tuple[str, ...]) -> Table:
    """Tasks of a suite as rows, then its categories and the mean of those, the mean of all tasks last; each cell with Δ to full."""
    entries = [entry for entry in comparison.entries if any(task in entry.parts for task in tasks)]
    metrics = {task: comparison.measured(task)[0].parts[task]["metric"] for task in tasks}
    rows: list[_Row] = [(short_name(task), metric, (task,), None) for task, metric in metrics.items()]
    categories = categories_of(tasks)
    for name, (members, of) in categories.items():
        rows.append((name.replace("_", " "), f"mean of {len(members)} of {of} tasks", members, None))
    if categories:
        members = tuple(members for members, _ in categories.values())
        rows.append(("mean of the categories", "", members, None))
    rows.append(("mean of the tasks", "", tasks, None))
    return _by_method(comparison, "task", entries, rows, {len(rows) - 1})


def subtask_table(comparison: Comparison, task: str) -> list[Table]:
    """Subtasks of a group, if it is one, as rows, methods as columns, each with Δ to full on the same samples."""
    entries = [entry for entry in comparison.measured(task) if entry.parts[task].get("subtasks")]
    parts = {name: part for e in reversed(entries) for name, part in e.parts[task]["subtasks"].items()}
    rows: list[_Row] = [
        (short_name(name), part.get("metric", ""), (task,), name) for name, part in parts.items()
    ]
    return [_by_method(comparison, "part", entries, rows)] if rows else []


def _by_method(
    comparison: Comparison, head: str, entries: list[Entry], rows: list[_Row], ours: Iterable[int] = ()
) -> Table:
    """Methods as columns."""
    body = [
        [Cell(name, small.replace("_", " ")), *[result_cell(comparison, e, tasks, part) for e in entries]]
        for name, small, tasks, part in rows
    ]
    return Table([head, *[entry.label for entry in entries]], body, ours=set(ours))


# -- what payloads bring along -------------------------------------------------------------------------------


def heat_maps(comparison: Comparison, task: str) -> list[Table]:
    """Depth × length of every method whose payload has cells."""
    entries = [entry for entry in comparison.measured(task) if entry.parts[task].get("cells")]
    maps = {entry.label: entry.parts[task]["cells"] for entry in entries}
    everywhere = [found for cells in maps.values() for found in cells]
    lengths = sorted({found["length"] for found in everywhere})
    depths = sorted({found["depth"] for found in everywhere})
    heads = ["depth", *[f"{n:,}" if n < 10_000 else f"{n / 1024:.4g}K" for n in lengths]]
    tables = []
    for label, cells in maps.items():
        values = {(one["length"], one["depth"]): one["value"] for one in cells}
        rows = [[Cell(f"{d:.0%}"), *[_heat_cell(values.get((n, d))) for n in lengths]] for d in depths]
        tables.append(Table(heads, rows, label, kind="map"))
    return tables


def _heat_cell(share: float | None) -> Cell:
    return replace(cell(share and 100 * share, "{:.0f}"), sort=share, shade=shade(share))


def extra_tables(entry: Entry, task: str) -> list[Table]:
    """The table that a payload brings, if any: `rows` (dicts) with `columns` (key → head)."""
    rows, heads = entry.parts[task].get("rows"), entry.parts[task].get("columns")
    if not rows or not heads:
        return []
    columns = list(heads.values())
    return [
        Table(columns, _plain_rows(columns, [[row.get(key) for key in heads] for row in rows]), entry.label)
    ]


def _plain_rows(heads: list[str], rows: list[list[Any]]) -> list[list[Cell]]:
    """Values of any task, a column in one unit: shares and changes in percent, but for the first column, which names the rows."""
    forms: list[Callable[[Any], str]] = []
    for head, column in zip(heads, zip(*rows, strict=True), strict=True):
        numbers = [value for value in column if _is_number(value)]
        whole = not forms or all(isinstance(value, int) for value in numbers)
        forms.append("{:,}".format if whole else column_form(numbers, is_share(head, numbers)))
    return [
        [
            number_cell(x, None, form) if x is None or _is_number(x) else Cell(str(x))
            for x, form in zip(row, forms, strict=True)
        ]
        for row in rows
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# -- perplexity by position ----------------------------------------------------------------------------------


def bucket_table(comparison: Comparison, task: str = "perplexity") -> list[Table]:
    """Perplexity of every position bucket with its change, methods as rows; none without buckets or where the buckets differ."""
    entries = [entry for entry in comparison.measured(task) if entry.parts[task].get("buckets")]
    spans = [[(row["first"], row["end"]) for row in entry.parts[task]["buckets"]] for entry in entries]
    if not spans or any(span != spans[0] for span in spans):
        return []
    rows = [
        [Cell(e.label), *[result_cell(comparison, e, (task,), n, short=True) for n in range(len(spans[0]))]]
        for e in entries
    ]
    heads = ["method", *[f"{first:,}–{end - 1:,}" for first, end in spans[0]]]
    return [Table(heads, rows, ours=ours(entries))]
