"""Base classes of tasks that ask prompts of several lengths, such as passkeys.

`GridTask` asks its items in batches, each through a new cache of the method, and makes the payload: samples,
bytes held at each length, the cells of a heat map. `PromptTask` is the common case: an item is one prompt
and becomes one sample.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pod.eval import answer
from pod.eval.answer.answer_cache import AnswerCache, JsonObject, in_batches
from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.suites.task_base import AnsweredTask, prompt_hash, scored_payload

GridPlace = tuple[int, float, int]
"""Where a prompt stands in a grid: length in tokens, depth from 0 to 1, number of the sample."""


def check_grid(lengths: list[int], depths: list[float] | None = None) -> None:
    """Refuse lengths below 2 tokens, depths outside [0, 1], empty lists, and values that occur twice.

    Raises:
        ValueError: it names the option and its value.
    """
    if not lengths or any(length < 2 for length in lengths):
        raise ValueError(f"lengths is {lengths}, allowed are token counts of at least 2")
    if depths is not None and (not depths or any(not 0 <= depth <= 1 for depth in depths)):
        raise ValueError(f"depths is {depths}, allowed are numbers from 0 (start) to 1 (end)")
    for name, values in (("lengths", lengths), ("depths", depths or [])):
        if len(set(values)) < len(values):
            raise ValueError(f"{name} is {values}: each may occur once only")


@dataclass(frozen=True)
class GridPrompt:
    """A prompt of one cell of a grid.

    Attributes:
        length: tokens that the grid asks for. The prompt may be a little shorter.
        depth: where the hidden fact stands in the text, from 0 (start) to 1 (end).
        sample: the number of the prompt among those of this length and depth.
        text: the prompt.
        token_ids: the prompt's tokens.
        num_asked: tokens of the question at the prompt's end. Methods compress the text before the question
            is read. 0: they see the question before they compress.
    """

    length: int
    depth: float
    sample: int
    text: str
    token_ids: tuple[int, ...]
    num_asked: int

    @classmethod
    def of(
        cls, cell: GridPlace, text: str, encode: Callable[[str], Sequence[int]], question: int, *facts: Any
    ) -> Self:
        """The prompt of a cell, made from its text.

        Args:
            encode: gives the token ids of a text.
            question: the index of the character where the question begins. 0: methods see the question
                before they compress.
            facts: values of the fields that a subclass adds.
        """
        asked = answer.reading.tokens_from(encode, text, question)
        return cls(*cell, text, tuple(encode(text)), asked, *facts)

    @property
    def id(self) -> str:
        """The name of its sample, for example `1024/0.5/0`."""
        return f"{self.length}/{self.depth}/{self.sample}"


class GridTask(AnsweredTask):
    """A task whose items have the lengths of a grid. Answers are greedy, through the method's cache.

    An item is what one row of a batch asks: a prompt, or a text with several questions. Budgets and batches
    follow from an item's `length` alone. So an answer does not depend on the other items.

    A subclass calls `plan` at the end of its constructor.

    Attributes:
        kind, metric: see the payload in `pod/eval/suites/task_base.py`.
    """

    kind, metric = "binary", "accuracy"

    def plan(self, items: Sequence[Any], tokens: Callable[[Any], int], new_tokens: int) -> None:
        """Set the items of the task, and compute the cache sizes that they need.

        Args:
            items: in the order of their lengths.
            tokens: gives the number of tokens of an item's longest prompt.
            new_tokens: tokens that are generated behind each prompt.
        """
        self.items, self.new_tokens = items, new_tokens
        longest: dict[int, int] = {}
        for item in items:
            longest[item.length] = max(longest.get(item.length, 0), tokens(item))
        # the last new token is never fed
        self.span = {n: CacheSpan(held + new_tokens - 1, new_tokens) for n, held in longest.items()}

    @abstractmethod
    def key(self, item: Any, cache_budget: int | str | None) -> str:
        """The key of an item's answer in the answer cache.

        Args:
            cache_budget: the budget of the method's cache (`MethodRunner.cache_budget`).
        """

    @abstractmethod
    def ask_model(self, runner: MethodRunner, cache: Any, batch: list[Any]) -> list[JsonObject]:
        """Ask a batch of items of one length through a new cache; one record per item."""

    @abstractmethod
    def samples(self, item: Any, record: JsonObject) -> list[JsonObject]:
        """The samples of an item, each with its score, from the record that `ask_model` gave."""

    @abstractmethod
    def settings(self) -> JsonObject:
        """How the task asked: prompt format, haystack, when the question is seen. For the report."""

    def metrics(self, samples: list[JsonObject]) -> JsonObject:
        """Further numbers for the payload, by name; see `pod/eval/suites/task_base.py`."""
        return {}

    def spans(self) -> list[CacheSpan]:
        return list(self.span.values())

    def batches(self, items: Sequence[Any]) -> list[list[Any]]:
        """The items in batches of at most `eval.batch_size`. All items of a batch have one length."""
        return in_batches(items, self.args.batch_size, lambda item: item.length)

    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> list[JsonObject]:
        """The record of every item, from the answer cache where it is there, else from the model."""
        return answer_cache.answers(
            self.items,
            key=lambda item: self.key(item, runner.cache_budget(self.span[item.length])),
            batches=self.batches,
            compute=lambda batch: self.ask_model(runner, runner.cache(self.span[batch[0].length]), batch),
        )

    def score(self, runner: MethodRunner, answers: list[JsonObject]) -> JsonObject:
        """The payload: the samples of all items, and the bytes that were held at each length."""
        samples: list[JsonObject] = [
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
    """A grid task whose items are prompts: one prompt, one answer, one sample.

    A subclass calls `plan_prompts` at the end of its constructor, and judges an answer in `judge`.
    """

    def plan_prompts(self, prompts: Sequence[GridPrompt], new_tokens: int) -> None:
        """`plan` for prompts."""
        self.plan(prompts, lambda prompt: len(prompt.token_ids), new_tokens)

    @abstractmethod
    def judge(self, prompt: Any, said: str) -> JsonObject:
        """Score an answer.

        Args:
            prompt: the prompt, with the facts that it hides.
            said: the answer's text.

        Returns:
            `score` (0 to 1), `target` (the right answer), and whatever else its sample shall hold.
        """

    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        steps = len(self.batches(self.items)) * self.new_tokens
        return sum(len(prompt.token_ids) for prompt in self.items), steps

    def key(self, item: GridPrompt, cache_budget: int | str | None) -> str:
        return answer.reading.key_of_prompt(item, self.new_tokens, cache_budget)

    def samples(self, item: GridPrompt, record: JsonObject) -> list[JsonObject]:
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


def cells_of(samples: list[JsonObject]) -> list[JsonObject]:
    """The cells of a heat map: mean score and number of samples per (length, depth), in their order."""
    found: dict[tuple[int, float], list[float]] = {}
    for sample in samples:
        found.setdefault((sample["length"], sample["depth"]), []).append(sample["score"])
    return [
        {"length": length, "depth": depth, "value": sum(scores) / len(scores), "count": len(scores)}
        for (length, depth), scores in found.items()
    ]
