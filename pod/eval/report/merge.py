"""Read the result files of one or several runs and make one comparison of them.

A comparison has rows (methods) and tasks. It compares every method with `full` on the same samples.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pod.eval.answer.methods import BASE, EVALUATED_METHODS, TRAINED
from pod.eval.report.names import categories_of, plain, suite_of
from pod.eval.report.samples import SampleColumns
from pod.eval.results import SCHEMA_VERSION, result_files
from pod.eval.statistics.comparison import Against, Payload, compare, judged
from pod.eval.suites import task_base
from pod.eval.suites.task_base import is_side_by_side, scored_payload
from pod.notation import cut_budget

_DENSE = ("dense", "unadapted")
TaskPart = str | int | None
"""A subtask by name, a position bucket by number, or the whole task."""
Tasks = tuple[Any, ...]
"""Names of tasks whose mean is taken. A tuple among them counts as one task, by its own mean.

So the mean of a suite's categories is a tuple of tuples.
"""
ShownComparison = tuple[int, Tasks, TaskPart]
"""A comparison that a page shows: id of the row, tasks, part."""


@dataclass
class ReportedRun:
    """One evaluation's folder.

    Attributes:
        label: what the report calls it.
        results: result files by method.
        left_out: sentences about files that are left out: results of another schema or dense model.
    """

    label: str
    folder: Path
    results: dict[str, dict]
    left_out: list[str]

    @property
    def speed(self) -> dict[str, dict[str, Any]]:
        """The speeds of the latest measurement, by method. Methods that it did not measure are left out."""
        parts = {}
        for name, content in self.results.items():
            for task, part in content["parts"].items():
                if is_side_by_side(task):
                    parts[name] = part
        latest = max((part["environment"]["date"] for part in parts.values()), default=None)
        return {name: part for name, part in parts.items() if part["environment"]["date"] == latest}

    @property
    def dense_path(self) -> str | None:
        """The dense model that the methods start from; None when none of them was measured."""
        models = [result.get("model") or {} for result in self.results.values()]
        return next((model["path"] for model in models if model.get("kind") in _DENSE), None)


@dataclass
class Entry:
    """One row of the comparison: a method of a model, with the tasks that one or several runs measured.

    Attributes:
        label: what the report calls it.
        content: the first of its result files.
        run: the run of that file.
        parts, refused, failed: by task, its payload, why it was not run, and its error.
        sources: by task, the run that measured it.
        speed: speeds of all its runs, a row per length.
        decoding: decode speeds after longer prompts that were not read, a row per length.
    """

    label: str
    method: str
    content: dict[str, Any]
    run: ReportedRun
    parts: dict[str, Payload] = field(default_factory=dict)
    sources: dict[str, ReportedRun] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    speed: list[dict[str, Any]] = field(default_factory=list)
    decoding: list[dict[str, Any]] = field(default_factory=list)

    def take(self, run: ReportedRun, content: dict[str, Any]) -> None:
        """Add what a run measured for this method."""
        parts = tasks_of(content)
        self.parts |= parts
        self.sources |= dict.fromkeys(parts, run)
        raced = run.speed.get(self.method, {})
        self.speed += raced.get("lengths", [])
        self.decoding += raced.get("decoding", [])
        self.refused |= content.get("refused") or {}
        self.failed |= content.get("failed") or {}


@dataclass
class Comparison:
    """Everything that a report shows.

    Attributes:
        tasks: in the order of the recipes.
    """

    runs: list[ReportedRun]
    entries: list[Entry]
    tasks: list[str]
    _judged: dict[ShownComparison, Against | None] = field(default_factory=dict)

    def measured(self, task: str) -> list[Entry]:
        """The rows that have this task."""
        return [entry for entry in self.entries if task in entry.parts]

    def base_of(self, entry: Entry, task: str) -> Entry | None:
        """The row that a row is compared with on a task.

        It is a row of the method `full`. For PoD's adapted weights it is the dense model trained on the same
        tokens, if that was measured. Of several such rows it is the one of the same run, else the one of the
        same dense model; if there is only one, it is that one. Else None.
        """
        rows = self.measured(task)
        adapted = (entry.content.get("model") or {}).get("kind") == "adapted"
        wanted = TRAINED if adapted and any(other.method == TRAINED for other in rows) else BASE
        bases = [other for other in rows if other.method == wanted]
        run = entry.sources.get(task, entry.run)
        of_this_run = [base for base in bases if base.sources[task] is run]
        if of_this_run:
            return of_this_run[0]
        same_model = [base for base in bases if run.dense_path in (base.run.dense_path, None)]
        if same_model:
            return same_model[0]
        return bases[0] if len(bases) == 1 else None

    def against(self, entry: Entry, tasks: Tasks, part: TaskPart = None) -> Against | None:
        """Compare a row with its base on a task, on a part of it, or on the mean of several.

        The p values are adjusted over all comparisons of the overview together, and over all comparisons of
        the details together. A comparison that is in neither has no mark.

        Returns: None for the base itself, and where nothing can be paired.
        """
        if not self._judged:
            for asked in (self._overview(), self._details()):
                self._judged |= judged({(id(e), t, p): self._against(e, t, p) for e, t, p in asked})
        key = (id(entry), tasks, part)
        return self._judged[key] if key in self._judged else self._against(entry, tasks, part)

    def _overview(self) -> Iterator[tuple[Entry, Tasks, TaskPart]]:
        """The comparisons of the overview: every row on every task. The tasks of a suite count as one."""
        return ((entry, tasks, None) for entry in self.entries for tasks in self.columns().values())

    def _details(self) -> Iterator[tuple[Entry, Tasks, TaskPart]]:
        """The other comparisons: tasks and categories of suites, subtasks of groups, position buckets."""
        for groups in filter(None, map(categories_of, self.columns().values())):
            members = tuple(found for found, _ in groups.values())
            yield from ((entry, asked, None) for entry in self.entries for asked in (*members, members))
        inner = {task for tasks in self.columns().values() if len(tasks) > 1 for task in tasks}
        for entry in self.entries:
            yield from ((entry, (task,), None) for task in entry.parts if task in inner)
            for task, payload in entry.parts.items():
                yield from ((entry, (task,), name) for name in payload.get("subtasks") or {})
                yield from ((entry, (task,), number) for number in range(len(payload.get("buckets") or ())))

    def columns(self) -> dict[str, tuple[str, ...]]:
        """The tasks that the overview compares, by the title of their column, in the order of the recipes.

        Only measured tasks are there. The tasks of a suite share a column.
        """
        found: dict[str, list[str]] = {}
        for task in self.tasks:
            parts = [entry.parts[task] for entry in self.measured(task)]
            group = any(part.get("subtasks") for part in parts)
            if parts:
                found.setdefault(task if group else suite_of(task) or task, []).append(task)
        several = {
            name: f"{plain(name)} ({len(tasks)} tasks)" for name, tasks in found.items() if len(tasks) > 1
        }
        return {several.get(name, tasks[0]): tuple(tasks) for name, tasks in found.items()}

    def _against(self, entry: Entry, tasks: Tasks, part: TaskPart) -> Against | None:
        first = tasks[0]
        while isinstance(first, tuple):
            first = first[0]
        base = self.base_of(entry, first)
        if base is None or base is entry:
            return None
        own = payload_of(entry, tasks, part)
        other = payload_of(base, tasks, part)
        return None if own is None or other is None else compare(own, other, base.label)


def payload_of(entry: Entry, tasks: Tasks, part: TaskPart = None) -> Payload | None:
    """The payload of a row on a task, on a part of it, or on the mean of several; None if it has none.

    Args:
        part: a subtask by name, or a position bucket by number; None = the whole task.
    """
    payload = combined(entry, tasks)
    if payload is None or part is None:
        return payload
    if isinstance(part, str):
        subtasks = payload.get("subtasks") or {}
        if part not in subtasks:
            return None
        found = subtasks[part]
        samples = [{**one, "subtask": None} for one in payload["samples"] if one.get("subtask") == part]
        return {**payload, "value": found["value"], "ci95": found.get("ci95"), "samples": samples}
    buckets = payload.get("buckets") or []
    if part not in range(len(buckets)):
        return None
    found = buckets[part]
    tokens = found["end"] - found["first"]
    samples = [{**one, "score": one["buckets"][part], "tokens": tokens} for one in payload["samples"]]
    return {**payload, "value": found["perplexity"], "ci95": found.get("ci95"), "samples": samples}


def merge(folders: Iterable[str | os.PathLike]) -> Comparison:
    """Read runs and make one comparison of them.

    Two runs of a method share one row if its model, plan and options are the same and no task was measured in
    both. Else each run has a row of its own.

    Args:
        folders: output folders of runs, or their `eval` folders.

    Raises:
        ValueError: when a folder holds no results.
    """
    shared: dict[Any, Any] = {}
    runs = [read_run(folder, shared) for folder in folders]
    entries: list[Entry] = []
    labels = [run.label for run in runs]
    for number, run in enumerate(runs, start=1):
        if labels.count(run.label) > 1:
            run.label += f" {number}"
        for method, content in run.results.items():
            entry = next((other for other in entries if _goes_with(other, content)), None)
            if entry is None:
                entry = Entry(method, method, content, run)
                entries.append(entry)
            entry.take(run, content)
    entries.sort(key=lambda entry: _rank(entry.method))
    methods = [entry.method for entry in entries]
    for entry in entries:
        if methods.count(entry.method) > 1:  # rows of one method carry their run's name
            entry.label += f" · {entry.run.label}"
    return Comparison(runs, entries, _task_order(entries))


def read_run(folder: str | os.PathLike, shared: dict[Any, Any] | None = None) -> ReportedRun:
    """A run's results from its output folder or its `eval` folder.

    Files of another dense model than the newest file's are left out.

    Args:
        shared: columns of samples of other runs, by content (see `SampleColumns`).
    Raises:
        ValueError: when the folder holds no results.
    """
    place = Path(folder) / "eval"
    if not any(place.glob("*.json")):
        place = Path(folder)
    if shared is None:
        shared = {}
    results: dict[str, dict] = {}
    left_out: list[str] = []
    for name, content in result_files(place):
        is_current = content.get("schema") == SCHEMA_VERSION
        if is_current:
            for part in tasks_of(content).values():
                part["samples"] = SampleColumns(part["samples"], shared)
        if is_current and content["method"] not in task_base.names():
            results[content["method"]] = content
        else:  # another schema; or a file of a task, which older versions wrote for speeds
            left_out.append(
                f"{name} comes from an older version (schema {content.get('schema')}): run `pod eval` again"
            )
    if not results:
        raise ValueError(f"{place} has no evaluation results: run `pod eval` first")
    newest = max(results.values(), key=lambda content: content["environment"]["date"])
    strange = [name for name, content in results.items() if content.get("dense") != newest.get("dense")]
    left_out += [f"{name} was measured on another dense model and is left out" for name in strange]
    ordered = {name: results[name] for name in sorted(results, key=_rank) if name not in strange}
    path = place.resolve()
    label = path.parent.name if path.name == "eval" else path.name
    return ReportedRun(label, path, ordered, left_out)


def tasks_of(content: dict[str, Any]) -> dict[str, Payload]:
    """The payloads of a result file, by task. Speeds, measured side by side, are left out."""
    return {task: part for task, part in content["parts"].items() if not is_side_by_side(task)}


def combined(entry: Entry, tasks: Tasks) -> Payload | None:
    """The payload of a task, or of the mean over several scored tasks.

    Returns: None when the row lacks one of them, or when they cannot be averaged.
    """
    found = [combined(entry, of) if isinstance(of, tuple) else entry.parts.get(of) for of in tasks]
    parts = [part for part in found if part is not None]
    if len(parts) < len(tasks):
        return None
    if len(tasks) == 1:
        return parts[0]
    if any(part["kind"] == "nll" or part["value"] is None for part in parts):
        return None
    samples, subtasks = [], {}
    for task, part in zip(tasks, parts, strict=True):
        inner = part.get("subtasks") or {}
        names = dict.fromkeys(str(sample.get("subtask", "")) for sample in part["samples"])
        for name in names:
            weight = inner.get(name, {}).get("weight") or 1 / len(names)
            subtasks[f"{task}/{name}"] = {"weight": weight / len(tasks)}
        for sample in part["samples"]:
            name = f"{task}/{sample.get('subtask', '')}"
            samples.append({**sample, "id": f"{task}/{sample['id']}", "subtask": name})
    value = fmean(part["value"] for part in parts)
    return scored_payload("score", "mean", samples, subtasks=subtasks, value=value)


def prompt_conflicts(comparison: Comparison, task: str) -> tuple[int, int]:
    """(number of a task's sample ids whose prompts differ between rows, number of all its sample ids)."""
    hashes: dict[str, set[str]] = {}
    for entry in comparison.measured(task):
        for sample in entry.parts[task]["samples"]:
            hashes.setdefault(sample["id"], set()).update(filter(None, [sample.get("prompt_hash")]))
    return sum(len(found) > 1 for found in hashes.values()), len(hashes)


def base_name(method: str) -> str:
    """The method without its budget: `snapkv@25%` → `snapkv`."""
    return cut_budget(method)[0]


def held_rows(entry: Entry, task: str | None = None) -> list[dict[str, Any]]:
    """The rows of stated bytes of a row, of one task or of all, if the bytes are known.

    The bytes of a dense cache and of PoD's are known even if no cache was measured.

    Returns: rows with two more keys. `held_tokens` is the number of tokens at which the bytes were measured,
        because answers may end before the length. `dense` is the bytes of a dense cache of so many tokens.
    """
    parts = [entry.parts[task]] if task else list(entry.parts.values())
    rows = [row for part in parts for row in part.get("bytes") or []]
    if task is None:
        rows += [row["bytes"] for row in entry.speed]
    known = {BASE: "dense_bytes", "pod": "pod_bytes", "pod-unadapted": "pod_bytes"}.get(entry.method, "")
    found = []
    for row in rows:
        tokens = row.get("held_tokens", row["length"]) if row["bytes"] else row["length"]
        dense = row["dense_bytes"] * tokens / row["length"]
        if size := row["bytes"] or row.get(known):
            found.append({**row, "bytes": size, "held_tokens": tokens, "dense": dense})
    return found


def byte_share(entry: Entry, task: str) -> float | None:
    """Bytes held as a share of the dense cache's bytes, over all lengths of a task.

    Returns: None if the bytes are not known.
    """
    rows = held_rows(entry, task)
    return sum(row["bytes"] for row in rows) / sum(row["dense"] for row in rows) if rows else None


def _goes_with(entry: Entry, content: dict[str, Any]) -> bool:
    """Whether a result file of a further run belongs to a row of earlier runs.

    It does if method, model, plan and options (`row`) are the same, and no task was measured in both.
    """
    for key in ("method", "row"):
        if content.get(key) is None or entry.content.get(key) != content[key]:
            return False
    return entry.parts.keys().isdisjoint(tasks_of(content))


def _rank(method: str) -> tuple[int, str, float, str]:
    """The sort key of a method's row.

    Methods come in the order of pod.eval.answer.methods, combinations and models after them. Budgets of one
    method come together, the smallest first.
    """
    order = [BASE, TRAINED, *EVALUATED_METHODS]
    name, budget = cut_budget(method)
    number = re.search(r"[0-9.]+", budget)
    size = float(number.group()) if number else 0.0
    without_parameters = name.partition("[")[0]
    place = order.index(without_parameters) if without_parameters in order else len(order)
    return place, name, size, method


def _task_order(entries: list[Entry]) -> list[str]:
    """Every task that was measured, refused or failed in any row, in the order of the recipes."""
    tasks: dict[str, None] = {}
    for entry in entries:
        asked = (entry.content.get("config") or {}).get("tasks", [])
        seen = {**entry.parts, **entry.refused, **entry.failed}
        tasks |= dict.fromkeys(name for name in [*asked, *seen] if name in seen)
    return [task for task in tasks if not is_side_by_side(task)]
