"""What the GPU benchmarks share.

Arguments, the device, interleaved timing by CUDA events, peak memory, copy bandwidth, result rows.

A contestant is a function of one argument, `mark`, which it may call between its parts (forward, backward).
One that raises is recorded with its error in one line and leaves the race; if it took the CUDA context with
it, the script starts again without it.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pod.errors import one_line
from pod.files import write_json
from pod.measure.machine import environment
from pod.measure.speed_comparison import spread
from pod.modeling.model import flash_version

Contestant = Callable[[Callable[[], None]], Any]
RESULTS = Path(__file__).parent / "results" / "gpu"
_PACKAGES = (
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "deepspeed",
)


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Arguments of every GPU benchmark; `name` is the result file's."""
    arguments = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--tiny",
        action="store_true",
        help="toy sizes, also without a GPU: tests the script, measures nothing",
    )
    arguments.add_argument(
        "--out", type=Path, help=f"result file, default benchmarks/results/gpu/{name}.json"
    )
    arguments.add_argument("--failed", type=json.loads, default={}, help=argparse.SUPPRESS)
    return arguments


def choose_device(tiny: bool) -> torch.device:
    """The GPU, with the FlashAttention that POD_FLASH_ATTENTION names; the CPU for a tiny run.

    Without a GPU, and for a FlashAttention that cannot run on it, one line on stderr and exit code 2.
    """
    if torch.cuda.is_available() and not tiny:
        try:
            flash_version.use()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return torch.device("cuda", torch.cuda.current_device())
    if not tiny:
        print(
            "error: no CUDA device here; these rows need one GPU, --tiny tests the script on CPU",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return torch.device("cpu")


def header(benchmark: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """First keys of a result: date, versions, commit, hardware, device."""
    seen = environment()
    for package in _PACKAGES:
        try:
            seen["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "schema": 1,
        "benchmark": benchmark,
        "tiny": tiny,
        "environment": seen,
        "device": describe(device),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """Name, compute capability, memory in bytes, multiprocessors, CUDA and cuDNN versions."""
    if device.type != "cuda":
        return {"name": "cpu"}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def goal_row(
    name: str, goal: str, figure: float | None, unit: str, met: bool | None = None, reason: str | None = None
) -> dict[str, Any]:
    """One line of the summary. met: None = not measured, with the reason."""
    return {"name": name, "goal": goal, "figure": figure, "unit": unit, "met": met, "reason": reason}


def finish(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the rows and write the file, whole or not at all."""
    for row in result["rows"]:
        print(line_of(row))
    out = arguments.out or RESULTS / f"{result['benchmark']}{'_tiny' if arguments.tiny else ''}.json"
    write_json(out, result)
    print(f"wrote {out}")


def line_of(row: dict[str, Any]) -> str:
    """A summary row as text."""
    figure = "unmeasured" if row["figure"] is None else f"{row['figure']:.3f} {row['unit']}"
    verdict = {True: "met", False: "missed", None: "no verdict"}[row["met"]]
    return f"{row['name']}: {figure}, goal {row['goal']}: {verdict}" + (
        f" ({row['reason']})" if row["reason"] else ""
    )


class DeviceLost(RuntimeError):
    """A contestant broke the CUDA context: nothing more runs in this process.

    contestant: whose turn it was.
    """

    def __init__(self, contestant: str, reason: str):
        super().__init__(reason)
        self.contestant = contestant


def is_lost(device: torch.device) -> bool:
    """Whether the CUDA context is broken; frees what nobody holds where it is not."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError:
            return True
    return False


def start(main: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run; when a contestant breaks the CUDA context, run again in a fresh process.

    That contestant is then recorded as failed.
    """
    try:
        return main(arguments)
    except DeviceLost as error:
        failed = {**arguments.failed, error.contestant: str(error)}
        if error.contestant in arguments.failed:
            raise
        words = sys.argv[:]
        if "--failed" in words:
            place = words.index("--failed")
            del words[place : place + 2]
        print(
            f"{error.contestant} broke the CUDA context ({error}); starting again without it", file=sys.stderr
        )
        sys.stdout.flush()
        _close_on_exec()
        os.execv(sys.executable, [sys.executable, *words, "--failed", json.dumps(failed)])


def _close_on_exec() -> None:
    """Mark every open file.

    So the driver frees the lost context when this process's program is replaced.
    """
    for descriptor in Path("/proc/self/fd").glob("*"):
        if int(descriptor.name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(descriptor.name), False)


class Race:
    """Contestants that take turns in one process.

    scope: goes before the names in `failed`, such as "131072 tokens"; failed: reasons of contestants that are
    not to run. After `run`: seconds[name] = one list per timed round of the parts' seconds; errors[name] =
    why it did not finish.
    """

    def __init__(self, device: torch.device, scope: str = "", failed: dict[str, str] | None = None):
        self.device, self.scope, self.failed = device, scope, failed or {}
        self.contestants: dict[str, Contestant] = {}
        self.seconds: dict[str, list[list[float]]] = {}
        self.errors: dict[str, str] = {}

    def add(self, name: str, make: Callable[[], Contestant]) -> None:
        """A contestant; `make` builds it and may raise. Contestants run once, which compiles them."""
        key = f"{self.scope} {name}".strip()
        if key in self.failed:
            self.errors[name] = self.failed[key]
            return
        self._guard(name, lambda: self._enter(name, make()))

    def run(self, rounds: int, budget: float | None = None) -> None:
        """Timed rounds, at least 3 if there are as many as that.

        They are fewer than `rounds` when they would take more than `budget` seconds.
        """
        warm = {}
        for name in list(self.contestants):
            self._guard(name, lambda name=name: warm.update({name: sum(self._timed(self.contestants[name]))}))
        if budget is not None and warm:
            rounds = max(min(rounds, 3), min(rounds, int(budget / max(sum(warm.values()), 1e-9))))
        for turn in range(rounds):
            names = list(self.contestants)
            shift = turn % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                self._guard(name, lambda name=name: self._record(name))
        for name in self.errors:  # one that failed half-way has no figure
            self.seconds.pop(name, None)

    def totals(self, name: str) -> list[float]:
        """Seconds of every round."""
        return [sum(parts) for parts in self.seconds[name]]

    def summary(self, name: str) -> dict[str, Any]:
        """Spread of the seconds, per part too; or the error."""
        if name in self.errors:
            return {"error": self.errors[name]}
        parts = list(zip(*self.seconds[name], strict=True))
        result: dict[str, Any] = {"seconds": spread(self.totals(name))}
        if len(parts) > 1:
            result["seconds_of_parts"] = [spread(part) for part in parts]
        return result

    def extra_bytes(self, name: str, beyond_results: bool) -> int | None:
        """Peak of allocated bytes during a run, beyond what was there before, and the tensors it returns.

        None on a CPU, and when this further run fails, which is then among the errors.
        """
        found: list[int] = []
        if self.device.type == "cuda":
            self._guard(name, lambda: found.append(self._peak(self.contestants[name], beyond_results)))
        return found[0] if found else None

    def _peak(self, contestant: Contestant, beyond_results: bool) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        results = contestant(lambda: None)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        if beyond_results:
            peak -= sum(x.nbytes for x in (results if isinstance(results, list) else [results]))
        return peak

    def _enter(self, name: str, contestant: Contestant) -> None:
        self._timed(contestant)
        self.contestants[name], self.seconds[name] = contestant, []

    def _record(self, name: str) -> None:
        self.seconds[name].append(self._timed(self.contestants[name]))

    def _timed(self, contestant: Contestant) -> list[float]:
        if self.device.type != "cuda":
            times = [time.perf_counter()]
            contestant(lambda: times.append(time.perf_counter()))
            times.append(time.perf_counter())
            return [b - a for a, b in itertools.pairwise(times)]
        events = [torch.cuda.Event(enable_timing=True)]
        events[0].record()

        def mark() -> None:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        contestant(mark)
        mark()
        torch.cuda.synchronize(self.device)
        return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
            return
        except Exception as error:  # noqa: BLE001 - compilers and drivers raise anything; the others go on
            reason = one_line(error, with_class=True, limit=400)
        self.errors[name] = reason
        self.contestants.pop(name, None)
        print(f"  {name} failed: {reason}")
        if is_lost(self.device):
            raise DeviceLost(f"{self.scope} {name}".strip(), reason)


def ratios(own: list[float], peer: list[float]) -> dict[str, Any]:
    """Spread of own / peer, round by round."""
    return spread([a / b for a, b in zip(own, peer, strict=True)])


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; infinite for NaN, which no comparison would see."""
    found, truth = found.detach().double(), truth.detach().double()
    error = float((found - truth).norm() / truth.norm())
    return error if error == error else float("inf")


def copier(device: torch.device, size: int) -> tuple[Contestant, int]:
    """A copy of `size` bytes as a contestant, and the bytes that it moves (read and written)."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda mark: target.copy_(source), 2 * size


def graphed(step: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`step` as a CUDA graph (itself on a CPU): no time on the host between its kernels."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # without a stream it is one of the device on which this process recorded its first graph
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay
