"""Reading continues at the very next row on any number of ranks.

2 → 1 → 3 → sequence-parallel groups, in real processes.
"""

import itertools

import pytest

from pod.data import PackedDataset
from pod.data.rows.order import epoch_order

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def dataset(data_results, data_folder):
    return PackedDataset(data_folder / "data")


@pytest.fixture(scope="module")
def settings(data_results):
    return data_results["settings"]


@pytest.fixture(scope="module")
def phases(data_results, settings):
    """Pairs of a phase's settings and what each of its ranks read."""
    return [
        (phase, [data_results[f"phase{number}_rank{rank}"] for rank in range(phase["ranks"])])
        for number, phase in enumerate(settings["phases"])
    ]


def groups_of(phase, ranks):
    """The ranks of each data-parallel group, in the order of their slices."""
    size = phase["sp_size"]
    groups = [ranks[start : start + size] for start in range(0, len(ranks), size)]
    for number, group in enumerate(groups):
        assert [rank["dp_rank"] for rank in group] == [number] * size
        assert [rank["sp_rank"] for rank in group] == list(range(size))
    return groups


def row_of(group, step, micro, dataset, by_tokens):
    """Number of the row whose slices a group read; labels and documents must be those of the whole row."""
    batches = [rank["steps"][step][micro] for rank in group]
    whole = {
        name: list(itertools.chain.from_iterable(batch[name][0] for batch in batches))
        for name in ("input_ids", "labels")
    }
    row = by_tokens[tuple(whole["input_ids"])]
    assert whole["labels"] == dataset[row]["labels"].tolist()
    assert all(batch["doc_ids"] == [dataset[row]["doc_ids"].tolist()] for batch in batches)
    return row


def test_every_row_once_per_epoch_whatever_the_ranks(dataset, settings, phases):
    by_tokens = {tuple(dataset[row]["input_ids"].tolist()): row for row in range(len(dataset))}
    stream, rows = [], settings["rows"]
    assert len(by_tokens) == rows == len(dataset)
    for phase, ranks in phases:
        for step in range(phase["steps"]):
            for group in groups_of(phase, ranks):
                for micro in range(settings["accumulation"]):
                    stream.append(row_of(group, step, micro, dataset, by_tokens))
    epochs = [stream[start : start + rows] for start in range(0, len(stream), rows)]
    assert len(epochs) == 4
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    expected = [epoch_order(len(dataset), settings["seed"], epoch).tolist() for epoch in range(4)]
    assert epochs == expected, "reading did not continue at the very next row"
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_cursor_counts_rows_used_not_rows_loaded_ahead(settings, phases):
    used = 0
    for phase, ranks in phases:
        used += phase["ranks"] // phase["sp_size"] * settings["accumulation"] * phase["steps"]
        assert {rank["position"] for rank in ranks} == {used}
    assert used == 4 * settings["rows"]


def test_slices_of_a_row_are_uneven_and_groups_differ(phases):
    """The checks above would pass on rows of one slice: here they were not."""
    first = [[rank["steps"][0][0]["input_ids"][0] for rank in ranks] for _, ranks in phases]
    widths = [[len(tokens) for tokens in ranks] for ranks in first]
    assert widths[0] == [41, 41] and widths[3] == [21, 20, 21, 20] and widths[4] == [14, 14, 13]
    assert len({tuple(tokens) for tokens in first[5]}) == 6
