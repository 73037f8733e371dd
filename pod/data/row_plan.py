"""Which piece goes into which row: draw and pack, once, on disk, so that any process can write any rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.args import DataArgs
from pod.data.balance import ShareReport, balance_report
from pod.data.draw import CHUNK_PIECES, draw
from pod.data.pack import best_fit_rows, one_per_row
from pod.data.selection import Selection
from pod.files import atomic_stream, explain_disk_full, read_json, write_json

_ROWS, _STARTS, _DONE = "rows.bin", "row_starts.bin", "row_plan.json"
_NUMBER = np.dtype("<i8")
_WRITTEN_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class RowPlan:
    """The planned rows, on disk in `folder`."""

    folder: Path
    selection: Selection
    num_rows: int
    num_documents: int
    """Pieces in all rows; repeated ones count each time."""
    num_tokens: int
    intervals: list[dict[str, Any]]
    """`IntervalReport.as_dict` of each interval."""
    balance: dict[str, Any]
    """`equal_share_tokens`, `largest_deviation` and `notes`, one for each interval or source that ran dry."""
    weights: list[dict[str, Any]]
    """`ShareReport` of each interval and source; `weight` is None where the recipe has no weights."""
    sources: list[dict[str, int]]
    """`documents_after` and `tokens_after` of each source."""

    @classmethod
    def open(cls, folder: str | Path, selection: Selection) -> RowPlan:
        """A finished plan. Raises `ValueError` when there is none or its files are not whole."""
        folder = Path(folder)
        plan = cls(folder, selection, **read_json(folder / _DONE))
        for name, count in ((_ROWS, plan.num_documents), (_STARTS, plan.num_rows + 1)):
            file = folder / name
            if not file.is_file() or file.stat().st_size != count * _NUMBER.itemsize:
                raise ValueError(f"{file} is missing or not whole: delete {folder / _DONE} and plan again")
        return plan

    def rows(self, start: int, stop: int) -> list[np.ndarray]:
        """PIECE records [documents] of each of the rows [start, stop)."""
        starts = self._read(_STARTS, start, min(stop, self.num_rows) + 1)
        if len(starts) < 2:
            return []
        pieces = self.selection.take(self._read(_ROWS, int(starts[0]), int(starts[-1])))
        return np.split(pieces, starts[1:-1] - starts[0])

    def as_dict(self) -> dict[str, Any]:
        """For `row_plan.json` and the manifest."""
        return {name: value for name, value in vars(self).items() if name not in ("folder", "selection")}

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        count = max(0, stop - start)
        return np.fromfile(self.folder / name, _NUMBER, count=count, offset=start * _NUMBER.itemsize)


def plan_rows(
    selection: Selection,
    args: DataArgs,
    seed: int,
    folder: str | Path,
    *,
    chunk_pieces: int = CHUNK_PIECES,
) -> RowPlan:
    """Draw and pack the pieces of `selection`; writes `rows.bin`, `row_starts.bin` and, last, `row_plan.json`.

    A finished plan in `folder` is opened as it is. The same selection, settings and seed give the same bytes. Raises
    `ValueError` when nothing can be drawn, `OSError` when the disk is full.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / _DONE).exists():
        return RowPlan.open(folder, selection)
    drawn = draw(selection, args, seed, chunk_pieces=chunk_pieces)
    if args.packing == "best_fit":
        documents, starts = best_fit_rows(drawn.lengths, args.context_length, args.packing_window)
    else:
        documents, starts = one_per_row(drawn.lengths, args.context_length)
    plan = RowPlan(
        folder,
        selection,
        num_rows=len(starts) - 1,
        num_documents=len(documents),
        num_tokens=int(drawn.lengths.sum(dtype=np.int64)),
        intervals=[interval.as_dict() for interval in drawn.intervals],
        balance=balance_report(args, drawn.intervals, drawn.shares),
        weights=[asdict(share) for share in drawn.shares],
        sources=_by_source(drawn.shares, len(args.sources)),
    )
    with explain_disk_full(folder / _ROWS, needed_bytes=(len(documents) + len(starts)) * _NUMBER.itemsize):
        _write(folder / _ROWS, drawn.numbers, documents)
        _write(folder / _STARTS, starts, np.arange(len(starts)))
        write_json(folder / _DONE, plan.as_dict())
    return plan


def _by_source(shares: list[ShareReport], num_sources: int) -> list[dict[str, int]]:
    totals = [{"documents_after": 0, "tokens_after": 0} for _ in range(num_sources)]
    for share in shares:
        for name in totals[share.source]:
            totals[share.source][name] += getattr(share, name)
    return totals


def _write(file: Path, values: np.ndarray, order: np.ndarray) -> None:
    """`values[order]` as a file that appears in one step."""
    with atomic_stream(file) as stream:
        for start in range(0, len(order), _WRITTEN_AT_ONCE):
            stream.write(values[order[start : start + _WRITTEN_AT_ONCE]].astype(_NUMBER).tobytes())
