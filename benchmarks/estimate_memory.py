"""The memory estimate of pod.training.predict against what training steps really hold, on CPU.

    # all configurations; writes benchmarks/results/estimate_memory.json
    python benchmarks/estimate_memory.py
    python benchmarks/estimate_memory.py --only pod_keep       # some of them, by name
    # today's estimate against the recorded measurements
    python benchmarks/estimate_memory.py --again
    python benchmarks/estimate_memory.py --largest 12          # and the 12 largest tensors at each peak

Method: every rank is a process of its own that builds the trainer of the product and makes four optimizer
steps. The bytes of all tensors that operations made and that live are counted, each storage once, from the
start of the process; the peak is that of the last two steps, of the rank that holds most. Not counted, and
not estimated either: what a library's kernel takes and gives back inside one operation, the allocator's
slack, code. Copies that stand for host memory (offloading) count on their own side.

The model is random, of 6 layers and 256 hidden, in float32 and bfloat16; DeepSpeed's buckets are made as
small as the model (the defaults of 200 MB would be most of it and hide every error of the rest).
"""

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from longest_sequence import LiveBytes, make_plan

import pod
from pod.data import PackedDataset, write_packed_rows
from pod.errors import one_line
from pod.files import write_json
from pod.measure.machine import environment
from pod.training.args import TrainArgs
from pod.training.predict.memory_estimate import TrainingJob, World, host_bytes, training_bytes
from pod.training.predict.shapes import Shapes
from pod.training.run import optimization, shared_qk

BUCKET_ELEMENTS = 200_000
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_sink_tokens": 16,
    "num_recent_tokens": 240,
}
SHARE_NON_LEAD = 0.5
ROLES = [
    [0, None, 0, None],
    [None, 1, 0, None],
    [0, 1, None, 2],
    [None, 1, 3, None],
    [4, None, None, None],
    [4, None, 3, 5],
]
"""Leads, followers and windows, some of which stand between the layers of a block."""
GOAL = 0.1


@dataclass(frozen=True)
class Case:
    """One configuration.

    Ranks, layout (dense, pod, roles, cla, window), context in tokens, settings of section `train`.
    """

    name: str
    ranks: int = 1
    layout: str = "pod"
    context: int = 2048
    train: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    vocab: int = 4096


