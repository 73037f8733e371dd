"""Starts the worker scripts of this folder: each pays its imports once and forks its ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE = 6 * 3600
"""Seconds after which a worker hangs: far more than any takes on a busy machine."""


def worker_environment() -> dict[str, str]:
    """One thread per rank, no GPU, no rank variables of an outer launcher."""
    outer = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    helpers = str(ROOT / "tests" / "helpers")
    paths = os.pathsep.join([str(ROOT), helpers, *filter(None, [outer.get("PYTHONPATH")])])
    return {
        **outer,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": paths,
    }


def run_worker(script: str, folder: Path) -> dict[str, dict]:
    """Run `script` (in this folder) with `folder` as its argument; returns its JSON results by name."""
    command = [sys.executable, str(HERE / script), str(folder)]
    done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}


WORKERS = (
    "control",
    "data",
    "engine",
    "estimate",
    "groups",
    "kills",
    "newest",
    "parallel",
    "recipe",
    "restart",
    "runs",
    "seeing",
    "shared_qk",
    "start",
    "syncs",
    "variants",
)  # worker_<name>.py


def worker_fixtures(name: str) -> dict[str, object]:
    """`<name>_folder`, where a worker script writes, and `<name>_results`, its JSON results by name.

    The script runs once.
    """

    @pytest.fixture(scope="session", name=f"{name}_folder")
    def folder(tmp_path_factory) -> Path:
        return tmp_path_factory.mktemp(name)

    @pytest.fixture(scope="session", name=f"{name}_results")
    def results(request) -> dict[str, dict]:
        return run_worker(f"worker_{name}.py", request.getfixturevalue(f"{name}_folder"))

    return {f"{name}_folder": folder, f"{name}_results": results}


for worker in WORKERS:
    globals().update(worker_fixtures(worker))
