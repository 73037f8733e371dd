"""The speed and memory part of a report. Speeds of one run were measured in one process, in turns: they are compared within a run only."""

from dataclasses import replace
from typing import Any

from pod.eval.report.merge import Run
from pod.eval.report.page import Block, Cell, Notes, Table, bar, cell
from pod.eval.report.tables import median


def speed_blocks(runs: list[Run]) -> list[Block]:
    """Tables of speed and memory, largest batches, and what could not be timed, per run."""
    blocks: list[Block] = []
    for run in runs:
        if not run.speed:
            continue
        name = f" ({run.label})" if len(runs) > 1 else ""
        blocks.append(speed_table(run.speed, f"Speed{name}"))
        blocks += memory_tables(run.speed, name) + batch_tables(run.speed_part, name)
        failed = run.speed_part.get("failed") or {}
        if failed:
            lines = [f"{method} was not timed: {reason}" for method, reason in failed.items()]
            blocks.append(Notes(lines, alarm=True))
    return blocks


def speed_table(speed: list[dict[str, Any]], title: str = "") -> Table:
    """Decode speed with its spread, time to first token and bytes with their parts, per length and method; bars within a length."""
    heads = ["method", "prompt tokens", "tokens/s", "× full", "first token s", "KV MB", "of PoD's"]
    everyone = [own for row in speed for own in row["methods"].values()]
    parts = list(dict.fromkeys(part for own in everyone for part in own["bytes_by_part"]))
    rows = []
    for row in speed:
        fastest = max(own["decode_tokens_per_second"]["median"] for own in row["methods"].values())
        largest = max(own["bytes"]["bytes"] for own in row["methods"].values())
        for name, own in row["methods"].items():
            rate, held = own["decode_tokens_per_second"], own["bytes"]
            spread = f"({rate['min']:.1f}–{rate['max']:.1f})"
            times = [
                replace(cell(rate["median"], "{:.1f}", spread), shade=bar(rate["median"] / fastest)),
                cell(median(own.get("speed_over_full")), "{:.2f}"),
                cell(own["time_to_first_token_seconds"], "{:.2f}"),
            ]
            sizes = [replace(_megabytes(held["bytes"]), shade=bar(held["bytes"] / largest))]
            sizes += [cell(held["bytes_over_pod"], "{:.1%}")]
            sizes += [_megabytes(own["bytes_by_part"].get(part)) for part in parts]
            rows.append([Cell(name), cell(row["length"], "{:,}"), *times, *sizes])
    ours = {number for number, row in enumerate(rows) if row[0].text == "pod"}
    return Table([*heads, *[f"{part} MB" for part in parts]], rows, title, ours, kind="cards")


def memory_tables(speed: list[dict[str, Any]], name: str) -> list[Block]:
    """Peak memory of reading the prompt and of decoding, with its parts, where it was measured."""
    heads = ["method", "prompt tokens", "weights MB", "phase", "peak MB", "activations MB", "KV MB"]
    rows, counted = [], set()
    for row in speed:
        for method, own in row["methods"].items():
            memory = own.get("memory") or {}
            counted.add(memory.get("counted_by"))
            for phase in filter(memory.get, ("prefill", "decode")):
                sizes = [_megabytes(memory[phase].get(part)) for part in ("peak", "activations", "kv")]
                where = [Cell(method), cell(row["length"], "{:,}"), _megabytes(memory.get("weights"))]
                rows.append([*where, Cell(phase), *sizes])
    if not rows:
        return []
    notes = [f"Memory is counted by {way}." for way in sorted(filter(None, counted))]
    return [Table(heads, rows, f"Peak memory{name}"), *([Notes(notes)] if notes else [])]


def batch_tables(part: dict[str, Any], name: str) -> list[Block]:
    """The largest batch of every method for each (prompt, generated) pair, where it was measured."""
    heads = ["method", "prompt + new", "limit", "largest batch", "× full", "tokens/s", "× full's tokens/s"]
    rows = []
    for pair in part.get("max_batch") or []:
        limit = "the GPU" if pair.get("limit_bytes") is None else f"{pair['limit_bytes'] / 2**30:.3g} GiB"
        asked = Cell(f"{pair['prompt']:,} + {pair['generated']:,}")
        for method, own in pair["methods"].items():
            found = [cell(own.get("batch"), "{:,}"), cell(median(own.get("batch_over_full")), "{:.2f}")]
            rates = [own.get("tokens_per_second"), own.get("tokens_per_second_over_full")]
            found += [
                cell(median(rate), form) for rate, form in zip(rates, ("{:.1f}", "{:.2f}"), strict=True)
            ]
            rows.append([Cell(method), asked, Cell(limit), *found])
    return [Table(heads, rows, f"Largest batch{name}")] if rows else []


def _megabytes(size: int | None) -> Cell:
    """Bytes in MB, sorted by the same."""
    return cell(None if size is None else size / 1e6, "{:,.1f}")
