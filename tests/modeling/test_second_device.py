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

USUAL_READS = (5, 3, 3)
"""How often the host waits in a padded prompt, in a chunk and in a decoded token with a mask.

It asks whether the mask is that of before, whether anything is padding, and how long the rows are.
"""

OTHER_READS = {
    "full": (5, 4, 4),
    "pod": (5, 4, 4),
    "cla": (5, 4, 4),
    "window": (5, 4, 4),
    "streamingllm": (5, 4, 4),
    "lm_infinite": (5, 4, 4),
    "wa": (5, 4, 4),
    "snapkv-streaming": (10, 5, 3),
    "adakv": (15, 13, 3),
    "adakv-streaming": (30, 25, 3),
    "expected_attention-streaming": (10, 5, 3),
    "kvzip": (26, 3, 3),
    "h2o-streaming": (10, 5, 3),
    "d2o": (7, 3, 3),
    "d2o-apart": (7, 3, 3),
    "d2o-streaming": (12, 5, 3),
    "simlayerkv": (5, 3, 13),
    "simlayerkv-prefill": (15, 5, 3),
    "imdc": (8, 3, 3),
    "imdc(streamingllm)": (33, 13, 3),
    "im": (8, 3, 3),
    "fm": (8, 3, 3),
    "pod+snapkv": (6, 5, 3),
    "pod+pyramidkv": (6, 5, 3),
    "pod+expected_attention": (6, 5, 3),
    "pyramidkv+int4": (5, 19, 3),
    "adakv+int4": (15, 37, 3),
    "kvzip+int4": (26, 3, 3),
    "d2o+int4": (27, 47, 47),
    "d2o-streaming+int4": (72, 45, 23),
    "simlayerkv+int4": (5, 3, 13),
    "imdc+int4": (8, 3, 3),
    "imdc(streamingllm)+int4": (33, 13, 3),
    "im+int8": (8, 3, 3),
    "fm+int4": (8, 3, 3),
    "pod+snapkv+int4": (6, 49, 3),
    "pod+pyramidkv+int4": (6, 57, 7),
    "pod+expected_attention+int4": (6, 49, 3),
}
"""The same, at most for a token, of methods that wait more often: layouts ask for the lengths of both what was before and
what is new (4), others decide by scores on the host."""


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
    assert set(tokens.values()) == {OTHER_READS["pod"][2]}


@pytest.mark.slow
def test_every_family_trains_there():
    results = results_of("training")
    check_numbers(results)
    reads = {one["name"]: total(one["reads"]["step"]) for one in results}
    assert set(reads.values()) == {1}  # the documents of the rows


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
                "copy to the host",
                "index by a mask",
                "nonzero",
                "tolist",
            ],
        }
    ]
