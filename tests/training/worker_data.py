"""What real ranks read from one saved cursor on changing rank counts. `worker_data.py OUT`."""

import json
import sys
from pathlib import Path

import tiny

ROWS, CONTEXT, ACCUMULATION, SEED = 12, 41, 2, 7
PHASES = [
    # ranks, ranks of a sequence-parallel group, steps, steps read ahead
    (2, 1, 2, 2),
    (1, 1, 1, 3),
    (3, 1, 2, 2),
    (4, 2, 1, 1),
    (3, 3, 3, 0),
    (6, 2, 2, 2),
    (2, 1, 1, 2),
]
"""From rank count to rank count: 8 + 2 + 12 + 4 + 6 + 12 + 4 rows = 4 epochs.

The ends of epochs fall inside phases and steps.
"""


def read(out: Path, data: Path, phase: int) -> None:
    """One phase of a training that does nothing but read: resume from the saved cursor, read, save it."""
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.mesh import Mesh, stop_processes
    from pod.training.run.step_batches import StepBatches
    from pod.training.run.ulysses import Ulysses

    ranks, sp_size, steps, ahead = PHASES[phase]
    args = TrainArgs(
        sequence_parallel_size=sp_size, gradient_accumulation_steps=ACCUMULATION, prefetch_steps=ahead
    )
    mesh, dataset = Mesh(sp_size), PackedDataset(data)
    cursor, saved = dataset.cursor(SEED), out / f"cursor-{phase}.saved"
    if phase:
        cursor.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
    tokens = slice(None)
    if mesh.sp_group is not None:
        tokens = Ulysses(tiny.make_model().config, mesh.sp_group, CONTEXT).slice
    batches = StepBatches(args, dataset, cursor, mesh, tokens)
    seen = [
        [{name: value.tolist() for name, value in batch.items()} for batch in batches.next()]
        for _ in range(steps)
    ]
    if mesh.rank == ranks - 1:  # any rank's cursor tells where all are
        path = out / f"cursor-{phase + 1}.saved"
        path.write_text(json.dumps(cursor.state_dict()), encoding="utf-8")
    place = {"dp_rank": mesh.dp_rank, "sp_rank": mesh.sp_rank, "position": cursor.position}
    tiny.write_result(out, f"phase{phase}_rank{mesh.rank}", {**place, "steps": seen})
    if phase % 2:  # the other phases leave while their thread still reads ahead
        batches.close()
    stop_processes()


def main(out: Path) -> None:

    names = ("ranks", "sp_size", "steps", "ahead")
    phases = [dict(zip(names, phase, strict=True)) for phase in PHASES]
    settings = {"phases": phases, "rows": ROWS, "seed": SEED, "accumulation": ACCUMULATION}
    tiny.write_result(out, "settings", settings)
    data = tiny.make_data(out / "data", context=CONTEXT, rows=ROWS)
    for phase, (ranks, *_) in enumerate(PHASES):
        tiny.run_ranks(ranks, read, out, data, phase)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
