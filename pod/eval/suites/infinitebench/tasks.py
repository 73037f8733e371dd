"""InfiniteBench's tasks at every length: their rows, their scores, eleven tasks and two groups per length."""

from typing import Any

from pod.eval.suites import data
from pod.eval.suites.configs import Config, group_config, task_config
from pod.eval.suites.infinitebench import metrics, samples
from pod.eval.suites.infinitebench.prompts import PAPER_TASKS, TASKS
from pod.eval.suites.lengths import BUILT, NAMES

LENGTHS = ("2k", "8k", "32k", "64k", "128k")


def rows(**metadata: Any) -> dict[str, Any]:
    """The data set of a task; metadata: `infinitebench` of the configuration {task, length, seed}."""
    settings = metadata["infinitebench"]
    task = settings["task"]
    if TASKS[task].count is None:
        return {"test": samples.read_rows(task)}
    tokenizer = data.load_tokenizer(metadata)
    return {"test": samples.build_rows(task, settings["length"], tokenizer, settings["seed"])}


def _scored(task: str) -> Any:
    """lm-eval's `process_results` of a task."""

    def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
        value = metrics.SCORERS[task](results[0], doc["answer"])
        return {"score": value, TASKS[task].metric: value}

    return process_results


def configs() -> list[Config]:
    """Of every length: the tasks, the group of the paper's and that of all."""
    found = []
    for length in LENGTHS:
        prefix = f"pod_infinitebench_{length}"
        found += [_task(f"{prefix}_{task}", task, NAMES[length]) for task in TASKS]
        found.append(group_config(prefix, [f"{prefix}_{task}" for task in PAPER_TASKS]))
        found.append(group_config(f"{prefix}_all", [f"{prefix}_{task}" for task in TASKS]))
    return found


def _task(name: str, task: str, length: int) -> Config:
    asked = TASKS[task]
    built = asked.count is not None
    return task_config(
        name,
        rows,
        _scored(task),
        prompt="prompt",
        target="answer",
        new_tokens=asked.new_tokens,
        metrics=(asked.metric, "score"),
        rules={
            "chat_template": False,
            "truncation": "none" if built else "middle",
            "max_prompt_tokens": None if built else length - asked.new_tokens,
            "kind": "binary" if asked.binary else "score",
            "source": "https://github.com/OpenBMB/InfiniteBench",
            "license": "MIT",
        },
        metadata={"infinitebench": {"task": task, "length": length, "seed": 42}},
        **BUILT,
    )
