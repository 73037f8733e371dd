"""The last step of preparation: held-out tokens, manifest and picture beside the shards, then one rename."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pod.data.documents import SourceReport
from pod.data.folders import check_replaceable
from pod.data.manifest import MANIFEST_NAME, listed_files, token_dtype
from pod.data.pictures import PICTURE_NAME, draw_lengths
from pod.data.selection import Counts, Selection
from pod.data.shards import write_manifest
from pod.data.token_store import Part
from pod.files import explain_disk_full, move_into_place, sha256_file

if TYPE_CHECKING:
    from pod.data.job import Job

HELD_OUT_TOKENS, HELD_OUT_LENGTHS = "held_out.tokens.bin", "held_out.lengths.npy"
POLICIES = ("cut_documents", "skipped_long", "skipped_long_tokens", "dropped_short", "dropped_short_tokens")
_AT_ONCE = 4096


def publish(job: Job) -> None:
    """Complete the staging folder of `job` and rename it to its output folder. Everything written here is written again
    when it was interrupted, the same bytes; `ValueError` when a shard is missing."""
    parts, plan, folder = job.parts(), job.row_plan, job.staging_dir
    entries = job.shard_entries()
    with explain_disk_full(job.output_dir, written=folder):
        details = {
            "tokenizer_source": job.tokenizer_source,
            "boundary_tokens": {"before": list(job.boundary.before), "after": list(job.boundary.after)},
            "request": job.request,
            "read": _read(job.reports(parts), plan.selection, job.request["reading"]["sources"], parts),
            "policies": {name: getattr(plan.selection.total, name) for name in POLICIES},
            "intervals": plan.intervals,
            "balance": plan.balance,
            "weights": plan.weights,
            "held_out": _write_held_out(folder, plan.selection, parts, token_dtype(job.vocab_size)),
        }
        for number, drawn in enumerate(plan.sources):
            details["read"]["sources"][number] |= drawn
        manifest = write_manifest(
            folder,
            entries,
            context_length=job.args.context_length,
            vocab_size=job.vocab_size,
            tokenizer_sha256=job.request["tokenizer_sha256"],
            pad_token_id=job.pad_token_id,
            details=details,
        )
        draw_lengths(manifest, folder / PICTURE_NAME)
    _remove_strangers(folder, manifest)
    check_replaceable(job.output_dir)  # again: time has passed
    move_into_place(folder, job.output_dir)


def _read(
    reports: list[SourceReport], selection: Selection, states: list[list[str]], parts: list[Part]
) -> dict[str, Any]:
    """What pass 1 read and what became of it, over all and for each source."""
    tokens = [0] * len(reports)
    for part in parts:
        tokens[part.source] += part.num_tokens
    sources = [
        {**report.as_dict(), "tokens": count, **_chosen(counts), "units_sha256": state}
        for report, count, counts, (_, state) in zip(reports, tokens, selection.sources, states, strict=True)
    ]
    return {
        "units": len(parts),
        "documents": sum(part.num_documents for part in parts),
        "tokens": sum(tokens),
        "special_documents": sum(report.special_documents for report in reports),
        **_chosen(selection.total),
        "sources": sources,
    }


def _chosen(counts: Counts) -> dict[str, Any]:
    """Counts of the selection; its documents, those that the draw may take, are `train_documents` in the manifest."""
    content = {name: value for name, value in asdict(counts).items() if name not in POLICIES}
    train = {f"train_{name}": content.pop(name) for name in ("documents", "tokens")}
    return {**content, **train}


def _write_held_out(folder: Path, selection: Selection, parts: list[Part], dtype: np.dtype) -> dict[str, Any]:
    """Tokens and lengths of the held-out documents in the order of their places; returns counts and checksums."""
    lengths = np.empty(selection.num_held_out, dtype="<i8")
    with open(folder / HELD_OUT_TOKENS, "wb") as stream:
        for start in range(0, selection.num_held_out, _AT_ONCE):
            pieces = selection.held_out(start, start + _AT_ONCE)
            lengths[start : start + len(pieces)] = pieces["length"]
            for piece in pieces:
                first = int(piece["start"])
                tokens = parts[int(piece["part"])].tokens(first, first + int(piece["length"]))
                stream.write(tokens.astype(dtype, copy=False).tobytes())
    with open(folder / HELD_OUT_LENGTHS, "wb") as stream:
        np.lib.format.write_array(stream, lengths, allow_pickle=False)
    return {
        "documents": selection.num_held_out,
        "tokens": selection.held_out_tokens,
        "token_dtype": dtype.name,
        "files": [
            {"file": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
            for name in (HELD_OUT_TOKENS, HELD_OUT_LENGTHS)
        ],
    }


def _remove_strangers(folder: Path, manifest: dict[str, Any]) -> None:
    """Remove shards of an earlier, longer plan that was interrupted in the same folder, and temporary files."""
    known = {MANIFEST_NAME, PICTURE_NAME} | {entry["file"] for entry in listed_files(manifest)}
    for file in folder.iterdir():
        if file.name not in known:
            os.unlink(file)
