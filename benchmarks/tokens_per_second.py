"""Tokens per second end to end on one GPU: PoD against the dense cache through the same decode engine, and the byte ceiling.

    python benchmarks/tokens_per_second.py            # LLaMA-3-8B shapes, 128K; writes benchmarks/results/gpu/tokens_per_second.json
    python benchmarks/tokens_per_second.py --tiny     # toy sizes on CPU: tests the script

Random weights in bf16, windows 16+4080, 179 of 256 (layer, KV head) pairs follow (70 %), caches filled with random keys and
values, batches 1 and 4. Both sides run one CUDA graph from embedding to argmax. The dense cache takes the fastest of the decode
backends that run, PyTorch's flash attention and flash-attn among them. Each method meets it in rounds that alternate; ratios are
taken round by round. Everything is measured as written and again with what stands between the attentions compiled by inductor; the
verdict is taken where the dense cache is faster.

The ceiling is the ratio of bytes per step in pod/bench/decode_bytes.py, weights included. With tau = 0.7 random keys hardly ever
pass the gate: that row shows what asking costs. `skip_share=0.5` makes half of the following heads pass.

FILE is written after every part; a part that is there with the same commit, device and settings is not measured again.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_tools import RESULTS, DeviceLost, choose_device, finish, goal_row, header, parser, start

from pod.bench import decode_bytes, decode_speed
from pod.bench.args import SHAPES, parse_method
from pod.bench.decode_bytes import spread_plan
from pod.bench.dense_decode import dense_peers
from pod.bench.run import BYTE_MODEL, table
from pod.files import read_json, write_json
from pod.measure.memory import free_memory

SHARE = 0.7
GOAL = 0.95
EXTRAS = ("pod tau=0.7", "pod tau=0.7 skip_share=0.5", "pod+int4", "int4")


def setting_of(tiny: bool) -> dict[str, Any]:
    """Sizes and rounds."""
    if tiny:
        sizes = {"shapes": "tiny", "length": 192, "windows": [4, 60], "dtype": "float32", "batches": [2]}
        return (
            sizes
            | {"extras": [f"{x} group_size=16" if "int4" in x else x for x in EXTRAS]}
            | {"steps": 2, "repeats": 2}
        )
    sizes = {
        "shapes": "llama3-8b",
        "length": 131072,
        "windows": [16, 4080],
        "dtype": "bfloat16",
        "batches": [1, 4],
    }
    return sizes | {"extras": list(EXTRAS), "steps": 32, "repeats": 7}


def parts_of(setting: dict[str, Any]) -> list[tuple[str, int, list[str]]]:
    """Name, batch and methods of each part, the most important first."""
    batches = setting["batches"]
    parts = [(f"batch {batch}", batch, ["pod"]) for batch in batches]
    parts += [(f"batch {batch}, more methods", batch, setting["extras"]) for batch in batches]
    return [*parts, *((f"batch {batch}, stock", batch, ["transformers"]) for batch in batches)]


def make_bench(setting: dict[str, Any], device: torch.device, skip: dict[str, str]) -> decode_speed.Bench:
    """The models, in place and random."""
    shape = SHAPES[setting["shapes"]]
    lead = spread_plan(shape["num_hidden_layers"], shape["num_key_value_heads"], SHARE)
    torch.manual_seed(0)
    dense, planned = decode_speed.random_models(
        shape, lead, tuple(setting["windows"]), 1 << 20, getattr(torch, setting["dtype"]), device
    )
    return decode_speed.Bench(
        dense=dense,
        planned=planned,
        stock=decode_speed.stock_model(dense),
        steps=setting["steps"],
        repeats=setting["repeats"],
        skip=skip,
    )


def measure(
    bench: decode_speed.Bench,
    name: str,
    batch: int,
    methods: list[str],
    length: int,
    is_late,
) -> dict[str, Any]:
    """One part; one that cannot be had has an error in place of figures."""
    bench.skip = {key.removeprefix(f"{name}: "): why for key, why in bench.skip.items()}
    chosen = [decode_speed.STOCK if text == "transformers" else parse_method(text) for text in methods]
    room = decode_bytes.room(length, len(chosen), bench.steps, bench.repeats)
    needed = decode_speed.bytes_needed(bench.sizes, chosen, batch, room, bench.device.type == "cpu")
    free = free_memory(bench.device) + bench.sizes.weights
    if decode_speed.most_bytes(needed) > free:
        return {
            "error": f"needs {decode_speed.most_bytes(needed) / 1e9:.1f} GB, {free / 1e9:.1f} GB are there"
        }
    if name in bench.skip:
        return {"error": bench.skip[name]}
    errors: dict[str, str] = {}
    found: dict[str, Any] = {}
    try:
        with decode_speed.recorded(bench, name, errors):
            found = decode_speed.compare(bench, chosen, batch, length, is_late)
    except decode_speed.DeviceBroken as error:
        raise DeviceLost(f"{name}: {error.contestant}", error.reason) from None
    finally:
        decode_speed.free(bench.device)
    return {"error": errors[name]} if errors else found


def known_backend(parts: dict[str, Any], batch: int) -> str:
    """The dense cache's fastest backend at a batch size, once it was found."""
    known = [part["full"]["backend"] for part in parts.values() if part.get("batch") == batch]
    return known[0] if known else "fastest"


