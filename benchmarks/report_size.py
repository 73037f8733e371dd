"""How long a report takes and what it holds.

It is made of copies of committed results under other names, with each sample repeated.

python benchmarks/report_size.py [--methods 30] [--samples 10000]
"""

import argparse
import copy
import resource
import tempfile
import time
from pathlib import Path

from pod.eval.report.write import write_merged
from pod.files import read_json, write_json

SOURCE = Path(__file__).parent / "results" / "eval_smollm2"


def main(methods: int, samples: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        run.mkdir()
        for number in range(methods):
            content = read_json(SOURCE / ("full.json" if not number else "snapkv.json"))
            content["method"] = content["method"] if number < 2 else f"snapkv@{number}"
            task = copy.deepcopy(content["parts"]["niah"])
            given = task["samples"]
            task["samples"] = [
                {**given[i % len(given)], "id": str(i), "prompt_hash": f"{i:016x}"} for i in range(samples)
            ]
            content["parts"] = {"niah": task}
            write_json(run / f"{content['method'].replace('@', '_')}.json", content)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        write_merged([run], Path(folder, "report"))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{methods} methods x {samples} samples: {time.perf_counter() - began:.1f} s, "
            f"peak {peak / 2**10:.0f} MiB (before {before / 2**10:.0f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", type=int, default=30)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()
    main(options.methods, options.samples)