CASES = [
    Case("pod_keep"),
    Case("dense_keep", layout="dense"),
    Case("cla_keep", layout="cla"),
    Case("window_keep", layout="window"),
    Case("pod_no_checkpoints", context=1024, train={"gradient_checkpointing": "none"}),
    Case("pod_offload_carry", context=4096, train={"shared_qk": "offload"}),
    Case("pod_recompute_carry", context=4096, train={"shared_qk": "recompute"}),
    Case("pod_tiles", context=4096, train={"mlp_tile_tokens": 512}),
    Case("pod_lora", train={"method": "lora"}),
    Case("pod_lora_no_checkpoints", context=1024, train={"method": "lora", "gradient_checkpointing": "none"}),
    Case("pod_distilled", train={"method": "lora", "distill": 1.0}),
    Case(
        "pod_distilled_wide_head",
        ranks=2,
        train={"dtype": "bfloat16", "method": "lora", "distill": 1.0},
        context=512,
        vocab=65_536,
    ),
    Case("pod_matched", train={"method": "lora", "distill": 1.0, "distill_attention": 10.0}),
    Case(
        "pod_matched_no_checkpoints",
        context=1024,
        train={
            "method": "lora",
            "distill": 1.0,
            "distill_attention": 10.0,
            "gradient_checkpointing": "none",
        },
    ),
    Case("pod_zero1", train={"zero_stage": 1}),
    Case("pod_zero1_2ranks", ranks=2, train={"zero_stage": 1}),
    Case("pod_zero2_2ranks", ranks=2, train={"zero_stage": 2}),
    Case("pod_zero3_2ranks", ranks=2),
    Case("pod_sp2", ranks=2, context=4096, train={"sequence_parallel_size": 2}),
    Case("pod_sp2_dp2", ranks=4, context=2048, train={"sequence_parallel_size": 2}),
    Case(
        "dense_sp2_lora",
        ranks=2,
        layout="dense",
        context=4096,
        train={"sequence_parallel_size": 2, "method": "lora"},
    ),
    Case("pod_bfloat16", context=4096, train={"dtype": "bfloat16"}),
    Case("pod_bfloat16_2ranks", ranks=2, train={"dtype": "bfloat16"}),
    Case(
        "pod_micro_batch",
        train={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
        context=1024,
        tied=True,
    ),
    Case("pod_bfloat16_zero1_2ranks", ranks=2, train={"dtype": "bfloat16", "zero_stage": 1}),
    Case("pod_bfloat16_zero2_2ranks", ranks=2, train={"dtype": "bfloat16", "zero_stage": 2}),
    Case("pod_bfloat16_wide_head", ranks=2, train={"dtype": "bfloat16"}, context=512, vocab=65_536),
    Case(
        "pod_zero1_accumulation",
        ranks=2,
        train={"dtype": "bfloat16", "zero_stage": 1, "gradient_accumulation_steps": 2},
    ),
    Case(
        "pod_bfloat16_lora_sp2_dp2",
        ranks=4,
        train={"dtype": "bfloat16", "sequence_parallel_size": 2, "method": "lora"},
    ),
    Case("pod_optimizer_on_host", ranks=2, train={"offload_optimizer": "cpu"}),
    Case("pod_checkpoints_on_host", context=4096, train={"offload_checkpoints": True}),
    Case("roles_keep", layout="roles"),
    Case("roles_offload_carry", layout="roles", context=4096, train={"shared_qk": "offload"}),
    Case("roles_recompute_carry", layout="roles", context=4096, train={"shared_qk": "recompute"}),
    Case("roles_no_checkpoints", layout="roles", context=1024, train={"gradient_checkpointing": "none"}),
    Case("roles_sp2", ranks=2, layout="roles", context=4096, train={"sequence_parallel_size": 2}),
]


def model_config(case: Case) -> pod.PodConfig:
    """The configuration of a case."""
    options: dict[str, Any] = {
        **SIZE,
        "vocab_size": case.vocab,
        "tie_word_embeddings": case.tied,
        "max_position_embeddings": 2**16,
    }
    if case.layout == "pod":
        options["lead"] = make_plan(SIZE["num_hidden_layers"], SIZE["num_key_value_heads"], SHARE_NON_LEAD)
    elif case.layout == "roles":
        options["lead"] = ROLES
    elif case.layout == "window":
        options |= {"layout": "window", "num_sink_tokens": 0, "num_recent_tokens": 256}
    elif case.layout == "cla":
        options |= {"layout": "cla"}
    return pod.PodConfig(**options)


def train_args(case: Case) -> TrainArgs:
    """Section `train` of a case."""
    settings = {"dtype": "float32", "loss_chunk_mib": 4, "save_every_steps": 0, "max_steps": 4}
    return TrainArgs(**settings | case.train)  # type: ignore[arg-type]


def make_data(folder: Path, case: Case) -> Path:
    """Packed rows of one document each."""
    draw = np.random.default_rng(0)
    rows = [[draw.integers(0, case.vocab, case.context).astype(np.int32)] for _ in range(32)]
    write_packed_rows(
        folder, rows, context_length=case.context, vocab_size=case.vocab, tokenizer_sha256="random"
    )
    return folder


class Counted(LiveBytes):
    """Live bytes with a reset, and on request the largest tensors at the peak."""

    def __init__(self, largest: int = 0) -> None:
        super().__init__()
        self.largest, self.at_peak = largest, []
        self.shapes: dict[int, str] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.largest:
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    key = leaf.untyped_storage()._cdata
                    text = f"{func} {list(leaf.shape)} {str(leaf.dtype)[6:]}"
                    if leaf.numel() * leaf.element_size() == leaf.untyped_storage().nbytes():
                        self.shapes[key] = text
            if self.peak > before:
                sizes = sorted(((size, key) for key, (_, size) in self.live.items()), reverse=True)[
                    : self.largest
                ]
                self.at_peak = [f"{size / 2**20:8.2f} MiB {self.shapes.get(key, '?')}" for size, key in sizes]
                self.at_peak.append(f"peak in {func}")
        return result

    def restart(self) -> None:
        """The peak counts from now on."""
        self._forget_dead()
        self.peak = self.now


def small_buckets() -> None:
    """DeepSpeed's buckets as small as the model; the estimate reads the engine's."""
    optimization.REDUCE_BUCKET_ELEMENTS = BUCKET_ELEMENTS
    optimization.PREFETCH_ELEMENTS = BUCKET_ELEMENTS


def measure_rank(case: Case, rank: int, port: int, folder: Path, largest: int, pipe: Any) -> None:
    """Body of one rank's process: peak bytes of steps 3 and 4 into the pipe."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    from pod.training.run.mesh import Mesh, stop_processes
    from pod.training.run.trainer import Trainer

    small_buckets()
    args = train_args(case)
    mesh = Mesh(args.sequence_parallel_size)
    try:
        with Counted(largest) as live, host_side(live):
            torch.manual_seed(0)
            model = pod.PodForCausalLM(model_config(case))
            data = PackedDataset(folder / "data")
            trainer = Trainer(args, model, data, mesh, folder / "train")
            for _ in range(2):
                trainer.step()
            live.restart()
            at_rest = live.now
            for _ in range(2):
                trainer.step()
        pipe.send({"peak": live.peak, "at_rest": at_rest, "largest": live.at_peak})
        trainer.batches.close()
        stop_processes()
    except Exception as error:  # noqa: BLE001  the parent reports it
        if os.environ.get("POD_TRACEBACK"):
            import traceback

            traceback.print_exc()
        pipe.send({"failed": one_line(error, with_class=True, limit=300)})


@contextmanager
def host_side(live: Counted):
    """Copies that offloading makes are host memory."""
    original = shared_qk.KeptSharedQK.__init__

    def init(self, offload_inputs=False):
        original(self, offload_inputs)
        self.to_host = live.host(shared_qk.host_copy)

    shared_qk.KeptSharedQK.__init__ = init  # of this process alone
    yield


def measure(case: Case, largest: int = 0) -> dict[str, Any]:
    """Peak of the rank that holds most, in bytes; every rank is a forked process."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        folder = Path(name)
        make_data(folder / "data", case)
        pipes, children = [], []
        for rank in range(case.ranks):
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(target=measure_rank, args=(case, rank, port, folder, largest, theirs))
            child.start()
            theirs.close()
            pipes.append(mine)
            children.append(child)
        results = [answer(pipe) for pipe in pipes]
        for child in children:
            child.join(10)
            child.kill()
    failed = [result for result in results if "failed" in result]
    return failed[0] if failed else max(results, key=lambda result: result["peak"])


def answer(pipe: Any) -> dict[str, Any]:
    """What a rank sent, within 5 minutes."""
    try:
        return pipe.recv() if pipe.poll(3600) else {"failed": "no answer in an hour"}
    except EOFError:
        return {"failed": "the process ended"}


def estimated(case: Case) -> dict[str, int]:
    """The estimate of a case, by part.

    An optimizer in host memory cannot be told from the device's on a CPU: it counts too.
    """
    small_buckets()
    config, args = model_config(case), train_args(case)
    world = World(case.ranks, case.ranks)
    job = TrainingJob(Shapes.from_config(config), config.sharing_plan.lead, args, case.context, world)
    parts = training_bytes(job)
    if args.offload_optimizer == "cpu":
        parts["host optimizer"] = host_bytes(job)["optimizer"]
    return parts


def compare(case: Case, largest: int = 0) -> dict[str, Any]:
    """Measured and estimated bytes of one case."""
    parts = estimated(case)
    result = measure(case, largest)
    row = {
        "name": case.name,
        "ranks": case.ranks,
        "layout": case.layout,
        "context": case.context,
        "train": case.train,
    }
    row |= {"estimated_bytes": sum(parts.values()), "parts": parts}
    if "failed" in result:
        return row | {"failed": result["failed"]}
    ratio = sum(parts.values()) / result["peak"]
    return (
        row
        | {"measured_bytes": result["peak"], "at_rest_bytes": result["at_rest"], "ratio": ratio}
        | ({"largest": result["largest"]} if largest else {})
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="names of configurations; default all")
    parser.add_argument(
        "--largest", type=int, default=0, help="print so many of the largest tensors at each peak"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "estimate_memory.json"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure only what the result file lacks, estimate all"
    )
    options = parser.parse_args()
    import deepspeed  # noqa: F401  imported once, before ranks are forked
    import peft  # noqa: F401

    import pod.training.run.trainer  # noqa: F401

    known = read_rows(options.out)
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        if options.again and "measured_bytes" in known.get(case.name, {}):
            known[case.name] = against(case, known[case.name])
        else:
            known[case.name] = compare(case, options.largest)
        show(known[case.name], options.largest)
        write(options.out, known)
    rows = [row for row in known.values() if "ratio" in row]
    worst = worst_error(rows)
    print(f"{len(rows)} configurations, worst error {100 * worst:.1f} %")
    sys.exit(0 if worst <= GOAL else 1)


def against(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """A recorded measurement with the estimate of today."""
    parts = estimated(case)
    total = sum(parts.values())
    return row | {
        "train": case.train,
        "estimated_bytes": total,
        "parts": parts,
        "ratio": total / row["measured_bytes"],
    }


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run by name; what is measured now replaces its own row only."""
    if not path.is_file():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def worst_error(rows: list[dict[str, Any]]) -> float:
    return max((abs(row["ratio"] - 1) for row in rows), default=0.0)


def show(row: dict[str, Any], largest: int) -> None:
    mib = 2**20
    if "failed" in row:
        print(
            f"{row['name']:<26} {row['estimated_bytes'] / mib:8.1f} MiB estimated; failed: {row['failed']}",
            flush=True,
        )
        return
    print(
        f"{row['name']:<26} {row['measured_bytes'] / mib:8.1f} MiB measured "
        f"{row['estimated_bytes'] / mib:8.1f} estimated "
        f"{row['ratio']:6.3f}  at rest {row['at_rest_bytes'] / mib:7.1f}",
        flush=True,
    )
    if largest:
        print("\n".join(row["largest"]), json.dumps(row["parts"]), sep="\n")


def write(path: Path, known: dict[str, dict[str, Any]]) -> None:
    rows = [known[case.name] for case in CASES if case.name in known]
    result = {"schema": 1, "benchmark": "estimate_memory", "environment": environment(), "goal": GOAL}
    result |= {
        "bucket_elements": BUCKET_ELEMENTS,
        "worst_error": worst_error([row for row in rows if "ratio" in row]),
    }
    write_json(path, result | {"rows": rows})


if __name__ == "__main__":
    main()
