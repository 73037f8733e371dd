"""The facts behind the sentences of a report. Their wording is in `notes.jinja`."""

from typing import Any

from pod.eval.answer.methods import BASE, TRAINED
from pod.eval.report.merge import Comparison, Entry, combined, prompt_conflicts
from pod.eval.report.page import TEMPLATES
from pod.eval.report.report_tables import (
    MOST_COLUMNS,
    bytes_at,
    common_length,
    delta_text,
    saving_of,
    speed_of,
    value_text,
)

TEMPLATES.globals |= {"saving_of": saving_of, "speed_of": speed_of}


def sentences(name: str, **facts: Any) -> list[str]:
    """The sentences that a macro of `notes.jinja` makes of some facts.

    Args:
        name: of the macro.
        facts: its arguments.
    """
    text = str(getattr(TEMPLATES.get_template("notes.jinja").module, name)(**facts))
    return [line for line in text.splitlines() if line]


def headline(comparison: Comparison) -> str:
    """PoD's result if there is one, its gains and losses over all tasks, and how much was measured."""
    rows = {entry.method: entry for entry in reversed(comparison.entries) if entry.parts or entry.speed}
    shown = rows.get("pod") or rows.get("pod-unadapted")
    parts = [part for entry in comparison.entries for part in entry.parts.values()]
    counts = {key: sum(len(part[key]) for part in parts) for key in ("samples", "skipped")}
    facts: dict[str, Any] = {"comparison": comparison, "shown": shown, **counts}
    facts["tasks"] = sum(bool(comparison.measured(task)) for task in comparison.tasks)
    facts |= {"held": None, "verdicts": {}, "trained": None, "decoded": None, "packed": {}}
    if shown is not None:
        held = bytes_at(shown, common_length(comparison.entries))
        facts["held"] = held
        facts["verdicts"] = _gains_and_losses(comparison, shown)
        facts["trained"] = len(_against_trained(comparison, shown))
        speeds = [*shown.speed, *shown.decoding]
        facts["decoded"] = max(speeds, key=lambda row: row["length"], default={})
        if held is not None:
            facts["packed"] = _packed(rows, held["length"])
    return " ".join(sentences("headline", **facts))


def _packed(rows: dict[str, Entry], length: int) -> dict[str, float]:
    """The bytes of `pod+int4` and of `int4` as shares of the dense bytes, at a length.

    The result is empty unless both were measured at this length.
    """
    found = {}
    for method in ("pod+int4", "int4"):
        row = bytes_at(rows[method], length) if method in rows else None
        if row is None or row["length"] != length:
            return {}
        found[method] = row["bytes"] / row["dense"]
    return found


def _gains_and_losses(comparison: Comparison, shown: Entry) -> dict[str, list[str]]:
    """By verdict, a text for every task or suite of a row. Losses come first.

    The verdicts are `worse`, `better`, an empty text for neither, and `alone` without a comparison.
    """
    found: dict[str, list[str]] = {"worse": [], "better": [], "": [], "alone": []}
    mixed = 0 < len(_against_trained(comparison, shown)) < len(shown.parts)
    for title, tasks in comparison.columns().items():
        payload = combined(shown, tasks)
        against = comparison.against(shown, tasks)
        if payload is not None and payload["value"] is not None:
            to = f" to {against.base}" if mixed and against is not None else ""
            change = "" if against is None else f" ({delta_text(against)}{to})"
            text = f"{title} {value_text(payload, payload['value'])}{change}"
            found["alone" if against is None else against.mark].append(text)
    return {mark: lines for mark, lines in found.items() if lines}


def _against_trained(comparison: Comparison, entry: Entry) -> list[str]:
    """The tasks in which a row is compared with the dense model trained on the same tokens."""
    bases = {task: comparison.base_of(entry, task) for task in entry.parts}
    return [task for task, base in bases.items() if base is not None and base.method == TRAINED]


def origin(comparison: Comparison) -> list[str]:
    """Sentences about every run: its models, and machine, versions, commit and date of its latest part."""
    found = []
    for run in comparison.runs:
        contents = list(run.results.values())
        models = [content["model"] for content in contents if content.get("model")]
        names = dict.fromkeys(f"{model.get('path', '')} {model.get('dtype', '')}".strip() for model in models)
        everywhere = [environment for content in contents for environment in _environments(content)]
        latest = max(everywhere, key=lambda environment: environment["date"], default=None)
        if latest is not None:
            found.append((run.label, ", ".join(names), latest, _commit_text(latest)))
    return sentences("origin", runs=found, several=len(comparison.runs) > 1)


