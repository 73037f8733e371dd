"""Samples of a result file as a report holds them.

It keeps what the report reads of them, by column, however many methods there are.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

READ = ("id", "score", "tokens", "prompt_hash", "subtask", "cluster", "buckets")
"""What judgements and tables read of a sample. Answers and targets stay in the file."""


class Samples(Sequence[dict[str, Any]]):
    """Rows that are made when they are asked for. They have what the given rows had of `READ`.

    Args:
        shared: columns of other files, by content. Methods that answered the same samples hold ids and prompt
            hashes once.
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
