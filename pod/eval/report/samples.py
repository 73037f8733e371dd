"""Samples of result files in little memory: only the keys that a report reads, kept by column.

A report may read the samples of many methods at once.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

READ = ("id", "score", "tokens", "prompt_hash", "subtask", "cluster", "buckets")
"""The keys of a sample that comparisons and tables read. Answers and targets stay in the file."""


class SampleColumns(Sequence[dict[str, Any]]):
    """Samples that are made when they are read. Each has the keys in `READ` that its row had.

    Args:
        rows: the samples of a result file.
        shared: columns of all files so far, by content; new ones are added. So ids and prompt hashes are held
            only once for methods that answered the same samples.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], shared: dict[Any, Any]):
        self._length = len(rows)
        self._columns: dict[str, Sequence[Any]] = {}
        for name in READ:
            values: Any = tuple(row.get(name) for row in rows)
            if all(type(value) is float for value in values):
                self._columns[name] = array("d", values)
            elif name == "buckets" and any(values):
                self._columns[name] = values
            else:
                self._columns[name] = shared.setdefault(values, values)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._length))]
        return {n: value for n, column in self._columns.items() if (value := column[index]) is not None}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[number] for number in range(self._length))
