"""Published results (papers/*.csv beside this file), and our results next to them.

A result of ours stands beside a published one of the same model, benchmark, task and method.
"""

import csv
import itertools
import re
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pod.eval.answer.methods import BASE
from pod.eval.report.merge import Comparison, Entry, base_name
from pod.eval.report.names import CATEGORIES, parts_of, suite_of
from pod.eval.report.notes import sentences
from pod.eval.report.page import Block, Cell, Notes, Section, Table, cell
from pod.eval.report.report_tables import bytes_at, median, saving_of, speed_of

TITLES = {name.lower(): name for name in ("PoD", "SimLayerKV", "D2O", "RazorAttention", "IMDC")}
_CHINESE = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
_RULER = {f"niah_{kind}": [f"niah_{kind}_{n}" for n in (1, 2, 3)] for kind in ("single", "multikey")}
_ENGLISH = {
    name: [task for task in of if task not in _CHINESE] for name, of in CATEGORIES["longbench"].items()
}
_MEMBERS = {**CATEGORIES, "longbench_14": _ENGLISH, "ruler": {**_RULER, "qa": ["qa_1", "qa_2"]}}
_TRAINED = {"wa_cpt": "wa+cpt", "window": "wa+cpt"}  # names in eval.models that cannot be the paper's
_HEADS = ["task", "method", "paper's setting", "paper", "paper's Δ", "ours", "ours: value", "ours: Δ"]
_OPEN_ROWS = 12  # longer tables are folded until a click opens them
_LENGTH = re.compile(r"_\d+k$")
_STANDARD = ("mmlu", "hellaswag", "arc_easy", "arc_challenge", "humaneval")


class Published(NamedTuple):
    """One number of a paper's table: a row of a CSV file.

    Attributes:
        value: as printed.
        metric: `score` (0 to 100), or the unit of the value.
    """

    paper: str
    table: str
    model: str
    benchmark: str
    task: str
    method: str
    setting: str
    metric: str
    value: float


COLUMNS = Published._fields


def load(folder: str | Path | None = None) -> list[Published]:
    """Every row of the CSV files of a folder (default: papers/ beside this file).

    Raises:
        ValueError: for other columns or a value that is no number, naming file and line.
    """
    place = Path(__file__).with_name("papers") if folder is None else Path(folder)
    files = sorted(place.glob("*.csv"))
    if not files:
        raise ValueError(f"{place} has no CSV files with the columns {', '.join(COLUMNS)}")
    return [row for file in files for row in _read(file)]


def _read(file: Path) -> list[Published]:
    with file.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            has = ", ".join(reader.fieldnames or ["none"])
            raise ValueError(f"{file} must have the columns {', '.join(COLUMNS)}, it has {has}")
        try:
            return [Published(**{**record, "value": float(record["value"])}) for record in reader]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{file}, line {reader.line_num}: {error}") from None


def same_model(ours: str, published: str) -> bool:
    """Whether a path or hub id is the model that a paper names.

    `meta-llama/Meta-Llama-3-8B-Instruct` is `LLaMA3-8B-Instruct`. The export
    `runs/llama3_8b_32k_dense/export` is `LLaMA3-8B-32K`, and the raw model of 8K is not.
    """
    return _model_key(ours) == _model_key(published)


def _model_key(name: str) -> str:
    last = name.rstrip("/").removesuffix("/export").rpartition("/")[2].lower()
    words = re.sub(r"[-_\s]+", "-", last).replace("llama-", "llama").split("-")
    dropped = re.compile(r"meta|hf|dense|v\d+(\.\d+)*")
    return "-".join(word for word in words if not dropped.fullmatch(word)).replace(".", "")


def paper_name(method: str) -> str:
    """The name that papers give to a method of ours.

    `snapkv@25%` is `snapkv`, `model:cla` is `cla`, `model:wa_cpt` and `model:window` are `wa+cpt`.
    """
    name = base_name(method).removeprefix("model:")
    return _TRAINED.get(name, name) if method.startswith("model:") else name


def blocks(comparison: Comparison, published: list[Published], model: str | None = None) -> list[Block]:
    """A table of ours for each published table whose model was measured.

    Args:
        model: the paper's name of the model, for every run. None = it is found from the models' paths.
    """
    found: list[Block] = []
    paths = list(dict.fromkeys(run.dense_path for run in comparison.runs if run.dense_path))
    for name in paths if model is None else [model]:
        only = paths[0] if len(paths) == 1 else None  # for runs that hold trained models alone
        own = [entry for entry in comparison.entries if model or (entry.run.dense_path or only) == name]
        fitting = [row for row in published if same_model(name, row.model)]
        for paper, table in dict.fromkeys((row.paper, row.table) for row in fitting):
            rows = [row for row in fitting if (row.paper, row.table) == (paper, table)]
            title = f"{TITLES.get(paper, paper)}, Table {table}: {rows[0].model}"
            body = _rows(own, rows)
            if len(body) > _OPEN_ROWS:
                found.append(Section(title, [Table(_HEADS, body)]))
            elif body:
                found.append(Table(_HEADS, body, title))
    return [*found, Notes(sentences("papers"))] if found else []


def _rows(entries: list[Entry], published: list[Published]) -> list[list[Cell]]:
    printed: dict[tuple[str, ...], float] = {}
    for row in published:
        if row.method == BASE:
            printed[row.benchmark, row.task, row.metric, row.setting] = row.value
            printed.setdefault((row.benchmark, row.task, row.metric), row.value)
    body = []
    for row in published:
        asked = (row.benchmark, row.task, row.metric)
        base = None if row.method == BASE else printed.get((*asked, row.setting), printed.get(asked))
        for entry in entries:
            if paper_name(entry.method) != row.method:
                continue
            value, change, note = _ours(entries, entry, row, published)
            if value is not None:
                body.append(_row(row, base, entry, value, change, note))
    return body


