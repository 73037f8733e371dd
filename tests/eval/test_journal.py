"""The sample journal: nothing is answered twice, torn lines are answered again, every rank gets the same, failures reach all ranks."""

import json
import threading

import pytest

from pod.eval.journal import AnswerError, Journal
from pod.eval.ranks import Ranks


class Threads(Ranks):
    """Ranks of one process, a thread each, that gather by a barrier."""

    def __init__(self, rank, size, board):
        self.rank, self.world_size, self.local_rank, self._started = rank, size, rank, False
        self.board = board

    def gather(self, value):
        values, barrier = self.board
        values[self.rank] = value
        barrier.wait(20)
        found = [values[rank] for rank in range(self.world_size)]
        barrier.wait(20)
        return found

    def barrier(self):
        self.gather(None)


def on_ranks(size, work):
    """[work(ranks)] of every rank; an exception is a rank's result."""
    board, results = ({}, threading.Barrier(size)), [None] * size

    def run(rank):
        try:
            results[rank] = work(Threads(rank, size, board))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


ITEMS = list(range(7))


def pairs(items):
    return [items[start : start + 2] for start in range(0, len(items), 2)]


def ask(folder, ranks, seen=None, broken=None, fingerprint="abc"):
    journal = Journal(folder, "snapkv@25%", "niah", fingerprint, ranks)

    def compute(batch):
        if broken is not None and broken in batch:
            raise RuntimeError(f"broken at\n{broken}")
        if seen is not None:
            seen.append(list(batch))
        return [{"square": item * item, "batch": len(batch), "pair": (item, item)} for item in batch]

    return journal.answers(ITEMS, key=str, batches=pairs, compute=compute)


def test_records_come_in_order_and_as_the_file_holds_them(tmp_path):
    records = ask(tmp_path, Ranks())
    assert [record["square"] for record in records] == [0, 1, 4, 9, 16, 25, 36]
    assert records[3]["pair"] == [3, 3], "a tuple would be a list after a restart"
    assert records == ask(tmp_path, Ranks())


def test_a_failure_loses_only_its_batch(tmp_path):
    seen = []
    with pytest.raises(RuntimeError, match="broken at"):
        ask(tmp_path, Ranks(), seen, broken=4)
    assert seen == [[0, 1], [2, 3]]
    again = []
    ask(tmp_path, Ranks(), again)
    assert again == [[4, 5], [6]]


def test_torn_and_damaged_lines_are_answered_again_in_their_own_batch(tmp_path):
    whole = ask(tmp_path, Ranks())
    file = next(tmp_path.glob("**/0.jsonl"))
    lines = file.read_text().splitlines()
    lines[2] = lines[2][:9] + "\x00" + lines[2][12:]
    file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:12])  # and the last is torn
    seen = []
    assert ask(tmp_path, Ranks(), seen) == whole
    assert seen == [[2, 3], [6]], "batches are those of the first run, whatever is left of them"
    assert [json.loads(line)[0] for line in file.read_text().splitlines()[-3:]] == ["2", "3", "6"]


def test_other_inputs_are_another_journal_and_remove_forgets(tmp_path):
    ask(tmp_path, Ranks())
    seen = []
    ask(tmp_path, Ranks(), seen, fingerprint="xyz")
    assert len(seen) == 4
    Journal(tmp_path, "snapkv@25%", "niah", "xyz", Ranks()).remove()
    ask(tmp_path, Ranks(), seen, fingerprint="xyz")
    assert len(seen) == 8


def test_equal_ids_are_refused(tmp_path):
    journal = Journal(tmp_path, "full", "niah", "abc", Ranks())
    with pytest.raises(ValueError, match="two samples have the same id"):
        journal.answers([1, 2], key=lambda item: "x", batches=pairs, compute=lambda batch: [{}] * len(batch))


def test_every_rank_gets_all_answers_of_the_same_batches(tmp_path):
    alone = ask(tmp_path / "alone", Ranks())
    seen = []
    for size in (2, 3):
        results = on_ranks(size, lambda ranks, size=size: ask(tmp_path / str(size), ranks, seen))
        assert results == [alone] * size
    assert sorted(seen) == sorted(pairs(ITEMS) * 2), "each batch once per run"


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    alone = ask(tmp_path / "alone", Ranks())
    with pytest.raises(RuntimeError):
        ask(tmp_path, Ranks(), broken=4)
    seen = []
    assert on_ranks(3, lambda ranks: ask(tmp_path, ranks, seen)) == [alone] * 3
    assert sorted(seen) == [[4, 5], [6]]
    seen.clear()
    assert ask(tmp_path, Ranks(), seen) == alone and not seen


def test_a_failure_of_one_rank_is_raised_on_all_and_the_other_answers_stay(tmp_path):
    results = on_ranks(2, lambda ranks: ask(tmp_path, ranks, broken=2))  # batch 1: rank 1
    assert [type(result) for result in results] == [AnswerError, AnswerError]
    assert {str(result) for result in results} == {"rank 1: RuntimeError: broken at 2"}
    seen = []
    on_ranks(2, lambda ranks: ask(tmp_path, ranks, seen))
    assert sorted(seen) == [[2, 3], [6]], "rank 0 had answered its two batches; rank 1 stopped at its first"
