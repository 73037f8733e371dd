"""Batches of coming steps, made in a thread while the present step computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from pod.data.order import RowCursor

T = TypeVar("T")

CLOSE_SECONDS = 10.0
"""How long closing waits for a load that is under way; the thread is a daemon and ends with the process."""


class Prefetcher(Generic[T]):
    """What `load` makes of each step's rows, in order, up to `depth` steps ahead of the caller.

    `load(cursor)` gets a cursor that stands at the first row of a step of `rows_per_step` rows. It runs in one thread,
    so it may read the same data set as the caller but must not touch what the caller changes. `depth` 0 loads in the
    caller, without a thread.

    `cursor` moves with `next` only: saved in a checkpoint it tells what was used, not what was loaded ahead. Who moves
    it by hand (a resumed run) makes the prefetcher start again there.
    """

    def __init__(self, load: Callable[[RowCursor], T], cursor: RowCursor, rows_per_step: int, depth: int):
        if depth < 0:
            raise ValueError(f"a prefetcher's depth must be >= 0 steps, got {depth}")
        self.load, self.cursor, self.rows_per_step, self.depth = load, cursor, rows_per_step, depth
        self.waited_s = 0.0
        """Seconds that the last `next` took."""
        self._ahead: _LoadAhead[T] | None = None

    def next(self) -> T:
        """The next step's item; the cursor moves behind it. Raises what `load` raised for this step; the cursor then stays."""
        began = time.perf_counter()
        if self.depth:
            item = self._started().take()
        else:
            item = self.load(replace(self.cursor))
        self.waited_s = time.perf_counter() - began
        self.cursor.position += self.rows_per_step
        return item

    def close(self) -> None:
        """End the thread and drop what it loaded; `next` starts it again at the cursor. Twice is as good as once."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _started(self) -> _LoadAhead[T]:
        if self._ahead is not None and self._ahead.taken_up_to != self.cursor:
            self.close()
        if self._ahead is None:
            self._ahead = _LoadAhead(self.load, replace(self.cursor), self.rows_per_step, self.depth)
        return self._ahead


class _LoadAhead(Generic[T]):
    """The thread of a prefetcher and the items between it and the caller."""

    def __init__(self, load: Callable[[RowCursor], T], start: RowCursor, rows_per_step: int, depth: int):
        self.load, self.rows_per_step, self.depth = load, rows_per_step, depth
        self.taken_up_to = start
        self.ready: deque[T] = deque()
        self.failure: BaseException | None = None
        self.closed = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(
            target=self._run, args=(replace(start),), name="prefetch-rows", daemon=True
        )
        self.thread.start()

    def take(self) -> T:
        with self.changed:
            # Steps before a failed one are still handed out; the failure comes at its own step, and again after it.
            self.changed.wait_for(lambda: self.ready or self.failure is not None)
            if not self.ready:
                assert self.failure is not None
                raise self.failure
            item = self.ready.popleft()
            self.changed.notify_all()
        self.taken_up_to.position += self.rows_per_step
        return item

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()
        self.thread.join(CLOSE_SECONDS)

    def _run(self, cursor: RowCursor) -> None:
        while self._wait_for_room():
            try:
                item = self.load(replace(cursor))
            except BaseException as error:  # noqa: BLE001  raised in the caller's thread by `take`
                with self.changed:
                    self.failure = error
                    self.changed.notify_all()
                return
            cursor.position += self.rows_per_step
            with self.changed:
                self.ready.append(item)
                self.changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until fewer than `depth` items are ready; False when closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.ready) < self.depth)
            return not self.closed
