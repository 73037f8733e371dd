"""Load an export of `pod export --format vllm` with vLLM, and generate text. It runs where vLLM is installed.

    python examples/serve_vllm.py runs/demo-vllm/export-vllm [float32]

The second argument is the number format in which the engine computes. On CPUs without bfloat16 units, float32
is much faster. On a CPU, put `VLLM_CPU_KVCACHE_SPACE=1` in front. vLLM then takes 1 GiB for the KV cache, and
not 92 % of the machine's memory. `vllm serve runs/demo-vllm/export-vllm` starts a server with OpenAI's
interface.
docs/serving.md has the installation.
"""

import sys

from vllm import LLM, SamplingParams

PROMPTS = ["The best way to start a company is", "def fibonacci(n):"]


def main(folder: str, dtype: str = "auto") -> None:
    llm = LLM(folder, dtype=dtype, max_model_len=2048)
    cache = llm.llm_engine.vllm_config.cache_config
    print(f"the KV cache holds {cache.kv_cache_size_tokens:,} tokens")
    for answer in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40)):
        print(f"{answer.prompt} …{answer.outputs[0].text}\n")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python examples/serve_vllm.py EXPORT_FOLDER [DTYPE]")
    main(*sys.argv[1:])
