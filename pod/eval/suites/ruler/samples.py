"""Rows of a RULER task at a length: prompts that fill it, whatever the tokenizer, the same for one seed everywhere."""

import random
from typing import Any

from pod.eval.suites.lengths import Rows, chat_tokens, count_tokens, largest_fit
from pod.eval.suites.ruler.generators import (
    CommonWords,
    Documents,
    FrequentWords,
    Generator,
    Needles,
    VariableTracking,
)
from pod.eval.suites.ruler.prompts import PROMPTS, TASKS

FIELDS = ("index", "input", "asked", "prefix", "answers", "length")
_NEAR = 0.97  # a prompt that fills this share of its length is not made again


def make_generator(task: str, tokenizer: Any, length: int, room: int) -> Generator:
    """What makes the samples of a task; room: tokens for a prompt."""
    options = TASKS[task].options
    match TASKS[task].prompt:
        case "niah":
            return Needles(**options)
        case "vt":
            return VariableTracking(tokenizer, length, **options)
        case "cwe":
            return CommonWords(length)
        case "fwe":
            return FrequentWords(room)
        case _:
            return Documents(**options)


def make_rows(task: str, length: int, tokenizer: Any, seed: int = 42, count: int = 500) -> Rows:
    """The samples of a task, built when they are read.

    Args:
        task: key of TASKS; count: number of samples (the official 500; question answering has no more than its questions).
        length: tokens of prompt, answer and, where the tokenizer has one, chat template together; prompts do not change with the
            use of the template.
    Returns: rows {index, input, prefix, answers, length (tokens of input and prefix)}.
    Raises: ValueError when data are missing or no prompt fits the length.
    """
    room = length - PROMPTS[TASKS[task].prompt].new_tokens - chat_tokens(tokenizer)
    try:
        generator = make_generator(task, tokenizer, length, room)
        first = _Sizes(generator, task, seed, tokenizer, room)
        first.row(0)
    except ValueError as error:
        raise ValueError(f"ruler {task} at {length} tokens: {error}") from None
    if isinstance(generator, Documents):
        count = min(count, len(generator.questions))
    return Rows(count, first.row, FIELDS)


class _Sizes:
    """Samples at the size that fits; the size of one sample is where the search for the next one begins."""

    def __init__(self, generator: Generator, task: str, seed: int, tokenizer: Any, room: int):
        self.generator, self.name, self.tokenizer, self.room = generator, f"{seed}/{task}", tokenizer, room
        self.guess: int | None = None

    def row(self, index: int) -> dict[str, Any]:
        if self.guess is None and index != 0:
            self.row(0)  # so that a row does not depend on the rows read before it
        made: dict[int, tuple[Any, int]] = {}

        def tokens_of(size: int) -> int:
            sample = self.generator.sample(random.Random(f"{self.name}/{index}"), index, size)
            made[size] = sample, count_tokens(self.tokenizer, sample.prompt + sample.prefix)
            return made[size][1]

        size = largest_fit(
            tokens_of,
            self.room,
            smallest=self.generator.smallest,
            guess=self.guess,
            near=_NEAR,
        )
        if index == 0:
            self.guess = size
        sample, tokens = made[size]
        return {
            "index": index,
            "input": sample.prompt,
            "asked": sample.prompt[sample.prompt.rindex("\n") :],  # every task's question is its last line
            "prefix": sample.prefix,
            "answers": sample.answers,
            "length": tokens,
        }
