"""Tasks that hold settings of one model against each other, on the same texts and passkeys (PoD Figures 3 and 7)."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, ClassVar

from pod.eval.answer.budget import Subject
from pod.eval.answer.store import Shelf, in_batches
from pod.eval.judge.intervals import wilson
from pod.eval.judge.verdicts import perplexity_change, perplexity_of
from pod.eval.suites.base import scored_payload
from pod.eval.suites.own import passkey
from pod.eval.suites.text import Record, TextTask

Item = tuple[int, str, int]
"""What is asked: the number of a setting, `text` or `passkey` (or what a task has besides), and the number of that."""


class SettingsTask(TextTask):
    """Texts of the task perplexity, the first `options.sequences`, and if `options.passkeys` the prompts of passkey.

    columns: heads of the table of settings.
    """

    columns: ClassVar[dict[str, str]]

    def __init__(self, run: Any, options: Any):
        most = run.args.text_sequences
        wanted = most if options.sequences is None else options.sequences
        if not 1 <= wanted <= most:
            raise ValueError(
                f"eval.task_options.{self.name}.sequences = {wanted} must be from 1 to eval.text_sequences = {most}"
            )
        super().__init__(run, options)
        self.text = self.text[:wanted]
        self.prompts = passkey.prompts_of(run) if options.passkeys else []

    def longest(self) -> int:
        prompts = (len(prompt.token_ids) + self.args.passkey_new_tokens for prompt in self.prompts)
        return max(self.args.text_length, *prompts, 0)

    def prompt_tokens(self) -> int:
        """Of all passkey prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def items(self, settings: int = 1) -> list[Item]:
        """Every text and prompt under so many settings."""
        texts = [("text", number) for number in range(len(self.text))]
        prompts = [("passkey", number) for number in range(len(self.prompts))]
        return [(setting, *item) for setting in range(settings) for item in texts + prompts]

    @abstractmethod
    def key(self, item: Item) -> str:
        """`Shelf.answers` says what this and the next are."""

    @abstractmethod
    def alike(self, item: Item) -> Any:
        """Equal for items that may run together."""

    @abstractmethod
    def compute(self, subject: Subject, batch: list[Item]) -> list[Record]: ...

    @abstractmethod
    def payload(self, subject: Subject, records: dict[Item, Record]) -> Record: ...

    def measure(self, subject: Subject, shelf: Shelf) -> Record:
        items = self.items()
        records = shelf.answers(
            items,
            key=self.key,
            batches=lambda left: in_batches(left, self.args.batch_size, self.alike),
            compute=lambda batch: self.compute(subject, batch),
        )
        return self.payload(subject, dict(zip(items, records, strict=True)))

    def row(self, sums: list[float], base: list[float], tokens: int, correct: list[bool]) -> Record:
        """A setting's perplexity and its change against another (summed NLL of each text, paired), and the passkeys that it found."""
        counts = [tokens] * len(sums)
        own, change = perplexity_of(sums, counts), perplexity_change(sums, base, counts)
        row = {"perplexity": own["perplexity"], "ci95": own["ci95"]}
        row |= {"change": change.value, "change_ci95": change.interval}
        if correct:
            right = sum(correct)
            row |= {"passkey": right / len(correct), "passkey_ci95": list(wilson(right, len(correct)))}
        return row

    def table(self, rows: list[Record], samples: Iterable[Record], stated: Record, **more: Any) -> Record:
        """A payload of the table of all settings; samples: those of one setting, by text; more: as `scored_payload` takes it."""
        settings = {**asdict(self.options), "length": self.args.text_length, **more.pop("settings", {})}
        return scored_payload(
            "nll",
            "perplexity",
            self.samples(samples),
            bytes_rows=[stated],
            settings=settings,
            columns={key: head for key, head in self.columns.items() if self.prompts or key != "passkey"},
            rows=rows,
            **more,
        )
