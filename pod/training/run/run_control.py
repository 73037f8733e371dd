"""When a run must end before its last step, or a step must not count: signals, `max_hours`, a watchdog for ranks that hang; NaN, infinity
and loss spikes, after which it skips, rewinds or stops.

The main thread of a hanging rank usually waits inside a collective for a peer that will not come; the watchdog, a thread beside it, can
tell, because collectives release Python's lock while they wait.
"""

import contextlib
import faulthandler
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil

from pod.training.args import TrainArgs

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
        folder: <output_dir>/train.
        clock, age: seconds, and how many of them this process has run already; None = ask the system.
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
        self.watchdog = Watchdog(folder, args, mesh.rank, mesh.world_size, clock)
        self.save_due = False
        self._saved_at = clock()
        self._save_seconds = 0.0  # of the longest checkpoint
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=1 + _STEPS_REMEMBERED)

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
        """This rank makes progress: it enters `phase` (data, forward, backward, update, save, evaluate). In a save every byte that
        reaches an unpublished checkpoint is progress too."""
        self._step_began = self.clock() if self._step_began is None else self._step_began
        self.watchdog.beat(phase)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around a checkpoint between two steps, whose time is none of theirs."""
        began = self.clock()
        self.alive("save")
        yield
        self._saved_at = self._step_began = self.clock()
        self.save_took(self._saved_at - began)
        self.alive("saved")

    def save_took(self, seconds: float) -> None:
        """A checkpoint was published this many seconds after it was begun: what `max_hours` keeps for the last one."""
        self._save_seconds = max(self._save_seconds, seconds)

    def should_stop(self, step: int) -> str | None:
        """Why the run must save and end after step `step`, the same answer on all ranks; None = go on. Sets `save_due`."""
        now = self.clock()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began, self.watchdog.step = now, step
        code = self.mesh.largest(self._wish(now))
        self.save_due = code != _GO_ON
        if code == _HOURS:
            return f"max_hours = {self.args.max_hours:g} leaves no time for another step and its checkpoint: stopped"
        return "stopped by a signal" if code == _SIGNAL else None

    def _wish(self, now: float) -> int:
        """What this rank asks for. Rank 0's clock decides for all."""
        if self.stop_signal is not None:
            return _SIGNAL
        if self.mesh.rank:
            return _GO_ON
        step, limit = _RESERVE * self._longest_step(), self.args.max_hours * 3600
        save = _RESERVE * self._save_seconds or _RESERVE * _FIRST_SAVE * limit
        if limit and now - self.started + step + save >= limit:
            return _HOURS
        by_the_clock = self.args.save_every_steps is None
        return _SAVE if by_the_clock and now - self._saved_at + step >= _MOST_LOST else _GO_ON

    def interrupted(self) -> bool:
        """Whether a rank got a signal, the same answer on all ranks; asked between the micro-batches of a step."""
        return bool(self.mesh.largest(self.stop_signal is not None))

    def _longest_step(self) -> float:
        """Of the last ones. The first step warms up: it stands for the others only until there is another one."""
        return max([*self._step_seconds][1:] or self._step_seconds, default=0.0)

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


Verdict = Literal["good", "skip", "rewind"]


