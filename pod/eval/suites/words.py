"""Text metrics that several scorers share.

They are the best score over references, the words of a text by SQuAD's rule, the F1 of two bags of words, and
ROUGE.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_BOTH_PUNCTUATIONS = str.maketrans("", "", string.punctuation + _CHINESE)
Metric = Callable[[str, str], float]
"""The score of an answer against a right answer."""


def best(metric: Metric, prediction: str, references: Iterable[str]) -> float:
    """The score of a prediction: the best over its references, 0 when there are none."""
    return max((float(metric(prediction, reference)) for reference in references), default=0.0)


def words(text: str) -> list[str]:
    """The words of a text without punctuation and (lower-case) articles; letter case stays."""
    return _ARTICLES.sub(" ", text.translate(_PUNCTUATION)).split()


def letters_zh(text: str) -> str:
    """A Chinese text in lower case, without English and Chinese punctuation and without blanks."""
    return "".join(text.lower().translate(_BOTH_PUNCTUATIONS).split())


def bag_f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of two bags of words or letters; 0 when they share none."""
    common = (Counter(found) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision = common / len(found)
    recall = common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """F1 over the bags of words, without case, punctuation and articles (SQuAD's rule)."""
    return bag_f1(words(prediction.lower()), words(reference.lower()))


@functools.cache
def rouge_scorer(*kinds: str, use_stemmer: bool = False) -> Any:
    """The scorer of the package rouge-score for `rouge1`, `rougeL` …"""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(kinds), use_stemmer=use_stemmer)
