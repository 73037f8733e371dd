"""Statistics against hand-computed values."""

import math

import numpy as np
import pytest

from pod.eval import stats


def test_perplexity_is_weighted_by_tokens():
    summary = stats.perplexity_summary([2.0, 9.0], [2, 3], resamples=50)
    assert summary["mean_nll"] == pytest.approx(11 / 5)
    assert summary["perplexity"] == pytest.approx(math.exp(2.2))
    assert (summary["tokens"], summary["sequences"]) == (5, 2)


def test_standard_error_and_interval_of_two_sequences():
    # means 1 and 2: the deviation is sqrt(1/2), the error 0.5; resamples give 1, 1.5 or 2 (a quarter, a half, a quarter)
    summary = stats.perplexity_summary([2.0, 4.0], [2, 2], resamples=4000)
    assert summary["standard_error"] == pytest.approx(0.5)
    assert summary["ci95"] == pytest.approx([math.exp(1), math.exp(2)])


def test_single_sequence_has_no_interval():
    summary = stats.perplexity_summary([2.0], [2], resamples=10)
    assert summary["ci95"] is None and summary["standard_error"] is None


def test_paired_change_ignores_differences_between_sequences():
    counts = [10, 10, 10, 10]
    base = [5.0, 50.0, 20.0, 90.0]
    sums = [value + 10 * math.log(1.1) for value in base]
    change = stats.paired_change(sums, base, counts, resamples=500)
    assert change["change"] == pytest.approx(0.1)
    assert change["ci95"] == pytest.approx([0.1, 0.1])


def test_paired_change_refuses_other_sequences():
    with pytest.raises(ValueError, match="same sequences, got 2 and 1"):
        stats.paired_change([1.0, 2.0], [1.0], [1, 1], resamples=10)


def test_bootstrap_covers_the_true_mean():
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        sums = rng.normal(3.0, 0.5, size=40)
        low, high = stats.perplexity_summary(list(sums), [1] * 40, resamples=400, seed=trial)["ci95"]
        hits += low <= math.exp(3.0) <= high
    assert 0.88 <= hits / 200 <= 0.99


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(8, 10, [0.4901625, 0.9433178]), (0, 10, [0.0, 0.2775328]), (10, 10, [0.7224672, 1.0])],
)
def test_wilson_interval(successes, trials, expected):
    # published values of the Wilson score interval, e.g. R's prop.test(8, 10, correct=FALSE)
    assert stats.wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-6)


def test_wilson_refuses_impossible_counts():
    with pytest.raises(ValueError, match="got 3 of 2"):
        stats.wilson_interval(3, 2)


def test_spread():
    assert stats.spread([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "min": 1.0, "max": 10.0, "repeats": 4}


def test_paired_difference_of_two_samples():
    # gaps 0.5 and -0.25: resamples give 0.5, 0.125 or -0.25 (a quarter, a half, a quarter)
    found = stats.paired_difference([1.0, 0.25], [0.5, 0.5], resamples=4000)
    assert found["difference"] == pytest.approx(0.125)
    assert found["ci95"] == pytest.approx([-0.25, 0.5])


def test_paired_difference_ignores_what_both_find_hard():
    base = [0.0, 1.0, 0.3, 0.9, 0.1]
    found = stats.paired_difference([value - 0.05 for value in base], base, resamples=300)
    assert found["difference"] == pytest.approx(-0.05) and found["ci95"] == pytest.approx([-0.05, -0.05])


def test_strata_weigh_tasks_equally_and_are_drawn_by_themselves():
    # task a: four samples that gain 0.1; task b: two that lose 0.5 and 0.3
    values, base = [0.1] * 4 + [-0.5, -0.3], [0.0] * 6
    strata = ["a"] * 4 + ["b"] * 2
    found = stats.paired_difference(values, base, resamples=4000, strata=strata)
    assert found["difference"] == pytest.approx((0.1 - 0.4) / 2)
    assert found["ci95"] == pytest.approx(
        [(0.1 - 0.5) / 2, (0.1 - 0.3) / 2]
    )  # a never varies, b is -0.5 … -0.3
    assert stats.paired_difference(values, base, resamples=50)["difference"] == pytest.approx(-0.4 / 6)
    weighted = stats.paired_difference(values, base, 50, strata=strata, weights={"a": 0.75, "b": 0.25})
    assert weighted["difference"] == pytest.approx(0.75 * 0.1 - 0.25 * 0.4)


def test_a_stratum_of_one_has_no_interval():
    assert stats.paired_difference([1.0, 0.5, 0.5], [0.0] * 3, 20, strata=["a", "b", "b"])["ci95"] is None


def test_paired_difference_refuses_other_samples():
    with pytest.raises(ValueError, match="same samples, got 2 and 1"):
        stats.paired_difference([1.0, 0.0], [1.0], resamples=10)
    with pytest.raises(ValueError, match="got 0 and 0"):
        stats.paired_difference([], [], resamples=10)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(1, 8, 0.0390625), (8, 1, 0.0390625), (0, 6, 0.03125), (5, 5, 1.0), (0, 0, 1.0), (5, 15, 0.04138947)],
)
def test_mcnemar(first, second, expected):
    # 2 (1 + 9) / 2^9, 2 / 2^6, and R's binom.test(5, 20)$p.value
    assert stats.mcnemar(first, second) == pytest.approx(expected, abs=1e-8)


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(ValueError, match="got -1 and 2"):
        stats.mcnemar(-1, 2)
