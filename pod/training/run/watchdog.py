"""A watchdog for ranks that hang.

The main thread of a hanging rank usually waits inside a collective, for a peer that will not come. The
watchdog is a thread beside it. It can report the hang, because collectives release Python's lock while they
wait.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pod.training.args import TrainArgs

ABORT_CODE = 75  # EX_TEMPFAIL: a scheduler may start the run again


def seconds_between_checks(timeout: float) -> float:
    """Seconds between two checks for a hang, which is `timeout` seconds without progress."""
    return min(timeout / 8, 30.0)


def seconds_for_stacks(timeout: float) -> float:
    """Seconds between a rank's report of a hang and its end, in which other ranks can write their stacks too.

    A launcher ends all ranks when one ends.
    """
    return min(60.0, max(1.0, timeout / 20))


def seconds_to_abort(timeout: float) -> float:
    """Most seconds from a rank's last progress to its end with exit code 75."""
    return timeout + seconds_between_checks(timeout) + seconds_for_stacks(timeout)


class Watchdog:
    """Watches one rank between `start` and `stop`.

    A hang is `hang_timeout_s` seconds without a call of `beat`. The stacks of all threads then go to
    hang-rankNNNNN.txt in `folder`. With `hang_action` abort, the process then ends with exit code 75.

    Args:
        folder: <output_dir>/train.
        rank, world_size: number of this rank, and of all ranks.
        clock: returns the time in seconds.

    Attributes:
        phase: what the rank does, for the report.
        step: the last step that is done, for the report; the owner of the watchdog sets it.
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
        """Note that this rank entered `phase`, which is progress."""
        self.phase, self._beat = phase, self.clock()

    def start(self) -> None:
        """Begin to watch, in a thread."""
        self._beat = self.clock()
        if self.timeout > 0 and self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def abort_after(self, error: BaseException) -> None:
        """End with exit code 75 when `error` of the main thread comes from a hang that was reported.

        Else it returns. A rank that has ended breaks the connections to the others, and their main threads
        get an error that hides the hang. Nothing ends here unless `hang_action` is abort.
        """
        recent = time.time() - self.timeout - 120.0
        own = self._is_stuck()
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
        """Check, report and end the process until `stop` is called: the work of the thread."""
        while not self._stop.wait(seconds_between_checks(self.timeout)):
            if self.check():
                self.report()
                self._stop.wait(seconds_for_stacks(self.timeout))
                if self.action == "abort" and not self._stop.is_set() and self._is_stuck():
                    os._exit(ABORT_CODE)  # exit handlers would wait for the same collective

    def check(self) -> bool:
        """Whether a hang must be reported now.

        It is reported once per `hang_timeout_s` seconds without progress. While a checkpoint is saved, files
        that grow are progress.
        """
        now = self.clock()
        if self.phase == "save" and self._written_more():
            self._beat = now
        since = self._beat if self._reported_at is None else max(self._beat, self._reported_at)
        if now - since < self.timeout:
            return False
        self._reported_at = now
        return True

    def _written_more(self) -> bool:
        """Whether unpublished checkpoints have changed size since the last call.

        All ranks see all files. So a rank that has written its own files and waits for other ranks sees their
        files grow.
        """
        total = 0
        for file in self.folder.glob(".*/**/*"):
            with contextlib.suppress(OSError):  # renamed or removed since it was listed
                total += file.stat().st_size
        changed, self._bytes_seen = total != self._bytes_seen, total
        return changed

    def report(self) -> None:
        """Append the stacks of all threads to this rank's file, and one line to stderr."""
        line = (
            f"rank {self.rank} of {self.world_size} on {socket.gethostname()} (process {os.getpid()}): no "
            f"progress for {self.clock() - self._beat:.0f} s in phase {self.phase} after step {self.step}"
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
