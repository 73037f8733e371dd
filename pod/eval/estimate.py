"""Estimate, before any model is loaded, how many tokens models will read and on which GPUs they will lie."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pod.errors import one_line
from pod.eval.answer.devices import Gpus, Load, layout_lines, longest_of, spread_of
from pod.eval.answer.methods import find_method
from pod.eval.suites.task_base import Task, is_side_by_side, side_by_side_tasks
from pod.units import GIB

if TYPE_CHECKING:
    from pod.eval.runner import EvalInputs
    from pod.recipe import Recipe


def estimate(recipe: "Recipe", gpus: Gpus | None = None) -> str:
    """Lines for `--dry-run`: what each method reads and decodes, and how models lie on GPUs.

    For each method they give the tokens read as prompts and the tokens decoded one at a time. Where there are
    several GPUs, they say which layers of each model will lie on which GPU.

    Tasks are built as the evaluation would build them, and count their own prompts. Where they cannot be
    built, a line says why, and only those are counted that measure all methods side by side, which are made
    from the recipe alone.

    Args:
        gpus: GPUs to assume; None = those of this machine.
    Raises:
        ValueError: for an unknown task, naming the nearest.
    """
    inputs, missing = _built(recipe, [name for name in recipe.eval.tasks if not is_side_by_side(name)])
    side_by_side = side_by_side_tasks(recipe)
    tasks: list[Task] = [*side_by_side.values()]
    if inputs is not None:
        tasks += inputs.tasks.values()
    lines = []
    if tasks:
        lines = ["Tokens per method (prompt tokens in parallel, decode steps one token per row at a time):"]
        width = max(14, *map(len, recipe.eval.methods))
        for name in recipe.eval.methods:
            method = find_method(name) if inputs is None else inputs.method_runners[name].method
            counts = [task.token_counts(method) for task in tasks]
            prompt = sum(tokens for tokens, _ in counts)
            steps = sum(decoded for _, decoded in counts)
            lines.append(f"  {name:<{width}} {prompt:>12,} prompt tokens {steps:>8,} decode steps")
    lines += _searches(tasks)
    gpus = gpus or _gpus_here()
    layout = []
    if gpus is not None:
        known = {name: task.load_tokens() for name, task in side_by_side.items()}
        layout = _layout(recipe, gpus, None if inputs is None else inputs.models.load, known)
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


def _layout(recipe: "Recipe", gpus: Gpus, load: Load | None, known: Mapping[str, int]) -> list[str]:
    """Lines that say how each kind of model that the methods need lies on the GPUs.

    They are made from the models' configurations alone.

    Args:
        load: what caches will hold; None if the tasks were not built: it is then estimated from the recipe.
        known: by name, the longest sequences (tokens) of tasks that were made nevertheless.
    """
    import torch

    from pod.eval.answer.model_set import Models
    from pod.modeling.placement import ROOM, share_of_rank

    asked = spread_of(recipe.eval.device)
    count = len(share_of_rank(gpus.count))
    whose = "" if count == gpus.count else f"{count} of "
    number = f"{whose}{gpus.count} {'GPU' if gpus.count == 1 else 'GPUs'}"
    free = f"{ROOM:.0%} of each left for activations"
    lines = [f"Layout on {number} of {gpus.gib:g} GiB (eval.device: {asked}; {free}):"]
    gpus = gpus._replace(count=count)  # of this rank
    try:
        models = Models(recipe)
        configs = {kind: models.config(kind) for kind in models.kinds}
    except (ValueError, OSError) as error:
        return [*lines, f"  unknown, as the evaluation would end with: {one_line(error)}"]
    size = getattr(torch, recipe.model.dtype).itemsize
    for kind, config in configs.items():
        if models.shares_weights(kind):
            lines.append(f"  {kind}: on the weights of dense")
            continue
        expected = load or Load(recipe.eval.batch_size, longest_of(config, recipe.eval, known))
        lines += [f"  {line}" for line in layout_lines(kind, config, size, gpus, expected, asked)]
    if len(configs) > 1:
        lines.append("  Models that do not fit beside each other are loaded in turns.")
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
        end = f"As things are, the evaluation would end with: {one_line(error)}"
        return None, [f"Not counted: {', '.join(names)}. {end}"]


def _searches(tasks: Sequence[Task]) -> list[str]:
    """A line that names the searches of the tasks, of which only the first tries are counted."""
    names = [name for task in tasks for name in task.searches()]
    if not names:
        return []
    return [
        f"These are counted with their first tries, so the numbers are at least what will be read: "
        f"{', '.join(names)}. How many tries follow depends on the memory."
    ]
