"""InfiniteBench's scorers, written after the official rules, their quirks included.

Source of the rules: github.com/OpenBMB/InfiniteBench (MIT), commit 88b3daa, src/compute_scores.py.

Every scorer takes a prediction and the row's answer and returns 0 to 1. One difference is deliberate: where
the official script would crash (a decimal number as the answer to a question for a whole one), the score
is 0.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from pod.eval.suites import words
from pod.eval.suites.words import bag_f1, best, letters_zh, rouge_scorer

_CHOICE_PREFIXES = ("answer is:", "answer:", "answer is", "option is")
_DEBUG_PREFIXES = ("answer is:", "is:", "answer:", "correct option is:")


def first_number(prediction: str, label: Any) -> float:
    """PassKey, NumberString: whether the first run of digits is the answer."""
    found = re.search(r"[0-9]+", prediction)
    return float((found.group() if found else "") == _first(label))


def word(prediction: str, label: Any) -> float:
    """KV: whether the value is one of the words."""
    return float(_first(label) in _words(prediction, "\n:\"'.,?!{}"))


def dialogue(prediction: str, label: Any) -> float:
    """En.Dia: whether the (upper-case) name is one of the words when these are put in upper case."""
    return float(_first(label) in [name.upper() for name in _words(prediction, "\n:\"'.,?!{}")])


def choice(prediction: str, label: Sequence[str]) -> float:
    """En.MC: whether the prediction chooses the right option.

    Its choice is its first character if that is one of A to D; else what follows "answer is:" and the like;
    else the first word that is a piece of "ABCD". A prediction that is the text of the option is right, too.

    Args:
        label: [text, letter] of the right option.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in label)
    if text in label:
        return 1.0
    text = _squeeze(text, "\n\"'.,?!{}")
    after = _after(text, _CHOICE_PREFIXES)
    if after is not None:
        return float(any(after.startswith(known) for known in label))
    # the substring test is the official one: words such as "AB" end the search, too
    first = next((found for found in text.split() if found in "ABCD"), None)
    return float(first in label)


def debug(prediction: str, label: Sequence[str]) -> float:
    """Code.Debug: whether the prediction chooses the right function.

    It must begin with the letter and a period or colon; or the letter or the function name must follow
    "answer is:" and the like.

    Args:
        label: [function name, letter] of the right function.
    """
    name = label[0]
    letter = label[1]
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    after = _after(_squeeze(text, ""), _DEBUG_PREFIXES)
    return float(after is not None and after.startswith((letter, name)))


def code_run(prediction: str, label: Any) -> float:
    """Code.Run: whether the last word is the right number."""
    said = _words(prediction, "\n.`'\":")
    try:
        return float(bool(said) and int(said[-1]) == _first(label))
    except ValueError:
        return 0.0


def math_find(prediction: str, label: Any) -> float:
    """Math.Find: whether the first number, whole or decimal, is the answer."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    return float(found is not None and float(found.group()) == _first(label))


def qa_f1(prediction: str, labels: Any) -> float:
    """En.QA: F1 of the bags of words without case, punctuation and articles; the best of the answers."""
    return best(words.qa_f1, prediction, _listed(labels))


def qa_f1_zh(prediction: str, labels: Any) -> float:
    """Zh.QA: F1 of the bags of characters without punctuation and blanks; the best of the answers."""
    return best(lambda *texts: bag_f1(*map(letters_zh, texts)), prediction, _listed(labels))


def rouge_lsum(prediction: str, labels: Sequence[str]) -> float:
    """En.Sum: ROUGE-Lsum F1 of the package rouge_score without stemming; the best of the answers.

    This is what the `evaluate` library computes.
    """
    return rouge_scorer("rougeLsum").score_multi(_listed(labels), prediction)["rougeLsum"].fmeasure


SCORERS: dict[str, Callable[[str, Any], float]] = {
    "passkey": first_number,
    "number_string": first_number,
    "kv_retrieval": word,
    "longbook_sum_eng": rouge_lsum,
    "longbook_choice_eng": choice,
    "longbook_qa_eng": qa_f1,
    "longbook_qa_chn": qa_f1_zh,
    "math_find": math_find,
    "code_run": code_run,
    "code_debug": debug,
    "longdialogue_qa_eng": dialogue,
}


def _first(label: Any) -> Any:
    return label[0] if isinstance(label, list) else label


def _listed(labels: Any) -> list[str]:
    return [labels] if isinstance(labels, str) else list(labels)


def _words(text: str, marks: str) -> list[str]:
    return text.translate(str.maketrans(dict.fromkeys(marks, " "))).split()


def _squeeze(text: str, marks: str) -> str:
    """A text with `marks` replaced by blanks, and runs of blanks by one."""
    return re.sub(" {2,}", " ", text.translate(str.maketrans(dict.fromkeys(marks, " "))))


def _after(text: str, prefixes: Sequence[str]) -> str | None:
    """The text behind a prefix and the one character after it, for the first of the prefixes that occurs.

    Returns: None if none of them occurs.
    """
    for prefix in prefixes:
        place = text.find(prefix)
        if place >= 0:
            return text[place + len(prefix) + 1 :]
    return None
