"""Kill -9 of whole runs at random moments, again and again, until they end. `worker_kills.py OUT [KILLS]`.

A run is a process group: its ranks and their writing threads. Every second kill comes at a random moment of
the whole run, every second while a checkpoint is written or published. A run that ends is compared with one
that nobody killed, and a new one begins.
"""

import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import tiny
import torch
from worker_runs import full_weights, make_trainer, optimizer_hash

STEPS = 10
SETTINGS = {
    "max_steps": STEPS,
    "dtype": "float32",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "save_every_steps": 1,
    "sequence_parallel_size": 2,
    "method": "lora",  # its dropout needs the random states too
    "lora_rank": 2,
    "lora_dropout": 0.2,
}
PHASES = ["start", "load", "train", "save", "write", "publish"]
PLACE = mmap.mmap(-1, 16)  # shared with all forks: the phase of every rank, and of a writing thread


def enter(phase: str, rank: int) -> None:
    PLACE[rank] = PHASES.index(phase)


def around(function, phase: str, rank: int, after: str):
    """`function`, during which this rank is in `phase`."""

    def call(*arguments, **named):
        enter(phase, rank)
        try:
            return function(*arguments, **named)
        finally:
            enter(after, rank)

    return call


def train(out, folder, data, mode) -> None:
    from pod.training.checkpoint import checkpoint_files as module
    from pod.training.run.mesh import stop_processes

    rank = int(os.environ["RANK"])
    load = module.Checkpointer.load
    module.Checkpointer.load = around(load, "load", rank, "train")
    trainer = make_trainer(folder, data, {**SETTINGS, "save_mode": mode})
    checkpointer = trainer.checkpointer
    checkpointer.save = around(checkpointer.save, "save", rank, "train")
    checkpointer._publish = around(checkpointer._publish, "publish", rank, "train")
    checkpointer._write = around(checkpointer._write, "write", 4 + rank, "start")
    enter("train", rank)
    state = trainer.train()
    weights, fingerprint = full_weights(trainer), optimizer_hash(trainer)
    if rank == 0:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        result = {"hash": fingerprint, "step": state.step, "losses": [[x["step"], x["loss"]] for x in lines]}
        result["left"] = sorted(path.name for path in folder.iterdir() if path.is_dir())
        torch.save({"result": result, "weights": weights}, out / f"{folder.name}.pt")
    stop_processes()


def start(ranks: int, function, *arguments) -> int:
    """Fork a run as a process group of its own; returns the group."""
    PLACE[:] = bytes(16)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        code = 1
        try:
            tiny.run_ranks(ranks, function, *arguments)
            code = 0
        finally:
            os._exit(code)
    return child


def ended(group: int) -> bool:
    """Whether the run came to its end; raises when it failed."""
    done, status = os.waitpid(group, os.WNOHANG)
    if done and status:
        raise SystemExit(f"a run failed: wait status {status}")
    return bool(done)


def kill_at(group: int, seconds: float) -> list[str] | None:
    """Kill after `seconds`; None when the run ended before."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if ended(group):
            return None
        time.sleep(0.0005)
    if ended(group):
        return None
    seen = sorted({PHASES[number] for number in PLACE[:6]} - {"start"})
    os.killpg(group, signal.SIGKILL)
    os.waitpid(group, 0)
    return seen or ["start"]


def latest_step(folder: Path) -> int:
    """Step of the newest checkpoint, which must be whole; 0 without one."""
    pointer = folder / "latest"
    if not pointer.exists():
        return 0
    name = pointer.read_text().strip()
    files = {path.name for path in (folder / name).iterdir()}
    assert {
        "checkpoint.json",
        "random-00000.safetensors",
        "random-00001.safetensors",
        "plan.json",
    } <= files, files
    assert sum(file.startswith("weights-") for file in files) == 2, files
    return int(name.removeprefix("step-"))


def compare(out: Path, name: str) -> dict:
    whole, killed = (torch.load(out / f"{each}.pt", weights_only=True) for each in ("whole", name))
    same = all(torch.equal(whole["weights"][key], killed["weights"][key]) for key in whole["weights"])
    return {
        "weights": same,
        "optimizer": whole["result"]["hash"] == killed["result"]["hash"],
        "losses": whole["result"]["losses"] == killed["result"]["losses"],
        "left": killed["result"]["left"],
    }


def main(out: Path, kills: int, seed: int = 0) -> None:
    import peft  # noqa: F401  imported once, before the ranks are forked

    data = tiny.make_data(out / "data")
    began = time.monotonic()
    tiny.run_ranks(2, train, out, out / "whole", data, "async")
    length = time.monotonic() - began
    chance = random.Random(seed)
    moments: list[dict] = []
    rounds: list[dict] = []
    folder, last = out / "run0", 0
    while len(moments) < kills or last < STEPS:
        kind = len(moments) % 2 if len(moments) < kills else 2
        group = start(2, train, out, folder, data, chance.choice(["sync", "async"]))
        if kind == 1:
            seen = kill_after(group, chance.choice(["save", "write", "publish"]), chance)
        else:
            seen = kill_at(group, chance.uniform(0, length) if kind == 0 else 600)
        step = latest_step(folder)
        assert step >= last, f"latest went back from {last} to {step}"
        last = step
        if seen is not None:
            moments.append({"kind": kind, "seen": seen, "step": step})
        elif step == STEPS:
            rounds.append(compare(out, folder.name))
            if len(moments) < kills:
                folder, last = out / f"run{len(rounds)}", 0
    tiny.write_result(out, "kills", {"moments": moments, "rounds": rounds, "seconds": length})


def kill_after(group: int, target: str, chance: random.Random) -> list[str] | None:
    """Let one to three steps pass, then kill within milliseconds of the next `target`."""
    skip = chance.randint(0, 3)
    inside = False
    for _ in range(200_000):
        if ended(group):
            return None
        now = target in {PHASES[number] for number in PLACE[:16]}
        if now and not inside:
            skip -= 1
        inside = now
        if now and skip < 0:
            return kill_at(group, chance.uniform(0, 0.01))
        time.sleep(0.0003)
    raise SystemExit(f"no {target} was seen")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ.get("POD_KILLS", "6")), *map(int, sys.argv[2:]))
