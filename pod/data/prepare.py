"""Data preparation in one call: read and tokenise (pass 1), then draw, pack and write (pass 2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pod.data.args import DataArgs
from pod.data.balance import IntervalReport, draw, interval_bounds
from pod.data.loader import PackedDataset, read_manifest
from pod.data.pack import pack_best_fit, pack_one_per_row
from pod.data.pictures import draw_lengths, short_number
from pod.data.shards import Row, write_into
from pod.data.sources import source_state
from pod.data.tokenize import (
    BoundaryTokens,
    Pieces,
    ReadReport,
    TokenSpool,
    load_tokenizer,
    read_into_spool,
    tokenizer_sha256,
    vocabulary_size,
)
from pod.files import atomic_dir

PICTURE_NAME = "lengths.png"


def prepare(args: DataArgs, tokenizer: Any, output_dir: str | Path, *, seed: int = 0) -> PackedDataset:
    """Prepare the training rows of `args` in folder `output_dir` and open them.

    `tokenizer` is a tokenizer, its folder or its hub id. The same settings, sources and seed give the same bytes. Data
    that is up to date (same settings, tokenizer and unchanged source files) is kept as it is. The folder appears in one
    step; an error, a full disk or a kill leaves nothing half-written.
    """
    tokenizer = load_tokenizer(tokenizer)
    request = request_of(args, tokenizer, seed)
    if is_current(output_dir, request):
        return PackedDataset(output_dir)
    with atomic_dir(output_dir) as folder:
        folder = Path(folder)
        report = ReadReport()
        spool, pieces = read_into_spool(args, tokenizer, folder, report)
        try:
            drawn, intervals = _draw(args, pieces, seed)
            lengths = pieces.lengths[drawn]
            if args.packing == "best_fit":
                rows = pack_best_fit(lengths, args.context_length, args.packing_window)
            else:
                rows = pack_one_per_row(lengths, args.context_length)
            details = _details(args, tokenizer, request, report, pieces, intervals)
            write_into(
                folder,
                _row_tokens(rows, drawn, pieces, spool),
                context_length=args.context_length,
                vocab_size=vocabulary_size(tokenizer),
                tokenizer_sha256=request["tokenizer_sha256"],
                pad_token_id=_pad_token_id(tokenizer),
                details=details,
            )
        finally:
            spool.remove()
        draw_lengths(read_manifest(folder), folder / PICTURE_NAME)
    return PackedDataset(output_dir)


def request_of(args: DataArgs, tokenizer: Any, seed: int) -> dict[str, Any]:
    """All that decides the bytes of the prepared data: settings, seed, tokenizer and the state of the source files."""
    state = [source_state(source, args.include) for source in args.sources]
    return {
        "settings": asdict(args),
        "seed": seed,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "source_state_sha256": hashlib.sha256(json.dumps(state).encode()).hexdigest(),
    }


def is_current(output_dir: str | Path, request: dict[str, Any]) -> bool:
    """Whether `output_dir` holds complete data prepared for exactly `request`."""
    try:
        return PackedDataset(output_dir).manifest.get("request") == request
    except ValueError:
        return False


def summary(manifest: dict[str, Any]) -> str:
    """The manifest in a few lines: totals, intervals, and what the policies left out."""
    lines = [
        f"{manifest['num_tokens']:,} tokens of {manifest['num_documents']:,} documents in {manifest['num_rows']:,} rows of "
        f"{manifest['context_length']} (padding {100 * manifest['padding_share']:.2f} %)"
    ]
    for interval in manifest["intervals"]:
        lines.append(
            f"  {interval['name']:>9} tokens: {short_number(interval['tokens_before']):>6} → "
            f"{short_number(interval['tokens_after']):>6} ({interval['documents_after']} documents)"
        )
    lines.extend(manifest["balance"]["notes"])
    read = manifest["read"]
    left_out = {
        "identical": read["duplicates"],
        "held out": read["other_split"],
        "too long": manifest["policies"]["skipped_long"],
        "too short": manifest["policies"]["dropped_short"],
        "empty": sum(source["empty"] for source in read["sources"]),
        "unreadable files": sum(source["skipped"] for source in read["sources"]),
    }
    lines.append("left out: " + ", ".join(f"{count} {name}" for name, count in left_out.items() if count))
    return "\n".join(line for line in lines if line != "left out: ")


def estimate(args: DataArgs) -> str:
    """What preparing costs, for `--dry-run`: intervals, share of each, disk."""
    bounds = interval_bounds(args.shortest_interval, args.context_length)
    first = 1 if args.short_documents == "drop" else 0
    names = [
        IntervalReport(low, high).name for low, high in zip(bounds[first:], bounds[first + 1 :], strict=False)
    ]
    lines = [f"length intervals [tokens]: {', '.join(names)}"]
    if args.target_tokens is None:
        lines.append("target: all tokens that the sources and data.exhausted allow; disk: 12 bytes a token")
    else:
        megabytes = args.target_tokens * 8 / 1e6
        lines.append(
            f"target: {args.target_tokens:,} tokens, {args.target_tokens // len(names):,} per interval; rows need "
            f"{megabytes:,.1f} MB, while preparing 4 more bytes for every token of the sources"
        )
    return "\n".join(lines)


def _draw(args: DataArgs, pieces: Pieces, seed: int) -> tuple[np.ndarray, list[IntervalReport]]:
    return draw(
        pieces.lengths,
        bounds=interval_bounds(args.shortest_interval, args.context_length),
        target_tokens=args.target_tokens,
        exhausted=args.exhausted,
        seed=seed,
        first_interval=1 if args.short_documents == "drop" else 0,
    )


def _row_tokens(rows: list[list[int]], drawn: np.ndarray, pieces: Pieces, spool: TokenSpool) -> Iterator[Row]:
    for row in tqdm(rows, desc="pack", unit=" rows", mininterval=1):
        numbers = drawn[row]
        yield [
            spool.tokens(start, start + length)
            for start, length in zip(pieces.starts[numbers], pieces.lengths[numbers], strict=True)
        ]


def _pad_token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    return 0


def _details(
    args: DataArgs,
    tokenizer: Any,
    request: dict[str, Any],
    report: ReadReport,
    pieces: Pieces,
    intervals: list[IntervalReport],
) -> dict[str, Any]:
    boundary = BoundaryTokens.from_policy(args.boundary_tokens, tokenizer)
    return {
        "boundary_tokens": {"before": list(boundary.before), "after": list(boundary.after)},
        "request": request,
        "read": {**asdict(report), "sources": [source.as_dict() for source in report.sources]},
        "policies": {
            name: getattr(pieces, name)
            for name in (
                "cut_documents",
                "skipped_long",
                "skipped_long_tokens",
                "dropped_short",
                "dropped_short_tokens",
            )
        },
        "balance": _balance(args, intervals),
        "intervals": [interval.as_dict() for interval in intervals],
    }


def _balance(args: DataArgs, intervals: list[IntervalReport]) -> dict[str, Any]:
    """How equal the intervals came out, and a note for each that ran dry."""
    after = [interval.tokens_after for interval in intervals]
    share = (args.target_tokens or sum(after)) // len(intervals)
    notes = []
    for interval in intervals:
        if not interval.ran_dry:
            continue
        what = {
            "stop": "all intervals end with as much",
            "repeat": f"its documents are used {interval.passes:.1f} times",
            "redistribute": "the missing tokens come from the other intervals",
        }[args.exhausted]
        notes.append(
            f"interval {interval.name} ran dry: {interval.tokens_before:,} tokens for an equal share of "
            f"{max(share, interval.quota):,}; {what}"
        )
    deviation = max(abs(tokens - share) for tokens in after) / share
    return {"equal_share_tokens": share, "largest_deviation": deviation, "notes": notes}
