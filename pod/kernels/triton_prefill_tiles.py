"""What the forward and backward kernels of ``triton_prefill`` share: tiles, loads, products, and which tiles need a mask.

A query tile meets its keys in four groups. With the layer's own queries and keys: *edges* (sinks, the start of the window, the
diagonal), which are masked, and the full tiles between, which are not. With the lead's queries and keys: full tiles, then the tiles
at the window, masked. Blocks of keys start where their region starts, not at multiples of the block, so that one edge of each
region needs no second pass. A tile whose rows lie in several documents takes every tile masked.
"""

import contextlib
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

LOG2E = 1.4426950408889634
MASKED = tl.constexpr(True)
FULL = tl.constexpr(False)


class Tile(NamedTuple):
    """Queries, keys and features of a product, and how the kernel is compiled.

    EDGE: keys (for dK and dV: queries) of a masked block, half of a full one: less is computed twice, and masks need registers.
    CHUNK: features of one step of a logit.
    """

    BLOCK_M: int
    BLOCK_N: int
    EDGE: int
    BLOCK_D: int
    CHUNK: int
    num_warps: int
    num_stages: int


OVERRIDE: tuple[int, int, int] | None = None
"""Queries, keys and EDGE; tests set it to small tiles, so that few tokens cross many of them."""


def capability(device: torch.device) -> int:
    """90 for compute capability 9.0; 90 too where there is no GPU (interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tile(table: dict, dtype: torch.dtype, head_dim: int, chip: int) -> Tile:
    """The tile of ``table[family][head_dim rounded up to 64, 128 or 256]`` that the chip runs.

    Families: ``"fp32"``, and for 16-bit inputs 90 (H100, H200), 100 (B200) and 80 (A100 and all others; at most 99 KiB of shared
    memory, what RTX cards have).
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        family, chunk = "fp32", min(block_d, 16)
    else:
        family = 90 if chip == 90 else 100 if 100 <= chip < 120 else 80
        chunk = block_d
    m, n, edge, warps, stages = table[family][max(64, block_d)] if OVERRIDE is None else (*OVERRIDE, 4, 1)
    return Tile(m, n, edge, block_d, chunk, warps, stages)


