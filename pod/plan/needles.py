"""Prompts that ask for a number which stands far back in the text, to find heads that retrieve.

Text seldom needs exact retrieval, so costs on text hardly see what a few heads are for. Half of the prompts
are text with several such facts; the other half repeat one passage again and again, with the facts among
the copies, as in passkey tests. Both kinds are needed: among copies, other heads bring the fact back.

A prompt holds a whole text, because a head that brings a fact back from 700 tokens away need not do so from
2,000. Example: three plans for SmolLM2-135M at a fifth of the bytes find 26, 50 and 76 % of the passkeys of
2,048 tokens. Their divergence from the dense model, in nats per token of an answer, is alike on prompts of
828 tokens: 0.020, 0.018 and 0.021. On prompts of 1,816 tokens it is 0.060, 0.047 and 0.027.

The facts, the questions and their words are not those of any task of `pod eval`.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FACTS = (
    ("\nNote: the access code for the {word} is {number}.\n", "The access code for the {word} is"),
    ("\nThe locker number of {word} is {number}, as agreed.\n", "The locker number of {word} is"),
    ("\nPlease write down that {word} costs {number} dollars.\n", "How much is {word}? {word} costs"),
    ("\nThe secret of {word}: {number}.\n", "Tell the secret of {word}. The secret of {word}:"),
)
"""A fact, and the beginning of its answer."""
WORDS = (
    "harbor", "violin", "lantern", "meadow", "copper", "falcon", "orchid", "granite", "velvet", "compass",
    "marble", "willow", "ember", "glacier", "saffron", "beacon", "cobalt", "thistle", "canyon", "juniper",
)  # fmt: skip
FACTS_OF_A_PROMPT = 10
"""Most facts of a prompt. They are asked for one after the other, in another order."""
PASSAGES = (20, 40, 80)
"""Tokens of a passage that is repeated."""


class Prompt(NamedTuple):
    """A prompt with its answers.

    Attributes:
        input_ids: ``[n]``, text, questions and answers.
        answers: ``[a]``, the positions whose next token belongs to an answer.
    """

    input_ids: Tensor
    answers: Tensor


def needle_prompts(
    tokenizer: Any,
    texts: Sequence[Tensor],
    count: int,
    windows: tuple[int, int],
    longest: int,
    seed: int = 0,
) -> list[Prompt]:
    """Make ``count`` prompts, by turns of text and of a passage that is repeated.

    Args:
        texts: token ids ``[n]`` each. A prompt has as many tokens as one of them, and facts, questions and
            answers. It begins with the tokenizer's first token where the text does.
        windows: first and recent tokens that a window keeps. Facts stand behind the first ones, and as far
            from the end of the text as a window is long.
        longest: tokens that the model can read; longer texts are cut.

    Raises:
        ValueError: the texts are too short for facts so far back.
    """
    chance = random.Random(seed)
    made = []
    for number in range(count):
        text = texts[number % len(texts)].tolist()
        words = chance.sample(WORDS, FACTS_OF_A_PROMPT)
        repeats = number % 2 == 1
        wording = FACTS[(number // 2 + 2 * repeats) % len(FACTS)]
        facts = [_Fact.of(tokenizer, *wording, word, chance) for word in words]
        first = text[:1] if text[0] == tokenizer.bos_token_id else []
        while len(facts) > 1 and 4 * (longest - sum(fact.size for fact in facts)) <= 5 * sum(windows):
            facts.pop()  # a model that reads few tokens
        room = longest - len(first) - sum(fact.size for fact in facts)
        body = _body(text[len(first) :], facts, windows, room, repeats, chance)
        chance.shuffle(facts)
        made.append(_prompt(first + body, facts))
    return made


def _body(
    text: list[int],
    facts: Sequence["_Fact"],
    windows: tuple[int, int],
    room: int,
    repeats: bool,
    chance: random.Random,
) -> list[int]:
    """The tokens of a text, or of one passage of it again and again, with facts among them.

    Args:
        windows: see `needle_prompts`.
        room: tokens that the model can read beside the facts, questions and answers.
        repeats: whether one passage is repeated. Facts then stand in front of a copy.

    Raises:
        ValueError: the text is too short for facts so far back.
    """
    distance = sum(windows)
    length = min(len(text), room)
    if length <= distance:
        raise ValueError(
            f"a text of {len(text)} tokens, of which the model can read {max(0, room)} beside questions and "
            f"answers, is too short for facts that stand {distance} tokens back: raise "
            "explore.sequence_length, lower the windows, or set explore.retrieval_sequences=0"
        )
    size = min(chance.choice(PASSAGES), length) if repeats else length
    begin = chance.randrange(len(text) - size + 1)
    body = (text[begin : begin + size] * (length // size + 1))[:length]
    places = range(0, length - distance + 1, size if repeats else 1)
    behind = [place for place in places if place >= windows[0]] or [length - distance]
    chosen = sorted((chance.choice(behind) for _ in facts), reverse=True)
    for place, fact in zip(chosen, facts, strict=True):
        body[place:place] = fact.stated
    return body


class _Fact(NamedTuple):
    """The tokens of a fact, of the question for it, and of the answer."""

    stated: list[int]
    question: list[int]
    answer: list[int]

    @classmethod
    def of(cls, tokenizer: Any, stated: str, question: str, word: str, chance: random.Random) -> "_Fact":
        """A fact about a word, with a number of four to six digits."""
        number = "".join(chance.choice("0123456789") for _ in range(chance.choice((4, 5, 6))))
        asked = "\n" + question.format(word=word)
        texts = stated.format(word=word, number=number), asked, f"{asked} {number}"
        fact, alone, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        pairs = zip(alone, whole, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return cls(fact, whole[:same], whole[same:])

    @property
    def size(self) -> int:
        return sum(map(len, self))


def _prompt(body: list[int], asked: Sequence[_Fact]) -> Prompt:
    """The text, then questions with their answers."""
    ids = list(body)
    answers: list[int] = []
    for fact in asked:
        ids += fact.question
        answers += range(len(ids) - 1, len(ids) - 1 + len(fact.answer))
        ids += fact.answer
    return Prompt(torch.tensor(ids), torch.tensor(answers))
