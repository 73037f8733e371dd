"""Shared by all tests: no network, few threads, and the way to run a launcher."""

import atexit
import gc
import os
import subprocess
import sys
from pathlib import Path

import levels
import pytest

ROOT = Path(__file__).resolve().parents[1]

# This comes before anything imports torch or transformers. Tests reach no network and do not fight over cores
# with their own subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# ninja and deepspeed are looked up by name
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--level` chooses between the minutes of `make test` and everything."""
    parser.addoption(
        "--level",
        choices=levels.LEVELS,
        default="all",
        help="quick: what `make test` runs; rest: all other cases; sample: those of the rest that CI runs; "
        "all: quick and rest (default)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the level asked for; longest files first; skip tests marked `gpu` where there is none."""
    kept, left_out = levels.split_by_level(items, config.getoption("--level"))
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(kept, key=levels.place_in_line)
    skip_gpu_tests_without_a_gpu(items)


def pytest_collection_finish() -> None:
    """Take what is imported so far out of garbage collection.

    Tests and DeepSpeed ask for garbage collection again and again.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules complain of leaks at the end


def skip_gpu_tests_without_a_gpu(items: list[pytest.Item]) -> None:
    """torch is imported only if a test asks for a GPU."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def launch(tmp_path):
    """`launch("explore.py", "--config", file)` runs a launcher in an empty folder.

    It returns the finished process.
    """

    def start(
        name: str, *arguments: object, timeout: float = 3600, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "launch" / name), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return start
