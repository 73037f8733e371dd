"""Prefetching gives the same steps in the same order.

It is never further ahead than asked, and no error or thread is lost.
"""

import threading
from concurrent.futures import wait

import numpy as np
import pytest

from pod.data import PackedDataset, RowCursor, write_packed_rows
from pod.data.rows import prefetch
from pod.data.rows.order import epoch_order
from pod.data.rows.prefetch import Prefetcher

SECONDS = 30  # how long a test waits before it fails


class Loader:
    """Counts what is loaded; `gate` lets that many loads through, None all."""

    def __init__(self, gate=None, fails_at=None):
        self.gate = None if gate is None else threading.Semaphore(gate)
        self.fails_at, self.loaded, self.changed = fails_at, [], threading.Condition()

    def __call__(self, cursor):
        if self.gate is not None:
            assert self.gate.acquire(timeout=SECONDS)
        with self.changed:
            self.loaded.append(cursor.position)
            self.changed.notify_all()
        if cursor.position == self.fails_at:
            raise OSError(f"disk gone at row {cursor.position}")
        return cursor.peek(4).tolist()

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.loaded) >= count, SECONDS), self.loaded


def alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch-rows")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not alive()


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_steps_are_those_of_the_cursor(depth):
    """10 rows in steps of 4: steps run on across epochs, whatever the depth."""
    cursor, plain = RowCursor(10, seed=3), RowCursor(10, seed=3)
    batches = Prefetcher(Loader(), cursor, 4, depth)
    for _ in range(12):
        assert batches.next() == plain.take(4).tolist()
        assert cursor == plain, "the cursor tells what was used, not what was loaded"
    batches.close()
    batches.close()
    assert batches.next() == plain.take(4).tolist(), "closed and used again, it goes on where it was"
    batches.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_load_may_move_the_cursor_that_it_gets(depth):
    cursor, plain = RowCursor(10), RowCursor(10)
    batches = Prefetcher(lambda own: own.take(4).tolist(), cursor, 4, depth)
    for _ in range(4):
        assert batches.next() == plain.take(4).tolist() and cursor == plain
    batches.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_it_loads_exactly_so_far_ahead_while_the_caller_computes(depth):
    loader = Loader()
    cursor = RowCursor(100)
    batches = Prefetcher(loader, cursor, 4, depth)
    assert loader.loaded == [] and not alive()
    batches.next()
    loader.wait_for(1 + depth)  # the caller does nothing, the thread loads
    (thread,) = alive()
    wait([future for _, future in batches._ahead], SECONDS)
    assert loader.loaded == [4 * step for step in range(1 + depth)] and cursor.position == 4
    batches.next()
    loader.wait_for(2 + depth)
    assert loader.loaded == [4 * step for step in range(2 + depth)]
    batches.close()
    assert not thread.is_alive()


def test_the_caller_waits_for_a_slow_disk_and_goes_on():
    loader = Loader(gate=0)
    batches = Prefetcher(loader, RowCursor(10), 4, 2)
    got = []
    caller = threading.Thread(target=lambda: got.extend([batches.next(), batches.next()]))
    caller.start()
    caller.join(0.05)
    assert caller.is_alive() and not got
    loader.gate.release(10)
    caller.join(SECONDS)
    plain = RowCursor(10)
    assert got == [plain.take(4).tolist(), plain.take(4).tolist()]
    batches.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_at_its_own_step_and_stays(depth):
    cursor = RowCursor(100)
    batches = Prefetcher(Loader(fails_at=8), cursor, 4, depth)
    batches.next()
    if depth:  # the thread has failed by the time at which the step before is asked for
        wait([future for _, future in batches._ahead], SECONDS)
    assert batches.next() == RowCursor(100, position=4).peek(4).tolist()
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone at row 8"):
            batches.next()
        assert cursor.position == 8, "a resumed run must begin with the step that failed"
    batches.close()
    cursor.position = 12
    assert batches.next() == RowCursor(100, position=12).peek(4).tolist()
    batches.close()


@pytest.mark.parametrize("change", [{"position": 20}, {"seed": 9}])
def test_a_cursor_that_was_moved_by_hand_is_followed(change):
    cursor = RowCursor(100, seed=1)
    batches = Prefetcher(Loader(), cursor, 4, 2)
    batches.next()
    for name, value in change.items():
        setattr(cursor, name, value)
    expected = RowCursor(100, cursor.seed, cursor.position)
    assert [batches.next(), batches.next()] == [expected.take(4).tolist(), expected.take(4).tolist()]
    assert len(alive()) == 1
    batches.close()


def test_closing_while_a_load_is_under_way():
    loader = Loader(gate=1)
    batches = Prefetcher(loader, RowCursor(100), 4, 2)
    batches.next()
    (thread,) = alive()
    loader.gate.release()
    batches.close()
    assert not thread.is_alive() and set(loader.loaded) <= {0, 4}, "a closed thread loads nothing more"


def test_waiting_is_measured(monkeypatch):
    """Waiting is all of a load without prefetching, and nothing once the thread is ahead.

    Only loads move the clock of this test.
    """
    clock = [0.0]
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: clock[0])
    loader = Loader(gate=100)

    def slow(cursor):
        item = loader(cursor)
        clock[0] += 0.6
        return item

    batches = Prefetcher(slow, RowCursor(100), 4, 0)
    batches.next()
    assert batches.waited_s == pytest.approx(0.6)
    loader = Loader(gate=3)
    batches = Prefetcher(slow, RowCursor(100), 4, 2)
    batches.next()
    loader.wait_for(3)
    wait([future for _, future in batches._ahead], SECONDS)
    batches.next()
    assert batches.waited_s == 0
    loader.gate.release(10)
    batches.close()


def test_depth_must_be_a_number_of_steps():
    with pytest.raises(ValueError, match="depth must be >= 0 steps, got -1"):
        Prefetcher(Loader(), RowCursor(10), 4, -1)


def test_a_damaged_row_stops_the_caller_in_one_line(tmp_path):
    rows = [[np.arange(8)] for _ in range(6)]
    write_packed_rows(tmp_path / "data", rows, context_length=8, vocab_size=8, tokenizer_sha256="ab")
    array = np.load(tmp_path / "data/shard-00000.tokens.npy")
    array[3, 3] = 8
    np.save(tmp_path / "data/shard-00000.tokens.npy", array)
    data = PackedDataset(tmp_path / "data")
    cursor = data.cursor(seed=1)
    batches = Prefetcher(lambda at: data.rows(at.peek(1)), cursor, 1, 2)
    with pytest.raises(ValueError, match="row 3 of .* is damaged") as info:
        for _ in range(6):
            batches.next()
    assert "\n" not in str(info.value) and epoch_order(len(data), 1, 0)[cursor.position] == 3
    batches.close()
