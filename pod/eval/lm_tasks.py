"""Tasks of lm-eval, those in `pod/eval/tasks` included, as tasks of an evaluation."""

from pathlib import Path
from typing import TYPE_CHECKING

from pod.eval.methods import unknown
from pod.eval.runners import base

if TYPE_CHECKING:
    from pod.eval.runner import Evaluation

TASK_FOLDER = Path(__file__).parent / "tasks"


def make_lm_tasks(run: "Evaluation", names: list[str]) -> dict[str, base.Task]:
    """A task per name; a group of lm-eval is one task.

    Raises: ValueError for a name that neither this package nor lm-eval knows, with the nearest.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASK_FOLDER))
    known = [*base.names(), "efficiency", *manager.all_tasks]
    for name in names:
        if name not in known:
            raise unknown("task", name, known)
    raise ValueError("lm-eval tasks are not built yet")
