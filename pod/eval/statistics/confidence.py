"""Means, shares and differences with 95 % intervals and p values, without resampling.

Samples that ask about one text are no more independent than the tokens of a text are. They form a *cluster*,
and clusters are counted instead of samples.

* Means of numbers without bounds get intervals from Student's t over clusters. Percentile bootstraps of a few
  sequences would cover 77 % where they say 95 %.
* Means of scores from 0 to 1, and paired differences of 0/1 samples, get score intervals. Their width is not
  zero at means of 0 and 1.
* Weighted means of several tasks join intervals of both kinds (MOVER: Zou and Donner, 2008; degrees of
  freedom after Satterthwaite).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

LEVEL = 0.95
_TAIL = (1 + LEVEL) / 2


@dataclass(frozen=True)
class Estimate:
    """A number and how sure it is.

    Attributes:
        low, high: 95 % interval; None where nothing can be said, as with a single cluster.
        p: two-sided probability of a value at least so large if the true one is 0; None without an interval.
        freedom: degrees of freedom of the interval; infinite = normal.
    """

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    freedom: float = math.inf

    @property
    def interval(self) -> list[float] | None:
        """``[low, high]``."""
        return None if self.low is None or self.high is None else [self.low, self.high]

    def mapped(self, change: Callable[[float], float]) -> "Estimate":
        """This estimate with ``change``, a rising function, applied to its value and interval.

        An example is ``exp`` of a mean of logarithms.
        """
        ends = [None if end is None else change(end) for end in (self.low, self.high)]
        return replace(self, value=change(self.value), low=ends[0], high=ends[1])


@lru_cache
def critical(freedom: float = math.inf) -> float:
    """Two-sided 95 % quantile of Student's t, or of the normal distribution where freedom is infinite."""
    return float(special.stdtrit(freedom, _TAIL) if math.isfinite(freedom) else special.ndtri(_TAIL))


def _p_of(ratio: float, freedom: float = math.inf) -> float:
    """The two-sided p value of a ratio of an estimate to its standard error."""
    tail = special.stdtr(freedom, -ratio) if math.isfinite(freedom) else special.ndtr(-ratio)
    return min(1.0, 2 * float(tail))


def mean(
    values: Sequence[float],
    counts: Sequence[int] | None = None,
    clusters: Sequence[Hashable] | None = None,
) -> Estimate:
    """``Σ values / Σ counts`` with Student's t over clusters (the linearised ratio; Cochran, 1977, §6.4).

    Args:
        values: the value of each sample, or the sum over its ``counts`` tokens (default: 1 each).
        clusters: the cluster that each sample belongs to (default: samples are independent).
    """
    sums, sizes = by_cluster(values, counts, clusters)
    number = len(sums)
    value = float(sums.sum() / sizes.sum())
    if number < 2:
        return Estimate(value)
    squares = float(np.square(sums - value * sizes).sum())
    error = math.sqrt(number / (number - 1) * squares) / float(sizes.sum())
    half = critical(number - 1) * error
    without_spread = error <= 1e-12 * abs(value)
    p = float(value == 0) if without_spread else _p_of(abs(value) / error, number - 1)
    return Estimate(value, value - half, value + half, p, number - 1)


