"""Result files of one or several runs as one comparison: its rows, its tasks, and every method against `full` on the same samples."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pod.eval import stats
from pod.eval.methods import METHODS
from pod.eval.report.summary import BASE, SPEED_RUN, load_speed
from pod.eval.results import SCHEMA_VERSION, load_results
from pod.files import read_json

Payload = dict[str, Any]
_DENSE = ("dense", "unadapted")


@dataclass
class Run:
    """One evaluation's folder. label: what the report calls it; results: by method; left_out: files that are no results of this schema."""

    label: str
    folder: Path
    results: dict[str, dict]
    speed: list[dict[str, Any]]
    speed_part: dict[str, Any]
    left_out: list[str]

    @property
    def dense_path(self) -> str | None:
        """The dense model that its methods start from, None when none of them was measured."""
        models = [result.get("model") or {} for result in self.results.values()]
        return next((model["path"] for model in models if model.get("kind") in _DENSE), None)


@dataclass
class Entry:
    """One row of the comparison: a method of a model, with the tasks that one or several runs measured.

    parts, refused, failed: by task; sources: the run of every part.
    """

    label: str
    method: str
    content: dict[str, Any]
    run: Run
    parts: dict[str, Payload] = field(default_factory=dict)
    sources: dict[str, Run] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def take(self, run: Run, content: dict[str, Any]) -> None:
        """Add what a run measured for this method."""
        self.parts |= content["parts"]
        self.sources |= dict.fromkeys(content["parts"], run)
        self.refused |= content.get("refused") or {}
        self.failed |= failures(content)


@dataclass(frozen=True)
class Against:
    """A method against its base on the samples that both answered, with equal prompts.

    relative: `delta` is the relative change of perplexity, else the difference of the scores (0 to 1). gained, lost: 0/1 samples that
    only the method, only the base got right; p_value: McNemar's, None where several samples share a text.
    left_out: common sample ids that were not compared, by reason.
    """

    base: str
    relative: bool
    delta: float
    ci95: list[float] | None
    common: int
    unpaired: int
    left_out: dict[str, int]
    gained: int | None = None
    lost: int | None = None
    p_value: float | None = None


@dataclass
class Comparison:
    """Everything that a report shows. tasks: in the order of the recipes."""

    runs: list[Run]
    entries: list[Entry]
    tasks: list[str]
    _found: dict[tuple[int, tuple[str, ...]], Against | None] = field(default_factory=dict)

    def measured(self, task: str) -> list[Entry]:
        """The rows that have this task."""
        return [entry for entry in self.entries if task in entry.parts]

    def base_of(self, entry: Entry, task: str) -> Entry | None:
        """The `full` that a row is held against: of its own run, else of the same dense model, else the only one there is."""
        bases = [other for other in self.measured(task) if other.method == BASE]
        run = entry.sources.get(task, entry.run)
        own = [base for base in bases if base.sources[task] is run]
        same = [base for base in bases if run.dense_path in (base.run.dense_path, None)]
        return next(iter(own or same or (bases if len(bases) == 1 else [])), None)

    def against(self, entry: Entry, tasks: tuple[str, ...]) -> Against | None:
        """The row against its base on a task, or on the mean of several; None for the base itself and where nothing can be paired."""
        key = (id(entry), tasks)
        if key not in self._found:
            self._found[key] = self._against(entry, tasks)
        return self._found[key]

    def _against(self, entry: Entry, tasks: tuple[str, ...]) -> Against | None:
        own, base = combined(entry, tasks), self.base_of(entry, tasks[0])
        other = None if base is None or base is entry else combined(base, tasks)
        if own is None or base is None or other is None:
            return None
        resamples = (entry.content.get("config") or {}).get("bootstrap_samples", 2000)
        return compare(own, other, base.label, resamples, entry.content.get("seed") or 0)


def merge(folders: Iterable[str | os.PathLike], methods: list[str] | None = None) -> Comparison:
    """Read the runs. A method of the same model whose tasks do not overlap becomes one row, else a row per run.

    methods: these only, in this order (default: all that the folders hold).
    Raises: ValueError when a folder holds no results.
    """
    runs = [read_run(folder, methods) for folder in folders]
    for run, label in zip(runs, _labels([run.folder for run in runs]), strict=True):
        run.label = label
    entries: list[Entry] = []
    for run in runs:
        for method, content in run.results.items():
            entry = next((other for other in entries if _goes_with(other, run, method, content)), None)
            if entry is None:
                entry = Entry(method, method, content, run)
                entries.append(entry)
            entry.take(run, content)
    entries.sort(key=lambda entry: _rank(entry.method) if methods is None else (methods.index(entry.method),))
    _name_apart(entries)
    return Comparison(runs, entries, _task_order(entries))


