"""All rows that need a GPU, one after the other: `make bench-gpu`, 28 minutes.

Each runs in a process of its own.

    # goes on where it stopped; writes benchmarks/results/gpu/summary.md and .json
    python benchmarks/gpu_rows.py
    python benchmarks/gpu_rows.py --only decode_32k,column_sums --again
    python benchmarks/gpu_rows.py --tiny       # every script at toy sizes, without a GPU: tests them

A row whose result was measured on this device with the code that is here is kept: the driver marks results
with a hash of all Python files of pod/ and benchmarks/, which also works where there is no git, and which the
results themselves do not change. A row that runs out of its time is stopped with all its processes, and
leaves no result behind. The summary says of every row: met, missed, or unmeasured and why.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_tools import RESULTS, choose_device, describe, line_of

from pod.files import atomic_write_text, read_json, write_json
from pod.measure.machine import environment

HERE = Path(__file__).parent
TOTAL_SECONDS = 28 * 60


@dataclass(frozen=True)
class Row:
    """A run of a script.

    name: also of the result file; seconds: its limit; what, goal: stand in the summary until there is a
    result.
    """

    name: str
    script: str
    seconds: float
    what: str
    goal: str
    arguments: tuple[str, ...] = ()


ROWS = (
    Row(
        "attention_32k",
        "attention_gpu",
        100,
        "attention fwd+bwd, 32K",
        "<= 1.2 x dense",
        ("--lengths", "32768"),
    ),
    Row(
        "attention_128k",
        "attention_gpu",
        240,
        "attention fwd+bwd, 128K",
        "<= 1.1 x dense",
        ("--lengths", "131072"),
    ),
    Row(
        "attention_float32",
        "attention_gpu",
        150,
        "attention fwd+bwd in float32, 32K",
        "no goal: ends the n x n reference",
        ("--dtype", "float32", "--lengths", "32768", "--budget", "30"),
    ),
    Row(
        "decode_32k",
        "decode_attention_gpu",
        100,
        "decode attention, 32K",
        "<= 0.76 x dense",
        ("--lengths", "32768"),
    ),
    Row(
        "decode_128k",
        "decode_attention_gpu",
        130,
        "decode attention, 128K",
        "<= 0.73 x dense",
        ("--lengths", "131072"),
    ),
    Row("column_sums", "column_sums", 80, "column sums, 128K", "<= 1 x dense prefill", ("--gpu",)),
    *(
        Row(
            f"tokens_per_second_{batch}",
            "tokens_per_second",
            195,
            f"tokens/s end to end, 128K, batch {batch}",
            ">= 0.95 of the byte ceiling",
            ("--batch", batch),
        )
        for batch in "14"
    ),
    Row("max_batch", "max_batch", 190, "max batch", ">= 0.97 of the byte theory"),
    Row("longest_sequence", "longest_sequence", 260, "longest training sequence", ">= 0.9 x dense"),
)


def result_file(row: Row, folder: Path) -> Path:
    """Where the row's result is kept."""
    return folder / f"{row.name}.json"


def read_result(path: Path) -> dict[str, Any] | None:
    """A script's result; None when there is none or it is not one."""
    try:
        content = read_json(path)
    except ValueError:
        return None
    usable = isinstance(content, dict) and isinstance(content.get("rows"), list) and "environment" in content
    return content if usable else None


