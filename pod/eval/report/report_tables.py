"""The tables of a report.

There are the overview (methods by tasks), one task in detail, the tasks of a suite, heat maps, and tables of
any other values.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pod.eval.answer.methods import BASE
from pod.eval.report.merge import (
    Comparison,
    Entry,
    TaskPart,
    Tasks,
    byte_share,
    held_rows,
    payload_of,
)
from pod.eval.report.names import categories_of, short_name
from pod.eval.report.page import NONE, Cell, Table, cell, is_share, shade
from pod.eval.statistics.comparison import Against, Payload

MOST_COLUMNS = 12
_Row = tuple[str, str, Tasks, TaskPart]  # its name, small text, and the tasks and part that it asks for


# -- numbers as text -----------------------------------------------------------------------------------------


def number(value: float, digits: int, sign: str = "", unit: str = "") -> str:
    """A number with `digits` decimals; `<0.01` (for two digits) instead of a value that would round to zero.

    Args:
        sign: "+" prints the sign of positive numbers, too.
        unit: is put behind the number.
    """
    least = 10.0**-digits
    if 0 < abs(value) < least / 2:
        return f"{'-' if value < 0 else sign}<{least:.{digits}f}{unit}"
    return f"{value + 0.0:{sign},.{digits}f}{unit}"


def percent(value: float, sign: str = "", unit: str = "%") -> str:
    """A share times 100 with one decimal; with two decimals below 0.1."""
    digits = 2 if 0 < abs(value) < 0.001 else 1
    return number(100 * value, digits, sign, unit)


def value_text(payload: Payload, value: float) -> str:
    """The text of a payload's value: scores as 0 to 100, perplexity with two decimals."""
    if payload["kind"] != "nll":
        return percent(value, unit="")
    return f"{value:.2f}" if payload["metric"] == "perplexity" else f"{value:.4g}"


def delta_text(against: Against, value: float | None = None) -> str:
    """The text of a change: of perplexity in percent, of scores in points.

    Args:
        value: the change; None = the measured one.
    """
    return percent(against.delta if value is None else value, "+", "%" if against.relative else "")


def change_lines(against: Against) -> list[str]:
    """Two texts: the change with its verdict in words, and its 95 % interval."""
    ends = against.estimate.interval
    interval = "" if ends is None else f"[{', '.join(delta_text(against, end) for end in ends)}]"
    return [f"{delta_text(against)} {against.mark}".rstrip(), interval]


