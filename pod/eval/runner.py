"""One evaluation, from the recipe to the report. This file reads from top to bottom, as it runs.

recipe → models, tasks, methods at equal bytes
       → for each method and task: answers → score → result file
       → for each task that measures all methods side by side: speeds
       → report page
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pod.errors import one_line
from pod.eval.answer.answer_cache import AnswerCache, AnswerError, AnswerFolder, Unanswered
from pod.eval.answer.budget import ByteBudgets, MethodRunner, measure_once
from pod.eval.answer.devices import Load
from pod.eval.answer.methods import EvaluatedMethod, find_method, parts_of, with_repeat_ids
from pod.eval.answer.model_set import Models
from pod.eval.answer.ranks import Ranks
from pod.eval.results import RunResults, code_identity, fingerprint, with_files
from pod.eval.suites import task_base, task_data
from pod.eval.suites.task_base import AnsweredTask, SideBySideTask, Task
from pod.notation import parse
from pod.registry import METHODS
from pod.registry.combine import all_parameters, chosen_methods
from pod.tokenizer import with_template_variables

if TYPE_CHECKING:
    from pod.eval.args import EvalArgs
    from pod.recipe import Recipe

Log = Callable[[str], None]
print_now: Log = functools.partial(print, flush=True)


def evaluate(recipe: "Recipe", log: Log = print_now) -> dict[str, dict]:
    """Run the `eval` section of a recipe.

    Its steps:

    * *answer* computes the missing answers with the models and keeps them in <output_dir>/eval/answers.
    * *score* computes <output_dir>/eval/<method>.json from the answers.
    * *report* writes report.html, report.md and report.csv.

    A method that fails is recorded in its file, and the others go on. Under torchrun every rank answers a
    share of the samples, and rank 0 writes.

    Returns: the results by method.
    Raises:
        ValueError: before any computation, for wrong input.
        RuntimeError: at the end, when a method failed.
    """
    ranks = Ranks()
    try:
        return _evaluate(recipe, ranks, log if ranks.is_first else lambda line: None)
    finally:
        ranks.close()


def _evaluate(recipe: "Recipe", ranks: Ranks, log: Log) -> dict[str, dict]:
    answers = "answer" in recipe.eval.steps
    inputs = prepare(recipe, log, ranks)
    results = {name: open_results(inputs, runner, log) for name, runner in inputs.method_runners.items()}
    pending = {name: _score_saved(inputs, name, results[name], log) for name in inputs.method_runners}
    if answers:
        for name, tasks in pending.items():
            for title in tasks:
                check_caches(inputs.method_runners[name], inputs.tasks[title])
        for task in inputs.side_by_side.values():
            if not _is_known(inputs, task, results):
                task.check(inputs.method_runners)
        for name, tasks in pending.items():
            _answer_and_score(inputs, name, tasks, results[name], log)
    elif any(pending.values()):
        missing = "; ".join(f"{name}: {', '.join(tasks)}" for name, tasks in pending.items() if tasks)
        log(f"no saved answers yet; the step `answer` computes them: {missing}")
    if ranks.is_first:
        with ranks.first_alone():
            if answers:
                for task in inputs.side_by_side.values():
                    measure_side_by_side(inputs, task, results, log)
            if "report" in recipe.eval.steps:
                from pod.eval.report.write import write_report  # this loads matplotlib

                log(f"report: {write_report(recipe)}")
    _raise_failures(recipe, results)
    return {name: result.content for name, result in results.items()}


# -- models, tasks, methods at equal bytes -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvalInputs:
    """What an evaluation works with. All of it is checked, and nothing is computed yet.

    Attributes:
        models: each model is loaded when it is first needed.
        tokenizer: that of the dense model.
        tasks: those that one method after the other answers, by name, in the recipe's order, with their
            samples.
        side_by_side: those that measure all methods in turns, by name, in the recipe's order.
        method_runners: the methods by name, each with its model, its options and its caches.
        store: the answers of all methods.
    """

    recipe: "Recipe"
    models: Models
    tokenizer: Any
    tasks: dict[str, AnsweredTask]
    side_by_side: dict[str, SideBySideTask]
    method_runners: dict[str, MethodRunner]
    store: AnswerFolder


def prepare(recipe: "Recipe", log: Log = print_now, ranks: Ranks | None = None) -> EvalInputs:
    """The inputs of an evaluation. No model is loaded.

    Raises:
        ValueError: for whatever is missing or wrong.
    """
    args, models = recipe.eval, Models(recipe)
    tokenizer = with_template_variables(
        models.tokenizer(),
        args.chat_template_kwargs,
        "eval.chat_template_kwargs",
        lambda line: log(f"warning: {line}"),
    )
    side_by_side = task_base.side_by_side_tasks(recipe)
    with task_data.use(args.data_dir, tokenizer, args.unsafe_code):
        tasks = make_tasks(task_base.Run(recipe, models, tokenizer))
    _check_lengths(args, models, tasks, side_by_side)
    _check_options(args)
    every = [*tasks.values(), *side_by_side.values()]
    models.load = Load(args.batch_size, max(task.load_tokens() for task in every)) if every else None
    store = AnswerFolder(recipe.eval_dir / "answers", ranks or Ranks(), args.reuse)
    budgets = _budgets(models, every, store)
    method_runners = {name: _method_runner(name, recipe, models, tokenizer, budgets) for name in args.methods}
    return EvalInputs(
        recipe=recipe,
        models=models,
        tokenizer=tokenizer,
        tasks=tasks,
        side_by_side=side_by_side,
        method_runners=method_runners,
        store=store,
    )


def make_tasks(run: task_base.Run) -> dict[str, AnsweredTask]:
    """The tasks of a recipe that one method after the other answers, by name, in its order.

    Tasks of this package come from `pod/eval/tasks` and are made first; the rest come from lm-eval.

    Raises:
        ValueError: for an unknown task, naming the nearest, and for whatever a task lacks (data, a chat
            template …).
    """
    ours, tasks = task_base.names(), {}
    if unasked := sorted(set(run.args.task_options) - set(run.args.tasks)):
        from pod.eval.lm.index import check_known

        check_known(unasked)
    asked = [name for name in run.args.tasks if not task_base.is_side_by_side(name)]
    for name in asked:
        if name in ours:
            found = task_base.task_class(name)
            assert issubclass(found, AnsweredTask)
            options = task_base.make_options(found, run.args.task_options.get(name, {}))
            tasks[name] = found(run, options)
    theirs = [name for name in asked if name not in ours]
    if theirs:
        from pod.eval.lm.lm_tasks import make_lm_tasks

        tasks |= make_lm_tasks(run, theirs)
    return {name: tasks[name] for name in asked}


def _check_lengths(
    args: "EvalArgs",
    models: Models,
    tasks: Mapping[str, AnsweredTask],
    side_by_side: Mapping[str, SideBySideTask],
) -> None:
    """Refuse lengths that models cannot read.

    Raises:
        ValueError: when a task's longest sequence is too long for the models of all methods, and when that of
            a task that measures all methods side by side is too long for the model of any method.
    """
    methods = [find_method(name) for name in args.methods]
    for name, task in tasks.items():
        reasons = [models.too_long(method, task.longest()) for method in methods]
        if all(reasons):
            raise ValueError(f"{name}: {reasons[0]}; lower {task.length_setting}")
    for name, task in side_by_side.items():
        for method in methods:
            reason = models.too_long(method, task.longest())
            if reason is not None:
                raise ValueError(f"{name}: {reason}; lower {task.length_setting}")


def _check_options(args: "EvalArgs") -> None:
    """Raise ValueError for a parameter that a method does not have, and for a value it does not allow."""
    for name in args.method_options:
        method = find_method(name)
        if method.spec is None:
            continue
        chosen_methods(parse(method.name.replace("pod-unadapted", "pod")))
        parts = [METHODS[part] for part in parts_of(method)]
        all_parameters(str(method.spec), parts, args.method_options[name])


def _budgets(models: Models, tasks: Sequence[Task], store: AnswerFolder) -> ByteBudgets:
    """The budgets that follow PoD's bytes, for every length at which bytes are compared.

    PoD's bytes are measured when a budget is first needed.
    """
    kind = models.reference_kind
    if kind is None:
        return ByteBudgets(models.bytes_per_token())
    lengths = {span.length for task in tasks for span in task.spans()}
    # reuse=True whatever eval.reuse says: how many bytes a cache holds does not depend on any answer
    answer_cache = store.answers_of("bytes", {"code": code_identity()}, reuse=True)
    load = functools.partial(models.get, kind)
    measure = measure_once(answer_cache, models.reference_layout(), load, lengths)
    return ByteBudgets(models.bytes_per_token(), measure)


def _method_runner(
    name: str, recipe: "Recipe", models: Models, tokenizer: Any, budgets: ByteBudgets
) -> MethodRunner:
    """A method of the recipe, with its model, its options and its caches.

    `one_shot` is True only where one forward pass surely equals the method's decode path. It is False where
    the method has options (the gate skip of PoD, say), and where the model's plan packs keys and values into
    fewer bits. A model of `eval.models` under a plan counts as PoD here, whatever its name.

    Two parameters are filled in where the recipe does not set them: razor gets as `heads` the file that
    `pod explore` wrote for this recipe, and kvzip gets its requests.
    """
    found = find_method(name)
    given = recipe.eval.method_options.get(name, {})
    exact = found.one_shot or (found.spec is None and models.sources[found.model].plan is not None)
    differs = given or (exact and models.packs(found.model))
    method = replace(found, one_shot=exact and not differs)
    options = with_repeat_ids(method, given, tokenizer)
    heads = recipe.plan_dir / "retrieval_heads.json"
    if "razor" in parts_of(method) and "heads" not in options and heads.is_file():
        options = options | {"heads": str(heads)}
    return MethodRunner(method, functools.partial(models.get, method.model), options, budgets)


def refusal(models: Models, method: EvaluatedMethod, task: AnsweredTask) -> str | None:
    """Why a task does not measure a method, in one line; None when it does."""
    reason = task.refuses(method)
    if reason is not None:
        return reason
    return models.too_long(method, task.longest())


def check_caches(runner: MethodRunner, task: AnsweredTask) -> None:
    """Make every cache that a task will use, before any measuring, so that errors come at once.

    Raises:
        ValueError: for a method that cannot run the model, a wrong option, or a budget below the method's
            minimum. The message names the method and the task.
    """
    method, chunks = runner.method, dict[int | None, Any]()
    for span in task.spans():
        try:
            budget = runner.budget(span)
            prompt = task.prompt_of(method, span)
            if budget not in chunks:
                chunks[budget] = getattr(runner.trial(span), "chunks", None)
            # A method may compress chunk by chunk. It raises ValueError here when its budget leaves a chunk
            # of this prompt without a token to read.
            if chunks[budget] is not None and prompt > 0:
                chunks[budget].check_prompt(prompt)
        except ValueError as error:
            where = f" at {span.length} tokens, {span.fed} of them after the prompt"
            at = where if method.takes_budget else ""
            raise ValueError(f"{method.name} cannot do {task.name}{at}: {one_line(error)}") from error


# -- answers → score → result file ---------------------------------------------------------------------------


def open_results(inputs: EvalInputs, runner: MethodRunner, log: Log = print_now) -> RunResults:
    """The result file of a method, with the parts that earlier runs scored for the same row."""
    method, models, args = runner.method, inputs.models, inputs.recipe.eval
    header = {"title": method.title, "spec": method.spec, "seed": inputs.recipe.seed, "config": asdict(args)}
    follows = method.fills_pod_bytes or method.spec == "pod"
    # the plan and windows behind the budget: results under another plan are another row
    bytes_of = fingerprint(models.reference_layout())[:16] if follows else None
    model = models.identity(method.model)
    options = with_files(runner.options)
    asked = [args.template_settings()] if args.chat_template_kwargs else []
    header["row"] = fingerprint([method.spec, options, model, bytes_of, *asked])[:16]
    header["dense"] = fingerprint(models.identity("dense"))[:16]
    path = inputs.recipe.eval_dir / method.file_name
    results = RunResults(path, method.name, header, inputs.store.ranks.is_first)
    if results.left_out:
        gone = ", ".join(results.left_out)
        log(
            f"{method.name}: {gone} left out: they are of another model, plan or options (their answers stay)"
        )
    return results


def answers_of(inputs: EvalInputs, runner: MethodRunner) -> AnswerCache:
    """The answer cache of a method with its model and its options, under the present code."""
    method = runner.method
    identity = {
        "spec": method.spec,
        "one_shot": method.one_shot,
        "options": with_files(runner.options),
        "model": inputs.models.identity(method.model),
        "code": code_identity(),
    }
    return inputs.store.answers_of(method.name, identity | inputs.recipe.eval.template_settings())


def measure(inputs: EvalInputs, runner: MethodRunner, task: AnsweredTask) -> dict[str, Any]:
    """Score a method's answers to a task. Missing answers are computed first, if `inputs.store` is open.

    Returns: the task's part of a result file.
    Raises:
        Unanswered: when an answer is missing and `inputs.store` is closed. Any error while answers are
            computed is raised as it is.
    """
    with answers_of(inputs, runner).asked_by(task.name) as answer_cache:
        answers = task.answer(runner, answer_cache)
        account = answer_cache.account()
    payload = task.score(runner, answers) | account
    skips = task_base.gate_metrics(payload.get("decisions", {}))
    if skips:
        payload["metrics"] = (payload.get("metrics") or {}) | skips
    return payload


def describe_model(inputs: EvalInputs, runner: MethodRunner) -> dict[str, Any]:
    """The method's model, for its result file."""
    with answers_of(inputs, runner).asked_by("model") as answer_cache:
        return inputs.models.described(runner.method.model, answer_cache)


