"""report.html, report.md and report.csv out of the result files of one or several runs.

    python -m pod.eval.report RUN_FOLDER… --out FOLDER

One self-contained page: readable on a phone and on paper, sortable by a few lines of script, without network.
"""

import argparse
import csv
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pod.eval.report import notes, paper_tables, pictures, tables
from pod.eval.report.merge import (
    Comparison,
    base_name,
    byte_share,
    combined,
    held_rows,
    merge,
    prompt_conflicts,
)
from pod.eval.report.names import short_name, suite_of
from pod.eval.report.page import Block, Fold, Notes, Picture, Report, Section
from pod.eval.report.speed import speed_blocks
from pod.files import atomic_write_text

if TYPE_CHECKING:
    from pod.recipe import Recipe

_TITLE = "Proximal over distant: evaluation"
_CSV_COLUMNS: list[str] = [
    *("row", "method", "runs", "model", "suite", "task", "metric", "kind", "value", "ci_low", "ci_high"),
    *("samples", "skipped", "base", "delta", "delta_kind", "delta_low", "delta_high", "paired", "gained"),
    *("lost", "p", "p_page", "mark", "byte_share", "longest_length", "bytes", "dense_bytes"),
    *("budget_tokens", "status", "reason"),
]


def write_report(recipe: "Recipe") -> Path:
    """Write report.html, report.md and report.csv into the eval folder of one run, from the files of all methods there; returns the HTML path."""
    comparison = merge([recipe.eval_dir])
    return _write(comparison, recipe.eval_dir, _run_pictures(recipe), None)


def write_merged(
    folders: Iterable[str | Path],
    out: str | Path,
    paper_folder: str | Path | None = None,
    model: str | None = None,
) -> Path:
    """One report of several runs into the folder `out`; returns the HTML path.

    paper_folder: CSV files as in docs/paper_tables; model: the papers' name of the model, where its path does not tell.
    Raises: ValueError when a folder holds no results.
    """
    return _write(merge(folders), Path(out), [], model, paper_folder)


def _write(
    comparison: Comparison,
    folder: Path,
    run_sections: list[Section],
    model: str | None,
    papers: str | Path | None = None,
) -> Path:
    theirs = paper_tables.blocks(comparison, paper_tables.load(papers), model)
    found = [*sections(comparison), *run_sections, Section("Ours next to the papers'", theirs)]
    found.append(Section("Skipped and not run", _list(notes.skipped_lines(comparison))))
    found.append(Section("How it was measured", _list(notes.method_lines(comparison))))
    report = Report(_TITLE, notes.headline(comparison), notes.origin(comparison), found)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("md", report.markdown()), ("csv", csv_text(comparison)), ("html", report.html())):
        atomic_write_text(folder / f"report.{name}", text)
    return folder / "report.html"


# -- sections ------------------------------------------------------------------------------------------------


def sections(comparison: Comparison) -> list[Section]:
    """What was measured: overview, bytes, every task, speed."""
    summary: list[Block] = [tables.overview(comparison), Notes(notes.overview_notes(comparison))]
    found = [
        Section("Methods side by side", summary),
        Section("Failed", _list(notes.failed_lines(comparison), alarm=True)),
        Section("Read with care", _list(notes.warnings(comparison))),
        Section("Score over bytes", _overall_bytes(comparison)),
    ]
    for title, tasks in comparison.columns().items():
        if len(tasks) == 1:
            found.append(Section(tables.title_of(tasks[0]), task_blocks(comparison, tasks[0])))
        else:
            found.append(Section(title, suite_blocks(comparison, tasks)))
    return [*found, Section("Bytes held and decode speed", speed_blocks(comparison.runs))]


def task_blocks(comparison: Comparison, task: str) -> list[Block]:
    """Everything about one task."""
    entries = comparison.measured(task)
    blocks: list[Block] = [tables.task_table(comparison, task), *tables.subtask_table(comparison, task)]
    by_position = {row.label: row.parts[task]["buckets"] for row in entries if row.parts[task].get("buckets")}
    if by_position:
        blocks.append(Picture(pictures.perplexity_by_position(by_position), "perplexity by position"))
    blocks += tables.heat_maps(comparison, task)
    blocks += _curves(comparison, task)
    metric = entries[0].parts[task]["metric"].replace("_", " ")
    blocks += _over_bytes(_points(comparison, (task,)), metric)
    blocks += tables.bucket_table(comparison, task)
    extra = [table for entry in entries for table in tables.extra_tables(entry, task)]
    blocks += extra if len(extra) <= 4 else [Fold(f"{len(extra)} tables of the methods", list(extra))]
    settings = dict.fromkeys(notes.settings_line(entry, task) for entry in entries)
    return blocks + _list([line for line in settings if line][:4])  # once, or per run where they differ


def suite_blocks(comparison: Comparison, tasks: tuple[str, ...]) -> list[Block]:
    """A suite: its table, its picture over bytes, and its tasks behind a line each."""
    blocks: list[Block] = [tables.suite_table(comparison, tasks)]
    blocks += _over_bytes(_points(comparison, tasks), "mean score of the tasks")
    return blocks + [Fold(short_name(task), task_blocks(comparison, task)) for task in tasks]


def _list(lines: list[str], alarm: bool = False) -> list[Block]:
    return [Notes(lines, alarm)] if lines else []


