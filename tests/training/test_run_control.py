"""Ends before the last step: signals, max_hours, hangs.

They come on real ranks (worker_control.py) and with a clock of our own.
"""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pod.training.args import TrainArgs
from pod.training.run.run_control import RunControl
from pod.training.run.watchdog import Watchdog


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_watchdog(folder: Path, timeout: float = 60.0) -> tuple[Watchdog, Clock]:
    clock = Clock()
    return Watchdog(folder, TrainArgs(hang_timeout_s=timeout), 3, 4, clock), clock


# -- watchdog ------------------------------------------------------------------------------------------------


def test_hang_is_reported_once_per_timeout(tmp_path):
    watchdog, clock = make_watchdog(tmp_path)
    answers = []
    for _ in range(18):
        clock.now += 10.0
        answers.append(watchdog.check())
    assert [10 * (i + 1) for i, reported in enumerate(answers) if reported] == [60, 120, 180]
    watchdog.beat("forward")
    clock.now += 59.0
    assert not watchdog.check()
    clock.now += 1.0
    assert watchdog.check()


def test_every_beat_begins_a_new_timeout(tmp_path):
    watchdog, clock = make_watchdog(tmp_path)
    for _ in range(100):
        clock.now += 59.0
        assert not watchdog.check()
        watchdog.beat("backward")


def test_a_long_save_that_writes_is_no_hang(tmp_path):
    watchdog, clock = make_watchdog(tmp_path)
    file = tmp_path / ".step-00000004.tmp" / "deep" / "weights.pt"
    file.parent.mkdir(parents=True)
    watchdog.beat("save")
    for size in range(1, 50):
        file.write_bytes(b"x" * size)
        clock.now += 50.0
        assert not watchdog.check()
    clock.now += 50.0
    assert not watchdog.check()
    clock.now += 10.0
    assert watchdog.check(), "a save that writes nothing more"


def test_files_that_grow_are_no_progress_outside_of_a_save(tmp_path):
    watchdog, clock = make_watchdog(tmp_path)
    file = tmp_path / ".step-00000004.tmp" / "weights.pt"
    file.parent.mkdir()
    watchdog.beat("backward")
    for size in range(1, 7):
        file.write_bytes(b"x" * size)
        clock.now += 10.0
    assert watchdog.check()


def test_report_names_rank_phase_step_and_seconds_with_the_stacks_of_all_threads(tmp_path, capfd):
    watchdog, clock = make_watchdog(tmp_path)
    watchdog.beat("backward")
    watchdog.step = 41
    clock.now += 61.0
    watchdog.report()
    text = (tmp_path / "hang-rank00003.txt").read_text()
    assert "rank 3 of 4 on " in text
    assert "no progress for 61 s in phase backward after step 41" in text
    assert "test_report_names_rank_phase_step" in text
    assert capfd.readouterr().err.count("\n") == 1


def test_no_thread_without_a_timeout(tmp_path):
    watchdog, _ = make_watchdog(tmp_path, timeout=0.0)
    watchdog.start()
    assert watchdog._thread is None
    watchdog.stop()


# -- time ----------------------------------------------------------------------------------------------------


def make_control(folder, monkeypatch, age: float = 0.0, **settings) -> tuple[RunControl, Clock]:
    clock, mesh = Clock(), SimpleNamespace(rank=0, world_size=1, largest=lambda value: value)
    return RunControl(TrainArgs(**settings), mesh, folder, clock=clock, age=age), clock


def steps_until_stop(control, clock, seconds: list[float], first_step: int = 1) -> float | None:
    """Age of the run when it is told to stop, after steps that take `seconds`; None if it is not."""
    for step, duration in enumerate(seconds, first_step):
        control.alive("data")
        clock.now += duration
        if control.should_stop(step):
            return clock.now - control.started
    return None


def test_no_limit_without_hours(tmp_path, monkeypatch):
    control, clock = make_control(tmp_path, monkeypatch)
    assert steps_until_stop(control, clock, [1e6] * 5) is None


