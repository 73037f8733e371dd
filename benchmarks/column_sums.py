"""Statistics of attention on CPU: time over flash prefill of the same queries and keys, peak bytes, growth with length.

    OMP_NUM_THREADS=1 python benchmarks/column_sums.py           # some minutes; writes benchmarks/results/column_sums.json

Contestants take turns in one process; ratios are taken round by round, of the processor time of all threads, which other work
on the machine disturbs least. Peak bytes are what the operation itself holds, its result included, from PyTorch's own record of
allocations. The reference is the plain version with the n x n matrix, up to 8K tokens.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from pod.eval.results import environment
from pod.eval.stats import spread
from pod.files import write_json
from pod.kernels.statistics import attention_column_sums, attention_rows

RESULTS = Path(__file__).parent / "results" / "column_sums.json"
SHAPES = ((1, 1, 64, 1 << 30), (8, 2, 128, 4096))
"""Query heads, KV heads, head size, longest length."""
WINDOW = 64
LONGEST_REFERENCE = 8192


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of causal flash attention, what every prefill pays."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out, lse


def contestants(query_heads: int, kv_heads: int, head_dim: int, length: int) -> dict[str, Callable]:
    """What is timed; `flash prefill` is the peer."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, head_dim, generator=generator)
        for heads in (query_heads, kv_heads, kv_heads)
    )
    lse = flash(q, k, v)[1]
    runs = {
        "flash prefill": lambda: flash(q, k, v),
        "column sums": lambda: attention_column_sums(q, k),
        "column sums, lse given": lambda: attention_column_sums(q, k, lse),
        "column sums and squares": lambda: attention_column_sums(q, k, squares=True),
        f"rows of the last {WINDOW}": lambda: attention_rows(q[:, :, -WINDOW:], k),
    }
    if length <= LONGEST_REFERENCE and query_heads == 1:
        runs["column sums, n x n"] = lambda: attention_column_sums(q, k, backend="reference")
    return runs


def peak_bytes(run: Callable) -> int:
    """Most bytes that were allocated at one time during `run` and not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
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
    """Exponents `x` of `length ** x`, fitted over all lengths: 1 is linear, 2 is square. Time uses the fastest round."""
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


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,4096,8192,16384,32768", help="tokens, comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
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
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


def print_row(row: dict) -> None:
    """One line per contestant."""
    for name, run in row["runs"].items():
        ratio = run["time_over_flash_prefill"]
        print(
            f"  {row['length']:6,} {name:26} {run['seconds']['median']:8.4f} s  "
            f"{ratio['median']:6.2f}x flash ({ratio['min']:.2f}–{ratio['max']:.2f})  {run['peak_bytes'] / 2**20:8.2f} MiB"
        )


if __name__ == "__main__":
    main()
