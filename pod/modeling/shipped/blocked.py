"""Attention of a chunk of queries over stored tokens, one block of queries at a time: never n x n."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 24


@dataclass
class Source:
    """One set of logits and the values they weigh.

    Attributes:
        q: ``[B, h, G, m, d]``; k, v: ``[B, h, S, d]``.
        visible: query positions ``[B, r]`` to a mask ``[B, r, S]``.
        bias: ``[B, h, S]``, added to the logits; None = 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Callable[[Tensor], Tensor]
    bias: Tensor | None = None


def blocked_attention(sources: list[Source], position_ids: Tensor, scale: float) -> Tensor:
    """One softmax over the logits of all sources (eq. 4 of the PoD paper for two of them).

    Args:
        position_ids: ``[B, m]`` of the queries.

    Returns:
        ``[B, h·G, m, d]``.
    """
    batch, heads, groups, m, head_dim = sources[0].q.shape
    compute = torch.promote_types(sources[0].q.dtype, torch.float32)
    width = sum(source.k.shape[2] for source in sources)
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * groups * width))
    out = torch.empty_like(sources[0].q)
    for start in range(0, m, block):
        rows = slice(start, min(start + block, m))
        size = rows.stop - start
        logits = torch.cat(
            [_logits(source, position_ids, rows, scale, compute) for source in sources], dim=-1
        )
        weights = (
            logits.softmax(-1).to(out.dtype).flatten(2, 3).split([s.k.shape[2] for s in sources], dim=-1)
        )
        products = [w @ source.v for w, source in zip(weights, sources, strict=True)]
        block_out = torch.stack(products).sum(0) if len(products) > 1 else products[0]
        out[:, :, :, rows] = block_out.view(batch, heads, groups, size, head_dim)
    return out.flatten(1, 2)


def _logits(source: Source, position_ids: Tensor, rows: slice, scale: float, compute: torch.dtype) -> Tensor:
    q = source.q[:, :, :, rows] * scale
    logits = (q.flatten(2, 3) @ source.k.transpose(2, 3)).to(compute).unflatten(2, q.shape[2:4])
    if source.bias is not None:
        logits = logits + source.bias[:, :, None, None]
    visible = source.visible(position_ids[:, rows])
    return logits.masked_fill(~visible[:, None, None], float("-inf"))