def test_stops_while_the_longest_step_and_a_save_still_fit(tmp_path, monkeypatch):
    control, clock = make_control(tmp_path, monkeypatch, max_hours=1.0)
    assert steps_until_stop(control, clock, [10.0, 10.0, 100.0, 10.0]) is None
    with control.saving():
        clock.now += 200.0
    # 3600 - 1.1 x (100 + 200) = 3270
    assert steps_until_stop(control, clock, [20.0] * 250, 5) == 3270.0


def test_age_before_training_counts(tmp_path, monkeypatch):
    control, clock = make_control(tmp_path, monkeypatch, age=3000.0, max_hours=1.0)
    # 2 % of an hour are kept for a checkpoint that was never timed: 3600 - 1.1 x (10 + 72) = 3509.8
    assert steps_until_stop(control, clock, [10.0] * 100) == 3510.0


def test_age_is_the_processes_own(tmp_path):
    import psutil

    mesh = SimpleNamespace(rank=0, world_size=1, device="cpu")
    control = RunControl(TrainArgs(), mesh, tmp_path)
    age = time.time() - psutil.Process().create_time()
    assert abs((time.monotonic() - control.started) - age) < 1.0


def test_the_first_step_warms_up_and_is_no_measure(tmp_path, monkeypatch):
    control, clock = make_control(tmp_path, monkeypatch, max_hours=1.0)
    assert (
        steps_until_stop(control, clock, [1000.0] + [20.0] * 200) == 3500.0
    )  # 3600 - 1.1 x (20 + 72) = 3498.8
    control, clock = make_control(tmp_path, monkeypatch, age=2000.0, max_hours=1.0)
    assert steps_until_stop(control, clock, [1000.0]) == 3000.0  # until there is another one


def test_an_asynchronous_save_counts_until_it_is_published(tmp_path, monkeypatch):
    control, clock = make_control(tmp_path, monkeypatch, max_hours=1.0)
    control.save_took(500.0)
    assert steps_until_stop(control, clock, [10.0] * 1000) == 3040.0  # 3600 - 1.1 x 510 = 3039


def test_no_more_than_half_an_hour_of_work_is_at_risk(tmp_path, monkeypatch):
    """Steps of 100 s, checkpoints of 50 s: 17 steps and a reserve of 10 s fit into 1800 s."""
    control, clock = make_control(tmp_path, monkeypatch)
    saves = []
    with control.watching():
        for step in range(1, 60):
            control.alive("data")
            clock.now += 100.0
            assert control.should_stop(step) is None
            if control.save_due:
                saves.append(step)
                with control.saving():
                    clock.now += 50.0
    assert saves == [17, 34, 51]
    control, clock = make_control(tmp_path, monkeypatch, save_every_steps=100)
    assert steps_until_stop(control, clock, [1000.0] * 5) is None and not control.save_due


def test_the_time_at_risk_is_said_and_what_to_do(tmp_path, monkeypatch):
    control, clock = make_control(tmp_path, monkeypatch, gradient_accumulation_steps=16)
    steps_until_stop(control, clock, [300.0, 107.2])
    control.save_took(8.0)
    assert control.time_at_risk() == (
        "after a stop signal, the current micro-batch takes up to 6.7 s and the checkpoint 8.0 s; "
        "deepspeed and torchrun wait 30 s"
    )
    control.save_took(25.0)
    assert "too short: up to 30 min of work would be lost. To stop, send SIGUSR1" in control.time_at_risk()


@pytest.mark.parametrize(
    ("max_steps", "lost"), [(2, None), (3, None), (4, "1.3 min"), (20, "12 min"), (1000, "30 min")]
)
def test_no_more_work_is_at_risk_than_the_run_has_left(max_steps, lost, tmp_path, monkeypatch):
    """After two steps of 40 s; less than a minute is no warning."""
    control, clock = make_control(tmp_path, monkeypatch, max_steps=max_steps)
    steps_until_stop(control, clock, [50.0, 40.0])
    control.save_took(8.0)
    line, _, warning = control.time_at_risk().partition(", which is too short: ")
    assert line.endswith("deepspeed and torchrun wait 30 s")
    assert warning == (
        f"up to {lost} of work would be lost. To stop, send SIGUSR1 to one rank's process" if lost else ""
    )


