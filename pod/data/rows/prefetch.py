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
    """What `load` makes of each step's rows, in order, up to `depth` steps ahead of the caller.

    `load(cursor)` gets a cursor that stands at the first row of a step of `rows_per_step` rows. It runs in
    one thread. So it may read the same data set as the caller but must not touch what the caller changes.
    `depth` 0 loads in the caller, without a thread.

    `cursor` moves with `next` only: saved in a checkpoint it tells what was used, not what was loaded ahead.
    When it is moved by hand (a resumed run), the prefetcher starts again there.
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
        """The next step's item; the cursor moves behind it.

        Raises what `load` raised for this step; the cursor then stays.
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

        Twice is as good as once.
        """
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._ahead.clear()

    def _load_ahead(self) -> None:
        """Ask for the steps from the cursor on that nobody asked for yet."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch-rows")
        for step in range(len(self._ahead), self.depth):
            at = replace(self.cursor, position=self.cursor.position + step * self.rows_per_step)
            self._ahead.append((at, self._thread.submit(self.load, replace(at))))