def read_run(folder: str | os.PathLike, methods: list[str] | None = None) -> Run:
    """A run's results from its output folder or its `eval` folder. methods: these only (default: all there are)."""
    place = Path(folder)
    place = place / "eval" if _has_results(place / "eval") else place
    results = load_results(place, methods)
    results.pop(SPEED_RUN, None)
    known = {id(content) for content in results.values()}
    left_out = [] if methods is not None else _left_out(place)
    part: dict[str, Any] = {}
    speed = load_speed(place)
    if speed:
        part = load_results(place, [SPEED_RUN])[SPEED_RUN]["parts"][SPEED_RUN]
    if not known and not speed:
        raise ValueError(f"{place} holds no evaluation results: run launch/run_eval.py first")
    ordered = (
        results if methods is not None else dict(sorted(results.items(), key=lambda item: _rank(item[0])))
    )
    return Run(place.name, place.resolve(), ordered, speed, part, left_out)


def failures(content: dict[str, Any]) -> dict[str, str]:
    """Error lines of a result file by task."""
    if content.get("failed"):
        return content["failed"]
    if not content.get("error"):
        return {}
    task, mark, reason = content["error"].partition(": ")
    return {task: reason} if mark else {"": task}


def compare(own: Payload, base: Payload, label: str, resamples: int, seed: int) -> Against | None:
    """One payload against another on their common samples; None when they are of different kinds or metrics or share none."""
    if any(own[key] != base[key] for key in ("kind", "metric")) or _filter(own) != _filter(base):
        return None
    pairs, left_out = paired_samples(own, base)
    if not pairs:
        return None
    mine, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    scores = [[sample["score"] for sample in side] for side in (mine, theirs)]
    shared = {sample["id"] for sample in own["samples"]} & {sample["id"] for sample in base["samples"]}
    unpaired = len(own["samples"]) + len(base["samples"]) - 2 * len(shared)
    if own["kind"] == "nll":
        counts = [sample["tokens"] for sample in mine]
        found = stats.paired_change(scores[0], scores[1], counts, resamples, seed)
        return Against(label, True, found["change"], found["ci95"], len(pairs), unpaired, left_out)
    strata, weights = _strata(own, mine)
    clusters = stats.clusters_of(mine)
    found = stats.paired_difference(scores[0], scores[1], resamples, seed, strata, weights, clusters)
    gained = lost = p_value = None
    if own["kind"] == "binary":
        gained = sum(a > b for a, b in zip(*scores, strict=True))
        lost = sum(a < b for a, b in zip(*scores, strict=True))
        p_value = stats.mcnemar(gained, lost) if clusters is None else None
    return Against(
        label,
        False,
        found["difference"],
        found["ci95"],
        len(pairs),
        unpaired,
        left_out,
        gained,
        lost,
        p_value,
    )


def combined(entry: Entry, tasks: tuple[str, ...]) -> Payload | None:
    """The payload of a task, or of the mean over several scored tasks; None when the row lacks one of them or they cannot be averaged."""
    parts = [entry.parts[task] for task in tasks if task in entry.parts]
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
        samples += [
            {**sample, "id": f"{task}/{sample['id']}", "subtask": f"{task}/{sample.get('subtask', '')}"}
            for sample in part["samples"]
        ]
    return {
        "kind": "score",
        "metric": "mean",
        "higher_is_better": True,
        "value": sum(part["value"] for part in parts) / len(parts),
        "ci95": None,
        "samples": samples,
        "skipped": [skip for part in parts for skip in part["skipped"]],
        "bytes": [row for part in parts for row in part.get("bytes") or []],
        "settings": {},
        "subtasks": subtasks,
    }


def paired_samples(own: Payload, base: Payload) -> tuple[list[tuple[dict, dict]], dict[str, int]]:
    """Samples with one id on both sides, and how many of those were left out, by reason."""
    others = {sample["id"]: sample for sample in base["samples"]}
    pairs, left_out = [], {}
    for sample in own["samples"]:
        other = others.get(sample["id"])
        if other is None:
            continue
        reason = None
        if _hash(sample) and _hash(other) and _hash(sample) != _hash(other):
            reason = "another prompt"
        elif own["kind"] == "nll" and sample["tokens"] != other["tokens"]:
            reason = "another number of scored tokens"
        if reason is None:
            pairs.append((sample, other))
        else:
            left_out[reason] = left_out.get(reason, 0) + 1
    return pairs, left_out


def prompt_conflicts(comparison: Comparison, task: str) -> tuple[int, int]:
    """(sample ids of a task whose prompts differ between rows, all sample ids)."""
    hashes: dict[str, set[str]] = {}
    for entry in comparison.measured(task):
        for sample in entry.parts[task]["samples"]:
            hashes.setdefault(sample["id"], set()).update(filter(None, [_hash(sample)]))
    return sum(len(found) > 1 for found in hashes.values()), len(hashes)


def base_name(method: str) -> str:
    """The method without its budget: `snapkv@25%` → `snapkv`."""
    return method.partition("@")[0]


