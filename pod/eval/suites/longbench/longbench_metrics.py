"""The scorer of LongBench, by the rules of its `metrics.py` and `eval.py`.

Source: github.com/THUDM/LongBench, commit 2e00731, MIT. Every metric maps (prediction, reference) to 0..1. A
sample's score is the best over its references. Some rules look odd, but the published numbers depend on them;
a comment names each of them.
"""

import difflib
import logging
import re
from collections.abc import Sequence

from pod.eval.suites.words import bag_f1, letters_zh

# The package rouge finds a common subsequence by recursion, one frame a step. With more steps than these
# LongBench's eval.py runs out of stack, swallows the error and scores 0. This was measured with Python 3.11,
# whose limit is 1,000 frames. For Chinese texts the recursion begins one frame deeper.
RECURSION_STEPS = 990


def first_line(prediction: str) -> str:
    """The part of an answer to a few-shot prompt that is scored: its first line that is not empty.

    Few-shot prompts are those of trec, triviaqa, samsum and lsht. A line of spaces is not empty, because the
    official scorer strips line ends only.
    """
    return prediction.lstrip("\n").split("\n")[0]


def qa_f1_zh(prediction: str, reference: str) -> float:
    """F1 over the bags of jieba's words, without case, punctuation and white space."""
    return bag_f1(_words_zh(prediction), _words_zh(reference))


def _words_zh(text: str) -> list[str]:
    """jieba's words of a text, without case, punctuation and white space."""
    words = [letters_zh(word) for word in _cut(text)]
    return [word for word in words if word]


def rouge_l(prediction: str, reference: str, longest_walk: int = RECURSION_STEPS) -> float:
    """ROUGE-L F1 of the package rouge 1.0.1: summary level, over sets of words.

    Sentences are split at every full stop. Words are compared as they are (no stemming, case and punctuation
    count). An empty text scores 0.
    """
    said = _sentences(prediction)
    wanted = _sentences(reference)
    if not said or not wanted:
        return 0.0
    found: set[str] = set()
    for sentence in wanted:
        for candidate in said:
            common, walk = _common_subsequence(sentence, candidate)
            if walk > longest_walk:
                return 0.0
            found.update(common)
    precision = len(found) / len({word for sentence in said for word in sentence})
    recall = len(found) / len({word for sentence in wanted for word in sentence})
    return 2.0 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, reference: str) -> float:
    """`rouge_l` over jieba's words.

    A Chinese full stop does not end a sentence here, so that most texts are one sentence.
    """
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(reference)), RECURSION_STEPS - 1)


def code_similarity(prediction: str, reference: str) -> float:
    """Edit similarity (`fuzz_ratio`) of a line of code with the reference.

    The line is the first one that holds no back quote, `#` or `//`.
    """
    return fuzz_ratio(_first_code_line(prediction), reference) / 100


def code_similarity_levenshtein(prediction: str, reference: str) -> float:
    """`code_similarity` as the official scorer computes it when python-Levenshtein is installed, too."""
    return levenshtein_ratio(_first_code_line(prediction), reference) / 100


def count(prediction: str, reference: str) -> float:
    """The share of the prediction's numbers that equal the reference; 0 without a number."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """`count` with the number in the reference, which reads `Paragraph 7` or `段落7`."""
    return count(prediction, re.findall(r"(?:Paragraph |段落)(\d+)", reference)[0])


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / n when the prediction names n classes with the right one among them, else 0.

    A named class whose name is part of the right one's name does not count. The official loop removes such
    classes from the list while it walks through it, and so skips the class after each removed one. This loop
    does the same.
    """
    named = [name for name in classes if name in prediction]
    index = 0
    while index < len(named):
        if named[index] in reference and named[index] != reference:
            named.remove(named[index])
        index += 1
    return 1.0 / len(named) if reference in named else 0.0


def fuzz_ratio(left: str, right: str) -> int:
    """`fuzz.ratio` of fuzzywuzzy 0.18.0 alone, in percent: what LongBench's requirements install.

    It compares by the matching blocks of difflib. In references of 200 characters and more, the characters
    that difflib calls "popular" match nothing.
    """
    if left == right:
        return 100
    return round(100 * difflib.SequenceMatcher(None, left, right).ratio())


def levenshtein_ratio(left: str, right: str) -> int:
    """`fuzz.ratio` of fuzzywuzzy 0.18.0 with python-Levenshtein, in percent.

    This is the ratio of the best alignment without substitutions.

    It is never below `fuzz_ratio`. On 20,000 pairs of unrelated lines of code it is 5 points above it on
    average and 30 at most; on lines of 200 characters and more it is up to 98 points above. Which of the two
    a paper used is seldom said (github.com/THUDM/LongBench/issues/96).
    """
    from rapidfuzz.distance import Indel

    return round(100 * Indel.normalized_similarity(left, right))


def _first_code_line(text: str) -> str:
    lines = text.lstrip("\n").split("\n")
    return next((line for line in lines if "`" not in line and "#" not in line and "//" not in line), "")


def _cut(text: str) -> list[str]:
    import jieba

    jieba.setLogLevel(logging.WARNING)  # it announces its dictionary on stderr
    return jieba.lcut(text)


def _sentences(text: str) -> list[list[str]]:
    """Words by sentence. A sentence of white space is one empty word, as in the package."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(rows: list[str], columns: list[str]) -> tuple[list[str], int]:
    """A longest common subsequence, and the number of steps back through the table in which it is found.

    Several may be equally long, and which of them is found changes the union over sentences. So the steps are
    those of the package: a match, else up when that is strictly longer, else left.
    """
    table = [[0] * (len(columns) + 1)]
    for word in rows:
        above, row = table[-1], [0]
        for column, other in enumerate(columns):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        table.append(row)
    common = []
    steps = 0
    i = len(rows)
    j = len(columns)
    while i and j:
        if rows[i - 1] == columns[j - 1]:
            common.append(rows[i - 1])
            i -= 1
            j -= 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
        steps += 1
    return common, steps
