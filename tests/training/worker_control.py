"""Ranks that hang, stop by the clock of rank 0, or get signals. `worker_control.py OUT`.

Process groups come without an engine.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import tiny
import torch
import torch.distributed as dist

TIMEOUT = 1.0  # seconds; nothing here passes because it was fast enough


def join(out: Path, settings: dict, age: float = 0.0, clock=time.monotonic):
    """A RunControl on this rank of a gloo group."""
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import Mesh
    from pod.training.run.run_control import RunControl

    dist.init_process_group("gloo", timeout=timedelta(minutes=3))
    mesh = Mesh(1)
    out.mkdir(exist_ok=True)
    return RunControl(TrainArgs(**settings), mesh, out, clock=clock, age=age)


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


def wait_for(condition) -> None:
    """Return when `condition()` holds; however long it takes."""
    while not condition():
        time.sleep(0.05)


def hang(out: Path) -> None:
    """Rank 1 does not come until both ranks have reported.

    Rank 0's main thread is inside the collective all the while.
    """
    control = join(out / "hang", {"hang_timeout_s": TIMEOUT})
    rank = control.mesh.rank
    files = [out / "hang" / f"hang-rank{r:05d}.txt" for r in range(2)]
    with control.watching():
        control.should_stop(7)
        control.alive("data" if rank else "backward")
        if rank:
            wait_for(lambda: all(file.is_file() and file.read_text().endswith("\n\n") for file in files))
        late_collective()
        control.alive("update")
        control.should_stop(8)
    leave()


def late_collective() -> None:
    dist.all_reduce(torch.ones(1))


def abort(out: Path) -> None:
    """Both ranks wait for something that never comes."""
    control = join(out / "abort", {"hang_timeout_s": TIMEOUT, "hang_action": "abort"})
    with control.watching():
        control.alive("forward")
        if control.mesh.rank:
            time.sleep(120)
        late_collective()


def broken(out: Path) -> None:
    """Rank 1 gives up; the collective of rank 0, which would wait ten times as long, fails."""
    rank = int(os.environ["RANK"])
    settings = {"hang_timeout_s": TIMEOUT * (1 if rank else 10), "hang_action": "abort"}
    control = join(out / "broken", settings)
    with control.watching():
        control.alive("forward")
        if rank:
            time.sleep(120)
        late_collective()


def hours(out: Path) -> None:
    """Rank 0's clock says when; rank 1's is a day ahead and asks nobody.

    Steps take 10 s, checkpoints 30 s.
    """
    rank = int(os.environ["RANK"])
    now = [0.0]
    control = join(out / "hours", {"max_hours": 1.0}, age=86_400.0 * rank, clock=lambda: now[0])
    stopped = reason = None
    for step in range(1, 1000):
        control.alive("data")
        now[0] += 10.0
        reason = control.should_stop(step)
        if reason:
            stopped = step
            break
        if step % 20 == 0:
            with control.saving():
                now[0] += 30.0
    tiny.write_result(out, f"hours_rank{rank}", {"step": stopped, "seconds": now[0], "reason": reason})
    leave()


def signals(out: Path) -> None:
    """Rank 1 alone gets SIGUSR1 in step 2, both get SIGTERM later; no limit of hours."""
    control = join(out / "signals", {"hang_timeout_s": 0.0})
    answers, handlers = [], []
    with control.watching():
        for step in range(1, 4):
            if step == 2 and control.mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            answers.append(control.should_stop(step))
        handlers.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    handlers.append(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    if control.mesh.rank == 1:  # its handlers stay: a launcher repeats SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
    result = {"answers": answers, "default_handlers": handlers}
    tiny.write_result(out, f"signals_rank{control.mesh.rank}", result)
    leave()


def main(out: Path) -> None:
    for function in (hang, hours, signals):
        tiny.run_ranks(2, function, out)
    for function in (abort, broken):
        try:
            tiny.run_ranks(2, function, out)
        except SystemExit as error:
            tiny.write_result(out, function.__name__, {"message": str(error)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
