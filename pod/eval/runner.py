"""One evaluation: check the inputs, measure every method on every task at equal bytes, keep each result, write the report."""

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pod
from pod.eval.budget import ByteBudgets, native_bytes_per_token, stated, without_limit
from pod.eval.journal import AnswerError, Journal
from pod.eval.methods import Method, find_method
from pod.eval.models import Models
from pod.eval.ranks import Ranks
from pod.eval.report.write import write_report
from pod.eval.results import RunResults, code_identity, environment, fingerprint, one_line, with_files
from pod.eval.runners import base
from pod.eval.speed.args import NAME as SPEED_RUN
from pod.eval.speed.args import speed_options
from pod.eval.speed.task import check as check_speed
from pod.eval.speed.task import measure_speed
from pod.eval.suites import data
from pod.files import sha256_file

if TYPE_CHECKING:
    from pod.recipe import Recipe

Log = Callable[[str], None]
_print_now: Log = functools.partial(print, flush=True)


class Evaluation:
    """The state of one run: recipe, models, tasks with their samples, byte budgets. Models are loaded when first needed.

    Raises: ValueError, before any computation, for whatever is missing.
    """

    def __init__(self, recipe: "Recipe", log: Log = _print_now, ranks: Ranks | None = None):
        self.recipe, self.args = recipe, recipe.eval
        self.ranks = ranks or Ranks()
        self.log: Log = log if self.ranks.is_first else lambda line: None
        self.models = Models(recipe)
        self.tokenizer = self.models.tokenizer()
        self._budgets: ByteBudgets | None = None
        if SPEED_RUN in self.args.tasks:
            speed_options(self.args)  # a wrong one is an error now
        with data.use(self.args.data_dir, self.tokenizer, self.args.unsafe_code):
            self.tasks = make_tasks(self)
        self.models.check_lengths(self.longest())

    def longest(self) -> int:
        """The longest sequence that any task feeds to a model (tokens)."""
        lengths = [task.longest() for task in self.tasks.values()]
        if SPEED_RUN in self.args.tasks:
            lengths += [self.args.longest_speed_run(), *speed_options(self.args).lengths()]
        return max(lengths, default=0)

    @property
    def budgets(self) -> ByteBudgets | None:
        """PoD's measured bytes; None when no PoD model is at hand (and no method needs them)."""
        if self._budgets is None and self.models.reference_kind is not None:
            self._budgets = ByteBudgets(self.models.get(self.models.reference_kind), self._lengths())
        return self._budgets

    def _lengths(self) -> set[int]:
        """Every length at which bytes are compared."""
        lengths = {span.length for task in self.tasks.values() for span in task.spans()}
        if SPEED_RUN in self.args.tasks:
            lengths |= {*self.args.efficiency_lengths, *speed_options(self.args).lengths()}
        return lengths

    def method(self, name: str) -> Method:
        """A method of the recipe. With options of its own (the gate skip of PoD, say), or a plan that packs, one forward pass may
        differ from its decode path."""
        found = find_method(name)
        differs = self.args.method_options.get(name) or (found.one_shot and self.models.packs(found.model))
        return replace(found, one_shot=False) if differs else found

    def budget(self, method: Method, length: int, fed: int) -> int | None:
        """The budget (tokens per KV head and layer) of a method whose cache reaches `length` tokens, `fed` of them after the prompt."""
        if not method.takes_budget:
            return None
        if method.budget is not None:
            return method.fixed_budget(length)
        assert self.budgets is not None, "Models refuses methods with a budget when there is no reference"
        return self.budgets.tokens(method, length, fed)

    def cache(self, method: Method, length: int, fed: int) -> tuple[Any, int | None]:
        """A new cache for a method, and its budget, so that it holds PoD's bytes once it has seen `length` tokens."""
        budget = self.budget(method, length, fed)
        options = self.options(method)
        room = budget if method.budget is not None else without_limit(budget, length)
        return pod.make_cache(self.models.get(method.model), method.spec, budget=room, **options), budget

    def options(self, method: Method) -> dict[str, Any]:
        """Parameters of a method's caches; razor finds the heads that were searched for this recipe."""
        options = self.args.method_options.get(method.name, {})
        heads = self.recipe.plan_dir / "retrieval_heads.json"
        if "razor" in (method.spec or "").split("+") and "heads" not in options and heads.is_file():
            return options | {"heads": str(heads)}
        return options

    def check_caches(self, method: Method, task: base.Task) -> None:
        """Make every cache that a task will use, so that a method that cannot run the model, a wrong option or a budget below the
        method's minimum is an error before any measuring.

        Raises: ValueError that names the method and the task.
        """
        chunks: dict[int | None, Any] = {}
        for span in task.spans():
            try:
                budget = self.budget(method, span.length, span.fed)
                if budget not in chunks:
                    chunks[budget] = getattr(self.cache(method, span.length, span.fed)[0], "chunks", None)
                _check_chunks(chunks[budget], span.length - span.fed)
            except ValueError as error:
                at = (
                    f" at {span.length} tokens, {span.fed} of them after the prompt"
                    if method.takes_budget
                    else ""
                )
                raise ValueError(f"{method.name} cannot do {task.name}{at}: {one_line(error)}") from error

    def stated_bytes(self, length: int, budget: int | None, held: list[int]) -> dict[str, Any]:
        """What a result says about its bytes; held: bytes per sequence of every cache that was used."""
        model = self.models.get(self.models.kinds[0])
        return stated(self.budgets, native_bytes_per_token(model), length, budget, held)

    def fingerprint(self, task: base.Task, method: Method) -> str:
        """Changes with anything that can change a method's result on a task."""
        return fingerprint(
            {
                "part": task.name,
                "code": [code_identity(), sha256_file(inspect.getfile(type(task)))],
                "seed": self.recipe.seed,
                "reference": self.models.reference_layout(),
                "method": asdict(method),
                "options": with_files(self.options(method)),
                "model": self.models.identity(method.model),
                "task_options": asdict(task.options),
                **{"task": task.inputs()},
            }
        )

    def speed_fingerprint(self) -> str:
        """Changes with anything that can change the speeds."""
        args, models = self.args, self.models
        return fingerprint(
            {
                "part": SPEED_RUN,
                "code": code_identity("eval/speed/*.py"),
                "seed": self.recipe.seed,
                "reference": models.reference_layout(),
                "models": {kind: models.identity(kind) for kind in models.kinds},
                "run": [
                    args.methods,
                    {name: with_files(options) for name, options in args.method_options.items()},
                    args.efficiency_lengths,
                    args.efficiency_tokens,
                    args.efficiency_repeats,
                ],
                "options": asdict(speed_options(args)),
                "hardware": environment()["hardware"],
            }
        )

    def journal(self, method: Method, task: base.Task, inputs: str) -> Journal:
        """Where the finished samples of a method on a task are kept until all are."""
        return Journal(self.recipe.eval_dir / "journal", method.name, task.name, inputs, self.ranks)


