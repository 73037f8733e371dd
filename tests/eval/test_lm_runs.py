"""The model class in whole runs: ranks, the answer cache, lm-eval's command line and its --use_cache."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import lm_tools
import pytest
import torch
import worker_lm
from lm_eval.api.model import CachingLM

from pod.eval.answer.budget import CacheSpan, measure_bytes
from pod.eval.answer.methods import find_method
from pod.eval.lm.cli import arguments, main
from pod.eval.lm.command import CommandLM, make_runner
from pod.eval.lm.index import own_rule
from pod.eval.lm.model import PodLM
from pod.eval.lm.requests import RequestEncoder
from pod.models import resolve_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_ranks_equal_one_bit_for_bit(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outer = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/eval'}",
    }
    command = [sys.executable, str(ROOT / "tests/eval/worker_lm.py"), str(tmp_path / "found"), "snapkv"]
    ranks = [
        subprocess.Popen(command, env=outer | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=3600) for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2))
    assert first == second
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # bits of float32 depend on it
    try:
        assert worker_lm.answer("snapkv") == first
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("spec", ["full", "snapkv"])
def test_an_answer_cache_gives_the_answers_back_and_computes_nothing_twice(spec, tmp_path, monkeypatch):
    """Stopped in the third batch and started again: the same bits, every batch computed once."""
    wanted = worker_lm.answer(spec)
    computed = []

    def count(name, stop_at=None):
        original = getattr(PodLM, name)

        def counted(self, batch):
            if len(computed) == stop_at:
                raise KeyboardInterrupt
            computed.append(name)
            return original(self, batch)

        return counted

    names = ("_forward", "_decode", "_generate")
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(PodLM, name, count(name, stop_at=2))
        with pytest.raises(KeyboardInterrupt):
            worker_lm.answer(spec, tmp_path)
    assert len(computed) == 2
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(PodLM, name, count(name))
        found = worker_lm.answer(spec, tmp_path)
    assert found == wanted
    total = len(computed)
    again = worker_lm.answer(spec, tmp_path)
    assert again == wanted and len(computed) == total


def test_records_say_what_was_read_and_held():
    lm = lm_tools.around("snapkv", batch_size=3)
    requests = lm_tools.generations()
    lm.generate_until(requests)
    records = list(lm.records.values())
    assert [record["prompt_tokens"] for record in records] == [35, 45, 55, 65]
    assert len({record["prompt_hash"] for record in records}) == 4
    assert {record["budget_tokens"] for record in records} == {20}
    per_token = 2 * 4 * 2 * 16 * 8  # K and V, layers, KV heads, head_dim, float64
    for record in records:
        kept = record["bytes"] / per_token
        assert 20 <= kept <= 20 + 6 + 3, kept  # budget, new tokens, bookkeeping
        assert record["held_tokens"] <= 65 + 5
    full = lm_tools.around("full", batch_size=1)
    full.generate_until(requests[:1])
    assert next(iter(full.records.values()))["held_tokens"] == 35 + 5
    scored = lm_tools.around("full", one_shot=True)
    scored.loglikelihood(lm_tools.choices())
    assert {record["bytes"] for record in scored.records.values()} == {None}


def make(**arguments):
    return CommandLM(str(resolve_model("package:tiny")), dtype="float64", **arguments)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    lm_tools.PLAN.save(path)
    return str(path)


def test_model_arguments_make_the_method(plan):
    """As in --model_args; budgets in tokens, shares and PoD's bytes."""
    found = make(method="snapkv[window=6]@20").loglikelihood(lm_tools.choices())
    assert found == lm_tools.around("snapkv").loglikelihood(lm_tools.choices())
    assert make().loglikelihood(lm_tools.choices()) == lm_tools.around(one_shot=True).loglikelihood(
        lm_tools.choices()
    )
    quarter = make(method=" snapkv[window = 4] @ 0.25").runner
    assert (quarter.budget(CacheSpan(66, 2)), quarter.cache_budget(CacheSpan(66, 2))) == (16, "25%")
    assert quarter.method.name == "snapkv[window=4]@25%"
    windows = {"plan": plan, "num_sink_tokens": 4, "num_recent_tokens": 12}
    pod_lm = make(method="pod", **windows)
    assert pod_lm.one_shot and pod_lm.model.config.own_method == "pod"
    assert pod_lm.loglikelihood(lm_tools.choices()) == lm_tools.around("pod", one_shot=True).loglikelihood(
        lm_tools.choices()
    )
    # 4 of 8 (layer, head) pairs do not lead: they hold 16 of 128 keys, so PoD holds 128 - 112 * 4 / 16 = 100
    # tokens' bytes, and bookkeeping
    equal = make(method="streamingllm@pod", **windows)
    assert not equal.one_shot and equal.model.config.own_method == "full"
    assert equal.runner.budget(CacheSpan(128, 4)) == 101
    assert not make(method="pod[tau=0.7]", **windows).one_shot  # the gate skip is no part of one forward


