"""IMDC and IM against FM on CPU, in one process: prefill time, what eq. 4 allows, attention lengths, peak bytes above weights.

    OMP_NUM_THREADS=1 python benchmarks/imdc.py        # about ten minutes, writes benchmarks/results/imdc.json

A slice in which attention matters: four layers, hidden size 256, 8 query and 2 KV heads of 64, random weights, fp32. Prompts
are read by all three in turns; ratios are taken round by round, in CPU seconds of one thread, so that other work on the
machine counts as little as it can.

The share r is the time of storing, rotating, attending and compressing in the time of the prompt. Eq. 4 is Amdahl's law when r
is the share in the *faster* run; with FM's own, larger share it promises more than can be had. Both ceilings are given.

Peaks are what tensors hold at the worst moment of a prompt that is fed chunk by chunk, weights and token ids not counted,
observed after every operation. They are predicted from FM alone: three FM runs with other sizes give bytes per chunk
token and per memory token, and the chunks and memories of a schedule give its peak. Without n x n scores a chunk token costs its activations and a
memory token its keys and values in every layer: IMDC pays where the second are not much smaller, hence 4, 16 and 32 layers.
"""

import argparse
import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.race import spread
from pod.modeling.methods import imdc
from pod.modeling.methods.imdc import Settings, prompt_schedule
from pod.modeling.shipped.rows import Schedule

RESULTS = Path(__file__).parent / "results" / "imdc.json"
LAYERS, CHUNK, WINDOW = 4, 512, 32
PEAK_LAYERS, PEAK_CHUNKS = (4, 16, 32), 8
VARIANTS = ("fm", "im", "imdc")


class LivePeak(TorchDispatchMode):
    """Largest number of bytes that storages made inside the block hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._note(x.untyped_storage(), inputs)
        return out

    def _note(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known or key in inputs:
            return

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def slice_of_a_model(layers: int = LAYERS) -> pod.PodForCausalLM:
    """Random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    return pod.load_model(LlamaForCausalLM(config).eval())


def schedule(variant: str, m_max: int, length: int, chunk: int = CHUNK) -> Schedule:
    """The schedule that a cache of this variant follows; it is the same for any number of layers."""
    return prompt_schedule(Settings(variant, "linear", m_max, chunk, LAYERS), length)


@contextmanager
def attention_observed() -> Iterator[dict[str, Any]]:
    """CPU seconds spent in the layers of the cache, and the keys that queries saw, while the block runs."""
    seen: dict[str, Any] = {"seconds": 0.0, "lengths": set()}
    layer = imdc.MemoryLayer
    kept = layer.attend, layer.settle

    def timed(function):
        def call(self, *arguments):
            began = time.process_time()
            result = function(self, *arguments)
            seen["seconds"] += time.process_time() - began
            if function is kept[0]:
                seen["lengths"].add(self.held)
            return result

        return call

    layer.attend, layer.settle = timed(kept[0]), timed(kept[1])
    try:
        yield seen
    finally:
        layer.attend, layer.settle = kept


@torch.no_grad()
def read_prompt(model: pod.PodForCausalLM, spec: str, m_max: int, prompt: torch.Tensor) -> dict[str, Any]:
    """CPU seconds of one prompt in one pass, the part of them in attention, and the longest attention length."""
    cache = pod.make_cache(model, spec, budget=m_max, chunk_size=CHUNK, window=WINDOW)
    with attention_observed() as seen:
        began = time.process_time()
        model(prompt, past_key_values=cache, logits_to_keep=1)
        seconds = time.process_time() - began
    return {
        "seconds": seconds,
        "attention_share": seen["seconds"] / seconds,
        "longest_attention": max(seen["lengths"]),
    }


def race(
    model: pod.PodForCausalLM, pruner: str, m_max: int, prompt: torch.Tensor, repeats: int
) -> dict[str, Any]:
    """All variants in turns."""
    rounds: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
    for _ in range(repeats):
        for variant in VARIANTS:
            rounds[variant].append(read_prompt(model, f"{variant}({pruner})", m_max, prompt))
    fixed, result = rounds["fm"], {}
    fixed_share = float(np.median([one["attention_share"] for one in fixed]))
    fixed_length = max(one["longest_attention"] for one in fixed)
    for variant, runs in rounds.items():
        m_hat = mean_found(schedule(variant, m_max, prompt.shape[1]))
        share = float(np.median([one["attention_share"] for one in runs]))
        speed = spread([own["seconds"] / one["seconds"] for own, one in zip(fixed, runs, strict=True)])
        ceilings = [speedup_ceiling(r, m_max, m_hat) for r in (share, fixed_share)]
        longest = max(one["longest_attention"] for one in runs)
        result[variant] = {
            "cpu_seconds": spread([one["seconds"] for one in runs]),
            "attention_share": share,
            "mean_memory_found": m_hat,
            "speed_over_fm": speed,
            "ceiling_with_own_share": ceilings[0],
            "ceiling_with_share_of_fm": ceilings[1],
            "share_of_ceiling": speed["median"] / ceilings[0],
            "share_of_ceiling_with_share_of_fm": speed["median"] / ceilings[1],
            "longest_attention": longest,
            "longest_attention_change": longest / fixed_length - 1,
        }
    return result


def speedup_ceiling(attention_share: float, m_max: float, m_hat: float) -> float:
    """How much faster than FM a prompt can be read (IMDC, eq. 4).

    `attention_share` is that of the *faster* run in 0 … 1: then this is Amdahl's law exactly. The paper does not say whose share;
    with FM's own, larger one it promises too much. `m_max` and `m_hat` in tokens.
    """
    return attention_share * ((m_max + CHUNK) / (m_hat + CHUNK) - 1) + 1


