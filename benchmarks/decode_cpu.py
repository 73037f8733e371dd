"""Decode speed on CPU: PoD against the dense layout and stock transformers, at real head sizes in a model of few layers.

    OMP_NUM_THREADS=2 python benchmarks/decode_cpu.py            # 8K, 32K and 64K tokens, writes benchmarks/results/decode_cpu.json

Four layers, 16 query and 4 KV heads of 128, hidden size 2048, a small feed-forward part: attention over the cache is what is
measured. In the `pod` models layer 0 leads for every head, so that 75 % of the (layer, KV head) pairs follow; in the `roles` models
pairs lead, follow and keep their window, which saves 50 and 65 % of the bytes in the limit. All contestants decode in turns in one
process; ratios are taken round by round, and held against the byte ceiling of pod/bench/decode_bytes.py.

The prompt is random. It is read by the model itself, so that keys and values pass its projections, RoPE and `pod.make_cache`, but
with an attention that returns zeros: at 32K the true one takes minutes per contestant and changes nothing in decode time. The
dense layout is checked against stock transformers on a short prompt with true attention.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import pod
from pod.bench.args import FULL, parse_method
from pod.bench.decode_bytes import ceiling, spread_plan
from pod.bench.decode_speed import sizes_of
from pod.files import read_json, write_json
from pod.measure.machine import environment
from pod.measure.race import Contestant, race, spread, without_attention
from pod.modeling.shipped import decode
from pod.modeling.shipped.attend import Tokens
from pod.modeling.shipped.sharing import roles_of

LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2048, 16, 4, 128
WINDOWS = ((16, 1008), (16, 4080))
PLANS: dict[str, tuple[pod.SharingPlan, tuple[int, int]]] = {
    f"pod {sinks}+{recent}": (pod.SharingPlan(lead=[[0] * KV_HEADS] * LAYERS), (sinks, recent))
    for sinks, recent in WINDOWS
} | {
    f"roles {saved}%": (pod.SharingPlan(lead=spread_plan(LAYERS, KV_HEADS, *shares)), WINDOWS[0])
    for saved, shares in ((50, (2 / 16, 7 / 16)), (65, (3 / 16, 9 / 16)))  # follow, keep their window
}
"""Plan and windows by contestant."""
_ATTENTION_REPEATS = 31
_ROOM = 256  # decoded tokens, at least repeats + 1 rounds of steps
POD = parse_method("pod")
RESULTS = Path(__file__).parent / "results" / "decode_cpu.json"


def stock_config(longest: int) -> LlamaConfig:
    """The stock model that all contestants share their weights with."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=longest,
        attn_implementation="sdpa",
    )


@torch.no_grad()
def filled_pod(model: pod.PodForCausalLM, spec: str, prompt: torch.Tensor) -> pod.PodCache:
    """A cache that has seen the prompt `[1, n]`, and whose decode engine has room for what is decoded."""
    cache = pod.make_cache(model, spec, capacity=prompt.shape[1] + _ROOM)
    with without_attention(model):
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.no_grad()
def filled_stock(model: LlamaForCausalLM, length: int) -> DynamicCache:
    """A stock cache with random keys and values of `length` tokens."""
    cache = DynamicCache(config=model.config)
    dtype = next(model.parameters()).dtype
    for layer in range(LAYERS):
        keys, values = torch.randn(2, 1, KV_HEADS, length, HEAD_DIM, dtype=dtype)
        cache.update(keys.contiguous(), values.contiguous(), layer)
    return cache


@torch.no_grad()
def largest_difference(stock: LlamaForCausalLM, dense: pod.PodForCausalLM) -> float:
    """Largest logit difference between stock and our dense layout, last of 64 tokens, decoded; relative to the largest logit."""
    ids = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(1))
    ours, theirs = pod.make_cache(dense, "full"), DynamicCache(config=stock.config)
    for part in (ids[:, :63], ids[:, 63:]):
        own = dense(input_ids=part, past_key_values=ours, use_cache=True).logits[:, -1]
        other = stock(input_ids=part, past_key_values=theirs, use_cache=True).logits[:, -1]
    return float((own - other).abs().max() / other.abs().max())


