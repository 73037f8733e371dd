"""Data preparation in one call, on the processes of this machine.

Read → tokenise → keep or drop → pack → publish.
"""

import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from pod.data.args import DataArgs
from pod.data.balance.draw import draw
from pod.data.balance.length_intervals import bounds_of, interval_name
from pod.data.read.books import split_fragment
from pod.data.read.discovery import files_of, hub_spec
from pod.data.read.records import short_reason
from pod.data.read.work_shards import WorkShard, plan_work_shards
from pod.data.rows.length_pictures import short_bytes, short_number
from pod.data.rows.loader import PackedDataset
from pod.data.rows.manifest import MANIFEST_NAME, read_manifest
from pod.data.run.data_progress import duration
from pod.data.run.folders import LOCK_SECONDS, OF_WORK, check_outside, check_replaceable, locked
from pod.data.run.job import Job
from pod.data.run.publish import publish
from pod.data.run.read_sources import read_sources
from pod.data.run.workers import cores
from pod.data.run.writing import pack, write_rows
from pod.files import check_can_write, explain_disk_full
from pod.remote import is_remote

# Measured by benchmarks/data_pipeline.py with SmolLM2's tokenizer on Python source.
BYTES_PER_TOKEN = 3.6
TOKENS_PER_SECOND = 800_000
"""Speed of one core that reads and tokenises."""
PARENT_GIGABYTES, WORKER_GIGABYTES = 0.3, 0.2
"""Memory of the main process, and of each worker."""
RECORD_FACTOR = 125
"""Bytes of memory per byte of a long record while it is tokenised."""


def prepare(
    args: DataArgs,
    tokenizer: Any,
    output_dir: str | Path,
    *,
    seed: int = 0,
    used_by: str | Path | None = None,
    overwrite: bool = False,
) -> PackedDataset:
    """Prepare the training rows and the held-out text of `args` in folder `output_dir` and open them.

    The same settings, sources and seed give the same bytes, whatever the number of workers and however often
    the work was interrupted. Data of the same settings, seed and tokenizer is kept as it is; one line warns
    where a local source was changed later. The folder appears in one step. After an error, a full disk or a
    kill, the unfinished work stays in `<output_dir>.work`, from where the same call continues.

    Rows of other settings, and rows without a readable manifest, are not replaced: they are a `ValueError`.

    Args:
        tokenizer: a tokenizer, or its folder, file or hub id. `args.tokenizer` wins.
        seed: seed of the order of reading, the draw and the order of rows.
        used_by: checkpoints that can continue with the rows in `output_dir` only. These rows are not replaced
            by others, with or without `overwrite`.
        overwrite: replace rows of other settings and rows without a readable manifest, and read the sources
            again for rows of the same settings.

    Raises:
        ValueError: in one line, for settings, sources and tokenizers that cannot work.
        OSError: when the disk is full.
    """
    job = Job(args, tokenizer, output_dir, seed)
    if job.is_current() and not overwrite:
        # Another run may be at work beside the finished rows: then the lock is not free, and its work stays.
        with suppress(ValueError, OSError), locked(job.lock_file, 0, "busy"):
            check_replaceable(job.work_dir, OF_WORK)
            if job.has_work():
                job.clean()
        print(
            f"{job.output_dir} is up to date: the same settings, seed and tokenizer; "
            "--overwrite reads its sources again"
        )
        if (changed := newer_source(args, job.output_dir)) is not None:
            print(
                f"warning: {changed} was changed after {job.output_dir} was made: --overwrite reads it again"
            )
        return PackedDataset(job.output_dir)
    if used_by is not None:
        _check_unused(job, used_by, overwrite)
    check_replaceable(job.output_dir)
    check_replaceable(job.work_dir, OF_WORK)
    if not overwrite:
        _check_nothing_is_lost(job)
    check_outside(job.output_dir, [] if args.include else args.sources)
    check_can_write(job.output_dir.parent, "output_dir")
    message = (
        f"another process is preparing {job.output_dir}: "
        "wait for it, or stop it and run the same command again"
    )
    with locked(job.lock_file, LOCK_SECONDS, message):
        if overwrite or not job.is_current():  # the run that held the lock may have had the same request
            _make(job, overwrite)
    return PackedDataset(job.output_dir)


def newer_source(args: DataArgs, folder: Path) -> str | None:
    """A local source file that was changed after the rows in `folder` were made; None if there is none."""
    made = (folder / MANIFEST_NAME).stat().st_mtime_ns
    for source in args.sources:
        without_fragment, _ = split_fragment(source)
        if is_remote(without_fragment) or hub_spec(without_fragment) is not None:
            continue
        with suppress(ValueError, OSError):  # a source that is gone is no news: the rows are complete
            for file in files_of(without_fragment, tuple(args.include)).found:
                if os.stat(file.path).st_mtime_ns > made:
                    return file.path
    return None


def _check_unused(job: Job, used_by: str | Path, overwrite: bool) -> None:
    """Refuse to change finished rows that the checkpoints in `used_by` need.

    Damaged rows of this request may be made again: they get the same bytes.

    Raises:
        ValueError: the job's folder has rows of another request, or `overwrite` would make undamaged rows
            again.
    """
    try:
        manifest = read_manifest(job.output_dir)
    except ValueError:  # there are no rows, or they are unusable: no checkpoint can continue with them
        return
    wish = f"the checkpoints in {used_by} need its rows: set another output_dir, or move {used_by} away"
    if not job.is_answered_by(manifest):
        raise ValueError(
            f"{job.output_dir} has rows of other settings, seed or tokenizer, or too little held-out text, "
            f"but {wish}"
        )
    if overwrite and job.is_current():
        raise ValueError(f"{job.output_dir} cannot be overwritten: {wish}")


def _check_nothing_is_lost(job: Job) -> None:
    """Refuse to replace finished rows of another request, or rows whose settings are not known.

    Damaged rows of this request are made again.

    Raises:
        ValueError: such rows lie in the job's folder.
    """
    folder = job.output_dir
    way_out = "run again with --overwrite to replace them, or set another output_dir"
    if not any(folder.glob("shard-*")) and not (folder / MANIFEST_NAME).exists():
        return
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        raise ValueError(
            f"{folder} has rows of unknown settings ({short_reason(error)}): {way_out}"
        ) from None
    if job.is_answered_by(manifest):
        return
    raise ValueError(f"{folder} has finished rows {_difference(job, manifest)}: {way_out}")


def _difference(job: Job, manifest: dict[str, Any]) -> str:
    """How the request of a manifest's rows differs from the job's, in a few words for a message."""
    other = job.args.other_than(manifest, job.seed)
    before = manifest.get("request") or {}
    if (before.get("settings") or {}).get("unreadable", job.args.unreadable) != job.args.unreadable:
        other.append("data.unreadable")
    if before.get("tokenizer_sha256") != job.request["tokenizer_sha256"]:
        other.append("tokenizer")
    if other:
        return f"with other settings ({', '.join(other)})"
    if before == job.request:
        asked = (manifest.get("held_out") or {}).get("asked", 0)
        return f"with {asked:,} held-out tokens, but {job.held_out_tokens:,} are needed"
    return "with other settings"


def _make(job: Job, overwrite: bool) -> None:
    """Do the work of a job, and remove its work folder. After an error the folder stays if it holds work."""
    try:
        with explain_disk_full(job.output_dir, written=job.work_dir):
            job.open_work(overwrite)
            job.warm_up()
            reading = read_sources(job)
            drawn = draw(reading.reservoir, job.args, job.seed)
            publish(job, reading, drawn, write_rows(job, pack(drawn, job.args)))
    except BaseException:
        if not any(job.work_dir.glob("unit-*")):  # an error before the first work shard
            job.clean()
        raise
    job.clean()


def estimate(args: DataArgs) -> str:
    """Text for `--dry-run`: the length intervals, the tokens of each, and the disk, memory and time needed.

    Time and memory follow from measured rates.
    """
    bounds = bounds_of(args)
    if args.short_documents == "drop":
        bounds = bounds[1:]
    names = [interval_name(*pair) for pair in pairwise(bounds)]
    lines = [f"length intervals [tokens]: {', '.join(names)}"]
    if args.target_tokens is None:
        return "\n".join(
            [*lines, "data.target_tokens is not set: set it to the number of training tokens to prepare"]
        )
    size = 2 * args.target_tokens
    lines.append(
        f"target: {args.target_tokens:,} tokens, {args.target_tokens // len(names):,} per interval; "
        f"rows need {short_bytes(size)}, the work folder up to {short_bytes(3 * size)} "
        "(vocabularies above 65,536: twice as much)"
    )
    return "\n".join([*lines, *_cost(args)])


def _cost(args: DataArgs) -> list[str]:
    """Lines about size of the sources, time and memory. Files are listed, but not read."""
    try:
        work_shards = plan_work_shards(args)
    except (ValueError, OSError) as error:
        return [f"sources: unknown size ({short_reason(error)})"]
    size = sum(work_shard.text_bytes for work_shard in work_shards)
    if not size:
        return ["sources: unknown size (hub data sets)"]
    tokens = size / BYTES_PER_TOKEN
    workers = args.workers or cores()
    time = duration(tokens / (TOKENS_PER_SECOND * workers))
    memory = PARENT_GIGABYTES + WORKER_GIGABYTES * workers
    needed = f"memory: about {memory:.1f} GB"
    if _may_hold(work_shards, args.max_record_bytes):
        needed += (
            f", and {RECORD_FACTOR * args.max_record_bytes / 1e9:.1f} GB more for each worker that reads a "
            f"record of {args.max_record_bytes / 1e6:.0f} MB"
        )
    cores_used = f"{workers} core" if workers == 1 else f"{workers} cores"
    return [
        f"sources: about {short_bytes(size)} of text or {short_number(tokens)} tokens; "
        f"reading takes at most about {time} on {cores_used}, less if the target is met earlier",
        needed,
    ]


def _may_hold(work_shards: list[WorkShard], record_bytes: int) -> bool:
    """Whether a file is large enough for a record of `record_bytes`, or of unknown size, as on the hub."""
    if any(work_shard.hub is not None for work_shard in work_shards):
        return True
    parts = [part for work_shard in work_shards for part in work_shard.files]
    return any(part.size < 0 or max(part.size, part.text_bytes) >= record_bytes for part in parts)
