"""Estimate, before any model is loaded, how many tokens models will read and on which GPUs they will lie."""

from pathlib import Path
from typing import TYPE_CHECKING

from pod.eval.answer.devices import Gpus, Load, layout_lines, longest_of, spread_of
from pod.eval.answer.methods import find_method
from pod.eval.speed.args import NAME as SPEED_RUN
from pod.eval.speed.args import speed_options
from pod.units import GIB

if TYPE_CHECKING:
    from pod.eval.runner import EvalInputs
    from pod.recipe import Recipe


def estimate(recipe: "Recipe", gpus: Gpus | None = None) -> str:
    """Lines for `--dry-run`: what each method reads and decodes, and how models lie on GPUs.

    For each method they give the tokens read as prompts and the tokens decoded one at a time. Where there are
    several GPUs, they say which layers of each model will lie on which GPU.

    Tasks are built as the evaluation would build them, and count their own prompts. Where they cannot be
    built, a line says why, and only efficiency is counted, which has no prompts of its own.

    Args:
        gpus: GPUs to assume; None = those of this machine.
    Raises:
        ValueError: for an unknown task, naming the nearest.
    """
    built = [name for name in recipe.eval.tasks if name != SPEED_RUN]
    inputs, missing = _built(recipe, built)
    lines = []
    if inputs is not None or SPEED_RUN in recipe.eval.tasks:
        lines = ["Tokens per method (prompt tokens in parallel, decode steps one token per row at a time):"]
        width = max(14, *map(len, recipe.eval.methods))
        for name in recipe.eval.methods:
            prompt, steps = _tokens_of(recipe, inputs, name)
            lines.append(f"  {name:<{width}} {prompt:>12,} prompt tokens {steps:>8,} decode steps")
    lines += _searches(recipe)
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
    return Gpus(count, min(sizes) / GIB) if count > 1 else None


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


def _built(recipe: "Recipe", names: list[str]) -> tuple["EvalInputs | None", list[str]]:
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


def _tokens_of(recipe: "Recipe", inputs: "EvalInputs | None", name: str) -> tuple[int, int]:
    """(prompt tokens, decode steps) of a method for all tasks that can be counted.

    Args:
        inputs: None if the tasks other than efficiency are not counted.
    """
    counts = []
    if inputs is not None:
        method = inputs.method_runners[name].method
        counts += [task.token_counts(method) for task in inputs.tasks.values()]
    if SPEED_RUN in recipe.eval.tasks:
        from pod.eval.speed.task import token_counts  # this loads torch

        counts.append(token_counts(recipe.eval, find_method(name)))
    return sum(prompt for prompt, _ in counts), sum(steps for _, steps in counts)


def _searches(recipe: "Recipe") -> list[str]:
    """A line that names the searches of efficiency, of which only the first tries are counted."""
    if SPEED_RUN not in recipe.eval.tasks:
        return []
    options = speed_options(recipe.eval)
    asked = {"max_batch": options.max_batch, "longest_prompt": options.longest_prompt}
    names = [f"eval.task_options.{SPEED_RUN}.{name}" for name, value in asked.items() if value]
    if not names:
        return []
    return [
        f"These are counted with their first tries, so the numbers are at least what will be read: "
        f"{', '.join(names)}. How many tries follow depends on the memory."
    ]
