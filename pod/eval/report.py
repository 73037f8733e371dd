"""report.html and report.md out of the result files: one self-contained page, readable on a phone, without network or script."""

import base64
import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pod.eval import pictures
from pod.eval.results import load_results
from pod.eval.summary import bucket_change, load_speed, summarise
from pod.files import atomic_write_text

if TYPE_CHECKING:
    from pod.recipe import Recipe

_PLAN_TITLES = {  # by a word of the file's name, the first that fits
    "adjacent": "Similarity of neighbouring layers",
    "head": "Similarity of all layer pairs, per KV head",
    "block": "Which layers share keys, per KV head",
}

Row = dict[str, Any]
Table = list[list[str]]


def write_report(recipe: "Recipe") -> Path:
    """Write report.html and report.md into the eval folder, from the result files of the recipe's methods; returns the HTML path."""
    folder, methods = recipe.eval_dir, recipe.eval.methods
    results = load_results(folder, methods)
    rows, speed = summarise(folder, methods), load_speed(folder)
    sections = [
        ("Methods at equal bytes", _table_html(method_table(rows)) + _notes_html(table_notes(rows))),
        *_failures(rows),
        *_measured_sections(results, speed),
        *_run_pictures(recipe),
        ("How it was measured", _notes_html(method_notes(results))),
    ]
    sections = [(title, body) for title, body in sections if body]
    target = folder / "report.html"
    atomic_write_text(target, _page(_headline(rows), _origin(results), sections))
    atomic_write_text(folder / "report.md", _markdown(rows, results, speed))
    return target


# -- tables: lists of rows of text, the first one the head ---------------------------------------------------


def method_table(rows: list[Row]) -> Table:
    """Method, perplexity, change against full, passkey, bytes, saving, speed."""
    head = ["method", "perplexity", "Δ to full", "passkey", "KV MB", "saved", "tokens/s", "× full"]
    return [head, *[_method_row(row) for row in rows]]


def _method_row(row: Row) -> list[str]:
    if row["status"] == "failed" and row["perplexity"] is None and row["passkey"] is None:
        return [row["method"], "failed", *["–"] * 6]
    speed, ratio = row["tokens_per_second"], row["speed_over_full"]
    return [
        row["method"],
        _with_interval(row["perplexity"], row["perplexity_ci95"], "{:.2f}"),
        "–" if row["method"] == "full" else _with_interval(row["change"], row["change_ci95"], "{:+.1%}"),
        "–" if row["passkey"] is None else f"{row['passkey_correct']}/{row['passkey_prompts']}",
        "–" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}",
        "–" if row["saving"] is None else f"{max(0.0, row['saving']):.0%}",
        "–" if speed is None else f"{speed['median']:.1f}",
        "–" if ratio is None else f"{ratio['median']:.2f}",
    ]


def bucket_table(results: dict[str, dict]) -> Table:
    """Perplexity and change of every position bucket, methods as rows."""
    scored = {name: result for name, result in results.items() if "perplexity" in result["parts"]}
    if not scored:
        return []
    buckets = next(iter(scored.values()))["parts"]["perplexity"]["buckets"]
    head = ["method", *[f"{bucket['first']:,}–{bucket['end'] - 1:,}" for bucket in buckets]]
    table = [head]
    for name, result in scored.items():
        cells = []
        for number, bucket in enumerate(result["parts"]["perplexity"]["buckets"]):
            change = None if name == "full" else bucket_change(result, scored.get("full"), number)
            text = f"{bucket['perplexity']:.2f}"
            cells.append(text if change is None else f"{text} ({change['change']:+.1%})")
        table.append([name, *cells])
    return table


def speed_table(speed: list[dict]) -> Table:
    """Decode speed with its spread, time to first token and bytes, per length and method."""
    if not speed:
        return []
    table = [["length", "method", "tokens/s (min–max)", "× full", "first token s", "KV MB", "of PoD's"]]
    for row in speed:
        for name, own in row["methods"].items():
            rate, ratio, held = own["decode_tokens_per_second"], own.get("speed_over_full"), own["bytes"]
            table.append(
                [
                    f"{row['length']:,}",
                    name,
                    f"{rate['median']:.1f} ({rate['min']:.1f}–{rate['max']:.1f})",
                    "–" if ratio is None else f"{ratio['median']:.2f}",
                    f"{own['time_to_first_token_seconds']:.2f}",
                    f"{held['bytes'] / 1e6:.1f}",
                    "–" if held["bytes_over_pod"] is None else f"{held['bytes_over_pod']:.1%}",
                ]
            )
    return table


def _with_interval(value: float | None, interval: list[float] | None, form: str) -> str:
    if value is None:
        return "–"
    if interval is None:
        return form.format(value)
    return f"{form.format(value)} [{form.format(interval[0])}, {form.format(interval[1])}]"


# -- sentences -----------------------------------------------------------------------------------------------


