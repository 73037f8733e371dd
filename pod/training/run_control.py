"""When a run must end before its last step: signals, `max_hours`, and a watchdog for ranks that hang."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pod.training.args import TrainArgs


class RunControl:
    """Watches one run; every method is called by all ranks at the same places.

    Args:
        args: section `train` of the recipe.
        mesh: the ranks.
        folder: <output_dir>/train.
    """

    def __init__(self, args: TrainArgs, mesh: Any, folder: Any):
        self.args, self.mesh, self.folder = args, mesh, folder
        self.stop_signal: int | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the training loop: SIGTERM and SIGUSR1 (Slurm's warning) are noted."""

        def note(number, frame):
            self.stop_signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            if self.stop_signal is None:  # a launcher repeats SIGTERM while its ranks are leaving
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def alive(self, phase: str) -> None:
        """This rank makes progress: it enters `phase` (data, forward, backward, update, save, evaluate)."""

    def should_stop(self, step: int) -> str | None:
        """Why the run must save and end now, the same answer on all ranks; None = go on."""
        flag = torch.tensor([self.stop_signal is not None], dtype=torch.int32, device=self.mesh.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return "stopped by a signal" if flag.item() else None
