"""What a task is.

A task is measured in one of two ways:

* `AnsweredTask` knows its samples and the cache sizes that they need. It asks one method after the other for
  its answers, and makes one payload of them. An evaluation treats our own tasks and those of lm-eval
  (`pod.eval.lm.lm_tasks`) alike.
* `SideBySideTask` measures all methods in turns, in one process.

To add a task, write a file in the folder `pod/eval/tasks` with one subclass of `Task` whose `name` is the
file's name; it is registered nowhere else. The keys of the payload of an answered task are the same for every
task, so that tables, intervals and comparisons are made in one place:

    kind              `nll` (samples hold sums of nats and token counts), `binary` (0 or 1) or
                      `score` (0 to 1)
    metric            what the number is called in its field: perplexity, accuracy, qa_f1, rougeL …
    higher_is_better  bool
    value, ci95       the number (perplexity; share; mean score) and its 95 % interval over samples, or None
    samples           one per answered sample: id, score (nll: sum in nats, with tokens), prompt_tokens,
                      prompt_hash; answer, target, budget_tokens and bytes where the task has them; optionally
                      cluster: what several samples share, such as a text that all of them ask about.
                      Intervals count clusters, not samples, as independent
    skipped           one per sample that was not answered: id, reason
    bytes             rows of `ByteBudgets.stated`, one per length
    settings          what the task did: prompt format, truncation, lengths …
    metrics           optional: other numbers by name, {value, ci95}
    curves            optional: what `curve` returns, one per curve
"""

import functools
import hashlib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pod.eval.answer.answer_cache import AnswerCache
from pod.eval.answer.budget import CacheSpan, MethodRunner
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.statistics.comparison import estimate_of
from pod.schema import build, section

if TYPE_CHECKING:
    from pod.eval.answer.model_set import Models
    from pod.eval.args import EvalArgs
    from pod.recipe import Recipe


@section
class NoOptions:
    """For tasks that read everything from the `eval` section."""


@dataclass(frozen=True)
class Run:
    """What tasks are made from: a recipe, the compared models, and the dense model's tokenizer."""

    recipe: "Recipe"
    models: "Models"
    tokenizer: Any

    @property
    def args(self) -> "EvalArgs":
        """The recipe's section `eval`."""
        return self.recipe.eval


class Task(ABC):
    """One thing to measure, the same for every method. See `AnsweredTask` and `SideBySideTask`.

    The constructor raises ValueError for whatever is wrong, before any model is loaded.

    Attributes:
        name: how recipes call the task.
        title: the heading of the task in tables.
        about: what the task measures, one sentence for `pod eval --list-tasks`.
        length_setting: the setting that says how long its sequences are, as `eval.text_length`.
        Options: dataclass of `eval.task_options.<name>`, one docstring per field.
    """

    name: str
    title: str
    about: str
    length_setting: ClassVar[str]
    Options: ClassVar[type] = NoOptions

    def __init__(self, recipe: "Recipe", options: Any):
        self.recipe, self.args, self.options = recipe, recipe.eval, options

    @abstractmethod
    def spans(self) -> list[CacheSpan]:
        """The sizes of every cache that the task will make."""

    @abstractmethod
    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        """(prompt tokens, decode steps) that a method takes at most; for `searches` at least.

        A decode step decodes one token in every row of a batch.
        """

    def searches(self) -> list[str]:
        """Names of the settings whose work depends on the machine. `token_counts` counts its beginning."""
        return []

    def longest(self) -> int:
        """The longest sequence that is fed to a model (tokens), new tokens included."""
        return max((span.length for span in self.spans()), default=0)

    def load_tokens(self) -> int:
        """Tokens of each row of a batch that must fit beside the weights where a model is placed on GPUs."""
        return self.longest()


