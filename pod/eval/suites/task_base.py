"""What a task is.

A task knows its samples and the cache sizes that they need. It asks a method for its answers, and makes one
payload of them. Our own tasks and those of lm-eval (`pod.eval.lm.lm_tasks`) are alike to the evaluation.

Our own task is a file in the folder `pod/eval/tasks` with one subclass of `Task` whose `name` is the file's
name; nothing else has to know it. The payload's keys are the same for every task, so that tables, intervals
and comparisons are made in one place:

    kind              `nll` (samples hold sums of nats and token counts), `binary` (0 or 1) or
                      `score` (0 to 1)
    metric            what the number is called in its field: perplexity, accuracy, qa_f1, rougeL …
    higher_is_better  bool
    value, ci95       the number (perplexity; share; mean score) and its 95 % interval over samples, or None
    samples           one per answered sample: id, score (nll: sum in nats, with tokens), prompt_tokens,
                      prompt_hash; answer, target, budget_tokens and bytes where the task has them; optionally
                      cluster: what several samples share, such as a text that all of them ask about.
                      Intervals draw clusters, not samples
    skipped           one per sample that was not answered: id, reason
    bytes             rows of `ByteBudgets.stated`, one per length
    settings          what the task did: prompt format, truncation, lengths …
    metrics           optional: other numbers by name, {value, ci95}
"""

import hashlib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pod.eval.answer.answer_cache import AnswerCache
from pod.eval.answer.budget import MethodRunner, Span
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
    """What tasks are made from: a recipe, the models that are compared, and the dense one's tokenizer."""

    recipe: "Recipe"
    models: "Models"
    tokenizer: Any

    @property
    def args(self) -> "EvalArgs":
        """The recipe's section `eval`."""
        return self.recipe.eval


class Task(ABC):
    """One thing to measure, the same for every method.

    The constructor makes or reads the samples. It raises ValueError for whatever is wrong, before any model
    is loaded.

    Attributes:
        name: how recipes call the task.
        title: what a table's head says.
        about: what the task measures, one sentence for `pod eval --list-tasks`.
        Options: dataclass of `eval.task_options.<name>`, one docstring per field.
    """

    name: str
    title: str
    about: str
    Options: ClassVar[type] = NoOptions

    def __init__(self, run: Run, options: Any):
        self.run, self.args, self.options = run, run.args, options

    @abstractmethod
    def spans(self) -> list[Span]:
        """The sizes of every cache that the task will make."""

    @abstractmethod
    def answer(self, runner: MethodRunner, answer_cache: AnswerCache) -> Any:
        """A method's answers to the samples, as `score` takes them.

        They stand in the method's answer cache. What is missing is asked through `answer_cache.answers`,
        and only that may load a model.
        """

    @abstractmethod
    def score(self, runner: MethodRunner, answers: Any) -> dict[str, Any]:
        """The payload of a method's answers: a function of nothing else."""

    @abstractmethod
    def token_counts(self, method: EvaluatedMethod) -> tuple[int, int]:
        """(prompt tokens, decode steps of a batch) that a method takes at most."""

    def prompt_of(self, method: EvaluatedMethod, span: Span) -> int:
        """Tokens of the prompt of one of these caches."""
        return span.length - span.fed

    def longest(self) -> int:
        """The longest sequence that is fed to a model (tokens), new tokens included."""
        return max((span.length for span in self.spans()), default=0)

    def refuses(self, method: EvaluatedMethod) -> str | None:
        """Why this task cannot measure this method, in one line; None when it can.

        Such a pair is skipped and named in the report.
        """
        return None

    def headline(self, payload: dict[str, Any]) -> str:
        """The result in a few words."""
        if payload["value"] is None:
            return f"no sample answered, {len(payload['skipped'])} skipped"
        if payload["kind"] == "binary":
            right = sum(sample["score"] for sample in payload["samples"])
            return f"{right:g} of {len(payload['samples'])} correct"
        metric = "" if payload["metric"] == self.name else f"{payload['metric']} "
        return f"{metric}{payload['value']:.4g}"


def names() -> list[str]:
    """Every task of the folder `pod/eval/tasks`. Imports none of them."""
    folder = Path(__file__).parents[1] / "tasks"
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]))


def task_class(name: str) -> type[Task]:
    """The class of one of these tasks."""
    module = importlib.import_module(f"pod.eval.tasks.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Task) and value.__dict__.get("name") == name
    ]
    assert len(found) == 1, f"{module.__file__} must hold one Task named {name}"
    return found[0]


def make_options(task: type[Task], values: dict[str, Any], name: str | None = None) -> Any:
    """`eval.task_options` of a task as its dataclass.

    Args:
        name: how the recipe calls the task, when that is not the class's name.

    Raises:
        ValueError: for an unknown key, naming the nearest, and for a wrong value.
    """
    return build(task.Options, values, f"eval.task_options.{name or task.name}")


def prompt_hash(prompt: Any) -> str:
    """SHA-256 of a prompt's text (lone surrogates allowed) or token ids, 16 hex digits.

    It shows across runs that equal prompts are equal.
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
    """A payload from its samples: the number and its interval over independent clusters.

    Higher is better, except for `nll`, unless `higher_is_better` says otherwise.
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
    """Means of `answer.gates.skipped` as metrics.

    The shares are of the followers' query heads, of the followers' KV heads, of the attention of PoD without
    skipping, and of the dense model's attention; the last one includes what PoD saves anyway. There are none
    where no decoded token had distant ones.
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
    """A curve of a payload.

    Args:
        x, y: keys of `rows`.
        interval: key of the band around the curve, which is drawn where every row has one.
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
