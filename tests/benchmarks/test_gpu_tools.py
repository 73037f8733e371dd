"""Timing in turns.

A contestant that fails is recorded and leaves, and the others go on. A lost device starts the script again.
"""

import argparse
import json
import sys

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def tools(script):
    return script("gpu_tools")


def logger(log: list, name: str, fail_at: int | None = None):
    """A contestant that writes its name, and raises at its `fail_at`-th run."""
    runs = []

    def run(mark) -> None:
        runs.append(name)
        log.append(name)
        if len(runs) == fail_at:
            raise RuntimeError(f"{name}\nbroke")
        mark()

    return run


def test_contestants_take_turns_and_the_order_moves(tools):
    log: list[str] = []
    race = tools.Race(CPU)
    for name in "abc":
        race.add(name, lambda name=name: logger(log, name))
    assert log == ["a", "b", "c"]  # each ran once when it entered
    race.run(4)
    assert (
        "".join(log[3:]) == "abc" + "abc" + "bca" + "cab" + "abc"
    )  # one more to warm up, then the timed rounds
    assert {name: len(rounds) for name, rounds in race.seconds.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(
        len(parts) == 2 for rounds in race.seconds.values() for parts in rounds
    )  # before and after mark()
    summary = race.summary("a")
    assert summary["seconds"]["repeats"] == 4 and len(summary["seconds_of_parts"]) == 2
    assert race.totals("a") == [sum(parts) for parts in race.seconds["a"]]


def test_what_fails_is_recorded_and_the_others_go_on(tools):
    log: list[str] = []

    def cannot_be_built():
        raise ImportError("no such package")

    race = tools.Race(CPU, "8 tokens", {"8 tokens d": "lost the device", "9 tokens c": "not this one"})
    race.add("a", cannot_be_built)
    race.add("b", lambda: logger(log, "b", fail_at=4))  # enters, warms up, runs once, then fails
    race.add("c", lambda: logger(log, "c"))
    race.add("d", lambda: logger(log, "d"))
    race.run(3)
    assert race.errors == {
        "a": "ImportError: no such package",
        "b": "RuntimeError: b broke",
        "d": "lost the device",
    }
    assert list(race.seconds) == ["c"] and len(race.seconds["c"]) == 3
    assert race.summary("b") == {"error": "RuntimeError: b broke"}
    assert "d" not in log and log.count("b") == 4


def test_a_budget_takes_rounds_away_but_not_the_last_three(tools, monkeypatch):
    for budget, rounds in ((1e9, 7), (1e-9, 3), (None, 7)):
        race = tools.Race(CPU)
        race.add("a", lambda: logger([], "a"))
        race.run(7, budget)
        assert len(race.seconds["a"]) == rounds
    race = tools.Race(CPU)
    monkeypatch.setattr(tools.Race, "_timed", lambda *_: [1.0, 1.0])
    race.add("a", lambda: logger([], "a"))
    race.run(7, 10.5)
    assert len(race.seconds["a"]) == 5  # of two seconds each
    race.run(2, 0.0)
    assert len(race.seconds["a"]) == 7  # asked for two, no more


def test_a_lost_device_starts_the_script_again_without_the_contestant(tools, monkeypatch):
    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    race = tools.Race(torch.device("cuda"), "8 tokens")
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(tools.DeviceLost) as lost:
        race.add("a", broken)
    assert lost.value.contestant == "8 tokens a"

    started = []
    monkeypatch.setattr(tools, "_close_on_exec", lambda: None)
    monkeypatch.setattr(tools.os, "execv", lambda program, words: started.append((program, words)))
    monkeypatch.setattr(sys, "argv", ["x.py", "--out", "f", "--failed", '{"b": "old"}'])

    def main(arguments):
        raise tools.DeviceLost("8 tokens a", "illegal")

    tools.start(main, argparse.Namespace(failed={"b": "old"}))
    (program, words) = started[0]
    assert program == words[0] == sys.executable and words[1:4] == ["x.py", "--out", "f"]
    assert words[4] == "--failed" and len(words) == 6
    assert json.loads(words[5]) == {"b": "old", "8 tokens a": "illegal"}
    with pytest.raises(
        tools.DeviceLost
    ):  # it was left out and the device was lost all the same: no endless loop
        tools.start(main, argparse.Namespace(failed={"8 tokens a": "illegal"}))
    assert len(started) == 1


def test_no_device_is_one_line_and_exit_code_2(tools, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        tools.choose_device(tiny=False)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no CUDA device" in error and "--tiny" in error
    assert tools.choose_device(tiny=True) == CPU


def test_a_flash_attention_that_cannot_run_is_one_line_and_exit_code_2(tools, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setenv("POD_FLASH_ATTENTION", "fa3")
    with pytest.raises(SystemExit) as stop:
        tools.choose_device(tiny=False)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: POD_FLASH_ATTENTION=fa3 cannot run here: GPU 0, NVIDIA A100, has")
    assert error.count("\n") == 1
    assert tools.choose_device(tiny=True) == CPU


def test_ratios_are_taken_round_by_round(tools):
    found = tools.ratios([2.0, 30.0, 5.0], [1.0, 10.0, 10.0])
    assert found == {"median": 2.0, "min": 0.5, "max": 3.0, "repeats": 3}


def test_a_row_says_its_verdict(tools):
    row = tools.goal_row("x", "<= 1", 1.25, "x dense", False, "flash")
    assert tools.line_of(row) == "x: 1.250 x dense, goal <= 1: missed (flash)"
    assert tools.line_of(tools.goal_row("x", "<= 1", None, "")) == "x: unmeasured, goal <= 1: no verdict"


def test_peak_memory_is_beyond_inputs_and_results(tools, monkeypatch):
    """Peak memory counts only what the run adds to its inputs and results.

    The device counts what is allocated: 100 bytes before, and at most 700 during the run, of which 512 are
    returned.
    """
    race = tools.Race(torch.device("cuda"))
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: 700 if log == ["reset", "run"] else 10**9
    )

    def run(mark) -> list[torch.Tensor]:
        log.append("run")
        return [torch.zeros(64), torch.zeros(64)]

    race.contestants["a"] = run
    assert race.extra_bytes("a", beyond_results=True) == 700 - 100 - 512
    log.clear()
    assert race.extra_bytes("a", beyond_results=False) == 600
    race.contestants["b"] = lambda mark: 1 / 0
    assert race.extra_bytes("b", beyond_results=False) is None and "ZeroDivisionError" in race.errors["b"]
    assert tools.Race(CPU).extra_bytes("a", beyond_results=True) is None
