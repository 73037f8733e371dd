"""Tasks that ask prompts of several lengths: greedy answers through the method's cache.

`PromptTask.ask_model` asks a batch of prompts, for example of passkeys. `GridTask` turns the answers into
samples, and into the bytes held at each length.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pod.eval import answer
from pod.eval.answer.answer_cache import AnswerCache, in_batches
from pod.eval.answer.budget import MethodRunner, Span
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.suites.task_base import Task, prompt_hash, scored_payload

Record = dict[str, Any]
Cell = tuple[int, float, int]
"""A place in a grid: length, depth, number of the sample."""


def check_grid(lengths: list[int], depths: list[float] | None = None) -> None:
    """Check a grid. Raises ValueError for options that are no grid."""
    if not lengths or any(length < 2 for length in lengths):
        raise ValueError(f"lengths is {lengths}, allowed are token counts of at least 2")
    if depths is not None and (not depths or any(not 0 <= depth <= 1 for depth in depths)):
        raise ValueError(f"depths is {depths}, allowed are numbers from 0 (start) to 1 (end)")
    for name, values in (("lengths", lengths), ("depths", depths or [])):
        if len(set(values)) < len(values):
            raise ValueError(f"{name} is {values}: each may occur once only")


@dataclass(frozen=True)
class GridPrompt:
    """One prompt: what was asked for (length in tokens, depth in [0, 1], sample number) and what came of it.

    Attributes:
        num_asked: tokens of the question, which is put when the text before it is compressed; 0: methods see
            the question before they compress.
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
        """The prompt of a cell.

        Args:
            question: the character where the question begins; 0: methods see it before they compress.
            facts: further fields of a class of prompts.
        """
        asked = answer.reading.tokens_from(encode, text, question)
        return cls(*cell, text, tuple(encode(text)), asked, *facts)

    @property
    def id(self) -> str:
        """Its sample's name."""
        return f"{self.length}/{self.depth}/{self.sample}"


class GridTask(Task):
    """A grid of lengths and depths: greedy answers through the method's cache.

    Budgets and batches follow from an item's asked-for `length` alone, so that an answer depends on its item
    only. The constructor ends in `plan`.

    Attributes:
        kind, metric: of the payload.
    """

    kind, metric = "binary", "accuracy"

    def plan(self, items: Sequence[Any], tokens: Callable[[Any], int], new_tokens: int) -> None:
        """Set what is asked, and the span of each length.

        Args:
            items: what is asked in one go, in the order of their lengths.
            tokens: gives the tokens of an item's longest prompt.
            new_tokens: tokens generated behind it.
        """
        self.items, self.new_tokens = items, new_tokens
        longest: dict[int, int] = {}
        for item in items:
            longest[item.length] = max(longest.get(item.length, 0), tokens(item))
        # the last new token is never fed
        self.span = {n: Span(held + new_tokens - 1, new_tokens) for n, held in longest.items()}

    @abstractmethod
    def key(self, item: Any, room: int | str | None) -> str:
        """What an item asks of a cache with this budget."""

    @abstractmethod
    def ask_model(self, runner: MethodRunner, cache: Any, batch: list[Any]) -> list[Record]:
        """The records of items of one length through a new cache."""

    @abstractmethod
    def samples(self, item: Any, record: Record) -> list[Record]:
        """The judged samples of an item."""

    @abstractmethod
    def settings(self) -> Record:
        """What was asked, except for how much is answered."""

    def metrics(self, samples: list[Record]) -> Record:
        """Further metrics of the payload."""
        return {}

    def spans(self) -> list[Span]:
        return list(self.span.values())

    def batches(self, items: Sequence[Any]) -> list[list[Any]]:
        """Batches of one asked-for length."""
        return in_batches(items, self.args.batch_size, lambda item: item.length)

    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> list[Record]:
        return answer_cache.answers(
            self.items,
            key=lambda item: self.key(item, runner.room(self.span[item.length])),
            batches=self.batches,
            compute=lambda batch: self.ask_model(runner, runner.cache(self.span[batch[0].length]), batch),
        )

    def score(self, runner: MethodRunner, answers: list[Record]) -> Record:
        samples: list[Record] = [
            sample | {"budget_tokens": runner.budget(self.span[item.length])}
            for item, record in zip(self.items, answers, strict=True)
            for sample in self.samples(item, record)
        ]
        held = {n: [one["bytes"] for one in samples if one["length"] == n] for n in self.span}
        return scored_payload(
            self.kind,
            self.metric,
            samples,
            bytes_rows=[{"prompt_length": n, **runner.stated(s, held[n])} for n, s in self.span.items()],
            settings={
                **self.settings(),
                **self.args.template_settings(),
                "new_tokens": self.new_tokens,
            },
            metrics=self.metrics(samples),
            cells=cells_of(samples),
        )


class PromptTask(GridTask):
    """A sample per prompt of a grid of lengths, depths and samples."""

    def plan_prompts(self, prompts: Sequence[GridPrompt], new_tokens: int) -> None:
        """`plan` of the prompts."""
        self.plan(prompts, lambda prompt: len(prompt.token_ids), new_tokens)

    @abstractmethod
    def judge(self, prompt: Any, said: str) -> Record:
        """`score`, `target` and what else a sample says of an answer."""

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        steps = len(self.batches(self.items)) * self.new_tokens
        return sum(len(prompt.token_ids) for prompt in self.items), steps

    def key(self, item: GridPrompt, room: int | str | None) -> str:
        return answer.reading.key_of_prompt(item, self.new_tokens, room)

    def ask_model(self, runner: MethodRunner, cache: Any, batch: list[GridPrompt]) -> list[Record]:
        return answer.generate.generate(runner.model, self.run.tokenizer, cache, batch, self.new_tokens)

    def samples(self, item: GridPrompt, record: Record) -> list[Record]:
        said = {name: record[name] for name in ("answer", "bytes", "decisions") if name in record}
        return [
            {
                "id": item.id,
                "length": item.length,
                "depth": item.depth,
                "sample": item.sample,
                "prompt_tokens": len(item.token_ids),
                "prompt_hash": prompt_hash(item.text),
                **self.judge(item, record["answer"]),
                **said,
            }
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
