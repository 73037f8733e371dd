"""Attention statistics as Triton kernels: one program owns one block of the result, so nothing is added atomically.

Column sums take two passes over the keys: the log-sum-exp of every query (unless given), then a program per block of keys and
query head that walks down the queries from the diagonal. Rows are split over blocks of keys: each block gives its own
log-sum-exp, then every weight is written once. Logits of fp32 inputs are computed in full fp32, not TF32.
"""

import contextlib
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod.kernels import dispatch

_LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """Queries, keys and features of one product, and how it is compiled."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


def tile(dtype: torch.dtype, head_dim: int) -> Tile:
    """A tile that stays in registers (the tests read spills from the compiled kernels).

    Full fp32 products run without tensor cores and hold their operands in registers: all features at once would spill.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return Tile(64, 64, block_d, 16, 8, 2)
    return Tile(64, 128, block_d, min(block_d, 128), 8, 3)


@triton.jit
def _products(
    q, q_inside, k, k_inside, head_dim,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, BLOCK_N]`` products in fp32 of the queries and keys that the pointers name, ``BLOCK_K`` features at a time."""
    out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, BLOCK_D, BLOCK_K):
        features = start + tl.arange(0, BLOCK_K)
        inside = (features < head_dim)[None, :]
        queries = tl.load(q[:, None] + features[None, :], mask=q_inside[:, None] & inside, other=0.0)
        keys = tl.load(k[:, None] + features[None, :], mask=k_inside[:, None] & inside, other=0.0)
        out = tl.dot(queries, tl.trans(keys), out, input_precision="ieee")
    return out


@triton.jit
def lse_kernel(
    q, k, out, m, n, head_dim, groups, kv_heads, scale_log2,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp ``[B·Hq, m]`` of a block of queries over the keys up to their own."""
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // groups
    k += kv_head // kv_heads * k_batch + kv_head % kv_heads * k_head
    q += head // (groups * kv_heads) * q_batch + head % (groups * kv_heads) * q_head
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_rows = q + rows.to(tl.int64) * q_row
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, tl.minimum(n, n - m + (tl.program_id(0) + 1) * BLOCK_M), BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        k_rows = k + columns.to(tl.int64) * k_row
        logits = (
            _products(q_rows, rows < m, k_rows, columns < n, head_dim, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_K)
            * scale_log2
        )
        logits = tl.where(columns[None, :] <= (rows + n - m)[:, None], logits, float("-inf"))
        # the first block holds key 0, which every query sees: from then on the peak is finite
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(logits - new_peak[:, None]), 1)
        peak = new_peak
    tl.store(out + head * m + rows, peak + tl.log2(total), mask=rows < m)


