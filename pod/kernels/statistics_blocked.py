"""Attention statistics in plain PyTorch, one block of queries at a time: memory O(n), work about half of n².

A block of ``r`` queries of a few KV heads needs the keys up to its last query only. Its logits are one matrix product into
a buffer that all blocks share; on CPU the buffer is small enough for the processor's caches.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_CPU_ELEMENTS, _CPU_ROWS = 1 << 20, 128
_CUDA_ELEMENTS, _CUDA_ROWS = 1 << 25, 1024
_LEAST_ROWS = 32  # a matrix product with fewer rows is slow; the buffer then grows with n, not with m · n


def _block_sizes(q: Tensor, k: Tensor) -> tuple[int, int]:
    """KV heads (of all batch rows together) and query positions per block."""
    groups, m, n = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    elements, most = (_CUDA_ELEMENTS, _CUDA_ROWS) if q.is_cuda else (_CPU_ELEMENTS, _CPU_ROWS)
    least = -(-_LEAST_ROWS // groups)
    rows = max(1, min(m, most, max(least, elements // max(1, groups * n))))
    return max(1, min(k.shape[0] * k.shape[1], elements // max(1, groups * rows * n))), rows


def _buffer(q: Tensor, k: Tensor) -> Tensor:
    """Uninitialised room for the logits of one block, in at least fp32."""
    heads, rows = _block_sizes(q, k)
    size = heads * rows * k.shape[2] * (q.shape[1] // k.shape[1])
    return torch.empty(size, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)


def _blocks(q: Tensor, k: Tensor, scale: float) -> Iterator[tuple[slice, slice, Tensor]]:
    """Pairs ``h`` (of ``B·H``), queries ``r`` (of m) and logits ``[h, G, r, S]`` of every block.

    ``S`` ends at the key of the block's last query. The next block overwrites the logits.
    """
    (batch, kv_heads, n, head_dim), m = k.shape, q.shape[2]
    pairs, groups = batch * kv_heads, q.shape[1] // kv_heads
    heads, rows = _block_sizes(q, k)
    buffer = _buffer(q, k)
    q, k = q.reshape(pairs, groups, m, head_dim), k.reshape(pairs, n, head_dim)
    for first in range(0, pairs, heads):
        here = slice(first, min(first + heads, pairs))
        keys = k[here].to(buffer.dtype)
        for start in range(0, m, rows):
            block = slice(start, min(start + rows, m))
            queries = q[here, :, block].to(buffer.dtype) * scale
            yield here, block, _logits(queries, keys[:, : n - m + block.stop], buffer)


def _logits(q: Tensor, k: Tensor, buffer: Tensor) -> Tensor:
    """Logits ``[h, G, r, S]`` of the last ``r`` of ``S`` positions in ``buffer``; q ``[h, G, r, d]`` scaled, k ``[h, S, d]``."""
    heads, groups, rows, _ = q.shape
    width = k.shape[1]
    out = buffer[: heads * groups * rows * width].view(heads, groups * rows, width)
    torch.bmm(q.flatten(1, 2), k.transpose(1, 2), out=out)
    out = out.view(heads, groups, rows, width)
    hidden = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu_(1)
    out[..., width - rows :].masked_fill_(hidden, float("-inf"))
    return out


@torch.no_grad()
def attention_column_sums(q: Tensor, k: Tensor, lse: Tensor | None, scale: float, squares: bool) -> Tensor:
    """See ``pod.kernels.statistics.attention_column_sums``."""
    (batch, kv_heads, n, _), (query_heads, m) = k.shape, q.shape[1:3]
    pairs, groups = batch * kv_heads, query_heads // kv_heads
    compute = torch.promote_types(q.dtype, torch.float32)
    sums = torch.zeros(1 + squares, pairs, groups, n, dtype=compute, device=q.device)
    if lse is None:
        buffer = _buffer(q, k)
    else:
        lse = lse.to(compute).reshape(pairs, groups, m, 1)
    for here, block, logits in _blocks(q, k, scale):
        if lse is None:
            # not in the logits' place: the fused kernel is then a quarter faster, and faster than a subtraction and an exp
            weights = torch.softmax(logits, -1, out=buffer[: logits.numel()].view(logits.shape))
        else:
            weights = logits.sub_(lse[here, :, block]).exp_()
        sums[0, here, :, : logits.shape[-1]] += weights.sum(2)
        if squares:
            sums[1, here, :, : logits.shape[-1]] += weights.square_().sum(2)
    sums = sums.view(1 + squares, batch, query_heads, n)
    return sums if squares else sums[0]


@torch.no_grad()
def attention_rows(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """See ``pod.kernels.statistics.attention_rows``."""
    (batch, kv_heads, n, _), (query_heads, m) = k.shape, q.shape[1:3]
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(batch * kv_heads, query_heads // kv_heads, m, n, dtype=compute, device=q.device)
    for here, block, logits in _blocks(q, k, scale):
        out[here, :, block, : logits.shape[-1]] = logits.softmax(-1)
    return out.view(batch, query_heads, m, n)
