"""The tasks and groups of the suites, as configurations of lm-eval.

They are made in memory from a table per suite; no file is written.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pod.eval.suites.lm_eval_patch import patched

Config = dict[str, Any]
DocRow = dict[str, Any]
Scorer = Callable[[DocRow, list[str]], dict[str, float]]
"""The type of lm-eval's `process_results`: from a row and a list with its answer to numbers by metric."""
FOLDER = Path(__file__).parent


def scorer(metric: str, value: Callable[[str, DocRow], float]) -> Scorer:
    """A `Scorer` that gives one number under two names: the metric's, and `score`, which groups average.

    Args:
        value: the number, from the answer and its row.
    """

    def score(doc: DocRow, results: list[str]) -> dict[str, float]:
        found = value(results[0], doc)
        return {metric: found, "score": found}

    return score


def task_config(
    name: str,
    rows: Callable[..., dict[str, Any]],
    score: Scorer,
    *,
    prompt: str,
    target: str | Callable[[dict[str, Any]], Any],
    new_tokens: int,
    metrics: Sequence[str],
    rules: dict[str, Any],
    generation: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    **more: Any,
) -> Config:
    """The configuration of a task that generates an answer and scores it.

    Args:
        rows: makes the data set (lm-eval's `custom_dataset`).
        score: scores an answer (lm-eval's `process_results`).
        prompt, target: key of a row, or a template.
        new_tokens: tokens of an answer, at most.
        metrics: names of numbers that `score` returns, the primary one first. A task reports their means.
        rules: content of `metadata.pod` (see `pod.eval.lm.index.Rule`).
        generation: settings of the generation besides greedy and `new_tokens`.
        metadata: further arguments of `rows`.
        more: other settings of lm-eval.
    """
    return {
        "task": name,
        "custom_dataset": rows,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": prompt,
        "doc_to_target": target,
        "process_results": score,
        "generation_kwargs": {
            "max_gen_toks": new_tokens,
            "do_sample": False,
            "until": [],
            **(generation or {}),
        },
        "metric_list": [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
        ],
        "metadata": {
            "version": 1.0,
            **(metadata or {}),
            "pod": {"max_prompt_tokens": None, "metric": metrics[0], **rules},
        },
        **more,
    }


def group_config(prefix: str, end: str, members: Iterable[str], average: str | None = None) -> Config:
    """The configuration of the group `prefix + end`, whose value is the mean of its members' `score`.

    Args:
        members: its members are the tasks or groups `{prefix}_{member}`.
        average: `members` = each direct member counts alike; None = each task counts alike.
    """
    return {
        "group": prefix + end,
        "task": [f"{prefix}_{member}" for member in members],
        "aggregate_metric_list": [{"metric": "score", "aggregation": "mean", "weight_by_size": False}],
        "metadata": {"version": 1.0, **({"pod": {"average": average}} if average else {})},
    }


@functools.cache
def suite_configs() -> dict[str, dict[str, Config]]:
    """Every configuration by suite and by name of the task or group.

    A suite is a folder here, and its `<suite>_tasks.py` has `configs()`.
    """
    suites = sorted(file.parent.name for file in FOLDER.glob("*/*_tasks.py"))
    modules = {suite: importlib.import_module(f"{__package__}.{suite}.{suite}_tasks") for suite in suites}
    return {
        suite: {config.get("group") or config["task"]: config for config in module.configs()}
        for suite, module in modules.items()
    }


def find_config(name: str) -> tuple[str, Config] | None:
    """(suite, configuration) of one of our tasks or groups; None for any other name."""
    return next(((suite, found[name]) for suite, found in suite_configs().items() if name in found), None)


@contextlib.contextmanager
def known_to_lm_eval() -> Iterator[None]:
    """Inside the block every `TaskManager` that is made knows our tasks and groups.

    A user's own tasks and groups override ours of the same name.
    """
    from lm_eval.tasks._index import TaskIndex

    build = TaskIndex.build

    def build_with_ours(paths: Any, **options: Any) -> dict[str, Any]:
        index = build(paths, **options)
        for found in suite_configs().values():
            for name, config in found.items():
                entry = TaskIndex.entry_from_config(config)
                assert entry is not None
                index.setdefault(name, entry)
        return index

    with patched(TaskIndex, "build", staticmethod(build_with_ours)):
        yield
