"""Needle-in-a-haystack prompts (Kamradt 2023) and their scoring.

`number`: k sentences `The special magic <city> number is: <number>.` are hidden; the score is the share of the numbers that the answer
names (recall). `statement`: the sentence of the original test about San Francisco; the score is ROUGE-1 F of the answer against it, stemmed,
as in FranxYao/Long-Context-Data-Engineering, from which PoD, D2O and RazorAttention have their needle tests (there it is printed ×10).
"""

import random
from dataclasses import dataclass
from typing import Any

from pod.eval.answer.reading import tokens_from
from pod.eval.suites.haystack import Haystack, make_frame, numbers_in, spread_depths, start_of
from pod.eval.suites.words import rouge_scorer

CITIES = (
    "Paris", "London", "Tokyo", "Berlin", "Madrid", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Seoul",
    "Dublin", "Vienna", "Athens", "Prague", "Warsaw", "Lisbon", "Havana", "Nairobi", "Sydney", "Chicago",
    "Toronto", "Boston", "Denver", "Munich", "Geneva", "Zurich", "Milan", "Naples", "Kyoto", "Osaka",
    "Bangkok", "Hanoi", "Jakarta",
)  # fmt: skip
PEOPLE = (
    "Mary", "Bob", "Alice", "John", "Emma", "Peter", "Laura", "Frank", "Helen", "Oscar", "Nina", "Victor",
    "Clara", "Hugo", "Sofia", "Martin", "Irene", "Felix", "Julia", "Simon", "Diana", "Walter", "Eva", "Leo",
)  # fmt: skip
STATEMENT = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
STATEMENT_QUESTION = "What is the best thing to do in San Francisco?"


@dataclass(frozen=True)
class NeedlePrompt:
    """One prompt: what was asked for (length in tokens, depth in [0, 1], sample number) and what came of it.

    names, values: of the hidden facts; for `statement` no name and the sentence. num_asked: tokens of the question, as of a passkey's.
    """

    length: int
    depth: float
    sample: int
    names: tuple[str, ...]
    values: tuple[str, ...]
    text: str
    token_ids: tuple[int, ...]
    num_asked: int = 0


def make_needle_prompts(
    tokenizer: Any,
    sentences: list[str],
    cells: list[tuple[int, float, int]],
    needles: int,
    seed: int,
    form: str = "number",
    chat_template: bool = False,
    question_aware: bool = False,
) -> list[NeedlePrompt]:
    """A prompt per (length, depth, sample) of `cells`, in that order, as long as whole words allow.

    Names and numbers depend on (seed, length, depth, sample) only. Raises: ValueError for a length that cannot hold the needles.
    """
    prompts = []
    for length, depth, sample in cells:
        names, values = facts(f"{seed}/{length}/{depth}/{sample}", needles) if form == "number" else ((), ())
        lines = [f"The special magic {n} number is: {v}." for n, v in zip(names, values, strict=True)]
        frame = make_frame(
            tokenizer, *_question(names), chat_template, "eval.task_options.niah.chat_template"
        )
        haystack = Haystack(sentences, start_of(seed, sample, sentences))
        depths = spread_depths(depth, needles)
        text = haystack.fitted(tokenizer, frame, lines or [STATEMENT], depths, length)
        ids = tuple(frame.encode(tokenizer, text))
        start = 0 if question_aware else len(text) - len(frame.after)
        asked = tokens_from(lambda part, frame=frame: frame.encode(tokenizer, part), text, start)
        prompts.append(NeedlePrompt(length, depth, sample, names, values or (STATEMENT,), text, ids, asked))
    return prompts


def facts(seed: str, number: int, names: tuple[str, ...] = CITIES) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`number` different names and five-digit numbers."""
    draw = random.Random(seed)
    values = draw.sample(range(10_000, 100_000), number)
    return tuple(draw.sample(names, number)), tuple(map(str, values))


def _question(names: tuple[str, ...]) -> tuple[str, str]:
    """Question and beginning of the answer."""
    if not names:
        return STATEMENT_QUESTION, ""
    if len(names) == 1:
        return f"What is the special magic {names[0]} number?", f"The special magic {names[0]} number is:"
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    return f"What are the special magic numbers of {listed}?", f"The special magic numbers of {listed} are:"


def recall(answer: str, values: tuple[str, ...]) -> float:
    """Share of the numbers `values` that stand in the answer as whole numbers."""
    named = set(numbers_in(answer))
    return sum(value in named for value in values) / len(values)


def statement_score(answer: str) -> float:
    """ROUGE-1 F of the answer's text against the hidden statement, stemmed, 0 to 1."""
    return (
        float(rouge_scorer("rouge1", use_stemmer=True).score(STATEMENT, answer)["rouge1"].fmeasure)
        if answer.strip()
        else 0.0
    )
