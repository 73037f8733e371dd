"""On a second device every method and family computes what it computes on the CPU, and no step waits for the device unseen.

The device is simulated (`tests/helpers/simulated_device.py`). It cannot show streams, kernels, graphs or communication.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from method_table import ROWS

HERE = Path(__file__).parent
SCRIPT = HERE / "simulated_runs.py"

USUAL_READS = (5, 4, 4)
"""How often the host waits in a padded prompt, in a chunk and in a decoded token with a mask: is the mask that of before,
is anything padding, are all rows of one length."""

OTHER_READS = {
    "full": (6, 6, 6),
    "pod": (6, 6, 6),
    "cla": (6, 6, 6),
    "window": (6, 6, 6),
    "streamingllm": (6, 6, 6),
    "lm_infinite": (6, 6, 6),
    "wa": (6, 6, 6),
    "snapkv-streaming": (10, 6, 4),
    "adakv": (15, 14, 4),
    "adakv-streaming": (30, 26, 4),
    "expected_attention-streaming": (10, 6, 4),
    "kvzip": (27, 4, 4),
    "h2o-streaming": (10, 6, 4),
    "d2o": (7, 4, 4),
    "d2o-apart": (7, 4, 4),
    "d2o-streaming": (12, 6, 4),
    "simlayerkv": (5, 4, 14),
    "simlayerkv-prefill": (15, 6, 4),
    "imdc": (8, 4, 4),
    "imdc(streamingllm)": (33, 14, 4),
    "im": (8, 4, 4),
    "fm": (8, 4, 4),
    "pod+snapkv": (6, 6, 4),
    "pod+pyramidkv": (6, 6, 4),
    "pod+expected_attention": (6, 6, 4),
    "pyramidkv+int4": (5, 20, 4),
    "adakv+int4": (15, 34, 4),
    "kvzip+int4": (27, 4, 4),
    "d2o+int4": (27, 48, 48),
    "d2o-streaming+int4": (72, 46, 24),
    "simlayerkv+int4": (5, 4, 14),
    "imdc+int4": (8, 4, 4),
    "imdc(streamingllm)+int4": (33, 14, 4),
    "im+int8": (8, 4, 4),
    "fm+int4": (8, 4, 4),
    "pod+snapkv+int4": (6, 50, 4),
    "pod+pyramidkv+int4": (6, 58, 8),
    "pod+expected_attention+int4": (6, 50, 4),
}
"""The same for methods that wait more often, at most for a token: rows held together (6), and what a method decides by
its scores on the host."""

TRAINING_READS = {
    "mixtral": 11,
    "qwen3-moe": 9,
    "llama, keep, layer inputs on the host": 6,
    "llama, offload, layer inputs kept": 5,
    "llama, offload, layer inputs on the host": 10,
    "llama, recompute, layer inputs on the host": 6,
}
"""Reads of a training step; 1 where nothing is said, the documents of the rows. Copies of a carry to the host are not
waited for."""


def results_of(part: str) -> list[dict]:
    """The lines of JSON that one part of the script prints."""
    paths = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), part], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_numbers(results: list[dict], limit: float = 1e-12) -> None:
    """Every run gave on the device what it gave on the CPU."""
    assert {one["name"]: one["difference"] for one in results if not one["difference"] <= limit} == {}
    assert [one["name"] for one in results if not one["same tokens"]] == []


def total(reads: dict[str, int]) -> int:
    return sum(reads.values())


@pytest.mark.slow
def test_every_method_decodes_there_and_waits_as_often_as_known():
    results = results_of("methods")
    assert len(results) == len(ROWS)
    check_numbers(results)
    found = {}
    for one in results:
        steps = {name: total(reads) for name, reads in one["reads"].items()}
        token = max(count for name, count in steps.items() if name.startswith("token"))
        found[one["name"]] = (steps["prompt"], steps["chunk"], token)
    assert {name: reads for name, reads in found.items() if reads != USUAL_READS} == OTHER_READS


@pytest.mark.slow
def test_every_family_generates_there():
    results = results_of("families")
    check_numbers(results)
    tokens = {one["name"]: total(one["reads"]["token 1"]) for one in results}
    assert {name: count for name, count in tokens.items() if count != 6} == {"mixtral": 16, "qwen3-moe": 14}


@pytest.mark.slow
def test_every_family_trains_there():
    results = results_of("training")
    check_numbers(results)
    reads = {one["name"]: total(one["reads"]["step"]) for one in results}
    assert {name: count for name, count in reads.items() if count != 1} == TRAINING_READS


@pytest.mark.slow
def test_a_plan_is_measured_there():
    check_numbers(results_of("exploring"))


@pytest.mark.slow
def test_an_evaluation_gives_the_same_scores_answers_and_bytes_there():
    check_numbers(results_of("evaluation"), limit=1e-3)  # nats of 128 tokens, in float32


@pytest.mark.slow
def test_the_device_refuses_what_cuda_refuses_and_counts_what_waits():
    assert results_of("device") == [
        {
            "refused": ["add", "mm", "index_select", "index_put_", "numpy"],
            "reads": [
                "_local_scalar_dense",
                "bincount",
                "copy to host",
                "mask as index",
                "nonzero",
                "tolist",
            ],
        }
    ]
