"""Data preparation in one call: the steps of `pod.data.job` one after the other, on the processes of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pod.data.args import DataArgs
from pod.data.balance import IntervalReport, bounds_of
from pod.data.folders import LOCK_SECONDS, Busy, check_replaceable, locked, remove_empty, user_lock
from pod.data.job import Job
from pod.data.loader import PackedDataset
from pod.data.manifest import pieces
from pod.data.overview import left_out
from pod.data.pictures import PICTURE_NAME, short_number
from pod.data.records import one_line
from pod.data.units import plan_units
from pod.data.workers import cores, run_tasks
from pod.files import check_can_write

__all__ = ["PICTURE_NAME", "estimate", "prepare", "prepare_job", "summary"]

LISTED = 5
"""Unreadable files and records that the summary names."""
# Measured by benchmarks/data_pipeline.py with SmolLM2's tokenizer on Python source.
BYTES_PER_TOKEN = 3.6
TOKENS_PER_SECOND = 800_000
"""Of one core."""
PARENT_GIGABYTES, WORKER_GIGABYTES = 0.3, 0.2
RECORD_FACTOR = 125
"""Bytes of memory per byte of a long record while it is tokenised."""


def prepare(args: DataArgs, tokenizer: Any, output_dir: str | Path, *, seed: int = 0) -> PackedDataset:
    """Prepare the training rows of `args` in folder `output_dir` and open them.

    `tokenizer` is a tokenizer, its folder, file or hub id. The same settings, sources and seed give the same bytes, whatever
    the number of workers and however often the work was interrupted. Data that is up to date (same settings, tokenizer and
    unchanged source files) is kept as it is. The folder appears in one step; what an error, a full disk or a kill interrupted
    stays in `<output_dir>.work`, from where the same call goes on.

    Raises `ValueError` in one line for settings, sources and tokenizers that cannot work, `OSError` when the disk is full.
    """
    return prepare_job(Job(args, tokenizer, output_dir, seed))


def prepare_job(job: Job) -> PackedDataset:
    """Run all steps of `job` that are not done yet."""
    if job.is_current():
        with contextlib.suppress(Busy, OSError), _alone(job, 0):  # another run may work beside it
            job.clean()
        print(f"{job.output_dir} is up to date: the same settings, tokenizer and sources")
        return PackedDataset(job.output_dir)
    check_replaceable(job.output_dir)
    for folder, setting in ((job.output_dir.parent, "output_dir"), (job.work_dir, "data.work_dir")):
        check_can_write(folder, setting)
    workers = job.args.workers or cores()
    with _alone(job):
        missing = job.missing_units()
        kept = len(job.units()) - len(missing)
        if kept:
            print(f"{kept} of {len(job.units())} units of the sources are tokenised already")
        job.warm_up()
        sizes = [unit.text_bytes for unit in job.units()]
        total, left = sum(sizes), sum(sizes[number] for number in missing)
        progress = {
            "description": "tokenise",
            "unit": "B of text",
            "total": total or None,
            "done": total - left,
        }
        run_tasks(job.tokenise, missing, workers, **progress)
        plan = job.plan()
        shards = range(job.num_shards())
        run_tasks(job.write_shard, shards, workers, description="write", unit="rows", total=plan.num_rows)
        return job.publish()


@contextlib.contextmanager
def _alone(job: Job, seconds: float | None = None) -> Iterator[None]:
    """One run at a time for one output, whatever its settings: the first to end would remove the other's work. Runs for
    several outputs may share a `work_dir`; the last one removes the tokens."""
    message = f"another process is preparing {job.output_dir}: wait for it, or stop it and run the same command again"
    seconds = LOCK_SECONDS if seconds is None else seconds
    with locked(job.lock_file, seconds, message):
        try:
            with locked(user_lock(job.tokens_dir, job.output_dir), seconds, message):
                yield
            if job.is_current():
                job.clean()  # of two runs that ended together, each left the tokens to the other
        finally:
            # An error before the first part leaves them empty.
            remove_empty(job.tokens_dir, job.rows_dir, job.work_dir)


def summary(manifest: dict[str, Any]) -> str:
    """The manifest in a few lines: totals, intervals, and what the policies left out."""
    lines = [
        f"{manifest['num_tokens']:,} tokens of {manifest['num_documents']:,} {pieces(manifest)} in {manifest['num_rows']:,} rows of "
        f"{manifest['context_length']} (padding {100 * manifest['padding_share']:.2f} %)"
    ]
    for interval in manifest["intervals"]:
        lines.append(
            f"  {interval['name']:>9} tokens: {short_number(interval['tokens_before']):>6} → "
            f"{short_number(interval['tokens_after']):>6} ({interval['documents_after']:,} {pieces(manifest)})"
        )
    lines.extend(manifest["balance"]["notes"])
    missing = [f"{count:,} {reason}" for reason, count in left_out(manifest)]
    if missing:
        lines.append("left out: " + ", ".join(missing))
    named = [name for source in manifest["read"]["sources"] for name in source["skipped_files"]]
    lines.extend(f"  unreadable: {name}" for name in named[:LISTED])
    return "\n".join(lines)


def estimate(args: DataArgs) -> str:
    """What preparing costs, for `--dry-run`: intervals, share of each, and time, disk and memory at measured rates."""
    bounds = bounds_of(args)
    first = 1 if args.short_documents == "drop" else 0
    names = [
        IntervalReport(low, high).name for low, high in zip(bounds[first:], bounds[first + 1 :], strict=False)
    ]
    lines = [f"length intervals [tokens]: {', '.join(names)}"]
    if args.target_tokens is None:
        lines.append("target: all tokens that the sources and data.exhausted allow")
    else:
        lines.append(
            f"target: {args.target_tokens:,} tokens, {args.target_tokens // len(names):,} per interval; rows need "
            f"{_gigabytes(2 * args.target_tokens)} (vocabularies above 65,536: twice as much)"
        )
    return "\n".join([*lines, *_cost(args)])


def _cost(args: DataArgs) -> list[str]:
    """Time, disk and memory; the sources are looked at but not read."""
    try:
        size = sum(unit.text_bytes or 0 for unit in plan_units(args))
    except (ValueError, OSError) as error:
        return [f"sources: cannot be looked at here ({one_line(error)})"]
    if not size:
        return ["sources: of unknown size (hub data sets)"]
    tokens, workers = size / BYTES_PER_TOKEN, args.workers or cores()
    time = _duration(tokens / (TOKENS_PER_SECOND * workers))
    limit = ", less where data.max_documents ends it" if args.max_documents else ""
    memory = PARENT_GIGABYTES + WORKER_GIGABYTES * workers
    return [
        f"sources: about {_gigabytes(size)} of text or {short_number(tokens)} tokens; reading takes about {time} on "
        f"{workers} core{'s' * (workers > 1)} and {_gigabytes(2 * tokens)} of disk in the work folder (vocabularies above 65,536: "
        f"twice as much){limit}",
        f"memory: about {memory:.1f} GB, and {RECORD_FACTOR * args.max_record_bytes / 1e9:.1f} GB more for each worker that meets "
        f"a record of {args.max_record_bytes / 1e6:.0f} MB",
    ]


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(1, round(seconds))} s"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
