"""Best-fit decreasing in a window: whole documents, each once, little padding."""

import bisect

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pod.data.rows.pack import best_fit_rows, one_per_row


def pack_best_fit(lengths, context_length, window):
    """Rows as lists of document numbers."""
    documents, starts = best_fit_rows(lengths, context_length, window)
    assert starts[0] == 0 and starts[-1] == len(documents) and (np.diff(starts) > 0).all()
    return [row.tolist() for row in np.split(documents, starts[1:-1])] if len(documents) else []


def by_sorted_list(lengths, context_length, window):
    """Best-fit decreasing with one sorted list of (room, row), as plainly as can be."""
    closed, rows, room = [], [], []
    for start in range(0, len(lengths), window):
        for index in sorted(
            range(start, min(start + window, len(lengths))), key=lambda one: (-lengths[one], one)
        ):
            at = bisect.bisect_left(room, (lengths[index], -1))
            if at == len(room):
                rows.append([])
                left, row = context_length, len(rows) - 1
            else:
                left, row = room.pop(at)
            rows[row].append(index)
            if left > lengths[index]:
                bisect.insort(room, (left - lengths[index], row))
            else:
                closed.append(row)
        while len(room) > window:
            closed.append(room.pop(0)[1])
    return [rows[row] for row in [*closed, *(row for _, row in room)]]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 7, 100, 511, 512, 513, 1024, 5000]),
    st.sampled_from(["even", "short", "long", "few"]),
    st.sampled_from([0, 1, 5, 60, 300]),
    st.sampled_from([1, 2, 9, 64, 1000]),
    st.integers(0, 2**32),
)
def test_same_as_a_sorted_list(context, kind, number, window, seed):
    rng = np.random.default_rng(seed)
    lengths = {
        "even": rng.integers(1, context + 1, number),
        "short": rng.integers(1, max(2, context // 10 + 1), number),
        "long": rng.integers(context // 2 + 1, context + 1, number),
        "few": rng.choice([1, context // 3 + 1, context // 2 + 1, context], number),
    }[kind].clip(1, context)
    assert pack_best_fit(lengths.astype(np.uint32), context, window) == by_sorted_list(
        lengths.tolist(), context, window
    )


def test_known_example():
    #              0  1  2  3  4  5  6
    lengths = np.array([6, 3, 5, 5, 4, 2, 10])
    # By decreasing length: 10 | 6 | 5+5 | 6+4 | 3 | 3+2 (the row of 6+4 is full, so 2 joins the row of 3)
    assert sorted(map(sorted, pack_best_fit(lengths, 10, window=100))) == [[0, 4], [1, 5], [2, 3], [6]]


def test_best_fit_takes_the_fullest_row_that_holds_it():
    lengths = np.array([7, 6, 3, 4])
    assert sorted(map(sorted, pack_best_fit(lengths, 10, window=100))) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("window", [1, 7, 64, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_every_document_is_in_exactly_one_row(window, seed):
    lengths = np.random.default_rng(seed).integers(1, 257, 1000)
    rows = pack_best_fit(lengths, 256, window)
    assert sorted(index for row in rows for index in row) == list(range(1000))
    assert max(int(lengths[row].sum()) for row in rows) <= 256
    assert rows == pack_best_fit(lengths, 256, window)


def test_padding_on_log_normal_lengths():
    lengths = np.exp(np.random.default_rng(0).normal(6, 1.2, 4000)).astype(int).clip(2, 4096)
    shares = [
        1 - lengths.sum() / (len(pack_best_fit(lengths, 4096, window)) * 4096) for window in (64, 512, 4096)
    ]
    assert shares[0] >= shares[1] >= shares[2] and shares[2] < 0.005 and shares[1] < 0.02


def test_open_rows_are_filled_by_later_windows():
    lengths = np.array([6] * 10 + [4] * 10)
    assert len(pack_best_fit(lengths, 10, window=10)) == 10


def test_one_document_per_row():
    documents, starts = one_per_row(np.array([3, 10, 1]), 10)
    assert documents.tolist() == [0, 1, 2] and starts.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot be packed whole"):
        one_per_row(np.array([11]), 10)


@pytest.mark.parametrize("lengths", [[5, 11], [0, 4]])
def test_documents_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match="cannot be packed whole into rows of 10"):
        pack_best_fit(np.array(lengths), 10, 4)
