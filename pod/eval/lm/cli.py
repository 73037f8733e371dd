"""`pod eval lm-eval …`: lm-eval's own command line with our model class and our tasks."""

import argparse
import os
import re
import sys
from collections.abc import Sequence

from pod.errors import one_line
from pod.notation import split, swap_commas
from pod.recipe import rank


def main(argv: Sequence[str]) -> None:
    """Run lm-eval's `cli_evaluate()` on `argv` (everything behind `lm-eval`).

    `--model pod` is the default, and our tasks are known. Under torchrun every rank runs the whole pipeline
    and answers its share of the requests; rank 0 prints and writes. Wrong input ends the process with code 2
    and a message of one line.
    """
    from lm_eval.__main__ import cli_evaluate

    from pod.eval.lm import command  # registers the model `pod`
    from pod.eval.suites import task_data
    from pod.eval.suites.configs import known_to_lm_eval

    first = rank() == 0
    sys.argv = ["lm-eval", *arguments(argv, first)]
    try:
        allowed = task_data.use(None, unsafe_code="--confirm_run_unsafe_code" in argv)
        with task_data.local_datasets(), known_to_lm_eval(), allowed:
            if first:
                cli_evaluate()
            else:
                with open(os.devnull, "w", encoding="utf-8") as nowhere:
                    sys.stdout = nowhere
                    cli_evaluate()
    except ValueError as error:
        if os.environ.get("POD_TRACEBACK") == "1":
            raise
        print(f"error: {one_line(error, with_class=True)}", file=sys.stderr)
        sys.exit(2)
    finally:
        sys.stdout = sys.__stdout__
        command.close_ranks()


def arguments(argv: Sequence[str], first: bool = True) -> list[str]:
    """lm-eval's arguments with our defaults. Ranks that are not the first write nothing."""
    given = [_with_semicolons(item) for item in argv]
    if not given or given[0] in ("ls", "validate", "-h", "--help"):
        return given
    if given[0] != "run":
        given.insert(0, "run")
    if not {"--model", "-M"} & {item.split("=")[0] for item in given}:
        given += ["--model", "pod"]
    writes = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    writes.add_argument("--output_path", "-o")
    writes.add_argument("--log_samples", "-s", action="store_true")
    return given if first else writes.parse_known_args(given)[1]


def _with_semicolons(argument: str) -> str:
    """A model argument `method=…` with `;` for the commas inside its brackets.

    lm-eval would split the argument at these commas.
    """
    start = re.search(r"(?:^|[=,])method=", argument)
    if start is None:
        return argument
    head = argument[: start.end()]
    tail = argument[start.end() :]
    try:
        first = split(tail, ",")[0]
    except ValueError:  # brackets that do not close are refused later, with the method's name
        return argument
    return head + swap_commas(first) + tail[len(first) :]
