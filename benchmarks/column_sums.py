"""Statistics of attention: time over flash prefill of the same queries and keys.

Also peak bytes, and growth with length.

    # some minutes; writes benchmarks/results/column_sums.json
    OMP_NUM_THREADS=1 python benchmarks/column_sums.py
    # 128K on one GPU; writes benchmarks/results/gpu/column_sums.json
    python benchmarks/column_sums.py --gpu

Contestants take turns in one process; ratios are taken round by round, of the processor time of all threads,
which other work on the machine disturbs least. Peak bytes are what the operation itself holds, its result
included, from PyTorch's own record of allocations. The plain version holds the n x n matrix, up to 8K tokens.

On the GPU one layer of 32 query and 8 KV heads of 128 in bf16 is measured by CUDA events. The peer is the
fastest dense attention, forward only, which is less than the layer's whole prefill; the row is the sums as
the methods ask for them, without a given log-sum-exp. They must first agree with the plain version in fp64.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from attention_gpu import HEAD_DIM, KV_HEADS, QUERY_HEADS, dense_makers, make_inputs
from gpu_tools import (
    Race,
    choose_device,
    finish,
    goal_row,
    header,
    parser,
    ratios,
    relative_error,
    start,
)
from torch.profiler import ProfilerActivity, profile

from pod.files import write_json
from pod.kernels.statistics import attention_column_sums, attention_rows
from pod.measure.machine import environment
from pod.measure.speed_comparison import spread

RESULTS = Path(__file__).parent / "results" / "column_sums.json"
SHAPES = ((1, 1, 64, 1 << 30), (8, 2, 128, 4096))
"""Query heads, KV heads, head size, longest length."""
WINDOW = 64
LONGEST_PLAIN = 8192
GPU_LENGTH, GPU_GOAL = 131072, 1.0
GPU_ERROR_LIMIT = 1e-3
"""Relative error of the sums, for inputs that are already rounded to bf16."""


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of causal flash attention, what every prefill pays."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)


def contestants(query_heads: int, kv_heads: int, head_dim: int, length: int) -> dict[str, Callable]:
    """What is timed; `flash prefill` is the peer."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, head_dim, generator=generator)
        for heads in (query_heads, kv_heads, kv_heads)
    )
    runs = {
        "flash prefill": lambda: flash(q, k, v),
        "column sums": lambda: attention_column_sums(q, k),
        "column sums and squares": lambda: attention_column_sums(q, k, squares=True),
        f"rows of the last {WINDOW}": lambda: attention_rows(q[:, :, -WINDOW:], k),
    }
    if length <= LONGEST_PLAIN and query_heads == 1:
        runs["column sums, n x n"] = lambda: plain_sums(q, k)
    return runs


