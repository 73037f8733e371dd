"""Sums and rows of attention weights, for methods that drop tokens. The ``n x n`` matrix is never in memory.

Results carry no gradient. Queries are taken one block at a time, so memory is O(n), and work about half of
n². A block of ``r`` queries of a few KV heads needs only the keys up to its last query. Its logits are one
matrix product into a buffer that all blocks share; on CPU the buffer is small enough for the processor's
caches. On CUDA, tensor cores multiply 16-bit queries and keys without converting them, and sum in fp32, so
that each product is exact.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pod.modeling.model.attend import compute_dtype

_CPU_ELEMENTS, _CPU_ROWS = 1 << 20, 128
_CUDA_ELEMENTS, _CUDA_ROWS = 1 << 25, 1024
_LEAST_ROWS = 32  # a matrix product with fewer rows is slow; the buffer then grows with n, not with m · n


@torch.no_grad()
def attention_column_sums(q: Tensor, k: Tensor, scale: float | None = None, squares: bool = False) -> Tensor:
    """How much attention every key ``j`` received from all queries ``i``: ``Σ_i A_ij``.

    This is the accumulated score of H2O (Zhang et al., 2023, section 4), which D2O uses too. RoCo (Ren and
    Zhu, 2024) also needs ``Σ_i A_ij²``, for the standard deviation.

    Args:
        q: ``[B, Hq, m, d]``, rotated: the queries of the last ``m`` of ``n`` positions. Each sees the keys up
            to its own.
        k: ``[B, H, n, d]``, rotated, with ``Hq = G·H``.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        squares: also return the sums of squared weights.

    Returns:
        ``[B, Hq, n]``, with ``squares`` ``[2, B, Hq, n]``, in fp32 (fp64 for fp64 inputs). The sums are per
        query head, not averaged over G.
    """
    (batch, kv_heads, n, _), query_heads = k.shape, q.shape[1]
    powers = 2 if squares else 1
    shape = powers, batch * kv_heads, query_heads // kv_heads, n
    sums = torch.zeros(shape, dtype=compute_dtype(q.dtype), device=q.device)
    for here, _, weights in _blocks(q, k, scale):
        sums[0, here, :, : weights.shape[-1]] += weights.sum(2)
        if squares:
            sums[1, here, :, : weights.shape[-1]] += weights.square_().sum(2)
    sums = sums.view(powers, batch, query_heads, n)
    return sums if squares else sums[0]


@torch.no_grad()
def attention_rows(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """The attention weights of the last queries, for example of SnapKV's observation window.

    See Li et al., 2024, section 4.1. The arguments are those of ``attention_column_sums``.

    Returns:
        ``[B, Hq, m, n]`` in fp32 (fp64 for fp64 inputs). Every row sums to one. Keys behind the query have
        weight 0.
    """
    (batch, kv_heads, n, _), (query_heads, m) = k.shape, q.shape[1:3]
    compute = compute_dtype(q.dtype)
    out = torch.zeros(batch * kv_heads, query_heads // kv_heads, m, n, dtype=compute, device=q.device)
    for here, block, weights in _blocks(q, k, scale):
        out[here, :, block, : weights.shape[-1]] = weights
    return out.view(batch, query_heads, m, n)


def _blocks(q: Tensor, k: Tensor, scale: float | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Compute the attention weights block by block.

    Yields:
        A slice of the ``B·H`` pairs of row and KV head, a slice of the ``m`` queries, and their weights
        ``[pairs, G, queries, S]``, with the ``S`` keys up to the last of these queries. The next block
        overwrites the weights.
    """
    (batch, kv_heads, n, head_dim), m = k.shape, q.shape[2]
    assert q.shape[::3] == k.shape[::3] and not q.shape[1] % kv_heads and m <= n, (q.shape, k.shape)
    pairs = batch * kv_heads
    groups = q.shape[1] // kv_heads
    elements, most = (_CUDA_ELEMENTS, _CUDA_ROWS) if q.is_cuda else (_CPU_ELEMENTS, _CPU_ROWS)
    rows = max(1, min(m, most, max(-(-_LEAST_ROWS // groups), elements // max(1, groups * n))))
    heads = max(1, min(pairs, elements // max(1, groups * rows * n)))
    size = heads * rows * n * groups
    compute = compute_dtype(q.dtype)
    buffer = torch.empty(size, dtype=compute, device=q.device)
    room = torch.empty(size, dtype=compute, device=q.device)
    q = q.reshape(pairs, groups, m, head_dim)
    k = k.reshape(pairs, n, head_dim)
    factor = head_dim**-0.5 if scale is None else scale
    dtype = q.dtype if _multiplies_narrow(q, k) else compute
    for first in range(0, pairs, heads):
        here = slice(first, min(first + heads, pairs))
        keys = k[here].to(dtype)
        for start in range(0, m, rows):
            block = slice(start, min(start + rows, m))
            logits = _logits(q[here, :, block].to(dtype), keys[:, : n - m + block.stop], factor, buffer)
            # The softmax is not written over the logits, because then the fused kernel is a quarter faster.
            yield here, block, torch.softmax(logits, -1, out=room[: logits.numel()].view(logits.shape))


def _multiplies_narrow(q: Tensor, k: Tensor) -> bool:
    """Whether the device can multiply these 16-bit factors with a result in fp32."""
    return q.is_cuda and q.dtype == k.dtype and q.dtype in (torch.bfloat16, torch.float16)


def _logits(q: Tensor, k: Tensor, factor: float, buffer: Tensor) -> Tensor:
    """Causal logits ``factor · q · k`` of queries at the last ``r`` of ``S`` positions, ``[h, G, r, S]``.

    Args:
        q: ``[h, G, r, d]``.
        k: ``[h, S, d]``.
        factor: factor on the products.
        buffer: memory in which the result lies.
    """
    heads, groups, rows, _ = q.shape
    width = k.shape[1]
    out = buffer[: heads * groups * rows * width].view(heads, groups * rows, width)
    queries = q.flatten(1, 2)
    keys = k.transpose(1, 2)
    if q.dtype == buffer.dtype:
        torch.bmm(queries * factor, keys, out=out)
    else:
        torch.baddbmm(out, queries, keys, out.dtype, beta=0, alpha=factor, out=out)
    out = out.view(heads, groups, rows, width)
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
    out[..., width - rows :].masked_fill_(hidden, float("-inf"))
    return out
