"""How often the host waits for the device in an optimizer step, and where. `worker_syncs.py OUT`. On a CPU nothing waits, but
the operations that would are the same: every read of a tensor's value that is not on the host by construction."""

import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worker_runs import make_trainer

ACCUMULATE = 3
OURS = str(Path(__file__).parents[2] / "pod")


class Reads(TorchDispatchMode):
    """Counts reads of values by the innermost place in `pod` or DeepSpeed that asked for them."""

    def __init__(self):
        super().__init__()
        self.places: Counter = Counter()

    def note(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if "worker_syncs" not in frame.filename]
        named = [f for f in frames if f.filename.startswith(OURS) or "/deepspeed/" in f.filename]
        last = named[-1]
        self.places[f"{'pod' if last.filename.startswith(OURS) else 'deepspeed'}:{last.name}"] += 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self.note()
        return function(*args, **(kwargs or {}))


@contextmanager
def counting():
    """Values by `item`, `float`, `bool` and so on (dispatched), and lists."""
    reads, tolist = Reads(), torch.Tensor.tolist

    def listing(tensor):
        reads.note()
        return tolist(tensor)

    torch.Tensor.tolist = listing
    try:
        with reads:
            yield reads
    finally:
        torch.Tensor.tolist = tolist


def step(out: Path, stage: int) -> None:
    """The third step, as the loop makes it."""
    from pod.training.observe.metrics import Monitor
    from pod.training.run.mesh import stop_processes

    settings = {
        "zero_stage": stage,
        "gradient_accumulation_steps": ACCUMULATE,
        "dtype": "bfloat16",
        "max_steps": 9,
    }
    trainer = make_trainer(out / f"stage{stage}", out / "data", settings)
    trainer.monitor = Monitor.of(trainer)
    for _ in range(2):
        trainer.step()
    with counting() as reads:
        trainer.step()
        trainer.control.should_stop(3)
        trainer.checkpointer.poll()
    trainer.batches.close()
    if trainer.mesh.rank == 0:
        result = {"places": dict(reads.places)}
        tiny.write_result(out, f"stage{stage}", result)
    stop_processes()


def main(out: Path) -> None:

    tiny.make_data(out / "data")
    for stage in (1, 2, 3):
        tiny.run_ranks(2, step, out, stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
