"""Training step on CPU, PoD over dense: forward, backward and AdamW of one row.

It has the widths of SmolLM2-135M.

    # 2K and 4K tokens; writes benchmarks/results/train_step_cpu.json
    OMP_NUM_THREADS=1 python benchmarks/train_step_cpu.py

Ten layers of hidden size 576, 9 query and 3 KV heads of 64, fp32, random weights, a vocabulary of 4,096 (the
projection to one of 49,152 would take a third of the step and hide what is measured), no activation
checkpointing. 70 % of the (layer, KV head) pairs follow: a saving of 35 % of the KV bytes. Contestants take
turns in one process; ratios are taken round by round, of the processor time of all threads, which other work
on the machine disturbs least; wall-clock ratios stand beside them.
"""

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_tools import goal_row

import pod
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.speed_comparison import spread
from pod.training.args import TrainArgs
from pod.training.run.optimization import make_optimizer

RESULTS = Path(__file__).parent / "results" / "train_step_cpu.json"
LAYERS, KV_HEADS, SHARE_NON_LEAD = 10, 3, 0.7
WINDOWS = ((16, 240), (16, 1008))
GOAL = 0.92
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def make_plan() -> list[list[int]]:
    """lead[layer][head] of random blocks per head; 21 of the 30 pairs follow."""
    draw, rows = random.Random(0), [[0] * KV_HEADS for _ in range(LAYERS)]
    leads = LAYERS * KV_HEADS - round(SHARE_NON_LEAD * LAYERS * KV_HEADS)
    for head in range(KV_HEADS):
        count = leads // KV_HEADS + (head < leads % KV_HEADS)
        starts = [0, *sorted(draw.sample(range(1, LAYERS), count - 1))]
        for layer in range(LAYERS):
            rows[layer][head] = max(start for start in starts if start <= layer)
    return rows


def make_step(tokens: int, windows: tuple[int, int] | None, rows: list[list[int]]) -> Callable[[], float]:
    """One optimizer step on a random row; windows None = dense. Returns the loss."""
    torch.manual_seed(0)
    lead = (
        {}
        if windows is None
        else {"lead": rows, "num_sink_tokens": windows[0], "num_recent_tokens": windows[1]}
    )
    model = pod.PodForCausalLM(pod.PodConfig(**SIZES, **lead, max_position_embeddings=tokens)).train()
    optimizer = make_optimizer(model, TrainArgs(learning_rate=1e-4))
    ids = torch.randint(SIZES["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def race(tokens: int, repeats: int, rows: list[list[int]]) -> dict[str, dict]:
    """Seconds and speed over dense of every contestant.

    Contestants take turns, each round in another order.
    """
    steps = {"dense": make_step(tokens, None, rows)}
    for sinks, recent in WINDOWS:
        if sinks + recent < tokens:
            steps[f"pod {sinks}+{recent}"] = make_step(tokens, (sinks, recent), rows)
    losses = {name: step() for name, step in steps.items()}  # also warms up
    wall, processor = ({name: [] for name in steps} for _ in range(2))
    names = list(steps)
    for turn in range(repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter(), time.process_time()
            steps[name]()
            wall[name].append(time.perf_counter() - began[0])
            processor[name].append(time.process_time() - began[1])
    result = {}
    for name in names:
        result[name] = {
            "first_loss": losses[name],
            "wall_seconds": spread(wall[name]),
            "processor_seconds": spread(processor[name]),
            "speed_over_dense": ratios(processor["dense"], processor[name]),
            "wall_speed_over_dense": ratios(wall["dense"], wall[name]),
        }
    return result


def rows_of(lengths: list[dict], tiny: bool) -> list[dict]:
    """A summary row per length and window."""
    rows = []
    for entry in lengths:
        for name, row in entry["contestants"].items():
            if name != "dense":
                figure = row["speed_over_dense"]["median"]
                met = None if tiny else figure >= GOAL
                title = f"training step on CPU, {name}, {entry['length']} tokens"
                rows.append(
                    goal_row(title, f">= {GOAL}x", figure, "x dense", met, "toy sizes" if tiny else None)
                )
    return rows


def ratios(peer: list[float], own: list[float]) -> dict:
    """Spread of peer / own, round by round."""
    return spread([a / b for a, b in zip(peer, own, strict=True)])


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,4096", help="tokens of a row, comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="short rows, one round: tests the script")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.lengths, arguments.repeats = "320", 1
        arguments.out = (
            RESULTS.with_name("train_step_cpu_tiny.json") if arguments.out == RESULTS else arguments.out
        )
    rows = make_plan()
    plan = pod.SharingPlan(lead=rows)  # type: ignore[arg-type]
    result = {
        "schema": 1,
        "benchmark": "train_step_cpu",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[0],  # above 1: other work took part of the cores
        "model": SIZES,
        "dtype": "float32",
        "share_followers": plan.share_followers,
        "goal": f"speed over dense >= {GOAL}",
        "lengths": [],
    }
    for tokens in map(int, arguments.lengths.split(",")):
        contestants = race(tokens, arguments.repeats, rows)
        result["lengths"].append({"length": tokens, "contestants": contestants})
        print(f"{tokens:,} tokens")
        for name, row in contestants.items():
            speed, seconds = row["speed_over_dense"], row["processor_seconds"]
            print(
                f"  {name:12} {seconds['median']:6.2f} s ({seconds['min']:.2f}–{seconds['max']:.2f})  "
                f"{speed['median']:.3f}x dense ({speed['min']:.3f}–{speed['max']:.3f})"
            )
        result["rows"] = rows_of(result["lengths"], arguments.tiny)
        result["load_average_at_end"] = os.getloadavg()[0]
        write_json(arguments.out, result)  # after each length: a long run may be cut short
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
