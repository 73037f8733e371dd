"""Steps of the trainer on two CPU ranks, PoD over dense.

Rate, all-to-all bytes, what is kept for backward, peak memory.

    # about an hour; writes benchmarks/results/train_step_ranks.json
    OMP_NUM_THREADS=1 python benchmarks/train_step_ranks.py

The model of train_step_cpu.py (ten layers at the widths of SmolLM2-135M, 70 % of the (layer, KV head) pairs
follow) through `pod.training.run.trainer`: Ulysses over both ranks, ZeRO-3, activation checkpointing, fp32,
one thread per rank. Contestants take turns in the same two processes; a step's time is the wall clock of the
slower rank, from barrier to barrier, beside the processor time of both. What is kept for backward is counted
in the first step, when its forward pass has ended: bytes of all storages that autograd holds. Peak memory is
the highest resident set of fresh processes while they make two steps, above what they held before the first
one.
"""

import argparse
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_tools import goal_row
from torch.multiprocessing.reductions import StorageWeakRef
from train_step_cpu import GOAL, SIZES, make_plan, ratios

import pod
from pod.data import PackedDataset, write_packed_rows
from pod.files import read_json, write_json
from pod.measure.machine import environment
from pod.measure.speed_comparison import spread
from pod.training.args import TrainArgs
from pod.training.predict.shapes import shared_qk_heads

RESULTS = Path(__file__).parent / "results" / "train_step_ranks.json"
RANKS = 2
WINDOWS = (16, 240)
SETTINGS = {"dtype": "float32", "sequence_parallel_size": RANKS, "loss_chunk_mib": 16, "save_every_steps": 0}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "pod": {"windows": WINDOWS},
    "pod, shared_qk recomputed": {"windows": WINDOWS, "shared_qk": "recompute"},
}


def make_trainer(name: str, data: Path, folder: Path, mesh: Any) -> Any:
    """The trainer of a contestant; dense = the same model in which every head leads."""
    from pod.training.run.trainer import Trainer

    settings = dict(CONTESTANTS[name])
    windows = settings.pop("windows", None)
    shared = (
        {"lead": make_plan(), "num_sink_tokens": windows[0], "num_recent_tokens": windows[1]}
        if windows
        else {}
    )
    dataset = PackedDataset(data)
    torch.manual_seed(0)
    config = pod.PodConfig(**SIZES, **shared, max_position_embeddings=dataset.context_length)
    args = TrainArgs(max_steps=1000, learning_rate=1e-4, **SETTINGS, **settings)
    return Trainer(args, pod.PodForCausalLM(config), dataset, mesh, folder / name)


class Kept:
    """Storages that autograd keeps for a backward pass."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    def live_bytes(self) -> int:
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def kept_bytes(trainer: Any) -> int:
    """Bytes that this rank keeps for the backward pass of one step."""
    kept, found = Kept(), []
    hook = trainer.engine.module.loss_head.register_forward_pre_hook(
        lambda *a: found.append(kept.live_bytes())
    )
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        trainer.step()
    hook.remove()
    return found[0]


def shared_qk_bound(trainer: Any) -> int:
    """Bytes of the queries and keys of this rank's leads that have followers: (G + 1) x d x n each."""
    if not shared_qk_heads(trainer.ulysses.lead):
        return 0
    groups = trainer.ulysses.groups
    head = (groups + 1) * SIZES["head_dim"] * trainer.dataset.context_length * 4
    return shared_qk_heads(trainer.ulysses.lead) * head


def race(data: Path, folder: Path, mesh: Any, repeats: int) -> dict[str, Any]:
    """Seconds of every contestant, bytes that it sent and kept."""
    trainers = {name: make_trainer(name, data, folder, mesh) for name in CONTESTANTS}
    result: dict[str, Any] = {name: {"wall": [], "processor": []} for name in trainers}
    for name, trainer in trainers.items():  # also warms up
        kept, bound = kept_bytes(trainer), shared_qk_bound(trainer)
        row, sent = result[name], trainer.ulysses.sent_bytes
        row["kept_bytes"], row["carry_bound"] = mesh.sum([kept, bound])
        row["sent_bytes"] = dict(zip(sent, mesh.sum(list(map(float, sent.values()))), strict=True))
    names = list(trainers)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            loss = trainers[name].step()["loss"]
            dist.barrier()
            (processor,) = mesh.sum([time.process_time() - began[1]])
            result[name]["wall"].append(time.perf_counter() - began[0])
            result[name]["processor"].append(processor)
            result[name]["loss"] = loss
    for trainer in trainers.values():
        trainer.batches.close()
    return result


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{field} is missing in /proc/self/status")