class Guard:
    """Judges every step by numbers that are the same on all ranks. Its state goes into checkpoints.

    A spike is a loss above `spike_factor` x the median of the last `spike_window` good steps. The median and not the
    mean, so that losses on the way up do not move the bar along with them.
    """

    def __init__(self, args: TrainArgs):
        self.args = args
        self.load_state_dict({})

    def spike_bar(self) -> float:
        """The loss above which the coming step is a spike; infinity while none is one."""
        known = self.args.spike_factor and 4 * len(self.losses) >= self.args.spike_window
        return self.args.spike_factor * statistics.median(self.losses) if known else math.inf

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` (of the step whose update is still to come) is a spike; NaN and infinity are none."""
        return math.isfinite(loss) and loss > self.spike_bar()

    def why_bad(self, loss: float) -> str:
        """What was wrong with a step that was skipped, in words; call it before `judge`."""
        if self.is_spike(loss):
            bar = f"{self.spike_bar():.4g} = spike_factor x the running median"
            return f"the loss was {loss:.4g}, above {bar}"
        return "the loss or a gradient was NaN or infinite"

    def judge(self, step: int, loss: float, skipped: bool, can_rewind: bool = True) -> Verdict:
        """What follows step `step` (counted from 1), after its update was made or skipped.

        Without a checkpoint (`can_rewind`) a rewind is a skip.

        Raises:
            RuntimeError: `max_skipped_steps` bad steps in a row, or one more than `max_rewinds` rewinds.
        """
        if not skipped and math.isfinite(loss):
            self.consecutive_skips = 0
            self.losses.append(loss)
            return "good"
        reason, advice = self.why_bad(loss), "or resume from an earlier checkpoint"
        if self.args.bad_step == "rewind" and can_rewind:
            if self.rewinds >= self.args.max_rewinds:
                raise RuntimeError(
                    f"step {step} is bad ({reason}) after {self.rewinds} rewinds: lower train.learning_rate, check the data, "
                    f"raise train.max_rewinds, {advice}"
                )
            self.rewinds += 1
            return "rewind"
        self.consecutive_skips += 1
        if self.consecutive_skips >= self.args.max_skipped_steps:
            raise RuntimeError(
                f"{self.consecutive_skips} bad steps in a row (at step {step} {reason}): lower train.learning_rate, check "
                f"the data, {advice}"
            )
        return "skip"

    def rewound(self, saved: dict[str, Any]) -> None:
        """The run returned to a checkpoint with this state: its losses hold again, the rewinds so far still count."""
        self.load_state_dict({**saved, "rewinds": self.rewinds, "consecutive_skips": 0})

    def state_dict(self) -> dict[str, Any]:
        """JSON; floats come back bit for bit."""
        counts = {"consecutive_skips": self.consecutive_skips, "rewinds": self.rewinds}
        return {**counts, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; {} is the start of a run."""
        self.consecutive_skips: int = state.get("consecutive_skips", 0)
        self.rewinds: int = state.get("rewinds", 0)
        self.losses: deque[float] = deque(state.get("losses", ()), maxlen=self.args.spike_window)


ABORT_CODE = 75  # EX_TEMPFAIL: a scheduler may start the run again


class Watchdog:
    """Watches one rank between `start` and `stop`.

    Args:
        folder: <output_dir>/train; stacks go to hang-rankNNNNN.txt there.
        args: `hang_timeout_s`, seconds without a beat that count as a hang, and `hang_action`: `abort` ends the process with code 75
            after the report.
    """

    def __init__(self, folder: Path, args: TrainArgs, rank: int, world_size: int, clock: Callable[[], float]):
        self.folder, self.rank, self.world_size = Path(folder), rank, world_size
        self.timeout, self.action, self.clock = args.hang_timeout_s, args.hang_action, clock
        self.path = self.folder / f"hang-rank{rank:05d}.txt"
        self.phase, self.step = "start", 0
        self._beat = clock()
        self._reported_at: float | None = None
        self._bytes_seen = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, phase: str) -> None:
        """This rank entered `phase`, which is progress."""
        self.phase, self._beat = phase, self.clock()

    def start(self) -> None:
        """Begin to watch, in a thread."""
        self._beat = self.clock()
        if self.timeout > 0 and self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def abort_after(self, error: BaseException) -> None:
        """End with code 75 when `error` of the main thread is how a reported hang looks from here: a rank that has given up
        breaks the connections of the others. Else return."""
        recent, own = time.time() - self.timeout - 120.0, self._is_stuck()
        others = [file for file in self.folder.glob("hang-rank*.txt") if file != self.path]
        if self.action != "abort" or not (own or any(file.stat().st_mtime >= recent for file in others)):
            return
        if not own:
            self.report()
        line = f"rank {self.rank} of {self.world_size} ends with the others: {error}"
        print(line, file=sys.stderr, flush=True)
        os._exit(ABORT_CODE)

    def _is_stuck(self) -> bool:
        """Whether this rank has made no progress since it reported a hang."""
        return self._reported_at is not None and self._beat < self._reported_at

    def _run(self) -> None:
        while not self._stop.wait(min(self.timeout / 8, 30.0)):
            if self.check():
                self.report()
                # A launcher ends all ranks when one has ended: leave the others time for their stacks.
                self._stop.wait(min(60.0, max(1.0, self.timeout / 20)))
                if self.action == "abort" and not self._stop.is_set() and self._is_stuck():
                    os._exit(ABORT_CODE)  # exit handlers would wait for the same collective

    def check(self) -> bool:
        """Whether a hang has to be reported now: once per `timeout` seconds without progress."""
        now = self.clock()
        if self.phase == "save" and self._written_more():
            self._beat = now
        since = self._beat if self._reported_at is None else max(self._beat, self._reported_at)
        if now - since < self.timeout:
            return False
        self._reported_at = now
        return True

    def _written_more(self) -> bool:
        """Whether unpublished checkpoints changed size. All ranks see all files: one that has written its own and waits
        for the others sees theirs grow."""
        total = 0
        for file in self.folder.glob(".*/**/*"):
            with contextlib.suppress(OSError):  # renamed or removed since it was listed
                total += file.stat().st_size
        changed, self._bytes_seen = total != self._bytes_seen, total
        return changed

    def report(self) -> None:
        """Append the stacks of all threads to this rank's file, and one line to stderr."""
        line = (
            f"rank {self.rank} of {self.world_size} on {socket.gethostname()} (process {os.getpid()}): no progress for "
            f"{self.clock() - self._beat:.0f} s in phase {self.phase} after step {self.step}"
        )
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\n")
            line += f"; stacks in {self.path}"
        except OSError as error:
            line += f"; its stacks cannot be written ({error})"
        print(line, file=sys.stderr, flush=True)
