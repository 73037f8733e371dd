"""From a selection to rows on disk: every drawn piece in one row, same bytes always, restartable."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from pod.data.args import DataArgs
from pod.data.documents import DOCUMENT, splitmix64
from pod.data.draw import draw
from pod.data.row_plan import RowPlan, plan_rows
from pod.data.selection import select
from pod.files import read_json

CONTEXT = 512


class FakePart:
    """A part of the token store in memory."""

    def __init__(self, number, source):
        numbers = np.arange(400, dtype=np.uint64) + np.uint64(1000 * number)
        self.name, self.source, self.num_documents = f"unit {number}", source, len(numbers)
        self.documents = np.zeros(len(numbers), DOCUMENT)
        self.documents["tokens"] = 2 + (splitmix64(numbers) % np.uint64(30)) ** 2
        self.documents["digest"][:, 0] = splitmix64(numbers ^ np.uint64(77))
        self.documents["place"] = splitmix64(numbers ^ np.uint64(99))

    def index(self, start, stop):
        return self.documents[start:stop].copy()


def arguments(**changes):
    options = {"context_length": CONTEXT, "shortest_interval": 64, "packing_window": 100} | changes
    return DataArgs(sources=["a", "b"], **options)


@pytest.fixture(scope="module")
def selection(tmp_path_factory):
    parts = [FakePart(number, int(number > 1)) for number in range(4)]
    return select(parts, arguments(), tmp_path_factory.mktemp("selection"))


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("packing", ["best_fit", "one_per_row"])
@pytest.mark.parametrize("target, exhausted", [(None, "redistribute"), (60_000, "stop"), (600_000, "repeat")])
def test_rows_hold_the_drawn_pieces(selection, tmp_path, packing, target, exhausted):
    args = arguments(packing=packing, target_tokens=target, exhausted=exhausted)
    plan = plan_rows(selection, args, 3, tmp_path)
    rows = plan.rows(0, plan.num_rows)
    assert len(rows) == plan.num_rows
    assert all(0 < row["length"].sum() <= CONTEXT for row in rows)
    found = Counter(piece for row in rows for piece in row.tolist())
    drawn = draw(selection, args, 3)
    assert found == Counter(selection.pieces(0, selection.num_pieces)[drawn.numbers].tolist())
    assert plan.num_documents == len(drawn.numbers) == sum(map(len, rows))
    assert plan.num_tokens == drawn.lengths.sum() == sum(int(row["length"].sum()) for row in rows)
    if target is None:
        assert plan.num_documents == selection.num_pieces
    if packing == "one_per_row":
        assert [row["key"][0] for row in rows] == selection.take(drawn.numbers)["key"].tolist()
    else:
        assert plan.num_tokens / (plan.num_rows * CONTEXT) > 0.98


def test_any_rows_can_be_read(selection, tmp_path):
    plan = plan_rows(selection, arguments(), 0, tmp_path)
    rows = plan.rows(0, plan.num_rows)
    assert [row.tolist() for row in plan.rows(7, 20)] == [row.tolist() for row in rows[7:20]]
    assert [row.tolist() for row in plan.rows(plan.num_rows - 2, 10**9)] == [
        row.tolist() for row in rows[-2:]
    ]
    assert plan.rows(plan.num_rows, 10**9) == [] == plan.rows(4, 4)


def test_same_seed_same_bytes(selection, tmp_path):
    args = arguments(target_tokens=60_000, weights=[1, 2])
    plan_rows(selection, args, 1, tmp_path / "a")
    plan_rows(selection, args, 1, tmp_path / "b", chunk_pieces=11)
    plan_rows(selection, args, 2, tmp_path / "c")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a")["rows.bin"] != files(tmp_path / "c")["rows.bin"]


def test_bytes_stay_the_same_for_ever(selection, tmp_path):
    """Data prepared by an older version must stay reproducible."""
    plan_rows(selection, arguments(target_tokens=60_000, weights=[1, 2]), 1, tmp_path)
    found = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in files(tmp_path).items()}
    assert found["rows.bin"] == "c79e8b310b9120fa" and found["row_starts.bin"] == "35ceb72c94bf038e"


def test_reports(selection, tmp_path):
    plan = plan_rows(selection, arguments(target_tokens=24_000, weights=[1, 3]), 0, tmp_path)
    assert [interval["name"] for interval in plan.intervals] == ["1–64", "64–128", "128–256", "256–512"]
    assert sum(interval["tokens_after"] for interval in plan.intervals) == plan.num_tokens
    assert plan.balance["largest_deviation"] <= 0.005 and plan.balance["equal_share_tokens"] == 6000
    everything = np.concatenate(plan.rows(0, plan.num_rows))
    for source, totals in enumerate(plan.sources):
        own = everything[everything["source"] == source]
        assert totals == {"documents_after": len(own), "tokens_after": int(own["length"].sum())}
    assert plan.sources[1]["tokens_after"] / plan.num_tokens == pytest.approx(0.75, abs=0.05)
    assert [(one["interval"], one["source"], one["weight"]) for one in plan.weights[:2]] == [
        ("1–64", 0, 0.25),
        ("1–64", 1, 0.75),
    ]
    told = read_json(tmp_path / "row_plan.json")
    assert told == plan.as_dict() and "folder" not in told


def test_finished_plan_is_kept_and_an_unfinished_one_made_again(selection, tmp_path):
    args = arguments(target_tokens=60_000)
    plan = plan_rows(selection, args, 1, tmp_path)
    before = files(tmp_path)
    assert plan_rows(selection, args, 99, tmp_path) == plan == RowPlan.open(tmp_path, selection)
    (tmp_path / "row_starts.bin").write_bytes(before["row_starts.bin"] + b"12345678")
    with pytest.raises(
        ValueError, match=r"row_starts.bin is missing or not whole: delete .*row_plan.json and plan"
    ):
        plan_rows(selection, args, 1, tmp_path)
    (tmp_path / "row_plan.json").unlink()
    assert plan_rows(selection, args, 1, tmp_path) == plan and files(tmp_path) == before
