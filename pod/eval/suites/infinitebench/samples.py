"""Rows of an InfiniteBench task: read from the official files, or built at a length."""

import random
from typing import Any

from pod.eval.suites import data
from pod.eval.suites.infinitebench import synthetic
from pod.eval.suites.infinitebench.prompts import HUB_ID, TASKS, answer, asked, prompt
from pod.eval.suites.lengths import Rows, count_tokens, largest_fit

FIELDS = ("id", "prompt", "asked", "answer")


def read_rows(task: str) -> Rows:
    """The rows {id, prompt, answer, cluster} of a task with a file. Raises: ValueError when it is missing or in another format."""
    found = data.load_rows("infinitebench", f"{task}.jsonl", HUB_ID)
    answers = [answer(task, row) for row in found]
    prompt(task, found[0])

    def make(index: int) -> dict[str, Any]:
        row = found[index]
        return {
            "id": row.get("id", index),
            "prompt": prompt(task, row),
            "asked": asked(task, row),
            "answer": answers[index],
            "cluster": data.text_id(row["context"]),
        }

    return Rows(len(found), make, (*FIELDS, "cluster"), keep=False)


def build_rows(task: str, length: int, tokenizer: Any, seed: int = 42, count: int | None = None) -> Rows:
    """The rows {id, prompt, answer} of a synthetic task, built when they are read.

    length: tokens of prompt and answer together. Raises: ValueError when no prompt fits.
    """
    room = length - TASKS[task].new_tokens

    def at(index: int, size: int) -> dict[str, Any]:
        return synthetic.row(task, random.Random(f"{seed}/{task}/{index}"), index, size)

    def fitting(index: int, guess: int | None = None, near: float = 1.0) -> int:
        return largest_fit(
            lambda size: count_tokens(tokenizer, prompt(task, at(index, size))),
            room,
            smallest=synthetic.SMALLEST[task],
            guess=guess,
            near=near,
        )

    try:
        usual = fitting(0)
    except ValueError as error:
        raise ValueError(f"infinitebench {task} at {length} tokens: {error}") from None

    def make(index: int) -> dict[str, Any]:
        row = at(index, fitting(index, guess=usual, near=0.99))
        text, question = prompt(task, row), asked(task, row)
        return {"id": index, "prompt": text, "asked": question, "answer": answer(task, row)}

    return Rows(count or TASKS[task].count or 0, make, FIELDS)
