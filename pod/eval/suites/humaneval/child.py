"""The two processes of `execution.run_solution`.

The process `solve` holds the solution and answers calls. The process `judge` runs the tests and decides.

Standard library only. The file is never imported but run by its path:
`child.py solve|judge CPU_SECONDS MEMORY_BYTES`. Each process reads what to run as the first line (JSON) of
its standard input. Then the two talk in lines: a call is the `repr` of its arguments, a reply is
{"value": repr} or {"error": text}. What a solution returns comes back as a literal of plain data, so that no
object of its process can reach the judge's process, which holds the tests.
"""

import ast
import json
import os
import resource
import signal
import sys
from typing import Any, TextIO

_FILE_BYTES = 16 << 20
_ENDED = 3  # exit code of a judge whose solution ended before it replied


class Refused(Exception):
    """The solution raised instead of returning; its own error is the message."""


def set_limits(cpu_seconds: float, memory_bytes: int) -> None:
    """Limit the CPU time of this process, its address space and the sizes of its files.

    Exceeding the CPU time ends the process, whatever the program catches.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = int(cpu_seconds) + 2  # counted from the start of the process; the timer below is exact
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)


def take_streams() -> tuple[TextIO, TextIO]:
    """The streams from and to the other process: the real standard input and output.

    A program that is run here afterwards reads nothing, and what it prints goes nowhere.
    """
    talk = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(quiet, number)
    return talk


def say(stream: TextIO, what: Any) -> None:
    """Write one line of JSON and send it."""
    stream.write(json.dumps(what) + "\n")
    stream.flush()


def solve(source: str, name: str, calls: TextIO, replies: TextIO) -> None:
    """Run the program once, then call its function `name` for each line of `calls`."""
    scope: dict[str, Any] = {}
    try:
        exec(compile(source, "<solution>", "exec"), scope)
        say(replies, {"value": "None"})
        for line in calls:
            value = scope[name](*ast.literal_eval(json.loads(line)))
            say(replies, {"value": repr(value.tolist() if hasattr(value, "tolist") else value)})
    # whatever a solution raises, SystemExit included, is its failure
    except BaseException as raised:  # noqa: BLE001
        say(replies, {"error": f"{type(raised).__name__}: {raised}"[:200]})


def judge(setup: str, test: str, name: str, replies: TextIO, calls: TextIO) -> None:
    """Run the official tests on a function that calls the solution in the other process.

    Raises:
        Refused: for a failed call.
        Exception: whatever the tests raise.
    """

    def reply() -> Any:
        line = replies.readline()
        if not line:
            sys.exit(_ENDED)
        said = json.loads(line)
        if "error" in said:
            raise Refused(said["error"])
        return ast.literal_eval(said["value"])

    def candidate(*given: Any) -> Any:
        say(calls, repr(given))
        return reply()

    reply()  # the program has run
    scope: dict[str, Any] = {}
    exec(compile(setup, "<problem>", "exec"), scope)
    exec(compile(test, "<test>", "exec"), scope)
    scope[name] = candidate
    scope["check"](candidate)


def main() -> None:
    """Run as one of the two processes.

    The judge ends with code 0 if the tests pass; else the last line of its standard error says why.
    """
    role = sys.argv[1]
    cpu_seconds = float(sys.argv[2])
    memory_bytes = int(sys.argv[3])
    heard, said = take_streams()
    asked = json.loads(heard.readline())
    set_limits(cpu_seconds, memory_bytes)
    if role == "solve":
        solve(asked["source"], asked["name"], heard, said)
        os._exit(0)
    try:
        judge(asked["setup"], asked["test"], asked["name"], heard, said)
    except Exception as raised:  # noqa: BLE001 - a test may fail in any way
        reason = f"{raised}" if type(raised) is Refused else f"{type(raised).__name__}: {raised}"
        sys.exit(" ".join(reason.split())[:200])


if __name__ == "__main__":
    main()
