"""When a run must end before its last step: signals, `max_hours`, and a watchdog for ranks that hang."""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from pod.training.args import TrainArgs
from pod.training.observe.watchdog import Watchdog

_GO_ON, _SAVE, _HOURS, _SIGNAL = 0, 1, 2, 3
_MOST_LOST = 1800.0  # seconds of work between two checkpoints of save_every_steps = null
_GRACE = 30.0  # seconds from the signal that `deepspeed` and torchrun pass on to the end of their patience
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_RESERVE = 1.1  # of the longest step and checkpoint so far
_FIRST_SAVE = 0.02  # of max_hours, kept for a checkpoint before one has been timed
_STEPS_REMEMBERED = 256


class RunControl:
    """Watches one run; every method is called by all ranks at the same places.

    Args:
        args: section `train` of the recipe.
        mesh: the ranks.
        folder: <output_dir>/train.
        clock: seconds.
        age: seconds that this process has run already; None = ask the system.
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
        if age is None:
            age = max(0.0, time.time() - psutil.Process().create_time())
        self.started = clock() - age
        self.watchdog = Watchdog(
            folder, mesh.rank, mesh.world_size, args.hang_timeout_s, args.hang_action, clock
        )
        self.save_due = False
        self._saved_at = clock()
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._save_seconds = 0.0
        self._save_began: float | None = None
        self._saved_since_asked = 0.0
        self._asked_at: float | None = None
        # The first step warms up: it stands for the others only until there is another one.
        self._first_step: float | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the training loop: SIGTERM, SIGUSR1 (Slurm's warning) and Ctrl-C are noted, the watchdog watches.

        A terminal sends Ctrl-C to launcher and ranks alike; the second one ends a rank at once.
        """

        def note(number, frame):
            if number == signal.SIGINT and self.stop_signal == number:
                raise KeyboardInterrupt
            self.stop_signal = number

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
            if self.stop_signal is None:  # a launcher repeats SIGTERM while its ranks are leaving
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def alive(self, phase: str) -> None:
        """This rank makes progress: it enters `phase` (data, forward, backward, update, save, evaluate).

        A `save` lasts until the next phase begins, and within it every byte that reaches an unpublished checkpoint is
        progress too. Called by the main thread, as often as one likes.
        """
        now = self.clock()
        self._asked_at = now if self._asked_at is None else self._asked_at
        if phase != "save":
            self._end_save(now)
        elif self._save_began is None:
            self._save_began = now
        self.watchdog.beat(phase)

    def save_took(self, seconds: float) -> None:
        """A checkpoint was published this many seconds after it was begun: what `max_hours` keeps for the last one.

        Needed for asynchronous checkpoints only; a synchronous one lasts as long as its phase.
        """
        self._save_seconds = max(self._save_seconds, seconds)

    def _end_save(self, now: float) -> None:
        if self._save_began is not None:
            seconds, self._save_began, self._saved_at = now - self._save_began, None, now
            self._saved_since_asked += seconds
            self.save_took(seconds)

    def should_stop(self, step: int) -> str | None:
        """Why the run must save and end now, the same answer on all ranks; None = go on.

        Args:
            step: steps done. Called once after each.
        """
        now = self.clock()
        self._end_save(now)
        if self._asked_at is not None:
            seconds = now - self._asked_at - self._saved_since_asked
            if self._first_step is None:
                self._first_step = seconds
            else:
                self._step_seconds.append(seconds)
        self._asked_at, self._saved_since_asked = now, 0.0
        self.watchdog.step = step
        mine = _SIGNAL if self.stop_signal is not None else _GO_ON
        if mine == _GO_ON and self.mesh.rank == 0 and self._out_of_time(now):
            mine = _HOURS
        elif mine == _GO_ON and self.mesh.rank == 0 and self._much_to_lose(now):
            mine = _SAVE
        code = self.mesh.largest(mine)
        self.save_due = code != _GO_ON
        return {
            _GO_ON: None,
            _SAVE: None,
            _HOURS: f"max_hours = {self.args.max_hours:g} leaves no time for another step and its checkpoint: stopped",
            _SIGNAL: "stopped by a signal",
        }[code]

    def interrupted(self) -> bool:
        """Whether a rank got a signal, the same answer on all ranks; asked between the micro-batches of a step."""
        return bool(self.mesh.largest(self.stop_signal is not None))

    def _much_to_lose(self, now: float) -> bool:
        """Whether one more step would be more than may be lost. Rank 0's clock decides for all."""
        own_choice = self.args.save_every_steps is None
        return own_choice and now - self._saved_at + _RESERVE * self._longest_step() >= _MOST_LOST

    def _longest_step(self) -> float:
        return max(self._step_seconds, default=self._first_step or 0.0)

    def time_at_risk(self) -> str:
        """What a signal finds, in one line; after a step and a checkpoint were timed."""
        step = self._longest_step()
        part = step / self.args.gradient_accumulation_steps
        line = (
            f"a signal is obeyed within {part:.1f} s (a micro-batch), the checkpoint takes {self._save_seconds:.1f} s, and "
            f"deepspeed and torchrun wait {_GRACE:.0f} s"
        )
        if part + self._save_seconds < _GRACE:
            return line
        every = self.args.save_every_steps
        lost = _MOST_LOST if every is None else (every or self.args.max_steps) * step
        return f"{line}: too short, up to {lost / 60:.0f} minutes of work would be lost. To stop, send SIGUSR1 to one rank's process"

    def _out_of_time(self, now: float) -> bool:
        """Whether one more step and a checkpoint may end after `max_hours`. Rank 0's clock decides for all."""
        limit = self.args.max_hours * 3600
        if not limit:
            return False
        save = self._save_seconds or _FIRST_SAVE * limit
        return now - self.started + _RESERVE * (self._longest_step() + save) >= limit
