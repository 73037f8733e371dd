"""Batches of coming steps, made in a thread while the present step computes."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Generic, TypeVar

from pod.data.rows.order import RowCursor

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Loads the rows of each step in order, up to `depth` steps before the caller asks for them with `next`.

    `cursor` moves with `next` only: saved in a checkpoint it tells which rows were used, not which were
    loaded ahead. When somebody else moves it (a resumed run), the prefetcher starts again from there.

    Args:
        load: called as `load(cursor)`, with a cursor at the first row of a step. It returns what `next` gives
            for this step. It runs in one thread, so it may read the same data set as the caller, but must not
            touch what the caller changes.
        cursor: where the next step begins.
        rows_per_step: rows by which each step moves the cursor.
        depth: steps to load ahead; 0 loads in the caller, without a thread.
    """

    def __init__(self, load: Callable[[RowCursor], T], cursor: RowCursor, rows_per_step: int, depth: int):
        if depth < 0:
            raise ValueError(f"a prefetcher's depth must be >= 0 steps, got {depth}")
        self.load, self.cursor, self.rows_per_step, self.depth = load, cursor, rows_per_step, depth
        self.waited_s = 0.0
        """Seconds that the last `next` took."""
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[RowCursor, Future[T]]] = deque()

    def next(self) -> T:
        """What `load` returned for the next step. The cursor moves to the step after it.

        An error that `load` raised for this step is raised here, and the cursor stays.
        """
        began = time.perf_counter()
        if self.depth:
            if self._ahead and self._ahead[0][0] != self.cursor:
                self.close()
            self._load_ahead()
            item = self._ahead[0][1].result()
            self._ahead.popleft()
        else:
            item = self.load(replace(self.cursor))
        self.waited_s = time.perf_counter() - began
        self.cursor.position += self.rows_per_step
        if self.depth:
            self._load_ahead()
        return item

    def close(self) -> None:
        """End the thread and drop what it loaded. `next` starts it again at the cursor.

        It may be called more than once.
        """
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._ahead.clear()

    def _load_ahead(self) -> None:
        """Give the thread those of the next `depth` steps that it has not been given yet."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch-rows")
        for step in range(len(self._ahead), self.depth):
            at = replace(self.cursor, position=self.cursor.position + step * self.rows_per_step)
            self._ahead.append((at, self._thread.submit(self.load, replace(at))))