def _row(row: Published, base: float | None, entry: Entry, value: Any, change: Any, note: str) -> list[Cell]:
    is_score = row.metric == "score"
    if base is None:
        theirs = None
    elif is_score:
        theirs = row.value - base
    else:
        theirs = row.value / base
    form = "{:+.1f}" if is_score else "× {:.2f}"
    where = row.benchmark if _LENGTH.search(row.benchmark) else ""
    name = row.task.replace("_", " ")
    task = Cell(name if is_score else f"{name} ({row.metric})", where)
    printed = [cell(row.value, "{:g}"), cell(theirs, form)]
    mine = [cell(value, "{:.1f}", note), cell(change, form)]
    return [task, Cell(row.method), Cell(row.setting or "–"), *printed, Cell(entry.label), *mine]


def _ours(
    entries: list[Entry], entry: Entry, row: Published, published: list[Published]
) -> tuple[float | None, float | None, str]:
    """Our number for a published one, its change against full, and a note.

    The number is None if it was not measured. Bytes and speeds are those at the longest length.
    """
    timed = speed_of(entry)
    held = bytes_at(entry, None)
    if row.task == "decode" and timed:
        rate = timed["decode_tokens_per_second"]
        ratio = timed.get("speed_over_full")
        return median(rate), median(ratio), f"at {timed['length']:,} tokens"
    if row.task == "kv_saving" and held is not None:
        return 100 * saving_of(held), None, f"at {held['length']:,} tokens"
    full = None
    if row.task == "performance_drop":
        value = relative_drop([_with_full(entries, entry, groups) for groups in _TABLE_1])
    elif row.benchmark == "consistency":
        found = entry.parts.get("consistency", {}).get("metrics", {}).get(row.setting, {})
        value = found.get("value")
    else:
        value, full = _with_full(entries, entry, _leaves(row, published) if row.metric == "score" else [])
    change = None if value is None or full is None else 100 * (value - full)
    return None if value is None else 100 * value, change, ""


def relative_drop(averages: list[tuple[float | None, float | None]]) -> float | None:
    """The mean over benchmarks of `1 - method / full`, the relative loss of a benchmark's average.

    This is "Perf" of PoD Table 5, as it follows from the numbers of Table 1.

    Args:
        averages: (average of the method, average of full) for each benchmark.
    Returns: None if one of them was not measured.
    """
    drops = [1 - own / full for own, full in averages if own is not None and full]
    return sum(drops) / len(drops) if len(drops) == len(averages) else None


def _with_full(
    entries: list[Entry], entry: Entry, groups: list[list[str]]
) -> tuple[float | None, float | None]:
    """Mean score (0 to 1) of a row, and that of `full` on the same model. Each is None if it lacks a task.

    Args:
        groups: names of tasks, as `_values` has them. The tasks of a group are averaged first, then the
            groups.
    """
    bases = (other for other in entries if other.method == BASE and other is not entry)
    same = (other for other in bases if entry.run.dense_path in (None, other.run.dense_path))
    means: list[float | None] = []
    for values in map(_values, [entry, *itertools.islice(same, 1)]):
        known = groups and all(name in values for group in groups for name in group)
        means.append(fmean(fmean(values[name] for name in group) for group in groups) if known else None)
    return means[0], means[1] if len(means) > 1 else None


def _leaves(row: Published, published: list[Published]) -> list[list[str]]:
    """The tasks behind a published number, in groups: the number is the mean of the groups' means.

    A published average is the mean of all other numbers of its benchmark and setting that the table prints
    for the method.
    """
    if row.task != "average" or row.benchmark == "niah":
        return [_members(row.benchmark, row.task)]
    if row.paper == "imdc":
        return []  # its averages are not the mean of what it prints
    same = [other for other in published if other.method == row.method and other.task != "average"]
    same = [other for other in same if other.benchmark.startswith(row.benchmark)]
    if row.benchmark != "infinitebench":  # its average is over lengths, which are the settings
        same = [other for other in same if other.setting == row.setting]
    return [_members(other.benchmark, other.task) for other in same]


def _members(benchmark: str, task: str) -> list[str]:
    """Our names of a published task or category, as `benchmark/task`."""
    suite = _LENGTH.sub("", benchmark)
    inside = _MEMBERS.get(suite, {}).get(task, (task,))
    place = "longbench" if suite.startswith("longbench") and benchmark != "longbench_8k" else benchmark
    return [f"{place}/{name}" for name in inside]


_TABLE_1 = [  # the averages of PoD Table 1: means of these categories
    [_members("longbench_14", name) for name in _ENGLISH if name != "synthetic"],
    [_members("leval", name) for name in CATEGORIES["leval"]],
]


def _values(entry: Entry) -> dict[str, float]:
    """Our scores (0 to 1) by `benchmark/task`, subtasks of groups included."""
    values: dict[str, float] = {}
    for task, part in entry.parts.items():
        if part["kind"] == "nll":
            continue
        inner = {name: found["value"] for name, found in (part.get("subtasks") or {}).items()}
        for name, value in {task: part["value"], **inner}.items():
            found = parts_of(name) or parts_of(f"{suite_of(task) or task}_{name}")
            if value is None:
                continue
            if found is not None:
                values[f"{found[0].removeprefix('pod_')}/{found[1]}"] = value
            plain = name.removeprefix("pod_")
            values.setdefault(f"standard/{plain}" if plain in _STANDARD else f"{plain}/{plain}", value)
        if task == "niah" and part["value"] is not None:
            values["niah/average"] = part["value"]
    return values
