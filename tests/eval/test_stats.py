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


TEXTS = ["a", "a", "b", "b", "c", "c", "d", "d"]  # four texts, two questions each


def test_questions_about_one_text_count_as_one_when_they_agree():
    values = [0.9, 0.9, 0.1, 0.1, 0.5, 0.5, 0.4, 0.4]
    together = stats.mean_interval(values, 500, clusters=TEXTS)
    assert together == pytest.approx(stats.mean_interval(values[::2], 500))
    apart = stats.mean_interval(values, 500)
    assert together[1] - together[0] > 1.2 * (apart[1] - apart[0])
    base = [0.0] * 8
    assert stats.paired_difference(values, base, 500, clusters=TEXTS)["ci95"] == pytest.approx(
        stats.paired_difference(values[::2], base[::2], 500)["ci95"]
    )
    weighted = stats.weighted_interval([(0.5, values, TEXTS), (0.5, values[::2], None)], 500)
    assert weighted == pytest.approx(
        stats.weighted_interval([(0.5, values[::2], None), (0.5, values[::2], None)], 500)
    )


def test_strata_draw_their_own_clusters():
    """Task a: one text, which has no interval; with two texts, one gains 1 and the other nothing."""
    strata = ["a"] * 4 + ["b"] * 4
    values = [1.0, 1.0, 0.0, 0.0] * 2
    one = stats.paired_difference(values, [0.0] * 8, 50, strata=strata, clusters=["t"] * 4 + TEXTS[:4])
    assert one["ci95"] is None
    two = stats.paired_difference(values, [0.0] * 8, 4000, strata=strata, clusters=TEXTS)
    assert two["ci95"] == pytest.approx([0.0, 1.0])


def test_texts_of_many_questions_weigh_more():
    """Three questions of text a are right, the one of b is wrong: a resample of b alone is 0, of both 3/4."""
    low, high = stats.mean_interval([1.0, 1.0, 1.0, 0.0], 4000, clusters=["a", "a", "a", "b"])
    assert (low, high) == (0.0, 1.0)
    drawn = stats._resampled_means([[3.0, 0.0]], [3, 1], 2000, np.random.default_rng(0))[0]
    assert set(drawn.round(6)) == {0.0, 0.75, 1.0}


def test_share_of_agreeing_questions_is_worth_its_texts():
    scores = [1, 1, 0, 0, 1, 1, 1, 1]
    assert stats.binary_interval(scores, TEXTS) == pytest.approx(stats.wilson_interval(0.75 * 3, 3))  # k - 1
    assert stats.binary_interval(scores) == stats.binary_interval(scores, list(range(8)))
    assert stats.binary_interval(scores) == stats.wilson_interval(6, 8)
    assert stats.binary_interval([1] * 8, TEXTS) == stats.wilson_interval(4, 4)
    # one right and one wrong about every text: no more than independent samples are worth
    assert stats.binary_interval([1, 0] * 4, TEXTS) == pytest.approx(stats.wilson_interval(4, 8))
    assert stats.binary_interval([1, 0, 0] * 4, list("aaabbbcccddd")) == pytest.approx(
        stats.wilson_interval(4, 12)
    )
    # sums of residuals -1/3, -1/3, 2/3: by the formula worth 8, but no more than the six that there are
    assert stats.binary_interval([1, 0, 1, 0, 1, 1], list("aabbcc")) == pytest.approx(
        stats.wilson_interval(4, 6)
    )
    for scores in (
        [1, 0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [0, 1, 0, 0, 0, 0, 0],
    ):  # one text, whatever is rounded
        share = sum(scores) / len(scores)
        assert stats.binary_interval(scores, ["a"] * len(scores)) == pytest.approx(
            stats.wilson_interval(share, 1)
        )


def test_the_interval_over_texts_covers_the_truth_where_samples_alone_do_not():
    rng = np.random.default_rng(0)
    hits = {"texts": 0, "samples": 0}
    for _ in range(300):
        right = np.repeat(rng.random(30) < 0.6, 6)
        scores = np.where(rng.random(180) < 0.9, right, ~right).astype(float).tolist()
        truth = 0.6 * 0.9 + 0.4 * 0.1
        texts = np.repeat(np.arange(30), 6).tolist()
        for name, found in (
            ("texts", stats.binary_interval(scores, texts)),
            ("samples", stats.binary_interval(scores)),
        ):
            hits[name] += found[0] <= truth <= found[1]
    assert hits["texts"] / 300 == pytest.approx(0.95, abs=0.03) and hits["samples"] / 300 < 0.75


def test_clusters_of_samples():
    assert stats.clusters_of([{"cluster": "a"}, {"cluster": "b"}, {}]) is None
    named = stats.clusters_of([{"cluster": "a"}, {}, {"cluster": "a"}, {}])
    assert named[0] == named[2] and len(set(named)) == 3
    with pytest.raises(ValueError, match="3 values belong to 2 clusters"):
        stats.mean_interval([1.0, 2.0, 3.0], 10, clusters=["a", "b"])
