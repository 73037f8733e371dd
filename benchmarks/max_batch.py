"""Largest batch that fits on one GPU: PoD against the dense cache, both with everything preallocated, by trying.

    python benchmarks/max_batch.py            # LLaMA-3-8B shapes; writes benchmarks/results/gpu/max_batch.json
    python benchmarks/max_batch.py --tiny     # toy sizes on CPU, a budget in bytes in place of a full GPU: tests the script

A prompt of x tokens and 8,192 generated ones: the cache has room for all of them, and one step is decoded at the last length, on
CUDA as a graph, as the decode engine does it. Weights are random and stay in place; everything else is freed between two tries.
A batch fits when that runs without running out of memory; the largest one is found by bisection, both methods in one process.

Batches are whole numbers: 41 and 57 rows are 1.39x where bytes allow 1.41x. So three ratios are given: of the whole batches; of the
rows that would fit if rows could be cut, from the peak bytes of two batches of each method; and the theory 1 / (1 - saving(n)),
which knows the bytes of keys and values only, at n = x + 8192. The verdict is the second over the third.
"""

import argparse
import sys
import time
from typing import Any

import torch
from gpu_tools import DeviceLost, choose_device, finish, goal_row, header, parser, start

from pod.bench import decode_bytes, decode_speed
from pod.bench.args import FULL, SHAPES, BenchMethod, parse_method
from pod.bench.decode_bytes import spread_plan
from pod.measure.max_batch import BatchTries, fractional, largest
from pod.measure.memory import free_memory

SHARE = 0.7
GOAL = 0.97
POD = parse_method("pod")
_TINY_BUDGET = 10_000_000
"""Bytes of weights, caches and buffers that a tiny run may hold."""


class Tries(BatchTries):
    """What one row of the table measures: does a batch of a method fit at `tokens` per row, and with how many bytes.

    Attributes:
        budget: bytes that may be held; None = until CUDA runs out of memory.
    """

    def __init__(self, bench: decode_speed.Bench, method: BenchMethod, tokens: int, budget: int | None):
        super().__init__()
        self.bench, self.method, self.tokens, self.budget = bench, method, tokens, budget

    def _free(self) -> None:
        decode_speed.free(self.bench.device)

    def _peak(self, batch: int) -> int:
        """Peak bytes of a try. Raises: MemoryError beyond the budget, or what CUDA raises."""
        device, cuda = self.bench.device, self.bench.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        model = self.bench.model_of(self.method)
        cache, note = decode_speed.make_cache(model, self.method, self.tokens, self.bench.backend)
        assert note is None, note
        decode_speed.reserve(model, cache, batch, self.tokens - 1)
        cache.engine.greedy(model, torch.zeros(batch, 1, dtype=torch.long, device=device), 1)
        if cuda:
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device)
        held = self.bench.sizes.weights + cache.nbytes
        if self.budget is not None and held > self.budget:
            raise MemoryError(f"{held} bytes, the budget is {self.budget}")
        return held


