"""A process that does runs on the simulated device, and what every run must give."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Runs:
    """A process that does the runs of a script of this folder, part by part: it imports and compiles once.

    errors: file for what it says beside its results.
    """

    def __init__(self, script: str, errors: Path):
        self.script, self.errors = HERE / script, errors
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        paths = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parents[1])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with open(self.errors, "w") as errors:
            return subprocess.Popen(
                [sys.executable, str(self.script)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def results_of(self, part: str) -> list[dict]:
        """The lines of JSON that one part of the script prints."""
        if self.process is None or self.process.poll() is not None:
            self.process = self.start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(part, file=self.process.stdin, flush=True)
        results = []
        for line in self.process.stdout:
            if not line.strip():
                return results
            results.append(json.loads(line))
        self.process.wait()
        pytest.fail(f"{part} ended the process: {self.errors.read_text()[-3000:]}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.communicate()  # the end of its input is the end of its work


def check_numbers(results: list[dict], limit: float = 1e-12) -> None:
    """Every run gave on the device what it gave on the CPU."""
    assert {one["name"]: one["difference"] for one in results if not one["difference"] <= limit} == {}
    assert [one["name"] for one in results if not one["same tokens"]] == []
