"""Estimate, before any model is loaded, how many tokens models will read and on which GPUs they will lie."""

from pathlib import Path
from typing import TYPE_CHECKING

from pod.eval.answer.devices import Gpus, Load, layout_lines, longest_of, spread_of
from pod.eval.answer.methods import find_method
from pod.eval.args import EvalArgs
from pod.eval.speed.args import speed_options
from pod.eval.suites.buckets import position_buckets
from pod.eval.suites.buckets import token_counts as counts_of_texts

if TYPE_CHECKING:
    from pod.eval.runner import Inputs
    from pod.recipe import Recipe

_BY_SETTINGS = ("perplexity", "passkey", "efficiency")  # counted from the recipe alone


def estimate(recipe: "Recipe", gpus: Gpus | None = None) -> str:
    """Lines for `--dry-run`: what each method reads and decodes, and how models lie on GPUs.

    For each method they give the tokens read as prompts and the tokens decoded one at a time. Where there are
    several GPUs, they say which layers of each model will lie on which GPU.

    Tasks other than perplexity, passkey and efficiency are built as the evaluation would build them, and
    their prompts are counted. Where they cannot be built, a line says why.

    Args:
        gpus: GPUs to assume; None = those of this machine.
    Raises:
        ValueError: for an unknown task, naming the nearest.
    """
    lines = ["Tokens per method (prompt tokens in parallel, decode steps one token per row at a time):"]
    others = [name for name in recipe.eval.tasks if name not in _BY_SETTINGS]
    inputs, missing = _built(recipe, others)
    width = max(14, *map(len, recipe.eval.methods))
    for name in recipe.eval.methods:
        prompt, steps = token_counts(recipe.eval, name)
        if inputs is not None:
            for task in others:
                more = inputs.tasks[task].token_counts(inputs.method_runners[name].method)
                prompt, steps = prompt + more[0], steps + more[1]
        lines.append(f"  {name:<{width}} {prompt:>12,} prompt tokens {steps:>8,} decode steps")
    gpus = gpus or _gpus_here()
    layout = [] if gpus is None else _layout(recipe, gpus, None if inputs is None else inputs.models.load)
    return "\n".join(lines + missing + layout)


def _gpus_here() -> Gpus | None:
    """The GPUs of this machine where there are several, else None.

    It looks without torch first, because torch takes seconds to load.
    """
    folder = Path("/proc/driver/nvidia/gpus")
    if not folder.is_dir() or len(list(folder.iterdir())) < 2:
        return None
    import torch

    count = torch.cuda.device_count()
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return Gpus(count, min(sizes) / 2**30) if count > 1 else None


def _layout(recipe: "Recipe", gpus: Gpus, load: Load | None) -> list[str]:
    """Lines that say how each kind of model that the methods need lies on the GPUs.

    They are made from the models' configurations alone.

    Args:
        load: what caches will hold; None if the tasks were not built: it is then estimated from the recipe.
    """
    import torch

    from pod.eval.answer.model_set import Models

    asked = spread_of(recipe.eval.device)
    lines = [f"Layout on {gpus.count} GPUs of {gpus.gib:g} GiB (eval.device: {asked}):"]
    try:
        models = Models(recipe)
        configs = {kind: models.config(kind) for kind in models.kinds}
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        return [*lines, f"  unknown, as the evaluation would end with: {text}"]
    size = getattr(torch, recipe.model.dtype).itemsize
    for kind, config in configs.items():
        expected = load or Load(recipe.eval.batch_size, longest_of(config, recipe.eval))
        lines += [f"  {line}" for line in layout_lines(kind, config, size, gpus, expected, asked)]
    return lines


def _built(recipe: "Recipe", names: list[str]) -> tuple["Inputs | None", list[str]]:
    """Build the tasks as an evaluation would.

    Returns: the inputs of the evaluation and no line; or None and a line that says why the prompts of these
    tasks cannot be counted. Without tasks: None and no line.
    """
    if not names:
        return None, []
    from pod.eval.lm.index import check_known

    check_known(names)
    from pod.eval.runner import prepare

    try:
        return prepare(recipe, log=lambda line: None), []
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        end = f"As things are, the evaluation would end with: {text}"
        return None, [f"Not counted: {', '.join(names)}. {end}"]


def token_counts(args: EvalArgs, name: str) -> tuple[int, int]:
    """(prompt tokens, decode steps) of a method for perplexity, passkey and efficiency.

    A decode step decodes one token in every row of a batch.
    """
    method = find_method(name)
    prompt = steps = 0
    if "perplexity" in args.tasks:
        buckets = position_buckets(args.text_length, args.min_context, args.scored_tokens)
        sizes = args.text_sequences, args.text_length, args.batch_size
        prompt, steps = counts_of_texts(buckets, *sizes, method.one_shot)
    if "passkey" in args.tasks:
        cells = len(args.passkey_depths) * args.passkey_samples
        prompt += cells * sum(args.passkey_lengths)
        steps += -(-cells // args.batch_size) * len(args.passkey_lengths) * args.passkey_new_tokens
    if "efficiency" in args.tasks:
        prompt += sum(args.efficiency_lengths)
        lengths = len(args.efficiency_lengths) + len(speed_options(args).decode_lengths)
        steps += lengths * args.efficiency_tokens * (args.efficiency_repeats + 1)
    return prompt, steps
