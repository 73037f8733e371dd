"""ZeRO stages, offloads, types, bad steps and rewinds on two ranks. `worker_engine.py OUT`."""

import contextlib
import copy
import itertools
import json
import sys
from pathlib import Path

import tiny
import worker_parallel
from worker_runs import optimizer_hash

TWO = {"sequence_parallel_size": 2, "loss_chunk_mib": 1, "save_every_steps": 0, "learning_rate": 1e-2}
STAGES = (1, 2, 3)
SPIKE = {"spike_factor": 3.0, "spike_window": 4}
SPIKE_AT = 6  # step, counted from 1: one good step behind the checkpoint that a rewind returns to
REWIND = {**TWO, **SPIKE, "dtype": "float32", "bad_step": "rewind", "save_every_steps": 2, "max_steps": 8}


def make_trainer(folder, data, settings):
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs
    from pod.training.run.trainer import Trainer

    args = TrainArgs(**settings)
    mesh = worker_parallel.mesh_of(args.sequence_parallel_size)
    return Trainer(args, tiny.make_model(), PackedDataset(data), mesh, folder)


def step_losses(name, out, settings, data, steps=3) -> None:
    """Losses of some steps, and what the engine says about itself."""
    trainer = make_trainer(out / f"run_{name}", data, {**TWO, **settings, "max_steps": steps})
    losses = [trainer.step()["loss"] for _ in range(steps)]
    trainer.batches.close()
    engine, optimizer = trainer.engine, trainer.engine.optimizer
    result = {"losses": losses, "optimizer": type(optimizer).__name__, "hash": optimizer_hash(trainer)}
    result["offloads"] = [bool(engine.zero_cpu_offload()), bool(getattr(optimizer, "offload_param", False))]
    result["memory"] = type(getattr(trainer.model.model, "shared_qk_memory", None)).__name__
    if trainer.mesh.rank == 0:
        tiny.write_result(out, name, result)


def bfloat16(name, out, settings, data) -> None:
    """Raw gradients of a step in bfloat16 against fp32 in one process.

    Then a NaN on one rank that must be skipped.
    """
    settings = {
        "dtype": "bfloat16",
        "sequence_parallel_size": 2,
        "gradient_accumulation_steps": 2,
        **settings,
    }
    from pod.data import PackedDataset
    from pod.training.args import TrainArgs

    dataset, model = PackedDataset(data), tiny.make_model()
    plain = copy.deepcopy(model)
    args = TrainArgs(loss_chunk_mib=1, learning_rate=1e-2, **settings)
    _, gradients, trainer = worker_parallel.one_step(args, model, dataset, out / f"run_{name}")
    _, expected = worker_parallel.reference(
        args, plain, dataset.rows(dataset.cursor(0).peek(trainer.batches.rows_per_step))
    )
    errors = {key: float((gradients[key] - g).norm() / g.norm()) for key, g in expected.items()}
    before, rank = optimizer_hash(trainer), trainer.mesh.rank
    hook = trainer.engine.module.loss_head.register_forward_hook(
        lambda *a: a[-1] * float("nan") if rank else None
    )
    skipped = trainer.step()["skipped"]
    after = optimizer_hash(trainer)
    hook.remove()
    moved = trainer.step()["skipped"] == 0 and optimizer_hash(trainer) != after
    trainer.batches.close()
    result = {"gradient": max(errors.values()), "skipped": skipped, "kept": before == after, "moved": moved}
    result["optimizer"] = type(trainer.engine.optimizer).__name__
    if rank == 0:
        tiny.write_result(out, name, result)


def spiking(trainer, rows) -> None:
    """Make one loss 100 times as large, on rank 1 alone.

    It is that of the step that reads the rows up to position `rows`.
    """

    def raise_loss(module, inputs, output):
        if trainer.cursor.position == rows and trainer.mesh.rank:
            return output * 100
        return None

    trainer.engine.module.loss_head.register_forward_hook(raise_loss)


