"""Intervals and spreads. Everything is resampled over sequences, which are independent, never over the tokens of one sequence.

Samples that ask about one text are no more independent than its tokens are: they are a *cluster*, which is drawn whole.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

_Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=1) / math.sqrt(len(values)))


def mean_nll(sums: Sequence[float], counts: Sequence[int]) -> float:
    """Token-weighted mean negative log-likelihood (nats per token) of per-sequence sums and token counts."""
    return float(np.sum(np.asarray(sums, dtype=np.float64)) / np.sum(np.asarray(counts)))


def perplexity_summary(sums: Sequence[float], counts: Sequence[int], resamples: int, seed: int = 0) -> dict:
    """Mean NLL, its standard error, perplexity and its 95 % bootstrap interval.

    Args:
        sums: summed NLL of each sequence (nats); counts: scored tokens of each sequence.
    Returns:
        {"tokens", "sequences", "mean_nll", "standard_error", "perplexity", "ci95": [low, high] or None}; the interval and
        the error are None for a single sequence.
    """
    means = np.asarray(sums, dtype=np.float64) / np.asarray(counts)
    interval = None
    if len(means) > 1:
        drawn = _resampled_means([sums], counts, resamples, np.random.default_rng(seed))[0]
        interval = [math.exp(value) for value in np.quantile(drawn, [0.025, 0.975])]
    return {
        "tokens": int(np.sum(counts)),
        "sequences": len(means),
        "mean_nll": mean_nll(sums, counts),
        "standard_error": standard_error(list(means)),
        "perplexity": math.exp(mean_nll(sums, counts)),
        "ci95": interval,
    }


def paired_change(
    sums: Sequence[float], base_sums: Sequence[float], counts: Sequence[int], resamples: int, seed: int = 0
) -> dict:
    """Relative change of perplexity against a base method on the same tokens, with a paired 95 % bootstrap interval.

    Pairing resamples the sequences once for both methods, so that easy and hard sequences cancel.
    Returns: {"change", "ci95": [low, high] or None}; 0.05 = the perplexity is 5 % above the base.
    Raises: ValueError when the two do not cover the same sequences.
    """
    if not len(sums) == len(base_sums) == len(counts):
        raise ValueError(f"paired comparison needs the same sequences, got {len(sums)} and {len(base_sums)}")
    interval = None
    if len(sums) > 1:
        drawn, base = _resampled_means([sums, base_sums], counts, resamples, np.random.default_rng(seed))
        interval = [math.expm1(value) for value in np.quantile(drawn - base, [0.025, 0.975])]
    return {"change": math.expm1(mean_nll(sums, counts) - mean_nll(base_sums, counts)), "ci95": interval}


def mean_interval(
    values: Sequence[float], resamples: int, seed: int = 0, clusters: Sequence[Hashable] | None = None
) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean; None for fewer than two independent values.

    clusters: what each value belongs to (default: values are independent); clusters are drawn whole.
    """
    return weighted_interval([(1.0, values, clusters)], resamples, seed)


def paired_difference(
    values: Sequence[float],
    base_values: Sequence[float],
    resamples: int,
    seed: int = 0,
    strata: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
    clusters: Sequence[Hashable] | None = None,
) -> dict:
    """Difference of two methods' mean scores on the same samples, with a paired 95 % percentile bootstrap interval.

    strata: the task of each sample when the score is a mean over tasks; each task's samples are then drawn by themselves. weights: of
    each task in that mean (default: equal). clusters: what each sample belongs to (default: samples are independent).
    Returns: {"difference", "ci95": [low, high] or None}; the interval is None unless every stratum has two clusters.
    Raises: ValueError when the two do not cover the same samples, or none.
    """
    if len(values) != len(base_values) or not len(values):
        raise ValueError(
            f"paired comparison needs the same samples, got {len(values)} and {len(base_values)}"
        )
    gaps = np.asarray(values, dtype=np.float64) - np.asarray(base_values, dtype=np.float64)
    groups = _rows(strata if strata is not None else [""] * len(gaps))
    shares = np.asarray([1.0 if weights is None else weights[name] for name in groups])
    shares = shares / shares.sum()
    parts = [
        (share, gaps[rows], None if clusters is None else [clusters[row] for row in rows])
        for share, rows in zip(shares, groups.values(), strict=True)
    ]
    means = np.asarray([gaps[rows].mean() for rows in groups.values()])
    return {"difference": float(shares @ means), "ci95": weighted_interval(parts, resamples, seed)}


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p value of McNemar's test (1947): are two methods right equally often on the same 0/1 samples?

    Args: samples that only the first, only the second got right; samples on which both agree say nothing. The exact binomial form:
    the smaller count against Binomial(sum, 1/2), both tails.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f"counts of samples cannot be negative, got {only_first} and {only_second}")
    trials, fewer = only_first + only_second, min(only_first, only_second)
    below = sum(math.comb(trials, count) for count in range(fewer + 1))
    return min(1.0, 2 * below / 2**trials)


