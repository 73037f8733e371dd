"""What the names of tasks say: a task's suite, its name there, and its category.

Papers average the tasks of a category first, and then the categories.
"""

import re

from pod.eval.suites.leval.leval_tasks import GROUPS
from pod.eval.suites.longbench.longbench_tasks import CATEGORIES as _LONGBENCH

_SUITE = re.compile(r"(pod_(?:longbench_e|longbench|leval|infinitebench(?:_\d+k)?|ruler(?:_\d+k?)?))_(.+)")
_WHOLE = re.compile(r"e|\d+k|\d+(_\w+)?")
_LEVAL = {"closed": "closed", "open_qa": "f1", "open_summarization": "rouge"}
CATEGORIES = {
    "longbench": {name: tuple(tasks) for name, tasks in _LONGBENCH.items()},
    "leval": {name: tuple(GROUPS[f"pod_leval_{group}"]) for name, group in _LEVAL.items()},
}
"""By suite and category, the tasks that papers average."""


def parts_of(task: str) -> tuple[str, str] | None:
    """`pod_ruler_4k_vt` → (`pod_ruler_4k`, `vt`).

    Returns: None for a task of no suite, and for a whole suite.
    """
    found = _SUITE.fullmatch(task)
    return None if found is None or _WHOLE.fullmatch(found[2]) else (found[1], found[2])


def suite_of(task: str) -> str | None:
    """`pod_ruler_4k_vt` → `pod_ruler_4k`."""
    found = parts_of(task)
    return None if found is None else found[0]


def short_name(task: str) -> str:
    """A task's name inside the table of its suite."""
    found = parts_of(task)
    return found[1] if found else task


def plain(name: str) -> str:
    """A name for readers: `pod_ruler_4k` → `ruler 4k`."""
    return name.removeprefix("pod_").replace("_", " ")


def categories_of(tasks: tuple[str, ...]) -> dict[str, tuple[tuple[str, ...], int]]:
    """For each category of a suite: those of `tasks` that it has, and how many tasks it has in all.

    The result is empty if fewer than two categories have any of the tasks.
    """
    suite = (suite_of(tasks[0]) or "").removeprefix("pod_")
    found = {}
    for name, members in CATEGORIES.get(suite, {}).items():
        here = tuple(task for task in tasks if short_name(task) in members)
        if here:
            found[name] = (here, len(members))
    return found if len(found) > 1 else {}
