"""When a run must end before its last step: signals, `max_hours`, and a watchdog for ranks that hang."""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist

from pod.training.args import TrainArgs
from pod.training.observe.watchdog import Watchdog

_GO_ON, _HOURS, _SIGNAL = 0, 1, 2
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
        self._step_seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._save_seconds = 0.0
        self._save_began: float | None = None
        self._saved_since_asked = 0.0
        self._asked_at: float | None = None
        # The first step warms up: it stands for the others only until there is another one.
        self._first_step: float | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the training loop: SIGTERM and SIGUSR1 (Slurm's warning) are noted, the watchdog watches."""

        def note(number, frame):
            self.stop_signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1)}
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
            seconds, self._save_began = now - self._save_began, None
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
        code = torch.tensor([mine], dtype=torch.int32, device=self.mesh.device)
        dist.all_reduce(code, op=dist.ReduceOp.MAX)
        return {
            _GO_ON: None,
            _HOURS: f"max_hours = {self.args.max_hours:g} leaves no time for another step and its checkpoint: stopped",
            _SIGNAL: "stopped by a signal",
        }[int(code.item())]

    def _out_of_time(self, now: float) -> bool:
        """Whether one more step and a checkpoint may end after `max_hours`. Rank 0's clock decides for all."""
        limit = self.args.max_hours * 3600
        if not limit:
            return False
        save = self._save_seconds or _FIRST_SAVE * limit
        step = max(self._step_seconds, default=self._first_step or 0.0)
        return now - self.started + _RESERVE * (step + save) >= limit