def launch(kernel, grid: tuple[int, int], device: torch.device, *arguments, **options) -> None:
    """Run a kernel on the device of its tensors."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **options)


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of batch, head and row; zeros for a tensor that a variant does not read."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def batch_stride(x: Tensor | None) -> int:
    """Stride of rows in the batch of ``[B or 1, n]``; 0 where all share one."""
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


@triton.jit
def load_tile(
    base, ROW: tl.constexpr, first, limit, feature,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, HEAD_DIM: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """``[ROWS, FEATURES]``: rows from ``first``, features from ``feature``; 0 after row ``limit`` (with GUARD) and feature HEAD_DIM.

    The offset of the tile is one 64-bit scalar; offsets inside it fit in 32 bits.
    """
    base += tl.cast(first, tl.int64) * ROW + feature
    row = tl.arange(0, ROWS)
    column = tl.arange(0, FEATURES)
    pointers = base + (row[:, None] * ROW + column[None, :])
    if HEAD_DIM % FEATURES != 0:
        inside = (feature + column < HEAD_DIM)[None, :]
        if GUARD:
            inside = inside & (first + row < limit)[:, None]
        return tl.load(pointers, mask=inside, other=0.0)
    elif GUARD:
        return tl.load(pointers, mask=(first + row < limit)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    base, ROW: tl.constexpr, first, limit, values,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Write the rows of ``values [ROWS, FEATURES]`` before ``limit`` and their features before HEAD_DIM."""
    base += tl.cast(first, tl.int64) * ROW
    row = tl.arange(0, ROWS)
    column = tl.arange(0, FEATURES)
    inside = (first + row < limit)[:, None]
    if HEAD_DIM != FEATURES:
        inside = inside & (column < HEAD_DIM)[None, :]
    pointers = base + (row[:, None] * ROW + column[None, :])
    tl.store(pointers, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def products(
    x, x_base, X_ROW: tl.constexpr, x_first, x_limit, y, y_base, Y_ROW: tl.constexpr, y_first, y_limit,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """``x @ y.T`` in fp32, ``[ROWS, COLUMNS]``.

    With CHUNK < BLOCK_D both are read again, CHUNK features at a time: full fp32 products hold their operands in registers.
    """
    if CHUNK == BLOCK_D:
        return tl.dot(x, tl.trans(y), input_precision="ieee")
    else:
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        for feature in range(0, BLOCK_D, CHUNK):
            left = load_tile(x_base, X_ROW, x_first, x_limit, feature, ROWS, CHUNK, HEAD_DIM, MASKED)
            right = load_tile(y_base, Y_ROW, y_first, y_limit, feature, COLUMNS, CHUNK, HEAD_DIM, MASKED)
            out = tl.dot(left, tl.trans(right), out, input_precision="ieee")
        return out


@triton.jit
def role(lead_index, kv_head, n, num_sink, num_recent, HAS_LEAD: tl.constexpr):
    """Index among the followers (-1 = leads), sinks and window of a KV head; a lead is a head whose window holds everything."""
    if HAS_LEAD:
        lead = tl.load(lead_index + kv_head)
        return lead, tl.where(lead >= 0, num_sink, 0), tl.where(lead >= 0, num_recent, n)
    else:
        return -1, 0, num_recent


@triton.jit
def query_documents(starts, offset, first, n, BLOCK_M: tl.constexpr, HAS_DOCS: tl.constexpr):
    """Start of every row's document (or 0), the first of them, and whether the tile's rows lie in more than one."""
    if HAS_DOCS:
        rows = first + tl.arange(0, BLOCK_M)
        row_start = tl.load(starts + offset + rows, mask=rows < n, other=n)
        start = tl.min(row_start, 0)
        mixed = tl.max(tl.where(rows < n, row_start, start), 0) != start
        return row_start, start, mixed
    else:
        return 0, 0, False


@triton.jit
def own_blocks(start, mixed, first, end, sinks, recent, BLOCK_N: tl.constexpr, EDGE: tl.constexpr):
    """The own keys of rows ``[first, end)``: the sinks, then the window, with EDGE keys a block where they are masked.

    Returns ``(end of sinks, sink blocks, start of window, masked blocks before the full ones, full blocks, masked blocks)``.
    """
    window = tl.maximum(start, first - recent + 1)
    sink_end = tl.minimum(start + sinks, window)
    sink_blocks = tl.cdiv(tl.maximum(sink_end - start, 0), EDGE)
    # full: still in the window of the last row, not after the first row
    before = tl.cdiv(tl.maximum(end - recent - window, 0), EDGE)
    full = tl.maximum(first + 1 - window - before * EDGE, 0) // BLOCK_N
    full = tl.where(mixed, 0, full)
    after = tl.cdiv(tl.maximum(end - window - before * EDGE - full * BLOCK_N, 0), EDGE)
    return sink_end, sink_blocks, window, before, full, before + after


@triton.jit
def own_block(
    t, start, sink_end, sink_blocks, window, before, full, end, BLOCK_N: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """First key of masked own block ``t``, and the key before which it counts: a sink block ends where the window begins."""
    block = t - sink_blocks
    column = window + block * EDGE + tl.where(block >= before, full * BLOCK_N, 0)
    is_sink = block < 0
    return tl.where(is_sink, start + t * EDGE, column), tl.where(is_sink, sink_end, end)


@triton.jit
def own_mask(
    first, column, limit, row_start, sinks, recent,
    BLOCK_M: tl.constexpr, EDGE: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, EDGE]``: causal, in the row's document, a sink or in the window, before ``limit``."""
    i = (first + tl.arange(0, BLOCK_M))[:, None]
    j = (column + tl.arange(0, EDGE))[None, :]
    allowed = (j <= i) & (j < limit)
    if HAS_DOCS:
        begin = row_start[:, None]
        return allowed & (j >= begin) & ((i - j < recent) | (j < begin + sinks))
    else:
        return allowed & ((i - j < recent) | (j < sinks))


@triton.jit
def lead_blocks(start, mixed, first, end, sinks, recent, BLOCK_N: tl.constexpr, EDGE: tl.constexpr):
    """``(first distant key, end of distant keys, full blocks, masked blocks after them)`` of rows ``[first, end)``."""
    column = start + sinks
    stop = end - recent
    full = tl.maximum(first - recent + 1 - column, 0) // BLOCK_N
    full = tl.where(mixed, 0, full)
    return column, stop, full, tl.cdiv(tl.maximum(stop - column - full * BLOCK_N, 0), EDGE)


@triton.jit
def lead_mask(
    first, column, limit, row_start, sinks, recent,
    BLOCK_M: tl.constexpr, EDGE: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_M, EDGE]``: behind the row's window, after the sinks of its document, before ``limit``."""
    i = (first + tl.arange(0, BLOCK_M))[:, None]
    j = (column + tl.arange(0, EDGE))[None, :]
    allowed = (i - j >= recent) & (j < limit)
    if HAS_DOCS:
        allowed = allowed & (j >= row_start[:, None] + sinks)
    return allowed