def test_an_evaluation_counts_for_the_hours_and_not_for_its_step(tmp_path, monkeypatch):
    control, clock = make_control(tmp_path, monkeypatch, max_hours=1.0)
    for step in (1, 2):
        control.alive("data")
        clock.now += 100.0
        with control.evaluating():
            clock.now += 400.0
        assert control.should_stop(step) is None
    assert "the current micro-batch takes up to 100.0 s" in control.time_at_risk()
    # 3600 - 1.1 x (100 + 400 + 72) = 2970.8
    assert steps_until_stop(control, clock, [100.0] * 30, 3) == 3000.0


def test_ctrl_c_is_a_signal_and_the_second_one_ends(tmp_path, monkeypatch):
    control, _ = make_control(tmp_path, monkeypatch, hang_timeout_s=0.0)
    before = signal.getsignal(signal.SIGINT)
    try:
        with control.watching():
            assert not control.interrupted()
            os.kill(os.getpid(), signal.SIGTERM)
            assert control.interrupted() and not control.ctrl_c
            os.kill(os.getpid(), signal.SIGINT)
            assert control.interrupted() and control.ctrl_c
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, before if number == signal.SIGINT else signal.SIG_DFL)


# -- real ranks ----------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_stacks_of_a_rank_inside_a_collective(control_results, control_folder):
    stuck, straggler = (
        (control_folder / "hang" / f"hang-rank{rank:05d}.txt").read_text() for rank in range(2)
    )
    assert "rank 0 of 2" in stuck and "in phase backward after step 7" in stuck
    assert "late_collective" in stuck and "all_reduce" in stuck
    assert "in phase data after step 7" in straggler
    assert "wait_for" in straggler and "late_collective" not in straggler


@pytest.mark.multiprocess
def test_abort_ends_every_rank_with_75_after_its_stacks(control_results, control_folder):
    assert control_results["abort"]["message"] == "abort on 2 ranks: exit codes [75, 75]"
    stacks = [(control_folder / "abort" / f"hang-rank{rank:05d}.txt").read_text() for rank in range(2)]
    assert "late_collective" in stacks[0] and "in abort" in stacks[1]


@pytest.mark.multiprocess
def test_a_rank_whose_peer_gave_up_ends_with_the_same_code(control_results, control_folder):
    assert control_results["broken"]["message"] == "broken on 2 ranks: exit codes [75, 75]"
    assert "after step 0" in (control_folder / "broken" / "hang-rank00000.txt").read_text()


def test_an_error_without_a_hang_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("os._exit", lambda code: pytest.fail(f"ended with code {code}"))
    report, abort = (
        Watchdog(tmp_path, TrainArgs(hang_timeout_s=5.0, hang_action=action), 0, 2, time.monotonic)
        for action in ("report", "abort")
    )
    for watchdog in (report, abort):
        watchdog.abort_after(ValueError("no hang"))
    old = tmp_path / "hang-rank00001.txt"
    old.write_text("rank 1")
    report.abort_after(ValueError("a hang that is only reported"))
    os.utime(old, (0, 0))
    abort.abort_after(ValueError("a hang of another day"))


@pytest.mark.multiprocess
def test_all_ranks_stop_at_the_step_that_rank_0_chose(control_results):
    first, second = (control_results[f"hours_rank{rank}"] for rank in range(2))
    # the first step with 10 x step + 30 x (step // 20) >= 3600 - 1.1 x 40
    assert first == second
    assert (first["step"], first["seconds"]) == (311, 3560.0)
    assert first["reason"].startswith("max_hours = 1 leaves no time")


@pytest.mark.multiprocess
def test_a_signal_to_one_rank_stops_all_at_the_same_step(control_results):
    first, second = (control_results[f"signals_rank{rank}"] for rank in range(2))
    assert first["answers"] == second["answers"] == [None, "stopped by a signal", "stopped by a signal"]
    assert first["default_handlers"] == [False, True]
    assert second["default_handlers"] == [False, False]
