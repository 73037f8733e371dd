"""Find out whether a function that a model wrote passes its tests.

The function runs in a sandbox, in another process than the tests (see `child`).
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pod.eval.suites import task_data
from pod.eval.suites.humaneval import sandbox

PASSED = "passed"
# The official time limit. Officially it is clock time; here it is CPU time, so that no program fails because
# the machine is busy.
CPU_SECONDS = 3.0
MEMORY_BYTES = 4 << 30
_CLOCK_SECONDS = 30.0  # ends a program that sleeps
_CHILD = Path(__file__).with_name("child.py")
_ENDED = 3  # exit code of a judge whose solution ended before it replied (`child`)
_TIMED_OUT = {code for number in (signal.SIGPROF, signal.SIGXCPU) for code in (-number, number + 128)}


def check_permission() -> None:
    """Refuse to run a model's code without a sandbox, unless the user allows it.

    Raises:
        ValueError: when bubblewrap does not work here and `eval.unsafe_code` is not set.
    """
    if not sandbox.available() and not task_data.unsafe_code():
        raise ValueError(
            "HumanEval runs code that a model wrote, and bubblewrap (bwrap 0.8 or newer) is missing or not "
            "allowed here: install it, or set eval.unsafe_code to true (lm-eval's command line: "
            "--confirm_run_unsafe_code) on a machine where such code can do no harm"
        )


def run_solution(
    prompt: str,
    completion: str,
    test: str,
    name: str,
    cpu_seconds: float = CPU_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> str:
    """Run the official `test` on the function `name` of the program `prompt` + `completion`.

    Test and solution each run in a process of their own, with limits on CPU time and address space. Without
    bubblewrap these limits are the only protection.

    Args:
        cpu_seconds: limit of each process.
        memory_bytes: address space of each process.
    Returns:
        `passed`, `timed out`, `failed: …` (a test or the solution raised an error), or `died: …` (the process
        of the solution ended before it replied).

    Raises:
        ValueError: see `check_permission`.
    """
    check_permission()
    limits = [str(cpu_seconds), str(memory_bytes)]
    calls_out, calls_in = os.pipe()
    replies_out, replies_in = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pod-eval-") as folder:
        judge = _start("judge", limits, folder, replies_out, calls_in)
        solver = _start("solve", limits, folder, calls_out, replies_in)
        for end in (calls_out, replies_out):
            os.close(end)
        # the judge's line first: the solver writes into the same pipe as soon as it has its own
        tests = {"setup": prompt, "test": test, "name": name}
        solution = {"source": prompt + completion, "name": name}
        for end, asked in ((replies_in, tests), (calls_in, solution)):
            with contextlib.suppress(BrokenPipeError), os.fdopen(end, "w") as stream:
                stream.write(json.dumps(asked) + "\n")
        try:
            _, said = judge.communicate(timeout=_CLOCK_SECONDS)
            if judge.returncode == _ENDED:
                solver.wait(cpu_seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            for child in (judge, solver):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
    if judge.returncode == 0:
        return PASSED
    if {judge.returncode, solver.returncode} & _TIMED_OUT:
        return "timed out"
    if judge.returncode != _ENDED:
        return f"failed: {said.decode(errors='replace').strip().rpartition(chr(10))[2]}"
    return f"died: exit code {solver.returncode}"


def _start(role: str, limits: list[str], folder: str, heard: int, said: int) -> subprocess.Popen[Any]:
    command = [sys.executable, "-I", "-B", str(_CHILD), role, *limits]
    start = functools.partial(sandbox.start, seen=_CHILD) if sandbox.available() else subprocess.Popen
    return start(
        command,
        stdin=heard,
        stdout=said,
        stderr=subprocess.PIPE if role == "judge" else subprocess.DEVNULL,
        cwd=folder,
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": folder, "PATH": os.defpath},
        start_new_session=True,
    )
