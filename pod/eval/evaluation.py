"""The state of one evaluation, and the answers of a method to a task.

The state is: recipe, models, tasks with their samples, and byte budgets.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pod.eval.answer.answer_cache import AnswerCache, AnswerFolder, key_of
from pod.eval.answer.budget import ByteBudgets, MethodRunner, measure_bytes
from pod.eval.answer.devices import Load
from pod.eval.answer.methods import EvaluatedMethod, find_method, parts_of, with_requests
from pod.eval.answer.model_set import Models
from pod.eval.answer.ranks import Ranks
from pod.eval.results import code_identity, one_line, with_files
from pod.eval.speed.args import NAME as SPEED_RUN
from pod.eval.speed.args import speed_options
from pod.eval.suites import base, task_data
from pod.notation import parse
from pod.registry import METHODS
from pod.registry.combine import all_parameters, chosen_methods
from pod.tokenizer import with_template_variables

if TYPE_CHECKING:
    from pod.recipe import Recipe

Log = Callable[[str], None]
print_now: Log = functools.partial(print, flush=True)


class Evaluation:
    """The state of one run: recipe, models, tasks with their samples, byte budgets.

    Models are loaded when they are first needed.

    Raises:
        ValueError: before any computation, for whatever is missing.
    """

    def __init__(self, recipe: "Recipe", log: Log = print_now, ranks: Ranks | None = None):
        self.recipe, self.args = recipe, recipe.eval
        self.ranks = ranks or Ranks()
        self.log: Log = log if self.ranks.is_first else lambda line: None
        self.models = Models(recipe)
        self.tokenizer = with_template_variables(
            self.models.tokenizer(),
            self.args.chat_template_kwargs,
            "eval.chat_template_kwargs",
            lambda line: self.log(f"warning: {line}"),
        )
        self.store = AnswerFolder(recipe.eval_dir / "answers", self.ranks, self.args.reuse)
        self._bytes = AnswerFolder(recipe.eval_dir / "answers", self.ranks).answers_of(
            "bytes", {"code": code_identity()}
        )
        measure = None if self.models.reference_kind is None else self._pod_bytes
        self.budgets = ByteBudgets(self.models.bytes_per_token(), measure)
        self._may_answer = True
        self.speed = speed_options(self.args)
        with task_data.use(self.args.data_dir, self.tokenizer, self.args.unsafe_code):
            self.tasks = make_tasks(base.Run(recipe, self.models, self.tokenizer))
        self._check_lengths()
        self._check_options()
        longest = [task.longest() for task in self.tasks.values()]
        if SPEED_RUN in self.args.tasks:
            longest.append(self.args.longest_speed_run())
        self.models.load = Load(self.args.batch_size, max(longest)) if longest else None

    def _check_lengths(self) -> None:
        """Refuse lengths that models cannot read.

        Raises:
            ValueError: for a task that no method can be fed, and for speeds that some method cannot be
                measured at.
        """
        for name, task in self.tasks.items():
            reasons = self._too_long(task.longest())
            if all(reasons):
                lengths = "its lengths (eval.text_length, eval.passkey_lengths …)"
                raise ValueError(f"{name} would {reasons[0]}: lower {lengths}")
        if SPEED_RUN in self.args.tasks:
            decoded = self.args.longest_speed_run() - max(self.args.efficiency_lengths)
            filled = [length + decoded for length in self.speed.decode_lengths]
            longest = max(self.args.longest_speed_run(), *self.speed.lengths(), *filled, 0)
            refusals = [reason for reason in self._too_long(longest) if reason is not None]
            if refusals:
                raise ValueError(f"{SPEED_RUN} would {refusals[0]}: lower eval.efficiency_lengths")

    def _too_long(self, longest: int) -> list[str | None]:
        """For each method, why it cannot be fed so many tokens; None where it can."""
        return [self.models.too_long(find_method(method), longest) for method in self.args.methods]

    def _check_options(self) -> None:
        """Raise ValueError for an option that a method does not have or take."""
        named = [method for name in self.args.method_options if (method := find_method(name)).spec]
        for method in named:
            chosen_methods(parse(method.name.replace("pod-unadapted", "pod")))
            parts = [METHODS[part] for part in parts_of(method)]
            all_parameters(str(method.spec), parts, self.args.method_options[method.name])

    def refuses(self, method: EvaluatedMethod, task: base.Task) -> str | None:
        """Why a task does not measure a method, in one line; None when it does."""
        too_long = self.models.too_long(method, task.longest())
        return task.refuses(method) or (too_long and f"it would {too_long}")

    def _pod_bytes(self, lengths: list[int]) -> dict[int, dict[str, int]]:
        """PoD's bytes by part at these and all lengths of the run."""
        kind, layout = self.models.reference_kind, self.models.reference_layout()
        assert kind is not None, "without a PoD model nothing asks"
        lengths = sorted({*lengths, *self._lengths()})
        with self._bytes.asked_by("bytes of PoD", self._may_answer) as answer_cache:
            found = answer_cache.answers(
                lengths,
                key=lambda length: key_of("bytes", layout, length),
                batches=lambda left: [left],
                compute=lambda left: list(measure_bytes(self.models.get(kind), "pod", left).values()),
            )
        return dict(zip(lengths, found, strict=True))

    def _lengths(self) -> set[int]:
        """Every length at which bytes are compared."""
        lengths = {span.length for task in self.tasks.values() for span in task.spans()}
        if SPEED_RUN in self.args.tasks:
            lengths |= {*self.args.efficiency_lengths, *self.speed.lengths()}
        return lengths

    def method(self, name: str) -> EvaluatedMethod:
        """A method of the recipe.

        One forward pass may differ from the method's decode path: with options of its own (the gate skip of
        PoD, say), or with a plan that packs. `one_shot` is then False. The dense weights under a plan are
        PoD, whatever the recipe calls them.
        """
        found = find_method(name)
        exact = found.one_shot or (found.spec is None and self.models.sources[found.model].plan is not None)
        differs = self.args.method_options.get(name) or (exact and self.models.packs(found.model))
        return replace(found, one_shot=exact and not differs)

    def runner(self, method: EvaluatedMethod) -> MethodRunner:
        """A method with its model and its caches."""
        return MethodRunner(method, lambda: self.models.get(method.model), self.options(method), self.budgets)

    def options(self, method: EvaluatedMethod) -> dict[str, Any]:
        """Parameters of a method's caches.

        razor finds the heads that were searched for this recipe, kvzip its requests.
        """
        options = with_requests(method, self.args.method_options.get(method.name, {}), self.tokenizer)
        heads = self.recipe.plan_dir / "retrieval_heads.json"
        if "razor" in parts_of(method) and "heads" not in options and heads.is_file():
            return options | {"heads": str(heads)}
        return options

    def check_caches(self, method: EvaluatedMethod, task: base.Task) -> None:
        """Make every cache that a task will use, before any measuring.

        Errors come at once: a method that cannot run the model, a wrong option, or a budget below the
        method's minimum.

        Raises:
            ValueError: it names the method and the task.
        """
        chunks: dict[int | None, Any] = {}
        runner = self.runner(method)
        for span in task.spans():
            try:
                budget, prompt = runner.budget(span), task.prompt_of(method, span)
                if budget not in chunks:
                    chunks[budget] = getattr(runner.trial(span), "chunks", None)
                # A method may compress chunk by chunk. This checks that everywhere in such a prompt it has a
                # chunk left to read.
                if chunks[budget] is not None and prompt > 0:
                    chunks[budget].start_prompt(prompt, 0, [SimpleNamespace(held=0)])
            except ValueError as error:
                where = f" at {span.length} tokens, {span.fed} of them after the prompt"
                at = where if method.takes_budget else ""
                raise ValueError(f"{method.name} cannot do {task.name}{at}: {one_line(error)}") from error

    def answers_of(self, method: EvaluatedMethod) -> AnswerCache:
        """The answers of a method: of this model, these options and this code."""
        identity = {
            "spec": method.spec,
            "one_shot": method.one_shot,
            "options": with_files(self.options(method)),
            "model": self.models.identity(method.model),
            "code": code_identity(),
        }
        return self.store.answers_of(method.name, identity | self.args.template_settings())

    def measure(self, method: EvaluatedMethod, task: base.Task, is_open: bool) -> dict[str, Any]:
        """The part of a result file that a method's answers to a task come to.

        Args:
            is_open: whether what is missing may be answered.
        Raises:
            Unanswered: when something is missing and may not be answered. Whatever goes wrong in answering is
                raised as it is.
        """
        self._may_answer = is_open
        try:
            with self.answers_of(method).asked_by(task.name, is_open) as answer_cache:
                payload = task.measure(self.runner(method), answer_cache) | answer_cache.account()
                skips = base.gate_metrics(payload.get("decisions", {}))
                return payload | ({"metrics": (payload.get("metrics") or {}) | skips} if skips else {})
        finally:
            self._may_answer = True

    def description(self, method: EvaluatedMethod, is_open: bool) -> dict[str, Any]:
        """The method's model, for its result file."""
        with self.answers_of(method).asked_by("model", is_open) as answer_cache:
            found = answer_cache.answers(
                [method.model],
                key=lambda kind: key_of("model"),
                batches=lambda left: [left],
                compute=lambda left: [self.models.description(kind) for kind in left],
            )
        return self.models.place(method.model) | found[0]


def make_tasks(run: base.Run) -> dict[str, base.Task]:
    """The tasks of a recipe by name, in its order.

    Tasks of this package come from `pod/eval/tasks` and are made first; the rest come from lm-eval.

    Raises:
        ValueError: for an unknown task, naming the nearest, and for whatever a task lacks (data, a chat
            template …).
    """
    ours, tasks = base.names(), {}
    if unasked := sorted(set(run.args.task_options) - set(run.args.tasks)):
        from pod.eval.lm.index import check_known

        check_known(unasked)
    for name in run.args.tasks:
        if name in ours:
            found = base.task_class(name)
            options = base.make_options(found, run.args.task_options.get(name, {}))
            tasks[name] = found(run, options)
    theirs = [name for name in run.args.tasks if name not in tasks and name != SPEED_RUN]
    if theirs:
        from pod.eval.lm.lm_tasks import make_lm_tasks

        tasks |= make_lm_tasks(run, theirs)
    return {name: tasks[name] for name in run.args.tasks if name in tasks}
