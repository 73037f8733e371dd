"""One recipe on 1, 2 and 4 ranks, as the layout search lays it out. `worker_recipe.py OUT`."""

import json
import sys
from pathlib import Path

import tiny

STEPS = 8
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]
"""Ranks and ranks per row."""


def train(out: Path, data: Path, size: int) -> None:
    """Losses of all steps, and the rows that each data-parallel rank read for them."""
    from pod.data import PackedDataset
    from pod.training.args import TrainRecipe
    from pod.training.predict.layout_search import choose_layout, this_machine
    from pod.training.predict.shapes import Shapes
    from pod.training.run.mesh import Mesh, stop_processes
    from pod.training.run.trainer import Trainer

    dataset, model = PackedDataset(data), tiny.make_model()
    recipe = TrainRecipe(
        tokens_per_step=4 * dataset.context_length,
        max_steps=STEPS,
        learning_rate=1e-2,
        warmup_ratio=0.25,
        weight_decay=0.1,
        dtype="float32",
        prefetch_steps=0,
        sequence_parallel_size=size,
    )
    layout = choose_layout(
        recipe, Shapes.from_config(model.config), model.model.lead, dataset.context_length, this_machine()
    )
    mesh = Mesh(size)
    rows, read = dataset.rows, list[int]()

    def recorded(numbers):
        read.extend(map(int, numbers))
        return rows(numbers)

    dataset.rows = recorded
    name = f"ranks{mesh.world_size}_sp{size}"
    Trainer(layout.job.args, model, dataset, mesh, out / name).train()
    lines = (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    rows_of_a_step = len(read) // STEPS
    by_step = [read[start : start + rows_of_a_step] for start in range(0, len(read), rows_of_a_step)]
    result = {"losses": losses, "read": by_step, "dp_rank": mesh.dp_rank, "steps": layout.job.args.max_steps}
    tiny.write_result(out, f"{name}_rank{mesh.rank}", result)
    stop_processes()


def main(out: Path) -> None:

    data = tiny.make_data(out / "data", rows=20)
    for ranks, size in LAYOUTS:
        tiny.run_ranks(ranks, train, out, data, size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