@triton.jit
def column_sums_kernel(
    q, k, lse, sums, squares, m, n, head_dim, groups, kv_heads, scale_log2,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    WITH_SQUARES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums ``[B·Hq, n]`` of a block of keys over the queries from the diagonal down; ``lse`` in base 2."""
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // groups
    k += kv_head // kv_heads * k_batch + kv_head % kv_heads * k_head
    q += head // (groups * kv_heads) * q_batch + head % (groups * kv_heads) * q_head
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_rows = k + columns.to(tl.int64) * k_row
    total = tl.zeros([BLOCK_N], tl.float32)
    total_squares = tl.zeros([BLOCK_N], tl.float32)
    first = tl.maximum(0, tl.program_id(0) * BLOCK_N - (n - m)) // BLOCK_M * BLOCK_M
    for start in range(first, m, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q_rows = q + rows.to(tl.int64) * q_row
        logits = (
            _products(q_rows, rows < m, k_rows, columns < n, head_dim, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_K)
            * scale_log2
        )
        # an infinite lse makes the rows after the last query weigh nothing
        row_lse = tl.load(lse + head * m + rows, mask=rows < m, other=float("inf"))
        seen = columns[None, :] <= (rows + n - m)[:, None]
        weights = tl.where(seen, tl.exp2(logits - row_lse[:, None]), 0.0)
        total += tl.sum(weights, 0)
        if WITH_SQUARES:
            total_squares += tl.sum(weights * weights, 0)
    tl.store(sums + head * n + columns, total, mask=columns < n)
    if WITH_SQUARES:
        tl.store(squares + head * n + columns, total_squares, mask=columns < n)


@triton.jit
def rows_kernel(
    q, k, lse, out, m, n, head_dim, groups, kv_heads, scale_log2,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    WRITE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of keys for the ``G·w`` rows of its query heads: their log-sum-exp in it, or with ``WRITE`` their weights.

    ``lse`` is ``[B·H, key blocks, G·w]`` when it is written, ``[B·H, G·w]`` of all keys when it is read; both in base 2.
    """
    pair = tl.program_id(2).to(tl.int64)
    k += pair // kv_heads * k_batch + pair % kv_heads * k_head
    q += pair // kv_heads * q_batch + pair % kv_heads * groups * q_head
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = rows % m
    inside = rows < groups * m
    q_rows = q + (rows // m).to(tl.int64) * q_head + position.to(tl.int64) * q_row
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_rows = k + columns.to(tl.int64) * k_row
    logits = (
        _products(q_rows, inside, k_rows, columns < n, head_dim, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_K)
        * scale_log2
    )
    logits = tl.where(columns[None, :] <= (position + n - m)[:, None], logits, float("-inf"))
    if WRITE:
        row_lse = tl.load(lse + pair * groups * m + rows, mask=inside, other=0.0)
        where = (pair * groups * m + rows)[:, None] * n + columns[None, :]
        writable = inside[:, None] & (columns < n)[None, :]
        tl.store(out + where, tl.exp2(logits - row_lse[:, None]), mask=writable)
    else:
        peak = tl.max(logits, 1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)  # a block that is hidden from a row: log2(0) below
        part = peak + tl.log2(tl.sum(tl.exp2(logits - peak[:, None]), 1))
        where = (pair * tl.num_programs(0) + tl.program_id(0)) * groups * m + rows
        tl.store(lse + where, part, mask=inside)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` before triton was imported)."""
    return not isinstance(lse_kernel, triton.JITFunction)


def unsupported(q: Tensor) -> str | None:
    """Why the kernels cannot run on such queries; None when they can."""
    if q.dtype not in dispatch.TRITON_DTYPES:
        return f"dtype {q.dtype} (float32, float16 or bfloat16)"
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} (at most 256)"
    return dispatch.no_triton(q, interpreted())


def _launch(kernel, grid: tuple[int, ...], q: Tensor, k: Tensor, results, scale: float, **options) -> None:
    """Run a kernel on ``q [B, Hq, m, d]``, ``k [B, H, n, d]`` and the tensors in ``results``."""
    m, n, head_dim = q.shape[2], k.shape[2], q.shape[3]
    sizes = m, n, head_dim, q.shape[1] // k.shape[1], k.shape[1], scale * _LOG2E
    strides = *q.stride()[:3], *k.stride()[:3]
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        kernel[grid](q, k, *results, *sizes, *strides, **options)


def _prepare(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Both with contiguous rows, and the tile."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    return q, k, tile(q.dtype, q.shape[-1])._asdict()


@torch.no_grad()
def attention_column_sums(q: Tensor, k: Tensor, lse: Tensor | None, scale: float, squares: bool) -> Tensor:
    """See ``pod.kernels.statistics.attention_column_sums``."""
    batch, heads, m, _ = q.shape
    n = k.shape[2]
    q, k, options = _prepare(q, k)
    if lse is None:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        _launch(
            lse_kernel, (triton.cdiv(m, options["BLOCK_M"]), batch * heads), q, k, (lse,), scale, **options
        )
    else:
        lse = (lse.float() * _LOG2E).contiguous()
    sums = torch.empty(1 + squares, batch, heads, n, dtype=torch.float32, device=q.device)
    grid = triton.cdiv(n, options["BLOCK_N"]), batch * heads
    results = lse, sums[0], sums[-1]
    _launch(column_sums_kernel, grid, q, k, results, scale, WITH_SQUARES=squares, **options)
    return sums if squares else sums[0]


@torch.no_grad()
def attention_rows(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """See ``pod.kernels.statistics.attention_rows``."""
    batch, heads, m, _ = q.shape
    kv_heads, n = k.shape[1:3]
    rows = heads // kv_heads * m
    q, k, options = _prepare(q, k)
    out = torch.empty(batch, heads, m, n, dtype=torch.float32, device=q.device)
    grid = triton.cdiv(n, options["BLOCK_N"]), triton.cdiv(rows, options["BLOCK_M"]), batch * kv_heads
    parts = torch.empty(batch * kv_heads, grid[0], rows, dtype=torch.float32, device=q.device)
    _launch(rows_kernel, grid, q, k, (parts, parts), scale, WRITE=False, **options)
    lse = torch.logsumexp(parts / _LOG2E, dim=1) * _LOG2E
    _launch(rows_kernel, grid, q, k, (lse, out), scale, WRITE=True, **options)
    return out
