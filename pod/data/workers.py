"""Runs numbered tasks in processes of this machine, with one progress bar. The processes end with their parent, even a killed one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tqdm import tqdm

Count = Callable[[int], None]
"""Adds to the progress bar."""
Task = Callable[[int, Count], Any]
"""task(number, count) → a small result."""

POLL_SECONDS = 0.3
TRIM_SECONDS = 10.0
"""How often a worker gives freed memory back at most; more often, getting it again costs a tenth of the speed."""
_worker: tuple[Task, Any] | None = None
_trimmed_at = 0.0


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(
    task: Task,
    numbers: Sequence[int],
    workers: int,
    *,
    description: str,
    unit: str,
    total: int | None = None,
    done: int = 0,
) -> list[Any]:
    """Run `task` for all `numbers`, at most `workers` at a time, in this order; returns their results in this order.

    The first error ends everything and is raised. `total`, `done`: of the progress bar, in `unit`. One worker = this process.
    """
    with (
        _one_thread_each(),
        tqdm(
            total=total, initial=done, unit=f" {unit}", unit_scale=True, desc=description, mininterval=1
        ) as bar,
    ):
        if workers == 1 or len(numbers) <= 1:
            return [task(number, lambda amount: _advance(bar, amount)) for number in numbers]
        return _run_in_processes(task, numbers, min(workers, len(numbers)), bar)


def _run_in_processes(task: Task, numbers: Sequence[int], workers: int, bar: Any) -> list[Any]:
    # Forked processes share the loaded tokenizer and start in milliseconds; elsewhere the task must be picklable.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    counter = context.Value("q", 0)
    others = set(multiprocessing.active_children())
    _give_back_memory()  # workers start with all that this process holds
    executor = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(task, counter, os.getpid())
    )
    try:
        gc.freeze()  # a collection in a worker would touch, hence copy, every object of this process
        futures = [executor.submit(_run_task, number) for number in numbers]
        gc.unfreeze()
        waiting: set[Future] = set(futures)
        while waiting:
            finished, waiting = wait(waiting, POLL_SECONDS, FIRST_EXCEPTION)
            _advance(bar, counter.value - int(bar.n - bar.initial))
            for future in finished:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process was killed, probably for lack of memory: lower data.workers or data.max_record_bytes; the "
            "same command goes on where it stopped"
        ) from error
    except BaseException:
        # What is finished is on disk; a task at work could take an hour to its end.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _advance(bar: Any, amount: int) -> None:
    bar.update(amount)


def _start_worker(task: Task, counter: Any, parent: int) -> None:
    global _worker
    _worker = (task, counter)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """A killed parent cannot tell its workers; they would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _run_task(number: int) -> Any:
    assert _worker is not None, "the worker was not started"
    task, counter = _worker

    def count(amount: int) -> None:
        with counter.get_lock():
            counter.value += amount

    try:
        return task(number, count)
    finally:
        if time.monotonic() - _trimmed_at > TRIM_SECONDS:
            _give_back_memory()


def _give_back_memory() -> None:
    """Return what was freed to the system: otherwise holes between long-lived blocks add up over the corpus (glibc)."""
    global _trimmed_at
    _trimmed_at = time.monotonic()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Tokenizers' own threads are off: the processes are the parallelism."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
