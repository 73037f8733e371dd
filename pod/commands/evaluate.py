"""Compare PoD with the dense model and with token-dropping methods at equal bytes: perplexity, retrieval, the benchmarks of the papers
and any task of lm-eval, speed and memory. Writes one JSON per method and report.html into <output_dir>/eval; a killed run goes on
at the sample where it stopped."""

import argparse
import sys

from pod.commands import note_on_data, run_recipe
from pod.recipe import Recipe

SECTIONS = "model", "data", "eval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shorthands for `--set eval.methods=…`, `--set eval.tasks=…` and others."""
    steps = "answer: ask the models; score, report: from the answers that are kept, in seconds (default: all three)"
    add = parser.add_argument
    add("eval.steps", nargs="*", metavar="STEP", help=steps)
    add("--methods", dest="eval.methods", metavar="A,B", help="methods to compare, comma-separated")
    add("--list-methods", action=List, nargs=0, help="list every method of pod.make_cache, and stop")
    add("--tasks", dest="eval.tasks", metavar="A,B", help="tasks, comma-separated")
    add("--list-tasks", action=List, nargs=0, help="list every task with its options, and stop")
    copies = "copies of benchmark data, a folder per suite"
    add("--data-dir", dest="eval.data_dir", metavar="FOLDER", help=copies)
    add("--limit", dest="eval.limit", metavar="N", help="samples per lm-eval task")


class List(argparse.Action):
    """`--list-methods`, `--list-tasks`: print what there is, and stop."""

    def __call__(self, parser, *_: object) -> None:
        from pod.eval import lists

        print(getattr(lists, self.dest)())
        parser.exit()


def estimate(recipe: Recipe) -> str:
    """What will be run, in tokens through a model."""
    from pod.eval.estimate import estimate as estimate_tokens

    return estimate_tokens(recipe)


def main(recipe: Recipe) -> None:
    """Evaluate as the recipe says."""
    from pod.eval.runner import evaluate  # loads torch, which --help and --dry-run do not need

    note_on_data(recipe)
    evaluate(recipe)


def start() -> None:
    """The command line; `lm-eval …` is lm-eval's own, with our model class and tasks."""
    if sys.argv[1:2] == ["lm-eval"]:
        from pod.eval.lm.cli import main as lm_eval

        sys.exit(lm_eval(sys.argv[2:]))
    run_recipe(sys.modules[__name__])


if __name__ == "__main__":
    start()
