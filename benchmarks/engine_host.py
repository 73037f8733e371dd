"""Host work of the decode engine for each token: what it asks before a step, in a tiny model of 32 layers.

    OMP_NUM_THREADS=1 python benchmarks/engine_host.py  # a minute, writes benchmarks/results/engine_host.json

On a GPU a recorded step leaves little to the host: what the engine asks before it stands in the way of every
token. Three questions are timed, each from its call to its answer:

    places    whether all tensors of the cache are where they were
    rest      whether no prompt is running in the cache
    serves    whether modules and weights of the model are where they were

The first two are one function, `StaticEngine._bind`. Beside it stands `a look`: the same two answers from a
look at every tensor, which is what each token cost before the engine counted changes, and what a token costs
now after a tensor has moved. `flush` is what buffers do behind a token. Times are of this processor. Methods
that the engine does not serve are named with the reason.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import pod
from pod.engine.decode_engine import StaticEngine, refusal
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.speed_comparison import spread

RESULTS = Path(__file__).parent / "results" / "engine_host.json"
NUM_LAYERS = 32
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
WINDOWS = {"num_sink_tokens": 4, "num_recent_tokens": 64}
PROMPT = 300
GOAL = 0.3e-3
"""Seconds per token for the three questions together."""
SPECS: dict[str, dict[str, Any]] = {
    "full": {"capacity": 1024},
    "full+int4": {"capacity": 1024},
    "pod": {"capacity": 1024},
    "pod+int4": {"capacity": 1024},
    "snapkv": {"budget": 64},
}


def plan_by_head() -> pod.SharingPlan:
    """In blocks of four layers two KV heads follow, the third always leads, the fourth keeps its window."""
    rows = [[layer - layer % 4, layer - layer % 4, layer, None] for layer in range(NUM_LAYERS)]
    return pod.SharingPlan(rows)


def make_model(plan: pod.SharingPlan | None) -> Any:
    """Random weights; dense without a plan."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=NUM_LAYERS, **HEADS
    )
    stock = transformers.LlamaForCausalLM(config).eval()
    return pod.load_model(stock, plan=plan, **(WINDOWS if plan is not None else {}))


def seconds_of(ask: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and range of single calls, in seconds."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        ask()
        seconds.append(time.perf_counter() - began)
    return spread(seconds)


@torch.no_grad()
def measure(model: Any, spec: str, options: dict[str, Any], repeats: int) -> dict[str, Any]:
    """A row: seconds of each question, or why there are none."""
    cache = pod.make_cache(model, spec, **options)
    if cache.engine is None:
        return {"spec": spec, "engine": None, "reason": refusal(cache)}
    ids = torch.randint(3, 60, (1, PROMPT + 4))
    model(ids[:, :PROMPT], past_key_values=cache)
    for column in range(PROMPT, PROMPT + 4):
        model(ids[:, column : column + 1], past_key_values=cache)
    engine: StaticEngine = cache.engine
    program, bound = engine._programs["layers"], engine._bound
    assert bound is not None, "the engine has decoded"
    length = cache.get_seq_length()
    row: dict[str, Any] = {
        "spec": spec,
        "steps": engine.steps,
        "weights": len(list(model.model.parameters())),
    }
    row["places and rest"] = seconds_of(engine._bind, repeats)
    row["serves"] = seconds_of(lambda: program.serves(model.model), repeats)
    row["together"] = row["places and rest"]["median"] + row["serves"]["median"]
    row["a look"] = seconds_of(engine._bind_anew, repeats)
    row["flush"] = seconds_of(lambda: engine._flush(bound, length - 1), repeats)
    return row


def main() -> None:
    """Run, print and write the JSON."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--repeats", type=int, default=500, help="calls of each question")
    words.add_argument("--out", type=Path, default=RESULTS)
    arguments = words.parse_args()
    load = os.getloadavg()[0]
    models = {"full": make_model(None), "pod": make_model(plan_by_head())}
    rows = []
    for spec, options in SPECS.items():
        model = models["pod" if spec.startswith("pod") else "full"]
        row = measure(model, spec, options, arguments.repeats)
        rows.append(row)
        print(line_of(row))
    result = {
        "schema": 1,
        "benchmark": "engine_host",
        "environment": environment(),
        "load_average_at_start": load,
    }
    result |= {"layers": NUM_LAYERS, "goal_seconds": GOAL, "rows": rows}
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


def line_of(row: dict[str, Any]) -> str:
    """A row in words, times in microseconds."""
    if "reason" in row:
        return f"{row['spec']:10} no engine: {row['reason']}"
    names = ("places and rest", "serves", "a look", "flush")
    parts = [f"{name} {1e6 * row[name]['median']:6.1f} us" for name in names]
    return f"{row['spec']:10} together {1e6 * row['together']:6.1f} us: {', '.join(parts)}"


if __name__ == "__main__":
    main()