def test_nothing_is_dropped_where_pod_drops_nothing(plan):
    """Also by methods that give some layers less than others."""
    wide = {"plan": plan, "num_sink_tokens": 4, "num_recent_tokens": 124}
    lm = make(method="pyramidkv[window=4]@pod", **wide)
    full = make().loglikelihood(lm_tools.choices())
    assert lm.loglikelihood(lm_tools.choices()) == [
        (pytest.approx(value, abs=1e-9), same) for value, same in full
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "snapvk@9"}, "unknown method 'snapvk'; did you mean 'snapkv'"),
        (
            {"method": "snapkv"},
            "method 'snapkv' needs a budget: write method=snapkv@1024 .* or give plan=PLAN.json",
        ),
        ({"method": "snapkv@20"}, "must exceed window = 32"),
        ({"method": "snapkv@pod"}, "or give plan=PLAN.json"),
        ({"method": "snapkv@many"}, "'many' is no budget"),
        ({"method": "full@9"}, "takes no budget"),
        (
            {"method": "snapkv", "budget": 9},
            "unknown model argument budget=9: write it after the method: method=snapkv@9",
        ),
        ({"method": "snapkv", "window": 4}, "in brackets, separated by ;, as in method=snapkv.window=4.@25%"),
        ({"method": "snapkv[widnow=4]@99"}, "snapkv has no parameter 'widnow'; did you mean 'window'"),
        ({"batch_size": "auto"}, "batch_size = 'auto' must be a number"),
        ({"too_long": "cut"}, "too_long = 'cut'"),
        ({"too_long": "skip"}, "count skipped prompts as wrong"),
        ({"device": "cpu", "max_length": 1}, "max_length = 1"),
    ],
)
def test_wrong_model_arguments_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        make(**arguments)
    assert "\n" not in str(error.value)


def test_answers_of_the_command_line_are_kept_by_what_answers(tmp_path, monkeypatch):
    """lm-eval's own keys (--use_cache) are refused, because they name the prompt only.

    A second method would read the first one's answers.
    """
    requests, place = lm_tools.choices()[:2], str(tmp_path / "answers")
    answers = make(method="snapkv[window=6]@20", store=place).loglikelihood(requests)
    other = make(method="snapkv[window=6]@30", store=place).loglikelihood(requests)
    assert other != answers and other == make(method="snapkv[window=6]@30").loglikelihood(requests)
    monkeypatch.setattr(PodLM, "_decode", lambda *_: pytest.fail("answered again"))
    assert make(method="snapkv[window=6]@20", store=place).loglikelihood(requests) == answers
    with pytest.raises(ValueError, match="store=FOLDER"):
        CachingLM(make(), str(tmp_path / "answers.db"))


def test_arguments_of_the_command_line():
    given = arguments(["--tasks", "arc_easy", "--output_path", "out", "--log_samples", "-L", "2"])
    assert given[:3] == ["run", "--tasks", "arc_easy"] and given[-2:] == ["--model", "pod"]
    assert "--model" not in arguments(["run", "-M", "hf"])
    model = "pretrained=x,method=pod+snapkv[window=4,pool=avg]+int4@25%,dtype=float32"
    swapped = model.replace("4,pool", "4;pool")
    assert arguments(["--model_args", model])[2] == swapped
    assert arguments([f"--model_args={model}"])[1] == f"--model_args={swapped}"
    assert arguments(["ls", "tasks"]) == ["ls", "tasks"]
    others = arguments(
        ["--tasks", "arc_easy", "--output_path", "out", "--log_samples", "-L", "2"], first=False
    )
    assert others[:5] == ["run", "--tasks", "arc_easy", "-L", "2"] and "out" not in others


def test_rules_of_our_tasks_hold_on_the_command_line_too():
    rule = own_rule("pod_longbench_qasper")
    assert (rule.truncation, rule.chat_template) == ("middle", True)
    assert own_rule("arc_easy").chat_template is False


@pytest.mark.slow
def test_command_line_runs_a_task_of_ours(tmp_path):
    model = f"pretrained={resolve_model('package:tiny')},method=snapkv[window=4,kernel=3]@25%,max_length=2048"
    options = (
        "--tasks pod_longbench_qasper --limit 1 --gen_kwargs max_gen_toks=4 "
        f"--output_path {tmp_path}/out --log_samples"
    )
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "launch/run_eval.py"),
            "lm-eval",
            "--model_args",
            model,
            *options.split(),
        ],
        env=os.environ
        | {"POD_EVAL_DATA": str(ROOT / "tests/eval/data"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|pod_longbench_qasper|" in done.stdout
    results = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    assert results["config"]["pod"]["method"] == "snapkv[kernel=3,window=4]@25%"


def test_command_line_ends_with_one_line(monkeypatch, capsys):
    def refuse():
        make(method="snapkv[widnow=4]@99")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", refuse)
    with pytest.raises(SystemExit) as end:
        main(["--tasks", "arc_easy"])
    assert end.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and "widnow" in last


def test_pod_bytes_are_measured_for_all_lengths_at_once(monkeypatch):
    prepared = []

    def measure(model, spec, lengths):
        prepared.append(lengths)
        return measure_bytes(model, spec, lengths)

    monkeypatch.setattr("pod.eval.lm.command.measure_bytes", measure)
    runner = make_runner(lm_tools.model(), find_method("h2o[num_recent_tokens=6]@pod"), lm_tools.model("pod"))
    lm = PodLM(runner, RequestEncoder(lm_tools.tokenizer(), 8192), batch_size=3)
    lm.loglikelihood(lm_tools.choices())
    assert prepared == [[64, 128]]
    budgets = {record["budget_tokens"] for record in lm.records.values()}
    assert len(budgets) == 2 and max(budgets) < 128
