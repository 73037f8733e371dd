"""What must hold for a cache after any operation: counted from scratch, where the cache keeps it up to date."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .stores import Store, TokenStore


def check_bookkeeping(columns: int, lengths: Tensor | None, mask: Tensor | None, ids: list | None) -> None:
    """Tokens per row ``[B]`` against columns, padding ``[B, columns]`` and the ids seen.

    Raises:
        AssertionError: with what is wrong.
    """
    if lengths is None:
        assert not columns and mask is None and not ids, f"an empty cache has {columns} columns, mask or ids"
        return
    shape, counted = (len(lengths), columns), [columns] * len(lengths)
    if mask is not None:
        assert mask.shape == shape and mask.dtype == torch.bool, f"mask: {mask.dtype} {list(mask.shape)}"
        assert not mask.all(), "a mask without padding is kept"
        counted = mask.sum(1).tolist()
    assert lengths.tolist() == counted, f"lengths {lengths.tolist()}, not {counted}"
    if ids is not None:
        seen = {x.shape[0] for x in ids}, sum(x.shape[1] for x in ids)
        assert seen == ({shape[0]}, columns), f"ids of {seen} for {list(shape)}"


def check_objects(met: Sequence[object], tensors: dict[str, Tensor]) -> None:
    """Every store of itself; positions ascend; no number is NaN, but in room that is only reserved."""
    reserved = set()
    for item in met:
        if isinstance(item, TokenStore):
            item.check_integrity()
            reserved.update(tensor.data_ptr() for tensor in item.tensors())
        positions = getattr(item, "positions", None)
        if isinstance(positions, Tensor):
            assert bool((positions.diff() > 0).all()), f"positions of a {type(item).__name__} do not ascend"
    for path, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.data_ptr() not in reserved:
            assert not bool(tensor.isnan().any()), f"{path} holds NaN"


def check_tokens(store: Store, lengths: Tensor, where: str) -> None:
    """A store of every token of rows of these lengths: their slots are there and hold numbers."""
    used = [store.used_slots(length) for length in lengths.tolist()]
    if store.is_empty:
        return
    batch, _, slots, _ = store.shape
    assert batch == len(used), f"{where} holds {batch} rows, the cache {len(used)}"
    assert slots >= max(used), f"{where} has {slots} slots, {max(used)} are in use"
    tokens = store.read(max(lengths.tolist()))
    for row, count in enumerate(used):
        assert not bool(tokens[row, :, :count].isnan().any()), f"{where}, row {row}: NaN"
