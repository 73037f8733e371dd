"""Gradients of ``triton_prefill``, without atomic operations.

A program of the first kernel computes dQ of a tile of queries. A program of the second one computes dK and dV
of a tile of keys. Both kernels read the log-sum-exp of the merged output and ``delta = rowsum(out * dout)``,
so the merge needs no gradient of its own: near blocks give the layer's own dQ and dK, distant blocks give the
lead's, and both give dV.

Both kernels compute the logits. So there are 7 products for each block; a single kernel with atomic sums for
dQ would need 5. In return gradients are bit for bit the same in every run, and no fp32 sums of the size of
the inputs are in memory.

For a key, the queries that see it are two runs: ``first`` to ``middle`` are near, ``middle`` to ``last`` are
distant.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pod.kernels.triton_prefill_forward import (
    FREE,
    LOG2E,
    MASKED,
    WHOLE,
    blocks,
    in_run,
    is_used,
    load_runs,
    load_tile,
    masked_block,
    near_block,
    near_blocks,
    store_tile,
)


@triton.jit
def _to_queries(
    queries, douts, keys, values, allowed, row_lse, row_delta, dq, scale, IS_MASKED: tl.constexpr
):  # fmt: skip
    """Add a block of keys to ``dq``, without the factor of scale; ``row_lse`` and ``scale`` have base 2."""
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    weights = tl.exp2(logits * scale - row_lse[:, None])
    if IS_MASKED:
        weights = tl.where(allowed, weights, 0.0)
    dweights = tl.dot(douts, tl.trans(values), input_precision="ieee")
    dlogits = weights * (dweights - row_delta[:, None])
    return tl.dot(dlogits.to(keys.dtype), keys, dq, input_precision="ieee")


@triton.jit(do_not_specialize=FREE)
def queries_kernel(
    q, k, v, q_lead, k_lead, out, dout, lse, delta, dq, dq_lead, query_runs, key_runs,
    m, n, groups, kv_heads, query_runs_batch, key_runs_batch, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    ql_batch, ql_head, ql_row, kl_batch, kl_head, kl_row, out_batch, out_head, out_row,
    do_batch, do_head, do_row, dq_batch, dq_head, dq_row, dql_batch, dql_head, dql_row,
    HAS_LEAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute dQ of a tile of queries, for the layer's own queries and for the lead's.

    It also writes ``delta [B, Hq, m]``, which ``keys_kernel`` reads. The grid and the blocks of keys are
    those of the forward kernel.
    """
    group_head = tl.program_id(0) % groups
    first_row = (tl.num_programs(0) // groups - 1 - tl.program_id(0) // groups) * BLOCK_M
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = kv_head * groups + group_head
    rows = first_row + tl.arange(0, BLOCK_M)
    start, sink_end, window, stop = load_runs(query_runs + batch * query_runs_batch, m, rows)
    key_last = key_runs + batch * key_runs_batch + 2 * n
    v += batch * v_batch + kv_head * v_head

    # The gradient of padding may be anything, so it counts as 0.
    dout += batch * do_batch + head * do_head
    douts = load_tile(dout, do_row, first_row, stop > 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
    out += batch * out_batch + head * out_head
    outs = load_tile(out, out_row, first_row, stop > 0, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
    row_delta = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), 1)
    statistics = (batch * kv_heads * groups + head) * m + rows
    tl.store(delta + statistics, row_delta, mask=rows < m)
    row_lse = tl.load(lse + statistics, mask=rows < m, other=0.0) * LOG2E

    k += batch * k_batch + kv_head * k_head
    q += batch * q_batch + head * q_head
    queries = load_tile(q, q_row, first_row, rows < m, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale_log2 = scale * LOG2E
    sink, sinks_end, sinks, first, last, before, whole, masked = near_blocks(
        start, sink_end, window, stop, BLOCK_N
    )
    for t in range(0, sinks + masked):
        column, limit = near_block(t, sink, sinks_end, sinks, first, last, before, whole, BLOCK_N)
        columns = column + tl.arange(0, BLOCK_N)
        inside = is_used(key_last, columns, limit)
        allowed = (in_run(columns, start, sink_end) | in_run(columns, window, stop)) & inside[None, :]
        keys = load_tile(k, k_row, column, inside, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        values = load_tile(v, v_row, column, inside, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        acc = _to_queries(queries, douts, keys, values, allowed, row_lse, row_delta, acc, scale_log2, MASKED)
    for t in range(before, before + whole):
        column = first + t * BLOCK_N
        keys = load_tile(k, k_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
        values = load_tile(v, v_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
        acc = _to_queries(queries, douts, keys, values, None, row_lse, row_delta, acc, scale_log2, WHOLE)
    dq += batch * dq_batch + head * dq_head
    store_tile(dq, dq_row, first_row, m, acc * scale, BLOCK_M, BLOCK_D, HEAD_DIM)

    if HAS_LEAD:
        k_lead += batch * kl_batch + kv_head * kl_head
        q_lead += batch * ql_batch + head * ql_head
        queries = load_tile(q_lead, ql_row, first_row, rows < m, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        first, last, before, whole, masked = blocks(sink_end, window, BLOCK_N)
        for t in range(before, before + whole):
            column = first + t * BLOCK_N
            keys = load_tile(k_lead, kl_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
            values = load_tile(v, v_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
            acc = _to_queries(queries, douts, keys, values, None, row_lse, row_delta, acc, scale_log2, WHOLE)
        for t in range(0, masked):
            column = masked_block(t, first, before, whole, BLOCK_N)
            columns = column + tl.arange(0, BLOCK_N)
            inside = is_used(key_last, columns, last)
            allowed = in_run(columns, sink_end, window) & inside[None, :]
            keys = load_tile(k_lead, kl_row, column, inside, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
            values = load_tile(v, v_row, column, inside, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
            acc = _to_queries(
                queries, douts, keys, values, allowed, row_lse, row_delta, acc, scale_log2, MASKED
            )
        dq_lead += batch * dql_batch + head * dql_head
        store_tile(dq_lead, dql_row, first_row, m, acc * scale, BLOCK_M, BLOCK_D, HEAD_DIM)


@triton.jit
def _to_keys(
    keys, values, queries, douts, allowed, row_lse, row_delta, dk, dv, scale, IS_MASKED: tl.constexpr
):  # fmt: skip
    """Add a block of queries to ``dk`` (without the factor of scale) and ``dv``; logits [keys, queries]."""
    logits = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    weights = tl.exp2(logits * scale - row_lse[None, :])
    if IS_MASKED:
        weights = tl.where(allowed, weights, 0.0)
    dv = tl.dot(weights.to(douts.dtype), douts, dv, input_precision="ieee")
    dweights = tl.dot(values, tl.trans(douts), input_precision="ieee")
    dlogits = weights * (dweights - row_delta[None, :])
    dk = tl.dot(dlogits.to(queries.dtype), queries, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _walk(
    keys, values, q, q_head, q_row, dout, do_head, do_row, lse, delta, query_stop, lo, hi, m, groups,
    dk, dv, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add all queries in the runs ``lo`` to ``hi`` of a tile of keys to ``dk`` and ``dv``.

    One loop goes over the blocks of all G query heads.
    """
    first, last, before, whole, masked = blocks(lo, hi, BLOCK_M)
    for t in range(0, masked * groups):
        group_head = t // masked
        row = masked_block(t - group_head * masked, first, before, whole, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        inside = is_used(query_stop, rows, last)
        statistics = tl.cast(group_head, tl.int64) * m + rows
        row_lse = tl.load(lse + statistics, mask=inside, other=0.0) * LOG2E
        row_delta = tl.load(delta + statistics, mask=inside, other=0.0)
        base = q + tl.cast(group_head, tl.int64) * q_head
        queries = load_tile(base, q_row, row, inside, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        base = dout + tl.cast(group_head, tl.int64) * do_head
        douts = load_tile(base, do_row, row, inside, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        allowed = in_run(rows, lo, hi) & inside[None, :]
        dk, dv = _to_keys(keys, values, queries, douts, allowed, row_lse, row_delta, dk, dv, scale, MASKED)
    for t in range(0, whole * groups):
        group_head = t // whole
        row = first + (before + t - group_head * whole) * BLOCK_M
        statistics = tl.cast(group_head, tl.int64) * m + row + tl.arange(0, BLOCK_M)
        row_lse = tl.load(lse + statistics) * LOG2E
        row_delta = tl.load(delta + statistics)
        base = q + tl.cast(group_head, tl.int64) * q_head
        queries = load_tile(base, q_row, row, None, BLOCK_M, BLOCK_D, HEAD_DIM, WHOLE)
        base = dout + tl.cast(group_head, tl.int64) * do_head
        douts = load_tile(base, do_row, row, None, BLOCK_M, BLOCK_D, HEAD_DIM, WHOLE)
        dk, dv = _to_keys(keys, values, queries, douts, None, row_lse, row_delta, dk, dv, scale, WHOLE)
    return dk, dv


@triton.jit(do_not_specialize=FREE)
def keys_kernel(
    q, k, v, q_lead, k_lead, dout, lse, delta, dk, dv, dk_lead, query_runs, key_runs,
    m, n, groups, kv_heads, query_runs_batch, key_runs_batch, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    ql_batch, ql_head, ql_row, kl_batch, kl_head, kl_row, do_batch, do_head, do_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, dkl_batch, dkl_head, dkl_row,
    HAS_LEAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute dV and dK of a tile of keys, for the layer's own keys and the lead's. Grid: (tiles, B · H)."""
    column = tl.program_id(0) * BLOCK_N
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = kv_head * groups
    columns = column + tl.arange(0, BLOCK_N)
    key_runs += batch * key_runs_batch
    lo = tl.load(key_runs + columns, mask=columns < n, other=0)
    middle = tl.load(key_runs + n + columns, mask=columns < n, other=0)
    hi = tl.load(key_runs + 2 * n + columns, mask=columns < n, other=0)
    query_stop = query_runs + batch * query_runs_batch + 3 * m
    dout += batch * do_batch + head * do_head
    lse += (batch * kv_heads * groups + head) * m
    delta += (batch * kv_heads * groups + head) * m
    scale_log2 = scale * LOG2E

    v += batch * v_batch + kv_head * v_head
    values = load_tile(v, v_row, column, hi > 0, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    k += batch * k_batch + kv_head * k_head
    q += batch * q_batch + head * q_head
    keys = load_tile(k, k_row, column, hi > 0, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
    dk_acc, dv_acc = _walk(
        keys, values, q, q_head, q_row, dout, do_head, do_row, lse, delta, query_stop, lo, middle, m, groups,
        dk_acc, dv_acc, scale_log2, HEAD_DIM, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    dk += batch * dk_batch + kv_head * dk_head
    store_tile(dk, dk_row, column, n, dk_acc * scale, BLOCK_N, BLOCK_D, HEAD_DIM)

    if HAS_LEAD:
        k_lead += batch * kl_batch + kv_head * kl_head
        q_lead += batch * ql_batch + head * ql_head
        keys = load_tile(k_lead, kl_row, column, hi > 0, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dk_acc, dv_acc = _walk(
            keys, values, q_lead, ql_head, ql_row, dout, do_head, do_row, lse, delta, query_stop, middle, hi,
            m, groups, dk_acc, dv_acc, scale_log2, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
        dk_lead += batch * dkl_batch + kv_head * dkl_head
        store_tile(dk_lead, dkl_row, column, n, dk_acc * scale, BLOCK_N, BLOCK_D, HEAD_DIM)
    dv += batch * dv_batch + kv_head * dv_head
    store_tile(dv, dv_row, column, n, dv_acc, BLOCK_N, BLOCK_D, HEAD_DIM)
