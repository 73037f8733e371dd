"""Decode speed on CPU: PoD against the dense layout and stock transformers, at real head sizes in a model of few layers.

    OMP_NUM_THREADS=2 python benchmarks/decode_cpu.py            # 8K, 32K and 64K tokens, writes benchmarks/results/decode_cpu.json

Four layers, 16 query and 4 KV heads of 128, hidden size 2048, a small feed-forward part: attention over the cache is what is
measured. In the PoD models layer 0 leads for every head, so that 75 % of the (layer, KV head) pairs follow. All contestants
decode in turns in one process; ratios are taken round by round.

The prompt is random. It is read by the model itself, so that keys and values pass its projections, RoPE and `pod.make_cache`, but
with an attention that returns zeros: at 32K the true one takes minutes per contestant and changes nothing in decode time. The
dense layout is checked against stock transformers on a short prompt with true attention.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import pod
from pod.eval.results import environment
from pod.eval.speed.efficiency import Contestant, race, without_attention
from pod.eval.stats import spread
from pod.files import read_json, write_json
from pod.modeling.shipped import decode
from pod.modeling.shipped.sharing import Roles

LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2048, 16, 4, 128
WINDOWS = ((16, 1008), (16, 4080))
_ATTENTION_REPEATS = 31
_ROOM = 256  # decoded tokens, at least repeats + 1 rounds of steps
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
        if row.name != "transformers":
            result[row.name]["bytes"] = row.cache.nbytes
            result[row.name]["bytes_by_part"] = row.cache.nbytes_by_part()
    return result


def attention_stack(length: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The attention of one decoded token through all layers, without projections: dense, and PoD with each window.

    Stores hold random numbers; every layer has its own, so that nothing is read twice from a processor's cache.
    """
    heads = list(range(KV_HEADS))
    keys, values = torch.randn(2, LAYERS, 1, KV_HEADS, length, HEAD_DIM, dtype=dtype)
    q, lengths = torch.randn(1, QUERY_HEADS, HEAD_DIM, dtype=dtype), torch.tensor([length])
    buffers = decode.make_buffers(
        1, KV_HEADS, QUERY_HEADS // KV_HEADS, HEAD_DIM, length, dtype, torch.device("cpu")
    )
    dense, lead, follow = (Roles(*roles) for roles in ((heads, [], []), (heads, [], heads), ([], heads, [])))

    def run(windows: tuple[int, int] | None) -> None:
        for layer in range(LAYERS):
            roles = dense if windows is None else lead if layer == 0 else follow
            window = None if roles is not follow else ring[windows]
            decode.pod_decode(
                q, keys[layer], window, values[layer], lengths, roles, buffers, *(windows or WINDOWS[0])
            )

    ring = {w: torch.randn(1, KV_HEADS, sum(w), HEAD_DIM, dtype=dtype) for w in WINDOWS}
    return {"dense": partial(run, None)} | {f"pod {w[0]}+{w[1]}": partial(run, w) for w in WINDOWS}


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
    """Dense layout and PoD with each window, with the stock model's weights."""
    plan = pod.SharingPlan(lead=[[0] * KV_HEADS for _ in range(LAYERS)])
    models = {"dense": pod.load_model(stock)}
    for sinks, recent in WINDOWS:
        models[f"pod {sinks}+{recent}"] = pod.load_model(
            stock, plan=plan, num_sink_tokens=sinks, num_recent_tokens=recent
        )
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
        "share_followers": models[f"pod {WINDOWS[0][0]}+{WINDOWS[0][1]}"].config.sharing_plan.share_followers,
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
        print(
            f"  {name:14} {rate['median']:7.2f} tokens/s ({rate['min']:.2f}–{rate['max']:.2f})"
            f"  {dense['median']:.2f}x dense ({dense['min']:.2f}–{dense['max']:.2f})  {stock['median']:.2f}x transformers  {held}"
        )


if __name__ == "__main__":
    main()
