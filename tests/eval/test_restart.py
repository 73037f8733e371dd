"""Whole evaluations in processes of their own.

They are killed and restarted, on two ranks, with a method that fails on one rank.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pod

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TASKS = ["passkey", "arc_easy", "gsm8k"]
SETTINGS = {
    "model.path": "package:tiny",
    "model.num_sink_tokens": 4,
    "model.num_recent_tokens": 60,
    "eval.methods": ["full", "snapkv@40"],
    "eval.tasks": TASKS,
    "eval.data_dir": str(HERE / "data"),
    "eval.batch_size": 2,
    "eval.passkey_lengths": [420],
    "eval.passkey_depths": [0.0, 0.5, 1.0],
    "eval.passkey_samples": 1,
    "eval.passkey_new_tokens": 4,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        },
        "POD_CACHE": str(tmp_path_factory.mktemp("cache")),
        "OMP_NUM_THREADS": "1",
    }


def start(folder, environment, *arguments, **changes):
    folder.mkdir(exist_ok=True)
    file = folder / "settings.json"
    file.write_text(json.dumps(SETTINGS | {"output_dir": str(folder)} | changes))
    command = [sys.executable, str(HERE / "worker_eval.py"), str(file), *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def end(process, seconds=3600):
    _, errors = process.communicate(timeout=seconds)
    return process.returncode, errors


def parts(folder, method):
    content = json.loads((folder / "eval" / f"{method}.json").read_text())
    for part in content["parts"].values():
        for key in ("seconds", "environment"):
            del part[key]
    return content["status"], content["parts"]


def writes(folder):
    return sum(int(file.read_text()) for file in folder.glob("writes.*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, environment):
    """The folder of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    code, errors = end(start(folder, environment))
    assert code == 0, errors
    return folder


def test_undisturbed_run_is_whole(whole):
    for method in ("full", "snapkv@40"):
        status, found = parts(whole, method)
        assert status == "finished" and list(found) == TASKS
        assert [len(part["samples"]) for part in found.values()] == [3, 3, 3]
    names = [file.parent.name for file in (whole / "eval" / "answers").glob("*/0.jsonl")]
    assert len(names) == 2 and {name.split(".")[0] for name in names} == {"full", "snapkv@40"}


@pytest.mark.multiprocess
def test_killed_and_restarted_goes_on_at_the_sample_with_equal_results(tmp_path, whole, environment):
    """The kill comes in gsm8k's first method, after one of its batches, in the middle of a line."""
    total = writes(whole)
    # passkey, the model itself, arc_easy (two rows in a batch of one forward each) and gsm8k
    first_method = 2 + 1 + 6 + 2
    process = start(tmp_path, environment, str(first_method - 1))
    code, _ = end(process)
    assert code == -signal.SIGKILL
    (torn,) = (tmp_path / "eval" / "answers").glob("*/*.jsonl")
    before = torn.read_text()
    assert not before.endswith("\n") and before.count('{"answers": {') == first_method
    assert list(parts(tmp_path, "full")[1]) == TASKS[:2], "the kill did not come in the middle of gsm8k"
    code, errors = end(start(tmp_path, environment))
    assert code == 0, errors
    assert writes(tmp_path) == total - (first_method - 1), "something was answered twice, or not at all"
    assert torn.read_text().startswith(before), "the folder only grows"
    for method in ("full", "snapkv@40"):
        assert parts(tmp_path, method) == parts(whole, method)


def run_two_ranks(folder, environment, seconds=3600, **changes):
    """(exit code, errors) of both ranks of one evaluation."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks.append(start(folder, environment | place, **changes))
    try:
        return [end(process, seconds) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.multiprocess
def test_speeds_and_byte_budgets_of_two_ranks_are_measured_by_one(tmp_path, environment):
    """Rank 0 alone measures, while rank 1 waits at the end.

    It measures also bytes of PoD that nothing before has asked for.
    """
    plan = pod.SharingPlan(lead=[[0, 0], [0, 0], [0, 2], [3, 2]])
    plan.save(tmp_path / "plan.json")
    changes = {
        "model.plan": str(tmp_path / "plan.json"),
        "eval.methods": ["full", "int4", "streamingllm"],
        "eval.tasks": ["efficiency"],
        "eval.efficiency_lengths": [300],
        "eval.efficiency_tokens": 2,
        "eval.efficiency_repeats": 1,
        "eval.task_options": {
            "efficiency": {"longest_prompt": 64, "longest_prompt_tokens": 128, "memory_limit_gib": 1}
        },
    }
    for code, errors in run_two_ranks(tmp_path, environment, seconds=120, **changes):
        assert code == 0, errors
    for method in ("full", "int4", "streamingllm"):
        status, found = parts(tmp_path, method)
        assert status == "finished"
        (row,) = found["efficiency"]["lengths"]
        assert row["bytes"]["pod_bytes"] < row["bytes"]["dense_bytes"]


@pytest.mark.multiprocess
def test_two_ranks_equal_one_and_a_method_that_fails_on_one_rank_loses_no_other(tmp_path, whole, environment):
    changes = {"eval.methods": ["streamingllm@40", "full", "snapkv@40"], "break_on_rank": "1"}
    ends = run_two_ranks(tmp_path, environment, **changes)
    for code, errors in ends:
        assert code == 1 and "1 of 3 methods failed" in errors, errors
        assert "rank 1: RuntimeError: out of sinks" in errors
    for method in ("full", "snapkv@40"):
        assert parts(tmp_path, method) == parts(whole, method)
    status, found = parts(tmp_path, "streamingllm@40")
    assert status == "failed" and not found
    content = json.loads((tmp_path / "eval" / "streamingllm@40.json").read_text())
    assert set(content["failed"]) == set(TASKS)
