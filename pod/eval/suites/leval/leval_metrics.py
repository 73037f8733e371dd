"""Scores of one L-Eval answer, 0 to 1, by the official rules.

The rules, with all their oddities, are those of Evaluation/{auto_eval,em,f1,rouge}.py of
github.com/OpenLMLab/LEval (cd34b05). The code is our own (theirs is under GPL-3.0).
"""

import re

from pod.eval.suites.words import rouge_scorer, words

LETTERS = "ABCD"
SUBSET_CREDIT = 0.25
FACT_MARK = "[fact:"
_OPTION = re.compile(r"\s*[A-Z](?=[\s.)])")
_CODE_PHRASES = ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed")


def exact_match(answer: str, target: str) -> float:
    """Whether an answer meets its target: 1 or 0; for targets of option letters also 0.25.

    An answer of option letters gets 0.25 when it has only right letters, but not all. If both texts are
    numbers, they must be equal. Else the answer must contain the target, both in lower case without blanks.
    """
    wanted = " ".join(words(target))
    if set(wanted) <= set(LETTERS):
        given = " ".join(words(answer))
        if given == wanted:
            return 1.0
        return SUBSET_CREDIT if set(given) <= set(wanted) else 0.0
    try:
        return float(float(answer) == float(target))
    except ValueError:
        return float(_squeezed(target) in _squeezed(answer))


def _squeezed(text: str) -> str:
    return text.lower().replace(" ", "")


def target_letters(target: str) -> str:
    """The letters of the right options from a reference such as `(B) Their …` or `ABD`."""
    return re.sub(f"[^{LETTERS}]", "", target.split()[0]) or "A"


def one_letter(answer: str) -> str:
    """The option that an answer names: its first A, B, C or D.

    An answer without one counts as a guess (A), an empty answer is `None` (a text).
    """
    if not answer.strip():
        return "None"
    if answer in LETTERS:  # a piece of "ABCD", so "BC" stays two letters: the official rule
        return answer
    return next((letter for letter in answer if letter in LETTERS), "A")


def several_letters(answer: str) -> str:
    """The options that an answer names, sorted (Coursera).

    They are the leading letters of the answer if there are several; else its leading letter and all letters
    before a blank, period or bracket; else its first run of the letters A to D. An answer without one counts
    as a guess (A), an empty answer is `None` (a text).
    """
    if not answer.strip():
        return "None"
    if answer in LETTERS:
        return answer
    head = _leading_letters(answer)
    if len(head) > 1:
        return "".join(sorted(set(head)))
    rest = answer[len(head) :].partition("Question")[0]
    found = set(head + " ".join(_OPTION.findall(rest)).strip()) & set(LETTERS)
    if not found:
        start = next((at for at, letter in enumerate(rest) if letter in LETTERS), len(rest))
        return _leading_letters(rest[start:]) or "A"
    return "".join(sorted(found))


def _leading_letters(text: str) -> str:
    return text[: len(text) - len(text.lstrip(LETTERS))]


def number(text: str) -> str:
    """The digits of the word after `The answer is`; decimals are cut off.

    Without that phrase they are the digits of the last word with a digit in the first paragraph.
    """
    match = re.search(r"The answer is (\S+)", text)
    if match:
        word = match[1]
    else:
        parts = text.partition("\n\n")[0].split(" ")
        word = next((word for word in reversed(parts) if any(map(str.isdigit, word))), "")
    return "".join(filter(str.isdigit, word.partition(".")[0]))


def code_text(text: str) -> str:
    """Program output without the differences that do not count: white space, commas, quotes, `.0`."""
    text = re.sub(r"\s+", " ", text)
    for sign in (",", "'", "\\", ".0"):
        text = text.replace(sign, "")
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")


def code_output(answer: str, target: str) -> str:
    """The part of an answer that names the program's output: at most three words more than the target has.

    They are the first words after `the final output`; without that phrase, the last words of the answer.
    """
    most = len(target.split()) + 3
    answer = code_text(answer)
    for phrase in _CODE_PHRASES:
        answer = answer.replace(phrase, "")
    _, mark, tail = answer.rpartition("the final output")
    return " ".join(re.split(r"\s+", tail)[:most] if mark else re.split(r"\s+", tail)[-most:])


def judgement(answer: str) -> str:
    """`true` or `false`, whichever occurs first in a word of the answer; `<error>` if neither does."""
    for word in answer.lower().partition(FACT_MARK)[0].split():
        for value in ("true", "false"):
            if value in word:
                return value
    return "<error>"


def judgement_target(target: str, part: str) -> str:
    """One part of a reference such as `True [fact: False]`.

    Args:
        part: `loyalty` (to the document: `true` in the example) or `fact` (of the real world: `false`).
    """
    loyalty, _, fact = target.lower().partition(FACT_MARK)
    return loyalty.strip() if part == "loyalty" else fact[:-1].strip()


def rouge(answer: str, target: str) -> dict[str, float]:
    """rouge1, rouge2 and rougeL (F-measure, no stemming) by the package rouge-score, as officially."""
    scores = rouge_scorer("rouge1", "rouge2", "rougeL").score(target, answer)
    return {name: float(score.fmeasure) for name, score in scores.items()}
