"""Which tests `make test` runs, and in which order.

The quick level answers within minutes whether a change broke something. The rest has all cases of every
parametrised test, the simulations, the interpreter and most tests of several processes. Its sample is what CI
runs beside the quick level to answer within half an hour: no test that is `nightly`, and one more case of
a parametrised test.
"""

import zlib

import pytest

LONGEST = "test_notebook.py", "test_triton_decode.py", "test_step.py", "/training/"
"""Parts of paths of test files that take minutes.

They begin first, so that no worker is left alone with one.
"""

SLOW_MARKS = ("slow", "multiprocess")
"""Tests with one of these marks wait for `make test-all`, unless they are marked `quick` too.

A `quick` mark takes all cases of a function along: they share what takes the time, a run of several
processes.
"""

SLOW_FIXTURES = ("interpreted", "newest_results")
"""Tests that use one of these wait for `make test-all` too.

They are Triton's interpreter, and a run of training that serves all cases of a file.
"""

CASES_PER_FUNCTION = 2
"""How many cases of a parametrised test belong to the quick level."""


NIGHTLY_FIXTURES = tuple(
    f"{worker}_results"
    for worker in (
        "engine",
        "estimate",
        "kills",
        "recipe",
        "restart",
        "seeing",
        "shared_qk",
        "start",
        "variants",
    )
)
"""Runs of several processes that CI does without: half of the rest's time.

The sample keeps those of `test_parallel.py` (every layout), `test_runs.py` (resuming, exports),
`test_launch.py` (launcher, signals) and of the shorter files.
"""

SAMPLE_CASES = 1
"""How many cases of a parametrised test belong to the sample of the rest."""

LEVELS = ("quick", "sample", "rest", "all")
"""`sample` is a part of `rest`; `quick` and `rest` together are `all`."""


def split_by_level(items: list[pytest.Item], level: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Tests of one of the `LEVELS`, and the others, each in the order of `items`."""
    if level == "all":
        return list(items), []
    quick = quick_cases(items)
    if level == "quick":
        chosen = quick
    else:
        rest = [item for item in items if item.nodeid not in quick]
        if level == "sample":
            rest = sample_of(rest)
        chosen = {item.nodeid for item in rest}
    kept = [item for item in items if item.nodeid in chosen]
    left_out = [item for item in items if item.nodeid not in chosen]
    return kept, left_out


def sample_of(rest: list[pytest.Item]) -> list[pytest.Item]:
    """What CI runs of the rest, in its order."""
    return at_most([item for item in rest if not is_nightly(item)], SAMPLE_CASES)


def is_nightly(item: pytest.Item) -> bool:
    """Whether CI leaves a test to `make test-all` in all of its cases."""
    if item.get_closest_marker("nightly"):
        return True
    return any(name in NIGHTLY_FIXTURES for name in getattr(item, "fixturenames", ()))


def quick_cases(items: list[pytest.Item]) -> set[str]:
    """Ids of the tests of the quick level.

    Slow tests are not among them. Of each parametrised function there are `CASES_PER_FUNCTION` cases, which
    `at_most` chooses. All cases of a function with the mark `quick` are there.
    """
    marked = [item for item in items if item.get_closest_marker("quick")]
    few = at_most([item for item in items if not is_slow(item)], CASES_PER_FUNCTION)
    return {item.nodeid for item in marked + few}


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is left to `make test-all` in all of its cases."""
    if item.get_closest_marker("quick"):
        return False
    if any(item.get_closest_marker(name) for name in SLOW_MARKS):
        return True
    return any(name in SLOW_FIXTURES for name in getattr(item, "fixturenames", ()))


def at_most(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most `most` cases of each parametrised function, in the order of `items`.

    The cases kept show as many values of each parameter as possible. Functions over the same methods keep
    different methods. Example: of a function with the parameters a = 1, 2, 3 and b = x, y, three cases show
    all five values. The tuples of a list count as different in all of their values, also where they share
    one.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept_ids = set()
    for function, cases in functions.items():
        start = zlib.crc32(function.encode()) % len(cases)
        for case in covering(cases[start:] + cases[:start], most):
            kept_ids.add(case.nodeid)
    return [item for item in items if item.nodeid in kept_ids]


def covering(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most `most` cases.

    Each is the first of those with the most values of parameters that none before it has.
    """
    remaining = list(cases)
    chosen: list[pytest.Item] = []
    seen: set[tuple[str, int]] = set()
    while remaining and len(chosen) < most:
        best = max(remaining, key=lambda case: len(values_of(case) - seen))
        remaining.remove(best)
        chosen.append(best)
        seen |= values_of(best)
    return chosen


def values_of(case: pytest.Item) -> set[tuple[str, int]]:
    """(parameter, place of its value) for each parameter of a case; empty for a test without parameters."""
    callspec = getattr(case, "callspec", None)
    if callspec is None:
        return set()
    return set(callspec.indices.items())


def place_in_line(item: pytest.Item) -> int:
    """0 for tests of the file that takes longest, more for shorter ones."""
    path = item.path.as_posix()
    for place, part in enumerate(LONGEST):
        if part in path:
            return place
    return len(LONGEST)
