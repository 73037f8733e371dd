"""Preparation is killed at random moments, by signal nine and without warning, and run again.

The shards are the same, and nothing is left behind.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from data_helpers import content

from pod.data import DataArgs, prepare

KILLS = 20


def settings(folder):
    return DataArgs(
        sources=[str(folder)],
        context_length=128,
        shortest_interval=32,
        target_tokens=12_000,
        held_out_tokens=500,
        workers=2,
    )


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
    """Whether all processes of a killed run's session end by themselves.

    Those that do not are killed, or pytest would wait.
    """
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
    for number in alive:
        os.kill(int(number), signal.SIGKILL)
    return False


def stage_of(output):
    """Which pass a killed run was in, by what lies on disk."""
    if output.exists():
        return "published"
    return "write" if (output.parent / "data.work/rows").is_dir() else "read"


def moments(output, generator, duration):
    """When one preparation is killed: twice by what it has finished, twice by the clock.

    Each moment is asked until it says yes.
    """

    def finished(pattern, count):
        def is_reached(seconds):
            try:
                return len(list(output.parent.glob(pattern))) >= count
            except FileNotFoundError:  # the run is done and clears up while its files are counted
                return False

        return is_reached

    def passed(limit):
        return lambda seconds: seconds >= limit

    return [
        finished("data.work/unit-*", generator.randrange(1, 30)),
        passed(generator.uniform(0, duration)),
        finished("data.work/shard-*.json", generator.randrange(1, 15)),
        passed(generator.uniform(0, duration)),
    ]


def kill_at(moment, args, tokenizer, output):
    """Start a run and kill it; the pass that it was in, or None when it ended before."""
    process = start(args, tokenizer, output)
    began = time.monotonic()
    while process.is_alive() and not moment(time.monotonic() - began):
        time.sleep(0.001)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    killed = process.exitcode == -signal.SIGKILL  # it may have ended in the moment before
    assert killed or process.exitcode == 0
    assert session_is_empty(process.pid), "workers outlive their killed parent"
    return stage_of(output) if killed else None


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_pictures")
def test_twenty_kills_change_nothing(corpus, tokenizer, tmp_path, small_steps):
    args = settings(corpus(random.Random(0).choices(range(2, 300), k=500)))
    began = time.monotonic()
    assert kill_at(lambda seconds: False, args, tokenizer, tmp_path / "whole/data") is None
    duration = time.monotonic() - began
    expected = content(tmp_path / "whole/data")
    assert len(expected) > 20
    generator, stages = random.Random(1), []
    for attempt in range(20):
        output = tmp_path / f"run-{attempt}/data"
        output.parent.mkdir()
        for moment in moments(output, generator, duration)[: KILLS - len(stages)]:
            stage = kill_at(moment, args, tokenizer, output)
            stages += [stage] if stage else []
        prepare(args, tokenizer, output)
        assert content(output) == expected
        assert [path.name for path in output.parent.iterdir()] == ["data"]
        if len(stages) == KILLS:
            break
    assert len(stages) == KILLS and {"read", "write"} <= set(stages), stages