def _score_saved(inputs: EvalInputs, name: str, results: RunResults, log: Log) -> list[str]:
    """Score the tasks whose answers are all saved.

    Tasks that cannot measure the method are logged and noted in its result file as `refused`.

    Returns: the names of the tasks that still need answers.
    """
    args, runner = inputs.recipe.eval, inputs.method_runners[name]
    pending, refused = [], {}
    for title, task in inputs.tasks.items():
        reason = refusal(inputs.models, runner.method, task)
        if reason is not None:
            refused[title] = reason
            log(f"{name}: {title} skipped: {reason}")
            continue
        was_scored = _score_if_saved(inputs, runner, task, results, log)
        if not was_scored:
            pending.append(title)
    results.content["refused"] = refused
    if inputs.tasks and not pending and "score" in args.steps:
        results.finish()
    return pending


def _score_if_saved(
    inputs: EvalInputs, runner: MethodRunner, task: AnsweredTask, results: RunResults, log: Log
) -> bool:
    """Score a task if its answers are all saved and may be used again (`eval.reuse`).

    Returns: whether it was scored.
    """
    if not inputs.recipe.eval.reuse or answers_of(inputs, runner).is_empty:
        return False
    try:
        with inputs.store.closed():
            part = _score(inputs, runner, task, results)
    except Unanswered:
        return False
    except Exception:
        if "answer" not in inputs.recipe.eval.steps:
            raise
        return False  # the error comes again in answering: there it is recorded and the others go on
    log(f"{runner.method.name}: {task.name} {task.headline(part)}, answered before")
    return True


