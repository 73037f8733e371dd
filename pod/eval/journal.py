"""Answers kept one by one while a task runs, so that a killed evaluation goes on at the sample where it stopped.

One JSON line per sample and file per rank in `<output_dir>/eval/journal/<method>/<task>.<fingerprint>/`; removed once the task is whole
in the method's result file. Another fingerprint is another folder: answers of other inputs are never taken for these.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from pod.eval.methods import safe_name
from pod.eval.ranks import Ranks
from pod.eval.results import one_line
from pod.files import atomic_write_text

T = TypeVar("T")


class AnswerError(RuntimeError):
    """A rank failed at a sample. Raised on every rank, so that all go on to the next task together."""


class Journal:
    """The finished samples of one method on one task.

    folder: `<output_dir>/eval/journal`; fingerprint: of everything that can change an answer.
    """

    def __init__(self, folder: Path, method: str, task: str, fingerprint: str, ranks: Ranks):
        self.folder = folder / safe_name(method) / f"{safe_name(task)}.{fingerprint[:16]}"
        self.ranks, self.label = ranks, f"{method}: {task}"

    def answers(
        self,
        items: Sequence[T],
        key: Callable[[T], str],
        batches: Callable[[list[T]], Iterable[list[T]]],
        compute: Callable[[list[T]], list[dict[str, Any]]],
    ) -> list[dict[str, Any]]:
        """A record per item, in the order of `items`, the same on every rank; what a journal holds is not computed again.

        Args:
            key: an item's id, unique within the task and the same in every run.
            batches: puts all items into batches, in the same way in every run. Ranks share whole batches, and a batch of which an answer
                is missing is computed whole: so an answer has the same bits on any number of ranks and after any restart.
            compute: the records of a batch (JSON types), one per item.
        Raises: ValueError when two items have one key; what `compute` raises, on several ranks AnswerError on all of them. What was
            answered before stays.
        """
        keys = [key(item) for item in items]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{self.label}: two samples have the same id")
        done = self.ranks.from_first(self._read() if self.ranks.is_first else None)
        left = [batch for batch in batches(list(items)) if any(key(item) not in done for item in batch)]
        mine, failure = {}, None
        try:
            mine = self._compute(self.ranks.share(left), key, compute)
        except Exception as error:
            if self.ranks.world_size == 1:
                raise
            failure = error
        outcomes = self.ranks.gather((mine, None if failure is None else one_line(failure)))
        failed = [f"rank {rank}: {line}" for rank, (_, line) in enumerate(outcomes) if line is not None]
        if failed:
            raise AnswerError("; ".join(failed)) from failure
        for found, _ in outcomes:
            done |= found
        return [done[name] for name in keys]

    def _compute(self, batches: list[list[T]], key: Any, compute: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        if not batches:
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        bar = tqdm(
            total=sum(map(len, batches)), desc=self.label, unit="sample", disable=not self.ranks.is_first
        )
        with bar, open(self.folder / f"{self.ranks.rank}.jsonl", "a", encoding="utf-8") as file:
            for batch in batches:
                for item, record in zip(batch, compute(batch), strict=True):
                    # as the file holds it: an answer that was read back is not another one (tuples, keys that are numbers)
                    line = json.dumps([key(item), record])
                    found[key(item)] = json.loads(line)[1]
                    file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
                bar.update(len(batch))
        return found

    def _read(self) -> dict[str, dict[str, Any]]:
        """Every whole line of every rank's file, whatever number of ranks wrote them. A torn last line is forgotten."""
        done: dict[str, dict[str, Any]] = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            text = file.read_text(encoding="utf-8", errors="replace")
            if not text.endswith("\n"):
                text = text[: text.rfind("\n") + 1]
                atomic_write_text(file, text)  # what is appended next must stand on a line of its own
            for line in text.split("\n"):
                known = _entry(line)
                if known is not None:
                    done[known[0]] = known[1]
        return done

    def remove(self) -> None:
        """Forget the answers; they stand in the result file now."""
        self.ranks.barrier()
        if self.ranks.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)


def _entry(line: str) -> tuple[str, dict[str, Any]] | None:
    """Key and record of a line; None for one that a crash of the machine has damaged: its sample is answered again."""
    try:
        name, record = json.loads(line)
    except (ValueError, TypeError):
        return None
    return (name, record) if isinstance(name, str) and isinstance(record, dict) else None