def _check_chunks(chunks: Any, prompt: int) -> None:
    """Whether a method that compresses chunk by chunk has a chunk left to read everywhere in a prompt of so many tokens.

    Raises: ValueError, which it would else raise in the middle of the run.
    """
    if chunks is not None and prompt > 0:
        chunks.start_prompt(prompt, 0, [SimpleNamespace(held=0)])


def make_tasks(run: Evaluation) -> dict[str, base.Task]:
    """The tasks of a recipe by name, in its order; those of this package first come from `runners`, the rest from lm-eval.

    Raises: ValueError for an unknown task, naming the nearest, and for whatever a task lacks (data, a chat template …).
    """
    ours, tasks = base.names(), {}
    for name in run.args.tasks:
        if name in ours:
            found = base.task_class(name)
            options = base.make_options(found, run.args.task_options.get(name, {}))
            tasks[name] = found(run, options)
    theirs = [name for name in run.args.tasks if name not in tasks and name != SPEED_RUN]
    if theirs:
        from pod.eval.lm.tasks import make_lm_tasks

        tasks |= make_lm_tasks(run, theirs)
    return {name: tasks[name] for name in run.args.tasks if name in tasks}


def evaluate(recipe: "Recipe", log: Log = _print_now) -> dict[str, dict]:
    """Run the `eval` section of a recipe; returns the results by method.

    Writes <output_dir>/eval/<method>.json, efficiency.json, report.html and report.md. A method that fails is recorded in its
    file and the others go on. Under torchrun every rank answers a share of the samples and rank 0 writes.

    Raises: ValueError before any computation for wrong input; RuntimeError at the end when a method failed.
    """
    ranks = Ranks()
    try:
        return _evaluate(Evaluation(recipe, log, ranks))
    finally:
        ranks.close()