def _score(
    inputs: EvalInputs, runner: MethodRunner, task: AnsweredTask, results: RunResults
) -> dict[str, Any]:
    """Measure a task and return its part of the result file.

    The part is stored if the step `score` is among `eval.steps`.
    """
    part = measure(inputs, runner, task)
    model = describe_model(inputs, runner)
    if "score" in inputs.recipe.eval.steps:
        results.content["model"] = model
        results.store(task.name, part)
    return part


def _answer_and_score(inputs: EvalInputs, name: str, tasks: list[str], results: RunResults, log: Log) -> None:
    """Compute the missing answers to these tasks, and score each. A failed task does not stop the others."""
    runner = inputs.method_runners[name]
    for title in tasks:
        task = inputs.tasks[title]
        began = time.perf_counter()
        log(f"{name}: {title} …")
        try:
            part = _score(inputs, runner, task, results)
        except Exception as error:
            if inputs.store.ranks.world_size > 1 and not isinstance(error, AnswerError):
                # the other ranks may wait inside this task: only a restart helps, and the answers stay
                raise
            results.fail(title, error)
            log(f"{name}: {title} FAILED: {one_line(error, with_class=True)}")
            continue
        log(f"{name}: {title} {task.headline(part)} ({time.perf_counter() - began:.0f} s)")
    if tasks and not results.content["failed"] and "score" in inputs.recipe.eval.steps:
        results.finish()


