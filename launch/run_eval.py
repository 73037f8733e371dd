"""Compare PoD with the dense model and with token-dropping methods at equal bytes: perplexity, retrieval, the benchmarks of the papers
and any task of lm-eval, speed and memory. Writes one JSON per method and report.html into <output_dir>/eval; a killed run goes on
at the sample where it stopped."""

import argparse
import sys

from pod.recipe import Recipe, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Shorthands for `--set eval.methods=…`, `--set eval.tasks=…` and others."""
    steps = "answer: ask the models; score, report: from the answers that are kept, in seconds (default: all three)"
    parser.add_argument("eval.steps", nargs="*", action=Steps, metavar="STEP", help=steps)
    parser.add_argument(
        "--methods", dest="eval.methods", metavar="A,B", help="methods to compare, comma-separated"
    )
    parser.add_argument(
        "--list-methods",
        action=ListMethods,
        nargs=0,
        help="list every method of pod.make_cache with its parameters, and stop",
    )
    parser.add_argument("--tasks", dest="eval.tasks", metavar="A,B", help="tasks, comma-separated")
    parser.add_argument(
        "--list-tasks", action=ListTasks, nargs=0, help="list every task with its options, and stop"
    )
    parser.add_argument(
        "--data-dir",
        dest="eval.data_dir",
        metavar="FOLDER",
        help="local copies of benchmark data, a folder per suite",
    )
    parser.add_argument("--limit", dest="eval.limit", metavar="N", help="samples per lm-eval task")


class Steps(argparse.Action):
    """`run_eval.py score report`: shorthand for `--set eval.steps=…`."""

    def __call__(self, parser, namespace, values, *_: object) -> None:
        setattr(namespace, self.dest, ",".join(values) or None)


class ListMethods(argparse.Action):
    """`--list-methods`: print what `pod.make_cache` can build, and stop."""

    def __call__(self, parser, *_: object) -> None:
        from pod.eval.lists import list_methods

        print(list_methods())
        parser.exit()


class ListTasks(argparse.Action):
    """`--list-tasks`: print what can be measured, and stop."""

    def __call__(self, parser, *_: object) -> None:
        from pod.eval.lists import list_tasks

        print(list_tasks())
        parser.exit()


def estimate(recipe: Recipe) -> str:
    """What will be run, in tokens through a model."""
    from pod.eval.estimate import estimate as estimate_tokens

    return estimate_tokens(recipe)


def main(recipe: Recipe) -> None:
    """Evaluate as the recipe says."""
    from pod.eval.runner import evaluate  # loads torch, which --help and --dry-run do not need

    evaluate(recipe)


if __name__ == "__main__":
    if sys.argv[1:2] == ["lm-eval"]:
        from pod.eval.lm.cli import main as lm_eval

        sys.exit(lm_eval(sys.argv[2:]))
    run(
        main,
        sections=("model", "data", "eval"),
        description=__doc__,
        estimate=estimate,
        extra_arguments=add_arguments,
    )
