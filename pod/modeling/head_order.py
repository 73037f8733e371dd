"""Heads in another order: the query heads of a layer, and the KV heads they belong to, permuted without changing the function."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from .shipped.config import PodConfig

Order = Sequence[Sequence[int]]
"""``[L][Hq]``: which query head of the original weights stands at each place, as ``SharingPlan.head_order``."""


_PROJECTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([qkv])_proj\.(?:weight|bias)|o_proj\.weight)")


def reordered(name: str, weight: Tensor, config: PodConfig, now: Order | None) -> Tensor:
    """The weight called ``name`` when heads that stand in the order ``now`` move to ``config.head_order``; ``weight`` itself
    where nothing moves.

    Query heads are rows of ``q_proj`` and columns of ``o_proj``, KV heads rows of ``k_proj`` and ``v_proj``; biases of q, k
    and v are rows too, norms of heads are shared by all. None = the original order.
    """
    found = _PROJECTION.fullmatch(name)
    if found is None or (now is None and config.head_order is None):
        return weight
    original, layer = list(range(config.num_attention_heads)), int(found[1])
    old, new = (original if order is None else list(order[layer]) for order in (now, config.head_order))
    if old == new:
        return weight
    place = {head: at for at, head in enumerate(old)}
    index = torch.tensor([place[head] for head in new])
    if found[2] in ("k", "v"):
        index = index[:: config.num_key_value_groups] // config.num_key_value_groups
    return _moved(weight, index, 1 if found[2] is None else 0, config.head_dim)


def _moved(weight: Tensor, index: Tensor, dim: int, head_dim: int) -> Tensor:
    """The weight with its heads, ``head_dim`` rows or columns each, taken in the order of ``index``."""
    index = index.to(weight.device)
    return weight.unflatten(dim, (-1, head_dim)).index_select(dim, index).flatten(dim, dim + 1)
