"""Compute the estimate of a payload, and compare one method with another.

Only this file decides whether a method is better, worse, or neither.

A *payload* is a task's result for a method: ``kind`` (``nll``, ``binary`` or ``score``), ``metric``,
``samples``, and for groups ``subtasks`` with their weights.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pod.eval.statistics import confidence
from pod.eval.statistics.confidence import Estimate

Payload = dict[str, Any]
Mark = Literal["", "better", "worse"]
CHANCE = 0.05
"""A comparison is marked as better or worse if its adjusted p value (`Against.adjusted`) is below this."""


@dataclass(frozen=True)
class Against:
    """A method compared with its base on the samples that both answered, with equal prompts.

    Attributes:
        base: label of the base.
        relative: the estimate is the relative change of perplexity; else it is the difference of the scores
            (0 to 1).
        common: number of samples that are compared.
        unpaired: number of samples of either side whose id the other side does not have.
        left_out: number of common sample ids that were not compared, by reason.
        gained, lost: number of 0/1 samples that only the method got right, and that only the base got right.
        adjusted: the p value adjusted for all comparisons of the page (Holm); None where there is none.
    """

    base: str
    relative: bool
    estimate: Estimate
    higher_is_better: bool
    common: int
    unpaired: int
    left_out: dict[str, int]
    gained: int | None = None
    lost: int | None = None
    adjusted: float | None = None

    @property
    def delta(self) -> float:
        """The change: relative to the base's perplexity, or in points of 0 to 1."""
        return self.estimate.value

    @property
    def mark(self) -> Mark:
        """`better` or `worse` if the adjusted p value is below `CHANCE`, else an empty text."""
        if self.adjusted is None or self.adjusted >= CHANCE or not self.delta:
            return ""
        return "better" if (self.delta > 0) == self.higher_is_better else "worse"


def perplexity_of(sums: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    """Perplexity of sequences from their summed NLL (nats) and scored tokens.

    Returns: tokens, sequences, mean_nll, perplexity, ci95 (None for one sequence).
    """
    found = confidence.mean(sums, counts)
    return {
        "tokens": int(sum(counts)),
        "sequences": len(sums),
        "mean_nll": found.value,
        "perplexity": math.exp(found.value),
        "ci95": found.mapped(math.exp).interval,
    }


def perplexity_change(sums: Sequence[float], base_sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """Relative change of perplexity on the same tokens: 0.05 = 5 % above the base.

    It is taken over the differences within sequences, so that it does not matter how hard a sequence is.
    """
    gaps = [own - base for own, base in zip(sums, base_sums, strict=True)]
    return confidence.mean(gaps, counts).mapped(math.expm1)


def estimate_of(payload: Payload) -> Estimate | None:
    """The value of a payload with its interval, from its samples; None without any."""
    samples = payload["samples"]
    if not samples:
        return None
    if payload["kind"] == "nll":
        sums = [s["score"] for s in samples]
        counts = [s["tokens"] for s in samples]
        return confidence.mean(sums, counts).mapped(math.exp)
    return _over_strata(
        payload, samples, lambda rows: confidence.share(_scores(rows), confidence.clusters_of(rows))
    )


def compare(own: Payload, base: Payload, label: str) -> Against | None:
    """Compare one payload with another on their common samples.

    Args:
        label: of the base.
    Returns: None when they have different kinds, metrics or filters, or share no samples.
    """
    if any(own[key] != base[key] for key in ("kind", "metric")) or _filter(own) != _filter(base):
        return None
    pairs, left_out = paired_samples(own, base)
    if not pairs:
        return None
    mine = [pair[0] for pair in pairs]
    theirs = [pair[1] for pair in pairs]
    gaps = [a - b for a, b in zip(_scores(mine), _scores(theirs), strict=True)]
    binary = own["kind"] == "binary"
    relative = own["kind"] == "nll"
    if relative:
        estimate = perplexity_change(_scores(mine), _scores(theirs), [sample["tokens"] for sample in mine])
    else:
        of = confidence.paired_share if binary else confidence.paired_mean
        answers = {sample["id"]: sample["score"] for sample in theirs}

        def differ(rows: list[dict]) -> Estimate:
            return of(_scores(rows), [answers[row["id"]] for row in rows], confidence.clusters_of(rows))

        estimate = _over_strata(own, mine, differ)
    return Against(
        base=label,
        relative=relative,
        estimate=estimate,
        higher_is_better=own["higher_is_better"],
        common=len(pairs),
        # every sample whose id the other side does not have
        unpaired=len(own["samples"]) + len(base["samples"]) - 2 * (len(pairs) + sum(left_out.values())),
        left_out=left_out,
        gained=sum(gap > 0 for gap in gaps) if binary else None,
        lost=sum(gap < 0 for gap in gaps) if binary else None,
    )


def judged(found: dict[Any, Against | None]) -> dict[Any, Against | None]:
    """The comparisons of a page, each with its p value adjusted for all of them (`confidence.holm`)."""
    known = {key: one for key, one in found.items() if one is not None and one.estimate.p is not None}
    values = confidence.holm([one.estimate.p or 0.0 for one in known.values()])
    pairs = zip(known.items(), values, strict=True)
    return found | {key: replace(against, adjusted=value) for (key, against), value in pairs}


def paired_samples(own: Payload, base: Payload) -> tuple[list[tuple[dict, dict]], dict[str, int]]:
    """Pairs of samples with the same id and the same prompt.

    Returns: the pairs, and the number of common ids that were left out, by reason.
    """
    others = {sample["id"]: sample for sample in base["samples"]}
    pairs, left_out = [], Counter[str]()
    for sample in own["samples"]:
        other = others.get(sample["id"])
        if other is None:
            continue
        if len({sample.get("prompt_hash"), other.get("prompt_hash")} - {None}) > 1:
            left_out["another prompt"] += 1
        elif own["kind"] == "nll" and sample["tokens"] != other["tokens"]:
            left_out["another number of scored tokens"] += 1
        else:
            pairs.append((sample, other))
    return pairs, dict(left_out)


def _over_strata(payload: Payload, samples: list[dict], of: Any) -> Estimate:
    """The estimate `of(samples)`; for a group, the weighted mean of the estimates of its tasks."""
    names = [sample.get("subtask") for sample in samples]
    if any(name is None for name in names):
        return of(samples)
    tasks: dict[str, list[dict]] = {}
    for name, sample in zip(names, samples, strict=True):
        tasks.setdefault(str(name), []).append(sample)
    subtasks = payload.get("subtasks") or {}
    weights = {name: subtasks.get(name, {}).get("weight") for name in tasks}
    if any(weight is None for weight in weights.values()):
        weights = dict.fromkeys(tasks, 1.0)
    total = sum(weights.values())
    return confidence.weighted((weights[name] / total, of(rows)) for name, rows in tasks.items())


def _scores(samples: Sequence[dict]) -> list[float]:
    return [sample["score"] for sample in samples]


def _filter(payload: Payload) -> Any:
    """How answers were read before they were scored (gsm8k: strict-match or flexible-extract)."""
    return (payload.get("settings") or {}).get("filter")
