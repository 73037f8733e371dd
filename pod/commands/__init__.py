"""The command `pod` and its parts.

Most parts take a YAML recipe. The scripts in launch/ start the same commands from a checkout.
"""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

COMMANDS = {
    "recipes": ("recipes", "list the recipes that come with pod, show one, or copy one to a file"),
    "data": ("data", "turn text into packed training rows"),
    "explore": ("explore", "measure which attention heads can share keys and values, and write a plan"),
    "train": ("train", "fine-tune a model under the plan, on one or many GPUs"),
    "export": ("export", "write a checkpoint as a Hugging Face model folder"),
    "eval": ("evaluate", "compare cache methods: quality, memory and speed"),
    "report": ("report", "show several evaluations on one page"),
    "bench": ("bench", "measure decode speed against the dense cache"),
    "demo": ("demo", "run all of these steps on one small model"),
    "doctor": ("doctor", "check the installation and show what is missing"),
}
"""Name of each command → its module in this package, and what it does."""
SUBCOMMANDS = {
    "data verify": "check that prepared data is complete and undamaged",
    "data inspect": "show what prepared data contains",
    "eval lm-eval": "run lm-eval's command line with pod's models and tasks",
}
"""Commands within a command. The outer command handles them itself."""
INSTALL = "run `pip install .` in a clone of the repository"
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as in a shell."""
CONTINUING = ("data", "explore", "train", "eval", "demo")
"""Commands that keep finished work, so that the same command continues after Ctrl-C.

Their subcommands keep nothing.
"""


def main() -> None:
    """Run `pod COMMAND …`. An unknown command ends the process with code 2."""
    import pod

    arguments = sys.argv[1:] or ["--help"]
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    name = arguments[0]
    if name == "--version":
        print(f"pod-kv {pod.__version__}")
    elif name in ("-h", "--help"):
        print(overview())
    elif name not in COMMANDS:
        from pod.schema import nearest

        known = {command: command for command in COMMANDS} | {"version": "pod --version"}
        print(
            f"error: there is no command {name!r}{nearest(name, known)}; `pod --help` lists all commands",
            file=sys.stderr,
        )
        sys.exit(2)
    else:
        sys.argv = [f"pod {name}", *arguments[1:]]
        start(name)


def overview() -> str:
    """What `pod --help` prints: every command and subcommand with one line."""
    lines = []
    for name, (_, text) in COMMANDS.items():
        lines.append(f"  {name:15} {text}")
        lines += [f"    {one:13} {what}" for one, what in SUBCOMMANDS.items() if one.split()[0] == name]
    return "\n".join(
        [
            "usage: pod COMMAND [OPTIONS]",
            "",
            "Smaller KV caches for language models: plan, fine-tune, export and compare.",
            "",
            "commands:",
            *lines,
            f"  {'help COMMAND':15} explain one command and its settings, like `pod COMMAND --help`",
            "",
            "options:",
            f"  {'-h, --help':15} show this text",
            f"  {'--version':15} show the version",
            "",
            "A first run, two minutes: pod demo --config demo_tiny",
        ]
    )


def start(name: str) -> None:
    """Run one of the commands: its module's own `start`, or `main` with the recipe where it has none.

    Ends the process with code 130 after Ctrl-C, and with code 2 when a package is missing.

    Args:
        name: a key of COMMANDS.
    """
    try:
        command = importlib.import_module(f"pod.commands.{COMMANDS[name][0]}")
        try:
            if hasattr(command, "start"):
                command.start()
            else:
                run_recipe(command)
        finally:
            sys.stdout.flush()  # only here can a closed pipe still be told from an error
    except BrokenPipeError:  # the reader has closed the pipe, as in `pod eval --list-methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(interrupted(name), file=sys.stderr)
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "pod").startswith("pod."):
            raise
        text = (
            f"error: the package {error.name} is missing: {INSTALL}; `pod doctor` lists all missing packages"
        )
        print(text, file=sys.stderr)
        sys.exit(2)


def interrupted(name: str) -> str:
    """What the command `name` prints after Ctrl-C: whether the same command would continue its work."""
    if name not in CONTINUING or " ".join([name, *sys.argv[1:2]]) in SUBCOMMANDS:
        return "interrupted"
    return "interrupted; run the same command again to continue"


def note_on_data(recipe: Any) -> None:
    """Warn, on the first rank, when the prepared data was made with other settings than the recipe has."""
    from pod.data.rows.manifest import read_manifest
    from pod.recipe import rank

    try:
        other = recipe.data.other_than(read_manifest(recipe.data_dir), recipe.seed)
    except ValueError:  # missing or damaged: the command that needs the data reports it
        return
    if other and rank() == 0:
        changed = f"{recipe.data_dir} was prepared with a different {', '.join(other)} than this recipe has"
        again = "it is used as it is. To prepare it again, run `pod data --overwrite`"
        print(f"warning: {changed}; {again}", file=sys.stderr)


def run_recipe(command: ModuleType) -> None:
    """Call a module's `main` with the recipe of the command line.

    The module's SECTIONS name the sections of the recipe that it reads. Its docstring is the text of
    `--help`. It may also have the functions `estimate`, `add_arguments` and `check_arguments` (see
    `pod.recipe.run`).
    """
    from pod.recipe import run

    names = ("estimate", "add_arguments", "check_arguments")
    more = {name: getattr(command, name, None) for name in names}
    run(command.main, sections=command.SECTIONS, description=command.__doc__, **more)
