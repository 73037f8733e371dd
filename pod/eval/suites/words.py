"""What several scorers share: the words of a text by SQuAD's rule, the F1 of two bags of words, ROUGE."""

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
_BOTH_PUNCTUATIONS = str.maketrans("", "", string.punctuation + _CHINESE)


def words(text: str) -> list[str]:
    """The words without punctuation and (lower-case) articles; letter case stays."""
    return _ARTICLES.sub(" ", text.translate(_PUNCTUATION)).split()


def letters_zh(text: str) -> str:
    """Lower case, no punctuation of either language, no blanks."""
    return "".join(text.lower().translate(_BOTH_PUNCTUATIONS).split())


def bag_f1(found: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of two bags of words or letters; 0 when they share none."""
    common = (Counter(found) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


@functools.cache
def rouge_scorer(*kinds: str, use_stemmer: bool = False) -> Any:
    """The scorer of the package rouge-score for `rouge1`, `rougeL` …"""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(kinds), use_stemmer=use_stemmer)