class AnsweredTask(Task):
    """A task that one method after the other answers. Its constructor makes or reads the samples."""

    def __init__(self, run: Run, options: Any):
        super().__init__(run.recipe, options)
        self.run = run

    @abstractmethod
    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> Any:
        """A method's answers to the samples, as `score` takes them.

        They come from `answer_cache.answers`, which computes only the missing ones. Nothing else here may
        load a model.
        """

    @abstractmethod
    def score(self, runner: MethodRunner, answers: Any) -> dict[str, Any]:
        """The payload of a method's answers. It is computed from them without asking the model again."""

    def prompt_of(self, method: EvaluatedMethod, span: CacheSpan) -> int:
        """Tokens of the prompt in a cache of this size, one of `spans`."""
        return span.length - span.fed

    def refuses(self, method: EvaluatedMethod) -> str | None:
        """Why this task cannot measure this method, in one line; None when it can.

        Such a pair is skipped and named in the report.
        """
        return None

    def headline(self, payload: dict[str, Any]) -> str:
        """The result in a few words, as `17 of 20 correct`."""
        if payload["value"] is None:
            return f"no sample answered, {len(payload['skipped'])} skipped"
        if payload["kind"] == "binary":
            right = sum(sample["score"] for sample in payload["samples"])
            return f"{right:g} of {len(payload['samples'])} correct"
        metric = "" if payload["metric"] == self.name else f"{payload['metric']} "
        return f"{metric}{payload['value']:.4g}"


class SideBySideTask(Task):
    """A task that measures all methods in turns, in one process. It is made from the recipe alone.

    Its numbers can be compared only within one run. So they are measured all together or not at all. The part
    of every method's result file has two keys that tell the run: `asked` (see `asked`), and `environment`
    with its date. `pod.eval.report.speed` shows its rows: `lengths`, `max_batch` and `decoding`.
    """

    @abstractmethod
    def asked(self, layout: Any) -> str:
        """A digest that changes with anything that can change the numbers of all methods.

        Args:
            layout: JSON that changes with PoD's bytes.
        """

    @abstractmethod
    def measure(
        self, layout: Any, method_runners: Mapping[str, MethodRunner], log: Callable[[str], None]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Exception]]:
        """Measure all methods in turns.

        Args:
            layout: JSON that changes with PoD's bytes.
            method_runners: the methods by name, each with its model and its caches.
            log: takes lines about progress.
        Returns: by method, its part of its result file; and by method that failed, its error.
        """

    @abstractmethod
    def headline(self, parts: Mapping[str, dict[str, Any]]) -> str:
        """The result in a few words, from the parts of all methods."""

    def is_known(self, layout: Any, parts: Sequence[dict[str, Any] | None]) -> bool:
        """Whether the numbers of all methods are known, from one run with the present settings.

        Args:
            layout: JSON that changes with PoD's bytes.
            parts: this task's part of every method's result file; None where there is none.
        """
        known = [part for part in parts if part is not None]
        if not self.args.reuse or not known or len(known) < len(parts):
            return False
        dates = {part["environment"]["date"] for part in known}
        return len(dates) == 1 and {part["asked"] for part in known} == {self.asked(layout)}

    def check(self, method_runners: Mapping[str, MethodRunner]) -> None:
        """Make, as a check, every cache that methods with a budget will use.

        Raises:
            ValueError: for a budget below a method's minimum.
        """
        for runner in method_runners.values():
            for span in self.spans() if runner.method.takes_budget else ():
                runner.cache(span)


def names() -> list[str]:
    """The names of all tasks in the folder `pod/eval/tasks`, sorted. None of them is imported."""
    folder = Path(__file__).parents[1] / "tasks"
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]))


def task_class(name: str) -> type[Task]:
    """The class of a task in the folder `pod/eval/tasks`."""
    module = importlib.import_module(f"pod.eval.tasks.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__dict__.get("name") == name
    ]
    assert len(found) == 1, f"{module.__file__} must hold one Task named {name}"
    return found[0]


@functools.cache
def is_side_by_side(name: str) -> bool:
    """Whether a task measures all methods in turns, in one process. Tasks of lm-eval do not."""
    return name in names() and issubclass(task_class(name), SideBySideTask)