def code_hash(root: Path = HERE.parent) -> str:
    """SHA-256 over all Python files of pod/ and benchmarks/: what the figures were measured with."""
    digest = hashlib.sha256()
    for folder in ("pod", "benchmarks"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(content: dict[str, Any] | None, tiny: bool) -> bool:
    """Whether a result was measured with this code on this device, at this size."""
    if content is None or bool(content.get("tiny")) != tiny:
        return False
    return content.get("measured_with") == measured_with(tiny)


def measured_with(tiny: bool) -> dict[str, Any]:
    """What a result depends on besides its row: code, device, and the libraries that bring kernels."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and not tiny else None
    return {"code": code_hash(), "gpu": gpu, "torch": torch.__version__}


def run(row: Row, out: Path, tiny: bool) -> str | None:
    """Start the row's script; None when it wrote its result, else the reason why not.

    Its output goes to this process's.
    """
    script = HERE / f"{row.script}.py"
    if not script.is_file():
        return f"benchmarks/{row.script}.py does not exist"
    before = measured_with(tiny)
    fresh = out.with_name(f".{out.name}.new")
    command = [
        sys.executable,
        str(script),
        *row.arguments,
        *(["--tiny"] if tiny else []),
        "--out",
        str(fresh),
    ]
    try:
        reason = _wait(subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True), row.seconds)
        content = read_result(fresh)
        if reason is None and content is None:
            reason = "it ended well, and wrote no result with rows"
        if reason is None:
            write_json(out, {**content, "measured_with": before})
        return reason
    finally:
        fresh.unlink(missing_ok=True)


def _wait(process: subprocess.Popen, limit: float) -> str | None:
    """Wait until the process ends.

    Stops it and all that it started after `limit` seconds, and on any interruption of ours.
    """
    try:
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return f"stopped after its limit of {limit:.0f} s"
    finally:
        _stop(process)
    text = errors.decode(errors="replace")
    sys.stderr.write(text[-4000:])
    if process.returncode == 0:
        return None
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    return f"exit code {process.returncode}: {lines[-1].strip()[:300]}"


def _stop(process: subprocess.Popen) -> None:
    """End the process group that `run` made for this process, workers included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_all(rows: list[Row], folder: Path, tiny: bool, again: bool, budget: float) -> dict[str, str]:
    """Run what is not there yet; reasons of the rows that got no result, by name."""
    began, reasons = time.perf_counter(), {}
    for number, row in enumerate(rows, 1):
        out = result_file(row, folder)
        title = f"== {number}/{len(rows)} {row.name}"
        if not again and is_current(read_result(out), tiny):
            print(f"{title}: kept, measured with this code on this device")
            continue
        left = budget - (time.perf_counter() - began)
        if left < row.seconds:  # stopped half-way it would have measured nothing
            reasons[row.name] = (
                f"the {budget / 60:.0f} minutes of the whole run were over; run it again to go on"
            )
            continue
        print(f"{title}: {row.what}, at most {row.seconds:.0f} s", flush=True)
        started = time.perf_counter()
        reason = run(row, out, tiny)
        print(
            f"== {row.name} {'failed' if reason else 'done'} in {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        if reason:
            reasons[row.name] = reason
            print(f"   {reason}")
        summarise(folder, tiny, reasons)  # a run that is stopped leaves a summary of what it did
    return reasons


def summarise(folder: Path, tiny: bool, reasons: dict[str, str]) -> list[dict[str, Any]]:
    """Write summary.json and summary.md of all rows.

    Results of other code or another device are told from new ones.
    """
    here, lines = environment(), []
    for row in chosen_rows(None, tiny):
        content = read_result(result_file(row, folder))
        base = {"row": row.name, "current": is_current(content, tiny)}
        if content is None:
            blank = {"figure": None, "unit": "", "met": None, "reason": reasons.get(row.name, "not run")}
            lines.append({**base, "name": row.what, "goal": row.goal, **blank})
        else:
            lines += [{**base, **line} for line in content["rows"]]
    device = describe(torch.device("cuda")) if torch.cuda.is_available() and not tiny else {"name": "cpu"}
    write_json(
        folder / "summary.json",
        {"schema": 1, "tiny": tiny, "environment": here, "device": device, "rows": lines},
    )
    atomic_write_text(folder / "summary.md", markdown(lines, here, device, tiny))
    return lines


def markdown(lines: list[dict[str, Any]], here: dict[str, Any], device: dict[str, Any], tiny: bool) -> str:
    """The summary as one table."""
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items() if version)
    text = [
        "# Rows measured on a GPU" + (" (toy sizes: the figures mean nothing)" if tiny else ""),
        "",
        f"{device['name']}; commit {str(here['commit'])[:12]}, code {code_hash()[:12]}; "
        f"{here['date']}; {versions}",
        "",
        "| row | goal | figure | verdict | note |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        figure = "unmeasured" if line["figure"] is None else f"{line['figure']:.3f} {line['unit']}"
        verdict = {True: "met", False: "**missed**", None: "—"}[line["met"]]
        note = (line["reason"] or "") + (
            ""
            if line["current"] or line["figure"] is None
            else " (measured with other code or on another device)"
        )
        cells = (line["name"], line["goal"], figure, verdict, note)
        text.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(text) + "\n"


def read_arguments() -> argparse.Namespace:
    """Command line."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--tiny", action="store_true", help="toy sizes, also without a GPU: tests the scripts")
    words.add_argument("--only", help="scripts to run, comma-separated; default all")
    words.add_argument("--again", action="store_true", help="measure again what is there")
    words.add_argument("--minutes", type=float, default=TOTAL_SECONDS / 60, help="for all rows together")
    words.add_argument(
        "--folder",
        type=Path,
        help="where results go, default benchmarks/results/gpu (tiny: runs/bench_gpu_tiny)",
    )
    return words.parse_args()


def chosen_rows(only: str | None, tiny: bool) -> list[Row]:
    """The rows named, in the order of the table; tiny: each script once. ValueError for unknown names."""
    names = {row.name for row in ROWS} if only is None else set(only.split(","))
    unknown = sorted(names - {row.name for row in ROWS})
    if unknown:
        raise ValueError(
            f"no row is called {', '.join(unknown)}; choose from {', '.join(r.name for r in ROWS)}"
        )
    rows = [row for row in ROWS if row.name in names]
    if not tiny:
        return rows
    return [row for i, row in enumerate(rows) if row.script not in {earlier.script for earlier in rows[:i]}]


def main() -> int:
    """Run and summarise; 0 when every chosen row has a result, 1 when one has none."""
    arguments = read_arguments()
    try:
        rows = chosen_rows(arguments.only, arguments.tiny)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    choose_device(arguments.tiny)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # through the `finally` that stops the row's processes
    default = HERE.parent / "runs" / "bench_gpu_tiny" if arguments.tiny else RESULTS
    folder = arguments.folder or default
    folder.mkdir(parents=True, exist_ok=True)
    reasons = run_all(rows, folder, arguments.tiny, arguments.again, 60 * arguments.minutes)
    for line in summarise(folder, arguments.tiny, reasons):
        print(line_of(line))
    print(f"wrote {folder / 'summary.md'}")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
