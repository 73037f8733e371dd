"""InfiniteBench's tasks at every length: eleven tasks and two groups per length, and their scores.

Rows are read from the official files; those of synthetic tasks are built to the length.
"""

import random
from typing import Any

from pod.eval.lm.lm_prompts import shorten
from pod.eval.suites import task_data
from pod.eval.suites.configs import Config, group_config, scorer, task_config
from pod.eval.suites.infinitebench import infinitebench_metrics, synthetic
from pod.eval.suites.infinitebench.infinitebench_prompts import (
    HUB_ID,
    PAPER_TASKS,
    TASKS,
    answer,
    asked,
    prompt,
)
from pod.eval.suites.lengths import BUILT, NAMES, LazyRows, count_tokens, largest_fit

FIELDS = ("id", "prompt", "asked", "answer")
LENGTHS = ("2k", "8k", "32k", "64k", "128k")


def rows(**metadata: Any) -> dict[str, Any]:
    """The data set of a task.

    Args:
        metadata: its `infinitebench` {task, length, seed} is from the configuration. With
            `infinitebench_truncation` = middle, prompts of synthetic tasks are built to the paper's 128K, and
            their middle is dropped down to the length, even if the key is in it.

    Raises:
        ValueError: for any other value of `infinitebench_truncation`.
    """
    settings = metadata["infinitebench"]
    task = settings["task"]
    if TASKS[task].count is None:
        return {"test": read_rows(task)}
    drop = metadata.get("infinitebench_truncation")
    length = settings["length"]
    if drop not in (None, "middle"):
        raise ValueError(
            f"infinitebench_truncation is {drop!r}, allowed is middle, or null: built at the length"
        )
    whole = NAMES["128k"] if drop and length < NAMES["128k"] else None
    return {"test": build_rows(task, length, task_data.load_tokenizer(metadata), settings["seed"], whole)}


def read_rows(task: str) -> LazyRows:
    """The rows {id, prompt, asked, answer, cluster} of a task with a file.

    Raises:
        ValueError: when the file is missing or in another format.
    """
    found = task_data.load_rows("infinitebench", f"{task}.jsonl", HUB_ID)
    answers = [answer(task, row) for row in found]
    prompt(task, found[0])

    def make(index: int) -> dict[str, Any]:
        row = found[index]
        return {
            "id": row.get("id", index),
            "prompt": prompt(task, row),
            "asked": asked(task, row),
            "answer": answers[index],
            "cluster": task_data.text_id(row["context"]),
        }

    return LazyRows(len(found), make, (*FIELDS, "cluster"), keep=False)


def build_rows(task: str, length: int, tokenizer: Any, seed: int = 42, whole: int | None = None) -> LazyRows:
    """The rows {id, prompt, asked, answer} of a synthetic task, built when they are read.

    Args:
        length: tokens of prompt and answer together.
        whole: tokens of both together before the prompt's middle is dropped; None = nothing is dropped.

    Raises:
        ValueError: when no prompt fits.
    """
    room = length - TASKS[task].new_tokens

    def fitting(index: int, guess: int | None = None, near: float = 1.0) -> tuple[int, dict[str, Any]]:
        """A size that fits, and the row at it."""
        made: dict[int, dict[str, Any]] = {}

        def tokens_of(size: int) -> int:
            made[size] = synthetic.row(task, random.Random(f"{seed}/{task}/{index}"), index, size)
            return count_tokens(tokenizer, prompt(task, made[size]))

        fits = (whole or length) - TASKS[task].new_tokens
        smallest = synthetic.SMALLEST[task]
        size = largest_fit(tokens_of, fits, smallest=smallest, guess=guess, near=near)
        return size, made[size]

    try:
        usual, _ = fitting(0)
    except ValueError as error:
        raise ValueError(f"infinitebench {task} at {length} tokens: {error}") from None

    def make(index: int) -> dict[str, Any]:
        _, row = fitting(index, guess=usual, near=0.99)
        text = prompt(task, row)
        question = asked(task, row)
        if whole is not None:
            text = shorten(tokenizer, text, "middle", room, lambda part: count_tokens(tokenizer, part))
        return {"id": index, "prompt": text, "asked": question, "answer": answer(task, row)}

    return LazyRows(TASKS[task].count or 0, make, FIELDS)


def configs() -> list[Config]:
    """For every length: the tasks, the group of the paper's tasks and the group of all tasks."""
    found = []
    for length in LENGTHS:
        prefix = f"pod_infinitebench_{length}"
        found += [_task(f"{prefix}_{task}", task, NAMES[length]) for task in TASKS]
        found.append(group_config(prefix, "", PAPER_TASKS))
        found.append(group_config(prefix, "_all", TASKS))
    return found


def _task(name: str, task: str, length: int) -> Config:
    rules = TASKS[task]
    built = rules.count is not None
    return task_config(
        name,
        rows,
        scorer(rules.metric, lambda answer, row: infinitebench_metrics.SCORERS[task](answer, row["answer"])),
        prompt="prompt",
        target="answer",
        new_tokens=rules.new_tokens,
        metrics=(rules.metric, "score"),
        rules={
            "chat_template": False,
            "truncation": "none" if built else "middle",
            "max_prompt_tokens": None if built else length - rules.new_tokens,
            "kind": "binary" if rules.binary else "score",
            "source": "https://github.com/OpenBMB/InfiniteBench",
            "license": "MIT",
        },
        metadata={"infinitebench": {"task": task, "length": length, "seed": 42}},
        **BUILT,
    )
