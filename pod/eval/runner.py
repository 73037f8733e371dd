"""One evaluation: check the inputs, measure every method on every task at equal bytes, keep each result, write the report."""

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pod.eval.answer.budget import ByteBudgets, Subject, measure_bytes
from pod.eval.answer.methods import Method, find_method, with_requests
from pod.eval.answer.models import Models
from pod.eval.answer.ranks import Ranks
from pod.eval.answer.store import AnswerError, Shelf, Store, Unanswered, key_of
from pod.eval.results import RunResults, code_identity, fingerprint, one_line, with_files
from pod.eval.speed.args import NAME as SPEED_RUN
from pod.eval.speed.args import speed_options
from pod.eval.suites import base, data

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
        self.store = Store(recipe.eval_dir / "answers", self.ranks, self.args.reuse)
        self._bytes = Store(recipe.eval_dir / "answers", self.ranks).shelf("bytes", {"code": code_identity()})
        measure = None if self.models.reference_kind is None else self._pod_bytes
        self.budgets = ByteBudgets(self.models.bytes_per_token(), measure)
        self._may_answer = True
        self.speed = speed_options(self.args)
        with data.use(self.args.data_dir, self.tokenizer, self.args.unsafe_code):
            self.tasks = make_tasks(self)
        self._check_lengths()
        self._check_options()

    def _check_lengths(self) -> None:
        """ValueError for a task that no method can be fed, and for speeds that some method cannot be measured at."""
        lengths = "its lengths (eval.text_length, eval.passkey_lengths …)"
        asked = [(name, task.longest(), all, lengths) for name, task in self.tasks.items()]
        if SPEED_RUN in self.args.tasks:
            longest = max(self.args.longest_speed_run(), *self.speed.lengths(), 0)
            asked.append((SPEED_RUN, longest, any, "eval.efficiency_lengths"))
        for name, longest, refused, settings in asked:
            found = [self.models.too_long(find_method(method), longest) for method in self.args.methods]
            if refused(found):
                raise ValueError(f"{name} would {next(filter(None, found))}: lower {settings}")

    def _check_options(self) -> None:
        """ValueError for an option that a method does not have or take."""
        specs = {name: spec for name in self.args.method_options if (spec := find_method(name).spec)}
        if specs:
            import pod  # which loads torch
            from pod.modeling.methods.base import all_parameters, parse

            for name, spec in specs.items():
                parts = parse(pod.methods(), spec)[0]
                all_parameters(spec, list(parts.values()), self.args.method_options[name])

    def refuses(self, method: Method, task: base.Task) -> str | None:
        """Why a method is not measured by a task, in one line; None when it is."""
        too_long = self.models.too_long(method, task.longest())
        return task.refuses(method) or (too_long and f"it would {too_long}")

    def _pod_bytes(self, lengths: list[int]) -> dict[int, dict[str, int]]:
        """PoD's bytes by part at these and all lengths of the run."""
        kind, layout = self.models.reference_kind, self.models.reference_layout()
        assert kind is not None, "without a PoD model nothing asks"
        lengths = sorted({*lengths, *self._lengths()})
        with self._bytes.asked_by("bytes of PoD", self._may_answer) as shelf:
            found = shelf.answers(
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

    def method(self, name: str) -> Method:
        """A method of the recipe. With options of its own (the gate skip of PoD, say), or a plan that packs, one forward pass may
        differ from its decode path; the dense weights under a plan are PoD whatever the recipe calls them."""
        found = find_method(name)
        exact = found.one_shot or (found.spec is None and self.models.sources[found.model].plan is not None)
        differs = self.args.method_options.get(name) or (exact and self.models.packs(found.model))
        return replace(found, one_shot=exact and not differs)

    def subject(self, method: Method) -> Subject:
        """A method with its model and its caches."""
        return Subject(method, lambda: self.models.get(method.model), self.options(method), self.budgets)

    def options(self, method: Method) -> dict[str, Any]:
        """Parameters of a method's caches; razor finds the heads that were searched for this recipe, kvzip its requests."""
        options = with_requests(method.spec, self.args.method_options.get(method.name, {}), self.tokenizer)
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
        subject = self.subject(method)
        for span in task.spans():
            try:
                budget, prompt = subject.budget(span), task.prompt_of(method, span)
                if budget not in chunks:
                    chunks[budget] = getattr(subject.cache(span), "chunks", None)
                # whether a method that compresses chunk by chunk has a chunk left to read everywhere in such a prompt
                if chunks[budget] is not None and prompt > 0:
                    chunks[budget].start_prompt(prompt, 0, [SimpleNamespace(held=0)])
            except ValueError as error:
                where = f" at {span.length} tokens, {span.fed} of them after the prompt"
                at = where if method.takes_budget else ""
                raise ValueError(f"{method.name} cannot do {task.name}{at}: {one_line(error)}") from error

    def shelf(self, method: Method) -> Shelf:
        """The answers of a method: of this model, these options and this code."""
        identity = {
            "spec": method.spec,
            "one_shot": method.one_shot,
            "options": with_files(self.options(method)),
            "model": self.models.identity(method.model),
            "code": code_identity(),
        }
        return self.store.shelf(method.name, identity)

    def measure(self, method: Method, task: base.Task, is_open: bool) -> dict[str, Any]:
        """The part of a result file that a method's answers to a task come to.

        is_open: whether what is missing may be answered. Raises: Unanswered when it may not; whatever goes wrong in answering.
        """
        self._may_answer = is_open
        try:
            with self.shelf(method).asked_by(task.name, is_open) as shelf:
                payload = task.measure(self.subject(method), shelf) | shelf.account()
                skips = base.gate_metrics(payload.get("decisions", {}))
                return payload | ({"metrics": (payload.get("metrics") or {}) | skips} if skips else {})
        finally:
            self._may_answer = True

    def description(self, method: Method, is_open: bool) -> dict[str, Any]:
        """The method's model, for its result file."""
        with self.shelf(method).asked_by("model", is_open) as shelf:
            found = shelf.answers(
                [method.model],
                key=lambda kind: key_of("model"),
                batches=lambda left: [left],
                compute=lambda left: [self.models.description(kind) for kind in left],
            )
        return self.models.place(method.model) | found[0]


def make_tasks(run: Evaluation) -> dict[str, base.Task]:
    """The tasks of a recipe by name, in its order; those of this package first come from `suites/own`, the rest from lm-eval.

    Raises: ValueError for an unknown task, naming the nearest, and for whatever a task lacks (data, a chat template …).
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
        from pod.eval.lm.tasks import make_lm_tasks

        tasks |= make_lm_tasks(run, theirs)
    return {name: tasks[name] for name in run.args.tasks if name in tasks}


def evaluate(recipe: "Recipe", log: Log = _print_now) -> dict[str, dict]:
    """Run the `eval` section of a recipe; returns the results by method.

    Its steps: *answer* asks the models what is not answered yet (<output_dir>/eval/answers), *score* makes <output_dir>/eval/<method>.json
    of the answers, *report* writes report.html, report.md and report.csv. A method that fails is recorded in its file and the others
    go on. Under torchrun every rank answers a share of the samples and rank 0 writes.

    Raises: ValueError before any computation for wrong input; RuntimeError at the end when a method failed.
    """
    ranks = Ranks()
    try:
        return _evaluate(Evaluation(recipe, log, ranks))
    finally:
        ranks.close()


def _evaluate(run: Evaluation) -> dict[str, dict]:
    # these load torch and matplotlib, which counts for --dry-run need not
    from pod.eval.report.write import write_report
    from pod.eval.speed.task import check, is_known, measure_speed

    recipe, answers = run.recipe, "answer" in run.args.steps
    timed = SPEED_RUN in run.args.tasks and answers
    methods = {name: run.method(name) for name in recipe.eval.methods}
    results = {name: _method_results(run, method) for name, method in methods.items()}
    pending = {name: _score_known(run, methods[name], result) for name, result in results.items()}
    if answers:
        for name, tasks in pending.items():
            for task in tasks:
                run.check_caches(methods[name], run.tasks[task])
        if timed and not is_known(run, results):
            check(run)
        for name, tasks in pending.items():
            _answer(run, methods[name], results[name], tasks)
    elif any(pending.values()):
        missing = "; ".join(f"{name}: {', '.join(tasks)}" for name, tasks in pending.items() if tasks)
        run.log(f"not answered yet, the step `answer` does it: {missing}")
    if run.ranks.is_first:
        if timed:
            measure_speed(run, results)
        if "report" in run.args.steps:
            run.log(f"report: {write_report(recipe)}")
    failed = {name: result.content["failed"] for name, result in results.items() if result.content["failed"]}
    if failed:
        errors = "; ".join(
            f"{name}: {task}: {text}" for name, of in failed.items() for task, text in of.items()
        )
        said = f"{len(failed)} of {len(results)} methods failed ({errors})"
        raise RuntimeError(f"{said}; the others are in {recipe.eval_dir}")
    return {name: result.content for name, result in results.items()}


def _method_results(run: Evaluation, method: Method) -> RunResults:
    header = {"title": method.title, "spec": method.spec, "seed": run.recipe.seed, "config": asdict(run.args)}
    follows = (method.takes_budget and method.budget is None) or method.spec == "pod"
    # plan and windows behind the budget: results under another plan are no more of the same row
    bytes_of = fingerprint(run.models.reference_layout())[:16] if follows else None
    model, options = run.models.identity(method.model), with_files(run.options(method))
    header["row"] = fingerprint([method.spec, options, model, bytes_of])[:16]
    header["dense"] = fingerprint(run.models.identity("dense"))[:16]
    results = RunResults(run.recipe.eval_dir / method.file_name, method.name, header, run.ranks.is_first)
    if results.left_out:
        gone = ", ".join(results.left_out)
        run.log(
            f"{method.name}: {gone} left out: they are of another model, plan or options (their answers stay)"
        )
    return results


def _score_known(run: Evaluation, method: Method, results: RunResults) -> list[str]:
    """Score the tasks whose answers are all there; returns the others. What a task refuses is noted."""
    pending, refused = [], {}
    for name, task in run.tasks.items():
        reason = run.refuses(method, task)
        if reason is not None:
            refused[name] = reason
            run.log(f"{method.name}: {name} skipped: {reason}")
        elif not run.args.reuse or run.shelf(method).is_empty or not _is_known(run, method, results, name):
            pending.append(name)
    results.content["refused"] = refused
    if run.tasks and not pending and "score" in run.args.steps:
        results.finish()
    return pending


def _is_known(run: Evaluation, method: Method, results: RunResults, task: str) -> bool:
    """Whether the answers to a task are all there; if so they are scored."""
    try:
        _score(run, method, results, task, is_open=False)
    except Unanswered:
        return False
    except Exception:
        if "answer" not in run.args.steps:
            raise
        return False  # it comes again in answering, where it is recorded and the others go on
    return True


def _score(run: Evaluation, method: Method, results: RunResults, task: str, is_open: bool) -> None:
    """Score a task; is_open: what is missing is answered."""
    began = time.perf_counter()
    part = run.measure(method, run.tasks[task], is_open)
    description = run.description(method, is_open)
    if "score" in run.args.steps:
        results.content["model"] = description
        results.store(task, part)
    how = f" ({time.perf_counter() - began:.0f} s)" if is_open else ", answered before"
    run.log(f"{method.name}: {task} {run.tasks[task].headline(part)}{how}")


def _answer(run: Evaluation, method: Method, results: RunResults, pending: list[str]) -> None:
    """Answer and score what is missing. One task's failure does not lose the others."""
    for name in pending:
        run.log(f"{method.name}: {name} …")
        try:
            _score(run, method, results, name, is_open=True)
        except Exception as error:
            if run.ranks.world_size > 1 and not isinstance(error, AnswerError):
                raise  # the other ranks may wait inside this task: only a restart helps, and the answers stay
            results.fail(name, error)
            run.log(f"{method.name}: {name} FAILED: {one_line(error)}")
    if pending and not results.content["failed"] and "score" in run.args.steps:
        results.finish()
