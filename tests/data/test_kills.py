"""Killed at random moments, by nine and without warning, and run again: the same shards, and nothing left behind."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from pod.data import DataArgs, job, prepare, publish, units

KILLS = 20


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They take longer than everything else here."""
    monkeypatch.setattr(publish, "draw_all", lambda *_: [])


@pytest.fixture
def small_steps(monkeypatch):
    """Many units and shards in a small corpus; forked runs inherit it."""
    monkeypatch.setattr(units, "GROUP_BYTES", 8_000)
    monkeypatch.setattr(job, "DEFAULT_SHARD_BYTES", 2_000)


def settings(folder):
    return DataArgs(
        sources=[str(folder)], context_length=128, shortest_interval=32, target_tokens=12_000, workers=2
    )


def content(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def start(args, tokenizer, output):
    """A forked run in a session of its own, so that its workers can be counted."""

    def run():
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        prepare(args, tokenizer, output)
        os._exit(0)  # not pytest's own ending

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def session_is_empty(leader, seconds=10):
    """Whether all processes of a killed run's session end by themselves."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                except OSError:
                    continue
                if int(fields[3]) == leader and fields[0] != "Z":
                    alive.append(entry.name)
        if not alive:
            return True
        time.sleep(0.05)
    return False


def stage_of(output):
    """Which pass a killed run was in, by what lies on disk."""
    if output.exists():
        return "published"
    if any(output.parent.glob("data.rows-*")):
        return "write"
    if any(output.parent.glob("data.work/rows-*")):
        return "plan"
    return "tokenise"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_twenty_kills_change_nothing(corpus, tokenizer, tmp_path, small_steps):
    args = settings(corpus(random.Random(0).choices(range(2, 300), k=500)))
    began = time.monotonic()
    whole = start(args, tokenizer, tmp_path / "whole/data")
    whole.join()
    assert whole.exitcode == 0
    duration = time.monotonic() - began
    expected = content(tmp_path / "whole/data")
    assert len(expected) > 20
    generator, kills, stages, attempt = random.Random(1), 0, [], 0
    while kills < KILLS:
        output = tmp_path / f"run-{attempt}/data"
        attempt += 1
        output.parent.mkdir()
        while not output.exists():
            process = start(args, tokenizer, output)
            process.join(generator.uniform(0, duration) if kills < KILLS else None)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                stages.append(stage_of(output))
                kills += 1
                process.join()
                assert session_is_empty(process.pid), "workers outlive their killed parent"
            else:
                assert process.exitcode == 0
        prepare(args, tokenizer, output)  # cleans up after a kill between the last rename and the end
        assert content(output) == expected
        assert [path.name for path in output.parent.iterdir()] == ["data"]
    assert {"tokenise", "write"} <= set(stages), stages
