"""The line on the terminal that shows how far reading is.

Reading ends when all bytes of the sources are read, or when the last length interval is full. The line shows
both, and estimates the time that is left from the one that is farther.
"""

import time

import numpy as np
from tqdm import tqdm

from pod.data.balance.length_intervals import interval_name, share_of, share_out
from pod.data.balance.reservoir import Reservoir
from pod.data.rows.length_pictures import short_bytes
from pod.verbosity import is_quiet


class Progress:
    """Prints one line on the terminal, and renews it.

    Args:
        total: bytes of text of all sources; 0 = not known.
    """

    def __init__(self, total: int):
        self.total, self.done = total, 0
        self.began = time.monotonic()
        self.slowest: tuple[str, float] | None = None
        """Name and filled share of the interval that is filled least."""
        self._bar = tqdm(bar_format="{desc}", mininterval=1, disable=is_quiet())

    def read(self, num_bytes: int) -> None:
        """Count bytes of text that were read."""
        self.done += num_bytes
        self._bar.set_description_str(self.line(time.monotonic() - self.began), refresh=False)
        self._bar.update()

    def show(self, reservoir: Reservoir) -> None:
        """Show which interval the kept pieces fill least, and how far."""
        self.slowest = slowest_interval(reservoir)
        self.read(0)

    def line(self, seconds: float) -> str:
        """The text of the line: `read 1.2GB of 4GB, interval 16K–32K: 63 %, 4 min left`.

        Args:
            seconds: time since the beginning.
        """
        line = f"read {short_bytes(self.done)}" + (f" of {short_bytes(self.total)}" if self.total else "")
        share = self.done / self.total if self.total else 0.0
        if self.slowest is not None:
            line += f", interval {self.slowest[0]}: {100 * self.slowest[1]:.0f} %"
            share = max(share, self.slowest[1])
        return line + (f", {duration(seconds * (1 / share - 1))} left" if 0 < share < 1 else "")

    def close(self) -> None:
        """Leave the line as it is, and end it."""
        self._bar.close()


def slowest_interval(reservoir: Reservoir) -> tuple[str, float]:
    """Name of the interval that is filled least, and the share of its quota that it has, from 0 to 1.

    With weights, the share is that of the source which has least in the interval.
    """
    groups, args = reservoir.groups, reservoir.args
    own = reservoir.group < groups.count
    tokens = np.bincount(
        reservoir.group[own], weights=reservoir.pieces["length"][own], minlength=groups.count
    )
    quota = share_of(args, groups.intervals)
    of_sources = share_out(quota, [quota] * groups.sources, args.weights or [1.0])
    wanted = np.tile(of_sources, groups.intervals)
    filled = np.minimum(1.0, tokens / np.maximum(1, wanted))
    number = int(np.argmin(filled))
    return interval_name(*groups.ends(number)), float(filled[number])


def duration(seconds: float) -> str:
    """A time as text: 240 → `4 min`."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(1, round(seconds))} s"
