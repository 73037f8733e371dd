"""Layouts and plans under sequence parallelism equal one process.

Cross-layer and window attention, and plans of all roles. There is no more exchange than needed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker_layouts.py")
pytestmark = [pytest.mark.multiprocess, pytest.mark.quick]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Per rank: case to worst error and bytes sent."""
    folder = tmp_path_factory.mktemp("layouts")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    command = [sys.executable, str(WORKER), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=6 * 3600)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(3)]


@pytest.mark.parametrize(
    "case",
    [
        "cla",
        "cla_replicated",
        "window",
        "roles",
        "roles_replicated",
        "roles_odd",
        "sinks",
        "sinks_replicated",
    ],
)
def test_output_and_gradients_equal_one_process(results, case):
    assert all(rank[case]["worst"] <= 1e-9 for rank in results)
    assert results[0][case]["moved"] == (
        case.endswith("s_replicated")
    )  # three heads on three ranks need not move


@pytest.mark.parametrize(("case", "key_value_heads"), [("cla", 3), ("cla_replicated", 6), ("window", 3)])
def test_followers_send_queries_only(results, case, key_value_heads):
    """Followers send queries only.

    That is twice 9 tokens of 6 query heads per layer, and keys and values only where a layer has some (0, 2,
    4).
    """
    own = [case == "window" or layer % 2 == 0 for layer in range(5)]
    heads = sum(6 + 2 * key_value_heads * has for has in own)
    assert results[2][case]["sent"] == 2 * heads * 9 * 8 * 8  # once more for the recomputation; d = 8, 8 B
