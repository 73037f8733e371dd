"""Checkpoints on other ranks, asynchronous ones, and loading into a running engine.

`worker_restart.py OUT`.
"""

import json
import os
import sys
import threading
from pathlib import Path

import tiny
import torch
from worker_runs import full_weights, make_trainer, optimizer_hash, signal_in_step

STEPS = 6
BASE = {
    "max_steps": STEPS,
    "dtype": "float32",
    "learning_rate": 1e-2,
    "warmup_ratio": 1 / STEPS,
    "weight_decay": 0.3,  # a wrong one on norms, which have none, shows
    "max_grad_norm": 0.5,  # below the norms that come: clipping counts
}
LORA = {**BASE, "method": "lora", "lora_rank": 2}
HALF = {**BASE, "dtype": "bfloat16"}


def layout(ranks: int, zero: int, sp: int, accumulate: int, settings: dict) -> tuple[int, dict]:
    """Ranks, and settings in which every layout reads the same rows per step."""
    more = {"zero_stage": zero, "sequence_parallel_size": sp, "gradient_accumulation_steps": accumulate}
    return ranks, {**settings, **more}


def train_until(name, out, folder, data, settings, stop=None) -> None:
    """Train until SIGTERM ends the run after step `stop`.

    Writes fingerprints of the state that was loaded and of the last one. The signal comes in that step where
    it has one micro-batch, else in the next one, which is undone.
    """
    from pod.training.run.mesh import stop_processes

    trainer = make_trainer(folder, data, settings)
    loaded = optimizer_hash(trainer) if trainer.state.step else None
    result = {"loaded": loaded, "from": trainer.state.step}
    if trainer.state.world_size != trainer.mesh.world_size and loaded:  # as a rewind would
        cursor = trainer.cursor.state_dict()
        trainer.step()
        trainer.state = trainer.checkpointer.load(trainer.checkpointer.latest)
        trainer.cursor.load_state_dict(cursor)
        result["loaded_again"] = optimizer_hash(trainer)
    if stop is not None:
        step = stop - 1 if trainer.args.gradient_accumulation_steps == 1 else stop
        trainer.engine.module.loss_head.register_forward_pre_hook(signal_in_step(trainer, step))
    state = trainer.train()
    result |= {"step": state.step, "rows": state.cursor["position"], "saved": optimizer_hash(trainer)}
    weights = full_weights(trainer)
    steps = {float(each["step"]) for each in trainer.engine.optimizer.optimizer.state.values()}
    result["adam_steps"] = sorted(steps)
    groups = trainer.engine.optimizer.optimizer.param_groups
    result["decay"] = [group["weight_decay"] for group in groups]
    if trainer.mesh.rank == 0:
        torch.save(weights, out / f"{name}.pt")
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        result["losses"] = [line["loss"] for line in lines]
        result["left"] = sorted(path.name for path in folder.iterdir() if path.is_dir())
        tiny.write_result(out, name, result)
    stop_processes()


def compare(out, name: str, parts: list[str], whole: str) -> None:
    """Largest difference of trained weights between the last of several runs and an uninterrupted one."""
    expected, got = (torch.load(out / f"{each}.pt", weights_only=True) for each in (whole, parts[-1]))
    assert expected.keys() == got.keys()
    error = max(float((expected[key].float() - got[key].float()).abs().max()) for key in expected)
    first = torch.load(out / f"{parts[0]}.pt", weights_only=True)
    moved = max(float((got[key].float() - first[key].float()).abs().max()) for key in got)
    tiny.write_result(out, name, {"error": error, "moved": moved})


