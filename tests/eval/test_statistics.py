"""Statistics against values by hand, published values, and simulations of what it promises."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize
from scipy.stats import beta

from pod.eval.statistics import comparison, confidence
from pod.eval.suites.task_base import is_side_by_side, make_options
from pod.eval.tasks.niah import Niah
from pod.recipe import load_recipe

T1 = 12.706204736  # two-sided 95 % of Student's t with 1 degree of freedom
T3 = 3.182446305  # two-sided 95 % of Student's t with 3 degrees of freedom
TEXTS = ["a", "a", "b", "b", "c", "c", "d", "d"]  # four texts, two questions each


# -- means ---------------------------------------------------------------------------------------------------


def test_mean_of_four_by_hand():
    found = confidence.mean([1.0, 2.0, 4.0, 5.0])
    error = math.sqrt((4 + 1 + 1 + 4) / 3 / 4)
    assert found.value == 3.0 and found.freedom == 3
    assert found.interval == pytest.approx([3 - T3 * error, 3 + T3 * error])
    assert found.p == pytest.approx(0.0462051)  # t = 3.2863


def test_perplexity_is_weighted_by_tokens():
    found = comparison.perplexity_of([2.0, 9.0], [2, 3])
    assert found["mean_nll"] == pytest.approx(11 / 5) and found["perplexity"] == pytest.approx(math.exp(2.2))
    assert (found["tokens"], found["sequences"]) == (5, 2)
    residual = 2.0 - 2.2 * 2  # and its opposite
    half = T1 * math.sqrt(2 * 2 * residual**2) / 5
    assert found["ci95"] == pytest.approx([math.exp(2.2 - half), math.exp(2.2 + half)])


def test_a_single_sequence_has_no_interval():
    found = comparison.perplexity_of([2.0], [2])
    assert found["ci95"] is None


def test_change_of_perplexity_ignores_differences_between_sequences():
    base = [5.0, 50.0, 20.0, 90.0]
    found = comparison.perplexity_change([x + 10 * math.log(1.1) for x in base], base, [10] * 4)
    assert found.value == pytest.approx(0.1) and found.interval == pytest.approx([0.1, 0.1])
    assert found.p < 1e-6
    assert comparison.perplexity_change(base, base, [10] * 4).p == 1.0


def test_changes_of_other_sequences_are_refused():
    with pytest.raises(ValueError, match="is shorter than"):
        comparison.perplexity_change([1.0, 2.0], [1.0], [1, 1])


def test_questions_about_one_text_count_as_one_when_they_agree():
    values = [0.9, 0.9, 0.1, 0.1, 0.5, 0.5, 0.4, 0.4]
    assert confidence.mean(values, None, TEXTS) == confidence.mean(values[::2])
    scores = [1, 1, 0, 0, 1, 1, 0, 0]
    assert confidence.share(scores, TEXTS) == confidence.share(scores[::2])
    apart = confidence.share(scores)
    assert apart.high - apart.low < confidence.share(scores, TEXTS).high - confidence.share(scores, TEXTS).low


def test_what_clusters_are_worth_by_hand():
    """Ten texts of four questions; a design effect of 1 counts as one text more."""
    texts = [text for text in range(10) for _ in range(4)]
    alike = confidence.share(
        [text % 2 for text in texts], texts
    )  # all right or all wrong: a text is one trial
    assert alike.interval == pytest.approx(list(confidence.wilson(5, 10)), abs=1e-6)
    mixed = confidence.share(
        [0, 1] * 20, texts
    )  # every text half right: no text says more than its questions
    worth = 10 * 11 / (10 / 4 + 1)
    assert mixed.interval == pytest.approx(list(confidence.wilson(worth / 2, worth)), abs=1e-6)
    samples = [{"id": str(i), "score": text % 2, "cluster": f"t{text}"} for i, text in enumerate(texts)]
    assert comparison.estimate_of({"kind": "binary", "samples": samples}).interval == alike.interval


def test_what_scores_are_worth_by_hand():
    """Four scores of 0.25 and 0.75: a quarter of the variance of 0/1."""
    found, worth = confidence.share([0.25, 0.75, 0.75, 0.25]), 4 * 5 / (4 / 4 + 1)
    assert found.interval == pytest.approx(list(confidence.wilson(worth / 2, worth)))
    assert found.interval == pytest.approx(
        confidence.share([0.25, 0.75, 0.75, 0.25] * 2, [*"abcdabcd"]).interval
    )


def test_scores_on_another_scale_have_the_interval_of_a_mean():
    assert confidence.share([31.0, 12.5, 80.0]) == confidence.mean([31.0, 12.5, 80.0])
    assert confidence.share([-0.5, 0.5]) == confidence.mean([-0.5, 0.5])


def test_one_text_is_one_trial_and_no_mean():
    assert confidence.share([1, 0, 1], ["t"] * 3).interval == pytest.approx(list(confidence.wilson(2 / 3, 1)))
    assert confidence.mean([1.0, 0.0, 1.0], None, ["t"] * 3).interval is None


def test_lists_that_do_not_fit_are_refused():
    for arguments in (([1.0], [1, 2]), ([1.0], None, ["a", "b"]), ([], None)):
        with pytest.raises(AssertionError, match="go together"):
            confidence.mean(*arguments)


# -- shares --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(8, 10, [0.4901625, 0.9433178]), (0, 10, [0.0, 0.2775328]), (10, 10, [0.7224672, 1.0])],
)
def test_wilson(successes, trials, expected):
    """R's prop.test(8, 10, correct=FALSE)."""
    assert confidence.wilson(successes, trials) == pytest.approx(expected, abs=1e-6)


