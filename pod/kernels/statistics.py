"""What eviction methods read from attention, without the ``n x n`` matrix. Results carry no gradient.

One block of queries at a time: memory O(n), work about half of n². A block of ``r`` queries of a few KV heads needs the keys up to
its last query only. Its logits are one matrix product into a buffer that all blocks share; on CPU the buffer is small enough for
the processor's caches.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pod.modeling.shipped.attend import compute_dtype

_CPU_ELEMENTS, _CPU_ROWS = 1 << 20, 128
_CUDA_ELEMENTS, _CUDA_ROWS = 1 << 25, 1024
_LEAST_ROWS = 32  # a matrix product with fewer rows is slow; the buffer then grows with n, not with m · n


@torch.no_grad()
def attention_column_sums(
    q: Tensor,
    k: Tensor,
    scale: float | None = None,
    squares: bool = False,
) -> Tensor:
    """How much attention every key received: ``Σ_i A_ij``, the accumulated score of H2O (Zhang et al., 2023, section 4).

    D2O sums it over the prompt in the same way; RoCo (Ren and Zhu, 2024) also needs ``Σ_i A_ij²`` for the standard deviation.

    Args:
        q: ``[B, Hq, m, d]``, rotated: the queries of the last ``m`` of ``n`` positions; each sees the keys up to its own.
        k: ``[B, H, n, d]``, rotated, with ``Hq = G·H``.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        squares: also return the sums of squared weights.

    Returns:
        ``[B, Hq, n]``, with ``squares`` ``[2, B, Hq, n]``, in fp32 (fp64 for fp64 inputs); per query head, not averaged over G.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(q, k)
    (batch, kv_heads, n, _), query_heads = k.shape, q.shape[1]
    pairs, groups = batch * kv_heads, query_heads // kv_heads
    compute = compute_dtype(q.dtype)
    sums = torch.zeros(1 + squares, pairs, groups, n, dtype=compute, device=q.device)
    buffer = _buffer(q, k)
    for here, _, logits in _blocks(q, k, scale):
        # not in the logits' place: the fused kernel is then a quarter faster
        weights = torch.softmax(logits, -1, out=buffer[: logits.numel()].view(logits.shape))
        sums[0, here, :, : logits.shape[-1]] += weights.sum(2)
        if squares:
            sums[1, here, :, : logits.shape[-1]] += weights.square_().sum(2)
    sums = sums.view(1 + squares, batch, query_heads, n)
    return sums if squares else sums[0]


@torch.no_grad()
def attention_rows(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Softmax rows of the last queries, such as the observation window of SnapKV (Li et al., 2024, section 4.1).

    Args:
        q: ``[B, Hq, w, d]``, rotated: the queries of the last ``w`` of ``n`` positions; each sees the keys up to its own.
        k: ``[B, H, n, d]``, rotated, with ``Hq = G·H``.
        scale: factor on logits, ``1/sqrt(d)`` when None.

    Returns:
        ``[B, Hq, w, n]`` in fp32 (fp64 for fp64 inputs); every row sums to one, and is 0 after its own position.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(q, k)
    (batch, kv_heads, n, _), (query_heads, m) = k.shape, q.shape[1:3]
    compute = compute_dtype(q.dtype)
    out = torch.zeros(batch * kv_heads, query_heads // kv_heads, m, n, dtype=compute, device=q.device)
    for here, block, logits in _blocks(q, k, scale):
        out[here, :, block, : logits.shape[-1]] = logits.softmax(-1)
    return out.view(batch, query_heads, m, n)


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
    return torch.empty(size, dtype=compute_dtype(q.dtype), device=q.device)


def _blocks(q: Tensor, k: Tensor, scale: float | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Pairs ``h`` (of ``B·H``), queries ``r`` (of m) and logits ``[h, G, r, S]`` of every block.

    ``S`` ends at the key of the block's last query. The next block overwrites the logits.
    """
    (batch, kv_heads, n, head_dim), m = k.shape, q.shape[2]
    pairs, groups = batch * kv_heads, q.shape[1] // kv_heads
    heads, rows = _block_sizes(q, k)
    buffer = _buffer(q, k)
    q, k = q.reshape(pairs, groups, m, head_dim), k.reshape(pairs, n, head_dim)
    factor = head_dim**-0.5 if scale is None else scale
    for first in range(0, pairs, heads):
        here = slice(first, min(first + heads, pairs))
        keys = k[here].to(buffer.dtype)
        for start in range(0, m, rows):
            block = slice(start, min(start + rows, m))
            queries = q[here, :, block].to(buffer.dtype) * factor
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


def _check(q: Tensor, k: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q and k are {list(q.shape)} and {list(k.shape)}; give [B, Hq, m, d] and [B, H, n, d] with equal B and d"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide evenly among {k.shape[1]} KV heads")
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries are more than {k.shape[2]} keys; k must hold the queries' own positions too"
        )
    if q.dtype != k.dtype or q.device != k.device or not q.dtype.is_floating_point:
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}; give both in one float dtype on one device"
        )
