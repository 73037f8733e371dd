"""The command `pod` and its parts. Each takes one YAML recipe; the scripts in launch/ are the same for a checkout."""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

COMMANDS = {
    "explore": ("explore", "measure what each role of each head costs, and make the plan"),
    "data": ("data", "documents → tokens → equal tokens per length interval → packed rows"),
    "train": ("train", "adapt the model to the plan; ranks: deepspeed --module pod.commands.train …"),
    "export": ("export", "write the newest checkpoint as a Hugging Face folder"),
    "eval": ("evaluate", "compare methods at equal bytes, and write the report"),
    "bench": ("bench", "measure decode speed beside the dense cache"),
    "demo": ("demo", "all of these on one small model"),
    "doctor": ("doctor", "what is installed here, and what is missing"),
}
"""Name → module of this package, and what it does."""
INSTALL = "pip install pod-kv, or `pip install .` in a checkout"


def main() -> None:
    """`pod COMMAND …`; ends the process with code 2 for a command that there is not."""
    import pod

    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        print(f"pod-kv {pod.__version__}")
    elif name in ("-h", "--help"):
        lines = (f"  {command:8} {text}" for command, (_, text) in COMMANDS.items())
        print("usage: pod COMMAND …\n\n" + "\n".join(lines) + "\n\n`pod COMMAND --help` explains one.")
    elif name not in COMMANDS:
        print(f"error: pod {name}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    else:
        sys.argv[:2] = [f"pod {name}"]
        start(name)


def start(name: str) -> None:
    """Run one of the commands: its module's own `start`, else its `main`."""
    try:
        command = importlib.import_module(f"pod.commands.{COMMANDS[name][0]}")
        try:
            command.start() if hasattr(command, "start") else run_recipe(command)
        finally:
            sys.stdout.flush()  # here, where a closed pipe can still be told from an error
    except BrokenPipeError:  # as of `pod eval --list-methods | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except ModuleNotFoundError as error:
        if (error.name or "pod").startswith("pod."):
            raise
        text = f"error: the package {error.name} is missing: {INSTALL}; `pod doctor` lists what is"
        print(text, file=sys.stderr)
        sys.exit(2)


def note_on_data(recipe: Any) -> None:
    """Say, on the first rank, where the prepared data that a command is about to read is of other settings than the recipe's."""
    from pod.data.rows.manifest import read_manifest

    try:
        other = recipe.data.other_than(read_manifest(recipe.data_dir), recipe.seed)
    except ValueError:  # none, or a damaged one: whoever needs it says so
        return
    if other and os.environ.get("RANK", "0") == "0":
        note = f"{recipe.data_dir} was prepared with other {', '.join(other)} than this recipe's"
        print(f"note: {note}, and is read as it is; `pod data --overwrite` makes it anew", flush=True)


def run_recipe(command: ModuleType) -> None:
    """Call a module's `main` with the recipe that the command line names; SECTIONS: those that it reads, see `pod.recipe.run`."""
    from pod.recipe import run

    more = {name: getattr(command, name, None) for name in ("estimate", "add_arguments")}
    run(command.main, sections=command.SECTIONS, description=command.__doc__, **more)