def held_rows(entry: Entry, task: str | None = None) -> list[dict[str, Any]]:
    """Bytes by length (tokens) of a row, of one task or of all. What is not measured there but known is filled in: a dense cache and PoD's."""
    parts = [entry.parts[task]] if task else list(entry.parts.values())
    rows = [row for part in parts for row in part.get("bytes") or []]
    if task is None:
        rows += [
            lengths["methods"][entry.method]["bytes"]
            for lengths in entry.run.speed
            if entry.method in lengths["methods"]
        ]
    return [row if row["bytes"] else _known(entry.method, row) for row in rows]


def byte_share(entry: Entry, task: str) -> float | None:
    """Bytes held as a share of the dense cache's, over all lengths of a task; None when they were not measured."""
    rows = [row for row in held_rows(entry, task) if row["bytes"] and row.get("dense_bytes")]
    return sum(row["bytes"] for row in rows) / sum(map(dense_bytes, rows)) if rows else None


def dense_bytes(row: dict[str, Any]) -> float:
    """What a dense cache holds where the row's bytes were measured: answers may end before the row's length (`held_tokens`)."""
    return row["dense_bytes"] * row.get("held_tokens", row["length"]) / row["length"]


def _known(method: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row without measured bytes, with those of its whole length where the method's are known."""
    known = {BASE: "dense_bytes", "pod": "pod_bytes", "pod-unadapted": "pod_bytes"}.get(method, "")
    return {**row, "bytes": row.get(known), "held_tokens": row["length"]}


def _filter(payload: Payload) -> Any:
    """How answers were read before they were scored (gsm8k: strict-match or flexible-extract)."""
    return (payload.get("settings") or {}).get("filter")


def _hash(sample: dict[str, Any]) -> str | None:
    return sample.get("prompt_hash")


def _strata(payload: Payload, samples: list[dict]) -> tuple[list[str] | None, dict[str, float] | None]:
    """The task of every sample of a group, and each task's weight in the group's value."""
    names = [sample.get("subtask") for sample in samples]
    if any(name is None for name in names):
        return None, None
    strata, subtasks = [str(name) for name in names], payload.get("subtasks") or {}
    weights = {name: subtasks.get(name, {}).get("weight") for name in strata}
    known = {name: weight for name, weight in weights.items() if weight is not None}
    return strata, known if len(known) == len(weights) else None


def _goes_with(entry: Entry, run: Run, method: str, content: dict[str, Any]) -> bool:
    """Whether a run's results of a method continue a row of an earlier run: same model, same settings, other tasks."""
    if entry.method != method or set(entry.parts) & set(content["parts"]):
        return False
    old, new = entry.content.get("model") or {}, content.get("model") or {}
    keys = ("kind", "path", "dtype", "num_sink_tokens", "num_recent_tokens", "asymptotic_saving")
    if old and new and any(old.get(key) != new.get(key) for key in keys):
        return False
    if entry.content.get("bytes_of") != content.get("bytes_of"):
        return False
    configs = [
        (result.get("config") or {}).get("method_options", {}).get(method)
        for result in (entry.content, content)
    ]
    return configs[0] == configs[1] and entry.content.get("spec") == content.get("spec")


def _has_results(folder: Path) -> bool:
    return any(_read(file).get("method") for file in folder.glob("*.json")) if folder.is_dir() else False


def _left_out(folder: Path) -> list[str]:
    """One line per result file that has another schema."""
    found = [(file, _read(file)) for file in sorted(folder.glob("*.json"))]
    return [
        f"{file.name} has schema {content.get('schema')}, this report reads {SCHEMA_VERSION}: measure again"
        for file, content in found
        if content.get("method") and content.get("schema") != SCHEMA_VERSION
    ]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (ValueError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def _labels(folders: list[Path]) -> list[str]:
    """A short name per run: its output folder's, numbered where two are equal."""
    names = [folder.parent.name if folder.name == "eval" else folder.name for folder in folders]
    return [name if names.count(name) == 1 else f"{name} {number + 1}" for number, name in enumerate(names)]


def _name_apart(entries: list[Entry]) -> None:
    """Rows of one method from several runs carry the run's name."""
    methods = [entry.method for entry in entries]
    for entry in entries:
        if methods.count(entry.method) > 1:
            entry.label = f"{entry.method} · {entry.run.label}"


def _rank(method: str) -> tuple[int, str, float, str]:
    """Order of the rows: as pod.eval.methods lists them, combinations and models after, growing budgets together."""
    order = list(METHODS)
    name, _, budget = method.partition("@")
    number = re.search(r"[0-9.]+", budget)
    place = order.index(name) if name in order else len(order)
    return place, name, float(number.group()) if number else 0.0, method


def _task_order(entries: list[Entry]) -> list[str]:
    """Every task that a row measured, was refused or failed, in the order of the recipes."""
    tasks: dict[str, None] = {}
    for entry in entries:
        asked = (entry.content.get("config") or {}).get("tasks", [])
        seen = {**entry.parts, **entry.refused, **entry.failed}
        tasks |= dict.fromkeys(name for name in [*asked, *seen] if name in seen and name)
    for entry in entries:
        tasks |= dict.fromkeys(entry.parts)
    return [task for task in tasks if task != SPEED_RUN]
