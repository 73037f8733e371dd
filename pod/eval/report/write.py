"""Write report.html, report.md and report.csv from the results of one or several runs.

The HTML is one self-contained page without network. It is readable on a phone and on paper, and a few lines
of script sort its tables.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pod.eval.report import notes, paper_tables, report_pictures, report_tables
from pod.eval.report.merge import (
    Comparison,
    Entry,
    base_name,
    byte_share,
    combined,
    held_rows,
    merge,
    prompt_conflicts,
)
from pod.eval.report.names import plain, short_name, suite_of
from pod.eval.report.page import Block, Notes, Picture, Section, listed, render
from pod.eval.report.speed import speed_blocks
from pod.eval.statistics.comparison import Against
from pod.files import atomic_write_text

if TYPE_CHECKING:
    from pod.recipe import Recipe

_TITLE = "Proximal over distant: evaluation"


def write_report(recipe: "Recipe") -> Path:
    """Write report.html, report.md and report.csv into the eval folder of one run.

    They are made from the files of all methods there.

    Returns: the path of the HTML page.
    """
    return write_merged([recipe.eval_dir], recipe.eval_dir, more=_run_pictures(recipe))


def write_merged(
    folders: Iterable[str | Path],
    out: str | Path,
    papers: str | Path | None = None,
    model: str | None = None,
    more: Sequence[Section] = (),
) -> Path:
    """Write one report of several runs into the folder `out`.

    Args:
        folders: output folders of runs, or their `eval` folders.
        papers: folder of CSV files as in papers/ beside this file; None = those.
        model: the papers' name of the model, if its path does not tell it.
        more: further sections.
    Returns: the path of the HTML page.
    Raises:
        ValueError: when a folder holds no results.
    """
    comparison = merge(folders)
    folder = Path(out)
    theirs = paper_tables.blocks(comparison, paper_tables.load(papers), model)
    found = [*sections(comparison), *more, Section("Ours next to the papers'", theirs)]
    for title, name in (("Skipped and not run", "skipped"), ("How it was measured", "scoring")):
        found.append(Section(title, listed(notes.sentences(name, entries=comparison.entries))))
    page = (_TITLE, notes.headline(comparison), notes.origin(comparison), found)
    folder.mkdir(parents=True, exist_ok=True)
    for form in ("md", "html"):
        atomic_write_text(folder / f"report.{form}", render(form, *page))
    atomic_write_text(folder / "report.csv", csv_text(comparison))
    return folder / "report.html"


# -- sections ------------------------------------------------------------------------------------------------


def sections(comparison: Comparison) -> list[Section]:
    """The sections about what was measured: overview, failures, warnings, bytes, every task, speed."""
    summary: list[Block] = [report_tables.overview(comparison), Notes(notes.overview_notes(comparison))]
    found = [
        Section("Methods side by side", summary),
        Section("Failed", listed(notes.sentences("failed", entries=comparison.entries), True)),
        Section("Read with care", listed(notes.warnings(comparison))),
        Section("Score over bytes", _overall_bytes(comparison)),
    ]
    for title, tasks in comparison.columns().items():
        if len(tasks) == 1:
            found.append(Section(plain(title), task_blocks(comparison, tasks[0])))
        else:
            found.append(Section(title, suite_blocks(comparison, tasks)))
    return [*found, Section("Memory and decode speed", speed_blocks(comparison.runs))]


def task_blocks(comparison: Comparison, task: str) -> list[Block]:
    """Everything about one task: its tables, pictures and settings."""
    entries = comparison.measured(task)
    blocks: list[Block] = [
        report_tables.task_table(comparison, task),
        *report_tables.part_table(comparison, task),
    ]
    by_position = {row.label: row.parts[task]["buckets"] for row in entries if row.parts[task].get("buckets")}
    if by_position:
        blocks.append(Picture(report_pictures.perplexity_by_position(by_position), "perplexity by position"))
    blocks += report_tables.heat_maps(comparison, task)
    blocks += _curves(comparison, task)
    metric = entries[0].parts[task]["metric"].replace("_", " ")
    blocks += _over_bytes(_points(comparison, (task,)), metric)
    settings = [entry.parts[task].get("settings") or {} for entry in entries]
    lines = dict.fromkeys(line for found in settings for line in notes.sentences("settings", found=found))
    return blocks + listed([*lines][:4])  # once, or per run where they differ


def suite_blocks(comparison: Comparison, tasks: tuple[str, ...]) -> list[Block]:
    """A suite: its table, its picture over bytes, and a section that a click opens for each of its tasks."""
    blocks: list[Block] = [report_tables.suite_table(comparison, tasks)]
    blocks += _over_bytes(_points(comparison, tasks), "mean score of the tasks")
    return blocks + [Section(short_name(task), task_blocks(comparison, task)) for task in tasks]


def _overall_bytes(comparison: Comparison) -> list[Block]:
    """The picture of mean scores over bytes, over all tasks on which every row has a score.

    Tasks in which rows had different prompts are left out.
    """
    scored = tuple(
        task
        for task in comparison.tasks
        if len(comparison.measured(task)) == len(comparison.entries)
        and not prompt_conflicts(comparison, task)[0]
        and all(entry.parts[task]["kind"] != "nll" for entry in comparison.entries)
    )
    points = _points(comparison, scored) if len(scored) > 1 else []
    found = _over_bytes(points, "mean score")
    return [*found, Notes(notes.sentences("over_bytes", tasks=scored))] if found else []


def _points(comparison: Comparison, tasks: tuple[str, ...]) -> list[dict[str, Any]]:
    """The points of `report_pictures.score_over_bytes`: one for every row whose value and bytes are known."""
    points = []
    for entry in comparison.entries:
        payload = combined(entry, tasks)
        if payload is None or payload["value"] is None:
            continue
        shares = [byte_share(entry, task) for task in tasks]
        ends = payload.get("ci95")
        known = [share for share in shares if share is not None]
        if len(known) == len(tasks):
            scale = 1 if payload["kind"] == "nll" else 100
            point = {"family": base_name(entry.method) + entry.label.removeprefix(entry.method)}
            point |= {"label": entry.label, "share": fmean(known), "value": scale * payload["value"]}
            point["ci95"] = None if ends is None else [scale * end for end in ends]
            points.append(point | {"higher_is_better": payload["higher_is_better"]})
    return points


def _over_bytes(points: list[dict[str, Any]], label: str) -> list[Block]:
    """The picture of points over bytes, if there are at least three and they differ in bytes."""
    if len(points) < 3 or len({round(point["share"], 3) for point in points}) < 2:
        return []
    svg = report_pictures.score_over_bytes(points, label, points[0]["higher_is_better"])
    return [Picture(svg, f"{label} over KV cache memory")]


def _curves(comparison: Comparison, task: str) -> list[Block]:
    """Pictures of the payloads' curves. Curves with the same title share one, with a line per method."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in comparison.measured(task):
        for line in entry.parts[task].get("curves") or []:
            found.setdefault(line["title"], {})[entry.label] = line
    return [Picture(report_pictures.curve(lines), title) for title, lines in found.items()]