def _rows(strata: Sequence[str]) -> dict[str, np.ndarray]:
    """Row numbers of each stratum, in the order of first appearance."""
    rows: dict[str, list[int]] = {}
    for number, name in enumerate(strata):
        rows.setdefault(name, []).append(number)
    return {name: np.asarray(numbers) for name, numbers in rows.items()}


def weighted_interval(
    parts: Sequence[tuple[float, Sequence[float] | np.ndarray, Sequence[Hashable] | None]],
    resamples: int,
    seed: int = 0,
) -> list[float] | None:
    """95 % percentile bootstrap interval of a weighted mean of means, each of whose values are drawn by themselves.

    parts: (weight, values, their clusters or None); None when a part has fewer than two clusters.
    """
    rng, total = np.random.default_rng(seed), np.zeros(resamples)
    for weight, values, clusters in parts:
        sums, counts = _by_cluster(values, clusters)
        if len(sums) < 2:
            return None
        total += weight * _resampled_means([sums], counts, resamples, rng)[0]
    return [float(value) for value in np.quantile(total, [0.025, 0.975])]


def clusters_of(samples: Sequence[Mapping[str, Any]]) -> list[Hashable] | None:
    """What each sample belongs to: its `cluster`, else itself; None when no two samples share one."""
    names: list[Hashable] = [sample.get("cluster") or (number,) for number, sample in enumerate(samples)]
    return names if len(set(names)) < len(names) else None


def binary_interval(scores: Sequence[float], clusters: Sequence[Hashable] | None = None) -> list[float]:
    """95 % Wilson interval of a share of 0/1 scores, with the number of trials that clusters are worth.

    That number is n over the design effect (Kish 1965): the variance of the share from the clusters' sums of residuals over p(1 - p)/n.
    Never more than n; the number of clusters where no variance can be seen: all scores are the same, or there is one cluster.
    """
    trials, share = len(scores), sum(scores) / len(scores)
    residuals, _ = _by_cluster([score - share for score in scores], clusters)
    number = len(residuals)
    if number == trials:
        return wilson_interval(sum(scores), trials)
    if number == 1 or share in (0, 1):
        return wilson_interval(share * number, number)
    variance = float(np.sum(residuals**2)) / trials**2 * number / (number - 1)
    effect = variance * trials / (share * (1 - share))  # about 0 where every cluster has the same share
    worth = max(1.0, trials / max(1.0, effect))
    return wilson_interval(share * worth, worth)


def wilson_interval(successes: float, trials: float) -> list[float]:
    """95 % Wilson score interval of a proportion (Wilson 1927): sound at 0 and at 1, where the normal one has width zero."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(
            f"a proportion needs 0 <= successes <= trials and trials >= 1, got {successes} of {trials}"
        )
    share, z2 = successes / trials, _Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return [max(0.0, centre - half), min(1.0, centre + half)]


def spread(values: Sequence[float]) -> dict:
    """Median, minimum, maximum and count of repeated measurements."""
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "max": float(np.max(values)),
        "repeats": len(values),
    }


def _resampled_means(
    columns: Sequence[Sequence[float] | np.ndarray],
    counts: Sequence[int] | np.ndarray,
    resamples: int,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Means over `resamples` draws of sequences or clusters with replacement, each of its sums over its counts; the same draws for
    every column of sums. Each [resamples]."""
    drawn = rng.integers(0, len(counts), size=(resamples, len(counts)))
    total = np.asarray(counts)[drawn].sum(axis=1)
    return [np.asarray(column, dtype=np.float64)[drawn].sum(axis=1) / total for column in columns]


def _by_cluster(
    values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sum and count of the values of each cluster, in the order of first appearance."""
    values = np.asarray(values, dtype=np.float64)
    if clusters is None:
        return values, np.ones(len(values), dtype=np.int64)
    if len(clusters) != len(values):
        raise ValueError(f"{len(values)} values belong to {len(clusters)} clusters: name one for each")
    places = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    rows = np.asarray([places[name] for name in clusters], dtype=np.int64)
    return np.bincount(rows, weights=values), np.bincount(rows)
