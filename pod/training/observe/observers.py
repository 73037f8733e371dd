"""What looks at a model between the steps of its training."""

import resource
import sys
from typing import Any

import torch

from pod.training.observe.trackers import Values


class Observer:
    """Called by all ranks after every step; changes nothing that training depends on: no weight, random state or position in the data.

    Args:
        every: steps between two measurements, also before the first step and at the last one; 0 = never.
    """

    def __init__(self, every: int):
        self.every = every

    def observe(self, trainer: Any, step: int) -> Values:
        """Numbers for the metrics of step `step` (counted from 1; 0 = before the first)."""
        if not self.every or (step % self.every and step != trainer.args.max_steps):
            return {}
        with trainer.monitor.part("evaluate"):
            return self.measure(trainer, step)

    def measure(self, trainer: Any, step: int) -> Values:
        raise NotImplementedError


class PeakMemory(Observer):
    """`peak_memory_gib` of every recorded step: the most that the fullest rank ever held."""

    def __init__(self) -> None:
        super().__init__(1)

    def observe(self, trainer: Any, step: int) -> Values:
        if not step or not trainer.monitor.logs(step):
            return {}
        return {"peak_memory_gib": trainer.mesh.largest(peak_bytes(trainer.mesh.device)) / 2**30}


def peak_bytes(device: torch.device) -> int:
    """Most bytes that PyTorch had allocated on a GPU; without one, the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