def share(scores: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Estimate:
    """The mean of scores of 0 to 1, or the share of 0/1 scores that are 1, with its interval.

    The interval is Wilson's (1927), for as many 0/1 trials as the scores are worth (`_worth`). Scores outside
    0 to 1 get the t interval of `mean`.
    """
    if min(scores) < 0 or max(scores) > 1:
        return mean(scores, None, clusters)
    value = float(np.mean(scores))
    worth = _worth(np.asarray(scores, dtype=np.float64) - value, value * (1 - value), clusters)
    return Estimate(value, *wilson(value * worth, worth))


def _worth(residuals: np.ndarray, variance: float, clusters: Sequence[Hashable] | None) -> float:
    """The number of independent samples of this variance that would be as informative as these samples.

    It is the number of their clusters over the design effect (Kish, 1965). The effect is drawn towards 1 as
    if there were one more cluster with an effect of 1, because few clusters may look alike by chance: t
    intervals of scores that pile up at 0 or 1 cover 93 % where they say 95 %. One cluster counts as one
    trial. A cluster never counts for more than its samples would as independent ones.

    Args:
        residuals: the samples' scores minus their mean.
        variance: of one independent sample.
    """
    sums, _ = by_cluster(residuals, None, clusters)
    number = len(sums)
    if number == 1 or variance <= 0:
        return float(number)
    squares = max(float(np.square(sums).sum()), float(np.square(residuals).sum()))
    effect = number * squares / len(residuals) ** 2 / variance
    return max(1.0, number * (number + 1) / (number * effect + 1))


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion.

    It is sound at 0 and at 1, where the normal interval has width zero.
    """
    assert 0 <= successes <= trials and trials >= 1, f"{successes} of {trials}"
    rate = successes / trials
    z2 = critical() ** 2
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = math.sqrt(z2 * (rate * (1 - rate) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_share(
    own: Sequence[float], base: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate:
    """The difference of two shares on the same 0/1 samples.

    The interval is Tango's score interval (1998), and the p value is that of McNemar's exact test (1947).
    With clusters, both count as many samples as the clusters are worth (`_worth`), and the p value is that of
    the score test.
    """
    gaps = np.asarray(own, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    value = float(gaps.mean())
    trials = len(gaps)
    worth = _worth(gaps - value, float(np.square(gaps).mean() - value**2), clusters)
    scale = worth / trials
    gained = scale * float((gaps > 0).sum())
    lost = scale * float((gaps < 0).sum())
    low, high = tango(gained, lost, worth)
    if clusters is None:
        p = mcnemar(round(gained), round(lost))
    else:
        p = _p_of(abs(gained - lost) / math.sqrt(gained + lost)) if gained + lost else 1.0
    return Estimate(value, low, high, p)


def tango(gained: float, lost: float, trials: float) -> tuple[float, float]:
    """95 % score interval of the paired difference ``(gained - lost) / trials``.

    It holds all differences that a score test does not reject.
    """
    return -_tango_high(lost, gained, trials), _tango_high(gained, lost, trials)


def _tango_high(gained: float, lost: float, trials: float) -> float:
    """The upper end of Tango's interval.

    It is found by bisection between the estimate and 1: in this range a greater difference fits less well.
    """
    low, high = (gained - lost) / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        linear = -gained - lost + (2 * trials - gained + lost) * middle
        root = math.sqrt(max(0.0, linear**2 + 8 * trials * lost * middle * (1 - middle)))
        only_lost = (root - linear) / (4 * trials)  # likeliest share that only the base gets right
        variance = trials * (2 * only_lost + middle * (1 - middle))
        apart = trials * middle - (gained - lost)
        low, high = (middle, high) if apart**2 < critical() ** 2 * variance else (low, middle)
    return high


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p value: are two methods right equally often on the same 0/1 samples?

    Args:
        gained, lost: number of samples that only the one, and only the other, got right. Samples on which
            both agree do not matter.
    """
    return min(1.0, 2 * float(special.bdtr(min(gained, lost), gained + lost, 0.5)))


def paired_mean(
    own: Sequence[float], base: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Estimate:
    """The difference of two means of scores of 0 to 1 on the same samples.

    The interval is Student's t over the differences of samples, cut to -1 to 1. Where all samples are equal,
    it is the score interval of `paired_share`, whose width is not zero.
    """
    gaps = np.asarray(own, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    if not gaps.any():
        return paired_share(own, own, clusters)
    found = mean(gaps.tolist(), None, clusters)
    if found.low is None or found.high is None or not 0 <= min(*own, *base) <= max(*own, *base) <= 1:
        return found
    return replace(found, low=max(-1.0, found.low), high=min(1.0, found.high))


def weighted(parts: Iterable[tuple[float, Estimate]]) -> Estimate:
    """``Σ weight · estimate`` of independent estimates. It has no interval where one of them has none."""
    parts = list(parts)
    value = sum(weight * part.value for weight, part in parts)
    if any(part.low is None for _, part in parts):
        return Estimate(value)
    low, below = _joined([(w, part.value - (part.low or 0.0), part.freedom) for w, part in parts])
    high, above = _joined([(w, (part.high or 0.0) - part.value, part.freedom) for w, part in parts])
    freedom = min(below, above)
    half = low if value > 0 else high
    p = _p_of(abs(value) / half * critical(freedom), freedom) if half else float(value == 0)
    return Estimate(value, value - low, value + high, p, freedom)


def _joined(halves: list[tuple[float, float, float]]) -> tuple[float, float]:
    """The half width of a weighted sum on one side, and its degrees of freedom.

    Args:
        halves: ``(weight, half, freedom)`` of each estimate.
    """
    squares = [(weight * half / critical(freedom)) ** 2 for weight, half, freedom in halves]
    total = sum(squares)
    loose = sum(square**2 / freedom for square, (_, _, freedom) in zip(squares, halves, strict=True))
    freedom = total**2 / loose if loose else math.inf
    return critical(freedom) * math.sqrt(total), freedom


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for several comparisons (Holm, 1979), in the order given.

    If every adjusted value below a level is marked, the chance of even one false mark stays below the level.
    """
    order = np.argsort(p_values)
    adjusted = np.empty(len(p_values))
    steps = np.arange(len(order), 0, -1) * np.asarray(p_values)[order]
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return adjusted.tolist()


def clusters_of(samples: Sequence[Mapping[str, Any]]) -> list[Hashable] | None:
    """The cluster of each sample: its ``cluster``, else one of its own.

    Returns: None when no two samples share a cluster.
    """
    names: list[Hashable] = [sample.get("cluster") or (number,) for number, sample in enumerate(samples)]
    return names if len(set(names)) < len(names) else None


def by_cluster(
    values: Sequence[float] | np.ndarray, counts: Sequence[int] | None, clusters: Sequence[Hashable] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Sum of values and sum of counts of each cluster, in the order of first appearance."""
    values = np.asarray(values, dtype=np.float64)
    sizes = np.ones(len(values)) if counts is None else np.asarray(counts, dtype=np.float64)
    assert len(values) == len(sizes) == len(values if clusters is None else clusters) > 0, "they go together"
    if clusters is None:
        return values, sizes
    places = {name: place for place, name in enumerate(dict.fromkeys(clusters))}
    rows = np.asarray([places[name] for name in clusters], dtype=np.int64)
    return np.bincount(rows, weights=values), np.bincount(rows, weights=sizes)