def side_by_side_tasks(recipe: "Recipe") -> dict[str, SideBySideTask]:
    """The tasks of a recipe that measure all methods in turns, by name, in the recipe's order.

    Raises:
        ValueError: for a wrong option.
    """
    tasks = {}
    for name in filter(is_side_by_side, recipe.eval.tasks):
        found = task_class(name)
        assert issubclass(found, SideBySideTask)
        options = make_options(found, recipe.eval.task_options.get(name, {}))
        tasks[name] = found(recipe, options)
    return tasks


def make_options(task: type[Task], values: dict[str, Any], name: str | None = None) -> Any:
    """The options of a task, as an instance of its dataclass `Options`.

    Args:
        values: what the recipe says in `eval.task_options`.
        name: how the recipe calls the task, when that is not the class's name.

    Raises:
        ValueError: for an unknown key, naming the nearest, and for a wrong value.
    """
    return build(task.Options, values, f"eval.task_options.{name or task.name}")


def prompt_hash(prompt: Any) -> str:
    """SHA-256 of a prompt's text (lone surrogates allowed) or token ids, 16 hex digits.

    It shows whether the prompts of two runs are equal.
    """
    text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def scored_payload(
    kind: str,
    metric: str,
    samples: list[dict[str, Any]],
    *,
    skipped: list[dict[str, Any]] | None = None,
    bytes_rows: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    higher_is_better: bool | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A payload from its samples, with `value` and its interval `ci95` over independent clusters.

    Args:
        kind, metric, samples, skipped, settings: keys of the payload (see the top of this file).
        bytes_rows: the payload's `bytes`.
        higher_is_better: None = True, but False for the kind `nll`.
        more: further keys of the payload.
    """
    found = estimate_of({"kind": kind, "samples": samples, "subtasks": more.get("subtasks")})
    return {
        "kind": kind,
        "metric": metric,
        "higher_is_better": kind != "nll" if higher_is_better is None else higher_is_better,
        "value": None if found is None else found.value,
        "ci95": None if found is None else found.interval,
        "samples": samples,
        "skipped": skipped or [],
        "bytes": bytes_rows or [],
        "settings": settings or {},
        **more,
    }


def gate_metrics(counts: dict[str, list[Any]]) -> dict[str, Any]:
    """What PoD's gate skipped, as the `metrics` of a payload.

    * `query heads that skip`: share of the followers' query heads.
    * `KV heads unread`: share of the followers' KV heads.
    * `attention saved`: share of the attention of PoD without skipping.
    * `saved over dense`: share of the dense model's attention, including what PoD saves without skipping.

    Args:
        counts: by name, the means per layer of what `answer.gates.skipped` counts.
    Returns: no metric where no decoded token had distant tokens before it.
    """
    if not any(counts.get("heads", ())):
        return {}
    of = {name: sum(layers) for name, layers in counts.items()}
    found = {
        "query heads that skip": of["heads_skipped"] / of["heads"],
        "KV heads unread": of["groups_skipped"] / of["groups"],
        "attention saved": of["saved"] / of["exact"],
        "saved over dense": 1 - (of["exact"] - of["saved"]) / of["dense"],
    }
    return {name: {"value": value, "ci95": None, "percent": True} for name, value in found.items()}


def curve(
    rows: list[dict[str, Any]], x: str, y: str, interval: str | None = None, **more: Any
) -> dict[str, Any]:
    """A curve of a payload, with a point for every row.

    Args:
        x, y: keys of `rows`, for the coordinates of a point.
        interval: key of `rows`, for the band [low, high] around the curve. It is drawn only if every row has
            one.
        more: title, x_label, y_label, log_x.
    """
    ends = [row[interval] for row in rows if interval and row[interval]]
    known = len(ends) == len(rows)
    return {
        "x": [row[x] for row in rows],
        "y": [row[y] for row in rows],
        "low": [end[0] for end in ends] if known else None,
        "high": [end[1] for end in ends] if known else None,
        **more,
    }