def _overall_bytes(comparison: Comparison) -> list[Block]:
    """Mean score over all tasks of which every row has a score, against bytes."""
    scored = tuple(
        task
        for task in comparison.tasks
        if len(comparison.measured(task)) == len(comparison.entries)
        and not prompt_conflicts(comparison, task)[0]
        and all(entry.parts[task]["kind"] != "nll" for entry in comparison.entries)
    )
    found = _over_bytes(_points(comparison, scored) if len(scored) > 1 else [], "mean score")
    return [*found, Notes(notes.sentences("over_bytes", tasks=scored))] if found else []


def _points(comparison: Comparison, tasks: tuple[str, ...]) -> list[dict[str, Any]]:
    """Share of the dense bytes and value of every row that has both."""
    points = []
    for entry in comparison.entries:
        payload = combined(entry, tasks)
        shares = [byte_share(entry, task) for task in tasks if task in entry.parts]
        known = [share for share in shares if share is not None]
        if payload is None or payload["value"] is None or len(known) < len(tasks):
            continue
        scale = 1 if payload["kind"] == "nll" else 100
        ends = payload.get("ci95")
        point = {"family": base_name(entry.method) + entry.label.removeprefix(entry.method)}
        point |= {"label": entry.label, "share": sum(known) / len(known), "value": scale * payload["value"]}
        point |= {"ci95": ends and [scale * end for end in ends]}
        points.append(point | {"higher_is_better": payload["higher_is_better"]})
    return points


def _over_bytes(points: list[dict[str, Any]], label: str) -> list[Block]:
    """The picture of points that differ in bytes."""
    if len(points) < 3 or len({round(point["share"], 3) for point in points}) < 2:
        return []
    svg = pictures.score_over_bytes(points, label, points[0]["higher_is_better"])
    return [Picture(svg, f"{label} over bytes held")]


def _curves(comparison: Comparison, task: str) -> list[Block]:
    """Curves of one name are drawn together, a line per method."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in comparison.measured(task):
        for line in entry.parts[task].get("curves") or []:
            found.setdefault(line["title"], {})[entry.label] = line
    return [Picture(pictures.curve(lines), title, title=title) for title, lines in found.items()]


def _run_pictures(recipe: "Recipe") -> list[Section]:
    """Pictures that other steps of the run left behind: similarity and plan, training loss."""
    files = sorted(recipe.plan_dir.glob("*.png"))  # which say themselves what they show
    plans: list[Block] = [Picture(file.read_bytes(), file.stem.replace("_", " ")) for file in files]
    metrics = recipe.train_dir / "metrics.jsonl"
    curve = pictures.training_curve(metrics) if metrics.is_file() else None
    training: list[Block] = [Picture(curve, "training loss")] if curve else []
    return [Section("Similarity and sharing plan", plans), Section("Adaptation", training)]


# -- CSV -----------------------------------------------------------------------------------------------------


def csv_text(comparison: Comparison) -> str:
    """One line per method and task, everything that the page says about it."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _CSV_COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    for entry in comparison.entries:
        model = (entry.content.get("model") or {}).get("path", "")
        reasons = {**entry.refused, **entry.failed}
        for task in comparison.tasks:
            row = {"row": entry.label, "method": entry.method, "model": model}
            row |= {"task": task, "suite": suite_of(task)}
            if task in entry.parts:
                writer.writerow(row | _csv_values(comparison, entry, task))
            elif task in reasons:
                status = "failed" if task in entry.failed else "not run"
                writer.writerow(row | {"runs": entry.run.label, "status": status, "reason": reasons[task]})
    return out.getvalue()


def _csv_values(comparison: Comparison, entry: Any, task: str) -> dict[str, Any]:
    payload, against = entry.parts[task], comparison.against(entry, (task,))
    longest = max(held_rows(entry, task), key=lambda row: row["length"], default={})
    low, high = payload.get("ci95") or ("", "")
    values = {key: payload[key] for key in ("metric", "kind", "value")} | {"ci_low": low, "ci_high": high}
    values |= {key: len(payload[key]) for key in ("samples", "skipped")}
    values |= {key: longest.get(key) for key in ("bytes", "dense_bytes", "budget_tokens")}
    values |= {"longest_length": longest.get("length"), "byte_share": byte_share(entry, task)}
    values |= {"runs": entry.sources[task].label, "status": "measured"}
    if against is not None:
        low, high = against.estimate.interval or ("", "")
        values |= {key: getattr(against, key) for key in ("base", "delta", "gained", "lost", "mark")}
        values |= {"delta_kind": "relative" if against.relative else "difference", "paired": against.common}
        values |= {"delta_low": low, "delta_high": high}
        values |= {"p": against.estimate.p, "p_page": against.adjusted}
    return values


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        "python -m pod.eval.report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("runs", nargs="+", help="output folders of runs (or their eval folders)")
    parser.add_argument("--out", required=True, help="folder for report.html, report.md and report.csv")
    parser.add_argument(
        "--papers", help="folder of published tables (default: docs/paper_tables of this checkout)"
    )
    parser.add_argument(
        "--model", help="the papers' name of the model (LLaMA3-8B-32K), where its path does not tell"
    )
    asked = parser.parse_args(arguments)
    try:
        print(write_merged(asked.runs, asked.out, asked.papers, asked.model))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
