"""What a report holds of samples: all that it reads, in little memory."""

import tracemalloc
from typing import Any

from pod.eval.report.samples import READ, SampleColumns


def rows_of(method: int, number: int) -> list[dict[str, Any]]:
    return [
        {
            "id": str(i),
            "score": (i * 7 + method) % 11 / 10,
            "prompt_hash": f"{i:016x}",
            "subtask": f"task {i % 3}",
            "answer": "said " * 20,
        }
        for i in range(number)
    ]


def test_rows_are_what_was_given_without_the_answers():
    given = [*rows_of(0, 9), {"id": "9", "score": 1.0, "tokens": 3, "cluster": "a", "buckets": [1.0, 2.0]}]
    samples = SampleColumns(given, {})
    expected = [{key: row[key] for key in READ if key in row} for row in given]
    assert list(samples) == expected and samples[3:5] == expected[3:5] and samples[-1] == expected[-1]
    assert len(samples) == 10 and not SampleColumns([], {})


def test_a_further_method_costs_a_number_per_sample():
    shared: dict[Any, Any] = {}
    held = [SampleColumns(rows_of(0, 2000), shared)]
    tracemalloc.start()
    for method in range(1, 6):
        held.append(SampleColumns(rows_of(method, 2000), shared))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 5 * 2000 * 12