def finish(trainer, name, out) -> None:
    fingerprint = optimizer_hash(trainer)
    if trainer.mesh.rank == 0:
        result = {"hash": fingerprint, "position": trainer.state.cursor["position"]}
        result |= {"step": trainer.state.step, "guard": trainer.state.guard}
        result["losses"] = read_losses(trainer.folder)
        tiny.write_result(out, name, result)


def read_losses(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record}


def skipped_spike(name, out, data) -> None:
    """A spike: the step's update is left out, whatever the stage."""
    for stage in (1, 3):
        settings = {**TWO, **SPIKE, "dtype": "float32", "zero_stage": stage, "max_steps": 8}
        trainer = make_trainer(out / f"run_{name}{stage}", data, settings)
        spiking(trainer, 3)
        hashes, values = [], []
        trainer.loss_spikes.judge(0, 5.0, False)
        for _ in range(4):
            values.append(trainer.step())
            hashes.append(optimizer_hash(trainer))
        trainer.batches.close()
        result = {"spikes": [value["spike"] for value in values], "loss": [value["loss"] for value in values]}
        result["skipped"] = [value["skipped"] for value in values]
        result["moved"] = [a != b for a, b in itertools.pairwise(hashes)]
        if trainer.mesh.rank == 0:
            tiny.write_result(out, f"{name}{stage}", result)


def rewound(name, out, data, stop_at=None, settings=None) -> None:
    """A spike in step SPIKE_AT.

    Optionally the run is left in the middle of step `stop_at` after the rewind.
    """
    trainer = make_trainer(out / "run_rewound" / name, data, {**REWIND, **(settings or {})})
    spiking(trainer, SPIKE_AT)
    if stop_at is not None:
        trainer.engine.module.loss_head.register_forward_hook(
            lambda *a: leave() if trainer.loss_spikes.rewinds and trainer.state.step == stop_at else None
        )
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
        finish(trainer, name, out)


def leave():
    raise KeyboardInterrupt


def without_bad_rows(name, out, data) -> None:
    """What a rewind must come to: rows of steps 1 to 4, then those behind step SPIKE_AT, as steps 5 to 8."""
    trainer = make_trainer(out / "run_plain" / name, data, {**REWIND, "save_every_steps": 0})
    for _ in range(4):
        trainer.step()
    trainer.batches.close()
    trainer.cursor.position = SPIKE_AT
    for _ in range(4):
        trainer.step()
    trainer.batches.close()
    fingerprint = optimizer_hash(trainer)
    if trainer.mesh.rank == 0:
        tiny.write_result(out, name, {"hash": fingerprint, "position": trainer.state.cursor["position"]})


def main(out: Path) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    data = tiny.make_data(out / "data")
    runs = {f"zero{stage}": {"zero_stage": stage} for stage in STAGES}
    runs["host"] = {"offload_optimizer": "cpu"}
    runs["host_weights"] = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    runs["host_states"] = {"offload_checkpoints": True, "shared_qk": "recompute"}
    runs["fused"] = {"fused_layers": "compile"}
    runs = {name: {"dtype": "float32", **settings} for name, settings in runs.items()}
    halves = {f"half{stage}": {"zero_stage": stage} for stage in STAGES}
    halves |= {f"reduced{stage}": {"zero_stage": stage, "reduce_dtype": "bfloat16"} for stage in STAGES}
    stages = [
        (step_losses, *[(name, out, settings, data) for name, settings in runs.items()]),
        (bfloat16, *[(name, out, settings, data) for name, settings in halves.items()]),
        (skipped_spike, ("spike", out, data)),
        (rewound, ("rewound", out, data), ("rewound1", out, data, None, {"zero_stage": 1})),
        (without_bad_rows, ("expected", out, data)),
        (rewound, ("killed", out, data, 5)),
        (rewound, ("killed", out, data)),
    ]
    for function, *calls in stages:
        tiny.run_ranks(2, worker_parallel.together, function, *calls)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
