"""The speed and memory part of a report. Speeds of one run were measured in one process, in turns: they are compared within a run only."""

from dataclasses import replace
from typing import Any

from pod.eval.report.merge import Run
from pod.eval.report.page import Block, Cell, Notes, Table, bar, cell
from pod.eval.report.tables import median

Parts = dict[str, dict[str, Any]]
"""The part `efficiency` of every method of a race."""


def speed_blocks(runs: list[Run]) -> list[Block]:
    """Tables of speed and memory, and largest batches, per run."""
    blocks: list[Block] = []
    for run in runs:
        if parts := run.speed:
            name = f" ({run.label})" if len(runs) > 1 else ""
            blocks.append(speed_table(parts, f"Speed{name}"))
            blocks += memory_tables(parts, name) + batch_tables(parts, name)
    return blocks


def _by_length(parts: Parts) -> list[list[tuple[str, dict[str, Any]]]]:
    """Methods with their rows, by length."""
    rows = [(name, row) for name, part in parts.items() for row in part["lengths"]]
    lengths = dict.fromkeys(row["length"] for _, row in rows)
    return [[(name, row) for name, row in rows if row["length"] == length] for length in lengths]


def speed_table(parts: Parts, title: str = "") -> Table:
    """Decode speed with its spread, time to first token and bytes with their parts, per length and method; bars within a length."""
    heads = ["method", "prompt tokens", "tokens/s", "× full", "first token s", "KV MB", "of PoD's"]
    lengths, rows = _by_length(parts), []
    held_parts = list(dict.fromkeys(part for of in lengths for _, own in of for part in own["bytes_by_part"]))
    for of_length in lengths:
        fastest = max(own["decode_tokens_per_second"]["median"] for _, own in of_length)
        largest = max(own["bytes"]["bytes"] for _, own in of_length)
        for name, own in of_length:
            rate, held = own["decode_tokens_per_second"], own["bytes"]
            spread = f"({rate['min']:.1f}–{rate['max']:.1f})"
            times = [
                replace(cell(rate["median"], "{:.1f}", spread), shade=bar(rate["median"] / fastest)),
                cell(median(own.get("speed_over_full")), "{:.2f}"),
                cell(own["time_to_first_token_seconds"], "{:.2f}"),
            ]
            sizes = [replace(_megabytes(held["bytes"]), shade=bar(held["bytes"] / largest))]
            sizes += [cell(held["bytes_over_pod"], "{:.1%}")]
            sizes += [_megabytes(own["bytes_by_part"].get(part)) for part in held_parts]
            rows.append([Cell(name), cell(own["length"], "{:,}"), *times, *sizes])
    ours = {number for number, row in enumerate(rows) if row[0].text == "pod"}
    return Table([*heads, *[f"{part} MB" for part in held_parts]], rows, title, ours, kind="cards")


def memory_tables(parts: Parts, name: str) -> list[Block]:
    """Peak memory of reading the prompt and of decoding, with its parts, where it was measured."""
    heads = ["method", "prompt tokens", "weights MB", "phase", "peak MB", "activations MB", "KV MB"]
    rows, counted = [], set()
    for method, own in (pair for of_length in _by_length(parts) for pair in of_length):
        memory = own.get("memory") or {}
        counted.add(memory.get("counted_by"))
        for phase in filter(memory.get, ("prefill", "decode")):
            sizes = [_megabytes(memory[phase].get(part)) for part in ("peak", "activations", "kv")]
            where = [Cell(method), cell(own["length"], "{:,}"), _megabytes(memory.get("weights"))]
            rows.append([*where, Cell(phase), *sizes])
    if not rows:
        return []
    notes = [f"Memory is counted by {way}." for way in sorted(filter(None, counted))]
    return [Table(heads, rows, f"Peak memory{name}"), *([Notes(notes)] if notes else [])]


def batch_tables(parts: Parts, name: str) -> list[Block]:
    """The largest batch of every method for each (prompt, generated) pair, where it was measured."""
    heads = ["method", "prompt + new", "limit", "largest batch", "× full", "tokens/s", "× full's tokens/s"]
    rows = []
    for method, own in ((method, own) for method, part in parts.items() for own in part["max_batch"]):
        limit = "the GPU" if own.get("limit_bytes") is None else f"{own['limit_bytes'] / 2**30:.3g} GiB"
        keys = {"batch": "{:,}", "batch_over_full": "{:.2f}"}
        keys |= {"tokens_per_second": "{:.1f}", "tokens_per_second_over_full": "{:.2f}"}
        asked = [Cell(f"{own['prompt']:,} + {own['generated']:,}"), Cell(limit)]
        rows.append([Cell(method), *asked, *[cell(median(own.get(key)), form) for key, form in keys.items()]])
    return [Table(heads, rows, f"Largest batch{name}")] if rows else []


def _megabytes(size: int | None) -> Cell:
    """Bytes in MB, sorted by the same."""
    return cell(None if size is None else size / 1e6, "{:,.1f}")
