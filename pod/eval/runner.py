"""One evaluation: every method is measured on every task at equal bytes.

It checks the inputs first, keeps each result, and writes the report.
"""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from pod.eval.answer.answer_cache import AnswerError, Unanswered
from pod.eval.answer.methods import EvaluatedMethod
from pod.eval.answer.ranks import Ranks
from pod.eval.evaluation import Evaluation, Log, print_now
from pod.eval.results import RunResults, fingerprint, one_line, with_files
from pod.eval.speed.args import NAME as SPEED_RUN

if TYPE_CHECKING:
    from pod.recipe import Recipe


def evaluate(recipe: "Recipe", log: Log = print_now) -> dict[str, dict]:
    """Run the `eval` section of a recipe.

    Its steps:

    * *answer* asks the models what is not answered yet (<output_dir>/eval/answers).
    * *score* makes <output_dir>/eval/<method>.json of the answers.
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
        return _evaluate(Evaluation(recipe, log, ranks))
    finally:
        ranks.close()


def _evaluate(run: Evaluation) -> dict[str, dict]:
    # these load torch and matplotlib, which the counts for --dry-run do not need
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
        run.log(f"no saved answers yet; the step `answer` computes them: {missing}")
    if run.ranks.is_first:
        with run.ranks.first_alone():
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


def _method_results(run: Evaluation, method: EvaluatedMethod) -> RunResults:
    header = {"title": method.title, "spec": method.spec, "seed": run.recipe.seed, "config": asdict(run.args)}
    follows = method.fills_pod_bytes or method.spec == "pod"
    # the plan and windows behind the budget: results under another plan are another row
    bytes_of = fingerprint(run.models.reference_layout())[:16] if follows else None
    model, options = run.models.identity(method.model), with_files(run.options(method))
    asked = [run.args.template_settings()] if run.args.chat_template_kwargs else []
    header["row"] = fingerprint([method.spec, options, model, bytes_of, *asked])[:16]
    header["dense"] = fingerprint(run.models.identity("dense"))[:16]
    results = RunResults(run.recipe.eval_dir / method.file_name, method.name, header, run.ranks.is_first)
    if results.left_out:
        gone = ", ".join(results.left_out)
        run.log(
            f"{method.name}: {gone} left out: they are of another model, plan or options (their answers stay)"
        )
    return results


def _score_known(run: Evaluation, method: EvaluatedMethod, results: RunResults) -> list[str]:
    """Score the tasks whose answers are all there, and return the others. What a task refuses is noted."""
    pending, refused = [], {}
    for name, task in run.tasks.items():
        reason = run.refuses(method, task)
        if reason is not None:
            refused[name] = reason
            run.log(f"{method.name}: {name} skipped: {reason}")
        elif (
            not run.args.reuse or run.answers_of(method).is_empty or not _is_known(run, method, results, name)
        ):
            pending.append(name)
    results.content["refused"] = refused
    if run.tasks and not pending and "score" in run.args.steps:
        results.finish()
    return pending


def _is_known(run: Evaluation, method: EvaluatedMethod, results: RunResults, task: str) -> bool:
    """Whether the answers to a task are all there; if so they are scored."""
    try:
        _score(run, method, results, task, is_open=False)
    except Unanswered:
        return False
    except Exception:
        if "answer" not in run.args.steps:
            raise
        return False  # the error comes again in answering: there it is recorded and the others go on
    return True


def _score(run: Evaluation, method: EvaluatedMethod, results: RunResults, task: str, is_open: bool) -> None:
    """Score a task. With is_open, what is missing is answered first."""
    began = time.perf_counter()
    part = run.measure(method, run.tasks[task], is_open)
    description = run.description(method, is_open)
    if "score" in run.args.steps:
        results.content["model"] = description
        results.store(task, part)
    how = f" ({time.perf_counter() - began:.0f} s)" if is_open else ", answered before"
    run.log(f"{method.name}: {task} {run.tasks[task].headline(part)}{how}")


def _answer(run: Evaluation, method: EvaluatedMethod, results: RunResults, pending: list[str]) -> None:
    """Answer and score what is missing. One task's failure does not lose the others."""
    for name in pending:
        run.log(f"{method.name}: {name} …")
        try:
            _score(run, method, results, name, is_open=True)
        except Exception as error:
            if run.ranks.world_size > 1 and not isinstance(error, AnswerError):
                # the other ranks may wait inside this task: only a restart helps, and the answers stay
                raise
            results.fail(name, error)
            run.log(f"{method.name}: {name} FAILED: {one_line(error)}")
    if pending and not results.content["failed"] and "score" in run.args.steps:
        results.finish()
