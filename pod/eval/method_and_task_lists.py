"""What `pod eval --list-methods` and `--list-tasks` print. Neither needs torch."""

import textwrap
from collections.abc import Sequence

from pod.eval.answer.methods import UNADAPTED
from pod.eval.catalogue import describe, describe_each
from pod.eval.lm.lm_tasks import LmTask
from pod.eval.suites import task_base
from pod.eval.suites.configs import suite_configs
from pod.schema import explain, nearest

_WIDTH = 100


def list_methods(names: Sequence[str] = ()) -> str:
    """The methods of `pod.make_cache` with their parameters, as text: all of them, or the named ones.

    `pod-unadapted` has the parameters of `pod`; it is the same method on the dense weights.

    Raises: ValueError for a name that is no method, naming the nearest one.
    """
    if not names:
        return describe()
    blocks = describe_each()
    blocks[UNADAPTED] = blocks["pod"]
    return "\n\n".join(dict.fromkeys(_chosen("method", names, blocks)))


def _chosen(kind: str, names: Sequence[str], blocks: dict[str, str]) -> list[str]:
    for name in names:
        if name not in blocks:
            raise ValueError(
                f"unknown {kind} {name!r}{nearest(name, list(blocks))}; `pod eval --list-{kind}s` lists all"
            )
    return [blocks[name] for name in names]


def list_tasks(names: Sequence[str] = ()) -> str:
    """Tasks with their options, as text: all of them, or the named ones.

    The whole list has our own tasks, the suites in `pod/eval/suites`, and a line about lm-eval's own tasks.

    Raises:
        ValueError: for a name that is neither our own task nor a suite or one of its tasks, naming the
            nearest one. Tasks of lm-eval itself are not looked up.
    """
    own = _own_tasks()
    suites = _suites()
    options = "\n".join(["Options of every task of lm-eval and of the suites:", *explain(LmTask.Options, "")])
    if names:
        of_suites = {
            task: block for suite, block in suites.items() for task in [suite, *suite_configs()[suite]]
        }
        blocks = list(dict.fromkeys(_chosen("task", names, own | of_suites)))
        if any(name in of_suites for name in names):
            blocks.append(options)
        return "\n\n".join(blocks)
    parts = ["Tasks of this package (options: eval.task_options.TASK.OPTION):", *own.values()]
    parts += [
        "Suites (pod/eval/suites/README.md lists source, licence, metric, prompt and truncation):",
        *suites.values(),
    ]
    parts += [
        "Any task, group or tag of lm-eval (mmlu, hellaswag, arc_easy, arc_challenge, gsm8k, "
        "truthfulqa_mc1, …; `lm-eval ls tasks` lists them)."
    ]
    return "\n\n".join([*parts, options])


def _own_tasks() -> dict[str, str]:
    """By the name of a task: what it measures, and its options, as text.

    Tasks that measure all methods side by side come last.
    """
    blocks = {}
    for name in sorted(task_base.names(), key=task_base.is_side_by_side):
        task = task_base.task_class(name)
        blocks[name] = "\n".join([f"{name}: {task.about}", *explain(task.Options, "")])
    return blocks


def _suites() -> dict[str, str]:
    """By the name of a suite: the names of its tasks, as text."""
    blocks = {}
    for suite, found in suite_configs().items():
        tasks = textwrap.fill(", ".join(sorted(found)), _WIDTH, break_on_hyphens=False)
        blocks[suite] = f"  {suite}:\n{textwrap.indent(tasks, '    ')}"
    return blocks
