"""Should `datasets` read local files in place of our readers? Both read the same files, timed and damaged.

    python benchmarks/read_formats.py               # both parts, about 3 minutes
    python benchmarks/read_formats.py --only bad    # the damaged files alone, half a minute

The first part writes 64 MB of Python source in each format. Each reader then reads each format in a process
of its own. A row has processor seconds of reading and the growth of memory while it reads. A small file is
read first, so that imports are not counted. The second part writes small files with one fault each, and
counts the texts that each reader gives. `datasets` streams; decoded rows are read one by one.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import zstandard
from data_pipeline import copies, originals
from pyarrow import parquet

from pod.data import load_documents
from pod.files import write_json
from pod.measure.machine import environment

RESULTS = Path(__file__).parent / "results" / "read_formats.json"
CORPUS_BYTES = 64 * 10**6
READERS = ("ours", "datasets")
DATASETS_NAME = {"parquet": "parquet", "arrow": "arrow", "csv": "csv", "txt": "text"}
"""Suffix of a file and the name of the builder of `datasets`; other suffixes are json."""
GOOD = ["first text", "second text", "third text"]
WARM_UP = "warm-up.jsonl"
"""A small file that a process reads before it is measured."""
AGENT_FIELDS = {
    "id": "1",
    "source": "cli",
    "model": "m",
    "system_prompt": "",
    "messages": [{"role": "user"}],
}
"""`datasets` 5.2 takes records with these fields for sessions of an agent."""


def write_corpus(folder: Path, texts: list[str]) -> dict[str, list[str]]:
    """Write the same texts in each format. Format → names of its files."""
    lines = "".join(json.dumps({"id": str(number), "text": text}) + "\n" for number, text in enumerate(texts))
    (folder / "lines.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(folder / "packed.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as stream:
        stream.write(lines)
    table = pyarrow.table({"id": [str(number) for number in range(len(texts))], "text": texts})
    parquet.write_table(table, folder / "groups.parquet", row_group_size=1000)
    parquet.write_table(table, folder / "one_group.parquet", row_group_size=len(texts))
    write_arrow(folder / "stream.arrow", table)
    small = [f"small-{number:03d}.parquet" for number in range(100)]
    for number, name in enumerate(small):
        parquet.write_table(table.slice(3 * number, 3), folder / name)
    return {
        "jsonl": ["lines.jsonl"],
        "jsonl.gz": ["packed.jsonl.gz"],
        "parquet, groups of 1,000 rows": ["groups.parquet"],
        "parquet, one group": ["one_group.parquet"],
        "arrow stream": ["stream.arrow"],
        "100 parquet files of 3 rows": small,
    }


def write_arrow(file: Path, table: pyarrow.Table) -> None:
    with pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)


def write_bad_files(folder: Path) -> dict[str, list[str]]:
    """Files of three good texts and one fault each. Fault → names of its files."""
    first, second, third = (json.dumps({"text": text}) for text in GOOD)
    faults = {
        "a line that is no JSON": [first, second, '{"text": "cut', third],
        "a line that is an array": [first, second, '["a", "b"]', third],
        "a lone surrogate": [first, second, '{"text": "\\ud800"}', third],
        "a line without the field": [first, second, '{"id": 3}', third],
        "texts that are dates": ['{"text": "2024-05-01T10:00:00"}'] * len(GOOD),
        "fields of an agent's session beside the text": [
            json.dumps({"text": text} | AGENT_FIELDS) for text in GOOD
        ],
    }
    files = {}
    for number, (fault, lines) in enumerate(faults.items()):
        name = f"bad-{number}.jsonl"
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        files[fault] = [name]
    (folder / "columns-1.jsonl").write_text(first + "\n", encoding="utf-8")
    other = json.dumps({"text": GOOD[1], "url": "x", "score": 1})
    (folder / "columns-2.jsonl").write_text(other + "\n", encoding="utf-8")
    files["a second file with more columns"] = ["columns-1.jsonl", "columns-2.jsonl"]

    whole = "".join(json.dumps({"text": f"{number} " * 200}) + "\n" for number in range(2000))
    packed = zstandard.ZstdCompressor().compress(whole.encode())
    (folder / "cut.jsonl.zst").write_bytes(packed[: len(packed) // 2])
    files["a zstd file that was cut"] = ["cut.jsonl.zst"]

    texts = pyarrow.array([GOOD[0].encode(), b"\xff\xfe", GOOD[2].encode()], pyarrow.binary())
    as_text = pyarrow.StringArray.from_buffers(len(texts), *texts.buffers()[1:])
    write_arrow(folder / "cell.arrow", pyarrow.table({"text": as_text}))
    files["an arrow cell that is not UTF-8"] = ["cell.arrow"]

    pairs = pyarrow.array([[("key", 1)]] * len(GOOD), pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    times = pyarrow.array([(1, 2, 3)] * len(GOOD), pyarrow.month_day_nano_interval())
    write_arrow(folder / "types.arrow", pyarrow.table({"text": GOOD, "pairs": pairs, "times": times}))
    files["a column of another type that nobody reads"] = ["types.arrow"]
    return files


def texts_by_ours(files: list[str]) -> Iterator[object]:
    for document in load_documents(files, unreadable="skip"):
        yield document.text


def texts_by_datasets(files: list[str]) -> Iterator[object]:
    from datasets import load_dataset

    builder = DATASETS_NAME.get(Path(files[0]).suffix[1:], "json")
    rows = load_dataset(builder, data_files=files, split="train", streaming=True)
    for row in rows:
        yield row["text"]


def peak_megabytes() -> float:
    """The most memory that this process has held. (`ru_maxrss` also counts the parent's before `exec`.)"""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def read_once(reader: str, files: list[str]) -> dict:
    """Read the files in this process. Count texts, characters, processor seconds and growth of memory."""
    texts_of = texts_by_ours if reader == "ours" else texts_by_datasets
    assert list(texts_of([WARM_UP])) == GOOD  # imports what it needs
    texts, not_texts, characters, error = 0, 0, 0, None
    memory = peak_megabytes()
    began = time.process_time()
    try:
        for text in texts_of(files):
            if isinstance(text, str) and text:
                texts += 1
                characters += len(text)
            else:
                not_texts += 1
    except (OSError, ValueError, ImportError) as stopped:
        error = f"{type(stopped).__name__}: {stopped}".splitlines()[0][:160]
    return {
        "texts": texts,
        "not_texts": not_texts,
        "characters": characters,
        "error": error,
        "cpu_seconds": round(time.process_time() - began, 3),
        "memory_growth_megabytes": round(peak_megabytes() - memory, 1),
        "peak_megabytes": round(peak_megabytes(), 1),
    }


def read_in_a_process(folder: Path, reader: str, files: list[str]) -> dict:
    command = [sys.executable, str(Path(__file__).resolve()), "--reader", reader, *files]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_speed(folder: Path, repeats: int) -> list[dict]:
    """Both readers in turns on each format."""
    texts = []
    size = 0
    for text in copies(originals()):
        texts.append(text)
        size += len(text)
        if size > CORPUS_BYTES:
            break
    rows = []
    for name, files in write_corpus(folder, texts).items():
        row = {"format": name, "ours": [], "datasets": []}
        for _ in range(repeats):
            for reader in READERS:
                row[reader].append(read_in_a_process(folder, reader, files))
        rows.append(row)
        print(f"{name:32}", *(speed_cell(reader, row[reader]) for reader in READERS), flush=True)
    return rows


def speed_cell(reader: str, runs: list[dict]) -> str:
    seconds = ", ".join(f"{run['cpu_seconds']:.2f}" for run in runs)
    growth = max(run["memory_growth_megabytes"] for run in runs)
    return f"{reader}: {seconds} s, {growth:.0f} MB, {runs[0]['texts']} texts;"


def measure_bad(folder: Path) -> list[dict]:
    """Texts that each reader gives of each damaged file."""
    rows = []
    for fault, files in write_bad_files(folder).items():
        row = {"fault": fault} | {reader: read_in_a_process(folder, reader, files) for reader in READERS}
        rows.append(row)
        print(f"{fault:44}", *(bad_cell(reader, row[reader]) for reader in READERS), flush=True)
    return rows


def bad_cell(reader: str, run: dict) -> str:
    others = f", {run['not_texts']} that are no text" if run["not_texts"] else ""
    error = f", then {run['error']}" if run["error"] else ""
    return f"{reader}: {run['texts']} texts{others}{error};"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("speed", "bad"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        print(json.dumps(read_once(options.reader, options.files)))
        return
    results = {"schema": 1, "environment": environment()}
    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in GOOD)
        Path(folder, WARM_UP).write_text(lines, encoding="utf-8")
        if options.only != "bad":
            results["speed"] = measure_speed(Path(folder), options.repeats)
        if options.only != "speed":
            results["bad"] = measure_bad(Path(folder))
    write_json(options.out, results)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
