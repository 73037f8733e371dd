"""Host memory of every rank while a model is loaded for training.

Weights are read one by one, against whole models on every rank.

    # 1.24B weights, 4 ranks; writes benchmarks/results/start_memory.json
    python benchmarks/start_memory.py
    python benchmarks/start_memory.py --layers 2 --out /tmp/start.json

Method: a random checkpoint of the shape of Llama-3.2-1B in bfloat16 is written once, in several files. Ranks
are forked; a thread in each reads /proc/self/status every few milliseconds. Peaks are above what the rank
held before it began. Pages of a mapped file (RssFile) can be given back at any time and are told apart from
the rank's own (RssAnon). On a CPU the divided weights are in host memory too; on GPUs only what passes
through is. `whole` is `pod.load_model` on every rank, a copy as the engine makes one on its device, then
ZeRO-3.
"""

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from pod.files import write_json
from pod.measure.machine import environment
from pod.models import ModelArgs
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs
from pod.training.run.loss import LanguageModelLoss
from pod.training.run.mesh import Mesh, from_rank_0, stop_processes
from pod.training.run.optimization import deepspeed_config
from pod.training.run.start_model import hollow_start_model

WAYS = ("streamed", "whole")
RANKS = 4
SHARD_BYTES = 500_000_000
SIZE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
KINDS = ("RssAnon", "RssFile", "RssShmem")
ALLOWED = 1.2  # of a rank's share of the weights, beside one file


def write_checkpoint(folder: Path, layers: int) -> dict[str, int]:
    """Random weights in files of at most SHARD_BYTES, or one weight.

    Returns bytes of all weights and of the largest file.
    """
    config = LlamaConfig(num_hidden_layers=layers, **SIZE)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, shape in shapes.items():
        if sizes[-1] + 2 * shape.numel() > SHARD_BYTES and shards[-1]:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += 2 * shape.numel()
    place = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weights = {
            name: torch.randn(shapes[name], dtype=torch.float32).mul_(0.02).bfloat16() for name in names
        }
        save_file(weights, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(names, file)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": sum(sizes)}, "weight_map": place},
    )
    return {"weights": sum(sizes), "largest_file": max(sizes), "files": len(shards)}


def held() -> dict[str, int]:
    """Bytes of this process, by kind of page."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    pairs = (line.split(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, value in pairs if name in KINDS}


class Peak:
    """The most that was held between `start` and `stop` above what was held at `start`."""

    def __init__(self) -> None:
        self.base = held()
        self.most = dict.fromkeys([*KINDS, "all"], 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            now = {name: size - self.base[name] for name, size in held().items()}
            now["all"] = sum(now.values())
            self.most = {name: max(size, now[name]) for name, size in self.most.items()}

    def stop(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.most


def load(way: str, path: str) -> Any:
    """The module with its weights divided among the ranks."""
    args = TrainArgs(zero_stage=3)
    mesh = Mesh(1)
    peak, began = Peak(), time.monotonic()
    if way == "streamed":
        model, values = hollow_start_model(ModelArgs(path=path, layout="dense"), None, args.dtype)
        from_rank_0(values.open)
        module = LanguageModelLoss(model)
        bridge.place_weights(module, values, deepspeed_config(args), torch.bfloat16, mesh.device)
    else:
        import deepspeed

        import pod

        module = LanguageModelLoss(pod.load_model(path, dtype=torch.bfloat16))
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        deepspeed.zero.Init(module, config_dict_or_path=deepspeed_config(args), dtype=torch.bfloat16)
    result = {"peak_bytes": peak.stop(), "seconds": round(time.monotonic() - began, 1)}
    stop_processes()
    return result


def rank_main(rank: int, port: int, way: str, path: str, out: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    (out / f"{rank}.json").write_text(json.dumps(load(way, path)), encoding="utf-8")


def measure(way: str, path: str) -> list[dict[str, Any]]:
    """What each rank held, in the order of ranks."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as out:
        probe.bind(("127.0.0.1", 0))
        context, port = multiprocessing.get_context("fork"), probe.getsockname()[1]
        ranks = [
            context.Process(target=rank_main, args=(rank, port, way, path, Path(out)))
            for rank in range(RANKS)
        ]
        probe.close()
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"{way}: exit codes {[rank.exitcode for rank in ranks]}")
        return [json.loads((Path(out) / f"{rank}.json").read_text()) for rank in range(RANKS)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "start_memory.json")
    options = parser.parse_args()
    import deepspeed  # noqa: F401  imported once, before ranks are forked

    with tempfile.TemporaryDirectory() as folder:
        sizes = write_checkpoint(Path(folder), options.layers)
        ways = {way: measure(way, folder) for way in WAYS}
    allowed = int(ALLOWED * sizes["weights"] / RANKS) + sizes["largest_file"]
    worst = {way: max(one["peak_bytes"]["all"] for one in ranks) for way, ranks in ways.items()}
    for way, ranks in ways.items():
        for number, one in enumerate(ranks):
            peak = {name: f"{size / 1e6:7.0f} MB" for name, size in one["peak_bytes"].items()}
            print(f"{way:9} rank {number}: {peak} in {one['seconds']} s")
    print(
        f"most on a rank: {worst['streamed'] / 1e6:.0f} MB, "
        f"allowed {allowed / 1e6:.0f} MB (1.2 shares and a file); "
        f"whole models {worst['whole'] / 1e6:.0f} MB, {worst['whole'] / worst['streamed']:.1f} x as much"
    )
    write_json(
        options.out,
        {
            **environment(),
            "ranks": RANKS,
            "bytes": {**sizes, "allowed": allowed},
            "most_on_a_rank": worst,
            "ways": ways,
        },
    )
    raise SystemExit(worst["streamed"] > allowed)


if __name__ == "__main__":
    main()