def peak(data: Path, folder: Path, mesh: Any, name: str) -> dict[str, float]:
    """Highest resident set of a rank during two steps: all of it, and above the one before them.

    It is that of the larger rank.
    """
    trainer = make_trainer(name, data, folder, mesh)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again
    for _ in range(2):
        trainer.step()
    trainer.batches.close()
    peaks = torch.tensor([resident("VmHWM"), resident("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return dict(zip(("peak_bytes", "step_bytes"), peaks.tolist(), strict=True))


def rank_main(rank: int, port: int, task: str, folder: Path, *arguments: Any) -> None:
    """One rank: `task` is race or peak; rank 0 writes what it returns."""
    addresses = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": RANKS,
        "RANK": rank,
        "LOCAL_RANK": rank,
    }
    os.environ.update({name: str(value) for name, value in addresses.items()})
    torch.set_num_threads(1)
    from pod.training.run.mesh import Mesh, stop_processes

    mesh = Mesh(RANKS)
    result = {"race": race, "peak": peak}[task](folder / "data", folder / task, mesh, *arguments)
    if rank == 0:
        write_json(folder / f"{task}.json", result)
    stop_processes()


def on_ranks(task: str, folder: Path, *arguments: Any) -> Any:
    """What `task` returns on rank 0 of fresh ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(port, task, folder, *arguments), nprocs=RANKS)
    return read_json(folder / f"{task}.json")


def write_rows(folder: Path, tokens: int, rows: int = 4) -> None:
    """Rows of one random document each."""
    generator = np.random.default_rng(0)
    packed = [[generator.integers(0, SIZES["vocab_size"], tokens).astype(np.int32)] for _ in range(rows)]
    write_packed_rows(
        folder, packed, context_length=tokens, vocab_size=SIZES["vocab_size"], tokenizer_sha256="random"
    )


def measure(tokens: int, repeats: int) -> dict[str, Any]:
    """The race at one length, as it is stored."""
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "data", tokens)
        raced = on_ranks("race", Path(folder), repeats)
    dense = dict(raced["dense"])
    for name, row in raced.items():
        row["speed_over_dense"] = ratios(dense["wall"], row["wall"])
        row["processor_speed_over_dense"] = ratios(dense["processor"], row["processor"])
        row["extra_sent_bytes"] = sum(row["sent_bytes"].values()) - sum(dense["sent_bytes"].values())
        if CONTESTANTS[name].get("shared_qk", "keep") == "keep":
            row["kept_over_dense_bytes"] = row["kept_bytes"] - dense["kept_bytes"]
        else:  # its own hooks hide what it keeps from the ones that count
            row["kept_bytes"] = None
        row["wall_seconds"], row["processor_seconds"] = spread(row.pop("wall")), spread(row.pop("processor"))
    return {"length": tokens, "contestants": raced}


def measure_peaks(tokens: int) -> dict[str, Any]:
    """Peak memory of every contestant at one length, over dense."""
    peaks: dict[str, Any] = {}
    for contestant in CONTESTANTS:
        with tempfile.TemporaryDirectory() as name:
            write_rows(Path(name) / "data", tokens)
            peaks[contestant] = on_ranks("peak", Path(name), contestant)
    for row in peaks.values():
        for key in ("peak_bytes", "step_bytes"):
            row[f"{key}_over_dense"] = row[key] / peaks["dense"][key]
    return {"length": tokens, "contestants": peaks}


def rows_of(result: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """The summary."""
    rows, reason = [], "toy sizes" if tiny else None

    def add(title: str, goal: str, figure: float, unit: str, met: bool | None) -> None:
        rows.append(goal_row(title, goal, figure, unit, None if tiny else met, reason))

    for entry in result["lengths"]:
        row, length = entry["contestants"]["pod"], entry["length"]
        speed = row["speed_over_dense"]["median"]
        add(f"steps on {RANKS} CPU ranks, {length} tokens", f">= {GOAL}x", speed, "x dense", speed >= GOAL)
        extra = row["extra_sent_bytes"]
        add(f"all-to-all of sharing, {length} tokens", "0", extra, "bytes more than dense", extra == 0)
        share = row["kept_over_dense_bytes"] / row["carry_bound"]
        add(
            f"shared_qk kept for backward, {length} tokens",
            "0.95 to 1.05",
            share,
            "x bound",
            0.95 <= share <= 1.05,
        )
    for name, row in result.get("peaks", {}).get("contestants", {}).items():
        if name != "dense":
            title = f"peak memory of a step, {name}, {result['peaks']['length']} tokens"
            add(title, "stated", row["step_bytes_over_dense"], "x dense", None)
    return rows


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,4096", help="tokens of a row, comma-separated")
    parser.add_argument(
        "--memory-length", type=int, default=8192, help="tokens at peak memory; 0 = not measured"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="short rows, two rounds: tests the script")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.lengths, arguments.repeats, arguments.memory_length = "320", 2, 320
        if arguments.out == RESULTS:
            arguments.out = RESULTS.with_name("train_step_ranks_tiny.json")
    result: dict[str, Any] = {
        "schema": 1,
        "benchmark": "train_step_ranks",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[0],  # above 0.5: other work took part of the cores
        "model": SIZES,
        "settings": SETTINGS,
        "windows": WINDOWS,
        "share_followers": pod.SharingPlan(lead=tuple(map(tuple, make_plan()))).share_followers,
        "goal": f"steps per second over dense >= {GOAL}; no byte more of all-to-all; "
        "`shared_qk` is all that is kept more",
        "lengths": [],
    }
    for tokens in map(int, arguments.lengths.split(",")):
        result["lengths"].append(measure(tokens, arguments.repeats))
        result["rows"] = rows_of(result, arguments.tiny)
        write_json(arguments.out, result)  # after each length: a long run may be cut short
    if arguments.memory_length:
        result["peaks"] = measure_peaks(arguments.memory_length)
    result["rows"] = rows_of(result, arguments.tiny)
    result["load_average_at_end"] = os.getloadavg()[0]
    write_json(arguments.out, result)
    for row in result["rows"]:
        print(f"{row['name']:60} {row['figure']:.3f} {row['unit']} (goal {row['goal']})")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
