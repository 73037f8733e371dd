"""Decode speed on CPU of 4-bit keys and values against native ones, whole models, same weights, in turns.

    OMP_NUM_THREADS=2 python benchmarks/int4_cpu.py            # 8K tokens, writes benchmarks/results/int4_cpu.json

Two shapes: SmolLM2-135M (30 layers, 9 query and 3 KV heads of 64) and that of ``decode_cpu.py`` (4 layers, 16 and 4 heads of 128,
small feed-forward). Weights and what the caches hold are random; every layer has its own, so that nothing is read twice from a
processor's cache. ``dense`` and ``int4`` grow as tokens come, ``… engine`` have room reserved and are served by the decode engine.
Ratios are taken round by round. On a machine with other work look at min and max, and at ``load_average``.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pod
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.race import Contestant, race, spread, without_attention

_ROOM = 256  # decoded tokens, at least (repeats + 1) · steps
RESULTS = Path(__file__).parent / "results" / "int4_cpu.json"
SHAPES = {
    "smollm2-135m": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "decode_cpu": {
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 512,
    },
}


class _Unrotated:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def for_rows(self, *_: object) -> "_Unrotated":
        return self

    def pair(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k


@torch.no_grad()
def filled(model: pod.PodForCausalLM, spec: str, batch: int, length: int, **options) -> pod.PodCache:
    """A cache that holds random keys and values of ``length`` tokens per row, as behind a prompt."""
    cache, config = pod.make_cache(model, spec, **options), model.config
    dtype = next(model.parameters()).dtype
    step, _ = cache.begin_step(torch.empty(batch, length, 1), None, None)
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    with without_attention(model):
        for piece in cache.pieces(step):
            piece.ropes, piece.backend = [_Unrotated()] * config.num_hidden_layers, "zeros"
            for layer in piece.layers:
                q, k, v = (torch.randn(batch, h, length, config.head_dim, dtype=dtype) for h in heads)
                layer.attend(q, k, v, piece)
                layer.settle(piece)
            cache.end_piece(piece)
    cache.end_step(step)
    return cache


def compare(model: pod.PodForCausalLM, batch: int, length: int, steps: int, repeats: int) -> dict[str, dict]:
    """Tokens per second of every contestant, and over its dense peer."""
    token, room = torch.zeros(batch, 1, dtype=torch.long), {"capacity": length + _ROOM}
    rows = {
        name: Contestant(name, model, filled(model, spec, batch, length, **options), token)
        for name, spec, options in (
            ("dense", "full", {}),
            ("int4", "full+int4", {}),
            ("dense engine", "full", room),
            ("int4 engine", "full+int4", room),
        )
    }
    race(list(rows.values()), steps, repeats)
    result = {}
    for name, row in rows.items():
        if row.failed is not None:
            raise row.failed
        entry = {"tokens_per_second": spread([batch * steps / seconds for seconds in row.seconds])}
        for peer in ("dense", "dense engine"):
            pairs = zip(rows[peer].seconds, row.seconds, strict=True)
            entry[f"speed_over_{peer.replace(' ', '_')}"] = spread([other / own for other, own in pairs])
        result[name] = entry | {"bytes": row.cache.nbytes}
        ratio, rate = entry["speed_over_dense"], entry["tokens_per_second"]
        served = entry["speed_over_dense_engine"]
        print(
            f"  {name:13} {rate['median']:7.2f} tokens/s ({rate['min']:.2f}–{rate['max']:.2f})  {ratio['median']:.2f}x dense "
            f"({ratio['min']:.2f}–{ratio['max']:.2f})  {served['median']:.2f}x dense engine  {row.cache.nbytes / 1e6:.0f} MB"
        )
    return result


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens in the cache")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--steps", type=int, default=4, help="tokens per timed repeat")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result = {"schema": 1, "benchmark": "int4_cpu", "environment": environment(), "length": arguments.length}
    result |= {"steps": arguments.steps, "repeats": arguments.repeats, "runs": []}
    for shape in arguments.shapes:
        config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2 * arguments.length)
        for dtype in (torch.float32, torch.bfloat16):
            model = pod.load_model(LlamaForCausalLM(config).to(dtype).eval())
            for batch in arguments.batches:
                print(f"{shape}, {dtype}, batch {batch}", flush=True)
                load = os.getloadavg()[0]
                rows = compare(model, batch, arguments.length, arguments.steps, arguments.repeats)
                run = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "batch": batch}
                result["runs"].append(run | {"load_average_at_start": load, "contestants": rows})
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
