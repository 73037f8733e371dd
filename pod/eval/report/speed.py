"""The speed and memory part of a report. Speeds of one run were measured in one process, in turns: they are compared within a run only."""

from typing import Any

from pod.eval.report import pictures
from pod.eval.report.merge import Run
from pod.eval.report.page import Block, Cell, Notes, Picture, Table
from pod.eval.report.tables import NONE


def speed_blocks(runs: list[Run]) -> list[Block]:
    """Bars, tables of speed and memory, largest batches, and what could not be timed, per run."""
    blocks: list[Block] = []
    for run in runs:
        if not run.speed:
            continue
        name = f" ({run.label})" if len(runs) > 1 else ""
        for row in run.speed:
            blocks.append(Picture(pictures.decode_speed(row), f"decode speed at {row['length']}{name}"))
            blocks.append(Picture(pictures.bytes_by_part(row), f"bytes by part at {row['length']}{name}"))
        blocks.append(speed_table(run.speed, f"Speed{name}"))
        blocks += memory_tables(run.speed, name) + batch_tables(run.speed_part, name)
        failed = run.speed_part.get("failed") or {}
        if failed:
            blocks.append(
                Notes([f"{method} was not timed: {reason}" for method, reason in failed.items()], alarm=True)
            )
    return blocks


def speed_table(speed: list[dict[str, Any]], title: str = "") -> Table:
    """Decode speed with its spread, time to first token and bytes, per length and method."""
    heads = ["method", "prompt tokens", "tokens/s", "× full", "first token s", "KV MB", "of PoD's"]
    rows = []
    for row in speed:
        for name, own in row["methods"].items():
            rate, ratio, held = own["decode_tokens_per_second"], own.get("speed_over_full"), own["bytes"]
            first, over = own["time_to_first_token_seconds"], held["bytes_over_pod"]
            rows.append(
                [
                    Cell(name),
                    Cell(f"{row['length']:,}", sort=row["length"]),
                    Cell(f"{rate['median']:.1f}", f"({rate['min']:.1f}–{rate['max']:.1f})", rate["median"]),
                    NONE if ratio is None else Cell(f"{ratio['median']:.2f}", sort=ratio["median"]),
                    Cell(f"{first:.2f}", sort=first),
                    Cell(f"{held['bytes'] / 1e6:.1f}", sort=held["bytes"]),
                    NONE if over is None else Cell(f"{over:.1%}", sort=over),
                ]
            )
    ours = {number for number, row in enumerate(rows) if row[0].text == "pod"}
    return Table(heads, rows, title, ours, cards=True)


def memory_tables(speed: list[dict[str, Any]], name: str) -> list[Block]:
    """Peak memory of prefill and decode, split into weights, activations and KV, where it was measured."""
    heads = ["method", "prompt tokens", "weights MB", "phase", "peak MB", "activations MB", "KV MB"]
    rows, counted = [], set()
    for row in speed:
        for method, own in row["methods"].items():
            memory = own.get("memory")
            if not memory:
                continue
            counted.add(memory.get("counted_by", ""))
            for phase in ("prefill", "decode"):
                if memory.get(phase):
                    sizes = [memory[phase].get(part) for part in ("peak", "activations", "kv")]
                    cells = [_megabytes(memory.get("weights")), Cell(phase), *map(_megabytes, sizes)]
                    rows.append([Cell(method), Cell(f"{row['length']:,}", sort=row["length"]), *cells])
    if not rows:
        return []
    notes = [f"Memory is counted by {way}." for way in sorted(filter(None, counted))]
    return [Table(heads, rows, f"Peak memory{name}"), *([Notes(notes)] if notes else [])]


def batch_tables(part: dict[str, Any], name: str) -> list[Block]:
    """The largest batch of every method for each (prompt, generated) pair, where it was measured."""
    heads = ["method", "prompt + new", "limit", "largest batch", "× full", "tokens/s", "× full's tokens/s"]
    rows = []
    for pair in part.get("max_batch") or []:
        limit = pair.get("limit_bytes")
        for method, own in pair["methods"].items():
            rows.append(
                [
                    Cell(method),
                    Cell(f"{pair['prompt']:,} + {pair['generated']:,}"),
                    Cell("the GPU" if limit is None else f"{limit / 2**30:.3g} GiB"),
                    Cell(f"{own['batch']:,}", sort=own["batch"]) if own.get("batch") is not None else NONE,
                    _number(own.get("batch_over_full"), "{:.2f}"),
                    _number(own.get("tokens_per_second"), "{:.1f}"),
                    _number(own.get("tokens_per_second_over_full"), "{:.2f}"),
                ]
            )
    return [Table(heads, rows, f"Largest batch{name}")] if rows else []


def _megabytes(size: int | None) -> Cell:
    return NONE if size is None else Cell(f"{size / 1e6:,.1f}", sort=size)


def _number(value: Any, form: str) -> Cell:
    if isinstance(value, dict):
        value = value.get("median")
    return NONE if value is None else Cell(form.format(value), sort=value)
