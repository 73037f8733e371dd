"""RULER's tasks at every length: their rows, their scores, thirteen tasks and their groups per length."""

from typing import Any

from pod.eval.suites import data
from pod.eval.suites.configs import Config, group_config, task_config
from pod.eval.suites.lengths import BUILT, NAMES
from pod.eval.suites.ruler import metrics, samples
from pod.eval.suites.ruler.prompts import PROMPTS, TASKS, TYPES

ANY_LENGTH = 4096  # of the tasks without a length in their name, when `ruler_length` says nothing


def rows(**metadata: Any) -> dict[str, Any]:
    """The data set of a task.

    metadata: `ruler` of the configuration {task, length, samples, seed}; `ruler_length`, `ruler_samples` and `ruler_seed` (lm-eval's
    `--metadata`) go before it.
    """
    settings = metadata["ruler"]
    chosen = {key: metadata.get(f"ruler_{key}", settings[key]) for key in ("length", "samples", "seed")}
    for key, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (key != "seed"):
            raise ValueError(f"ruler_{key} must be a whole number above 0, not {value!r}")
    tokenizer = data.load_tokenizer(metadata)
    found = samples.make_rows(
        settings["task"], chosen["length"], tokenizer, chosen["seed"], chosen["samples"]
    )
    return {"test": found}


def score_all(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The share of the answers found."""
    value = metrics.string_match_all(results[0], doc["answers"])
    return {"score": value, "string_match_all": value}


def score_part(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether any of the answers is found."""
    value = metrics.string_match_part(results[0], doc["answers"])
    return {"score": value, "string_match_part": value}


def configs() -> list[Config]:
    """Of every length, and of any: the tasks and the group of all; of every length groups by kind, too."""
    found = []
    for prefix, length in [
        ("pod_ruler", ANY_LENGTH),
        *((f"pod_ruler_{name}", n) for name, n in NAMES.items()),
    ]:
        found += [_task(f"{prefix}_{task}", task, length) for task in TASKS]
        found.append(group_config(prefix, [f"{prefix}_{task}" for task in TASKS]))
        found += _by_type(prefix) if prefix != "pod_ruler" else []
    return found


def _task(name: str, task: str, length: int) -> Config:
    asked = TASKS[task]
    return task_config(
        name,
        rows,
        score_part if asked.metric == "string_match_part" else score_all,
        prompt="input",
        target="answers",
        new_tokens=PROMPTS[asked.prompt].new_tokens,
        metrics=(asked.metric, "score"),
        rules={
            "chat_template": True,
            "truncation": "none",
            "kind": "binary" if asked.binary else "score",
            "source": "https://github.com/NVIDIA/RULER",
            "license": "Apache-2.0",
        },
        metadata={"ruler": {"task": task, "length": length, "samples": 500, "seed": 42}},
        gen_prefix="prefix",
        **BUILT,
    )


def _by_type(prefix: str) -> list[Config]:
    """Groups of the kinds that have several tasks, and one of all kinds: the mean over eight kinds instead of thirteen tasks, as in
    SimLayerKV's Table 3."""
    several = {kind: tasks for kind, tasks in TYPES.items() if len(tasks) > 1}
    kinds = [f"{prefix}_{kind if kind in several else tasks[0]}" for kind, tasks in TYPES.items()]
    groups = [group_config(f"{prefix}_{k}", [f"{prefix}_{task}" for task in t]) for k, t in several.items()]
    return [*groups, group_config(f"{prefix}_by_type", kinds, "members")]
