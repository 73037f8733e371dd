"""How long a training step waits for its rows, with and without reading ahead.

Also what a row costs to write and to read.

    # one minute; writes benchmarks/results/data_wait.json
    OMP_NUM_THREADS=1 python benchmarks/data_wait.py

The step is matrix products that take a fixed time on one core. Its rows come from a data set that is made so
slow that reading a step takes 60 % of the computation: once by waiting (a disk, a network file system), once
by computing (NumPy on another core). The rows themselves are real: packed rows of 131,072 tokens, whose own
cost is measured alone.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from pod.data import PackedDataset, write_packed_rows
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.speed_comparison import spread
from pod.training.args import TrainArgs
from pod.training.run.step_batches import StepBatches

RESULTS = Path(__file__).parent / "results" / "data_wait.json"
CONTEXT, VOCAB, SHARE = 131_072, 49_152, 0.6
STEP_SECONDS = 0.25


class SlowRows:
    """A data set whose rows take `seconds` more than they need."""

    def __init__(self, dataset: PackedDataset, seconds: float, how: str):
        self.dataset, self.seconds, self.how = dataset, seconds, how
        self.numbers = np.random.default_rng(0).random(200_000)

    def rows(self, indices):
        until = time.perf_counter() + self.seconds
        rows = self.dataset.rows(indices)
        if self.how == "waiting":
            time.sleep(max(0.0, until - time.perf_counter()))
        while time.perf_counter() < until:
            np.sort(self.numbers)
        return rows


def write_rows(folder: Path, rows: int) -> dict:
    """Rows of documents of mixed lengths; returns what writing cost."""
    draw = np.random.default_rng(1)
    packed = []
    for _ in range(rows):
        cuts = np.sort(draw.integers(1, CONTEXT - 1, 60))
        lengths = np.diff(np.unique([0, *cuts, CONTEXT - 100]))
        packed.append([draw.integers(0, VOCAB, length).astype(np.uint32) for length in lengths if length])
    began = time.perf_counter()
    write_packed_rows(folder, packed, context_length=CONTEXT, vocab_size=VOCAB, tokenizer_sha256="benchmark")
    seconds = time.perf_counter() - began
    size = sum(file.stat().st_size for file in folder.iterdir())
    tokens = PackedDataset(folder).manifest["num_tokens"]
    return {"million_tokens_per_second": tokens / seconds / 1e6, "bytes_per_token": size / tokens}


def read_rows(dataset: PackedDataset) -> dict:
    """Milliseconds of one row with labels and documents, from files that the system holds in memory."""
    seconds = []
    for index in range(len(dataset)):
        began = time.perf_counter()
        dataset.rows([index])
        seconds.append(1e3 * (time.perf_counter() - began))
    return spread(seconds)


def compute(matrix: torch.Tensor) -> float:
    """Matrix products for STEP_SECONDS; returns the seconds that it took."""
    began = time.perf_counter()
    while time.perf_counter() - began < STEP_SECONDS:
        matrix @ matrix
    return time.perf_counter() - began


def waits(dataset: PackedDataset, how: str, ahead: int, steps: int) -> dict:
    """Share of a step's computation that it waits for data, step by step.

    The first two steps have nothing read ahead.
    """
    matrix = torch.rand(512, 512)
    mesh = SimpleNamespace(dp_rank=0, dp_size=1, device=torch.device("cpu"))
    slow = SlowRows(dataset, SHARE * STEP_SECONDS, how)
    batches = StepBatches(TrainArgs(prefetch_steps=ahead), slow, dataset.cursor(), mesh, slice(None))
    shares = []
    for _ in range(steps + 2):
        batches.next()
        shares.append(batches.prefetcher.waited_s / compute(matrix))
    batches.close()
    return {"prefetch_steps": ahead, "wait_over_compute": spread(shares[2:])}


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "schema": 1,
        "benchmark": "data_wait",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[0],  # above 1: other work took part of the cores
        "context_length": CONTEXT,
        "goal": f"rows that take {SHARE:.0%} of a step are waited for <= 2 % of it",
    }
    with tempfile.TemporaryDirectory() as folder:
        result["write"] = write_rows(Path(folder) / "data", arguments.rows)
        dataset = PackedDataset(Path(folder) / "data")
        result["read_milliseconds_per_row"] = read_rows(dataset)
        print(f"a row of {CONTEXT:,} tokens: {result['read_milliseconds_per_row']['median']:.1f} ms to read")
        print(f"writing: {result['write']['million_tokens_per_second']:.1f} million tokens/s, one process")
        for how in ("waiting", "computing"):
            rows = [waits(dataset, how, ahead, arguments.steps) for ahead in (0, 1, 2)]
            result[how] = rows
            for row in rows:
                share = row["wait_over_compute"]
                print(
                    f"rows by {how:9}, {row['prefetch_steps']} steps ahead: waits "
                    f"{share['median']:6.1%} of a step "
                    f"({share['min']:.1%} to {share['max']:.1%})"
                )
    result["load_average_at_end"] = os.getloadavg()[0]
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