def _headline(rows: list[Row]) -> str:
    """The result in one or two sentences."""
    found = {row["method"]: row for row in rows}
    pod, raw, full = found.get("pod"), found.get("pod-unadapted"), found.get("full")
    shown = pod if pod and pod["perplexity"] is not None else raw
    if not shown or shown["perplexity"] is None:
        return "Methods for the key-value cache, measured on the same tokens with the same bytes."
    what = "PoD" if shown is pod else "PoD without adaptation"
    text = f"{what} reaches perplexity {shown['perplexity']:.2f}"
    if full and full["perplexity"] is not None:
        text += f" (dense {full['perplexity']:.2f}"
        text += (
            f", PoD without adaptation {raw['perplexity']:.2f})"
            if raw and raw["perplexity"] and shown is pod
            else ")"
        )
    if shown["saving"] is not None:
        text += f" with {max(0.0, shown['saving']):.0%} fewer KV bytes at {shown['length']:,} tokens"
    if shown["speed_over_full"] is not None:
        text += f", decoding at {shown['speed_over_full']['median']:.2f}× the dense speed"
    return text + "."


def table_notes(rows: list[Row]) -> list[str]:
    """What the columns mean, with the numbers of this run."""
    notes = []
    scored = next((row for row in rows if row["perplexity"] is not None), None)
    if scored:
        notes.append(
            f"Perplexity over {scored['sequences']} sequences; brackets are 95 % bootstrap intervals over sequences, the change "
            "is paired on the same sequences."
        )
    held = next((row for row in rows if row["length"]), None)
    if held:
        notes.append(
            f"KV MB: bytes really held for one sequence of {held['length']:,} tokens, every storage counted once. saved: "
            "against the dense cache at that length."
        )
    budgets = [f"{row['method']} {row['budget_tokens']:,}" for row in rows if row["budget_tokens"]]
    if budgets:
        notes.append(
            "Methods that drop tokens get the bytes that PoD holds at the same length: tokens kept per KV head and layer "
            f"from the prompt: {', '.join(budgets)}."
        )
    if held and all((row["saving"] or 0) < 0.005 for row in rows):
        notes.append(
            "Nothing is saved at this length: it does not exceed the windows, so all methods hold everything."
        )
    fast = next((row for row in rows if row["speed_length"]), None)
    if fast:
        notes.append(
            f"tokens/s: decoding after {fast['speed_length']:,} tokens, one sequence, all methods in turns in one process."
        )
    return notes


def method_notes(results: dict[str, dict]) -> list[str]:
    """How every number came about."""
    notes = [f"{name}: {result['title']}" for name, result in results.items() if result.get("title")]
    for name, result in results.items():
        part = result["parts"].get("perplexity")
        if part is None:
            continue
        text = f"{name}: perplexity scored by {part['scored_by']}"
        check = part["decode_path_check"]
        if check:
            text += (
                f"; the decode path gives the same on this model: largest difference {check['max_abs_difference_nats']:.1e} nats "
                f"over {check['tokens']} tokens at length {check['length']:,}"
            )
        notes.append(text + ".")
    notes.append(
        "A compressed cache is scored after its prompt is compressed, with the last context token held out, so no scored token "
        "sees what the method dropped."
    )
    if any("passkey" in result["parts"] for result in results.values()):
        notes.append(
            "Passkey: greedy generation; correct when the first number of the answer is the five-digit key."
        )
    return notes


def _origin(results: dict[str, dict]) -> str:
    result = next(iter(results.values()))
    environment, model = result["environment"], result.get("model") or {}
    hardware, versions = environment["hardware"], environment["versions"]
    pieces = [
        model.get("path", ""),
        model.get("dtype", ""),
        hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} thread(s)",
        f"torch {versions['torch']}, transformers {versions['transformers']}",
        f"commit {environment['commit'][:10]}" if environment["commit"] else "",
        environment["date"],
    ]
    return " · ".join(piece for piece in pieces if piece)


# -- pictures ------------------------------------------------------------------------------------------------


def _measured_sections(results: dict[str, dict], speed: list[dict]) -> list[tuple[str, str]]:
    """Pictures of the measurements, each with its table."""
    curve, maps = pictures.perplexity_by_position(results), pictures.passkey_maps(results)
    sections = []
    if curve:
        body = _svg_image(curve, "perplexity by position") + _table_html(bucket_table(results))
        sections.append(("Perplexity by position", body))
    if speed:
        bars = (_svg_image(pictures.bytes_by_part(row), f"bytes by part at {row['length']}") for row in speed)
        sections.append(("Bytes held and decode speed", "".join(bars) + _table_html(speed_table(speed))))
    if maps:
        sections.append(("Passkey retrieval", _svg_image(maps, "passkey accuracy by depth and length")))
    return sections


