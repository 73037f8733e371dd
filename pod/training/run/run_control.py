"""When a run must end before its last step (signals, `max_hours`), and when it saves."""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from pod.data.run.data_progress import duration
from pod.training.args import TrainArgs
from pod.training.run.watchdog import Watchdog

_GO_ON, _SAVE, _HOURS, _SIGNAL = 0, 1, 2, 3  # what a rank asks for; all ranks do the largest
MOST_LOST = 1800.0  # seconds of work between two checkpoints, with save_every_steps = null
_GRACE = 30.0  # seconds that `deepspeed` and torchrun wait after they have passed a signal on
_LITTLE = 60.0  # seconds of work that may be lost without a warning
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_RESERVE = 1.1  # a coming step or checkpoint may take so many times as long as the longest one so far
_FIRST_SAVE = 0.02  # share of max_hours that is kept for a checkpoint before one has been timed
_STEPS_REMEMBERED = 256


class Interrupted(Exception):
    """A rank got a signal: all ranks together leave the step or the evaluation that they are in."""


def work_at_risk(args: TrainArgs, step_seconds: float) -> float:
    """Seconds of training between two checkpoints: a kill can lose that much."""
    if args.save_every_steps is None:
        return max(MOST_LOST, step_seconds)
    return min(args.save_every_steps or args.max_steps, args.max_steps) * step_seconds


class RunControl:
    """Decides when a run saves and when it ends, and tells the watchdog of its progress.

    All ranks call every method, at the same points of the run.

    Args:
        folder: <output_dir>/train.
        clock: returns the time in seconds.
        age: seconds that this process has run already; None = ask the system.

    Attributes:
        stop_signal: the last signal that asked this rank to stop; None = there was none.
        ctrl_c: whether one of these signals was Ctrl-C.
        save_due: whether a checkpoint must be written now, by the last `should_stop`.
    """

    def __init__(
        self,
        args: TrainArgs,
        mesh: Any,
        folder: Any,
        clock: Callable[[], float] = time.monotonic,
        age: float | None = None,
    ):
        self.args, self.mesh, self.folder, self.clock = args, mesh, folder, clock
        self.stop_signal: int | None = None
        self.ctrl_c = False
        if age is None:
            age = max(0.0, time.time() - psutil.Process().create_time())
        self.started = clock() - age
        self.watchdog = Watchdog(folder, args, mesh.rank, mesh.world_size, clock)
        self.save_due = False
        self._saved_at = clock()
        self._save_seconds = 0.0  # of the longest checkpoint
        self._evaluation_seconds = 0.0  # of the longest evaluation
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=1 + _STEPS_REMEMBERED)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Use it around the training loop: it notes signals, and the watchdog watches.

        The signals are SIGTERM, SIGUSR1 (Slurm's warning) and Ctrl-C. A terminal sends Ctrl-C to the
        launcher and to the ranks. A second Ctrl-C ends a rank at once.
        """

        def note(number, frame):
            if number == signal.SIGINT and self.stop_signal == number:
                raise KeyboardInterrupt
            self.stop_signal = number
            self.ctrl_c = self.ctrl_c or number == signal.SIGINT

        previous = {number: signal.signal(number, note) for number in _SIGNALS}
        self._saved_at = self.clock()
        self.watchdog.start()
        try:
            yield
        except Exception as error:
            self.watchdog.abort_after(error)
            raise
        finally:
            self.watchdog.stop()
            # A launcher repeats SIGTERM while its ranks are leaving: after a signal, the handlers stay.
            if self.stop_signal is None:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def alive(self, phase: str) -> None:
        """Note that this rank makes progress.

        In a save, every byte that reaches an unpublished checkpoint is progress too.

        Args:
            phase: what the rank enters: data, forward, backward, update, save or evaluate.
        """
        self._step_began = self.clock() if self._step_began is None else self._step_began
        self.watchdog.beat(phase)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Use it around a checkpoint between two steps: its time is part of neither step."""
        began = self.clock()
        self.alive("save")
        yield
        self._saved_at = self._step_began = self.clock()
        self.save_took(self._saved_at - began)
        self.alive("saved")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use it around an evaluation: its time is not part of its step.

        A signal ends an evaluation before its next row.
        """
        self.alive("evaluate")
        began = self.clock()
        yield
        took = self.clock() - began
        assert self._step_began is not None, "alive sets it"
        self._step_began += took
        self._evaluation_seconds = max(self._evaluation_seconds, took)

    def save_took(self, seconds: float) -> None:
        """Note that a checkpoint was published this many seconds after it was begun.

        `max_hours` keeps the longest such time for the last checkpoint.
        """
        self._save_seconds = max(self._save_seconds, seconds)

    def should_stop(self, step: int) -> str | None:
        """Why the run must save and end after step `step`; None = go on. All ranks get the same answer.

        It sets `save_due`, which can be True also when the run goes on.
        """
        now = self.clock()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began, self.watchdog.step = now, step
        code = self.mesh.largest(self._wish(now))
        self.save_due = code != _GO_ON
        if code == _HOURS:
            limit = f"max_hours = {self.args.max_hours:g}"
            return f"{limit} leaves no time for another step and its checkpoint: stopped"
        return "stopped by a signal" if code == _SIGNAL else None

    def _wish(self, now: float) -> int:
        """What this rank asks for, such as `_SAVE`. Only rank 0's clock is asked."""
        if self.stop_signal is not None:
            return _SIGNAL
        if self.mesh.rank:
            return _GO_ON
        step = _RESERVE * (self._longest_step() + self._evaluation_seconds)
        limit = self.args.max_hours * 3600
        save = _RESERVE * self._save_seconds or _RESERVE * _FIRST_SAVE * limit
        if limit and now - self.started + step + save >= limit:
            return _HOURS
        by_the_clock = self.args.save_every_steps is None
        if by_the_clock and now - self._saved_at + step >= MOST_LOST:
            return _SAVE
        return _GO_ON

    def interrupted(self) -> bool:
        """Whether any rank got a signal; all ranks get the same answer.

        Call it between micro-batches, and between the rows of an evaluation.
        """
        return bool(self.mesh.largest(self.stop_signal is not None))

    def _longest_step(self) -> float:
        """Seconds of the longest of the last `_STEPS_REMEMBERED` steps.

        The first step warms up, so it counts only until there is another one.
        """
        later = list(self._step_seconds)[1:]
        return max(later or self._step_seconds, default=0.0)

    def time_at_risk(self) -> str:
        """One line: how long a stop takes. Call it once a step and a checkpoint have been timed.

        The line is a warning if a stop takes longer than launchers wait, and a minute or more of work could
        be lost. The work that is left in the run bounds what can be lost.
        """
        step = self._longest_step()
        part = step / self.args.gradient_accumulation_steps
        line = (
            f"after a stop signal, the current micro-batch takes up to {part:.1f} s and the checkpoint "
            f"{self._save_seconds:.1f} s; deepspeed and torchrun wait {_GRACE:.0f} s"
        )
        left = (self.args.max_steps - self.watchdog.step) * step
        lost = min(work_at_risk(self.args, step), left)
        if part + self._save_seconds < _GRACE or lost < _LITTLE:
            return line
        return (
            f"{line}, which is too short: up to {duration(lost)} of work would be lost. To stop, send "
            "SIGUSR1 to one rank's process"
        )
