"""Attention over a whole sequence as one Triton kernel, for heads that lead and heads that follow in one launch, with gradients.

One program owns a tile of queries of one head. It goes over the proximal keys with the layer's own queries and keys, then, if its
head follows, over the distant keys with the lead's, in one online softmax (equations 3 and 4 of the paper: the gate is that softmax).
Nothing of size n x n exists; besides the output there is one fp32 number per query, the log-sum-exp. The backward pass is in
``triton_prefill_backward``; which tiles need a mask, and where documents begin, in ``triton_prefill_tiles``.

Programs of the last queries, which see most keys, start first; the G heads of a KV head are neighbours, so that they read its keys
and values from the L2 cache at the same time.
"""

import functools
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod.kernels import dispatch
from pod.kernels import triton_prefill_backward as backward
from pod.kernels.triton_prefill_tiles import (
    FULL,
    LOG2E,
    MASKED,
    Tile,
    batch_stride,
    capability,
    launch,
    lead_blocks,
    lead_mask,
    load_tile,
    own_block,
    own_blocks,
    own_mask,
    products,
    query_documents,
    role,
    store_tile,
    strides,
    tile,
)
from pod.modeling.shipped.attend import Call, span

TILES = {  # family -> rounded head_dim -> queries, keys, keys of a masked block, warps, stages
    80: {64: (128, 64, 32, 8, 3), 128: (64, 64, 32, 4, 2), 256: (64, 32, 32, 8, 2)},
    90: {64: (128, 128, 64, 8, 3), 128: (128, 128, 128, 8, 2), 256: (128, 64, 32, 8, 2)},
    100: {64: (128, 128, 64, 8, 3), 128: (128, 64, 64, 8, 3), 256: (128, 64, 64, 8, 2)},
    "fp32": {64: (64, 32, 32, 8, 1), 128: (32, 32, 32, 8, 1), 256: (32, 16, 16, 8, 1)},
}
"""16-bit tiles up to head_dim 128 compile without spilling; not measured on a GPU. On sm_90 with head_dim 128 a thread of 8 warps holds 64 registers of
output, 64 of logits and 32 of weights, and shared memory 32 KiB of queries and two stages of 64 KiB of keys and values: with
masked blocks of another size than full ones, or a third row of warps, registers would spill."""


