"""Where packed documents start and end, read from the device once per tensor of ids and kept while it lives."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

Span = tuple[int, int]
T = TypeVar("T")


def document_segments(doc_ids: Tensor | None, batch: int, n: int) -> list[list[Span]]:
    """``[start, end)`` of every document of every row, in tokens; padding (-1) has none.

    Args:
        doc_ids: ``[batch or 1, n]``; a document is a run of equal ids. None: every row is one document. Copied to the host
            once, which waits for the device.
    """
    if doc_ids is None:
        return [[(0, n)]] * batch
    ids = doc_ids.detach().cpu()
    segments = []
    for row in ids:
        values, lengths = torch.unique_consecutive(row, return_counts=True)
        ends = lengths.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        segments.append([(s, e) for s, e, i in zip(starts, ends, values.tolist(), strict=True) if i >= 0])
    return segments if len(segments) == batch else segments * batch


class DocumentCache:
    """What was made for the last few (documents, key): all layers of a model ask with the same tensor of ids.

    A tensor counts as the same while it is the same object and nobody wrote to it; inference tensors, which do not count
    writes, are never remembered.
    """

    def __init__(self, size: int):
        self.size = size
        self._entries: OrderedDict[Hashable, tuple[weakref.ref[Tensor] | None, object]] = OrderedDict()

    def get(self, doc_ids: Tensor | None, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, or what it returned the last time for these documents and this ``key``."""
        if doc_ids is not None and doc_ids.is_inference():
            return make()
        identity = None if doc_ids is None else (id(doc_ids), doc_ids._version)
        found = self._entries.get((identity, key))
        # The id of a tensor that died may be another one's by now.
        if found is not None and (found[0] is None or found[0]() is doc_ids):
            self._entries.move_to_end((identity, key))
            return found[1]  # pyright: ignore[reportReturnType]
        value = make()
        self._entries[identity, key] = (None if doc_ids is None else weakref.ref(doc_ids), value)
        self._entries.move_to_end((identity, key))
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return value
