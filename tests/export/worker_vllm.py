"""Runs vLLM on exports, in an environment that has it: python worker_vllm.py ASKED.json ANSWERS.json

It imports nothing of pod-kv. ASKED is a list of runs: {"folder", "prompts" (lists of token ids),
"new_tokens", "batch_tokens", "prefix_caching"}. ANSWERS is {"version", "runs"}. Each run has, per prompt:
"tokens", "tokens_again" and "cached" (of a second round), and "prompt_logprobs" (None for the first token).
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm
from vllm import LLM, SamplingParams


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Start an engine and send it all prompts at once."""
    llm = LLM(
        asked["folder"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=asked["max_model_len"],
        max_num_batched_tokens=asked["batch_tokens"],
        enable_prefix_caching=asked["prefix_caching"],
        seed=0,
    )
    wanted = SamplingParams(
        temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True, prompt_logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    again = llm.generate(
        prompts,
        SamplingParams(temperature=0, max_tokens=asked["new_tokens"], ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "tokens_again": [list(one.outputs[0].token_ids) for one in again],
        "cached": [one.num_cached_tokens for one in again],
        "prompt_logprobs": [
            [
                None if entry is None else entry[token].logprob
                for token, entry in zip(ids, one.prompt_logprobs, strict=True)
            ]
            for ids, one in zip(asked["prompts"], outputs, strict=True)
        ],
    }


def main(asked: Path, answers: Path) -> None:
    found = []
    for run in json.loads(asked.read_text()):
        found.append(answer(run))
        gc.collect()  # the engine's cache
    answers.write_text(json.dumps({"version": vllm.__version__, "runs": found}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
