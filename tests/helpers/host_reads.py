"""Where the host would wait for a device: operations whose result it must have before it can go on.

On a CPU nothing waits, but the operations are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "_local_scalar_dense",  # item, float, int, bool
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operations that give the host a value, or whose result's shape depends on values."""

COPY = "copy to the host"

MASKED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Operations that look for the ones of a mask that is an index."""


def may_wait(name: str) -> bool:
    """Whether an operation of this name waits in some calls, as `waits` decides; copies apart."""
    return name in READS or name in MASKED or name == "repeat_interleave"


def waits(function, args: tuple, kwargs: dict) -> str | None:
    """The name of an operation that waits, None for others."""
    name = function._schema.name.removeprefix("aten::")
    if name in READS:
        return name
    if name == "repeat_interleave" and isinstance(args[0], torch.Tensor) and not kwargs.get("output_size"):
        return name
    if name in MASKED and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        # one value for all places is filled in by the mask
        fills = len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        return None if fills else f"{name} by a mask"
    if name == "_to_copy" and args[0].device.type != "cpu" and kwargs.get("device") == torch.device("cpu"):
        return COPY
    return None


class HostReads(TorchDispatchMode):
    """Calls `note(name)` for every operation that waits, before it runs."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = waits(function, args, kwargs or {})
        if name is not None:
            self.note(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def noting(note: Callable[[str], None]) -> Iterator[None]:
    """`note(name)` for every wait inside, lists of a tensor's values among them, which are no operation."""
    tolist = torch.Tensor.tolist

    def listing(tensor):
        note("tolist")
        return tolist(tensor)

    torch.Tensor.tolist = listing
    try:
        with HostReads(note):
            yield
    finally:
        torch.Tensor.tolist = tolist


@contextmanager
def none_allowed() -> Iterator[None]:
    """An AssertionError for the first wait inside."""

    def refuse(name: str) -> None:
        raise AssertionError(f"the host waits for the device: {name}")

    with noting(refuse):
        yield
