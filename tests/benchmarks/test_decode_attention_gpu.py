"""The decode row: its plan, its bytes, and that nothing wrong gets a time.

Its tiny run is the whole script.
"""

import json

import pytest
import torch

from pod.modeling.model import decode
from pod.modeling.model.attend import Implementation

CPU = torch.device("cpu")


@pytest.fixture
def row(script):
    return script("decode_attention_gpu")


def test_seventy_percent_follow_and_every_lead_leads_itself(row):
    table = row.lead_table()
    pairs = [(layer, lead) for layer, leads in enumerate(table) for lead in leads]
    assert sum(layer != lead for layer, lead in pairs) / len(pairs) == 0.7
    assert all(lead <= layer for layer, lead in pairs)
    for head in range(row.KV_HEADS):
        column = [leads[head] for leads in table]
        assert column == sorted(column) and all(column[lead] == lead for lead in column)
    roles = [row.roles_of(table, layer) for layer in range(row.LAYERS)]
    assert all(r.followed == r.leads for r in roles)  # every block has a follower
    assert any(r.leads and r.followers for r in roles)  # both kinds in one launch


def test_bytes_of_the_stack(row):
    shape = row.Shape(2, 100, 4, (4, 28), torch.bfloat16, CPU)
    table = row.lead_table()
    token = 128 * 2
    lead = 2 * 100 * token + 4 * 4 * 68  # keys, values, logits written
    follower = 100 * token + 32 * token + 4 * 4 * 68  # values, ring, logits read
    assert shape.dense_bytes() == 2 * 80 * 2 * 100 * token
    assert shape.pod_bytes(table) == 2 * (24 * lead + 56 * follower)
    assert shape.pod_bytes(table, skip=True) == 2 * (24 * lead + 56 * 2 * 32 * token)
    alone = [[layer] * 8 for layer in range(10)]
    assert shape.pod_bytes(alone) == shape.dense_bytes()  # nobody reads logits, so nobody writes them


def test_the_floors_of_the_issue(row):
    for n, floor in ((32768, 0.72), (131072, 0.69)):
        shape = row.Shape(1, n, 4, (16, 4080), torch.bfloat16, CPU)
        assert round(shape.pod_bytes(row.lead_table()) / shape.dense_bytes(), 2) == floor


@pytest.mark.parametrize("wrong", ["scaled", "nan"])
def test_a_wrong_backend_gets_no_time(row, monkeypatch, wrong):
    def decoded(call: decode.DecodeCall) -> None:
        decode.DECODERS["grouped"].run(call)
        if call.roles.followers:  # dense layers stay right
            call.out.mul_(1.01 if wrong == "scaled" else float("nan"))

    entry = Implementation(decoded, lambda call: None)
    monkeypatch.setitem(decode.DECODERS, "wrong", entry)
    setting = row.argparse.Namespace(windows=(4, 28), checked_rows=20, dtype=torch.float32)
    with pytest.raises(ValueError, match="wrong results"):
        row.checked_error(setting, "wrong", CPU)
    assert row.checked_error(setting, "grouped", CPU) < 1e-5


def test_a_peer_that_does_something_else_gets_no_time(row):
    stack = row.Stack(row.Shape(1, 40, 4, (4, 28), torch.float32, CPU))
    good = row.sdpa(row.SDPBackend.MATH)
    row.check_peer(stack, stack.peer(good))
    row.check_peer(stack, stack.peer(row.sdpa(row.SDPBackend.MATH, rows=True)))
    with pytest.raises(ValueError, match="wrong results"):
        row.check_peer(stack, stack.peer(lambda q, k, v: good(q, k[:, :, 1:], v[:, :, 1:])))


def test_contestants_are_checked_before_they_race(row, monkeypatch):
    good = row.sdpa(row.SDPBackend.MATH)
    makers = {"good": lambda: good, "wrong": lambda: lambda q, k, v: good(q, k[:, :, 1:], v[:, :, 1:])}
    monkeypatch.setattr(row, "peers", lambda device: makers)
    monkeypatch.setattr(row, "backends", lambda device: ["grouped"])
    monkeypatch.setattr(row, "checked_error", lambda *_: 1 / 0)
    sizes = {"windows": (4, 28), "dtype": torch.float32, "checked_rows": 20}
    setting = row.argparse.Namespace(**sizes, rounds=1, budget=None, tiny=True)
    shape = row.Shape(1, 40, 4, (4, 28), torch.float32, CPU)
    contestants = row.measure(shape, setting, {"40 tokens, batch 1 copy": "failed before"})["contestants"]
    assert "wrong results" in contestants["dense: wrong"]["error"] and "seconds" in contestants["dense: good"]
    assert "seconds" in contestants["dense: own grouped"]
    assert "ZeroDivisionError" in contestants["pod: grouped"]["error"]
    assert contestants["copy"] == {"error": "failed before"}