def _run_pictures(recipe: "Recipe") -> list[Section]:
    """Sections with pictures from other steps of the run: similarity and plan, training loss."""
    files = sorted(recipe.plan_dir.glob("*.png"))  # these pictures say themselves what they show
    plans: list[Block] = [Picture(file.read_bytes(), file.stem.replace("_", " ")) for file in files]
    metrics = recipe.train_dir / "metrics.jsonl"
    curve = report_pictures.training_curve(metrics) if metrics.is_file() else None
    training: list[Block] = [Picture(curve, "training loss")] if curve else []
    return [Section("Similarity and sharing plan", plans), Section("Adaptation", training)]


# -- CSV -----------------------------------------------------------------------------------------------------

_CHANGE_COLUMNS = (
    *("base", "delta", "delta_kind", "delta_low", "delta_high"),
    *("paired", "gained", "lost", "p", "p_page", "mark"),
)


def csv_text(comparison: Comparison) -> str:
    """The report as CSV: a line per row and task with its value, change, samples and bytes."""
    out = io.StringIO()
    rows = []
    for entry in comparison.entries:
        for task in comparison.tasks:
            if task in entry.parts or task in entry.refused or task in entry.failed:
                rows.append(_csv_row(comparison, entry, task))
    writer = csv.DictWriter(out, rows[0] if rows else ["row"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_row(comparison: Comparison, entry: Entry, task: str) -> dict[str, Any]:
    """The line of a row and task, by column. Numbers that are not known are None."""
    part: dict[str, Any] = entry.parts.get(task) or {}
    against = comparison.against(entry, (task,)) if part else None
    model = entry.content.get("model") or {}
    return {
        "row": entry.label,
        "method": entry.method,
        "runs": entry.sources.get(task, entry.run).label,
        "model": model.get("path"),
        "suite": suite_of(task),
        "task": task,
        **_score_columns(part),
        **_change_columns(against),
        **_bytes_columns(entry, task),
        **_status_columns(entry, task),
    }


def _score_columns(part: dict[str, Any]) -> dict[str, Any]:
    """The columns of a task's value, from its part of a result file; all None for an empty part."""
    low, high = part.get("ci95") or (None, None)
    return {
        "metric": part.get("metric"),
        "kind": part.get("kind"),
        "value": part.get("value"),
        "ci_low": low,
        "ci_high": high,
        "samples": len(part["samples"]) if part else None,
        "skipped": len(part["skipped"]) if part else None,
    }


def _change_columns(against: Against | None) -> dict[str, Any]:
    """The columns of the comparison with the base; all None without one."""
    if against is None:
        return dict.fromkeys(_CHANGE_COLUMNS)
    low, high = against.estimate.interval or (None, None)
    return {
        "base": against.base,
        "delta": against.delta,
        "delta_kind": "relative" if against.relative else "difference",
        "delta_low": low,
        "delta_high": high,
        "paired": against.common,
        "gained": against.gained,
        "lost": against.lost,
        "p": against.estimate.p,
        "p_page": against.adjusted,
        "mark": against.mark,
    }


def _bytes_columns(entry: Entry, task: str) -> dict[str, Any]:
    """The columns of a row's cache: its share of the dense bytes, and its bytes at the longest length."""
    share, longest = None, {}
    if entry.parts.get(task):
        share = byte_share(entry, task)
        longest = max(held_rows(entry, task), key=lambda row: row["length"], default={})
    return {
        "byte_share": share,
        "longest_length": longest.get("length"),
        "bytes": longest.get("bytes"),
        "dense_bytes": longest.get("dense_bytes"),
        "budget_tokens": longest.get("budget_tokens"),
    }


def _status_columns(entry: Entry, task: str) -> dict[str, str | None]:
    """Whether the task was measured, and else the reason why not."""
    if entry.parts.get(task):
        return {"status": "measured", "reason": None}
    if task in entry.failed:
        return {"status": "failed", "reason": entry.failed[task]}
    return {"status": "not run", "reason": entry.refused[task]}