def test_wilson_refuses_impossible_counts():
    with pytest.raises(AssertionError, match="3 of 2"):
        confidence.wilson(3, 2)


def test_scores_that_are_all_0_or_all_1_still_have_an_interval():
    assert confidence.share([0.0] * 10).interval == pytest.approx([0.0, 0.2775328], abs=1e-6)
    assert confidence.share([1.0] * 10).interval == pytest.approx([0.7224672, 1.0], abs=1e-6)
    low, high = confidence.share([0.0, 0.0, 0.0, 0.6]).interval
    assert 0.0 < low < 0.15 < high < 1.0


def naive_tango(gained, lost, n):
    """Both ends by the score equation itself, the nuisance share by numerical likelihood."""
    z = 1.959963984540054

    def statistic(delta):
        def minus_log(q):
            parts = ((gained, q + delta), (lost, q), (n - gained - lost, 1 - 2 * q - delta))
            return -sum(k * math.log(max(p, 1e-300)) for k, p in parts if k)

        bounds = max(0.0, -delta), (1 - delta) / 2
        q = optimize.minimize_scalar(minus_log, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        return (gained - lost - n * delta) / math.sqrt(max(1e-300, n * (2 * q + delta * (1 - delta))))

    value = (gained - lost) / n
    ends = []
    for sign, end in ((1, -1 + 1e-9), (-1, 1 - 1e-9)):
        ends.append(optimize.brentq(lambda d, s=sign: statistic(d) - s * z, min(value, end), max(value, end)))
    return ends


@pytest.mark.parametrize("counts", [(9, 2, 30), (2, 9, 30), (1, 1, 10), (12, 3, 100), (5, 1, 6)])
def test_tango_solves_the_score_equation(counts):
    assert confidence.tango(*counts) == pytest.approx(naive_tango(*counts), abs=1e-5)


def test_tango_without_disagreement():
    """± z² / (n + z²)."""
    z2 = confidence.critical() ** 2
    assert confidence.tango(0, 0, 20) == pytest.approx([-z2 / (20 + z2), z2 / (20 + z2)])


@pytest.mark.parametrize(
    ("gained", "lost", "expected"),
    [(1, 8, 0.0390625), (8, 1, 0.0390625), (0, 6, 0.03125), (5, 5, 1.0), (0, 0, 1.0), (5, 15, 0.04138947)],
)
def test_mcnemar(gained, lost, expected):
    """2 (1 + 9) / 2^9, 2 / 2^6, and R's binom.test(5, 20)$p.value."""
    assert confidence.mcnemar(gained, lost) == pytest.approx(expected, abs=1e-8)


def test_paired_scores_without_a_gap_are_not_sure_of_it():
    found = confidence.paired_mean([0.3] * 10, [0.3] * 10)
    assert found.value == 0 and found.p == 1.0
    assert found.interval == pytest.approx(confidence.tango(0, 0, 10))


def test_changes_of_scores_stay_between_all_and_nothing():
    assert confidence.paired_mean([0.0, 0.3], [1.0, 0.9]).low == -1.0
    assert confidence.paired_mean([0.0, 0.3], [1.0, 9.0]).low < -10.0  # another scale
    assert confidence.paired_mean([0.2], [0.9]).interval is None


# -- several tasks, several comparisons ------------------------------------------------------


def test_weighted_means_of_equal_parts_by_hand():
    part = confidence.Estimate(0.5, 0.3, 0.6, None, math.inf)
    found = confidence.weighted([(0.5, part), (0.5, part)])
    assert found.value == 0.5
    assert found.interval == pytest.approx([0.5 - 0.2 / math.sqrt(2), 0.5 + 0.1 / math.sqrt(2)])
    t = confidence.mean([1.0, 2.0, 4.0, 5.0])
    twice = confidence.weighted([(0.5, t), (0.5, t)])
    assert twice.freedom == pytest.approx(6)  # Satterthwaite: equal variances add their degrees of freedom
    half = (t.high - t.value) / T3 * confidence.critical(6) / math.sqrt(2)
    assert twice.interval == pytest.approx([3 - half, 3 + half])
    assert confidence.weighted([(0.5, t), (0.5, confidence.Estimate(1.0))]).interval is None


def test_one_part_alone_is_itself():
    t = confidence.mean([1.0, 2.0, 4.0, 5.0])
    alone = confidence.weighted([(1.0, t)])
    assert alone.interval == pytest.approx(t.interval) and alone.p == pytest.approx(t.p)
    down = confidence.mean([-1.0, -2.0, -4.0, -5.0])
    assert confidence.weighted([(1.0, down)]).p == pytest.approx(down.p)


def test_p_of_a_mean_looks_towards_zero():
    """The half of the interval between the value and 0 says how far away 0 is."""
    up = confidence.weighted([(1.0, confidence.Estimate(0.2, 0.1, 0.9))])
    down = confidence.weighted([(1.0, confidence.Estimate(-0.2, -0.9, -0.1))])
    assert up.p == down.p == pytest.approx(2 * 4.4e-5, rel=0.02)  # z = 3.92


def test_holm_by_hand():
    assert confidence.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert confidence.holm([0.9, 0.8]) == [1.0, 1.0] and confidence.holm([]) == []


def payload(scores, kind="binary", higher_is_better=True):
    samples = [{"id": str(i), "score": score} for i, score in enumerate(scores)]
    return {"kind": kind, "metric": "m", "higher_is_better": higher_is_better, "samples": samples}


def test_a_group_counts_its_tasks_by_their_weights():
    rows = [
        {"id": f"{task}{i}", "score": score, "subtask": task}
        for task, scores in (("a", [1.0, 1.0]), ("b", [0.0, 1.0]))
        for i, score in enumerate(scores)
    ]
    group = {"kind": "score", "samples": rows, "subtasks": {"a": {"weight": 3}, "b": {"weight": 1}}}
    found = comparison.estimate_of(group)
    assert found is not None and found.value == pytest.approx(3 / 4 * 1 + 1 / 4 * 0.5)


def test_marks_hold_for_the_page():
    """p = 0.031 is a mark alone, and none beside one more comparison.

    Losses of what is better low are gains.
    """
    own, base = payload([0] * 6 + [1] * 4), payload([1] * 10)
    found = comparison.compare(own, base, "full")
    assert found.mark == "" and found.adjusted is None, "not judged yet"
    assert comparison.judged({1: found})[1].mark == "worse"
    both = comparison.judged({1: found, 2: found, 3: None})
    assert both[1].adjusted == pytest.approx(0.0625) and both[1].mark == "" and both[3] is None
    low = comparison.compare(payload([0] * 6 + [1] * 4, higher_is_better=False), base, "full")
    assert comparison.judged({1: low})[1].mark == "better"
    assert comparison.judged({1: comparison.compare(base, base, "full")})[1].mark == ""


# -- promises ------------------------------------------------------------------------------------------------

SIZES = [4, 6, 8, 10, 12, 16, 20, 30, 32, 40, 50]
"""Of every recipe but those of papers, which have more."""
CLUSTERS = [(4, 5), (10, 5), (20, 10), (30, 3), (60, 4)]  # texts, questions about each
PAIRS = [(0.5, 0.5), (0.8, 0.6), (0.95, 0.5), (0.3, 0.7), (0.9, 0.9)]


def coverage(estimate, cases, rounds=400):
    """The share of 95 % intervals that hold the truth, the mean over (draw, truth).

    draw: a generator of chance → arguments.
    """
    rng, hits = np.random.default_rng(0), 0
    for draw, truth in cases:
        for _ in range(rounds):
            found = estimate(*draw(rng))
            hits += found.low - 1e-9 <= truth <= found.high + 1e-9
    return hits / rounds / len(cases)


def holds(found, few=False):
    """few: so few 0/1 samples or texts that whatever covers rare cases covers the others too often."""
    assert 0.93 <= found <= (0.995 if few else 0.97), found


def answers(rng, number, *shares):
    """0/1 samples of several methods; half of them are equally hard for all."""
    common = rng.random(number)
    drawn = (np.where(rng.random(number) < 0.5, common, rng.random(number)) < share for share in shares)
    return tuple(one.astype(float).tolist() for one in drawn)


@functools.cache
def difficulties(share, alike):
    """Chances of texts with this mean, the hardest first."""
    spread = 1 / alike - 1
    return beta.ppf((np.arange(2000) + 0.5) / 2000, share * spread, (1 - share) * spread)


def questions(rng, texts, each, shares, items=1, alike=0.3):
    """Scores of methods with these shares on questions about texts of unlike difficulty.

    Also returns the questions' texts. A score is how many of some items are right (1: 0/1).
    """
    level, text = rng.integers(2000, size=texts), np.repeat(np.arange(texts), each)
    chances = [difficulties(share, alike)[level[text]] for share in shares]
    return (*((rng.binomial(items, one) / items).tolist() for one in chances), text.tolist())


def graded(rng, number):
    """Scores as F1 gives them: many of 0, some of 1, others between; their mean is 0.34."""
    kind = rng.random(number)
    return np.where(kind < 0.3, 0.0, np.where(kind < 0.4, 1.0, rng.beta(2, 3, number))).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", sorted(Path(__file__).parents[2].glob("configs/*.yaml")), ids=lambda file: file.stem
)
def test_sizes_of_recipes_are_simulated(file):
    """Texts of perplexity, prompts of passkey and niah, samples of a task of lm-eval."""
    args = load_recipe(file).eval
    needles = make_options(Niah, args.task_options.get("niah", {}))
    found = {
        "perplexity": args.text_sequences,
        "passkey": len(args.passkey_lengths) * len(args.passkey_depths) * args.passkey_samples,
        "niah": len(needles.lengths) * len(needles.depths) * needles.samples,
    }
    asked = [found.get(task, args.limit) for task in args.tasks if not is_side_by_side(task)]
    smoke = {1, 2} if file.stem == "demo_tiny" else set[int]()
    assert {number for number in asked if number is not None} <= {*SIZES} | smoke


@pytest.mark.slow
@pytest.mark.parametrize("texts", SIZES)
def test_means_of_texts_and_changes_of_perplexity_cover(texts):
    drawn = [lambda r: r.normal(3.0, 0.5, texts), lambda r: r.gamma(6, 0.5, texts)]
    holds(coverage(confidence.mean, [(lambda r, d=d: (d(r).tolist(),), 3.0) for d in drawn], 1500))
    base, counts = [50.0] * texts, [10] * texts

    def changed(rng):
        return (rng.gamma(6, 0.1, texts) + base).tolist(), base, counts

    holds(coverage(comparison.perplexity_change, [(changed, math.expm1(0.06))], 1500))


@pytest.mark.slow
@pytest.mark.parametrize("number", SIZES)
def test_shares_cover_on_average_over_shares(number):
    shares = np.linspace(0.05, 0.95, 10)
    holds(coverage(confidence.share, [(lambda r, s=s: answers(r, number, s), s) for s in shares]))


@pytest.mark.slow
@pytest.mark.parametrize("number", SIZES)
def test_scores_cover(number):
    """Of three and five items, as RULER's, and as F1 gives them."""
    cases = [
        (lambda r, s=s, i=i: (questions(r, number, 1, [s], i)[0],), s)
        for s in (0.05, 0.1, 0.3, 0.5, 0.8, 0.95)
        for i in (3, 5)
    ]
    holds(coverage(confidence.share, [*cases, (lambda r: (graded(r, number),), 0.34)]))


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "each"), CLUSTERS)
@pytest.mark.parametrize("items", [1, 5])
def test_shares_and_scores_of_clustered_questions_cover(texts, each, items):
    cases = [
        (lambda r, s=s, a=a: questions(r, texts, each, [s], items, a), s)
        for s in (0.1, 0.3, 0.6, 0.8)
        for a in (0.05, 0.3)
    ]
    holds(coverage(confidence.share, cases), few=texts < 10)


@pytest.mark.slow
@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize(("estimate", "items"), [(confidence.paired_share, 1), (confidence.paired_mean, 5)])
def test_paired_shares_and_scores_cover(number, estimate, items):
    cases = [(lambda r, p=p: questions(r, number, 1, p, items)[:2], p[0] - p[1]) for p in PAIRS]
    holds(coverage(estimate, cases), few=number < (12 if items == 1 else 6))


@pytest.mark.slow
@pytest.mark.parametrize(("texts", "each"), CLUSTERS)
@pytest.mark.parametrize(("estimate", "items"), [(confidence.paired_share, 1), (confidence.paired_mean, 5)])
def test_paired_shares_and_scores_of_clustered_questions_cover(texts, each, estimate, items):
    cases = [(lambda r, p=p: questions(r, texts, each, p, items), p[0] - p[1]) for p in PAIRS]
    holds(coverage(estimate, cases), few=items == 1 and texts < 30)


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "number"), [(4, 12), (9, 10), (13, 20)])
def test_means_of_tasks_and_of_their_changes_cover(tasks, number):
    """Half of the tasks in 0/1, half in scores."""
    items, shares = [1 if task % 2 else 5 for task in range(tasks)], np.linspace(0.1, 0.9, tasks)

    def drawn(rng):
        return [questions(rng, number, 1, [s, 0.8 * s], i) for s, i in zip(shares, items, strict=True)]

    def mean_of(*found):
        return confidence.weighted((1 / tasks, confidence.share(own)) for own, _, _ in found)

    def change_of(*found):
        of = (confidence.paired_mean, confidence.paired_share)
        return confidence.weighted(
            (1 / tasks, of[i == 1](a, b)) for (a, b, _), i in zip(found, items, strict=True)
        )

    holds(coverage(mean_of, [(drawn, shares.mean())], 1000))
    holds(coverage(change_of, [(drawn, 0.2 * shares.mean())], 1000), few=number < 50)


@pytest.mark.slow
def test_false_marks_of_a_page_are_rare():
    """200 pages of 40 comparisons in which nothing differs: at most one page in twelve has a mark."""
    rng, pages = np.random.default_rng(0), 0
    for _ in range(200):
        found = {}
        for key in range(40):
            own, base = answers(rng, 60, 0.6, 0.6)
            found[key] = comparison.compare(payload(own), payload(base), "full")
        pages += any(one.mark for one in comparison.judged(found).values())
    assert pages / 200 <= 1 / 12
