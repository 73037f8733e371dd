"""How often the host waits for the device in an optimizer step, and where. `worker_syncs.py OUT`.

On a CPU nothing waits, but the operations that would are the same (`host_reads`).
"""

import sys
import traceback
from collections import Counter
from pathlib import Path

import tiny
from host_reads import noting
from worker_runs import make_trainer

ACCUMULATE = 3
OURS = str(Path(__file__).parents[2] / "pod")


class Reads:
    """Counts waits by the innermost place in `pod` or DeepSpeed that asked for a value."""

    def __init__(self):
        self.places: Counter = Counter()

    def note(self, name: str) -> None:
        named = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(OURS) or "/deepspeed/" in frame.filename
        ]
        last = named[-1]
        self.places[f"{'pod' if last.filename.startswith(OURS) else 'deepspeed'}:{last.name}"] += 1


def step(out: Path, stage: int, distills: bool = False) -> None:
    """The third step, as the loop makes it."""
    from pod.training.run.mesh import stop_processes

    settings = {
        "zero_stage": stage,
        "gradient_accumulation_steps": ACCUMULATE,
        "dtype": "bfloat16",
        "max_steps": 9,
    }
    name = f"stage{stage}"
    if distills:
        settings |= {"method": "lora", "distill": 0.5, "distill_attention": 10.0}
        name += "_distilled"
    trainer = make_trainer(out / name, out / "data", settings)
    for _ in range(2):
        trainer.step()
    reads = Reads()
    with noting(reads.note):
        trainer.step()
        trainer.control.should_stop(3)
        trainer.checkpointer.poll()
    trainer.batches.close()
    if trainer.mesh.rank == 0:
        result = {"places": dict(reads.places)}
        tiny.write_result(out, name, result)
    stop_processes()


def main(out: Path) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    tiny.make_data(out / "data")
    for stage in (1, 2, 3):
        tiny.run_ranks(2, step, out, stage)
    for stage in (1, 3):
        tiny.run_ranks(2, step, out, stage, True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
