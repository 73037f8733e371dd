"""Runs `pod train` with several command lines.

Each runs in a process forked from one that has paid the imports.

`worker_commands.py FILE`: FILE is a JSON object of names and argument lists. Beside it appear NAME.out and
NAME.err, and the exit codes in FILE.codes.
"""

import json
import os
import sys
from pathlib import Path

import tiny


def run(arguments: list[str], output: Path, errors: Path) -> int:
    """The exit code of `pod train` with these arguments; what it prints goes to two files."""
    child = os.fork()
    if child == 0:
        for stream, file in ((1, output), (2, errors)):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
        os._exit(code_of(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def code_of(arguments: list[str]) -> int:
    from pod.commands import start

    sys.argv = ["train_pod.py", *arguments]
    try:
        start("train")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main(file: Path) -> None:
    tiny.import_for_ranks()
    commands = json.loads(file.read_text(encoding="utf-8"))
    codes = {
        name: run(arguments, file.parent / f"{name}.out", file.parent / f"{name}.err")
        for name, arguments in commands.items()
    }
    file.with_suffix(".codes").write_text(json.dumps(codes), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
