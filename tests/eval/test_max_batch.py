"""The search for the largest batch.

Bisection against counting, real tries, limits, and errors that are none of memory.
"""

import sys

import pytest
import torch

import pod
from pod.measure.max_batch import Tries, fractional, is_out_of_memory, largest, search
from pod.measure.measured_memory import weight_bytes


@pytest.mark.parametrize("guess", [1, 2, 3, 9, 10, 40])
@pytest.mark.parametrize("most", [sys.maxsize, 1, 9, 64])
def test_bisection_finds_what_counting_finds(guess, most):
    for answer in (0, 1, 2, 7, 8, 9, 31):
        tried: list[int] = []

        def fits(batch: int, answer: int = answer, tried: list[int] = tried) -> bool:
            assert batch >= 1 and batch <= most
            tried.append(batch)
            return batch <= answer

        wanted = min(answer, most)
        assert largest(fits, guess, most) == wanted
        assert len(tried) <= 14


def tries_of(model, limit: int | None, generated: int = 4, prompt: int = 48) -> Tries:
    return Tries(model, lambda: pod.make_cache(model), prompt, generated, limit)


def test_the_batch_fits_and_one_more_does_not(dense_model):
    limit = 2_400_000
    tries = tries_of(dense_model, limit)
    found = search(tries, 64)
    batch = found["batch"]
    assert 4 < batch < 64 and not found["most_reached"]
    again = tries_of(dense_model, None)  # the same passes without a limit say what each batch takes
    assert again.fits(batch) and again.fits(batch + 1)
    assert again.peaks[batch] == found["peak_bytes"][str(batch)] <= limit < again.peaks[batch + 1]
    assert "bytes where" in found["failed"][str(batch + 1)]
    assert int(found["fractional_batch"]) == batch
    assert found["bytes_per_row"] * batch + weight_bytes(tries.model) == pytest.approx(limit, rel=0.1)


@pytest.mark.slow
def test_pod_fits_more_rows_than_the_dense_cache(dense_model, pod_model):
    full, shared = (
        search(tries_of(model, 700_000, prompt=4, generated=40), 200) for model in (dense_model, pod_model)
    )
    assert shared["fractional_batch"] > 1.1 * full["fractional_batch"]


def test_decoded_tokens_count(dense_model):
    """Bytes of a row grow by the tokens decoded: K and V of 16 more tokens at least."""
    short, long = (search(tries_of(dense_model, 800_000, generated=n, prompt=4), 64) for n in (8, 24))
    assert long["bytes_per_row"] - short["bytes_per_row"] >= 16 * 2 * 4 * 2 * 8 * 8


def test_weights_beyond_the_limit_fit_no_row(dense_model):
    found = search(tries_of(dense_model, 200_000), 64)
    assert found["batch"] == 0 and "the weights alone take 297,216 bytes" in found["failed"]["1"]


def test_search_ends_at_the_most_rows(dense_model):
    found = search(tries_of(dense_model, 10**9), 6)
    assert (found["batch"], found["most_reached"]) == (6, True) and not found["failed"]


def test_other_errors_are_not_taken_for_memory(dense_model):
    def broken():
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        search(Tries(dense_model, broken, 8, 2, 10**9), 4)


def test_lack_of_memory_is_recognised():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("capture was invalidated")
    except RuntimeError as error:
        assert is_out_of_memory(error)
    error = RuntimeError("capture failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(error) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(RuntimeError("illegal memory access"))


def test_fractional_rows_by_hand():
    assert fractional({1: 150, 2: 200, 4: 300}, 425) == 6.5


def test_throughput_counts_all_rows(dense_model):
    found = tries_of(dense_model, None).throughput(3)
    ratio = found["decode_tokens_per_second"] / found["tokens_per_second"]
    assert ratio > 3 / 4 and found["tokens_per_second"] > 0
