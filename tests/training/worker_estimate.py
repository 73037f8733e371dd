"""What the estimate says against real steps. `worker_estimate.py OUT`.

Live bytes, exchanged bytes, checkpoint size; ranks that disagree.
"""

import sys
from dataclasses import replace
from pathlib import Path

import tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

MEASURED = ("roles_recompute_carry", "pod_lora_no_checkpoints", "pod_zero3_2ranks")
CONTEXT = 512  # tokens: shorter than in the benchmark
SETTINGS = {"dtype": "float32", "loss_chunk_mib": 1, "max_steps": 1, "save_every_steps": 0}


def disagree(out: Path) -> None:
    """Two ranks whose recipes differ in one section."""
    from pod.training.run.config_sync import agree
    from pod.training.run.mesh import Mesh, stop_processes

    mesh = Mesh(1)
    recipe = {"seed": 0, "train": {"max_steps": 3 + mesh.rank}}
    result = {"error": None}
    try:
        agree({"seed": 0}, out / "agreed", {"name": "same"})
        agree(recipe, out / "agreed", {"name": "x" * 99 if mesh.rank else ""})
    except ValueError as error:
        result["error"] = str(error)
    tiny.write_result(out, f"disagree_{mesh.rank}", result)
    tiny.write_result(out, f"layout_{mesh.rank}", layouts(mesh.rank))
    stop_processes()


def layouts(rank: int) -> dict[str, str]:
    """What a rank would do alone and what both agree on.

    The second one's device has a quarter of the memory.
    """
    from test_layout_search import CONTEXT, LLAMA3_8B, PAPER, SHARED, machine

    from pod.training.args import TrainRecipe
    from pod.training.predict.layout_search import choose_layout, layout_line
    from pod.training.run.config_sync import agree_on_layout

    recipe = TrainRecipe(**PAPER)
    layout = choose_layout(
        recipe, LLAMA3_8B, SHARED, CONTEXT, machine(8, f"h100,memory_gib={20 if rank else 80}")
    )
    return {"alone": layout_line(layout), "agreed": layout_line(agree_on_layout(layout, recipe))}


def one_step(out: Path, data: Path, name: str, settings: dict) -> None:
    """Bytes that the first rank handed to all-to-alls in a step, and the estimate's.

    Also the size of a checkpoint on disk.
    """
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.predict.memory_estimate import TrainingJob, World, checkpoint_disk_bytes
    from pod.training.predict.shapes import Shapes
    from pod.training.predict.step_time import all_to_all_bytes, exchanged_bytes
    from pod.training.run.mesh import Mesh, stop_processes
    from pod.training.run.trainer import Trainer

    args = TrainArgs(**SETTINGS | settings)
    mesh = Mesh(args.sequence_parallel_size)
    model = tiny.make_model(tied=False)
    shapes = Shapes.from_config(model.config)
    job = TrainingJob(
        shapes, model.config.sharing_plan.lead, args, 41, World(mesh.world_size, mesh.world_size)
    )
    trainer = Trainer(args, model, PackedDataset(data), mesh, out / name)
    trainer.train()
    if mesh.rank == 0:
        files = [file for file in (out / name).glob("step-*/**/*") if file.is_file()]
        tiny.write_result(
            out,
            name,
            {
                "sent": trainer.ulysses.sent_bytes,
                "once": exchanged_bytes(job),
                "all": all_to_all_bytes(job),
                "disk": sum(file.stat().st_size for file in files),
                "disk_estimate": checkpoint_disk_bytes(shapes.parameters),
            },
        )
    stop_processes()


def main(out: Path) -> None:
    import estimate_memory
    import peft  # noqa: F401  imported once, before the ranks are forked

    for case in estimate_memory.CASES:
        if case.name in MEASURED:
            tiny.write_result(out, case.name, estimate_memory.compare(replace(case, context=CONTEXT)))
    tiny.run_ranks(2, disagree, out)
    data = tiny.make_data(out / "data")
    tiny.run_ranks(2, one_step, out, data, "sp2", {"sequence_parallel_size": 2})
    plain = {"sequence_parallel_size": 2, "gradient_checkpointing": "none", "zero_stage": 1}
    tiny.run_ranks(2, one_step, out, data, "sp2_zero1", plain | {"gradient_accumulation_steps": 2})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
