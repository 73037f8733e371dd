"""Packs the drawn pieces into rows, and writes the rows as shards."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from pod.data.args import DataArgs
from pod.data.balance.draw import Drawn
from pod.data.rows.pack import best_fit_rows, one_per_row
from pod.data.rows.shards import DEFAULT_SHARD_BYTES, Row, rows_per_shard, write_shard
from pod.data.run.job import Job
from pod.data.run.workers import Count, in_order
from pod.files import read_json, write_json
from pod.verbosity import is_quiet


@dataclass(frozen=True)
class RowPieces:
    """Which pieces each row holds: row r has `pieces[starts[r] : starts[r + 1]]`."""

    pieces: np.ndarray
    """PIECE [n], row after row."""
    starts: np.ndarray
    """int64 [rows + 1]."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1


def pack(drawn: Drawn, args: DataArgs) -> RowPieces:
    """The drawn pieces in rows, as `args.packing` says."""
    lengths = drawn.pieces["length"]
    if args.packing == "best_fit":
        order, starts = best_fit_rows(lengths, args.context_length, args.packing_window)
    else:
        order, starts = one_per_row(lengths, args.context_length)
    return RowPieces(drawn.pieces[order], starts)


def write_rows(job: Job, packed: RowPieces) -> list[dict]:
    """Write all shards that are not written yet; returns their manifest entries."""
    job.staging_dir.mkdir(parents=True, exist_ok=True)
    task = _ShardTask(job, packed)
    calls = ((number,) for number in range(-(-packed.num_rows // task.rows_per_shard)))
    with (
        tqdm(total=packed.num_rows, unit=" rows", desc="write", mininterval=1, disable=is_quiet()) as bar,
        closing(in_order(task, calls, job.workers, bar.update)) as done,
    ):
        return list(done)


class _ShardTask:
    """Writes one shard; can be pickled."""

    def __init__(self, job: Job, packed: RowPieces):
        self.job, self.packed = job, packed
        self.rows_per_shard = rows_per_shard(job.args.context_length, job.vocab_size, DEFAULT_SHARD_BYTES)

    def __call__(self, count: Count, number: int) -> dict:
        job, file = self.job, self.job.entry_file(number)
        if file.is_file():
            entry = read_json(file)
            if _is_whole(job.staging_dir, entry):
                return entry
        entry = write_shard(
            job.staging_dir,
            number,
            self.rows(number, count),
            context_length=job.args.context_length,
            vocab_size=job.vocab_size,
            pad_token_id=job.pad_token_id,
        )
        write_json(file, entry)
        return entry

    def rows(self, number: int, count: Count) -> Iterator[Row]:
        """The rows of a shard."""
        first = number * self.rows_per_shard
        for row in range(first, min(first + self.rows_per_shard, self.packed.num_rows)):
            pieces = self.packed.pieces[self.packed.starts[row] : self.packed.starts[row + 1]]
            yield [tokens_of(self.job, piece) for piece in pieces]
            count(1)


def tokens_of(job: Job, piece: np.void) -> np.ndarray:
    """The token ids of a piece (one PIECE record), uint32 [n], read from the file of its work shard."""
    start = int(piece["start"])
    return job.work_shard_file(int(piece["work_shard"])).take(start, start + int(piece["length"]))


def _is_whole(folder: Path, entry: dict) -> bool:
    """Whether the files of a shard are there with all their bytes."""
    places = [(folder / one["file"], one["bytes"]) for one in entry.values() if isinstance(one, dict)]
    return all(place.is_file() and place.stat().st_size == size for place, size in places)
