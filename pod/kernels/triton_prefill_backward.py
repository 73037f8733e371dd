"""Gradients of ``triton_prefill``, without atomics: a program owns a tile of keys (dK, dV) or a tile of queries (dQ).

Both read the merged output's log-sum-exp and ``Delta = rowsum(out * dout)``, which makes the gradient of the merge free (fact 2 of
the method): own tiles give the layer's dQ and dK, distant tiles the lead's, both dV. The two kernels compute the logits twice, which
costs 7 products a tile instead of the 5 of one kernel with atomic dQ; in return gradients are the same bits in every run, and there
is no fp32 dQ of the size of the inputs.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

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

KEY_TILES = {  # family -> rounded head_dim -> queries, keys, queries of a masked block, warps, stages
    80: {64: (64, 128, 32, 8, 2), 128: (64, 64, 32, 8, 2), 256: (16, 32, 16, 4, 1)},
    90: {64: (64, 128, 32, 8, 3), 128: (32, 128, 16, 8, 2), 256: (32, 64, 32, 8, 2)},
    100: {64: (64, 128, 64, 8, 3), 128: (64, 128, 64, 8, 2), 256: (32, 64, 32, 8, 2)},
    "fp32": {64: (16, 32, 16, 8, 1), 128: (16, 32, 16, 8, 1), 256: (16, 16, 16, 8, 1)},
}
"""16-bit tiles up to head_dim 128 compile without spilling; not measured on a GPU. On sm_90 with head_dim 128 dK and dV of 128 keys take 128 registers
of a thread of 8 warps. Logits and their gradients of 64 queries would take 64 more, weights, LSE and Delta the rest: that spills
inside the loop, 32 queries do not."""
QUERY_TILES = {  # the same, with keys of a masked block
    80: {64: (128, 64, 32, 8, 2), 128: (64, 32, 32, 4, 2), 256: (32, 16, 16, 4, 1)},
    90: {64: (128, 64, 32, 8, 3), 128: (128, 64, 32, 8, 2), 256: (64, 32, 32, 8, 2)},
    100: {64: (128, 64, 64, 8, 3), 128: (128, 64, 64, 8, 2), 256: (64, 32, 32, 8, 2)},
    "fp32": {64: (32, 16, 16, 8, 1), 128: (32, 16, 16, 8, 1), 256: (16, 16, 16, 8, 1)},
}


@triton.jit
def delta_kernel(
    out, dout, delta, n, heads, out_batch, out_head, OUT_ROW: tl.constexpr,
    do_batch, do_head, DO_ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """``delta[b, h, i] = sum(out * dout)`` of a tile of queries, fp32; grid (tiles, B * Hq)."""
    first = tl.program_id(0) * BLOCK_M
    head = (tl.program_id(1) % heads).to(tl.int64)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    out += batch * out_batch + head * out_head
    dout += batch * do_batch + head * do_head
    left = load_tile(out, OUT_ROW, first, n, 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
    right = load_tile(dout, DO_ROW, first, n, 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
    rows = first + tl.arange(0, BLOCK_M)
    total = tl.sum(left.to(tl.float32) * right.to(tl.float32), 1)
    tl.store(delta + (batch * heads + head) * n + rows, total, mask=rows < n)


@triton.jit
def _key_step(
    keys, k_base, K_ROW: tl.constexpr, values, v_base, V_ROW: tl.constexpr, column, n, q_base, q_head, Q_ROW: tl.constexpr,
    do_base, do_head, DO_ROW: tl.constexpr, lse, delta, g, first, allowed, dk, dv, scale_log2,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """ROWS queries of head ``g`` from ``first`` into dK (without its scale) and dV; logits are ``[BLOCK_N, ROWS]``."""
    q_base += g.to(tl.int64) * q_head
    do_base += g.to(tl.int64) * do_head
    rows = first + tl.arange(0, ROWS)
    statistics = g.to(tl.int64) * n + rows
    queries = load_tile(q_base, Q_ROW, first, n, 0, ROWS, BLOCK_D, HEAD_DIM, GUARD)
    if GUARD:
        row_lse = tl.load(lse + statistics, mask=rows < n, other=0.0)
    else:
        row_lse = tl.load(lse + statistics)
    logits = products(
        keys, k_base, K_ROW, column, n, queries, q_base, Q_ROW, first, n, BLOCK_N, ROWS, BLOCK_D, CHUNK, HEAD_DIM
    )  # fmt: skip
    weights = tl.exp2(logits * scale_log2 - row_lse[None, :])
    if GUARD:
        weights = tl.where(allowed, weights, 0.0)
    douts = load_tile(do_base, DO_ROW, first, n, 0, ROWS, BLOCK_D, HEAD_DIM, GUARD)
    dv = tl.dot(weights.to(douts.dtype), douts, dv, input_precision="ieee")
    dweights = products(
        values, v_base, V_ROW, column, n, douts, do_base, DO_ROW, first, n, BLOCK_N, ROWS, BLOCK_D, CHUNK, HEAD_DIM
    )  # fmt: skip
    if GUARD:
        row_delta = tl.load(delta + statistics, mask=rows < n, other=0.0)
    else:
        row_delta = tl.load(delta + statistics)
    dlogits = weights * (dweights - row_delta[None, :])
    dk = tl.dot(dlogits.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def keys_kernel(
    q, k, v, q_lead, k_lead, dout, lse, delta, dk, dv, dk_lead, lead_index, starts, ends,
    n, groups, kv_heads, num_sink, num_recent, scale, scale_log2,
    q_batch, q_head, Q_ROW: tl.constexpr, k_batch, k_head, K_ROW: tl.constexpr, v_batch, v_head, V_ROW: tl.constexpr,
    ql_batch, ql_head, QL_ROW: tl.constexpr, kl_batch, kl_head, KL_ROW: tl.constexpr, do_batch, do_head, DO_ROW: tl.constexpr,
    dk_batch, dk_head, DK_ROW: tl.constexpr, dv_batch, dv_head, DV_ROW: tl.constexpr, dkl_batch, dkl_head, DKL_ROW: tl.constexpr, starts_batch,
    HAS_LEAD: tl.constexpr, HAS_DOCS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EDGE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dK and dV, and the part of the lead's dK, of a tile of keys of a KV head; grid (tiles, B * H).

    Blocks of queries start at the tile's first key, those of the lead's pass one window later. One loop runs over the blocks of all
    G heads.
    """
    column = tl.program_id(0) * BLOCK_N
    stop = tl.minimum(column + BLOCK_N, n)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    lead, sinks, recent = role(lead_index, kv_head, n, num_sink, num_recent, HAS_LEAD)
    j = column + tl.arange(0, BLOCK_N)
    if HAS_DOCS:
        begin = tl.load(starts + batch * starts_batch + j, mask=j < n, other=n)
        finish = tl.load(ends + batch * starts_batch + j, mask=j < n, other=0)
        end = tl.max(finish, 0)
        mixed = tl.min(begin, 0) != tl.max(tl.where(j < n, begin, 0), 0)
        # of padding, j < begin holds for every key: finish = 0 tells it
        has_sink = tl.max(tl.where((j < begin + sinks) & (j < finish), 1, 0), 0) == 1
    else:
        begin = tl.zeros([BLOCK_N], tl.int32)
        finish = tl.zeros([BLOCK_N], tl.int32) + n
        end = n
        mixed = False
        has_sink = column < sinks

    head = kv_head * groups
    v_base = v + batch * v_batch + kv_head * v_head
    do_base = dout + batch * do_batch + head * do_head
    lse += (batch * kv_heads * groups + head) * n
    delta += (batch * kv_heads * groups + head) * n
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    values = load_tile(v_base, V_ROW, column, n, 0, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)

    q_base = q + batch * q_batch + head * q_head
    k_base = k + batch * k_batch + kv_head * k_head
    keys = load_tile(k_base, K_ROW, column, n, 0, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
    # full: not before the last key, in the window of the first
    before = tl.cdiv(stop - 1 - column, EDGE)
    full = tl.maximum(tl.minimum(column + recent, end) - column - before * EDGE, 0) // BLOCK_M
    full = tl.where(mixed, 0, full)
    last = tl.where(has_sink, end, tl.minimum(end, stop - 1 + recent))
    edges = tl.cdiv(tl.maximum(last - column - full * BLOCK_M, 0), EDGE)
    for t in range(0, edges * groups):
        g = t // edges
        block = t - g * edges
        first = column + block * EDGE + tl.where(block >= before, full * BLOCK_M, 0)
        i = first + tl.arange(0, EDGE)
        distance = i[None, :] - j[:, None]
        proximal = (distance < recent) | (j < begin + sinks)[:, None]
        allowed = (distance >= 0) & (i[None, :] < finish[:, None]) & proximal
        dk_acc, dv_acc = _key_step(
            keys, k_base, K_ROW, values, v_base, V_ROW, column, n,
            q_base, q_head, Q_ROW, do_base, do_head, DO_ROW, lse, delta, g, first, allowed, dk_acc, dv_acc, scale_log2,
            EDGE, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, MASKED,
        )  # fmt: skip
    for t in range(0, full * groups):
        g = t // full
        first = column + before * EDGE + (t - g * full) * BLOCK_M
        dk_acc, dv_acc = _key_step(
            keys, k_base, K_ROW, values, v_base, V_ROW, column, n,
            q_base, q_head, Q_ROW, do_base, do_head, DO_ROW, lse, delta, g, first, None, dk_acc, dv_acc, scale_log2,
            BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, FULL,
        )  # fmt: skip
    dk += batch * dk_batch + kv_head * dk_head
    store_tile(dk, DK_ROW, column, n, dk_acc * scale, BLOCK_N, BLOCK_D, HEAD_DIM)

    if HAS_LEAD:
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        position = tl.maximum(lead, 0).to(tl.int64)  # a head that leads has no distant block
        q_base = q_lead + batch * ql_batch + position * groups * ql_head
        k_base = k_lead + batch * kl_batch + position * kl_head
        origin = column + recent
        full = tl.maximum(end - origin - before * EDGE, 0) // BLOCK_M
        full = tl.where(mixed, 0, tl.where(has_sink, 0, full))
        edges = tl.cdiv(tl.maximum(end - origin - full * BLOCK_M, 0), EDGE)
        read = tl.where(end > origin, n, 0)
        keys = load_tile(k_base, KL_ROW, column, read, 0, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        for t in range(0, edges * groups):
            g = t // edges
            block = t - g * edges
            first = origin + block * EDGE + tl.where(block >= before, full * BLOCK_M, 0)
            i = first + tl.arange(0, EDGE)
            behind = i[None, :] - j[:, None] >= recent
            allowed = behind & (i[None, :] < finish[:, None]) & (j >= begin + sinks)[:, None]
            dk_acc, dv_acc = _key_step(
                keys, k_base, KL_ROW, values, v_base, V_ROW, column, n,
                q_base, ql_head, QL_ROW, do_base, do_head, DO_ROW, lse, delta, g, first, allowed, dk_acc, dv_acc, scale_log2,
                EDGE, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, MASKED,
            )  # fmt: skip
        for t in range(0, full * groups):
            g = t // full
            first = origin + before * EDGE + (t - g * full) * BLOCK_M
            dk_acc, dv_acc = _key_step(
                keys, k_base, KL_ROW, values, v_base, V_ROW, column, n,
                q_base, ql_head, QL_ROW, do_base, do_head, DO_ROW, lse, delta, g, first, None, dk_acc, dv_acc, scale_log2,
                BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, FULL,
            )  # fmt: skip
        dk_lead += batch * dkl_batch + position * dkl_head
        written = tl.where(lead >= 0, n, 0)
        store_tile(dk_lead, DKL_ROW, column, written, dk_acc * scale, BLOCK_N, BLOCK_D, HEAD_DIM)
    dv += batch * dv_batch + kv_head * dv_head
    store_tile(dv, DV_ROW, column, n, dv_acc, BLOCK_N, BLOCK_D, HEAD_DIM)


@triton.jit
def _query_step(
    queries, q_base, Q_ROW: tl.constexpr, douts, do_base, DO_ROW: tl.constexpr, first, n,
    k_base, K_ROW: tl.constexpr, v_base, V_ROW: tl.constexpr, column, limit, allowed, row_lse, row_delta, dq, scale_log2,
    BLOCK_M: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """A block of KEYS keys into dQ (without its scale)."""
    keys = load_tile(k_base, K_ROW, column, limit, 0, KEYS, BLOCK_D, HEAD_DIM, GUARD)
    logits = products(
        queries, q_base, Q_ROW, first, n, keys, k_base, K_ROW, column, limit, BLOCK_M, KEYS, BLOCK_D, CHUNK, HEAD_DIM
    )  # fmt: skip
    weights = tl.exp2(logits * scale_log2 - row_lse[:, None])
    if GUARD:
        weights = tl.where(allowed, weights, 0.0)
    values = load_tile(v_base, V_ROW, column, limit, 0, KEYS, BLOCK_D, HEAD_DIM, GUARD)
    dweights = products(
        douts, do_base, DO_ROW, first, n, values, v_base, V_ROW, column, limit, BLOCK_M, KEYS, BLOCK_D, CHUNK, HEAD_DIM
    )  # fmt: skip
    dlogits = weights * (dweights - row_delta[:, None])
    return tl.dot(dlogits.to(keys.dtype), keys, dq, input_precision="ieee")


@triton.jit
def queries_kernel(
    q, k, v, q_lead, k_lead, dout, lse, delta, dq, dq_lead, lead_index, starts,
    n, groups, kv_heads, num_sink, num_recent, scale, scale_log2,
    q_batch, q_head, Q_ROW: tl.constexpr, k_batch, k_head, K_ROW: tl.constexpr, v_batch, v_head, V_ROW: tl.constexpr,
    ql_batch, ql_head, QL_ROW: tl.constexpr, kl_batch, kl_head, KL_ROW: tl.constexpr, do_batch, do_head, DO_ROW: tl.constexpr,
    dq_batch, dq_head, DQ_ROW: tl.constexpr, dql_batch, dql_head, DQL_ROW: tl.constexpr, starts_batch,
    HAS_LEAD: tl.constexpr, HAS_DOCS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EDGE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, and the part of the lead's dQ; grid and blocks of keys as in the forward kernel."""
    group_head = tl.program_id(0) % groups
    first = (tl.num_programs(0) // groups - 1 - tl.program_id(0) // groups) * BLOCK_M
    end = tl.minimum(first + BLOCK_M, n)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = kv_head * groups + group_head
    lead, sinks, recent = role(lead_index, kv_head, n, num_sink, num_recent, HAS_LEAD)
    row_start, start, mixed = query_documents(starts, batch * starts_batch, first, n, BLOCK_M, HAS_DOCS)

    rows = first + tl.arange(0, BLOCK_M)
    statistics = (batch * kv_heads * groups + head) * n + rows
    row_lse = tl.load(lse + statistics, mask=rows < n, other=0.0)
    row_delta = tl.load(delta + statistics, mask=rows < n, other=0.0)
    v_base = v + batch * v_batch + kv_head * v_head
    do_base = dout + batch * do_batch + head * do_head
    douts = load_tile(do_base, DO_ROW, first, n, 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)

    q_base = q + batch * q_batch + head * q_head
    k_base = k + batch * k_batch + kv_head * k_head
    queries = load_tile(q_base, Q_ROW, first, n, 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sink_end, sink_blocks, window, before, full, edges = own_blocks(
        start, mixed, first, end, sinks, recent, BLOCK_N, EDGE
    )  # fmt: skip
    for t in range(0, sink_blocks + edges):
        column, limit = own_block(t, start, sink_end, sink_blocks, window, before, full, end, BLOCK_N, EDGE)
        allowed = own_mask(first, column, limit, row_start, sinks, recent, BLOCK_M, EDGE, HAS_DOCS)
        acc = _query_step(
            queries, q_base, Q_ROW, douts, do_base, DO_ROW, first, n, k_base, K_ROW, v_base, V_ROW, column, limit,
            allowed, row_lse, row_delta, acc, scale_log2, BLOCK_M, EDGE, BLOCK_D, CHUNK, HEAD_DIM, MASKED,
        )  # fmt: skip
    for t in range(0, full):
        column = window + before * EDGE + t * BLOCK_N
        acc = _query_step(
            queries, q_base, Q_ROW, douts, do_base, DO_ROW, first, n, k_base, K_ROW, v_base, V_ROW, column, n,
            None, row_lse, row_delta, acc, scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, FULL,
        )  # fmt: skip
    dq += batch * dq_batch + head * dq_head
    store_tile(dq, DQ_ROW, first, n, acc * scale, BLOCK_M, BLOCK_D, HEAD_DIM)

    if HAS_LEAD:
        distant, limit, full, edges = lead_blocks(start, mixed, first, end, sinks, recent, BLOCK_N, EDGE)
        position = tl.maximum(lead, 0).to(tl.int64)  # a head that leads has no distant block
        lead_head = position * groups + group_head
        q_base = q_lead + batch * ql_batch + lead_head * ql_head
        k_base = k_lead + batch * kl_batch + position * kl_head
        read = tl.where(limit > distant, n, 0)
        queries = load_tile(q_base, QL_ROW, first, read, 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for t in range(0, full):
            column = distant + t * BLOCK_N
            acc = _query_step(
                queries, q_base, QL_ROW, douts, do_base, DO_ROW, first, n, k_base, KL_ROW, v_base, V_ROW, column, n,
                None, row_lse, row_delta, acc, scale_log2, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, HEAD_DIM, FULL,
            )  # fmt: skip
        for t in range(0, edges):
            column = distant + full * BLOCK_N + t * EDGE
            allowed = lead_mask(first, column, limit, row_start, sinks, recent, BLOCK_M, EDGE, HAS_DOCS)
            acc = _query_step(
                queries, q_base, QL_ROW, douts, do_base, DO_ROW, first, n, k_base, KL_ROW, v_base, V_ROW, column, limit,
                allowed, row_lse, row_delta, acc, scale_log2, BLOCK_M, EDGE, BLOCK_D, CHUNK, HEAD_DIM, MASKED,
            )  # fmt: skip
        dq_lead += batch * dql_batch + lead_head * dql_head
        written = tl.where(lead >= 0, n, 0)
        store_tile(dq_lead, DQL_ROW, first, written, acc * scale, BLOCK_M, BLOCK_D, HEAD_DIM)


def gradients(
    saved: tuple[Tensor, ...], dout: Tensor, settings, of_queries: bool, of_keys: bool
) -> list[Tensor | None]:
    """Gradients of q, k, v, q_lead, k_lead in their dtypes and layouts.

    Args:
        saved: q, k, v, q_lead, k_lead (the last two may be None) and what the forward kernel gave: out, and lse in base 2.
        dout: gradient of out.
        settings: ``triton_prefill.Settings``.
        of_queries, of_keys: whether q or q_lead, and k, v or k_lead need theirs; None for the others.
    """
    q, k, v, q_lead, k_lead, out, lse = saved
    batch, heads, n, head_dim = q.shape
    inputs = q, k, v, q_lead, k_lead
    wanted = of_queries, of_keys, of_keys, of_queries, of_keys
    found = [
        torch.empty_like(x) if want and x is not None else None
        for x, want in zip(inputs, wanted, strict=True)
    ]
    if out.numel() == 0:
        return found
    dq, dk, dv, dq_lead, dk_lead = found
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    delta = torch.empty_like(lse)
    groups, kv_heads = heads // k.shape[1], k.shape[1]
    sizes = (
        n,
        groups,
        kv_heads,
        settings.num_sink,
        settings.num_recent,
        settings.scale,
        settings.scale * LOG2E,
    )
    reads = *strides(q), *strides(k), *strides(v), *strides(q_lead), *strides(k_lead), *strides(dout)
    flags = {
        "HAS_LEAD": q_lead is not None,
        "HAS_DOCS": settings.starts is not None,
        "HEAD_DIM": head_dim,
    }
    chip = capability(q.device)
    launch(
        delta_kernel, (triton.cdiv(n, 64), batch * heads), q.device, out, dout, delta, n, heads, *strides(out),
        *strides(dout), HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_D=keys_tile(q.dtype, head_dim, chip).BLOCK_D,
    )  # fmt: skip
    documents = settings.starts, settings.ends
    if of_keys:
        options = keys_tile(q.dtype, head_dim, chip)
        launch(
            keys_kernel, (triton.cdiv(n, options.BLOCK_N), batch * kv_heads), q.device,
            *inputs, dout, lse, delta, dk, dv, dk_lead, settings.lead_index, *documents, *sizes, *reads,
            *strides(dk), *strides(dv), *strides(dk_lead), batch_stride(settings.starts), **flags, **options._asdict(),
        )  # fmt: skip
    if of_queries:
        options = queries_tile(q.dtype, head_dim, chip)
        launch(
            queries_kernel, (triton.cdiv(n, options.BLOCK_M) * groups, batch * kv_heads), q.device,
            *inputs, dout, lse, delta, dq, dq_lead, settings.lead_index, settings.starts, *sizes, *reads,
            *strides(dq), *strides(dq_lead), batch_stride(settings.starts), **flags, **options._asdict(),
        )  # fmt: skip
    return found


def keys_tile(dtype: torch.dtype, head_dim: int, chip: int) -> Tile:
    """The tile of the kernel for dK and dV."""
    return tile(KEY_TILES, dtype, head_dim, chip)


def queries_tile(dtype: torch.dtype, head_dim: int, chip: int) -> Tile:
    """The tile of the kernel for dQ."""
    return tile(QUERY_TILES, dtype, head_dim, chip)
