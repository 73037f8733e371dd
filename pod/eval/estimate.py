"""How much an evaluation will feed to the models, before anything is loaded. Standard library only."""

from typing import TYPE_CHECKING

from pod.eval.args import EvalArgs
from pod.eval.buckets import position_buckets
from pod.eval.methods import find_method

if TYPE_CHECKING:
    from pod.recipe import Recipe


def estimate(recipe: "Recipe") -> str:
    """Lines for `--dry-run`: tokens read as prompts and tokens decoded one at a time, per method."""
    lines = ["Tokens per method (prompt tokens in parallel, decode steps one token per row at a time):"]
    for name in recipe.eval.methods:
        prompt, steps = token_counts(recipe.eval, name)
        lines.append(f"  {name:<14} {prompt:>12,} prompt tokens {steps:>8,} decode steps")
    return "\n".join(lines)


def token_counts(args: EvalArgs, name: str) -> tuple[int, int]:
    """(prompt tokens, decode steps of a batch) that a method takes."""
    method = find_method(name)
    prompt = steps = 0
    if "perplexity" in args.tasks:
        prompts, scored = _bucket_counts(args)
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
        steps += len(args.efficiency_lengths) * args.efficiency_tokens * (args.efficiency_repeats + 1)
    return prompt, steps


def _bucket_counts(args: EvalArgs) -> tuple[int, int]:
    """(context tokens, scored tokens) of one sequence over all position buckets."""
    context = scored = 0
    for bucket in position_buckets(args.text_length, args.min_context, args.scored_tokens):
        context += bucket.first - 1
        scored += bucket.scored
    return context, scored
