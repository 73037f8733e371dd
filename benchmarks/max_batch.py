"""Largest batch that fits on one GPU: PoD against the dense cache, by trying.

Both have everything preallocated.

    # LLaMA-3-8B shapes; writes benchmarks/results/gpu/max_batch.json
    python benchmarks/max_batch.py
    # toy sizes on CPU, a limit in bytes in place of a full GPU: tests the script
    python benchmarks/max_batch.py --tiny

A prompt of x tokens and 8,192 generated ones: the cache has room for all of them, and one step is decoded at
the last length, on CUDA as a graph, as the decode engine does it. Weights are random and stay in place.
`pod.measure.max_batch` searches.

Batches are whole numbers: 41 and 57 rows are 1.39x where bytes allow 1.41x. So three ratios are given: of the
whole batches; of the rows that would fit if rows could be cut, from the peak bytes of two batches of each
method; and the theory 1 / (1 - saving(n)), which knows the bytes of keys and values only, at n = x + 8192.
The verdict is the second over the third.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from gpu_tools import DeviceLost, choose_device, finish, goal_row, header, is_lost, parser, start

from pod.bench.args import FULL, bench_method
from pod.bench.decode_speed import Bench, make_cache
from pod.bench.run import load, plan_bench
from pod.errors import one_line
from pod.eval.answer.methods import EvaluatedMethod
from pod.measure.max_batch import Tries, search
from pod.modeling.placement import free_unused
from pod.recipe import load_recipe

GOAL = 0.97
POD = bench_method("pod")
MOST_ROWS = 4096
TINY = (
    *("bench.shapes=tiny", "model.dtype=float32", "model.num_sink_tokens=4", "model.num_recent_tokens=60"),
)
_TINY_LIMIT = 10_000_000
"""Bytes of weights, caches and buffers that a tiny run may hold."""


class RoomTries(Tries):
    """Does a batch of a method fit at `tokens` per row: its room is allocated, then one token decoded."""

    def __init__(self, bench: Bench, method: EvaluatedMethod, tokens: int, limit: int | None):
        new = lambda: make_cache(bench, method, tokens, tokens)[0]  # noqa: E731
        super().__init__(bench.model_of(method), new, tokens, 1, limit)

    def _passes(self, cache: Any, token: torch.Tensor) -> Iterator[None]:
        reserve(self.model, cache, len(token), self.prompt - 1)
        cache.engine.greedy(self.model, token[:, :1].contiguous(), 1)
        yield


@torch.no_grad()
def reserve(model: Any, cache: Any, batch: int, length: int) -> None:
    """Let a cache say that it holds `length` tokens per row.

    The room that it reserved is allocated, and no more.
    """
    model(input_ids=torch.zeros(batch, 1, dtype=torch.long, device=model.device), past_key_values=cache)
    hidden_states = model.lm_head.weight.new_empty(batch, length - 1, 0)
    step, _ = cache.begin_step(model.config, hidden_states, None, None)
    cache.end_step(step)


def measure(bench: Bench, tokens: int, limit: int | None) -> dict[str, Any]:
    """Largest batches of both methods at `tokens` per row."""
    methods = {}
    for method in (FULL, POD):
        tries = RoomTries(bench, method, tokens, limit)
        methods[method.name] = search(tries, MOST_ROWS)
        free_unused(bench.device)
        if not methods[method.name]["batch"]:
            raise ValueError(f"not one row of {tokens} tokens fits for {method.name}: {tries.failed}")
    full, own = methods.values()
    found = {"tokens": tokens, "methods": methods, "whole_ratio": own["batch"] / full["batch"]}
    found["theory"] = 1 / (1 - bench.sizes.plan.saving(tokens, *bench.sizes.windows[0]))
    if own["fractional_batch"] and full["fractional_batch"]:
        found["ratio"] = own["fractional_batch"] / full["fractional_batch"]
    return found


def row_of(found: dict[str, Any], prompt: int, generated: int, tiny: bool) -> dict[str, Any]:
    """The summary row of one length."""
    name, goal = f"max batch, {prompt:,} + {generated:,} tokens", f">= {GOAL} of the byte theory"
    if "ratio" not in found:
        reason = found.get("error", "one row at most fits: no second point for the bytes per row")
        return goal_row(name, goal, None, "of the theory", None, reason)
    full, own = (found["methods"][key]["batch"] for key in ("full", "pod"))
    share = found["ratio"] / found["theory"]
    text = (
        f"{own} rows against {full}: {found['whole_ratio']:.3f}x; by bytes per row "
        f"{found['ratio']:.3f}x, theory "
        f"{found['theory']:.3f}x"
    )
    return goal_row(name, goal, share, "of the theory", None if tiny else share >= GOAL, text)


def tried(bench: Bench, tokens: int, limit: int | None) -> dict[str, Any]:
    """As `measure`, or the error. Raises: DeviceLost."""
    try:
        return measure(bench, tokens, limit)
    except Exception as error:  # noqa: BLE001 - drivers raise anything; the other lengths go on
        found = {"tokens": tokens, "error": one_line(error, with_class=True, limit=400)}
    if is_lost(bench.device):
        raise DeviceLost(f"{tokens} tokens", found["error"])
    return found


def main(arguments: argparse.Namespace) -> int:
    """Measure every length and write the JSON."""
    device, began = choose_device(arguments.tiny), time.monotonic()
    recipe = load_recipe("bench_llama3_8b", ["bench.stock=false", *(TINY if arguments.tiny else ())])
    prompts, generated = ([32, 128], 128) if arguments.tiny else ([2048, 4096, 8192, 16384], 8192)
    limit = _TINY_LIMIT if arguments.tiny else None
    bench_plan = plan_bench(recipe)
    bench = load(recipe, bench_plan, [device])
    result = header("max_batch", device, arguments.tiny)
    result |= {
        "shapes": recipe.bench.shapes,
        "plan": bench_plan.plan_source,
        "generated": generated,
        "lengths": [],
        "rows": [],
    }
    for prompt in prompts:
        tokens = prompt + generated
        if f"{tokens} tokens" in arguments.failed:
            found = {"tokens": tokens, "error": arguments.failed[f"{tokens} tokens"]}
        elif time.monotonic() - began > arguments.budget:
            found = {"tokens": tokens, "error": f"not measured: {arguments.budget:.0f} s had passed"}
        else:
            found = tried(bench, tokens, limit)
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