def measure(bench: decode_speed.Bench, tokens: int, limit: float, budget: int | None) -> dict[str, Any]:
    """Largest batches of both methods at `tokens` per row. limit: bytes that weights, caches and buffers may take."""
    found: dict[str, Any] = {"tokens": tokens, "methods": {}}
    for method in (FULL, POD):
        tries = Tries(bench, method, tokens, budget)
        held = decode_bytes.held_per_row(bench.sizes, method, tokens, bench.device.type == "cpu")
        guess = int((limit - bench.sizes.weights) / held)
        for part in (4, 2):  # two batches that surely fit tell the bytes per row, and so where to look
            tries.fits(max(1, guess // part))
        if len(tries.peaks) > 1:
            guess = int(fractional(tries.peaks, limit))
        batch = largest(tries.fits, guess)
        if batch == 0:
            raise ValueError(f"not one row of {tokens} tokens fits for {method.name}: {tries.failed}")
        rows = fractional(tries.peaks, limit) if len(tries.peaks) > 1 else None
        found["methods"][method.name] = {
            "batch": batch,
            "fractional_batch": rows,
            "bytes_per_row_estimated": held,
            "peak_bytes": tries.peaks,
            "failed": tries.failed,
        }
    full, own = found["methods"]["full"], found["methods"]["pod"]
    sizes, plan = bench.sizes, bench.planned.config.sharing_plan
    found["theory"] = 1 / (1 - plan.saving(tokens, sizes.num_sink_tokens, sizes.num_recent_tokens))
    found["whole_ratio"] = own["batch"] / full["batch"]
    if own["fractional_batch"] and full["fractional_batch"]:
        found["ratio"] = own["fractional_batch"] / full["fractional_batch"]
    return found


def row_of(found: dict[str, Any], prompt: int, generated: int, tiny: bool) -> dict[str, Any]:
    """The summary row of one length."""
    name, goal = f"max batch, {prompt:,} + {generated:,} tokens", f">= {GOAL} of the byte theory"
    if "error" in found or "ratio" not in found:
        reason = found.get("error", "one row at most fits: no second point for the bytes per row")
        return goal_row(name, goal, None, "of the theory", None, reason)
    full, own = (found["methods"][key]["batch"] for key in ("full", "pod"))
    share = found["ratio"] / found["theory"]
    text = (
        f"{own} rows against {full}: {found['whole_ratio']:.3f}x; by bytes per row {found['ratio']:.3f}x, theory "
        f"{found['theory']:.3f}x"
    )
    return goal_row(name, goal, share, "of the theory", None if tiny else share >= GOAL, text)


def make_bench(shape: dict[str, Any], windows: tuple[int, int], dtype: torch.dtype, device: torch.device):
    """Random weights, without and with a plan in which 70 % of the pairs follow."""
    lead = spread_plan(shape["num_hidden_layers"], shape["num_key_value_heads"], SHARE)
    torch.manual_seed(0)
    dense, planned = decode_speed.random_models(shape, lead, windows, 1 << 20, dtype, device)
    return decode_speed.Bench(dense=dense, planned=planned)


def main(arguments: argparse.Namespace) -> int:
    """Measure every length and write the JSON."""
    device, began = choose_device(arguments.tiny), time.monotonic()
    result = header("max_batch", device, arguments.tiny)
    if arguments.tiny:
        shapes, windows, prompts, generated, dtype = "tiny", (4, 60), [32, 128], 128, torch.float32
        budget: int | None = _TINY_BUDGET
    else:
        shapes, windows, prompts, generated = "llama3-8b", (16, 4080), [2048, 4096, 8192, 16384], 8192
        dtype, budget = torch.bfloat16, None
    bench = make_bench(SHAPES[shapes], windows, dtype, device)
    if device.type == "cuda":  # weights are there already
        limit = free_memory(device) + torch.cuda.memory_allocated(device)
    else:
        limit = float(budget or 0)
    result["setting"] = {
        "shapes": shapes,
        "windows": list(windows),
        "generated": generated,
        "share_followers": bench.planned.config.sharing_plan.share_followers,
        "weight_bytes": bench.sizes.weights,
        "limit_bytes": limit,
        "dtype": str(dtype).removeprefix("torch."),
    }
    result["lengths"], result["rows"] = [], []
    for prompt in prompts:
        name, errors, found = f"{prompt} tokens", dict[str, str](), dict[str, Any]()
        if name in arguments.failed:
            errors[name] = arguments.failed[name]
        elif time.monotonic() - began > arguments.budget:
            errors[name] = f"not measured: {arguments.budget:.0f} s had passed"
        else:
            try:
                with decode_speed.recorded(bench, name, errors):
                    found = measure(bench, prompt + generated, limit, budget)
            except decode_speed.DeviceBroken as error:
                raise DeviceLost(name, error.reason) from None
        decode_speed.free(device)
        found = found or {"tokens": prompt + generated, "error": errors[name]}
        result["lengths"].append(found)
        result["rows"].append(row_of(found, prompt, generated, arguments.tiny))
    finish(result, arguments)
    return 0


def read_arguments() -> argparse.Namespace:
    """Command line."""
    words = parser(__doc__, "max_batch")
    words.add_argument(
        "--budget", type=float, default=140.0, help="seconds after which no further length begins"
    )
    return words.parse_args()


if __name__ == "__main__":
    sys.exit(start(main, read_arguments()))
