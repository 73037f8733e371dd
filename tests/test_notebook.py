"""examples/first_steps.ipynb runs from its first cell to its last, and shows what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not committed"
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
def test_the_notebook_runs_and_finds_the_passkey(tmp_path):
    environment = {**os.environ, "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code_of(NOTEBOOK)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    key = next(line.split()[1] for line in lines if line.startswith("hidden:"))
    said = {line[:14].strip(): line[14:] for line in lines if " MiB  " in line}
    held = {name: float(line.split()[0]) for name, line in said.items()}
    assert key in said["full"] and key in said["int4"] and key in said["dense"]
    assert held["with the plan"] < 0.7 * held["dense"]
    assert key in lines[-1] or key not in said["with the plan"]
