"""Speed of reading a prompt on CPU: an exported checkpoint against the package, and chunks against one pass.

    OMP_NUM_THREADS=2 python benchmarks/prefill_cpu.py     # 8K and 6K tokens, writes benchmarks/results/prefill_cpu.json

Four layers, 8 query and 2 KV heads of 64, hidden size 512; in the PoD model layer 0 leads for every head. The export is the folder that
`save_pretrained` writes (what `pod.export` does once it has the trained weights), loaded with `trust_remote_code` in a
process in which only torch, transformers and what these need can be imported. Package and export have a process each and read
in turns; so do chunks and one pass. Ratios are taken round by round. The goal of each is stated with it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

WINDOWS = {"num_sink_tokens": 16, "num_recent_tokens": 1008}
LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 512, 8, 2, 64, 512
GOAL = 1.3  # times the seconds of the package, and of one pass
RESULTS = Path(__file__).parent / "results" / "prefill_cpu.json"
FORBIDDEN = ("pod", "deepspeed", "flash_attn", "peft", "accelerate", "datasets")


def serve(kind: str, folders: dict[str, str]) -> None:
    """A process of one kind: reads jobs `{layout, length, chunk}` from stdin, answers each with its seconds."""
    if kind == "export":
        forbid()
    import torch
    from transformers import AutoModelForCausalLM

    if kind == "export":
        load = partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=True)
    else:
        import pod

        load = pod.load_model
    models = {layout: load(folder).eval() for layout, folder in folders.items()}
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.randint(VOCAB, (1, job["length"]), generator=torch.Generator().manual_seed(0))
        cache, began = None, time.perf_counter()
        with torch.no_grad():
            for part in ids.split(job["chunk"] or job["length"], dim=1):
                out = models[job["layout"]](part, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
        print(json.dumps(time.perf_counter() - began), flush=True)


def forbid() -> None:
    """Nothing of the package, nor what only it needs, is found in this process."""

    class Others:
        def __init__(self, finder):
            self.finder = finder

        def __getattr__(self, name):  # what else a finder does, as finding metadata of packages
            return getattr(self.finder, name)

        def find_spec(self, name, path=None, target=None):
            return None if name.split(".")[0] in FORBIDDEN else self.finder.find_spec(name, path, target)

    sys.meta_path[:] = [Others(finder) for finder in sys.meta_path]  # type: ignore[list-item]


class Reader:
    """A process that reads prompts; `seconds(job)` waits for one."""

    def __init__(self, kind: str, folders: dict[str, str], modules: str):
        command = [sys.executable, __file__, "--serve", kind, "--folders", json.dumps(folders)]
        environment = os.environ | {"HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a reading process ended with code {self.process.wait()}")
        return line

    def seconds(self, **job: Any) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def write_models(folder: Path, longest: int) -> dict[str, str]:
    """An export of a dense and of a PoD model, by layout."""
    import torch

    import pod

    torch.manual_seed(0)
    plans = {"dense": None, "pod": [[0] * KV_HEADS] * LAYERS}
    for layout, lead in plans.items():
        config = pod.PodConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=QUERY_HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=2 * longest,
            lead=lead,
            **WINDOWS,
        )
        pod.PodForCausalLM(config).save_pretrained(folder / layout)
    return {layout: str(folder / layout) for layout in plans}


def compare(name: str, runs: dict[str, Any], repeats: int, warm_up: bool) -> dict[str, Any]:
    """Race two functions that return seconds; the ratio is that of the second to the first."""
    from pod.measure.race import in_turns, spread

    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for round_number in range(-int(warm_up), repeats):
        for key in in_turns(list(runs), max(0, round_number)):
            taken = runs[key]()
            if round_number >= 0:
                seconds[key].append(taken)
    base, own = seconds.values()
    ratio = spread([slow / fast for fast, slow in zip(base, own, strict=True)])
    slow, fast = list(runs)[::-1]
    print(
        f"{name:14} {slow} / {fast}: {ratio['median']:.2f}x ({ratio['min']:.2f}–{ratio['max']:.2f}), goal {GOAL}",
        flush=True,
    )
    return {"seconds": {key: spread(all_of_them) for key, all_of_them in seconds.items()}, "ratio": ratio}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both comparisons for both layouts."""
    folders = write_models(folder, max(arguments.length, arguments.chunked_length))
    readers = {kind: Reader(kind, folders, str(folder / "modules")) for kind in ("package", "export")}
    result: dict[str, Any] = {"export_over_package": {}, "chunks_over_one_pass": {}}

    def job(kind: str, layout: str, length: int, chunk: int | None):
        return lambda: readers[kind].seconds(layout=layout, length=length, chunk=chunk)

    for layout in folders:
        runs = {kind: job(kind, layout, arguments.length, None) for kind in readers}
        measured = compare(f"{layout}, {arguments.length}", runs, arguments.repeats, arguments.warm_up)
        result["export_over_package"][layout] = measured
    for layout in folders:
        sizes = {"one pass": None, f"chunks of {arguments.chunk}": arguments.chunk}
        runs = {name: job("package", layout, arguments.chunked_length, size) for name, size in sizes.items()}
        measured = compare(
            f"{layout}, {arguments.chunked_length}", runs, arguments.repeats, arguments.warm_up
        )
        result["chunks_over_one_pass"][layout] = measured
    for reader in readers.values():
        reader.close()
    return result


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192, help="tokens that package and export read")
    parser.add_argument("--chunked-length", type=int, default=6144)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--folders", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.folders)
        return
    from pod.files import write_json
    from pod.measure.machine import environment

    shape = [LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM]
    names = ["layers", "hidden", "query_heads", "kv_heads", "head_dim"]
    result: dict[str, Any] = {
        "schema": 1,
        "benchmark": "prefill_cpu",
        "environment": environment(),
        "load_average_at_start": os.getloadavg()[0],
        "model": dict(zip(names, shape, strict=True)) | WINDOWS,
        "lengths": {
            "export": arguments.length,
            "chunked": arguments.chunked_length,
            "chunk": arguments.chunk,
        },
        "goal": GOAL,
    }
    with tempfile.TemporaryDirectory() as folder:
        result |= measure(arguments, Path(folder))
    write_json(arguments.out, result)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
