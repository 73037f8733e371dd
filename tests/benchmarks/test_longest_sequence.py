"""The search for the longest training row, and its rows.

The devices here have a memory that is a known function of the length.
"""

import time

import pytest
import torch

import pod

MEBIBYTE = 2**20


@pytest.fixture
def longest(script):
    return script("longest_sequence")


def device(limit, fixed, per_token, bend=0.0):
    """Make the tries on a device with a known memory, and the list of these tries.

    The device holds fixed + per_token x n (+ bend x n beyond 40,000 tokens) bytes.
    """
    asked = []

    def start(tokens):
        asked.append(tokens)
        peak = fixed + per_token * tokens + bend * max(0, tokens - 40_000)
        fits = peak <= limit
        return {"tokens": tokens, "fits": fits, "peak_bytes": peak if fits else None}

    return start, asked


@pytest.mark.parametrize("bend", [0.0, 0.1 * MEBIBYTE, -0.03 * MEBIBYTE])
@pytest.mark.parametrize("limit", [4, 8, 16, 100])
def test_bisection_ends_within_its_resolution_and_few_tries(longest, limit, bend):
    """A prediction that is right, too long or too short; a second try that does not fit."""
    start, asked = device(limit * 1024 * MEBIBYTE, 900 * MEBIBYTE, 0.15 * MEBIBYTE, bend)
    low, high = longest.search(start, 16_384, 512, limit * 1024 * MEBIBYTE, 0.03, time.perf_counter() + 60)
    assert start(low)["fits"]
    assert not start(high)["fits"]
    assert high - low <= max(512, 0.03 * low)
    assert len(asked) - 2 <= (
        5 if bend == 0 and limit > 4 else 12
    )  # a second row that fits makes the prediction
    assert all(tokens % 512 == 0 for tokens in asked)


def test_a_deadline_ends_the_search_with_what_fits(longest):
    start, asked = device(16_384 * MEBIBYTE, 0, 0.15 * MEBIBYTE)
    low, high = longest.search(start, 16_384, 512, 16_384 * MEBIBYTE, 0.03, time.perf_counter() - 1)
    assert (low, high, asked) == (32_768, None, [16_384, 32_768])


def test_a_first_row_that_does_not_fit_is_an_error(longest):
    start, _ = device(MEBIBYTE, 0, MEBIBYTE)
    with pytest.raises(RuntimeError, match="give more memory"):
        longest.search(start, 16_384, 512, MEBIBYTE, 0.03, time.perf_counter() + 60)


def test_plan_shares_what_the_row_says(longest):
    plan = pod.SharingPlan(lead=longest.make_plan(16, 8))
    assert plan.share_followers == pytest.approx(0.7, abs=0.005)


def test_only_offloading_and_recomputing_have_a_goal(longest):
    found = {"dense": 1000, "keep": 700, "offload": 950, "recompute": 850}
    rows = longest.rows_of({name: {"longest_tokens": value} for name, value in found.items()}, tiny=False)
    assert [row["met"] for row in rows] == [None, True, False]
    assert [row["figure"] for row in rows] == [0.7, 0.95, 0.85]
    failed = longest.rows_of({"dense": {"longest_tokens": None, "error": "no"}}, tiny=False)
    assert all(row["met"] is None and row["reason"] for row in failed)


def test_live_bytes_count_what_lives_at_a_time_without_the_host(longest):
    with longest.LiveBytes() as live:
        for _ in range(5):
            x = torch.zeros(1000, dtype=torch.float64)
            y = x.view(10, 100)[:3] + 1
            del x, y
        kept = live.host(torch.clone)(torch.zeros(10, dtype=torch.float64))
    assert live.peak == (1000 + 300) * 8
    assert kept.sum() == 0
