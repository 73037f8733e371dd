"""Attention statistics in plain PyTorch, one block of queries at a time: memory O(n), work about half of n².

A block of ``r`` queries of a few KV heads needs the keys up to its last query only. Its logits are one matrix product into
a buffer that all blocks share; on CPU the buffer is small enough for the processor's caches.
"""

import torch
from torch import Tensor

_CPU_ELEMENTS, _CPU_ROWS = 1 << 20, 128
_CUDA_ELEMENTS, _CUDA_ROWS = 1 << 25, 1024
_LEAST_ROWS = 32  # a matrix product with fewer rows is slow; the buffer then grows with n, not with m · n


def unsupported(q: Tensor) -> str | None:
    """None: this version runs everywhere."""
    return None


def _block_sizes(q: Tensor, k: Tensor) -> tuple[int, int]:
    """KV heads (of all batch rows together) and query positions per block."""
    groups, m, n = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    elements, most = (_CUDA_ELEMENTS, _CUDA_ROWS) if q.is_cuda else (_CPU_ELEMENTS, _CPU_ROWS)
    least = -(-_LEAST_ROWS // groups)
    rows = max(1, min(m, most, max(least, elements // max(1, groups * n))))
    return max(1, min(k.shape[0] * k.shape[1], elements // max(1, groups * rows * n))), rows


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
def attention_column_sums(
    q: Tensor, k: Tensor, lse: Tensor | None, scale: float, squares: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """See ``pod.kernels.statistics.attention_column_sums``."""
    batch, query_heads, m, head_dim = q.shape
    kv_heads, n = k.shape[1:3]
    groups, pairs = query_heads // kv_heads, batch * kv_heads
    compute = torch.promote_types(q.dtype, torch.float32)
    sums = torch.zeros(1 + squares, pairs, groups, n, dtype=compute, device=q.device)
    heads, rows = _block_sizes(q, k)
    buffers = torch.empty(1 + (lse is None), heads * groups * rows * n, dtype=compute, device=q.device)
    all_q, all_k = q.reshape(pairs, groups, m, head_dim), k.reshape(pairs, n, head_dim)
    all_lse = None if lse is None else lse.reshape(pairs, groups, m, 1)
    with torch.autocast(q.device.type, enabled=False):
        for first in range(0, pairs, heads):
            here = slice(first, first + heads)
            keys = all_k[here].to(compute)
            for start in range(0, m, rows):
                block = slice(start, min(start + rows, m))
                width = n - m + block.stop
                logits = _logits(all_q[here, :, block].to(compute) * scale, keys[:, :width], buffers[0])
                weights = _weights(logits, None if all_lse is None else all_lse[here, :, block], buffers[-1])
                sums[0, here, :, :width] += weights.sum(2)
                if squares:
                    sums[1, here, :, :width] += weights.square_().sum(2)
    sums = sums.view(1 + squares, batch, query_heads, n)
    return (sums[0], sums[1]) if squares else sums[0]


def _weights(logits: Tensor, lse: Tensor | None, buffer: Tensor) -> Tensor:
    """Attention weights of a block, in ``buffer`` or in the place of the logits."""
    if lse is not None:
        return logits.sub_(lse).exp_()
    # out of place: the fused kernel is then a quarter faster than in place (and than a subtraction and an exp)
    return torch.softmax(logits, -1, out=buffer[: logits.numel()].view(logits.shape))


@torch.no_grad()
def attention_rows(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """See ``pod.kernels.statistics.attention_rows``."""
    batch, query_heads, m, head_dim = q.shape
    kv_heads, n = k.shape[1:3]
    groups, pairs = query_heads // kv_heads, batch * kv_heads
    compute = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(pairs, groups, m, n, dtype=compute, device=q.device)
    heads, rows = _block_sizes(q, k)
    buffer = torch.empty(heads * groups * rows * n, dtype=compute, device=q.device)
    all_q, all_k = q.reshape(pairs, groups, m, head_dim), k.reshape(pairs, n, head_dim)
    with torch.autocast(q.device.type, enabled=False):
        for first in range(0, pairs, heads):
            here = slice(first, first + heads)
            keys = all_k[here].to(compute)
            for start in range(0, m, rows):
                block = slice(start, min(start + rows, m))
                width = n - m + block.stop
                logits = _logits(all_q[here, :, block].to(compute) * scale, keys[:, :width], buffer)
                out[here, :, block, :width] = logits.softmax(-1)
    return out.view(batch, query_heads, m, n)
