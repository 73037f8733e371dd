"""How much an evaluation will feed to the models, before any is loaded."""

from typing import TYPE_CHECKING, Any

from pod.eval.answer.methods import find_method
from pod.eval.args import EvalArgs
from pod.eval.speed.args import speed_options
from pod.eval.suites.buckets import position_buckets

if TYPE_CHECKING:
    from pod.recipe import Recipe

_BY_SETTINGS = ("perplexity", "passkey", "efficiency")  # counted from the recipe alone


def estimate(recipe: "Recipe") -> str:
    """Lines for `--dry-run`: tokens read as prompts and tokens decoded one at a time, per method.

    Tasks other than perplexity, passkey and efficiency are built as the evaluation would build them: their prompts are counted.
    Raises: ValueError for an unknown task, with the nearest.
    """
    lines = ["Tokens per method (prompt tokens in parallel, decode steps one token per row at a time):"]
    others = [name for name in recipe.eval.tasks if name not in _BY_SETTINGS]
    run, counted, missing = _built(recipe, others)
    width = max(14, *map(len, recipe.eval.methods))
    for name in recipe.eval.methods:
        prompt, steps = token_counts(recipe.eval, name)
        for task in counted:
            more = run.tasks[task].token_counts(run.method(name))
            prompt, steps = prompt + more[0], steps + more[1]
        lines.append(f"  {name:<{width}} {prompt:>12,} prompt tokens {steps:>8,} decode steps")
    return "\n".join(lines + missing)


def _built(recipe: "Recipe", names: list[str]) -> tuple[Any, list[str], list[str]]:
    """The evaluation that has these tasks, those that can be counted, and a line for what is not counted."""
    if not names:
        return None, [], []
    from pod.eval.lm.index import check_known

    check_known(names)
    from pod.eval.evaluation import Evaluation

    try:
        run = Evaluation(recipe, log=lambda line: None)
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        return (
            None,
            [],
            [f"Not counted: {', '.join(names)}. As things are, the evaluation would end with: {text}"],
        )
    counted = [name for name in names if hasattr(run.tasks[name], "token_counts")]
    others = ", ".join(name for name in names if name not in counted)
    return run, counted, [f"Not counted: {others}"] if others else []


def token_counts(args: EvalArgs, name: str) -> tuple[int, int]:
    """(prompt tokens, decode steps of a batch) that a method takes for perplexity, passkey and efficiency."""
    method = find_method(name)
    prompt = steps = 0
    if "perplexity" in args.tasks:
        buckets = position_buckets(args.text_length, args.min_context, args.scored_tokens)
        prompts, scored = sum(b.first - 1 for b in buckets), sum(b.scored for b in buckets)
        if method.one_shot:
            prompt += args.text_sequences * args.text_length
        else:
            prompt += args.text_sequences * prompts
            steps += -(-args.text_sequences // args.batch_size) * scored
    if "passkey" in args.tasks:
        cells = len(args.passkey_depths) * args.passkey_samples
        prompt += cells * sum(args.passkey_lengths)
        steps += -(-cells // args.batch_size) * len(args.passkey_lengths) * args.passkey_new_tokens
    if "efficiency" in args.tasks:
        prompt += sum(args.efficiency_lengths)
        lengths = len(args.efficiency_lengths) + len(speed_options(args).decode_lengths)
        steps += lengths * args.efficiency_tokens * (args.efficiency_repeats + 1)
    return prompt, steps