def _evaluate(run: Evaluation) -> dict[str, dict]:
    recipe = run.recipe
    errors = {}
    methods = {name: run.method(name) for name in recipe.eval.methods}
    results = {name: _method_results(run, method) for name, method in methods.items()}
    pending = {name: _pending_tasks(run, methods[name], result) for name, result in results.items()}
    for name, parts in pending.items():
        for part in parts:
            run.check_caches(methods[name], run.tasks[part])
    if SPEED_RUN in recipe.eval.tasks and not _speed_is_known(run):
        check_speed(run)
    for name, result in results.items():
        error = _measure_method(run, methods[name], result, pending[name])
        if error:
            errors[name] = error
    if run.ranks.is_first:
        if SPEED_RUN in recipe.eval.tasks:
            errors |= measure_speed(run)
        run.log(f"report: {write_report(recipe)}")
    if errors:
        what = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise RuntimeError(
            f"{len(errors)} of {len(results)} methods failed ({what}); the others are in {recipe.eval_dir}"
        )
    return {name: result.content for name, result in results.items()}


def _speed_is_known(run: Evaluation) -> bool:
    results = RunResults(run.recipe.eval_dir / f"{SPEED_RUN}.json", SPEED_RUN, {}, writes=False)
    return run.args.reuse and results.finished(SPEED_RUN, run.speed_fingerprint())


def _method_results(run: Evaluation, method: Method) -> RunResults:
    header = {"title": method.title, "spec": method.spec, "seed": run.recipe.seed, "config": asdict(run.args)}
    follows = (method.takes_budget and method.budget is None) or method.spec == "pod"
    # plan and windows behind the budget: results under another plan are no more of the same row
    header["bytes_of"] = fingerprint(run.models.reference_layout())[:16] if follows else None
    return RunResults(run.recipe.eval_dir / method.file_name, method.name, header, writes=run.ranks.is_first)


def _pending_tasks(run: Evaluation, method: Method, results: RunResults) -> dict[str, str]:
    """Tasks to measure with the fingerprints of their inputs. Outdated parts are dropped from the results."""
    wanted = {}
    refused = {}
    for name, task in run.tasks.items():
        reason = task.refuses(method)
        if reason is None:
            wanted[name] = run.fingerprint(task, method)
        else:
            refused[name] = reason
            run.log(f"{method.name}: {name} skipped: {reason}")
    results.content["refused"] = refused
    results.keep(wanted if run.args.reuse else {})
    for part, kept in results.content["parts"].items():
        run.log(f"{method.name}: {part} kept from {kept['environment']['date']}")
    return {part: inputs for part, inputs in wanted.items() if not results.finished(part, inputs)}


def _measure_method(
    run: Evaluation, method: Method, results: RunResults, pending: dict[str, str]
) -> str | None:
    """Measure what is missing; returns the error lines of the tasks that failed, joined. One task's failure does not lose the others."""
    errors = []
    for part, inputs in pending.items():
        run.log(f"{method.name}: {part} …")
        began = time.perf_counter()
        journal = run.journal(method, run.tasks[part], inputs)
        try:
            payload = run.tasks[part].measure(method, journal)
            results.content["model"] = run.models.description(method.model)
        except Exception as error:
            if run.ranks.world_size > 1 and not isinstance(error, AnswerError):
                raise  # the other ranks may wait inside this task: only a restart helps, and the journal keeps the answers
            results.fail(part, error)
            errors.append(f"{part}: {one_line(error)}")
            run.log(f"{method.name}: {part} FAILED: {one_line(error)}")
            continue
        results.store(part, inputs, time.perf_counter() - began, payload)
        journal.remove()
        headline = run.tasks[part].headline(payload)
        run.log(f"{method.name}: {part} {headline} ({time.perf_counter() - began:.0f} s)")
    if not errors:
        results.finish()
    return "; ".join(errors) or None
