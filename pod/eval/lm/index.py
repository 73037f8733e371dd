"""Which tasks lm-eval has, those of `pod/eval/suites` included, and how they are loaded.

They are loaded without lm-eval's notes, from local data if there is any, and with errors of one line.
"""

import contextlib
import difflib
import functools
import importlib.util
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pod.errors import one_line
from pod.eval.suites import task_base, task_data
from pod.eval.suites.configs import find_config, known_to_lm_eval, suite_configs
from pod.eval.suites.lm_eval_patch import patched

DROPS = ("middle", "start", "end", "document", "none")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`metadata.pod` of a task's or group's configuration.

    It says what may be done to a task's prompts, and how the task is scored.

    Attributes:
        chat_template: whether its prompts go into the tokenizer's chat template.
        truncation: the part that is dropped of a prompt that is too long: its middle, start or end, a part of
            its document (`doc["document"]`, see `pod.eval.lm.lm_prompts`), or none.
        keep: the end of a document that stays: start or end.
        max_prompt_tokens: the longest prompt (tokens), even if the model reads more; None = all it reads.
        metric: the primary one, `name` or `name,filter`.
        kind: `score`, `binary` or `nll`.
        average: of a group: `samples` (each counts alike), `tasks` (each leaf task counts alike) or `members`
            (each direct member counts alike).
        source, license: of data, prompts and scorer.
    """

    chat_template: bool = False
    truncation: str = "middle"
    keep: Literal["start", "end"] = "start"
    max_prompt_tokens: int | None = None
    metric: str | None = None
    kind: str | None = None
    average: str | None = None
    source: str | None = None
    license: str | None = None

    def __post_init__(self) -> None:
        if self.truncation not in DROPS:
            raise ValueError(f"metadata.pod.truncation = {self.truncation!r}: known are {', '.join(DROPS)}")


def rule_of(metadata: Any) -> Rule:
    """The rule in a task's metadata. A task without one (lm-eval's own) has the default rule."""
    given = metadata.get("pod") if isinstance(metadata, dict) else None
    known = Rule.__dataclass_fields__
    return Rule(**{key: value for key, value in (given or {}).items() if key in known})


@functools.cache
def own_rule(name: str) -> Rule:
    """The rule of a task in `pod/eval/suites` by its name alone; for any other task, the default."""
    found = find_config(name)
    return rule_of(found[1].get("metadata")) if found else Rule()


def check_known(names: list[str]) -> None:
    """Refuse names of tasks that neither this package nor lm-eval has.

    Raises:
        ValueError: for the first such name, naming the nearest task that there is.
    """
    ours = {*task_base.names(), *(name for found in suite_configs().values() for name in found)}
    others = set(names) - ours
    if not others or others == _in_files_of_lm_eval(others):
        return
    known = ours | set(task_manager(True).all_tasks)
    for name in names:
        if name in known:
            continue
        near = difflib.get_close_matches(name.lower(), sorted(ours), n=1, cutoff=0.5)
        near = near or difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown task {name!r}; {hint}`pod eval --list-tasks` lists them")


def _in_files_of_lm_eval(names: set[str]) -> set[str]:
    """The names that lm-eval's files literally contain as the name of a task, group or tag.

    Searching the files is quick; making the index of all tasks of lm-eval takes ten seconds.
    """
    said = rf"""["']?({"|".join(map(re.escape, names))})["']?\s*$"""
    key = r"""^["']?(?:(?:task|group|tag)["']?: *|tag["']?:(?:\s+- .*)*\s+- )"""
    line = re.compile(key + said, re.MULTILINE)
    folder = Path(lm_eval_file()).parent / "tasks"
    return {
        name for file in folder.rglob("*.yaml") for name in line.findall(file.read_text(encoding="utf-8"))
    }


@dataclass
class Loaded:
    """A task, group or tag of lm-eval.

    Attributes:
        leaves: leaf tasks (tasks that are no groups) by name, in order.
        share: of each leaf in the mean; None where each sample counts alike.
        is_group: whether it is a group, or a tag of several tasks.
    """

    name: str
    leaves: dict[str, Any]
    share: dict[str, float] | None
    is_group: bool


def load(name: str, metadata: dict[str, Any]) -> Loaded:
    """Load a task, group or tag, and read its data (see `pod.eval.suites.task_data.use`).

    Args:
        metadata: given to functions that make data.
    Raises:
        ValueError: for missing data, for code that may not be run, and for whatever else fails.
    """
    from lm_eval.tasks._factory import TaskFactory

    class Careful(TaskFactory):
        def _load_full_config(self, entry: Any, overrides: Any = None) -> dict[str, Any]:
            """Refuse before the task's module is imported: some load a metric that executes code then."""
            if (entry.cfg or {}).get("unsafe_code") and not task_data.unsafe_code():
                raise ValueError(
                    f"task {entry.name} executes code that the model writes: "
                    "set eval.unsafe_code to true on a machine where such code can do no harm"
                )
            return super()._load_full_config(entry, overrides)

    manager = task_manager(find_config(name) is None)
    manager._factory = Careful(meta=metadata)  # making a new index for other metadata takes ten seconds
    with quiet(), task_data.local_datasets(), in_one_line(f"task {name} cannot be loaded"):
        loaded = manager.load([name])
    group = loaded.get("groups", {}).get(name)
    leaves = dict(loaded["tasks"])
    if group is None:
        share = None if len(leaves) == 1 else {leaf: 1 / len(leaves) for leaf in leaves}
        return Loaded(name, leaves, share, len(leaves) > 1)
    return Loaded(name, leaves, _shares(group), True)


def _shares(group: Any) -> dict[str, float] | None:
    """The share of each leaf in the group's mean; None where each sample counts alike.

    The group's rule decides it (`Rule.average`). Without one, samples count alike where lm-eval weights by
    size, else leaves do.
    """
    by_size = any(item.weight_by_size for item in group.aggregate_metric_list or [])
    average = rule_of(group.metadata).average or ("samples" if by_size else "tasks")
    if average == "samples":
        return None
    if average not in ("tasks", "members"):
        raise ValueError(
            f"group {group.name}: average is {average!r}, allowed are samples, tasks and members"
        )
    shares: dict[str, float] = defaultdict(float)
    members = list(group) if average == "members" else group.get_all_tasks()
    for member in members:
        below = member.get_all_tasks() if hasattr(member, "get_all_tasks") else [member]
        for leaf in below:
            shares[leaf.task_name] += 1 / len(below) / len(members)
    return dict(shares)


def lm_eval_file() -> str:
    """The path of lm-eval's `__init__.py`. lm-eval is not imported.

    Raises:
        ValueError: when lm-eval is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ValueError(
            "tasks of lm-eval need its package: run pip install '.[eval]' in a clone of the repository"
        )
    return spec.origin


@functools.cache
def task_manager(with_lm_eval: bool) -> Any:
    """The index of our tasks, or of ours and lm-eval's. The second takes ten seconds to make."""
    lm_eval_file()
    from lm_eval.tasks import TaskManager

    with quiet(), known_to_lm_eval():
        return TaskManager(include_defaults=with_lm_eval)


@contextlib.contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Turn errors of a task's own code or data into ValueErrors of one line that begins with `what`.

    ValueErrors stay as they are.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"{what}: {one_line(error, with_class=True)}") from error


@contextlib.contextmanager
def quiet_logger(name: str) -> Iterator[None]:
    """Inside the block the logger of this name logs errors only."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the block lm-eval logs errors only, and shows no progress bar for every list of prompts."""
    import lm_eval.api.task
    from datasets.utils import logging as bars

    def without_a_bar(items: Any, **options: Any) -> Any:
        return items

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with quiet_logger("lm_eval"), patched(lm_eval.api.task, "tqdm", without_a_bar):
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
