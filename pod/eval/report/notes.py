"""The sentences of a report: the result in short, what needs care, what was skipped, refused or failed, how it was measured."""

from collections import Counter
from typing import Any

from pod.eval.report.merge import Comparison, Entry, combined, prompt_conflicts
from pod.eval.report.page import TEMPLATES
from pod.eval.report.summary import BASE
from pod.eval.report.tables import (
    MOST_COLUMNS,
    bytes_at,
    columns,
    common_length,
    delta_text,
    saving_of,
    speed_of,
    value_text,
)


def sentences(name: str, **facts: Any) -> list[str]:
    """The sentences of a macro of `notes.jinja`."""
    return str(getattr(TEMPLATES.get_template("notes.jinja").module, name)(**facts)).splitlines()


def headline(comparison: Comparison) -> str:
    """PoD's result if there is one, what it gains and loses over all tasks, and how much was measured."""
    parts = [part for entry in comparison.entries for part in entry.parts.values()]
    answers, skipped = (sum(len(part[key]) for part in parts) for key in ("samples", "skipped"))
    failed = sum(len(entry.failed) for entry in comparison.entries)
    text = f"{_count(len({entry.method for entry in comparison.entries}), 'method')} on "
    text += f"{_count(len(comparison.tasks), 'task')}, {answers:,} samples"
    text += f", {skipped:,} skipped" if skipped else ""
    text += f", {_count(failed, 'failure')}" if failed else ""
    return " ".join(filter(None, [_pod_result(comparison), text + "."]))


def _pod_result(comparison: Comparison) -> str:
    rows = {entry.method: entry for entry in reversed(comparison.entries)}
    shown = rows.get("pod") or rows.get("pod-unadapted")
    if shown is None or not shown.parts:
        return ""
    text = "PoD" if shown.method == "pod" else "PoD without adaptation"
    held, speed = bytes_at(shown, common_length(comparison.entries)), speed_of(shown)
    if held is not None:
        text += f", with {saving_of(held):.0%} fewer KV bytes at {held['length']:,} tokens"
    if speed is not None and speed.get("speed_over_full"):
        text += f", decoding at {speed['speed_over_full']['median']:.2f}× the dense speed"
    return f"{text}: {_gains_and_losses(comparison, shown)}."


def _gains_and_losses(comparison: Comparison, shown: Entry) -> str:
    """Every task or suite of the row by its verdict, losses first."""
    found: dict[str, list[str]] = {"worse": [], "better": [], "": [], "alone": []}
    for column in columns(comparison):
        payload, against = combined(shown, column.tasks), comparison.against(shown, column.tasks)
        if payload is None or payload["value"] is None:
            continue
        value = value_text(payload, payload["value"])
        if against is None:
            found["alone"].append(f"{column.title} {value}")
        else:
            found[against.mark].append(f"{column.title} {value} ({delta_text(against)})")
    names = {"worse": "worse than full on", "better": "better on", "": "these samples do not decide"}
    names["alone"] = "without full to compare"
    pieces = [f"{names[mark]} {', '.join(lines)}" for mark, lines in found.items() if lines]
    return "; ".join(pieces) or "nothing to compare"


def origin(comparison: Comparison) -> list[str]:
    """Models of every run; machine, versions, commit and date of what was measured last."""
    lines = []
    for run in comparison.runs:
        contents = list(run.results.values())
        if not contents:
            continue
        models = [content["model"] for content in contents if content.get("model")]
        names = dict.fromkeys(f"{model.get('path', '')} {model.get('dtype', '')}".strip() for model in models)
        everywhere = [found for content in contents for found in _environments(content)]
        environment = max(everywhere, key=lambda found: found["date"])
        hardware, versions = environment["hardware"], environment["versions"]
        pieces = [
            ", ".join(names),
            hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)",
            f"torch {versions['torch']}, transformers {versions['transformers']}",
            f"commit {_commit_text(environment)}" if environment["commit"] else "",
            environment["date"],
        ]
        start = f"{run.label}: " if len(comparison.runs) > 1 else ""
        lines.append(start + " · ".join(piece for piece in pieces if piece))
    return lines