def mean_found(plan: Schedule) -> float:
    """``m̂``: mean memory that the chunks after the first find (tokens)."""
    assert plan.memory is not None
    return float(np.mean(plan.memory[0][:-1]))


@torch.no_grad()
def peak_bytes(
    model: pod.PodForCausalLM, variant: str, m_max: int, chunk: int, boundaries: tuple[int, ...]
) -> int:
    """Bytes of all tensors at the worst moment, one forward pass per chunk; weights and ids not counted."""
    prompt = torch.randint(0, 512, (1, boundaries[-1]), generator=torch.Generator().manual_seed(0))
    parts = prompt.split(
        [end - start for start, end in zip((0, *boundaries), boundaries, strict=False)], dim=1
    )
    gc.collect()
    with LivePeak() as tracker:
        cache = pod.make_cache(model, variant, budget=m_max, chunk_size=chunk, window=WINDOW)
        cache.begin_prompt(boundaries[-1])
        for part in parts:
            model.model(part, past_key_values=cache)
    return tracker.peak


def peaks(layers: int, m_max: int) -> dict[str, Any]:
    """Measured peaks with the SnapKV pruner, and those predicted from FM at three other pairs of sizes."""
    model = slice_of_a_model(layers)
    sizes = [(CHUNK // 2, m_max), (3 * CHUNK // 2, m_max // 2), (CHUNK, m_max // 4)]
    known = []
    for chunk, memory in sizes:
        ends = schedule("fm", memory, 6 * chunk, chunk).boundaries
        known.append(peak_bytes(model, "fm", memory, chunk, ends))
    rows = np.array([[1, chunk, memory] for chunk, memory in sizes], dtype=float)
    fixed, per_chunk_token, per_memory_token = np.linalg.solve(rows, np.array(known, dtype=float))
    result: dict[str, Any] = {
        "layers": layers,
        "m_max": m_max,
        "fixed_bytes": float(fixed),
        "bytes_per_chunk_token": float(per_chunk_token),
        "bytes_per_memory_token": float(per_memory_token),
    }
    for variant in VARIANTS:
        plan = schedule(variant, m_max, PEAK_CHUNKS * CHUNK)
        assert plan.memory is not None
        found, left = (
            (0, *plan.memory[0][:-1]),
            plan.memory[0],
        )  # in the last layer, all others have their next memory
        memory = [(before + (layers - 1) * after) / layers for before, after in zip(found, left, strict=True)]
        pairs = zip(plan.chunk_sizes, memory, strict=True)
        predicted = max(fixed + per_chunk_token * c + per_memory_token * m for c, m in pairs)
        measured = peak_bytes(model, variant, m_max, CHUNK, plan.boundaries)
        result[variant] = {
            "peak_bytes": measured,
            "predicted_peak_bytes": float(predicted),
            "measured_over_predicted": measured / float(predicted),
        }
    for variant in VARIANTS:
        result[variant]["change"] = result[variant]["peak_bytes"] / result["fm"]["peak_bytes"] - 1
    return result


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = slice_of_a_model()
    prompt = torch.randint(0, 512, (1, arguments.length), generator=torch.Generator().manual_seed(0))
    content: dict[str, Any] = {
        "schema": 1,
        "benchmark": "imdc",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[0],
        "model": {"layers": LAYERS, "hidden": 256, "query_heads": 8, "kv_heads": 2, "head_dim": 64},
        "dtype": "float32",
        "length": arguments.length,
        "chunk_size": CHUNK,
        "prefill": [],
        "peaks": [],
    }
    for pruner in ("snapkv", "streamingllm"):
        for m_max in (CHUNK, 2 * CHUNK):
            row = {
                "pruner": pruner,
                "m_max": m_max,
                "variants": race(model, pruner, m_max, prompt, arguments.repeats),
            }
            content["prefill"].append(row)
            print_prefill(row)
    for layers in PEAK_LAYERS:
        for m_max in (CHUNK, 2 * CHUNK):
            content["peaks"].append(peaks(layers, m_max))
            print_peaks(content["peaks"][-1])
    write_json(arguments.out, content)
    print(f"wrote {arguments.out}")


def print_prefill(row: dict[str, Any]) -> None:
    """One line per variant."""
    print(f"{row['pruner']}, m_max = {row['m_max'] / CHUNK:g} c")
    for variant, one in row["variants"].items():
        speed = one["speed_over_fm"]
        print(
            f"  {variant:5} {one['cpu_seconds']['median']:6.2f} s, r {one['attention_share']:.2f}, {speed['median']:.3f}x FM "
            f"({speed['min']:.2f}–{speed['max']:.2f}; ceiling {one['ceiling_with_own_share']:.3f}, with FM's r "
            f"{one['ceiling_with_share_of_fm']:.3f}), attention over {one['longest_attention']} tokens "
            f"({one['longest_attention_change']:+.1%})",
            flush=True,
        )


def print_peaks(row: dict[str, Any]) -> None:
    """One line per variant."""
    print(
        f"{row['layers']} layers, m_max = {row['m_max'] / CHUNK:g} c: {row['bytes_per_chunk_token'] / 1e3:.1f} KB per chunk "
        f"token, {row['bytes_per_memory_token'] / 1e3:.1f} KB per memory token"
    )
    for variant in VARIANTS:
        one = row[variant]
        print(
            f"  {variant:5} peak {one['peak_bytes'] / 1e6:6.2f} MB ({one['change']:+.1%}), "
            f"{one['measured_over_predicted']:.3f} of predicted",
            flush=True,
        )


if __name__ == "__main__":
    main()