def contestants(
    stock: LlamaForCausalLM, models: dict[str, pod.PodForCausalLM], length: int
) -> list[Contestant]:
    """Every model with a cache of `length` tokens."""
    prompt = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(0))
    token = prompt[:, -1:]
    rows = [Contestant("transformers", stock, filled_stock(stock, length), token)]
    for name, model in models.items():
        rows.append(
            Contestant(name, model, filled_pod(model, "full" if name == "dense" else "pod", prompt), token)
        )
    return rows


def compare(rows: list[Contestant], steps: int, repeats: int) -> dict[str, dict]:
    """Race, then tokens/s and ratios of every contestant."""
    race(rows, steps, repeats)
    by_name = {row.name: row for row in rows}
    result = {}
    for row in rows:
        result[row.name] = {"tokens_per_second": spread([steps / seconds for seconds in row.seconds])}
        for peer in ("dense", "transformers"):
            pairs = zip(by_name[peer].seconds, row.seconds, strict=True)
            result[row.name][f"speed_over_{peer}"] = spread([other / own for other, own in pairs])
        if row.name in PLANS:
            sizes = sizes_of(row.model.config, row.model.dtype.itemsize)
            limit = ceiling(sizes, POD, FULL, row.cache.get_seq_length(), 1)
            reached = result[row.name]["speed_over_dense"]["median"] / limit
            result[row.name] |= {"byte_ceiling": limit, "share_of_ceiling": reached}
        if row.name != "transformers":
            result[row.name]["bytes"] = row.cache.nbytes
            result[row.name]["bytes_by_part"] = row.cache.nbytes_by_part()
    return result


