"""Exact match and F1 of one CoQA answer, by the rules of the official evaluate-v1.0.py (stanfordnlp.github.io/coqa; rules of SQuAD 2.0).

lm-eval 0.4.13 takes these two functions from `transformers.data.metrics`, which transformers 5 no longer has: its task `coqa` cannot be
imported. The code here is our own.
"""

import re
import string
from collections import Counter
from collections.abc import Callable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
Metric = Callable[[str, str], float]


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact(reference: str, answer: str) -> float:
    """1 when both have the same words in the same order."""
    return float(words(reference) == words(answer))


def f1(reference: str, answer: str) -> float:
    """F1 of the words; 1 or 0 when one of them has none."""
    wanted, given = words(reference), words(answer)
    if not wanted or not given:
        return float(wanted == given)
    same = sum((Counter(wanted) & Counter(given)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(given), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


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