def p_text(value: float) -> str:
    """The text of a p value."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def column_form(values: Sequence[float], share: bool) -> Callable[[float], str]:
    """A function that prints every number of a column in the same unit with the same number of decimals.

    Args:
        values: the numbers of the column.
        share: whether they are shares or changes, which are printed in percent.
    """
    if share:
        return percent
    largest = max(map(abs, values), default=0.0)
    if largest >= 1000:
        digits = 0
    elif largest >= 100:
        digits = 1
    elif largest >= 1:
        digits = 2
    else:
        digits = 4
    return partial(number, digits=digits)


# -- cells ---------------------------------------------------------------------------------------------------


def value_cell(payload: Payload) -> Cell:
    """The number of a payload with its interval."""
    return cell(payload["value"], partial(value_text, payload), ends=payload.get("ci95"))


def change_cell(against: Against | None) -> Cell:
    """Δ to the base with its verdict, its paired interval, and the p value that holds for the page."""
    if against is None:
        return NONE
    text, interval = change_lines(against)
    to = "" if against.base.partition(" ·")[0] == BASE else f"to {against.base}"
    p = "" if against.adjusted is None else p_text(against.adjusted)
    return Cell(text, "\n".join(filter(None, [to, interval, p])), against.delta, against.mark)


def result_cell(comparison: Comparison, entry: Entry, tasks: Tasks, part: TaskPart = None) -> Cell:
    """A row's value on a task, on a part of it or on the mean of several, with its change under it.

    Where there is no value, the cell says why.
    """
    payload = payload_of(entry, tasks, part)
    if payload is None or payload["value"] is None:
        if tasks[0] in entry.failed:
            return Cell("failed", tone="failed")
        return Cell("not run") if tasks[0] in entry.refused else NONE
    found = value_cell(payload)
    against = comparison.against(entry, tasks, part)
    if against is None:
        return found
    return replace(found, small="\n".join(change_lines(against)), tone=against.mark)


# -- the overview --------------------------------------------------------------------------------------------


def overview(comparison: Comparison) -> Table:
    """Every method: its value on each task or suite with Δ to full, bytes, saving, speed."""
    columns = list(comparison.columns().items())[:MOST_COLUMNS]
    entries = comparison.entries
    length = common_length(entries)
    timed = any(entry.speed for entry in entries)
    rows = []
    for entry in entries:
        cells = [result_cell(comparison, entry, tasks) for _, tasks in columns]
        row = [Cell(entry.label), *_byte_cells(entry, length), *cells]
        if timed:
            speed = speed_of(entry)
            row.append(cell(median(speed.get("decode_tokens_per_second")), "{:.1f}"))
            row.append(cell(median(speed.get("speed_over_full")), "{:.2f}"))
        rows.append(row)
    heads = ["method", "KV MB", "saved", *[title for title, _ in columns]]
    heads += ["tokens/s", "× full"] if timed else []
    return Table(heads, rows, kind="cards")


def common_length(entries: list[Entry]) -> int | None:
    """The longest length (tokens) at which the bytes of all rows are known, rows without any bytes aside."""
    lengths = [found for entry in entries if (found := {row["length"] for row in _whole_rows(entry)})]
    return max(set.intersection(*lengths), default=None) if lengths else None


def _whole_rows(entry: Entry) -> list[dict[str, Any]]:
    """The stated bytes of a row's caches that reached their length.

    If none did, because answers ended early, these are the stated bytes of all its caches.
    """
    rows = held_rows(entry)
    return [row for row in rows if row["held_tokens"] >= row["length"]] or rows


def bytes_at(entry: Entry, length: int | None) -> dict[str, Any] | None:
    """A row's stated bytes at `length`; if there are none, those at its longest length; None without any.

    Where several tasks state bytes at a length, the largest count.
    """
    rows = _whole_rows(entry)
    return max(rows, key=lambda row: (row["length"] == length, row["length"], row["bytes"]), default=None)


def saving_of(row: dict[str, Any]) -> float:
    """Share of the dense bytes that is saved.

    It is never negative: a cache may hold a few bytes more than a dense one, for an empty answer or for
    bookkeeping.
    """
    return max(0.0, 1 - row["bytes"] / row["dense"])


def _byte_cells(entry: Entry, length: int | None) -> list[Cell]:
    row = bytes_at(entry, length)
    if row is None:
        return [NONE, NONE]
    budget = f"{row['budget_tokens']:,} tokens" if row.get("budget_tokens") else ""
    if row["length"] != length:
        budget = f"at {row['length']:,} tokens"
    return [Cell(f"{row['bytes'] / 1e6:.1f}", budget, row["bytes"]), cell(saving_of(row), "{:.0%}")]


def speed_of(entry: Entry) -> dict[str, Any]:
    """Speeds of a row at the longest length at which its runs measured speeds. Empty without any."""
    return max(entry.speed, key=lambda row: row["length"], default={})


def median(value: Any) -> Any:
    """The median of a mapping with `median` (several repeats); any other value as it is."""
    return value.get("median") if isinstance(value, dict) else value


# -- one task, one suite -------------------------------------------------------------------------------------


def task_table(comparison: Comparison, task: str) -> Table:
    """Every method on one task.

    Columns are value, Δ, answered and skipped samples, share of the dense bytes, and further metrics.
    """
    entries = comparison.measured(task)
    payloads = [entry.parts[task] for entry in entries]
    binary = any(payload["kind"] == "binary" for payload in payloads)
    extra = list(dict.fromkeys(name for payload in payloads for name in payload.get("metrics") or {}))
    heads = ["method", payloads[0]["metric"].replace("_", " "), "Δ to full"]
    heads += ["gained / lost"] if binary else []
    heads += ["samples", "skipped", "of dense bytes", *extra]
    more = [_metric_cells(payloads, name) for name in extra]
    rows = [
        [*_task_row(comparison, entry, task, binary), *(column[row] for column in more)]
        for row, entry in enumerate(entries)
    ]
    return Table(heads, rows)


def _task_row(comparison: Comparison, entry: Entry, task: str, binary: bool) -> list[Cell]:
    payload = entry.parts[task]
    against = comparison.against(entry, (task,))
    row = [Cell(entry.label), value_cell(payload), change_cell(against)]
    if binary:
        row.append(NONE if against is None else cell(against.gained, f"{{}} / {against.lost}"))
    answered = len(payload["samples"])
    paired = "" if against is None or against.common == answered else f"{against.common:,} paired"
    row += [cell(answered, "{:,}", paired), cell(len(payload["skipped"]), "{:,}")]
    return [*row, cell(byte_share(entry, task), "{:.0%}")]


def _metric_cells(payloads: list[Payload], name: str) -> list[Cell]:
    """The cells of a further metric in all rows, in one unit: 0 to 100 if it is a share in every row."""
    found = [(payload.get("metrics") or {}).get(name, {}) for payload in payloads]
    values = [value for one in found if (value := one.get("value")) is not None]
    raw = any(payload["kind"] == "nll" for payload in payloads)
    raw = raw or any(one.get("percent") is False for one in found)
    share = all(one.get("percent") for one in found if one) or (not raw and all(0 <= x <= 1 for x in values))
    form = partial(percent, unit="") if share else column_form(values, False)
    return [cell(one.get("value"), form, ends=one.get("ci95")) for one in found]


def suite_table(comparison: Comparison, tasks: tuple[str, ...]) -> Table:
    """Tasks of a suite as rows, methods as columns, each cell with Δ to full.

    After the tasks come the suite's categories and the mean of the categories. The mean of all tasks is last.
    """
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
    return _by_method(comparison, "task", entries, rows)


def part_table(comparison: Comparison, task: str) -> list[Table]:
    """Parts of a task as rows, methods as columns, each cell with Δ to full on the same samples.

    Parts are the subtasks of a group, and the position buckets of perplexity if all methods have the same
    ones. A task without parts has no table.
    """
    parts = {entry.label: entry.parts[task] for entry in reversed(comparison.measured(task))}
    inner = {name: one for part in parts.values() for name, one in (part.get("subtasks") or {}).items()}
    spans = [[(row["first"], row["end"]) for row in part.get("buckets") or ()] for part in parts.values()]
    rows: list[_Row] = [
        (short_name(name), one.get("metric", ""), (task,), name) for name, one in inner.items()
    ]
    if all(span == spans[0] for span in spans):
        rows += [(f"{first:,}–{end - 1:,}", "", (task,), n) for n, (first, end) in enumerate(spans[0])]
    return [_by_method(comparison, "part", comparison.measured(task), rows)] if rows else []


def _by_method(comparison: Comparison, head: str, entries: list[Entry], rows: list[_Row]) -> Table:
    """A table with methods as columns."""
    body = [
        [Cell(name, small.replace("_", " ")), *[result_cell(comparison, e, tasks, part) for e in entries]]
        for name, small, tasks, part in rows
    ]
    return Table([head, *[entry.label for entry in entries]], body)


# -- what payloads bring along -------------------------------------------------------------------------------


def heat_maps(comparison: Comparison, task: str) -> list[Table]:
    """A heat map of depth × length for every method whose payload has `cells`."""
    maps = {e.label: cells for e in comparison.measured(task) if (cells := e.parts[task].get("cells"))}
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
    percentage = None if share is None else 100 * share
    return replace(cell(percentage, "{:.0f}"), sort=share, shade=shade(share))


def plain_table(rows: list[dict[str, Any]], heads: dict[str, str], title: str) -> Table:
    """A table of any values, each column in one unit.

    Shares and changes are printed in percent, but not in the first column, which names the rows.

    Args:
        rows: values by key.
        heads: by key, the heading of its column.
    """
    forms: dict[str, str | Callable[[float], str]] = {}
    for key, head in heads.items():
        numbers = [row[key] for row in rows if _is_number(row.get(key))]
        whole = not forms or all(isinstance(value, int) for value in numbers)
        forms[key] = "{:,}" if whole else column_form(numbers, is_share(head, numbers))
    body = []
    for row in rows:
        cells = []
        for key, form in forms.items():
            value = row.get(key)
            is_text = value is not None and not _is_number(value)
            cells.append(Cell(str(value)) if is_text else cell(value, form))
        body.append(cells)
    return Table([*heads.values()], body, title)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