def plain_sums(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Column sums by the whole matrix of causal attention."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    hidden = torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill_(hidden, float("-inf")).softmax(-1).sum(2)


def peak_bytes(run: Callable) -> int:
    """Most bytes that were allocated at one time during `run` and not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    found = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = [e for e in found if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return int(np.max(np.cumsum([e.nbytes() for e in events])))


def measure(runs: dict[str, Callable], repeats: int) -> dict[str, dict]:
    """Processor seconds, ratio to flash prefill and peak bytes of every contestant."""
    seconds = {name: [] for name in runs}
    peaks = {name: peak_bytes(run) for name, run in runs.items()}  # also warms up
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    peer = seconds["flash prefill"]
    return {
        name: {
            "seconds": spread(seconds[name]),
            "time_over_flash_prefill": spread([a / b for a, b in zip(seconds[name], peer, strict=True)]),
            "peak_bytes": peaks[name],
        }
        for name in runs
    }


def growth(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Exponents `x` of `length ** x`, fitted over all lengths: 1 is linear, 2 is square.

    Time uses the fastest round.
    """
    result = {}
    for name in rows[0]["runs"]:
        kept = [(row["length"], row["runs"][name]) for row in rows if name in row["runs"]]
        if len(kept) < 2:
            continue
        lengths = np.log([length for length, _ in kept])
        result[name] = {
            "bytes": float(np.polyfit(lengths, np.log([run["peak_bytes"] for _, run in kept]), 1)[0]),
            "seconds": float(np.polyfit(lengths, np.log([run["seconds"]["min"] for _, run in kept]), 1)[0]),
        }
    return result


def gpu_contestants(race: Race, n: int, tiny: bool, dtype: torch.dtype) -> float:
    """Enter dense forward passes and the statistics; returns the error of the sums."""
    (q, k, v), _ = make_inputs((QUERY_HEADS, KV_HEADS, n, HEAD_DIM), 0, dtype, race.device)
    q, k, v = (x.detach() for x in (q, k, v))
    for name, make in dense_makers(n, tiny, dtype, race.device).items():
        race.add(f"dense: {name}", lambda make=make: without_gradients(make(), q, k, v))
    runs = {
        "column sums": lambda: attention_column_sums(q, k),
        "with squares": lambda: attention_column_sums(q, k, squares=True),
        f"rows of the last {WINDOW}": lambda: attention_rows(q[:, :, -WINDOW:], k),
    }
    error = gpu_error(dtype, race.device)
    for name, run in runs.items():
        race.add(name, lambda run=run: lambda mark: run())
    return error


def without_gradients(attention: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable:
    """The forward pass as a contestant."""

    def run(mark: Callable[[], None]) -> torch.Tensor:
        with torch.no_grad():
            return attention(q, k, v)

    return run


def gpu_error(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of the sums against the plain version in fp64; ValueError when it is too large."""
    (q, k, _), _ = make_inputs((2 * KV_HEADS, KV_HEADS, 1000, HEAD_DIM), 0, dtype, device)
    q, k = q.detach(), k.detach()
    error = relative_error(attention_column_sums(q, k), plain_sums(q.double(), k.double()))
    if error > GPU_ERROR_LIMIT:
        raise ValueError(f"wrong results, relative error {error:.2e}, at most {GPU_ERROR_LIMIT}")
    return error


def gpu_report(race: Race, n: int, error: float) -> dict:
    """Seconds, ratios to the fastest dense forward pass, bytes held."""
    contestants = {name: race.summary(name) for name in [*race.seconds, *race.errors]}
    dense = [name for name in race.seconds if name.startswith("dense: ")]
    fastest = min(dense, key=lambda name: contestants[name]["seconds"]["median"], default=None)
    for name in race.seconds:
        row = contestants[name]
        row["peak_bytes"] = race.extra_bytes(name, beyond_results=False)
        if fastest is not None:
            row["over_fastest_dense"] = ratios(race.totals(name), race.totals(fastest))
        ratio = row.get("over_fastest_dense", {"median": float("nan")})["median"]
        held = (row["peak_bytes"] or 0) / 2**20
        print(
            f"  {name:32} {1000 * row['seconds']['median']:9.2f} ms  {ratio:6.3f}x dense forward  "
            f"{held:9.1f} MiB"
        )
    return {"length": n, "fastest_dense": fastest, "relative_error": error, "contestants": contestants}


def gpu_rows(found: dict, tiny: bool) -> list[dict]:
    """The summary's row: column sums without a given log-sum-exp."""
    name, goal = f"column sums, {found['length']:,} tokens", f"<= {GPU_GOAL} x dense attention forward"
    ratio = found["contestants"]["column sums"].get("over_fastest_dense")
    if ratio is None:
        return [
            goal_row(name, goal, None, "x dense", None, "nothing to compare; see the contestants' errors")
        ]
    note = f"against {found['fastest_dense'].removeprefix('dense: ')}"
    met = None if tiny else ratio["median"] <= GPU_GOAL
    return [goal_row(name, goal, ratio["median"], "x dense", met, note)]


def main_gpu(arguments: argparse.Namespace) -> int:
    """The row on a GPU."""
    device = choose_device(arguments.tiny)
    n, dtype, rounds = (128, torch.float32, 2) if arguments.tiny else (GPU_LENGTH, torch.bfloat16, 7)
    race = Race(device, f"{n} tokens", arguments.failed)
    error = gpu_contestants(race, n, arguments.tiny, dtype)
    race.run(rounds, budget=30.0)
    result = header("column_sums", device, arguments.tiny)
    result["setting"] = {
        "query_heads": QUERY_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "window": WINDOW,
    }
    found = gpu_report(race, n, error)
    result["lengths"], result["rows"] = [found], gpu_rows(found, arguments.tiny)
    finish(result, arguments)
    return 0


def main_cpu(arguments: argparse.Namespace) -> int:
    """All shapes and lengths on CPU."""
    result = {
        "schema": 1,
        "benchmark": "column_sums",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[0],  # above 1: other work took part of the cores
        "dtype": "float32",
        "window": WINDOW,
        "shapes": [],
    }
    for query_heads, kv_heads, head_dim, longest in SHAPES:
        print(f"{query_heads} query heads, {kv_heads} KV heads of {head_dim}")
        rows = []
        for length in map(int, arguments.lengths.split(",")):
            if length <= longest:
                runs = contestants(query_heads, kv_heads, head_dim, length)
                rows.append({"length": length, "runs": measure(runs, arguments.repeats)})
                print_row(rows[-1])
        shape = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim, "lengths": rows}
        shape["growth_exponents"] = growth(rows) if rows else {}
        result["shapes"].append(shape)
        for name, exponents in shape["growth_exponents"].items():
            print(f"  growth {name:26} bytes n^{exponents['bytes']:.2f}  time n^{exponents['seconds']:.2f}")
    write_json(arguments.out or RESULTS, result)
    print(f"wrote {arguments.out or RESULTS}")
    return 0


def print_row(row: dict) -> None:
    """One line per contestant."""
    for name, run in row["runs"].items():
        ratio = run["time_over_flash_prefill"]
        print(
            f"  {row['length']:6,} {name:26} {run['seconds']['median']:8.4f} s  "
            f"{ratio['median']:6.2f}x flash ({ratio['min']:.2f}–{ratio['max']:.2f})  "
            f"{run['peak_bytes'] / 2**20:8.2f} MiB"
        )


def read_arguments() -> argparse.Namespace:
    """Command line."""
    words = parser(__doc__, "column_sums")
    words.add_argument("--gpu", action="store_true", help=f"{GPU_LENGTH:,} tokens on one GPU")
    words.add_argument(
        "--lengths", default="2048,4096,8192,16384,32768", help="tokens on CPU, comma-separated"
    )
    words.add_argument("--repeats", type=int, default=3, help="timed rounds on CPU")
    return words.parse_args()


if __name__ == "__main__":
    chosen = read_arguments()
    sys.exit(start(main_gpu if chosen.gpu or chosen.tiny else main_cpu, chosen))
