"""The command `pod` and its parts. Each takes one YAML recipe; the scripts in launch/ are the same for a checkout."""

import importlib
import os
import sys

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
"""Name → module of this package with a function `start()`, and what it does."""


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
        try:
            importlib.import_module(f"pod.commands.{COMMANDS[name][0]}").start()
        except BrokenPipeError:  # as of `pod eval --list-methods | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
