"""Exact match and F1 of one CoQA answer, by the rules of the official evaluate-v1.0.py (stanfordnlp.github.io/coqa; rules of SQuAD 2.0).

lm-eval 0.4.13 takes these two functions from `transformers.data.metrics`, which transformers 5 no longer has: its task `coqa` cannot be
imported. The code here is our own.
"""

from collections.abc import Callable

from pod.eval.suites.words import bag_f1, words

Metric = Callable[[str, str], float]


def exact(reference: str, answer: str) -> float:
    """1 when both have the same words in the same order."""
    return float(words(reference.lower()) == words(answer.lower()))


def f1(reference: str, answer: str) -> float:
    """F1 of the words; 1 or 0 when one of them has none."""
    wanted, given = words(reference.lower()), words(answer.lower())
    if not wanted or not given:
        return float(wanted == given)
    return bag_f1(given, wanted)


def over_references(metric: Metric, references: list[str], answer: str) -> float:
    """The mean, over every reference left out in turn, of the best score against the others; a single reference stands for itself.

    So an answer is measured as each human answer is: against the other humans.
    """
    if len(references) == 1:
        return metric(references[0], answer)
    scores = [metric(reference, answer) for reference in references]
    return sum(max(scores[:out] + scores[out + 1 :]) for out in range(len(scores))) / len(scores)


def different(references: list[str]) -> list[str]:
    """The references without repetitions (letter case aside), as lm-eval takes them; officially all count."""
    found: dict[str, str] = {}
    for reference in references:
        found.setdefault(reference.lower(), reference)
    return list(found.values())
