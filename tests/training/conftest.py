"""Starts the worker scripts of this folder: each pays its imports once and forks its ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def worker_environment() -> dict[str, str]:
    """One thread per rank, no GPU, no rank variables of an outer launcher."""
    outer = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    paths = os.pathsep.join([str(ROOT), *filter(None, [outer.get("PYTHONPATH")])])
    return {
        **outer,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": paths,
    }


def run_worker(script: str, folder: Path, timeout: int = 240) -> dict[str, dict]:
    """Run `script` (in this folder) with `folder` as its argument; returns its JSON results by name."""
    command = [sys.executable, str(HERE / script), str(folder)]
    done = subprocess.run(command, env=worker_environment(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}


@pytest.fixture(scope="session")
def parallel_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_parallel.py."""
    every = os.environ.get("POD_ALL_LAYOUTS") == "1"  # hours on two cores
    return run_worker("worker_parallel.py", tmp_path_factory.mktemp("parallel"), 6 * 3600 if every else 400)


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory) -> Path:
    """Where worker_runs.py writes its runs and exports."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def run_results(runs_folder) -> dict[str, dict]:
    """Results of worker_runs.py."""
    return run_worker("worker_runs.py", runs_folder, timeout=600)


@pytest.fixture(scope="session")
def carry_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_carry.py."""
    return run_worker("worker_carry.py", tmp_path_factory.mktemp("carry"))


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    """Where worker_data.py writes its rows."""
    return tmp_path_factory.mktemp("read")


@pytest.fixture(scope="session")
def data_results(data_folder) -> dict[str, dict]:
    """Results of worker_data.py."""
    return run_worker("worker_data.py", data_folder)


@pytest.fixture(scope="session")
def control_folder(tmp_path_factory) -> Path:
    """Where worker_control.py writes its runs."""
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="session")
def control_results(control_folder) -> dict[str, dict]:
    """Results of worker_control.py."""
    return run_worker("worker_control.py", control_folder)


@pytest.fixture(scope="session")
def cheaper_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_cheaper.py."""
    return run_worker("worker_cheaper.py", tmp_path_factory.mktemp("cheaper"), timeout=600)


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory) -> Path:
    """Where worker_seeing.py writes its runs."""
    return tmp_path_factory.mktemp("seeing")


@pytest.fixture(scope="session")
def seeing_results(seeing_folder) -> dict[str, dict]:
    """Results of worker_seeing.py."""
    return run_worker("worker_seeing.py", seeing_folder, timeout=480)


@pytest.fixture(scope="session")
def restart_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_restart.py."""
    return run_worker("worker_restart.py", tmp_path_factory.mktemp("restart"), timeout=1200)


@pytest.fixture(scope="session")
def kill_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_kills.py."""
    return run_worker("worker_kills.py", tmp_path_factory.mktemp("kills"), timeout=3600)


@pytest.fixture(scope="session")
def engine_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_engine.py."""
    return run_worker("worker_engine.py", tmp_path_factory.mktemp("engine"), 400)


@pytest.fixture(scope="session")
def variant_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_variants.py."""
    return run_worker("worker_variants.py", tmp_path_factory.mktemp("variants"))


@pytest.fixture(scope="session")
def estimate_results(tmp_path_factory) -> dict[str, dict]:
    """Results of worker_estimate.py."""
    return run_worker("worker_estimate.py", tmp_path_factory.mktemp("estimate"), timeout=600)
