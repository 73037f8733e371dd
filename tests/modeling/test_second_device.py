"""On a second device all methods and families compute what they compute on the CPU, and no step waits unseen.

The device is simulated (`tests/helpers/simulated_device.py`), without streams, kernels, graphs or
communication.
"""

import pytest
from method_table import ROWS
from simulated_process import Runs, check_numbers

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
    "simlayerkv": (5, 3, 5),
    "simlayerkv-prefill": (15, 5, 3),
    "imdc": (8, 3, 3),
    "imdc(streamingllm)": (33, 13, 3),
    "im": (8, 3, 3),
    "fm": (8, 3, 3),
    "pod+snapkv": (6, 5, 3),
    "pod+pyramidkv": (6, 5, 3),
    "pod+expected_attention": (6, 5, 3),
    "pyramidkv+int4": (5, 11, 3),
    "adakv+int4": (15, 25, 3),
    "kvzip+int4": (26, 3, 3),
    "d2o+int4": (7, 7, 3),
    "d2o-streaming+int4": (12, 5, 3),
    "simlayerkv+int4": (5, 3, 5),
    "imdc+int4": (8, 3, 3),
    "imdc(streamingllm)+int4": (33, 13, 3),
    "im+int8": (8, 3, 3),
    "fm+int4": (8, 3, 3),
    "pod+snapkv+int4": (6, 27, 3),
    "pod+pyramidkv+int4": (6, 31, 5),
    "pod+expected_attention+int4": (6, 27, 3),
    "h2o+int4, packed": (5, 23, 3),
    "roco+int8, packed": (5, 23, 3),
    "d2o+int4, packed": (7, 23, 3),
    "d2o-streaming+int4, packed": (32, 25, 3),
}
"""The same, at most for a token, of methods that wait more often.

Layouts ask for the lengths of both what was before and what is new (4). Others decide by scores on the
host, at the end of a prompt; SimLayerKV by the first token of an answer, once for each row.
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    process = Runs("simulated_runs.py", tmp_path_factory.mktemp("runs") / "errors")
    yield process
    process.stop()


OFFLOADED = "copy to the host at training/run/shared_qk.py"
"""Tensors that wait for their backward in host memory; on CUDA it is pinned, and no copy is waited for."""

OFFLOADS = {
    "offload": 4,
    "keep, hidden states offloaded": 5,
    "offload, hidden states offloaded": 9,
    "recompute, hidden states offloaded": 5,
}
"""How many of them a training step of five layers and two leads copies, by settings."""


def total(reads: dict[str, int]) -> int:
    return sum(reads.values())


@pytest.mark.slow
def test_every_method_decodes_there_and_waits_as_often_as_known(runs):
    results = runs.results_of("methods")
    assert {row.id for row in ROWS} <= {one["name"] for one in results}
    check_numbers(results)
    found = {}
    for one in results:
        steps = {name: total(reads) for name, reads in one["reads"].items()}
        token = max(count for name, count in steps.items() if name.startswith("token"))
        found[one["name"]] = (steps["prompt"], steps["chunk"], token)
    assert {name: reads for name, reads in found.items() if reads != USUAL_READS} == OTHER_READS


@pytest.mark.slow
def test_every_family_generates_there(runs):
    results = runs.results_of("families")
    check_numbers(results)
    tokens = {one["name"]: total(one["reads"]["token 1"]) for one in results}
    assert set(tokens.values()) == {OTHER_READS["pod"][2]}


@pytest.mark.slow
def test_every_family_trains_there_with_and_without_activation_checkpoints(runs):
    results = runs.results_of("training")
    check_numbers(results)
    waits, copies = {}, {}
    for one in results:
        reads = one["reads"]["step"]
        offloaded = sum(count for what, count in reads.items() if what.startswith(OFFLOADED))
        name = one["name"]
        waits[name] = total(reads) - offloaded
        if offloaded:
            copies[name] = offloaded
    assert set(waits.values()) == {1}  # the documents of the rows
    llama = {name: count for name, count in copies.items() if name.startswith("llama,")}
    assert llama == {f"llama, {name}": count for name, count in OFFLOADS.items()}
    assert all("offload" in name for name in copies)


@pytest.mark.slow
def test_a_plan_is_measured_there(runs):
    check_numbers(runs.results_of("exploring"))


@pytest.mark.slow
def test_an_evaluation_gives_the_same_scores_answers_and_bytes_there(runs):
    check_numbers(runs.results_of("evaluation"), limit=1e-3)  # nats of 128 tokens, in float32


@pytest.mark.slow
def test_the_device_refuses_what_cuda_refuses_and_counts_what_waits(runs):
    (found,) = runs.results_of("device")
    assert found["refused"] == [
        "add",
        "mm",
        "cat",
        "index_select",
        "index a host tensor",
        "values of the host",
        "numpy",
    ]
    assert found["refused of two"] == [
        "add",
        "add a number",
        "mm",
        "cat",
        "index",
        "mask",
        "where",
        "make on a third",
        "move to a third",
    ]
    waiting = {name for name, count in found["reads"].items() if count}
    assert waiting == {name for name in found["reads"] if not name.startswith("free: ")}
    assert found["over both"] == {"gradient": [36.0, 72.0], "devices": ["sim:0", "sim:1", "sim:1", "sim:1"]}
