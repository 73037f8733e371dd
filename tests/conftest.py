"""Shared by all tests: no network, few threads, and the way to run a launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before anything imports torch or transformers. Tests reach no network and do not fight over cores with their own subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# ninja and deepspeed are looked up by name
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


LONGEST = "test_notebook.py", "test_triton_decode.py", "test_step.py", "/training/"
"""Parts of paths of test files that take minutes. They begin first, so that no worker is left alone with one."""

CASES_PER_FUNCTION = 2
"""How many cases of a parametrised test belong to the quick level."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--level` chooses between the minutes of `make test` and everything."""
    parser.addoption(
        "--level",
        choices=("quick", "rest", "all"),
        default="all",
        help="quick: what `make test` runs; rest: all other cases; all: both (default)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the level that was asked for; longest files first; skip tests marked `gpu` where there is none."""
    level = config.getoption("--level")
    if level != "all":
        quick = quick_cases(items)
        kept = [item for item in items if (item.nodeid in quick) == (level == "quick")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    items.sort(key=place_in_line)
    skip_gpu_tests_without_a_gpu(items)


def quick_cases(items: list[pytest.Item]) -> set[str]:
    """Ids of the tests of the quick level.

    A test marked `slow` is not among them. Of the cases of one parametrised function, the first and the last are:
    they differ in every parameter. Example: a function with the cases `[a-1]`, `[a-2]`, `[b-1]`, `[b-2]` keeps
    `[a-1]` and `[b-2]`.
    """
    cases: dict[str, list[str]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        function = item.nodeid.partition("[")[0]
        cases.setdefault(function, []).append(item.nodeid)
    quick = set()
    for ids in cases.values():
        quick.update(spread(ids, CASES_PER_FUNCTION))
    return quick


def spread(values: list[str], most: int) -> list[str]:
    """At most `most` (two or more) of the values, from the first to the last at equal distances."""
    if len(values) <= most:
        return values
    last = len(values) - 1
    return [values[round(step * last / (most - 1))] for step in range(most)]


def place_in_line(item: pytest.Item) -> int:
    """0 for tests of the file that takes longest, more for shorter ones."""
    path = item.path.as_posix()
    for place, part in enumerate(LONGEST):
        if part in path:
            return place
    return len(LONGEST)


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
    """`launch("explore.py", "--config", file)` runs a launcher in an empty folder and returns the finished process."""

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