@triton.jit
def _accumulate(
    queries, q_base, Q_ROW: tl.constexpr, first, n, k_base, K_ROW: tl.constexpr, v_base, V_ROW: tl.constexpr,
    column, limit, allowed, acc, total, peak, scale_log2,
    BLOCK_M: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """A block of KEYS keys into the online softmax: ``acc [BLOCK_M, BLOCK_D]``, ``total`` and ``peak`` (base 2)."""
    keys = load_tile(k_base, K_ROW, column, limit, 0, KEYS, BLOCK_D, HEAD_DIM, GUARD)
    logits = products(
        queries, q_base, Q_ROW, first, n, keys, k_base, K_ROW, column, limit, BLOCK_M, KEYS, BLOCK_D, CHUNK, HEAD_DIM
    )  # fmt: skip
    values = load_tile(v_base, V_ROW, column, limit, 0, KEYS, BLOCK_D, HEAD_DIM, GUARD)
    if GUARD:
        logits = tl.where(allowed, logits * scale_log2, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet
        weights = tl.exp2(logits - shift[:, None])
    else:
        new_peak = tl.maximum(peak, tl.max(logits, 1) * scale_log2)
        shift = new_peak
        weights = tl.exp2(logits * scale_log2 - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit
def forward_kernel(
    q, k, v, q_lead, k_lead, out, lse, lead_index, starts,
    n, groups, kv_heads, num_sink, num_recent, scale_log2,
    q_batch, q_head, Q_ROW: tl.constexpr, k_batch, k_head, K_ROW: tl.constexpr, v_batch, v_head, V_ROW: tl.constexpr,
    ql_batch, ql_head, QL_ROW: tl.constexpr, kl_batch, kl_head, KL_ROW: tl.constexpr, out_batch, out_head, OUT_ROW: tl.constexpr, starts_batch,
    HAS_LEAD: tl.constexpr, HAS_DOCS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EDGE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Output and base-2 log-sum-exp (-inf where a row sees nothing) of a tile of queries; grid (tiles * G, B * H)."""
    group_head = tl.program_id(0) % groups
    first = (tl.num_programs(0) // groups - 1 - tl.program_id(0) // groups) * BLOCK_M
    end = tl.minimum(first + BLOCK_M, n)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = kv_head * groups + group_head
    lead, sinks, recent = role(lead_index, kv_head, n, num_sink, num_recent, HAS_LEAD)
    row_start, start, mixed = query_documents(starts, batch * starts_batch, first, n, BLOCK_M, HAS_DOCS)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    v_base = v + batch * v_batch + kv_head * v_head

    q_base = q + batch * q_batch + head * q_head
    k_base = k + batch * k_batch + kv_head * k_head
    queries = load_tile(q_base, Q_ROW, first, n, 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
    sink_end, sink_blocks, window, before, full, edges = own_blocks(
        start, mixed, first, end, sinks, recent, BLOCK_N, EDGE
    )  # fmt: skip
    for t in range(0, sink_blocks + edges):
        column, limit = own_block(t, start, sink_end, sink_blocks, window, before, full, end, BLOCK_N, EDGE)
        allowed = own_mask(first, column, limit, row_start, sinks, recent, BLOCK_M, EDGE, HAS_DOCS)
        acc, total, peak = _accumulate(
            queries, q_base, Q_ROW, first, n, k_base, K_ROW, v_base, V_ROW, column, limit, allowed, acc, total, peak,
            scale_log2, BLOCK_M, EDGE, BLOCK_D, CHUNK, HEAD_DIM, MASKED,
        )  # fmt: skip
    for t in range(0, full):
        column = window + before * EDGE + t * BLOCK_N
        acc, total, peak = _accumulate(
            queries, q_base, Q_ROW, first, n, k_base, K_ROW, v_base, V_ROW, column, n, None, acc, total, peak,
            scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, FULL,
        )  # fmt: skip

    if HAS_LEAD:
        distant, limit, full, edges = lead_blocks(start, mixed, first, end, sinks, recent, BLOCK_N, EDGE)
        position = tl.maximum(lead, 0).to(tl.int64)  # a head that leads has no distant block
        q_base = q_lead + batch * ql_batch + (position * groups + group_head) * ql_head
        k_base = k_lead + batch * kl_batch + position * kl_head
        rows = tl.where(limit > distant, n, 0)
        queries = load_tile(q_base, QL_ROW, first, rows, 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        for t in range(0, full):
            column = distant + t * BLOCK_N
            acc, total, peak = _accumulate(
                queries, q_base, QL_ROW, first, n, k_base, KL_ROW, v_base, V_ROW, column, n, None, acc, total, peak,
                scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, FULL,
            )  # fmt: skip
        for t in range(0, edges):
            column = distant + full * BLOCK_N + t * EDGE
            allowed = lead_mask(first, column, limit, row_start, sinks, recent, BLOCK_M, EDGE, HAS_DOCS)
            acc, total, peak = _accumulate(
                queries, q_base, QL_ROW, first, n, k_base, KL_ROW, v_base, V_ROW, column, limit, allowed, acc, total, peak,
                scale_log2, BLOCK_M, EDGE, BLOCK_D, CHUNK, HEAD_DIM, MASKED,
            )  # fmt: skip

    total = tl.where(total == 0.0, 1.0, total)  # padding: output 0, log-sum-exp -inf
    acc = acc / total[:, None]
    store_tile(out + batch * out_batch + head * out_head, OUT_ROW, first, n, acc, BLOCK_M, BLOCK_D, HEAD_DIM)
    rows = first + tl.arange(0, BLOCK_M)
    lse += (batch * kv_heads * groups + head) * n
    tl.store(lse + rows, peak + tl.log2(total), mask=rows < n)


class Settings(NamedTuple):
    """What a launch needs besides the tensors with gradients; ``scale >= 0``."""

    lead_index: Tensor | None  # int32 [H]
    starts: Tensor | None  # int32 [B or 1, n]
    ends: Tensor | None
    num_sink: int
    num_recent: int
    scale: float


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` before triton was imported)."""
    return not isinstance(forward_kernel, triton.JITFunction)


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot run a call; None when they can."""
    q = call.q
    lead = () if call.lead is None else call.lead[:2]
    given = [x for x in (q, *call.tokens, *lead) if isinstance(x, Tensor)]
    if len({(x.dtype, x.device) for x in given}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in given)
        return f"q, k, v (and lead q, k) are {kinds}; give all in one dtype on one device"
    if q.dtype not in dispatch.TRITON_DTYPES:
        return f"dtype {q.dtype} (float32, float16 or bfloat16)"
    if not 1 <= q.shape[-1] <= 256:
        return f"head_dim {q.shape[-1]} (1 to 256)"
    if call.lead is None and call.windows[0]:
        return "sinks and a window without a lead"
    return dispatch.not_whole_sequences(call) or dispatch.no_triton(q, interpreted())


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``: heads that lead and heads that follow in one launch; the output has the layout of ``q``."""
    n, doc_ids, q, scale = call.q.shape[2], call.segments.doc_ids, call.q, float(call.scale)
    keys, values = (span(x, 0, n) for x in call.tokens)
    q_lead = k_lead = index = None
    if call.lead is not None:
        q_lead, k_lead = call.lead.queries, span(call.lead.keys, 0, n)
        followers = range(keys.shape[1]) if call.lead.heads is None else call.lead.heads
        index = _lead_index(tuple(followers), keys.shape[1], q.device)
    if scale < 0:  # the kernels take the largest logit before they scale
        q, q_lead, scale = -q, None if q_lead is None else -q_lead, -scale
    given = q, keys, values, q_lead, k_lead
    inputs = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in given]
    starts = ends = None
    if doc_ids is not None:
        starts, ends = call.segments.derived("bounds", lambda: dispatch.document_bounds(doc_ids))
    num_sink, num_recent = (min(x, n) for x in call.windows)
    settings = Settings(index, starts, ends, num_sink, num_recent, scale)
    out, lse = _Attention.apply(*inputs, settings)  # type: ignore[misc]
    return out, lse / LOG2E


def _forward(q, k, v, q_lead, k_lead, settings: Settings) -> tuple[Tensor, Tensor]:
    """Output in the layout of ``q``, and base-2 log-sum-exp ``[B, Hq, n]``."""
    batch, heads, n, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    options = forward_tile(q.dtype, head_dim, capability(q.device))
    grid = triton.cdiv(n, options.BLOCK_M) * (heads // kv_heads), batch * kv_heads
    launch(
        forward_kernel, grid, q.device, q, k, v, q_lead, k_lead, out, lse, settings.lead_index, settings.starts,
        n, heads // kv_heads, kv_heads, settings.num_sink, settings.num_recent, settings.scale * LOG2E,
        *strides(q), *strides(k), *strides(v), *strides(q_lead), *strides(k_lead), *strides(out),
        batch_stride(settings.starts),
        HAS_LEAD=q_lead is not None, HAS_DOCS=settings.starts is not None, HEAD_DIM=head_dim, **options._asdict(),
    )  # fmt: skip
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_lead, k_lead, settings):
        out, lse = _forward(q, k, v, q_lead, k_lead, settings)
        ctx.save_for_backward(q, k, v, q_lead, k_lead, out, lse)
        ctx.settings = settings
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, *grads):
        needs = ctx.needs_input_grad
        of_queries, of_keys = needs[0] or needs[3], needs[1] or needs[2] or needs[4]
        found = backward.gradients(ctx.saved_tensors, grads[0], ctx.settings, of_queries, of_keys)
        return *found, None


@functools.lru_cache(maxsize=256)
def _lead_index(followers: tuple[int, ...], kv_heads: int, device: torch.device) -> Tensor:
    """Int32 ``[H]``: index of a KV head among the followers, -1 for heads that lead. Kept, so that a step copies nothing."""
    index = [-1] * kv_heads
    for position, head in enumerate(followers):
        index[head] = position
    return torch.tensor(index, dtype=torch.int32, device=device)


def forward_tile(dtype: torch.dtype, head_dim: int, chip: int) -> Tile:
    """The tile of the forward kernel."""
    return tile(TILES, dtype, head_dim, chip)