def overview_notes(comparison: Comparison) -> list[str]:
    """Sentences that explain the columns of the overview, with the numbers of these runs."""
    length = common_length(comparison.entries)
    held = [(entry, row) for entry in comparison.entries if (row := bytes_at(entry, length))]
    savings = [saving_of(row) for entry, row in held if entry.method != BASE]
    speeds = sorted({found["length"] for entry in comparison.entries if (found := speed_of(entry))})
    return sentences(
        "overview",
        methods=list(dict.fromkeys(entry.method for entry in comparison.entries)),
        scored=bool(comparison.columns()),
        length=length,
        budgets=[f"{e.label} {row['budget_tokens']:,}" for e, row in held if row.get("budget_tokens")],
        unsaved=bool(savings) and max(savings) < 0.005,
        hidden=list(comparison.columns())[MOST_COLUMNS:],
        speeds=[f"{length:,}" for length in speeds],
        trained=[(e, tasks) for e in comparison.entries if (tasks := _against_trained(comparison, e))],
    )


def warnings(comparison: Comparison) -> list[str]:
    """Sentences that a reader must know before comparing rows: prompts, settings or versions that differ."""
    worlds: dict[str, set[str]] = {}
    contents = [content for run in comparison.runs for content in run.results.values()]
    for content in contents:
        for environment in _environments(content):
            versions = {"commit": _commit_text(environment)} | environment["versions"]
            for name, version in versions.items():
                worlds.setdefault(name, set()).add(str(version))
    tasks = []
    for task in comparison.tasks:
        differ, of_all = prompt_conflicts(comparison, task)
        settings = differing_settings(comparison, task)
        tasks.append((task, differ, of_all, settings, _unpaired(comparison, task)))
    return sentences("warnings", tasks=tasks, runs=comparison.runs, worlds=worlds)


def differing_settings(comparison: Comparison, task: str) -> list[str]:
    """The settings of a task in which two runs differ, each with its values, as text."""
    by_run: dict[str, dict[str, set[str]]] = {}
    for entry in comparison.measured(task):
        seen = by_run.setdefault(entry.sources[task].label, {})
        for key, value in (entry.parts[task].get("settings") or {}).items():
            seen.setdefault(key, set()).add(repr(value))
    lines = []
    for key in dict.fromkeys(key for seen in by_run.values() for key in seen):
        values = {label: seen.get(key, {"not said"}) for label, seen in by_run.items()}
        # where the methods of one run differ in a setting, it belongs to the method and not to the run
        if all(len(found) == 1 for found in values.values()) and len(set.union(*values.values())) > 1:
            lines.append(f"{key} ({', '.join(f'{label}: {min(found)}' for label, found in values.items())})")
    return lines


def _unpaired(comparison: Comparison, task: str) -> dict[tuple[Any, ...], list[str]]:
    """Rows that are compared on a part of their samples only, and rows that cannot be compared.

    Returns: labels of rows by cause: (label of the base, number of common samples, number of samples of one
        side only). A number is None without a comparison, the label without a base.
    """
    causes: dict[tuple[Any, ...], list[str]] = {}
    methods = {entry.method for entry in comparison.measured(task)}
    for entry in comparison.measured(task):
        base = comparison.base_of(entry, task)
        against = comparison.against(entry, (task,))
        needs_no_base = entry.method == BASE or BASE not in methods
        if base is entry or (base is None and needs_no_base):
            continue
        if against is not None and not against.unpaired:
            continue
        label = None if base is None else base.label
        if against is None:
            cause = (label, None, None)
        else:
            cause = (label, against.common, against.unpaired)
        causes.setdefault(cause, []).append(entry.label)
    return causes


def _environments(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The environments (machine, versions, time) in which the parts of a result file were measured.

    The file's own entry counts only if no part has one: it may come from a later run that measured nothing
    new.
    """
    own = [part["environment"] for part in content["parts"].values() if part.get("environment")]
    return own or [content["environment"]]


def _commit_text(environment: dict[str, Any]) -> str:
    """Ten digits of the commit, with a `+` if files of the package differed from it."""
    name = environment["commit"] or "unknown"
    return name[:10] + ("+" if name.endswith("+") else "")
