"""The folder of answers.

Nothing is answered twice, whoever asks. Torn lines are answered again. Every rank gets the same. It only
grows.

Changes of one token in answer_cache.py, each of which a test here sees (26 of 26, each was tried):

- key_of, in_batches: `sort_keys=False`; `group[start : size]`
- AnswerFolder.answers_of, AnswerCache: `self._answer_cache.name == name`; `store.reuse or`;
  `bool(self._load())` in is_empty; `is_open` stays `False` after a task
- answers: `missing and self._store.is_open`; `_asked =` for `|=`; `unique & known`
- _answer: `world_size != 1` before raise; `_known = {}` after a failure; all batches on every rank
- _compute: lines are kept as they were written; `world_size != 1` before _take
- _file: `O_TRUNC`; `== b"\\n"`
- _load, _read: `is_first or self._reuse`; `and not runs`; runs sorted by nothing; `or text.endswith`;
  `whole and` an environment
- _take, account: seconds `*` answers; `min` of machines; `self._known` for `_asked`
- _planned: `len(left) != len(batch)`; `batches(items)` for the rest
"""

import contextlib
import json
import threading

import pytest

from pod.eval.answer.answer_cache import AnswerError, AnswerFolder, Unanswered, in_batches, key_of
from pod.eval.answer.ranks import Ranks


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


def ask(folder, ranks, seen=None, broken=None, items=ITEMS, identity=None, reuse=True, is_open=True):
    kept = AnswerFolder(folder, ranks, reuse)
    answer_cache = kept.answers_of("snapkv@25%", identity or {"model": "abc"})

    def compute(batch):
        if broken is not None and broken in batch:
            raise RuntimeError(f"broken at\n{broken}")
        if seen is not None:
            seen.append(list(batch))
        return [{"square": item * item, "batch": len(batch), "pair": (item, item)} for item in batch]

    with contextlib.ExitStack() as within:
        within.enter_context(answer_cache.asked_by("niah"))
        if not is_open:
            within.enter_context(kept.closed())
        return answer_cache.answers(items, key=key_of, batches=pairs, compute=compute)


def squares(records):
    return [record["square"] for record in records]


def test_records_come_in_order_and_as_the_file_holds_them(tmp_path):
    records = ask(tmp_path, Ranks())
    assert squares(records) == [0, 1, 4, 9, 16, 25, 36]
    assert records[3]["pair"] == [3, 3], "a tuple would be a list after a restart"
    seen = []
    assert records == ask(tmp_path, Ranks(), seen) and not seen


def test_what_is_asked_counts_and_not_who_asks(tmp_path):
    """A longer list, another order, a question twice: only what is new is answered."""
    ask(tmp_path, Ranks(), items=[0, 1, 2])
    before = {file: file.read_text() for file in tmp_path.glob("*/*")}
    seen = []
    found = ask(tmp_path, Ranks(), seen, items=[5, 2, 1, 0, 3, 4, 3])
    assert squares(found) == [25, 4, 1, 0, 9, 16, 9]
    assert sorted(item for batch in seen for item in batch) == [3, 4, 5]
    assert all(file.read_text().startswith(text) for file, text in before.items()), "the folder only grows"


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
    torn, seen = file.read_text(), []
    assert ask(tmp_path, Ranks(), seen) == whole
    assert seen == [[2, 3], [6]], "batches are those of the first run, whatever is left of them"
    assert file.read_text().startswith(torn)
    new = [json.loads(line) for line in file.read_text().splitlines()[-3:]]
    assert [len(line.get("answers", ())) for line in new] == [0, 2, 1] and "date" in new[0]["environment"]


def test_another_model_has_another_answer_cache(tmp_path):
    ask(tmp_path, Ranks())
    seen = []
    ask(tmp_path, Ranks(), seen, identity={"model": "xyz"})
    assert len(seen) == 4
    identities = [json.loads(file.read_text()) for file in tmp_path.glob("*/shelf.json")]
    assert sorted(one["model"] for one in identities) == ["abc", "xyz"]
    assert {one["method"] for one in identities} == {"snapkv@25%"}


def test_a_closed_folder_gives_what_it_has_and_says_what_it_lacks(tmp_path):
    ask(tmp_path, Ranks(), items=[0, 1])
    seen = []
    assert squares(ask(tmp_path, Ranks(), seen, items=[1, 0], is_open=False)) == [1, 0]
    with pytest.raises(Unanswered, match="5 of 7 answers are missing"):
        ask(tmp_path, Ranks(), seen, is_open=False)
    assert not seen


