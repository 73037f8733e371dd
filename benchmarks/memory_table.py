"""How many bytes the KV cache of a large model takes, and how many requests fit beside the weights.

Arithmetic on sizes from the models' config.json; no weights are read. It says what a plan may save. Whether a
plan keeps the quality is what `pod explore` and `pod eval` measure on the model itself.

python benchmarks/memory_table.py                        # the table of the README, in Markdown
python benchmarks/memory_table.py --gpu-gigabytes 141    # another card
"""

import argparse
import math

from pod import SharingPlan
from pod.models import KNOWN_SIZES

GB = 10**9
MODELS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B")
CONTEXTS = {"128K": 128 * 1024, "1M": 1024 * 1024}
WINDOWS = (16, 4080)
BYTES_PER_NUMBER = 2
SHARE_OF_A_CARD = 0.9  # the rest is for activations
PARAMETERS = {"meta-llama/Llama-3.1-8B": 8.03e9, "meta-llama/Llama-3.1-70B": 70.6e9}


def dense_bytes(sizes: dict, tokens: int) -> int:
    """Keys and values in 16 bits: 2 x layers x KV heads x head dimension x 2 bytes for each token."""
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    heads = sizes["num_hidden_layers"] * sizes["num_key_value_heads"]
    return 2 * heads * head_dim * BYTES_PER_NUMBER * tokens


def plans(sizes: dict) -> dict[str, SharingPlan]:
    """Plans of the table: layers in 4 bits, and half of the heads with a window."""
    layers = sizes["num_hidden_layers"]
    heads = sizes["num_key_value_heads"]
    dense = SharingPlan.dense(layers, heads)
    half = SharingPlan.of_leads([range(0, heads, 2)] * layers, heads)
    four_bits = (4,) * layers
    return {
        "`int4` alone": SharingPlan(dense.lead, bits=four_bits),
        "half of the heads keep a window": half,
        "both": SharingPlan(half.lead, bits=four_bits),
    }


def requests(model: str, cache_bytes: float, gpu_bytes: float) -> str:
    """How many requests fit, on the fewest cards of 1, 2, 4 or 8 that hold the weights and one request."""
    weights = PARAMETERS[model] * BYTES_PER_NUMBER
    for cards in (1, 2, 4, 8):
        room = cards * gpu_bytes * SHARE_OF_A_CARD - weights
        if room >= cache_bytes:
            return f"{math.floor(room / cache_bytes)} on {cards}"
    return "none on 8"


def rows(gpu_bytes: float) -> list[list[str]]:
    """One row per model, context and way of holding the cache."""
    table = []
    for model in MODELS:
        sizes = KNOWN_SIZES[model]
        for context, tokens in CONTEXTS.items():
            dense = dense_bytes(sizes, tokens)
            held = {"dense, 16 bits": float(dense)}
            for name, plan in plans(sizes).items():
                held[name] = dense * (1 - plan.saving(tokens, *WINDOWS))
            for name, size in held.items():
                fit = requests(model, size, gpu_bytes)
                table.append(
                    [model.split("/")[1], context, name, f"{size / GB:.1f}", f"{size / dense:.0%}", fit]
                )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu-gigabytes", type=float, default=80, help="memory of one card (10^9 bytes)")
    gigabytes = parser.parse_args().gpu_gigabytes
    header = [
        "model",
        "context",
        "cache",
        "GB per request",
        "of dense",
        f"requests on cards of {gigabytes:g} GB",
    ]
    lines = [header, ["---"] * len(header), *rows(gigabytes * GB)]
    for line in lines:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
