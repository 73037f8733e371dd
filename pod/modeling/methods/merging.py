"""D2O's token merging (Wan et al., 2024, section 4.2.2): what is dropped moves into the most similar token that is kept.

Everything is a few blocked matrix products and scatters: memory O(n), no loop over tokens. Similarities and weights are
computed in at least fp32.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.modeling.shipped.attend import compute_dtype
from pod.modeling.shipped.stores import take_slots

_BLOCK_ELEMENTS = 1 << 22
_LEAST_ROWS = 32  # a matrix product with fewer rows is slow; a block then grows with the kept tokens


def nearest_kept(keys: Tensor, kept: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8: the most similar kept key of every dropped one, by cosine.

    Args:
        keys: ``[B, H, n, d]``; kept: slots ``[B, H, c]``, ascending; dropped: slots ``[B, H, e]``.

    Returns:
        Cosine ``[B, H, e]``, and the index in ``kept`` ``[B, H, e]``; the lower one in a tie.
    """
    compute = compute_dtype(keys.dtype)
    candidates = F.normalize(take_slots(keys, kept).to(compute), dim=-1).transpose(2, 3)
    batch, heads, count = dropped.shape
    similarity = torch.empty(batch, heads, count, dtype=compute, device=keys.device)
    nearest = torch.empty_like(dropped)
    for block in _blocks(count, batch * heads * kept.shape[2]):
        queries = F.normalize(take_slots(keys, dropped[..., block]).to(compute), dim=-1)
        similarity[..., block], nearest[..., block] = (queries @ candidates).max(dim=-1)
    return similarity, nearest


def merge_weights(
    similarity: Tensor, nearest: Tensor, merged: Tensor, num_kept: int
) -> tuple[Tensor, Tensor]:
    """Eq. 11: weights of each kept token and of the dropped tokens that it takes in; they add up to one.

    As printed, the numerator of a dropped token's weight is the sum over all of them; it is its own ``exp(u)`` here.

    Args:
        similarity, nearest: from ``nearest_kept``; merged: bool ``[B, H, e]``, False for tokens that are gone for good.
        num_kept: ``c``.

    Returns:
        ``[B, H, c]`` and ``[B, H, e]``, the latter 0 where nothing is merged.
    """
    raw = similarity.exp() * merged
    total = raw.new_full((*raw.shape[:2], num_kept), math.e).scatter_add_(2, nearest, raw)
    return math.e / total, raw / total.gather(2, nearest)


def merge_tokens(
    x: Tensor, kept: Tensor, dropped: Tensor, nearest: Tensor, weights: tuple[Tensor, Tensor]
) -> Tensor:
    """Eq. 10: kept keys or values ``[B, H, c, d]`` of ``[B, H, n, d]``, each with what it takes in.

    Args:
        weights: from ``merge_weights``; the other arguments as in ``nearest_kept``.
    """
    own, others = weights
    out = take_slots(x, kept) * own[..., None]
    head_dim = x.shape[3]
    for block in _blocks(dropped.shape[2], x.shape[0] * x.shape[1] * head_dim):
        moved = take_slots(x, dropped[..., block]) * others[..., block, None]
        out.scatter_add_(2, nearest[..., block, None].expand(-1, -1, -1, head_dim), moved)
    return out.to(x.dtype)


def nearest_slots(keys: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """As ``nearest_kept`` for few dropped tokens: kept is every other slot, and the result is a slot of ``keys``.

    A decoded token drops one or a few; this reads the keys once, where a gather of all that is kept would copy them.
    """
    compute = compute_dtype(keys.dtype)
    norms = torch.linalg.vector_norm(keys, dim=-1, dtype=compute).clamp(min=torch.finfo(compute).tiny)
    queries = F.normalize(take_slots(keys, dropped).to(compute), dim=-1)
    cosines = (queries @ keys.to(compute).transpose(2, 3)) / norms[:, :, None]
    hidden = dropped[:, :, None].expand(-1, -1, dropped.shape[2], -1)
    return cosines.scatter_(3, hidden, float("-inf")).max(dim=-1)


def merge_few(x: Tensor, dropped: Tensor, nearest: Tensor, raw: Tensor) -> Tensor:
    """As ``merge_tokens`` for few dropped tokens: new contents ``[B, H, e, d]`` of the slots ``nearest``.

    Args:
        nearest: slots ``[B, H, e]`` from ``nearest_slots``; a slot that is named twice gets the same contents twice.
        raw: ``exp(u)`` of dropped tokens ``[B, H, e]``, 0 for those that are gone for good.
    """
    same = (nearest[..., None] == nearest[:, :, None]) * raw[
        :, :, None
    ]  # [B, H, e, e]: who shares a slot with whom
    total = same.sum(-1, keepdim=True) + math.e
    moved = same @ take_slots(x, dropped).to(same.dtype)
    return ((take_slots(x, nearest) * math.e + moved) / total).to(x.dtype)


def _blocks(count: int, elements_each: int) -> Iterator[slice]:
    """Slices of ``count`` tokens, so that a block has a bounded number of elements."""
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
