"""What looks at a model between the steps of its training."""

import resource
import sys
from typing import Any

import torch


class Observer:
    """Called by all ranks in every step; what it does not define does nothing.

    It changes nothing that training depends on: no weight, no random state, no position in the data.
    """

    def before_update(self, trainer: Any) -> None:
        """After the last backward of a step, before its update: reduced gradients are there, not yet clipped."""

    def observe(self, trainer: Any, step: int) -> dict[str, float]:
        """After the update of step `step` (counted from 1; 0 = before the first); returns numbers for its metrics."""
        return {}


class Periodic(Observer):
    """Something that takes its time: every so many steps, before the first step and at the last one.

    Args:
        every: steps between two measurements; 0 = never.
    """

    def __init__(self, every: int):
        self.every = every

    def observe(self, trainer: Any, step: int) -> dict[str, float]:
        if not self.every or (step % self.every and step != trainer.args.max_steps):
            return {}
        with trainer.monitor.part("evaluate"):
            return self.measure(trainer, step)

    def measure(self, trainer: Any, step: int) -> dict[str, float]:
        raise NotImplementedError


class PeakMemory(Observer):
    """`peak_memory_gib` of every recorded step: the most that the fullest rank ever held, of its device or, without one,
    of its process."""

    def observe(self, trainer: Any, step: int) -> dict[str, float]:
        if not step or not trainer.monitor.logs(step):
            return {}
        peak = torch.tensor(peak_bytes(trainer.mesh.device) / 2**30, device=trainer.mesh.device)
        torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX)
        return {"peak_memory_gib": float(peak)}


def peak_bytes(device: torch.device) -> int:
    """Most bytes that PyTorch had allocated on a GPU; without one, the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
