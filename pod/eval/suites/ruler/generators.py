"""Build the samples of RULER's tasks at a size.

The *size* of a sample is the number of things that fill its prompt: words of essays, lines of noise, distinct
words, coded words, or documents. `pod.eval.suites.lengths.largest_fit` finds the size that fits a length.
Samples are what the official generators build, but each is drawn from a random number generator of its own.

Source of the rules: github.com/NVIDIA/RULER (Apache-2.0), scripts/data/synthetic/*.py, commit c3f5e3b. The
code is written anew.
"""

import functools
import itertools
import math
import random
import re
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pod.eval.suites.lengths import count_tokens, largest_fit
from pod.eval.suites.ruler import corpora
from pod.eval.suites.ruler.ruler_prompts import NEEDLE, NOISE, PROMPTS, RulerTask

_DEPTHS = [round(100 * place / 39) for place in range(40)]  # percent, official: 40 depths from 0 to 100
_SMALL_LENGTH = 4096  # below it the official lists of words repeat words less often
_EXAMPLE_TOKENS = 500  # limit of variable tracking's one example


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        prompt: the whole prompt, with its question in the last line.
        prefix: the beginning of the answer, which the model continues.
        answers: texts that the answer must contain.
    """

    prompt: str
    prefix: str
    answers: list[str]


@dataclass(frozen=True)
class Needles:
    """Needle in a haystack: keys with values between other lines.

    The other lines are noise, sentences of essays, or needles of other keys.

    Attributes:
        haystack: what the other lines are: noise, essay or needle.
        key_kind, value_kind: words, numbers (7 digits) or uuids.
        num_keys: number of keys.
        num_values: number of values of each key, each in a needle of its own.
        num_queries: number of keys whose values are asked for.
    """

    haystack: str
    key_kind: str
    value_kind: str
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    @property
    def smallest(self) -> int:
        """See `Generator`."""
        return 40 if self.haystack == "essay" else self.num_keys * self.num_values + 1

    def sample(self, rng: random.Random, index: int, size: int) -> Sample:
        keys = [_random_text(rng, self.key_kind) for _ in range(self.num_keys)]
        values = [[_random_text(rng, self.value_kind) for _ in range(self.num_values)] for _ in keys]
        needles = [
            self._needle(key, value) for key, group in zip(keys, values, strict=True) for value in group
        ]
        rng.shuffle(needles)
        context = (
            self._essay(rng, size, needles) if self.haystack == "essay" else self._lines(rng, size, needles)
        )
        asked = rng.sample(range(self.num_keys), self.num_queries)
        query = _enumerate([keys[place] for place in asked])
        kind, prompt = self.value_kind, PROMPTS["niah"]
        if self.num_queries * self.num_values == 1:
            kind = kind[:-1]
            prompt = PROMPTS["niah_one"]
        return Sample(
            prompt.text.format(kind=kind, context=context, query=query),
            prompt.prefix.format(kind=kind, query=query),
            [value for place in asked for value in values[place]],
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _essay(self, rng: random.Random, size: int, needles: list[str]) -> str:
        words = corpora.essay_words()
        text = " ".join((words * -(-size // len(words)))[:size])
        sentences = re.split(r"(?<=[.!?])\s+", text.strip())
        places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(_DEPTHS, len(needles)))
        parts = []
        for start, end, needle in zip([0, *places], places, needles, strict=False):
            parts += [*sentences[start:end], needle]
        return " ".join([*parts, *sentences[places[-1] :]])

    def _lines(self, rng: random.Random, size: int, needles: list[str]) -> str:
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [
                self._needle(_random_text(rng, self.key_kind), _random_text(rng, self.value_kind))
                for _ in range(size)
            ]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


class VariableTracking:
    """A chain of assignments between lines of noise, behind one worked example of at most 500 tokens."""

    def __init__(self, tokenizer: Any, length: int, num_hops: int = 4):
        self.num_hops, self.smallest = num_hops, num_hops + 1
        self.example_size = largest_fit(
            lambda size: count_tokens(tokenizer, self._example(random.Random(0), size)),
            min(_EXAMPLE_TOKENS, length // 2),
            smallest=self.smallest,
        )

    def sample(self, rng: random.Random, index: int, size: int) -> Sample:
        example = self._example(rng, self.example_size)
        prompt, prefix, names = self._question(rng, size, letters=5)
        return Sample(f"{example}\n{prompt}", prefix, names)

    def _example(self, rng: random.Random, size: int) -> str:
        prompt, prefix, names = self._question(rng, size, letters=3)
        return f"{prompt}{prefix} {' '.join(names)}\n"

    def _question(self, rng: random.Random, size: int, letters: int) -> tuple[str, str, list[str]]:
        names = _distinct(self.num_hops + 1, lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))
        value = str(rng.randint(10000, 99999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
        lines = [NOISE] * size
        for offset, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
            lines.insert(place + offset, chain[offset])
        context = "\n".join(lines).replace(". \n", ".\n")
        prompt = PROMPTS["vt"]
        prefix = prompt.prefix.format(query=value, number=self.num_hops + 1)
        return prompt.text.format(context=context, query=value), prefix, names


class CommonWords:
    """A numbered list in which ten words occur more often than the others, behind one worked example."""

    smallest, num_common = 20, 10

    def __init__(self, length: int):
        small = length < _SMALL_LENGTH
        self.example, self.repeats = ((20, 3, 1), (6, 1)) if small else ((40, 10, 3), (30, 3))

    def sample(self, rng: random.Random, index: int, size: int) -> Sample:
        shown, answer = self._list(rng, *self.example)
        listed, common = self._list(rng, size, *self.repeats)
        prompt = PROMPTS["cwe"]
        example = f"{prompt.text.format(context=shown)}{prompt.prefix} {_numbered(answer)}"
        return Sample(f"{example}\n{prompt.text.format(context=listed)}", prompt.prefix, common)

    def _list(self, rng: random.Random, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
        words = corpora.vocabulary()
        if size <= len(words):
            chosen = rng.sample(words, size)
        else:
            # more words than the list has: the rest are pairs, so that every one stays readable
            chosen = [*words, *_distinct(size - len(words), lambda: _pair(rng))]
            rng.shuffle(chosen)
        common = chosen[: self.num_common]
        others = chosen[self.num_common :]
        shuffled = common * often + others * seldom
        rng.shuffle(shuffled)
        return _numbered(shuffled), common


class FrequentWords:
    """Words of random letters whose counts fall as 1/rank².

    The most frequent word is noise ('...'). The next three are the answer.
    """

    smallest, letters = 60, 6

    def __init__(self, room: int):
        self.num_words = max(8, room // 50)

    def sample(self, rng: random.Random, index: int, size: int) -> Sample:
        words = _distinct(
            self.num_words, lambda: "".join(rng.choices(string.ascii_lowercase, k=self.letters))
        )
        words[0] = "..."
        norm = math.pi**2 / 6  # zeta(2)
        text = [word for rank, word in enumerate(words, start=1) for _ in range(int(size / rank**2 / norm))]
        rng.shuffle(text)
        prompt = PROMPTS["fwe"]
        return Sample(prompt.text.format(context=" ".join(text)), prompt.prefix, words[1:4])


class Documents:
    """Questions of SQuAD or HotpotQA about documents, most of which do not hold the answer.

    A size is the number of documents. The documents that hold the answer are always among them. Then the
    documents that the data set gives with the question are added, then any others, and all are shuffled.
    (The official generator always takes all ten documents of a HotpotQA question, about 1,400 tokens, so that
    no prompt fits a shorter length.)
    """

    def __init__(self, source: str):
        self.questions, self.documents = corpora.questions(source)
        self.smallest = 1

    def sample(self, rng: random.Random, index: int, size: int) -> Sample:
        question = self.questions[index]
        size = max(size, len(question.documents))
        chosen = [*question.documents, *_some(rng, question.related, size - len(question.documents))]
        known = set(chosen)
        others = [number for number in range(len(self.documents)) if number not in known]
        chosen += _some(rng, others, size - len(chosen))
        texts = [self.documents[number] for number in chosen]
        while len(texts) < size:
            texts += self.documents[: size - len(texts)]
        rng.shuffle(texts)
        context = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(texts, start=1))
        prompt = PROMPTS["qa"]
        return Sample(
            prompt.text.format(context=context, query=question.text), prompt.prefix, question.answers
        )


Generator = Needles | VariableTracking | CommonWords | FrequentWords | Documents
"""What builds the samples of a task.

Each class has `smallest`, the least size of a sample, and `sample(rng, index, size)`, which builds the sample
`index` at a size. Equal arguments and random states give equal samples.
"""


def make_generator(task: RulerTask, tokenizer: Any, length: int, room: int) -> Generator:
    """The generator of a task.

    Args:
        length: tokens of prompt and answer together.
        room: tokens of the prompt, at most.
    """
    make: dict[str, Callable[..., Generator]] = {
        "niah": Needles,
        "vt": functools.partial(VariableTracking, tokenizer, length),
        "cwe": functools.partial(CommonWords, length),
        "fwe": functools.partial(FrequentWords, room),
        "qa": Documents,
    }
    return make[task.prompt](**task.options)


def _some(rng: random.Random, items: list[int], count: int) -> list[int]:
    return rng.sample(items, max(0, min(count, len(items))))


def _random_text(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return _pair(rng)
    assert kind == "uuids", kind
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _pair(rng: random.Random) -> str:
    """An adjective and a noun, as RULER's keys are."""
    return f"{rng.choice(corpora.words('adjectives'))}-{rng.choice(corpora.words('nouns'))}"


def _distinct(count: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))


def _enumerate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
