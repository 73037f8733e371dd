"""Long prompts through every method: peak extra memory and its growth, time against full attention, bytes after 4,096 decoded tokens.

    OMP_NUM_THREADS=1 python benchmarks/long_prompts.py                        # every method at 8K, 16K and 32K
    OMP_NUM_THREADS=1 python benchmarks/long_prompts.py --lengths 32768,65536,131072 --only full,h2o,streamingllm,imdc(snapkv)
    OMP_NUM_THREADS=1 python benchmarks/long_prompts.py --decode 4096          # growth while decoding

A slice with small heads: four layers, two query heads and one KV head of 32, random weights, fp32. Peak extra memory is what PyTorch's
tensors hold at the worst moment of the prompt above weights and inputs (torch's memory tracker, one dispatch at a time); the exponent is
log(peak ratio) / log(length ratio) between the two longest prompts: 1 is linear, 2 would be an n x n somewhere. Times are
of the prompt, in CPU seconds of one thread, each against full attention in the same process. Writes benchmarks/results/long_prompts.json, keeping other rows in it.
"""

import argparse
import gc
import math
import time
from pathlib import Path
from typing import Any

import torch
from method_rows import Row, rows
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.files import read_json, write_json
from pod.measure.machine import environment

RESULTS = Path(__file__).parent / "results" / "long_prompts.json"
LAYERS, BUDGET = 4, 1024
OPTIONS: dict[str, dict[str, Any]] = {
    "razor": {"heads": [[], [0], [], []], "num_recent_tokens": 512},
    "simlayerkv": {"threshold": 0.01, "detector": "prefill"},
    "fm": {"chunk_size": BUDGET},
    "im": {"chunk_size": BUDGET},
    "imdc": {"chunk_size": BUDGET},
}
"""What differs from the defaults. SimLayerKV's threshold makes its layers lazy: random weights attend evenly."""


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor, in numbers, that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def models(longest: int) -> dict[bool, pod.PodForCausalLM]:
    """The dense slice, and the same weights under a plan in which layers 1 to 3 follow layer 0."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=longest,
    )
    stock = LlamaForCausalLM(config).eval()
    plan = pod.SharingPlan([[0]] * LAYERS)
    shared = pod.load_model(stock, plan=plan, num_sink_tokens=16, num_recent_tokens=496)
    return {False: pod.load_model(stock), True: shared}


def new_cache(model: pod.PodForCausalLM, row: Row) -> pod.PodCache:
    """An empty cache of a row."""
    return pod.make_cache(model, row.spec, budget=BUDGET if row.takes_budget else None, **row.options)


@torch.no_grad()
def measure(model: pod.PodForCausalLM, row: Row, length: int) -> dict[str, Any]:
    """Peak, largest tensor, time and bytes of one prompt."""
    prompt = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(length))
    gc.collect()
    tracker, largest = MemTracker(), LargestTensor()
    with tracker, largest:
        cache = new_cache(model, row)
        model(prompt, past_key_values=cache, logits_to_keep=1)
    peak = sum(sum(kinds.values()) for kinds in _peaks(tracker))
    del cache
    cache = new_cache(model, row)
    began = time.process_time()
    model(prompt, past_key_values=cache, logits_to_keep=1)
    seconds = time.process_time() - began
    return {
        "peak_bytes": peak,
        "largest_tensor": largest.numel,
        "seconds": seconds,
        "held_bytes": cache.nbytes,
    }


def _peaks(tracker: MemTracker) -> list[dict]:
    """The tracker's peak by kind, without its own totals."""
    snapshot = tracker.get_tracker_snapshot("peak")
    return [{kind: size for kind, size in kinds.items() if kind != "Total"} for kinds in snapshot.values()]


@torch.no_grad()
def grow(model: pod.PodForCausalLM, row: Row, prompt_length: int, steps: int) -> dict[str, Any]:
    """Bytes of keys, values and statistics while ``steps`` tokens are decoded."""
    cache = new_cache(model, row)
    prompt = torch.randint(0, 512, (1, prompt_length), generator=torch.Generator().manual_seed(0))
    token = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    start, worst = _payload(cache), 0
    for _ in range(steps):
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        worst = max(worst, _payload(cache))
    return {
        "prompt": prompt_length,
        "decoded": steps,
        "bytes_after_prompt": start,
        "largest_bytes": worst,
        "final_bytes": _payload(cache),
    }


def _payload(cache: pod.PodCache) -> int:
    """Bytes without the token ids and masks that every cache keeps for its checks."""
    return sum(size for part, size in cache.nbytes_by_part().items() if part != "bookkeeping")


def run(lengths: list[int], only: list[str], steps: int) -> dict[str, Any]:
    """Measure every chosen row; full attention first, as the reference of the others."""
    found: dict[str, Any] = read_json(RESULTS)["rows"] if RESULTS.is_file() else {}
    both = models(max(lengths) + steps)
    for row in rows(OPTIONS):
        if only and row.spec not in only:
            continue
        entry = found.setdefault(row.spec, {"lengths": {}})
        if steps:
            entry["decode"] = grow(both[row.shares], row, 2048, steps)
            print(f"{row.spec:22} {entry['decode']}", flush=True)
            continue
        for length in lengths:
            result = measure(both[row.shares], row, length)
            full = found["full"]["lengths"].get(str(length), result)
            result["time_over_full"] = result["seconds"] / full["seconds"]
            entry["lengths"][str(length)] = result
        entry["growth_exponent"] = exponent(entry["lengths"])
        last = entry["lengths"][str(lengths[-1])]
        print(
            f"{row.spec:22} peak {last['peak_bytes'] / 1e6:8.1f} MB, growth n^{entry['growth_exponent']:.2f}, held "
            f"{last['held_bytes'] / 1e6:6.2f} MB, {last['time_over_full']:.2f} x the time of full attention",
            flush=True,
        )
    return found


def exponent(lengths: dict[str, dict[str, Any]]) -> float:
    """Growth of the peak between the two longest prompts."""
    (short, low), (long, high) = sorted(((int(n), entry["peak_bytes"]) for n, entry in lengths.items()))[-2:]
    return math.log(high / low) / math.log(long / short)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="8192,16384,32768", help="tokens, at least two lengths")
    parser.add_argument("--only", default="", help="specs, comma-separated")
    parser.add_argument(
        "--decode", type=int, default=0, help="measure growth over this many decoded tokens instead"
    )
    arguments = parser.parse_args()
    measured = run(
        [int(n) for n in arguments.lengths.split(",")],
        [spec for spec in arguments.only.split(",") if spec],
        arguments.decode,
    )
    settings = {"layers": LAYERS, "query_heads": 2, "kv_heads": 1, "head_dim": 32, "budget": BUDGET}
    write_json(RESULTS, {"environment": environment(), "settings": settings, "rows": measured})
