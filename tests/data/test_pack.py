"""Best-fit decreasing in a window: whole documents, each once, little padding."""

import numpy as np
import pytest

from pod.data.pack import pack_best_fit, pack_one_per_row, padding_share


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
        padding_share(lengths, len(pack_best_fit(lengths, 4096, window)), 4096) for window in (64, 512, 4096)
    ]
    assert shares[0] >= shares[1] >= shares[2] and shares[2] < 0.005 and shares[1] < 0.02


def test_open_rows_are_filled_by_later_windows():
    lengths = np.array([6] * 10 + [4] * 10)
    assert len(pack_best_fit(lengths, 10, window=10)) == 10


def test_one_document_per_row():
    assert pack_one_per_row(np.array([3, 10, 1]), 10) == [[0], [1], [2]]


@pytest.mark.parametrize("lengths", [[5, 11], [0, 4]])
def test_documents_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match="cannot be packed whole into rows of 10"):
        pack_best_fit(np.array(lengths), 10, 4)
