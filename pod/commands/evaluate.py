"""Compare cache methods at equal memory: PoD, the dense model, methods that drop, merge or quantize tokens.

The command measures perplexity, retrieval (passkey, needle in a haystack), the benchmarks of the papers, any
task of lm-eval, speed and memory. It writes one JSON file per method and report.html into <output_dir>/eval.
An interrupted run continues where it stopped.

  pod eval --config demo                           evaluate a trained model
  pod eval --config demo --methods full,pod,snapkv@25% --tasks niah
  pod eval --list-methods snapkv                   parameters of one method
  pod eval lm-eval --help                          lm-eval's own command line, with pod's models and tasks"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from pod.commands import note_on_data, run_recipe
from pod.commands.gpu import prepare
from pod.recipe import Recipe, exit_with

if TYPE_CHECKING:
    from pod.eval.answer.devices import Gpus

SECTIONS = "model", "data", "eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add shorthands for `--set eval.methods=…`, `--set eval.tasks=…` and others."""
    steps = (
        "parts of the work: answer (run the models), score and report "
        "(from saved answers, in seconds, without a model); default: all three"
    )
    add = parser.add_argument
    add("eval.steps", nargs="*", metavar="STEP", help=steps)
    add(
        "--methods",
        dest="eval.methods",
        metavar="A,B",
        help="methods to compare, for example full,pod,snapkv@25%%",
    )
    methods = "show the given methods with their parameters, without NAME all methods, and stop"
    add("--list-methods", action=List, nargs="*", metavar="NAME", help=methods)
    add("--tasks", dest="eval.tasks", metavar="A,B", help="tasks to run, for example perplexity,niah,gsm8k")
    tasks = "show the given tasks with their options, without NAME all tasks, and stop"
    add("--list-tasks", action=List, nargs="*", metavar="NAME", help=tasks)
    copies = "folder with local copies of benchmark data, one folder per suite; default: the Hugging Face hub"
    add("--data-dir", dest="eval.data_dir", metavar="FOLDER", help=copies)
    add(
        "--limit",
        dest="eval.limit",
        metavar="N",
        help="samples per lm-eval task, for a quick look; default: all",
    )
    gpus = (
        "with --dry-run: GPUs to lay the models out on, as 8x24 for 8 of 24 GiB; "
        "default: those of this machine"
    )
    add("--gpus", type=_gpus, metavar="NxGIB", help=gpus)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse an option that has no effect on an evaluation.

    Raises:
        ValueError: `--gpus` without `--dry-run`.
    """
    if arguments.gpus is not None and not arguments.dry_run:
        raise ValueError(
            "--gpus is for estimates only: add --dry-run. An evaluation takes the GPUs that it finds; "
            "CUDA_VISIBLE_DEVICES hides others"
        )


def _gpus(text: str) -> "Gpus":
    from pod.eval.answer.devices import Gpus

    try:
        return Gpus.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class List(argparse.Action):
    """The action of `--list-methods` and `--list-tasks`: print those that are named, or all, and stop."""

    def __call__(self, parser, namespace: object, values: Any, option_string: str | None = None) -> None:
        from pod.eval import method_and_task_lists

        names = [name for value in values for name in value.split(",") if name]
        try:
            print(getattr(method_and_task_lists, self.dest)(names))
        except ValueError as error:
            exit_with(error)
        parser.exit()


def estimate(recipe: Recipe, gpus: "Gpus | None" = None) -> str:
    """Text for `--dry-run`: tokens that each method will process, and how the models will lie on GPUs.

    Args:
        gpus: the value of --gpus; None = the GPUs of this machine.
    """
    from pod.eval.estimate import estimate as estimate_tokens

    return estimate_tokens(recipe, gpus)


def main(recipe: Recipe) -> None:
    """Evaluate as the recipe says."""
    from pod.eval.runner import evaluate  # loads torch, which --help and --dry-run do not need

    note_on_data(recipe)
    if "answer" in recipe.eval.steps:
        prepare(recipe, recipe.eval.device, decodes=True)
    evaluate(recipe)


def start() -> None:
    """Run the command line. `pod eval lm-eval …` is lm-eval's own, with our model class and tasks."""
    if sys.argv[1:2] == ["lm-eval"]:
        from pod.eval.lm.cli import main as lm_eval

        sys.exit(lm_eval(sys.argv[2:]))
    run_recipe(sys.modules[__name__])


if __name__ == "__main__":
    start()
