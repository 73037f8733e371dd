"""Runs tasks in processes of this machine, in order.

The processes end with their parent, even a killed one.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

Count = Callable[[int], object]
"""Called with the progress, in the caller's unit."""
WorkFunction = Callable[..., Any]
"""Called as `task(count, *arguments)`; returns a small result, which is sent between processes."""

AHEAD = 2
"""Tasks per worker that are given out at a time."""
POLL_SECONDS = 0.3
"""How often progress is counted, and how often a worker looks whether its parent still runs."""
TRIM_SECONDS = 10.0
"""A worker gives freed memory back to the system at most this often.

If it did so more often, getting the memory again would cost a tenth of the speed.
"""
_worker: tuple[WorkFunction, Any] | None = None
_trimmed_at = 0.0


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    task: WorkFunction, calls: Iterable[tuple[Any, ...]], workers: int, count: Count = lambda amount: None
) -> Generator[Any, None, None]:
    """The results of `task(count, *arguments)` for all `calls`, in their order.

    A task that raises an error raises it here when its result is due. So the first error is the same with any
    number of workers. To stop early, close the generator: the processes then end.

    Args:
        calls: the arguments of each call. They are read late: at most `AHEAD` tasks per worker are given out
            before the caller asks for their results.
        workers: number of processes; with 1, this process does all the work.
        count: called with the progress that the tasks report.

    Raises:
        ValueError: a worker was killed, as happens for lack of memory.
    """
    with _one_thread_each():
        if workers == 1:
            for arguments in calls:
                yield task(count, *arguments)
        else:
            yield from _in_processes(task, iter(calls), workers, count)


def _in_processes(
    task: WorkFunction, calls: Iterator[tuple[Any, ...]], workers: int, count: Count
) -> Iterator[Any]:
    """`in_order` with more than one worker."""
    # Forked processes share the loaded tokenizer and start in milliseconds. Elsewhere the task must be
    # picklable.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    counter = context.Value("q", 0)
    others = set(multiprocessing.active_children())
    _give_back_memory()  # workers start with all that this process holds
    executor = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(task, counter, os.getpid())
    )
    try:
        gc.freeze()  # a collection in a worker would touch, hence copy, every object of this process
        with _without_ctrl_c():  # workers start at the first task
            given: deque[Future] = deque(
                executor.submit(_run_task, *arguments) for arguments in islice(calls, AHEAD * workers)
            )
        gc.unfreeze()
        counted = 0
        while given:
            while not given[0].done():
                wait([given[0]], POLL_SECONDS)
                count(counter.value - counted)
                counted = counter.value
            yield given.popleft().result()
            given.extend(executor.submit(_run_task, *arguments) for arguments in islice(calls, 1))
        count(counter.value - counted)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process was killed, probably for lack of memory: lower data.workers or "
            "data.max_record_bytes; the same command continues where it stopped"
        ) from error
    finally:
        if given:  # Finished tasks are on disk. A running one is killed, because it could take an hour more.
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Hold back SIGINT during the block, here and in processes that start in it. It arrives afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(task: WorkFunction, counter: Any, parent: int) -> None:
    """Make this process a worker. It leaves Ctrl-C to its parent, which ends it."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    _worker = (task, counter)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone.

    A parent that was killed cannot tell its workers, and they would wait for work for ever.
    """
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _run_task(*arguments: Any) -> Any:
    assert _worker is not None, "the worker was not started"
    task, counter = _worker

    def count(amount: int) -> None:
        with counter.get_lock():
            counter.value += amount

    try:
        return task(count, *arguments)
    finally:
        if time.monotonic() - _trimmed_at > TRIM_SECONDS:
            _give_back_memory()


def _give_back_memory() -> None:
    """Return freed memory to the system.

    Without this, glibc keeps freed memory between long-lived blocks, and over a corpus it adds up.
    """
    global _trimmed_at
    _trimmed_at = time.monotonic()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Turn off the tokenizers' own threads during the block, because several processes run already."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