def headline(parts: dict[str, Any], batch: int) -> dict[str, Any] | None:
    """The duel of pod in which the dense cache is fastest; None when none finished."""
    duels = [
        {"backend": part["full"]["backend"]} | part["methods"]["pod"]
        for part in parts.values()
        if part.get("batch") == batch and "tokens_per_second" in part["methods"].get("pod", {})
    ]
    return max(duels, key=lambda row: row["full_tokens_per_second"]["median"], default=None)


def summary_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Per batch the verdict, then the speeds that are only stated."""
    setting, rows = result["setting"], []
    for batch in setting["batches"]:
        what = f"tokens/s, {setting['shapes']}, {setting['length']:,} tokens, batch {batch}"
        rows.append(verdict(what, headline(result["parts"], batch), result["tiny"]))
        found = {}
        for part in result["parts"].values():
            if part.get("batch") == batch:
                found |= part["methods"]
        for name in [*setting["extras"], "transformers"]:
            row = found.get(name, {"error": "not measured"})
            speed = row.get("speed_over_full", {}).get("median")
            rows.append(goal_row(f"{what}, {name}", "stated", speed, "x dense", None, reason_of(row)))
    return rows


def verdict(what: str, row: dict[str, Any] | None, tiny: bool) -> dict[str, Any]:
    """The row of the goal: share of the byte ceiling that PoD reached."""
    name, goal = f"{what}: share of the byte ceiling", f">= {GOAL} of the byte ceiling"
    if row is None:
        return goal_row(
            name, goal, None, "of the ceiling", None, "no duel of pod with full finished; see the parts"
        )
    share = row["share_of_ceiling"]
    own, full = row["tokens_per_second"]["median"], row["full_tokens_per_second"]["median"]
    text = (
        f"{row['speed_over_full']['median']:.3f}x dense, ceiling {row['byte_ceiling']:.3f}x; {own:.2f} and {full:.2f} "
        f"tokens/s; dense by {row['backend']}"
    )
    return goal_row(name, goal, share, "of the ceiling", None if tiny else share >= GOAL, text)


def reason_of(row: dict[str, Any]) -> str:
    """Tokens per second, ceiling and note of a row, or its error."""
    if "error" in row:
        return row["error"]
    limit = row.get("byte_ceiling")
    text = f"{row['tokens_per_second']['median']:.2f} tokens/s" + (f", ceiling {limit:.3f}x" if limit else "")
    return text + (f"; {row['note']}" if row["note"] else "")


def earlier_parts(path: Path, result: dict[str, Any], restarted: bool) -> dict[str, Any]:
    """Parts that finished before in FILE, with the same commit, device and settings.

    restarted: this process goes on where one stopped a moment ago, so that changed files do not matter.
    """
    try:
        old = read_json(path)
    except (OSError, ValueError):
        return {}
    same = isinstance(old, dict) and all(old.get(key) == result[key] for key in ("setting", "device", "tiny"))
    commit = result["environment"]["commit"]
    unknown = commit is None or commit.endswith("+")
    if not same or old["environment"]["commit"] != commit or (unknown and not restarted):
        return {}
    return {name: part for name, part in old["parts"].items() if "error" not in part}


def main(arguments: argparse.Namespace) -> int:
    """Measure every part and write the JSON."""
    device, began = choose_device(arguments.tiny), time.monotonic()
    result = header("tokens_per_second", device, arguments.tiny) | {"setting": setting_of(arguments.tiny)}
    setting = result["setting"]
    out = arguments.out or RESULTS / f"tokens_per_second{'_tiny' if arguments.tiny else ''}.json"
    result["parts"] = earlier_parts(out, result, bool(arguments.failed))
    result["byte_model"], bench = BYTE_MODEL, None
    print(BYTE_MODEL)

    def is_late() -> bool:
        return time.monotonic() - began > arguments.budget

    with dense_peers():
        for name, batch, methods in parts_of(setting):
            if name in result["parts"]:
                print(f"{name}: measured before")
                continue
            if is_late():
                result["parts"][name] = {"error": f"not measured: {arguments.budget:.0f} s had passed"}
                continue
            bench = bench or make_bench(setting, device, {})
            bench.skip = {key: why for key, why in arguments.failed.items() if key.startswith(f"{name}: ")}
            bench.full_backend = known_backend(result["parts"], batch)
            found = measure(bench, name, batch, methods, setting["length"], is_late)
            result["parts"][name] = found
            result["share_followers"] = bench.planned.config.sharing_plan.share_followers
            result["rows"] = summary_rows(result)
            write_json(out, result)
            print(f"{name}: " + (found["error"] if "error" in found else table(found)))
    result["rows"] = summary_rows(result)
    arguments.out = out
    finish(result, arguments)
    return 0


def read_arguments() -> argparse.Namespace:
    """Command line."""
    words = parser(__doc__, "tokens_per_second")
    words.add_argument(
        "--budget", type=float, default=300.0, help="seconds after which no further duel begins"
    )
    return words.parse_args()


if __name__ == "__main__":
    sys.exit(start(main, read_arguments()))
