"""D2O's token merging (Wan et al., 2024, section 4.2.2): what is dropped moves into the most similar token that is kept.

Everything is a few blocked matrix products and scatters: memory O(n), no loop over tokens. Similarities and weights are
computed in at least fp32. A similarity is here the cosine minus 1, so that the kept token's weight in eq. 11, ``e`` over the
sum, becomes 1 over the sum.
"""

from collections.abc import Iterator
from functools import lru_cache

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
        Cosine - 1 ``[B, H, e]``, and the index in ``kept`` ``[B, H, e]``; the lower one in a tie.
    """
    compute = compute_dtype(keys.dtype)
    candidates = F.normalize(take_slots(keys, kept).to(compute), dim=-1).transpose(2, 3)
    batch, heads, count = dropped.shape
    similarity = torch.empty(batch, heads, count, dtype=compute, device=keys.device)
    nearest = torch.empty_like(dropped)
    for block in _blocks(count, batch * heads * kept.shape[2]):
        queries = F.normalize(take_slots(keys, dropped[..., block]).to(compute), dim=-1)
        similarity[..., block], nearest[..., block] = (queries @ candidates).max(dim=-1)
    return similarity.sub_(1), nearest


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
    total = raw.new_ones(*raw.shape[:2], num_kept).scatter_add_(2, nearest, raw)
    return 1 / total, raw / total.gather(2, nearest)


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


def one_slot(x: Tensor, slots: Tensor) -> Tensor:
    """Slot ``[B, H, 1]`` of ``[B, H, n, d]``, copied: ``[B, H, 1, d]``."""
    return x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3]))


def nearest_slot(keys: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8 for one dropped key ``[B, H, 1, d]`` and the kept ones ``[B, H, c, d]``: cosine - 1 and slot, ``[B, H, 1]`` each."""
    compute = compute_dtype(keys.dtype)
    wide, key = keys.to(compute), key.to(compute)
    products = (wide @ key.transpose(2, 3)).squeeze(3)
    lengths = (torch.linalg.vector_norm(x, dim=-1) for x in (wide, key))
    tiny, minus_one = _numbers(compute, keys.device)
    return torch.addcdiv(minus_one, products, torch.addcmul(tiny, *lengths)).max(dim=-1, keepdim=True)


def share_of_one(similarity: Tensor, merged: Tensor) -> Tensor:
    """Eq. 11 for one dropped token: its weight, or 0 if it is gone for good."""
    return similarity.sigmoid() * merged


def merge_one(x: Tensor, nearest: Tensor, dropped: Tensor, share: Tensor) -> Tensor:
    """Eq. 10: slot ``nearest`` ``[B, H, 1]`` of ``[B, H, c, d]`` with ``share`` ``[B, H, 1]`` of what is dropped."""
    own, other = one_slot(x, nearest).to(share.dtype), dropped.to(share.dtype)
    return torch.lerp(own, other, share[..., None]).to(x.dtype)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _numbers(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest normal number, and -1."""
    return tuple(torch.tensor(x, dtype=dtype, device=device) for x in (torch.finfo(dtype).tiny, -1.0))  # type: ignore


def _blocks(count: int, elements_each: int) -> Iterator[slice]:
    """Slices of ``count`` tokens, so that a block has a bounded number of elements."""
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
