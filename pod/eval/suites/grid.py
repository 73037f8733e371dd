"""Tasks over several lengths: greedy answers through the method's cache, records and bytes by length."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pod.eval import answer
from pod.eval.answer.budget import Span, Subject
from pod.eval.answer.methods import Method
from pod.eval.answer.store import Shelf, in_batches
from pod.eval.suites.base import Task, prompt_hash, scored_payload

Record = dict[str, Any]
Cell = tuple[int, float, int]
"""A place in a grid: length, depth, number of the sample."""


def check_grid(lengths: list[int], depths: list[float] | None = None) -> None:
    """ValueError for options that are no grid."""
    if not lengths or any(length < 2 for length in lengths):
        raise ValueError(f"lengths is {lengths}, allowed are token counts of at least 2")
    if depths is not None and (not depths or any(not 0 <= depth <= 1 for depth in depths)):
        raise ValueError(f"depths is {depths}, allowed are numbers from 0 (start) to 1 (end)")
    for name, values in (("lengths", lengths), ("depths", depths or [])):
        if len(set(values)) < len(values):
            raise ValueError(f"{name} is {values}: each may stand once")


@dataclass(frozen=True)
class Prompt:
    """One prompt: what was asked for (length in tokens, depth in [0, 1], sample number) and what came of it.

    num_asked: tokens of the question, which is put when the text before it is compressed; 0: methods see it before.
    """

    length: int
    depth: float
    sample: int
    text: str
    token_ids: tuple[int, ...]
    num_asked: int

    @classmethod
    def of(
        cls, cell: Cell, text: str, encode: Callable[[str], Sequence[int]], question: int, *facts: Any
    ) -> Self:
        """question: the character where it begins, 0: methods see it before; facts: further fields of a class of prompts."""
        asked = answer.reading.tokens_from(encode, text, question)
        return cls(*cell, text, tuple(encode(text)), asked, *facts)

    @property
    def id(self) -> str:
        """Its sample's name."""
        return f"{self.length}/{self.depth}/{self.sample}"


class GridTask(Task):
    """A task whose items have an asked-for `length`. Budgets and batches follow from it alone, so that an answer depends on its item only.

    The constructor ends in `plan`.
    """

    def plan(self, items: Sequence[Any], tokens: Callable[[Any], int], new_tokens: int) -> None:
        """items: in the order of their lengths; tokens: of an item's longest prompt; new_tokens: generated behind it."""
        self.new_tokens, longest = new_tokens, dict[int, int]()
        for item in items:
            longest[item.length] = max(longest.get(item.length, 0), tokens(item))
        # the last new token is never fed
        self.span = {n: Span(held + new_tokens - 1, new_tokens) for n, held in longest.items()}

    def spans(self) -> list[Span]:
        return list(self.span.values())

    def batches(self, items: list[Any]) -> list[list[Any]]:
        """Batches of one asked-for length."""
        return in_batches(items, self.args.batch_size, lambda item: item.length)

    def bytes_rows(self, subject: Subject, records: list[Record]) -> list[Record]:
        """What was held, by length."""
        held = {n: [record["bytes"] for record in records if record["length"] == n] for n in self.span}
        return [{"prompt_length": n, **subject.stated(span, held[n])} for n, span in self.span.items()]


class PromptTask(GridTask):
    """A grid of lengths, depths and samples with one answer per prompt; kind, metric: of the payload."""

    prompts: Sequence[Any]
    kind, metric = "binary", "accuracy"

    def plan_prompts(self, new_tokens: int) -> None:
        """`plan` of the prompts."""
        self.plan(self.prompts, lambda prompt: len(prompt.token_ids), new_tokens)

    @abstractmethod
    def judge(self, prompt: Any, said: str) -> Record:
        """`score`, `target` and what else a record says of an answer."""

    @abstractmethod
    def settings(self) -> Record:
        """What was asked, but for when and how much is answered."""

    def measure(self, subject: Subject, shelf: Shelf) -> Record:
        records = self.records(subject, shelf)
        return scored_payload(
            self.kind,
            self.metric,
            records,
            bytes_rows=self.bytes_rows(subject, records),
            settings={**self.settings(), "question": self.args.asked_when(), "new_tokens": self.new_tokens},
            cells=cells_of(records),
        )

    def token_counts(self, method: Method) -> tuple[int, int]:
        """(prompt tokens, decode steps of a batch) that a method takes."""
        steps = len(self.batches(list(self.prompts))) * self.new_tokens
        return sum(len(prompt.token_ids) for prompt in self.prompts), steps

    def records(self, subject: Subject, shelf: Shelf) -> list[Record]:
        """The judged answer to every prompt."""
        reading, tokenizer, new_tokens = answer.reading, self.run.tokenizer, self.new_tokens

        def compute(batch: list[Prompt]) -> list[Record]:
            cache = subject.cache(self.span[batch[0].length])
            return reading.answers(subject.model, tokenizer, cache, batch, new_tokens)

        found = shelf.answers(
            self.prompts,
            key=lambda p: reading.key_of_prompt(p, new_tokens, subject.room(self.span[p.length])),
            batches=self.batches,
            compute=compute,
        )
        return [
            {
                "id": prompt.id,
                "length": prompt.length,
                "depth": prompt.depth,
                "sample": prompt.sample,
                "prompt_tokens": len(prompt.token_ids),
                "prompt_hash": prompt_hash(prompt.text),
                "budget_tokens": subject.budget(self.span[prompt.length]),
                **self.judge(prompt, said["answer"]),
                **said,
            }
            for prompt, said in zip(self.prompts, found, strict=True)
        ]


def cells_of(records: list[Record]) -> list[Record]:
    """Mean score and number of prompts per (length, depth), for the heat map, in the order of the samples."""
    found: dict[tuple[int, float], list[float]] = {}
    for record in records:
        found.setdefault((record["length"], record["depth"]), []).append(record["score"])
    return [
        {"length": length, "depth": depth, "value": sum(scores) / len(scores), "count": len(scores)}
        for (length, depth), scores in found.items()
    ]
