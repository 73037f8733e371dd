"""Load an export of `pod export --format vllm` with vLLM, and generate text. It runs where vLLM is installed.

    python examples/serve_vllm.py runs/demo-vllm/export-vllm [float32]

The second argument is the number format in which the engine computes. On CPUs without bfloat16 units, float32
is much faster. On a CPU, put `VLLM_CPU_KVCACHE_SPACE=1` in front. vLLM then takes 1 GiB for the KV cache, and
not 92 % of the machine's memory. docs/serving.md has the installation, and how to start a server.
"""

import sys

from vllm import LLM, SamplingParams

PROMPTS = ["The best way to start a company is", "def fibonacci(n):"]
BATCH_TOKENS = 512
"""Tokens of prompts that are read at a time. Layers with windows hold them too, so fewer save more."""


def main(folder: str, dtype: str = "auto") -> None:
    # eager: without it, vLLM compiles for minutes on a CPU before the first token
    llm = LLM(folder, dtype=dtype, max_num_batched_tokens=BATCH_TOKENS, enforce_eager=True)
    longest = llm.llm_engine.vllm_config.model_config.max_model_len
    held = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
    print(f"the KV cache holds {held:,} tokens of requests of {longest:,} tokens")
    for answer in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40)):
        print(f"{answer.prompt} …{answer.outputs[0].text}\n")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/serve_vllm.py EXPORT_FOLDER [DTYPE]")
    main(*sys.argv[1:])