def overview_notes(comparison: Comparison) -> list[str]:
    """What the overview's columns mean, with the numbers of these runs."""
    length = common_length(comparison.entries)
    held = [(entry, row) for entry in comparison.entries if (row := bytes_at(entry, length))]
    savings = [saving_of(row) for entry, row in held if entry.method != BASE]
    speeds = sorted({found["length"] for entry in comparison.entries if (found := speed_of(entry))})
    return sentences(
        "overview",
        length=length,
        budgets=[f"{e.label} {row['budget_tokens']:,}" for e, row in held if row.get("budget_tokens")],
        unsaved=bool(savings) and max(savings) < 0.005,
        hidden=[column.title for column in columns(comparison)[MOST_COLUMNS:]],
        speeds=[f"{length:,}" for length in speeds],
    )


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before comparing rows."""
    lines = []
    for task in comparison.tasks:
        differ, total = prompt_conflicts(comparison, task)
        if differ:
            lines.append(
                f"{task}: {differ:,} of {total:,} samples had different prompts in different rows (another chat template, truncation, "
                "tokenizer or data): samples with different prompts are never compared."
            )
        settings = differing_settings(comparison, task)
        if settings:
            lines.append(f"{task}: the runs differ in {', '.join(settings)}.")
        lines += _unpaired(comparison, task)
    lines += [f"{run.label}: {line}" for run in comparison.runs for line in run.left_out]
    lines += _different_worlds(comparison)
    return lines


def differing_settings(comparison: Comparison, task: str) -> list[str]:
    """Settings of a task that two runs did not share, with their values."""
    by_run: dict[str, dict[str, set[str]]] = {}
    for entry in comparison.measured(task):
        seen = by_run.setdefault(entry.sources[task].label, {})
        for key, value in (entry.parts[task].get("settings") or {}).items():
            seen.setdefault(key, set()).add(repr(value))
    lines = []
    for key in dict.fromkeys(key for seen in by_run.values() for key in seen):
        values = {label: seen.get(key, {"not said"}) for label, seen in by_run.items()}
        if any(len(found) > 1 for found in values.values()):
            continue  # the methods of one run differ in it: it is the method's, not the run's
        if len(set.union(*values.values())) > 1:
            lines.append(f"{key} ({', '.join(f'{label}: {min(found)}' for label, found in values.items())})")
    return lines


def _unpaired(comparison: Comparison, task: str) -> list[str]:
    """Rows that are compared on a part of their samples only, and rows that cannot be compared; rows of one cause together."""
    causes: dict[str, list[str]] = {}
    methods = {entry.method for entry in comparison.measured(task)}
    for entry in comparison.measured(task):
        base, against = comparison.base_of(entry, task), comparison.against(entry, (task,))
        cause = None
        if against is not None and against.unpaired:
            cause = f"share {against.common:,} samples with {against.base}, {against.unpaired:,} are on one side only"
        elif against is None and base is not None and base is not entry:
            cause = f"share no sample of the same prompt with {base.label}: no Δ"
        elif base is None and entry.method != BASE and BASE in methods:
            cause = "have no run of full with the same model: no Δ"
        if cause:
            causes.setdefault(cause, []).append(entry.label)
    return [f"{task}: {', '.join(labels)} {cause}." for cause, labels in causes.items()]


def _different_worlds(comparison: Comparison) -> list[str]:
    """Versions and commits that differ between runs."""
    worlds: dict[str, set[str]] = {}
    for content in (content for run in comparison.runs for content in run.results.values()):
        for environment in _environments(content):
            for name, version in ({"commit": _commit_text(environment)} | environment["versions"]).items():
                worlds.setdefault(name, set()).add(str(version))
    return [
        f"Results come from different versions of {name}: {', '.join(sorted(versions))}."
        for name, versions in worlds.items()
        if len(versions) > 1
    ]


def _environments(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Where and when the parts of a result file were measured; a run that only kept them wrote the file's own entry."""
    own = [part["environment"] for part in content["parts"].values() if part.get("environment")]
    return own or [content["environment"]]


def _commit_text(environment: dict[str, Any]) -> str:
    """Ten digits, with `+` where files differed from the commit."""
    name = environment["commit"] or "unknown"
    return name[:10] + ("+" if name.endswith("+") else "")


def skipped_lines(comparison: Comparison) -> list[str]:
    """Every skipped sample, counted by reason; tasks that a method cannot run."""
    lines = []
    for entry in comparison.entries:
        for task, part in entry.parts.items():
            total = len(part["samples"]) + len(part["skipped"])
            for reason, count in Counter(skip["reason"] for skip in part["skipped"]).most_common():
                what = f"{_count(count, 'sample')} of {total:,} skipped: {reason}"
                lines.append(f"{entry.label}, {task}: {what}")
        lines += [f"{entry.label}, {task}: not run: {reason}" for task, reason in entry.refused.items()]
    return lines


def failed_lines(comparison: Comparison) -> list[str]:
    """Errors by method and task."""
    return [
        f"{entry.label}: {f'{task}: ' if task else ''}{reason}"
        for entry in comparison.entries
        for task, reason in entry.failed.items()
    ]


def method_lines(comparison: Comparison) -> list[str]:
    """How every number came about."""
    titles = {entry.method: entry.content.get("title") for entry in comparison.entries}
    parts = [(entry.label, entry.parts.get("perplexity") or {}) for entry in comparison.entries]
    return sentences(
        "scoring",
        titles={method: title for method, title in titles.items() if title},
        scored=[(label, {"decode_path_check": None} | part) for label, part in parts if "scored_by" in part],
        passkeys=any("passkey" in entry.parts for entry in comparison.entries),
    )


def settings_line(entry: Entry, task: str) -> str:
    """What a task did, in one line."""
    settings = entry.parts[task].get("settings") or {}
    shown = {key: value for key, value in settings.items() if value not in (None, "", [], {})}
    return "; ".join(f"{key.replace('_', ' ')}: {_short(value)}" for key, value in shown.items())


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if len(text) <= 160 else text[:157] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