def test_answers_can_be_asked_for_again_and_the_later_ones_count(tmp_path):
    ask(tmp_path, Ranks())
    seen = []
    ask(tmp_path, Ranks(), seen, reuse=False)
    assert seen == pairs(ITEMS)
    file = next(tmp_path.glob("**/0.jsonl"))
    lines = file.read_text().splitlines()
    lines[-1] = lines[-1].replace('"square": 36', '"square": 37')
    file.write_text("\n".join(lines) + "\n")
    assert squares(ask(tmp_path, Ranks())) == [0, 1, 4, 9, 16, 25, 37]


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


def test_a_key_is_what_is_asked_whatever_the_order_of_its_settings():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 2, "b": 1})


def test_batches_hold_all_items_of_a_kind_in_order():
    assert in_batches("abAcBdC", 2, str.isupper) == [["a", "b"], ["c", "d"], ["A", "B"], ["C"]]


def test_a_method_has_one_answer_cache_as_long_as_nothing_else_is_asked(tmp_path):
    folder = AnswerFolder(tmp_path, Ranks())
    first = folder.answers_of("full", {})
    assert folder.answers_of("full", {}) is first and first.is_empty
    assert folder.answers_of("full", {"model": 1}) is not first
    with first.asked_by("a"):
        assert first.label == "full: a"
    assert first.label == "full"
    first.answers([1], key=key_of, batches=pairs, compute=lambda batch: [{}])
    assert not first.is_empty


@pytest.mark.parametrize("size", [1, 2])
def test_what_was_answered_before_a_failure_is_known_at_once(tmp_path, size):
    """The same answer cache, asked again in the same process: also what another rank had answered."""
    seen, broken = [], [True]

    def work(ranks):
        answer_cache = AnswerFolder(tmp_path, ranks).answers_of("full", {})

        def compute(batch):
            if 4 in batch and broken:
                raise RuntimeError("broken")
            seen.append(list(batch))
            return [{"square": item * item} for item in batch]

        with pytest.raises((RuntimeError, AnswerError)):
            answer_cache.answers(ITEMS, key=key_of, batches=pairs, compute=compute)
        broken.clear()  # all ranks have failed together
        return squares(answer_cache.answers(ITEMS, key=key_of, batches=pairs, compute=compute))

    found = on_ranks(size, work)
    assert found == [[item * item for item in ITEMS]] * size
    assert sorted(seen) == pairs(ITEMS), "nothing twice"


def test_of_two_ranks_answers_those_of_the_later_run_count(tmp_path):
    """Whatever the order of their files, and whatever runs a file holds."""
    ask(tmp_path, Ranks(), items=[0])
    file = next(tmp_path.glob("**/0.jsonl"))

    def run(day, square):
        lines = {"environment": {"date": day}}, {"answers": {key_of(0): {"square": square}}, "seconds": 1.0}
        return "".join(json.dumps(line) + "\n" for line in lines)

    file.write_text(run("2026-01-01", 11) + run("2026-03-01", 13))
    file.with_name("1.jsonl").write_text(run("2026-02-01", 12))
    assert squares(ask(tmp_path, Ranks(), items=[0])) == [13]
    file.with_name("1.jsonl").write_text(run("2026-04-01", 14))
    file.with_name("2.jsonl").write_text(run("2025-04-01", 15))
    assert squares(ask(tmp_path, Ranks(), items=[0])) == [14]


def test_the_account_is_of_what_a_task_asked_for(tmp_path):
    answer_cache = AnswerFolder(tmp_path, Ranks()).answers_of("full", {})
    for task, items in (("a", [0, 1]), ("b", [1, 2])):
        with answer_cache.asked_by(task):
            for some in ([items[0]], [items[1]]):  # in two questions
                answer_cache.answers(some, key=key_of, batches=pairs, compute=lambda batch: [{}] * len(batch))
            account = answer_cache.account()
            assert account["environment"]["versions"]["torch"] and account["seconds"] >= 0
            assert len(answer_cache._asked) == 2


def test_the_account_adds_seconds_and_names_the_latest_machine(tmp_path):
    lines = [
        *(
            {"environment": {"date": "2026-01-01"}},
            {"answers": {key_of(0): {}, key_of(1): {}}, "seconds": 3.0},
        ),
        *({"environment": {"date": "2026-02-01"}}, {"answers": {key_of(2): {}}, "seconds": 5.0}),
        {"answers": {key_of(3): {}}, "seconds": 50.0},
    ]
    answer_cache = AnswerFolder(tmp_path, Ranks()).answers_of("full", {})
    answer_cache.folder.mkdir()
    (answer_cache.folder / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with answer_cache.asked_by("a"):
        answer_cache.answers([0, 2], key=key_of, batches=pairs, compute=lambda batch: [])
        assert answer_cache.account() == {"environment": {"date": "2026-02-01"}, "seconds": 6.5}