def relayouts(out, data) -> None:
    """2 ranks, then 3, then 1, against 2 ranks all the way."""
    chains = {
        "full": [layout(2, 3, 2, 1, BASE), layout(3, 1, 3, 1, BASE), layout(1, 3, 1, 1, BASE)],
        "lora": [layout(2, 1, 1, 3, LORA), layout(3, 3, 1, 2, LORA), layout(1, 2, 1, 6, LORA)],
        "half": [layout(2, 3, 1, 3, HALF), layout(3, 1, 1, 2, HALF), layout(1, 3, 1, 6, HALF)],
    }
    for chain, layouts in chains.items():
        ranks, settings = layouts[0]
        tiny.run_ranks(ranks, train_until, f"{chain}_whole", out, out / f"{chain}_whole", data, settings)
        names = []
        for (ranks, settings), stop in zip(layouts, (2, 4, None), strict=True):
            names.append(f"{chain}_on_{ranks}")
            tiny.run_ranks(ranks, train_until, names[-1], out, out / chain, data, settings, stop)
        compare(out, f"{chain}_difference", names, f"{chain}_whole")


def rewinds(out, data) -> None:
    """Load into an engine that has trained on.

    The state is the saved one, and the way from there the same.
    """
    from pod.training.run.mesh import stop_processes

    result = {}
    for name, settings in {
        "zero3": {"zero_stage": 3},
        "zero1": {"zero_stage": 1},
        "bfloat16": {"zero_stage": 3, "dtype": "bfloat16"},
        "lora_dropout": {"zero_stage": 3, "method": "lora", "lora_rank": 2, "lora_dropout": 0.3},
    }.items():
        trainer = make_trainer(out / f"rewind_{name}", data, {**BASE, **settings})
        hashes = []
        for _ in range(2):
            trainer.step()
        _save_with_other_decay(trainer)
        hashes.append(optimizer_hash(trainer))
        cursor = trainer.cursor.state_dict()
        for _ in range(2):
            trainer.step()
        hashes.append(optimizer_hash(trainer))
        trainer.state = trainer.checkpointer.load(trainer.checkpointer.latest)
        trainer.cursor.load_state_dict(cursor)
        hashes.append(optimizer_hash(trainer))
        for _ in range(2):
            trainer.step()
        hashes.append(optimizer_hash(trainer))
        result[name] = hashes
        trainer.batches.close()
    if trainer.mesh.rank == 0:
        tiny.write_result(out, "rewinds", result)
    stop_processes()


def _save_with_other_decay(trainer) -> None:
    """A checkpoint of a recipe with another weight decay, which must not come back with its weights."""
    groups = trainer.engine.optimizer.optimizer.param_groups
    own = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 9.0
    trainer.checkpointer.save(trainer.state)
    for group, decay in zip(groups, own, strict=True):
        group["weight_decay"] = decay


def asynchronous(out, data) -> None:
    """Training goes on while a checkpoint is written; nothing is published before all of it is there."""
    from pod.training.checkpoint import checkpoint_files
    from pod.training.run.mesh import stop_processes

    folder = out / "async"
    settings = {**BASE, "save_mode": "async", "sequence_parallel_size": 2, "max_steps": 12}
    trainer = make_trainer(folder, data, settings)
    may_write = threading.Event()
    write_pieces = checkpoint_files.write_pieces

    def held(*arguments):
        assert may_write.wait(60)
        return write_pieces(*arguments)

    if trainer.mesh.rank == 1:  # the other rank's files are there at once
        checkpoint_files.write_pieces = held
    trainer.step()
    saved = optimizer_hash(trainer)
    trainer.checkpointer.save(trainer.state)
    seen = []
    for _ in range(2):
        trainer.step()
        trainer.checkpointer.poll()
        seen.append((folder / "latest").exists())
    later = optimizer_hash(trainer)
    may_write.set()
    trainer.checkpointer.wait()
    seen.append((folder / "latest").read_text().strip())
    state = trainer.checkpointer.load(trainer.checkpointer.latest)
    result = {
        "seen": seen,
        "saved": saved,
        "later": later,
        "loaded": optimizer_hash(trainer),
        "step": state.step,
    }
    result |= _failing_write(trainer, folder)
    tiny.write_result(out, f"async_rank{trainer.mesh.rank}", result)
    stop_processes()


