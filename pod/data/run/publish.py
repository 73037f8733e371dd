"""The last step of preparation: held-out text, manifest and picture beside the shards, then one rename."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.balance.draw import Drawn
from pod.data.balance.length_intervals import balance_report
from pod.data.rows.held_out import write_held_out
from pod.data.rows.length_pictures import PICTURE_NAME, draw_lengths
from pod.data.rows.manifest import MANIFEST_NAME, listed_files
from pod.data.rows.shards import write_manifest
from pod.data.run.folders import check_replaceable
from pod.data.run.job import Job
from pod.data.run.read_sources import Reading
from pod.data.run.writing import tokens_of
from pod.files import move_into_place


def publish(job: Job, reading: Reading, drawn: Drawn, entries: list[dict[str, Any]]) -> None:
    """Complete the staging folder of `job` and rename it to its output folder.

    A call that was interrupted can be repeated: it writes the same bytes again.
    """
    folder = job.staging_dir
    held_out = write_held_out(folder, _held_out(job, reading), job.vocab_size)
    manifest = write_manifest(
        folder,
        entries,
        context_length=job.args.context_length,
        vocab_size=job.vocab_size,
        tokenizer_sha256=job.request["tokenizer_sha256"],
        pad_token_id=job.pad_token_id,
        details={
            "tokenizer_source": job.tokenizer_source,
            "request": job.request,
            "read": _read(job, reading, drawn),
            "policies": _policies(reading, drawn),
            "intervals": [interval.as_dict() for interval in drawn.intervals],
            "balance": balance_report(job.args, drawn.intervals, drawn.shares),
            "weights": [asdict(share) for share in drawn.shares],
            "held_out": {"asked": job.held_out_tokens, **held_out},
        },
    )
    draw_lengths(manifest, folder / PICTURE_NAME)
    _remove_strangers(folder, manifest)
    check_replaceable(job.output_dir)  # again: files may have been put there in the meantime
    move_into_place(folder, job.output_dir)


def _held_out(job: Job, reading: Reading) -> Iterator[np.ndarray]:
    """Ids of each held-out document."""
    for pieces in reading.reservoir.held_out():
        yield np.concatenate([tokens_of(job, piece) for piece in pieces])


def _read(job: Job, reading: Reading, drawn: Drawn) -> dict[str, Any]:
    """The manifest's `read`: what was read, and what each source gave to the rows."""
    sources = [
        {**asdict(report), **_of_source(drawn, number)} for number, report in enumerate(reading.reports)
    ]
    return {
        "units": reading.num_work_shards,
        "units_of_all": len(job.work_shards),
        "documents": sum(report.documents for report in reading.reports),
        "tokens": round(float(drawn.counted.tokens.sum())),
        "special_documents": int(drawn.pieces["special"].sum()),
        "sources": sources,
    }


def _of_source(drawn: Drawn, number: int) -> dict[str, int]:
    """Tokens read from source `number`, and the documents and tokens drawn from it."""
    own = [share for share in drawn.shares if share.source == number]
    return {
        "tokens": round(float(drawn.counted.tokens[:, number].sum())),
        "documents_after": sum(share.documents_after for share in own),
        "tokens_after": sum(share.tokens_after for share in own),
    }


def _policies(reading: Reading, drawn: Drawn) -> dict[str, int]:
    """The manifest's `policies`: what the settings left out, and how many drawn pieces are of cut documents.

    Where the reservoir did not keep everything, the numbers are estimated from what it kept.
    """
    groups, counted = reading.reservoir.groups, drawn.counted
    return {
        "cut_pieces": int((drawn.pieces["document"] > drawn.pieces["length"]).sum()),
        "duplicates": counted.copies,
        "skipped_long": round(float(counted.documents[groups.long].sum())),
        "skipped_long_tokens": round(float(counted.tokens[groups.long].sum())),
        "dropped_short": round(float(counted.documents[groups.short].sum())),
        "dropped_short_tokens": round(float(counted.tokens[groups.short].sum())),
    }


def _remove_strangers(folder: Path, manifest: dict[str, Any]) -> None:
    """Remove temporary files that a killed run left."""
    known = {MANIFEST_NAME, PICTURE_NAME} | {entry["file"] for entry in listed_files(manifest)}
    for file in folder.iterdir():
        if file.name not in known:
            os.unlink(file)