def found(seconds: float, ratio: float, share: float | None) -> dict:
    best = {"seconds": {"median": seconds}, "over_fastest_dense": {"median": ratio}, "share_of_copy": share}
    slower = {"seconds": {"median": 9.0}, "over_fastest_dense": {"median": 3.0}, "share_of_copy": 0.1}
    tau = {"seconds": {"median": 0.1}, "over_fastest_dense": {"median": 0.1}, "share_of_copy": 0.9}
    contestants = {"pod: x": slower, "pod: y": best, "tau: y, all skip": tau, "pod: z": {"error": "no"}}
    base = {"length": 131072, "batch": 8, "floor": 0.69, "fastest_dense": "dense: cudnn"}
    return {**base, "contestants": contestants}


def test_the_rows_judge_the_exact_pod_that_is_fastest(row):
    for ratio, share, verdicts in (
        (0.73, 0.75, [True, True]),
        (0.74, 0.7, [False, False]),
        (0.7, None, [True, None]),
    ):
        rows = row.summary_rows(found(1.0, ratio, share), tiny=False)
        assert [r["met"] for r in rows] == verdicts
        assert rows[0]["figure"] == ratio and rows[0]["reason"] == "y, against cudnn"
    assert [r["met"] for r in row.summary_rows(found(1.0, 0.5, 0.9), tiny=True)] == [None, None]
    nothing = {**found(1.0, 0.5, 0.9), "contestants": {"pod: z": {"error": "no"}}}
    assert [r["figure"] for r in row.summary_rows(nothing, tiny=False)] == [None, None]


def test_figures_are_of_one_token_and_own_dense_is_a_peer(row, script):
    race = script("gpu_tools").Race(CPU)
    race.seconds = {
        "dense: torch flash": [[4.0], [4.0]],
        "dense: own triton": [[2.0], [4.0]],
        "pod: triton": [[1.5], [3.0]],
        "tau: triton, all skip": [[1.0], [1.0]],
        "copy": [[0.5], [0.5]],
    }
    stack = row.Stack(row.Shape(1, 40, 4, (4, 28), torch.float32, CPU))
    result = row.report(race, stack, replays=10, copied=10**6, errors={})
    assert result["fastest_dense"] == "dense: own triton" and result["copy_bytes_per_second"] == 2 * 10**6
    pod, skip = (result["contestants"][name] for name in ("pod: triton", "tau: triton, all skip"))
    assert pod["over_fastest_dense"]["median"] == pytest.approx(0.75)
    assert pod["seconds"]["median"] == pytest.approx(0.225) and pod["seconds"]["repeats"] == 2
    assert pod["bytes"] == stack.shape.pod_bytes(stack.table) < stack.shape.dense_bytes()
    assert pod["share_of_copy"] == pytest.approx(pod["bytes"] / 0.225 / 2e6)
    assert skip["bytes"] == stack.shape.pod_bytes(stack.table, skip=True) < pod["bytes"]
    assert result["contestants"]["dense: torch flash"]["bytes"] == stack.shape.dense_bytes()


def test_the_tiny_run(row, tmp_path, monkeypatch, capsys):
    out = tmp_path / "decode.json"
    monkeypatch.setattr("sys.argv", ["decode_attention_gpu.py", "--tiny", "--out", str(out)])
    assert row.main(row.read_arguments()) == 0
    result = json.loads(out.read_text())
    assert [(s["length"], s["batch"]) for s in result["settings"]] == [(64, 2)]
    for setting in result["settings"]:
        contestants = setting["contestants"]
        timed = {name for name, entry in contestants.items() if "seconds" in entry}
        assert {
            "pod: grouped",
            "tau: grouped, all skip",
            "dense: own grouped",
            "dense: torch flash",
            "copy",
        } <= timed
        assert setting["fastest_dense"] in timed and setting["relative_errors"]["grouped"] < 1e-5
        entry = contestants["pod: grouped"]
        assert entry["bytes"] == setting["pod_bytes"]
        assert entry["bytes_per_second"] == pytest.approx(entry["bytes"] / entry["seconds"]["median"])
    assert [r["met"] for r in result["rows"]] == [None] * 2
