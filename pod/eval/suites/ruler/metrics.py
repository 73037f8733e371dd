"""RULER's scorers. Source of the rules: github.com/NVIDIA/RULER (Apache-2.0), scripts/eval/{evaluate.py,synthetic/constants.py}."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """A prediction without blanks at its ends, control characters as line ends."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand in the prediction, whatever their case (0 to 1)."""
    text = clean(prediction).lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1.0 when any of the answers stands in the prediction, whatever its case, else 0.0."""
    text = clean(prediction).lower()
    return float(any(answer.lower() in text for answer in answers))
