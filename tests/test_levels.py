"""The levels of the suite.

Two cases of a function, nothing slow, and nothing lost between the levels.
"""

from pathlib import Path
from types import SimpleNamespace

import levels


def make_item(nodeid: str, *marks: str, fixtures: tuple[str, ...] = (), **indices: int) -> SimpleNamespace:
    """The attributes of a pytest item that the levels read.

    `indices`: the place of each parameter's value.
    """

    def get_closest_marker(name: str) -> str | None:
        return name if name in marks else None

    path = Path(nodeid.partition("::")[0])
    item = SimpleNamespace(
        nodeid=nodeid, path=path, fixturenames=fixtures, get_closest_marker=get_closest_marker
    )
    if indices:
        item.callspec = SimpleNamespace(indices=indices)
    return item


ITEMS = [
    make_item("a.py::test_once"),
    make_item("a.py::test_pair[x]"),
    make_item("a.py::test_pair[y]"),
    *[make_item(f"a.py::test_many[{value}]") for value in range(9)],
    make_item("b.py::test_many[one file has one count]"),
    make_item("b.py::test_marked", "slow"),
    make_item("b.py::test_partly[0]", "slow"),
    make_item("b.py::test_partly[1]"),
    make_item("b.py::test_ranks", "multiprocess"),
    *[make_item(f"b.py::test_few_ranks[{value}]", "multiprocess", "quick") for value in range(3)],
    make_item("b.py::test_kernel", fixtures=("interpreted", "tmp_path")),
    make_item("b.py::test_folder", fixtures=("tmp_path",)),
]


def ids(items: list) -> list[str]:
    return [item.nodeid for item in items]


def test_the_quick_level_keeps_two_cases_of_a_function_and_all_that_are_marked():
    kept, _ = levels.split_by_level(ITEMS, "quick")
    of_many = [nodeid for nodeid in ids(kept) if nodeid.startswith("a.py::test_many")]
    assert len(of_many) == levels.CASES_PER_FUNCTION == 2
    assert [nodeid for nodeid in ids(kept) if nodeid not in of_many] == [
        "a.py::test_once",
        "a.py::test_pair[x]",
        "a.py::test_pair[y]",
        "b.py::test_many[one file has one count]",
        "b.py::test_partly[1]",
        "b.py::test_few_ranks[0]",
        "b.py::test_few_ranks[1]",
        "b.py::test_few_ranks[2]",
        "b.py::test_folder",
    ]


def test_both_levels_together_are_everything():
    quick, not_quick = levels.split_by_level(ITEMS, "quick")
    rest, not_rest = levels.split_by_level(ITEMS, "rest")
    assert ids(not_quick) == ids(rest)
    assert ids(not_rest) == ids(quick)
    everything, nothing = levels.split_by_level(ITEMS, "all")
    assert sorted(ids(quick) + ids(rest)) == sorted(ids(everything)) == sorted(ids(ITEMS))
    assert nothing == []


def grid(function: str, methods: int, lengths: int) -> list[SimpleNamespace]:
    """One case for each method and length."""
    return [
        make_item(f"a.py::{function}[{method}-{length}]", method=method, length=length)
        for method in range(methods)
        for length in range(lengths)
    ]


def test_the_two_cases_of_the_quick_level_differ_in_every_parameter():
    for number in range(12):
        cases = grid(f"test_{number}", 5, 4)
        kept, _ = levels.split_by_level(cases, "quick")
        first, second = (case.callspec.indices for case in kept)
        assert first["method"] != second["method"]
        assert first["length"] != second["length"]


def test_few_cases_show_every_value_of_every_parameter():
    cases = grid("test_grid", 5, 4)
    kept = levels.at_most(cases, 5)
    assert len(kept) == 5
    assert {case.callspec.indices["method"] for case in kept} == set(range(5))
    assert {case.callspec.indices["length"] for case in kept} == set(range(4))
    assert ids(kept) == [nodeid for nodeid in ids(cases) if nodeid in ids(kept)]


def test_functions_over_the_same_methods_keep_different_methods():
    kept_methods = set()
    for number in range(12):
        kept = levels.at_most(grid(f"test_{number}", 40, 1), 4)
        kept_methods |= {case.callspec.indices["method"] for case in kept}
    assert len(kept_methods) > 20


def test_tests_with_fewer_cases_stay_whole():
    cases = [make_item("a.py::test_once"), *grid("test_grid", 2, 2)]
    assert levels.at_most(cases, 4) == cases


def test_the_sample_is_the_rest_without_nightly_tests_and_with_few_cases_of_each():
    nightly = make_item("c.py::test_variants", "slow", "nightly")
    of_a_run = make_item("c.py::test_engine", "multiprocess", fixtures=("engine_results",))
    items = [*ITEMS, nightly, of_a_run]
    rest, _ = levels.split_by_level(items, "rest")
    kept, left_out = levels.split_by_level(items, "sample")
    for one in (nightly, of_a_run):
        assert one in rest and one in left_out
    assert set(ids(kept)) < set(ids(rest))
    of_many = [nodeid for nodeid in ids(kept) if nodeid.startswith("a.py::test_many")]
    assert len(of_many) == levels.SAMPLE_CASES
    once = {nodeid for nodeid in ids(rest) if "test_many" not in nodeid}
    assert once - {nightly.nodeid, of_a_run.nodeid} <= set(ids(kept))
    assert sorted(ids(kept) + ids(left_out)) == sorted(ids(items))


def test_the_longest_files_begin():
    notebook = make_item("tests/test_notebook.py::test_it")
    other = make_item("tests/test_files.py::test_it")
    assert levels.place_in_line(notebook) < levels.place_in_line(other)
