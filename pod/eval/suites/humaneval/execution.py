"""Does a program that a model wrote pass its tests? Run in a process of its own, with limits (see `sandbox`)."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CPU_SECONDS = 3.0  # the official time limit; theirs is of the clock, ours of the CPU, so that a busy machine fails no program
MEMORY_BYTES = 4 << 30
_CLOCK_FACTOR = 10  # a program that sleeps
_SANDBOX = Path(__file__).with_name("sandbox.py")


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end without an exception; reason: `passed`, `timed out`, `failed: …` or `died: …`.

    network_cut: whether it had no network at all; None when the process did not live to tell.
    """

    passed: bool
    reason: str
    network_cut: bool | None = None


def run_program(program: str, cpu_seconds: float = CPU_SECONDS, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    """Run a program in an empty folder, with no more than the CPU time and address space given.

    Only where a user allowed it (`eval.unsafe_code`): the limits stop accidents, not attackers.
    """
    token = secrets.token_hex(16)
    asked = {
        "program": program,
        "token": token,
        "cpu_seconds": cpu_seconds,
        "memory_bytes": memory_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="pod-eval-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_SANDBOX)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": folder, "PATH": os.defpath},
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(json.dumps(asked).encode(), timeout=cpu_seconds * _CLOCK_FACTOR)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Outcome(False, "timed out")
    return _outcome(child.returncode, said, token)


def _outcome(code: int, said: bytes, token: str) -> Outcome:
    if -code in (signal.SIGPROF, signal.SIGXCPU):
        return Outcome(False, "timed out")
    try:
        report = json.loads(said)
    except ValueError:
        return Outcome(False, f"died: exit code {code}")
    if report.get("token") != token:
        return Outcome(False, "died: it wrote a report of its own")
    if report["error"] is not None:
        return Outcome(False, f"failed: {report['error']}", report["network_cut"])
    return Outcome(True, "passed", report["network_cut"])
