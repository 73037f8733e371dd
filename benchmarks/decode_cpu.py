"""Decode speed on CPU: four plans against the dense layout and stock transformers.

Head sizes are real, in a model of few layers.

    # 8K, 32K and 64K tokens, writes benchmarks/results/decode_cpu.json
    OMP_NUM_THREADS=2 python benchmarks/decode_cpu.py

`pod bench --config bench_cpu` for each plan: four layers, 16 query and 4 KV heads of 128, hidden size 2048, a
small feed-forward part, so that attention over the cache is what is measured. In two plans 75 % of the
(layer, KV head) pairs follow; in the others, `roles`, pairs lead, follow and keep their window, which saves
50 and 65 % of the bytes in the limit.
"""

import argparse
import os
import tempfile
from pathlib import Path

from pod.bench.run import run_bench
from pod.files import write_json
from pod.recipe import load_recipe

PLANS = {
    "16+1008": {"model.num_recent_tokens": 1008, "bench.share_followers": 0.75},
    "16+4080": {"model.num_recent_tokens": 4080, "bench.share_followers": 0.75},
    "roles 50%": {"bench.share_followers": 2 / 16, "bench.share_windows": 7 / 16},
    "roles 65%": {"bench.share_followers": 3 / 16, "bench.share_windows": 9 / 16},
}
"""What differs from the recipe."""
RESULTS = Path(__file__).parent / "results" / "decode_cpu.json"


def main() -> None:
    """Run and write the JSON."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--lengths", default="8192,32768,65536", help="tokens in the cache, comma-separated")
    words.add_argument("--steps", type=int, default=8, help="tokens per timed repeat")
    words.add_argument("--repeats", type=int, default=9)
    words.add_argument("--out", type=Path, default=RESULTS)
    arguments = words.parse_args()
    result: dict = {
        "schema": 2,
        "benchmark": "decode_cpu",
        # above 1: other work took part of the cores, look at min and max
        "load_average_at_start": os.getloadavg()[0],
        "plans": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        changes = {"output_dir": folder, "bench.methods": "pod", "bench.device": "cpu"}
        changes |= {f"bench.{name}": getattr(arguments, name) for name in ("lengths", "steps", "repeats")}
        for name, own in PLANS.items():
            changes["bench.stock"] = not result["plans"]  # once
            print(f"== {name}")
            recipe = load_recipe("bench_cpu", [f"{key}={value}" for key, value in (changes | own).items()])
            result["plans"][name] = run_bench(recipe)
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
