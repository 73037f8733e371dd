"""Prompts that ask for a number which stands far back in the text, to find heads that retrieve.

Text seldom needs exact retrieval, so costs on text hardly see what a few heads are for. Half of the prompts
are text with several such facts; the other half repeat one passage again and again, with the facts among
the copies, as in passkey tests. Both kinds are needed: among copies, other heads bring the fact back.

The facts, the questions and their words are not those of any task of `pod eval`.
"""

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
"""Facts of a prompt. They are asked for one after the other, in another order."""
PASSAGES = (20, 40, 80)
"""Tokens of a passage that is repeated."""
SHORTEST = 512
"""Tokens of the shortest prompts, without facts and questions. Longer ones choose no better heads."""


class Prompt(NamedTuple):
    """A prompt with its answers.

    Attributes:
        input_ids: ``[n]``, text, questions and answers.
        answers: ``[a]``, the positions whose next token belongs to an answer.
    """

    input_ids: Tensor
    answers: Tensor


def needle_prompts(
    tokenizer: Any, texts: Sequence[Tensor], count: int, distance: int, longest: int, seed: int = 0
) -> list[Prompt]:
    """Make ``count`` prompts, by turns of text and of a passage that is repeated.

    Args:
        texts: token ids ``[n]`` each. A prompt has ``2 · distance`` tokens of one of them, at least
            `SHORTEST` where the text has as many, and facts, questions and answers.
        distance: tokens that stand at least between a fact and the end of the text.
        longest: tokens that the model can read; longer texts are cut.

    Raises:
        ValueError: the texts are too short for facts so far back.
    """
    chance = random.Random(seed)
    made = []
    for number in range(count):
        text = texts[number % len(texts)].tolist()
        fact = FACTS[number // 2 % len(FACTS)]
        words = chance.sample(WORDS, FACTS_OF_A_PROMPT)
        facts = [_Fact.of(tokenizer, *fact, word, chance) for word in words]
        wanted = min(len(text), max(2 * distance, SHORTEST))
        length = min(wanted, longest - sum(one.size for one in facts))
        if length <= distance:
            raise ValueError(
                f"the model reads {longest} tokens, which leaves {max(0, length)} beside questions and "
                f"answers, but facts must stand {distance} tokens back: lower the windows, or set "
                "explore.retrieval_sequences=0"
            )
        size = length
        if number % 2:
            size = min(chance.choice(PASSAGES), length)
        begin = chance.randrange(len(text) - size + 1)
        copies = text[begin : begin + size] * (length // size + 1)
        step = size if number % 2 else 1
        body = _hidden(copies[:length], facts, (length - distance) // step, step, chance)
        chance.shuffle(facts)
        made.append(_prompt(body, facts))
    return made


class _Fact(NamedTuple):
    """The tokens of a fact, of the question for it, and of the answer."""

    stated: list[int]
    question: list[int]
    answer: list[int]

    @classmethod
    def of(cls, tokenizer: Any, stated: str, question: str, word: str, chance: random.Random) -> "_Fact":
        """A fact about a word, with a number of four to six digits."""
        number = "".join(chance.choice("0123456789") for _ in range(chance.choice((4, 5, 6))))
        texts = stated.format(word=word, number=number), "\n" + question.format(word=word), f" {number}"
        return cls(*(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts))

    @property
    def size(self) -> int:
        return sum(map(len, self))


def _hidden(
    text: list[int], facts: Sequence[_Fact], places: int, step: int, chance: random.Random
) -> list[int]:
    """The text with facts at random places: one of the first ``places`` multiples of ``step`` each."""
    body = list(text)
    chosen = sorted((chance.randrange(max(1, places)) for _ in facts), reverse=True)
    for place, fact in zip(chosen, facts, strict=True):
        body[place * step : place * step] = fact.stated
    return body


def _prompt(body: list[int], asked: Sequence[_Fact]) -> Prompt:
    """The text, then questions with their answers."""
    ids = list(body)
    answers: list[int] = []
    for fact in asked:
        ids += fact.question
        answers += range(len(ids) - 1, len(ids) - 1 + len(fact.answer))
        ids += fact.answer
    return Prompt(torch.tensor(ids), torch.tensor(answers))