def _run_pictures(recipe: "Recipe") -> list[tuple[str, str]]:
    """Pictures that other steps of the run left behind: similarity and plan, training loss."""
    sections = []
    images = sorted(recipe.plan_dir.glob("*.png"))
    if images:
        sections.append(("Similarity and sharing plan", "".join(_png_image(path) for path in images)))
    metrics = recipe.train_dir / "metrics.jsonl"
    curve = pictures.training_curve(metrics) if metrics.is_file() else None
    if curve:
        sections.append(("Adaptation", _svg_image(curve, "training loss")))
    return sections


def _svg_image(svg: str, label: str) -> str:
    return _image("image/svg+xml", svg.encode(), label)


def _png_image(path: Path) -> str:
    words = path.stem.lower()
    title = next((text for key, text in _PLAN_TITLES.items() if key in words), path.stem.replace("_", " "))
    return f"<h3>{html.escape(title)}</h3>" + _image("image/png", path.read_bytes(), title)


def _image(kind: str, data: bytes, label: str) -> str:
    return f'<img alt="{html.escape(label)}" src="data:{kind};base64,{base64.b64encode(data).decode()}">'


# -- HTML and Markdown ---------------------------------------------------------------------------------------

_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1d2528; background: #fff;
  max-width: 54rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
p.lead { font-size: 1.1rem; } p.origin { color: #5b676d; font-size: .8rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid #dde3e6; text-align: right; vertical-align: top; white-space: nowrap; }
th { font-weight: 600; border-bottom-width: 2px; } td small { display: block; color: #5b676d; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { background: #eef7f2; font-weight: 600; }
img { display: block; width: 100%; height: auto; max-width: 40rem; margin: .5rem 0; }
ul { padding-left: 1.2rem; font-size: .9rem; } .failed { color: #a02020; overflow-wrap: anywhere; }
@media (max-width: 44rem) {
  table, tbody { display: block; } tr.head { display: none; }
  tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.2rem, 1fr)); border: 1px solid #dde3e6;
    border-radius: .4rem; margin: .5rem 0; padding: .3rem; }
  tr.ours { background: #eef7f2; } td { border: 0; padding: .2rem .4rem; text-align: left; }
  td::before { content: attr(data-label); display: block; color: #5b676d; font-size: .75rem; font-weight: 400; }
  td:first-child { font-weight: 700; }
}
"""


def _page(headline: str, origin: str, sections: list[tuple[str, str]]) -> str:
    body = "".join(f"<h2>{html.escape(title)}</h2>{content}" for title, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>PoD evaluation</title>'
        f"<style>{_CSS}</style></head><body><h1>Proximal over distant: evaluation</h1>"
        f'<p class="lead">{html.escape(headline)}</p><p class="origin">{html.escape(origin)}</p>{body}</body></html>\n'
    )


def _table_html(table: Table) -> str:
    if not table:
        return ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table[0])
    lines = []
    for row in table[1:]:
        kind = ' class="ours"' if "pod" in row[:2] else ""
        cells = (
            f'<td data-label="{html.escape(label)}"><span>{_cell_html(cell)}</span></td>'
            for label, cell in zip(table[0], row, strict=False)
        )
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr class="head">{head}</tr>{"".join(lines)}</table></div>'


def _cell_html(cell: str) -> str:
    """An interval or a range goes under its value, small, which keeps tables narrow."""
    for opening in (" [", " ("):
        value, mark, rest = cell.partition(opening)
        if mark:
            return f"{html.escape(value)}<small>{html.escape(opening.strip() + rest)}</small>"
    return html.escape(cell)


def _notes_html(notes: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in notes) + "</ul>" if notes else ""


def _failures(rows: list[Row]) -> list[tuple[str, str]]:
    failed = [
        f"<li><b>{html.escape(row['method'])}</b>: {html.escape(row['error'] or '')}</li>"
        for row in rows
        if row["error"]
    ]
    return [("Failed", f'<ul class="failed">{"".join(failed)}</ul>')] if failed else []


def _markdown(rows: list[Row], results: dict[str, dict], speed: list[dict]) -> str:
    lines = ["# PoD evaluation", "", _headline(rows), "", _origin(results)]
    lines += _markdown_part("Methods at equal bytes", method_table(rows), table_notes(rows))
    failed = [f"{row['method']}: {row['error']}" for row in rows if row["error"]]
    if failed:
        lines += _markdown_part("Failed", [], failed)
    lines += _markdown_part("Perplexity by position", bucket_table(results), [])
    lines += _markdown_part("Speed and memory", speed_table(speed), [])
    lines += _markdown_part("How it was measured", [], method_notes(results))
    return "\n".join(lines) + "\n"


def _markdown_part(title: str, table: Table, notes: list[str]) -> list[str]:
    if not table and not notes:
        return []
    lines = ["", f"## {title}", ""]
    if table:
        lines += ["| " + " | ".join(table[0]) + " |", "|" + "---|" * len(table[0])]
        lines += ["| " + " | ".join(row) + " |" for row in table[1:]] + [""]
    return lines + [f"* {note}" for note in notes]
