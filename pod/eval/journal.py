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

T = TypeVar("T")


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
            batches: puts what is left for this rank into batches; an item's answer must not depend on its batch.
            compute: the records of a batch (JSON types), one per item.
        Raises: ValueError when two items have one key.
        """
        keys = [key(item) for item in items]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{self.label}: two samples have the same id")
        done = self.ranks.from_first(self._read())
        left = self.ranks.share([item for item, name in zip(items, keys, strict=True) if name not in done])
        mine = self._compute(left, key, batches, compute)
        for found in self.ranks.gather(mine):
            done |= found
        return [done[name] for name in keys]

    def _compute(self, left: list[T], key: Any, batches: Any, compute: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        if not left:
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        bar = tqdm(total=len(left), desc=self.label, unit="sample", disable=not self.ranks.is_first)
        with bar, open(self.folder / f"{self.ranks.rank}.jsonl", "a", encoding="utf-8") as file:
            for batch in batches(left):
                for item, record in zip(batch, compute(batch), strict=True):
                    found[key(item)] = record
                    file.write(json.dumps([key(item), record]) + "\n")
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
                if self.ranks.is_first:
                    file.write_text(text, encoding="utf-8")
            for line in text.splitlines():
                name, record = json.loads(line)
                done[name] = record
        return done

    def remove(self) -> None:
        """Forget the answers; they stand in the result file now."""
        self.ranks.barrier()
        if self.ranks.is_first:
            shutil.rmtree(self.folder, ignore_errors=True)
