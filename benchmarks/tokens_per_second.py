"""Tokens per second end to end on one GPU, and the byte ceiling.

PoD is held against the dense cache through the same decode engine.

    # LLaMA-3-8B shapes, 128K; writes benchmarks/results/gpu/tokens_per_second.json
    python benchmarks/tokens_per_second.py --batch 4
    python benchmarks/tokens_per_second.py --tiny     # toy sizes on CPU: tests the script

What `pod bench --config bench_llama3_8b` measures, a method at a time, with rows for the summary. The verdict
is about `pod`, the other methods are stated.
"""

import argparse
import sys
import time
from typing import Any

from gpu_tools import DeviceLost, choose_device, finish, goal_row, header, is_lost, parser, start

from pod.bench.args import STOCK, EvaluatedMethod
from pod.bench.decode_bytes import needed
from pod.bench.decode_speed import Bench, compare
from pod.bench.dense_decode import dense_peers
from pod.bench.run import load, plan_bench, table
from pod.errors import one_line
from pod.measure.measured_memory import free_memory
from pod.recipe import Recipe, load_recipe

LENGTH, GOAL = 131_072, 0.95
TINY = (
    *("bench.shapes=tiny", "model.dtype=float32", "model.num_sink_tokens=4", "model.num_recent_tokens=60"),
    *("bench.steps=2", "bench.repeats=2", "bench.methods=pod,pod[tau=0.7],pod+int4[group_size=16]"),
)


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """One length and batch size."""
    length = 192 if arguments.tiny else LENGTH
    changes = [f"bench.lengths={length}", f"bench.batch_sizes={arguments.batch}", "bench.repeats=7"]
    return load_recipe("bench_llama3_8b", [*changes, *(TINY if arguments.tiny else ())])


def measure(
    bench: Bench, method: EvaluatedMethod, batch: int, length: int, backend: str | None
) -> dict[str, Any]:
    """Speeds of one method and of the dense cache with its backend, or the error. Raises: DeviceLost."""
    size = needed(bench.sizes, method, batch, bench.args.capacity_for(length), bench.device.type == "cpu")
    free = free_memory(bench.device) + bench.sizes.weights
    if size > free:
        return {"error": f"needs {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are there"}
    try:
        found = compare(bench, [method], batch, length, backend)
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything; the others go on
        found = {"error": one_line(error, with_class=True, limit=400)}
    if "error" not in found:
        print(table(found))
        found = {"full_backend": found["full"], **found["methods"][method.name]}
    if "error" in found and is_lost(bench.device):
        raise DeviceLost(method.name, found["error"])
    return found


def row_of(what: str, name: str, found: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """The summary's row of a method.

    For `pod` it has the share of the byte ceiling that it reached, for others the speed over dense.
    """
    title = f"{what}, {name}"
    judged = name == "pod"
    goal, unit = (f">= {GOAL} of the byte ceiling", "of the ceiling") if judged else ("stated", "x dense")
    if "error" in found:
        return goal_row(title, goal, None, unit, None, found["error"])
    speed, limit = found["speed_over_full"]["median"], found.get("byte_ceiling")
    text = f"{speed:.3f}x dense by {found['full_backend']['backend']}" + (
        f", ceiling {limit:.3f}x" if limit else ""
    )
    text += f"; {found['tokens_per_second']['median']:.2f} tokens/s" + (
        f"; {found['note']}" if found["note"] else ""
    )
    if not judged:
        return goal_row(title, goal, speed, unit, None, text)
    share = found["share_of_ceiling"]
    return goal_row(title, goal, share, unit, None if tiny else share >= GOAL, text)


def main(arguments: argparse.Namespace) -> int:
    """Measure every method and write the JSON."""
    device, began = choose_device(arguments.tiny), time.monotonic()
    recipe = recipe_of(arguments)
    batch, length = recipe.bench.batch_sizes[0], recipe.bench.lengths[0]
    result = header("tokens_per_second", device, arguments.tiny)
    result |= {"batch": batch, "length": length, "methods": {}, "rows": []}
    bench_plan = plan_bench(recipe)
    result["plan"] = bench_plan.plan_source
    bench = load(recipe, bench_plan, [device])
    what = f"tokens/s, {recipe.bench.shapes}, {length:,} tokens, batch {batch}"
    backend = None
    with dense_peers():
        for method in [*recipe.bench.raced_methods, STOCK]:
            if method.name in arguments.failed:
                found = {"error": arguments.failed[method.name]}
            elif time.monotonic() - began > arguments.budget:
                found = {"error": f"not measured: {arguments.budget:.0f} s had passed"}
            else:
                found = measure(bench, method, batch, length, backend)
                backend = (
                    found["full_backend"]["backend"] if "full_backend" in found else backend
                )  # found once
            result["methods"][method.name] = found
            result["rows"].append(row_of(what, method.name, found, arguments.tiny))
    finish(result, arguments)
    return 0


def read_arguments() -> argparse.Namespace:
    """Command line."""
    words = parser(__doc__, "tokens_per_second")
    words.add_argument("--batch", type=int, default=1, help="rows decoded together")
    words.add_argument("--budget", type=float, default=150.0, help="seconds after which no method begins")
    return words.parse_args()


if __name__ == "__main__":
    sys.exit(start(main, read_arguments()))
