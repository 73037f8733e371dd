"""Choice of a backend, shared by the operation tables: an explicit request never falls back, ``auto`` takes the first that runs."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

Entry = TypeVar("Entry", bound=Any)
"""A backend with ``unsupported(q)``: why it cannot run on given queries, None = it can."""


def choose(what: str, table: Mapping[str, Entry], order: Sequence[str], q: Tensor, backend: str) -> Entry:
    """The entry of ``table`` that will run on ``q``.

    Args:
        what: name of the operations in error messages, such as "attention".
        order: names that ``auto`` tries, fastest first; names that the table lacks are skipped.

    Raises:
        ValueError: an unknown backend, one that cannot run, or nothing that ``auto`` could take.
    """
    if backend == "auto":
        for name in order:
            if name in table and table[name].unsupported(q) is None:
                return table[name]
        raise ValueError(f"no {what} backend runs on {q.dtype} on {q.device.type}")
    if backend not in table:
        raise ValueError(f"{what} backend {backend!r} is unknown; choose auto or one of {', '.join(table)}")
    reason = table[backend].unsupported(q)
    if reason:
        raise ValueError(f"{what} backend {backend!r} cannot run: {reason}; choose auto or another backend")
    return table[backend]