def _raise_failures(recipe: "Recipe", results: Mapping[str, RunResults]) -> None:
    """Raise RuntimeError when a method failed, with the errors of all that did."""
    failed = {name: result.content["failed"] for name, result in results.items() if result.content["failed"]}
    if not failed:
        return
    errors = "; ".join(
        f"{name}: {task}: {text}" for name, of_tasks in failed.items() for task, text in of_tasks.items()
    )
    said = f"{len(failed)} of {len(results)} methods failed ({errors})"
    raise RuntimeError(f"{said}; the others are in {recipe.eval_dir}")


# -- all methods side by side --------------------------------------------------------------------------------


def measure_side_by_side(
    inputs: EvalInputs, task: SideBySideTask, results: Mapping[str, RunResults], log: Log = print_now
) -> None:
    """Measure all methods side by side, and store the part of each in its method's results.

    A method's error is recorded in its results, and the others go on.
    """
    if _is_known(inputs, task, results):
        dates = {result.content["parts"][task.name]["environment"]["date"] for result in results.values()}
        log(f"{task.title}: kept from {', '.join(dates)}")
        return
    log(f"{task.title}: all methods in turns …")
    began = time.perf_counter()
    parts, errors = task.measure(inputs.models.reference_layout(), inputs.method_runners, log)
    for name, result in results.items():
        if name in errors:
            result.fail(task.name, errors[name])
            log(f"{name}: {task.name} FAILED: {one_line(errors[name], with_class=True)}")
            continue
        result.content["model"] = describe_model(inputs, inputs.method_runners[name])
        result.store(task.name, parts[name])
        if not result.content["failed"]:
            result.finish()
    log(f"{task.title}: {task.headline(parts)} ({time.perf_counter() - began:.0f} s)")


def _is_known(inputs: EvalInputs, task: SideBySideTask, results: Mapping[str, RunResults]) -> bool:
    """Whether the results already hold this task's parts of all methods, measured side by side in one run."""
    parts = [result.content["parts"].get(task.name) for result in results.values()]
    return task.is_known(inputs.models.reference_layout(), parts)