def _failing_write(trainer, folder) -> dict:
    """One rank's thread cannot write.

    Every rank hears of it at a step boundary, and saving works again afterwards.
    """
    from pod.training.checkpoint import checkpoint_files

    working = checkpoint_files.write_pieces

    def broken(*arguments):
        raise OSError(5, "Input/output error")

    trainer.step()
    if trainer.mesh.rank == 1:
        checkpoint_files.write_pieces = broken
    trainer.checkpointer.save(trainer.state)
    error = "none"
    try:
        for _ in range(200):
            trainer.checkpointer.poll()
            threading.Event().wait(0.02)
    except OSError as raised:
        error = str(raised)
    left = sorted(path.name for path in folder.iterdir() if path.is_dir())
    checkpoint_files.write_pieces = working
    trainer.checkpointer.save(trainer.state)
    trainer.checkpointer.wait()
    return {"error": error, "left": left, "after": (folder / "latest").read_text().strip()}


def rotation(out, data) -> None:
    """Five checkpoints, the last two and every second step kept, one of another branch left alone."""
    from pod.training.run.mesh import stop_processes

    folder = out / "rotation"
    (folder / "step-00000099").mkdir(parents=True)
    settings = {**BASE, "max_steps": 5, "save_every_steps": 1, "keep_last": 1, "keep_every_steps": 2}
    make_trainer(folder, data, settings).train()
    tiny.write_result(out, "rotation", {"kept": sorted(path.name for path in folder.glob("*step-*"))})
    stop_processes()


def damaged(out, data) -> None:
    """A checkpoint of two ranks on two and on one: a file of rank 1 is cut off, or gone."""
    from pod.training.run.mesh import stop_processes

    result, rank = {}, int(os.environ["RANK"])
    folder = out / "term"
    checkpoint = folder / (folder / "latest").read_text().strip()
    file = next(checkpoint.glob("weights-00001*"))
    if rank == 0:  # of one row per step, which two ranks without sequence parallelism cannot have
        state = json.loads((checkpoint / "checkpoint.json").read_text())
        state["identity"].pop("rows", None)
        (checkpoint / "checkpoint.json").write_text(json.dumps(state))
    whole = file.read_bytes()
    for case, content in (("cut", whole[:-100]), ("header", whole[:100]), ("gone", None)):
        if rank == 0:
            if content is None:
                file.unlink()
            else:
                file.write_bytes(content)
        result[case] = _refusal(folder, data, BASE)
    if rank == 0:
        file.write_bytes(whole)
    tiny.write_result(out, f"damaged_{rank}_of_{os.environ['WORLD_SIZE']}", result)
    stop_processes()


def _refusal(folder, data, settings) -> str:
    try:
        make_trainer(folder, data, settings)
    except ValueError as error:
        return str(error)
    return "accepted"


def stopped(name, out, data, stop=None) -> None:
    """SIGTERM to rank 1 with asynchronous checkpoints every step."""
    settings = {**BASE, "save_mode": "async", "save_every_steps": 1, "sequence_parallel_size": 2}
    train_until(name, out, out / "term", data, settings, stop)


def main(out: Path, first: int = 0) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    data = tiny.make_data(out / "data")
    stages = [
        lambda: tiny.run_ranks(2, rewinds, out, data),
        lambda: tiny.run_ranks(2, asynchronous, out, data),
        lambda: tiny.run_ranks(2, stopped, "term_stopped", out, data, 3),
        lambda: tiny.run_ranks(2, stopped, "term_resumed", out, data),
        lambda: tiny.run_ranks(1, rotation, out, data),
        lambda: relayouts(out, data),
        lambda: tiny.run_ranks(2, damaged, out, data),
        lambda: tiny.run_ranks(1, damaged, out, data),
    ]
    for stage in stages[first:]:
        stage()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))  # a stage number continues a failed run