def attention_stack(length: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The attention of one decoded token through all layers, without projections: dense, and every plan.

    Stores hold random numbers; every layer has its own, so that nothing is read twice from a processor's cache.
    """
    keys, values = torch.randn(2, LAYERS, 1, KV_HEADS, length, HEAD_DIM, dtype=dtype)
    q, lengths = torch.randn(1, QUERY_HEADS, HEAD_DIM, dtype=dtype), torch.tensor([length])
    buffers = decode.make_buffers(
        1, KV_HEADS, QUERY_HEADS // KV_HEADS, HEAD_DIM, length, dtype, torch.device("cpu")
    )

    def stack(plan: pod.SharingPlan, windows: tuple[int, int]) -> Callable[[], None]:
        rings = torch.randn(LAYERS, 2, 1, KV_HEADS, sum(windows), HEAD_DIM, dtype=dtype)
        layers = []
        for layer, (own, other) in enumerate(rings):
            roles = roles_of(plan.lead, layer)
            places = (roles.leads, roles.followers, roles.held, roles.windows)
            leads, followers, held, near = (slice(len(heads)) if heads else None for heads in places)
            layers.append(
                {
                    "roles": roles,
                    "keys": None if leads is None else keys[layer][:, leads],
                    "window_keys": None if followers is None else own[:, followers],
                    "values": None if held is None else values[layer][:, held],
                    "near": None if near is None else Tokens(own[:, near], other[:, near]),
                }
            )
        shared = {"q": q, "lengths": lengths, "buffers": buffers, "rows": [length]}
        shared |= dict(zip(("num_sink_tokens", "num_recent_tokens"), windows, strict=True))

        def run() -> None:
            for layer in layers:
                decode.pod_decode(**shared, **layer)

        return run

    dense = pod.SharingPlan.dense(LAYERS, KV_HEADS)
    return {
        name: stack(plan, windows)
        for name, (plan, windows) in ({"dense": (dense, WINDOWS[0])} | PLANS).items()
    }


def compare_attention(length: int, dtype: torch.dtype, repeats: int) -> dict[str, dict]:
    """Milliseconds per token of the attention alone, and its speed over dense, round by round."""
    stack = attention_stack(length, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in stack}
    for round_number in range(repeats + 1):
        for name, run in stack.items():
            began = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - began)
    result = {}
    for name, own in seconds.items():
        pairs = zip(seconds["dense"], own, strict=True)
        result[name] = {
            "milliseconds": spread([1e3 * x for x in own]),
            "speed_over_dense": spread([other / x for other, x in pairs]),
        }
        print(
            f"  attention alone, {name:14} {result[name]['milliseconds']['median']:7.2f} ms  "
            f"{result[name]['speed_over_dense']['median']:.2f}x dense ({result[name]['speed_over_dense']['min']:.2f}–"
            f"{result[name]['speed_over_dense']['max']:.2f})"
        )
    return result


def build_models(stock: LlamaForCausalLM) -> dict[str, pod.PodForCausalLM]:
    """Dense layout and every plan, with the stock model's weights."""
    models = {"dense": pod.load_model(stock)}
    for name, (plan, (sinks, recent)) in PLANS.items():
        models[name] = pod.load_model(stock, plan=plan, num_sink_tokens=sinks, num_recent_tokens=recent)
    return models


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="8192,32768,65536", help="tokens in the cache, comma-separated")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=8, help="tokens per timed repeat")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--attention-only",
        action="store_true",
        help="measure the attention alone again, and keep the rest of --out",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    if arguments.attention_only:
        renew_attention(arguments.out, dtype)
        return
    stock = LlamaForCausalLM(stock_config(2 * max(lengths))).to(getattr(torch, arguments.dtype)).eval()
    models = build_models(stock)
    result = {
        "schema": 1,
        "benchmark": "decode_cpu",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[
            0
        ],  # above 1: other work took part of the cores, look at min and max
        "model": {
            "layers": LAYERS,
            "hidden": HIDDEN,
            "query_heads": QUERY_HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
        },
        "dtype": arguments.dtype,
        "plans": {name: {"lead": plan.lead, "windows": windows} for name, (plan, windows) in PLANS.items()},
        "steps": arguments.steps,
        "dense_against_stock_logits": largest_difference(stock, models["dense"]),
        "lengths": [],
    }
    for length in lengths:
        began = time.perf_counter()
        rows = compare(contestants(stock, models, length), arguments.steps, arguments.repeats)
        print_rows(length, rows, time.perf_counter() - began)
        alone = compare_attention(length, dtype, _ATTENTION_REPEATS)
        result["lengths"].append({"length": length, "methods": rows, "attention_alone": alone})
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


def renew_attention(path: Path, dtype: torch.dtype) -> None:
    """Measure the attention alone for the lengths of a result file, and write it again."""
    result = read_json(path)
    for entry in result["lengths"]:
        print(f"{entry['length']:,} tokens")
        entry["attention_alone"] = compare_attention(entry["length"], dtype, _ATTENTION_REPEATS)
    result["attention_alone_environment"] = environment()
    write_json(path, result)


def print_rows(length: int, rows: dict[str, dict], seconds: float) -> None:
    """One line per contestant."""
    print(f"{length:,} tokens ({seconds:.0f} s)")
    for name, row in rows.items():
        rate, dense, stock = row["tokens_per_second"], row["speed_over_dense"], row["speed_over_transformers"]
        held = f"{row['bytes'] / 1e6:8.1f} MB" if "bytes" in row else ""
        if "byte_ceiling" in row:
            held += f"  {row['share_of_ceiling']:.2f} of the ceiling {row['byte_ceiling']:.2f}"
        print(
            f"  {name:14} {rate['median']:7.2f} tokens/s ({rate['min']:.2f}–{rate['max']:.2f})"
            f"  {dense['median']:.2f}x dense ({dense['min']:.2f}–{dense['max']:.2f})  {stock['median']:.2f}x transformers  {held}"
        )


if __name__ == "__main__":
    main()
