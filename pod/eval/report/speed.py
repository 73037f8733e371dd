"""The speed and memory part of a report.

The methods of one run were measured in one process, in turns. Speeds are compared within a run only.
"""

from typing import Any

from pod.eval.report.merge import ReportedRun
from pod.eval.report.notes import sentences
from pod.eval.report.page import Block, Cell, Table, bar, cell, listed
from pod.eval.report.report_tables import median, plain_table
from pod.units import GIB

SpeedParts = dict[str, dict[str, Any]]
"""By method, the part `efficiency` of its result file. All are from one run."""


_PART_NAMES = {
    "near_keys": "keys in windows",
    "near_values": "values in windows",
    "window_keys": "followers' near keys",
}
"""What a report calls buffers of a cache whose own names say too little."""


def speed_blocks(runs: list[ReportedRun]) -> list[Block]:
    """For every run, the tables of its speeds, memory and largest batches."""
    blocks: list[Block] = []
    for run in runs:
        if not run.speed:
            continue
        name = f" ({run.label})" if len(runs) > 1 else ""
        blocks += [speed_table(run.speed, f"Speed{name}"), *listed(sentences("speed"))]
        blocks += [*memory_tables(run.speed, name), decoding_table(run.speed, name)]
        blocks.append(batch_table(run.speed, name))
    return blocks


def _by_length(parts: SpeedParts) -> list[list[tuple[str, dict[str, Any]]]]:
    """For every length, the methods measured at it with their rows."""
    rows = [(name, row) for name, part in parts.items() for row in part["lengths"]]
    lengths = dict.fromkeys(row["length"] for _, row in rows)
    return [[(name, row) for name, row in rows if row["length"] == length] for length in lengths]


def speed_table(parts: SpeedParts, title: str = "") -> Table:
    """Speed and bytes per length and method, with bars within a length.

    Columns are the decode speed with its spread, the time to the first token, and bytes with their parts.
    """
    heads = ["method", "prompt tokens", "tokens/s", "× full", "first token, s", "KV MB", "of PoD's"]
    lengths = _by_length(parts)
    held_parts: list[str] = []
    for of_length in lengths:
        for _, own in of_length:
            held_parts += [part for part in own["bytes_by_part"] if part not in held_parts]
    rows = []
    for of_length in lengths:
        fastest = max(own["decode_tokens_per_second"]["median"] for _, own in of_length)
        largest = max(own["bytes"]["bytes"] for _, own in of_length)
        digits = "{:,.1f}" if largest > 1e7 else "{:,.3f}"
        for name, own in of_length:
            rate = own["decode_tokens_per_second"]
            held = own["bytes"]
            spread = f"({rate['min']:.1f}–{rate['max']:.1f})"
            row = [
                Cell(name),
                cell(own["length"], "{:,}"),
                cell(rate["median"], "{:.1f}", spread, shade=bar(rate["median"] / fastest)),
                cell(median(own.get("speed_over_full")), "{:.2f}"),
                cell(own["time_to_first_token_seconds"], "{:.2f}"),
                cell(_mb(held["bytes"]), digits, shade=bar(held["bytes"] / largest)),
                cell(held["bytes_over_pod"], "{:.1%}"),
            ]
            row += [cell(_mb(own["bytes_by_part"].get(part)), digits) for part in held_parts]
            rows.append(row)
    named = [_PART_NAMES.get(part, part.replace("_", " ")) for part in held_parts]
    return Table([*heads, *[f"{part}, MB" for part in named]], rows, title, "cards")


def decoding_table(parts: SpeedParts, name: str) -> Table:
    """Speed of decoding after longer prompts; empty if it was not measured.

    No prompt was read for it: the caches hold random tokens.
    """
    heads = {"method": "method", "length": "prompt tokens", "decode_tokens_per_second": "tokens/s"}
    heads |= {"speed_over_full": "× full", "bytes": "KV MB", "bytes_over_full": "of full's bytes"}
    rows = []
    for method, part in parts.items():
        for own in part.get("decoding", []):
            row = {key: median(own.get(key)) for key in heads}
            rows.append(row | {"method": method, "bytes": _mb(own["bytes"])})
    return plain_table(rows, heads, f"Decoding after longer prompts{name}")


def memory_tables(parts: SpeedParts, name: str) -> list[Block]:
    """Peak memory of reading the prompt and of decoding, and its parts; empty if it was not measured."""
    heads = {"method": "method", "length": "prompt tokens", "weights": "weights MB", "phase": "phase"}
    heads |= {part: f"{part} MB" for part in ("peak", "activations")} | {"kv": "KV MB"}
    rows, ways = [], set()
    for of_length in _by_length(parts):
        for method, own in of_length:
            memory = own.get("memory") or {}
            for phase in ("prefill", "decode"):
                if not memory.get(phase):
                    continue
                sizes = {"weights": memory.get("weights"), **memory[phase]}
                row = {"method": method, "length": own["length"], "phase": phase}
                rows.append(row | {part: _mb(size) for part, size in sizes.items() if part in heads})
                ways.add(memory.get("counted_by"))
    notes = [f"Memory is counted by {way}." for way in sorted(filter(None, ways))]
    return [plain_table(rows, heads, f"Peak memory{name}"), *listed(notes)]


def batch_table(parts: SpeedParts, name: str) -> Table:
    """The largest batch and the longest prompt of every method; empty if they were not measured.

    There is a row for each method and pair (prompt tokens, generated tokens).
    """
    heads = {"method": "method", "asked": "prompt + new", "limit": "limit", "batch": "largest batch"}
    heads |= {"batch_over_full": "× full", "tokens_per_second": "tokens/s"}
    heads |= {"tokens_per_second_over_full": "× full's tokens/s"}
    rows = []
    for method, part in parts.items():
        for own in part["max_batch"]:
            limit = "the GPU" if own.get("limit_bytes") is None else f"{own['limit_bytes'] / GIB:.3g} GiB"
            asked = f"{own['prompt']:,} + {own['generated']:,}"
            row = {"method": method, "asked": asked, "limit": limit}
            rows.append({key: median(own.get(key)) for key in heads} | row)
    return plain_table(rows, heads, f"Largest batch, longest prompt{name}")


def _mb(size: int | None) -> float | None:
    """Bytes in MB."""
    return None if size is None else size / 1e6
