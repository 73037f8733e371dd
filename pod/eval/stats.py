"""Intervals and spreads. Everything is resampled over sequences, which are independent, never over the tokens of one sequence."""

import math
from collections.abc import Mapping, Sequence

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
        drawn = _resampled_means([sums], counts, resamples, seed)[0]
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
        drawn, base = _resampled_means([sums, base_sums], counts, resamples, seed)
        interval = [math.expm1(value) for value in np.quantile(drawn - base, [0.025, 0.975])]
    return {"change": math.expm1(mean_nll(sums, counts) - mean_nll(base_sums, counts)), "ci95": interval}


def mean_interval(values: Sequence[float], resamples: int, seed: int = 0) -> list[float] | None:
    """95 % percentile bootstrap interval of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    drawn = _resampled_means([values], [1] * len(values), resamples, seed)[0]
    return [float(value) for value in np.quantile(drawn, [0.025, 0.975])]


def paired_difference(
    values: Sequence[float],
    base_values: Sequence[float],
    resamples: int,
    seed: int = 0,
    strata: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict:
    """Difference of two methods' mean scores on the same samples, with a paired 95 % percentile bootstrap interval.

    strata: the task of each sample when the score is a mean over tasks; each task's samples are then drawn by themselves. weights: of
    each task in that mean (default: equal).
    Returns: {"difference", "ci95": [low, high] or None}; the interval is None unless every stratum has two samples.
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
    interval = None
    if min(len(rows) for rows in groups.values()) > 1:
        rng = np.random.default_rng(seed)
        drawn = [
            gaps[rows][rng.integers(0, len(rows), (resamples, len(rows)))].mean(axis=1)
            for rows in groups.values()
        ]
        interval = [float(value) for value in np.quantile(shares @ np.asarray(drawn), [0.025, 0.975])]
    means = np.asarray([gaps[rows].mean() for rows in groups.values()])
    return {"difference": float(shares @ means), "ci95": interval}


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


def wilson_interval(successes: int, trials: int) -> list[float]:
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
    columns: list[Sequence[float]], counts: Sequence[int], resamples: int, seed: int
) -> list[np.ndarray]:
    """Mean NLL of `resamples` draws of the sequences with replacement; the same draws for every column. Each [resamples]."""
    drawn = np.random.default_rng(seed).integers(0, len(counts), size=(resamples, len(counts)))
    tokens = np.asarray(counts)[drawn].sum(axis=1)
    return [np.asarray(column, dtype=np.float64)[drawn].sum(axis=1) / tokens for column in columns]
