"""The forward pass of ``triton_prefill``: one program owns a tile of queries of one head.

It goes over the near keys with the layer's own queries and keys. Then, where the head follows, it goes over
the distant keys with the lead's, in one online softmax (equations 3 and 4 of the paper: the gate is that
softmax).

What a query sees comes in *runs* of keys, made once in a pass: ``start`` to ``sink_end`` and ``window`` to
``stop`` are near, ``sink_end`` to ``window`` is distant. Windows, sinks, documents and the past of a chunk
are all in these four numbers. A tile goes over the blocks of keys between the least and the greatest of them.
Blocks that all queries of the tile see need no mask.

Programs of the last queries, which see most keys, start first. The G heads of a KV head are neighbours, so
that they read its keys and values from the L2 cache at the same time.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(True)
WHOLE = tl.constexpr(False)
_NEVER = tl.constexpr(2**31 - 1)

FREE = ["m", "n", "groups", "kv_heads", "query_runs_batch", "key_runs_batch", "scale"]
"""Arguments that vary by layer, batch or call: one compiled kernel for all."""


@triton.jit
def load_tile(
    base, row, first, inside,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Load ``[ROWS, BLOCK_D]`` from row ``first`` on; 0 where ``inside`` (with IS_MASKED) is False.

    The offset of the tile is one 64-bit scalar. Offsets inside it have the type of ``row``.
    """
    features = tl.arange(0, BLOCK_D)[None, :]
    where = base + tl.cast(first, tl.int64) * row + (tl.arange(0, ROWS)[:, None] * row + features)
    if HEAD_DIM == BLOCK_D:
        if IS_MASKED:
            return tl.load(where, mask=inside[:, None], other=0.0)
        else:
            return tl.load(where)
    elif IS_MASKED:
        return tl.load(where, mask=inside[:, None] & (features < HEAD_DIM), other=0.0)
    else:
        return tl.load(where, mask=features < HEAD_DIM, other=0.0)


@triton.jit
def store_tile(
    base, row, first, limit, values, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Write the rows of ``values [ROWS, BLOCK_D]`` before ``limit``, and their features before HEAD_DIM."""
    rows = tl.arange(0, ROWS)
    features = tl.arange(0, BLOCK_D)[None, :]
    where = base + tl.cast(first, tl.int64) * row + (rows[:, None] * row + features)
    inside = (first + rows < limit)[:, None] & (features < HEAD_DIM)
    tl.store(where, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_runs(runs, count, places):
    """Load ``(start, sink_end, window, stop)`` of queries; all are 0 where there is no query."""
    inside = places < count
    start = tl.load(runs + places, mask=inside, other=0)
    sink_end = tl.load(runs + count + places, mask=inside, other=0)
    window = tl.load(runs + 2 * count + places, mask=inside, other=0)
    stop = tl.load(runs + 3 * count + places, mask=inside, other=0)
    return start, sink_end, window, stop


@triton.jit
def blocks(lo, hi, SIZE: tl.constexpr):
    """Blocks of places from ``lo`` to ``hi`` of all lines of a tile; the first begins at the least ``lo``.

    Returns ``(first place, place behind the last, masked blocks before the whole ones, whole blocks, masked
    blocks)``. In a whole block, all lines have all places.
    """
    is_empty = lo >= hi
    last = tl.max(tl.where(is_empty, 0, hi), 0)
    first = tl.minimum(tl.min(tl.where(is_empty, _NEVER, lo), 0), last)
    common = tl.minimum(tl.max(lo, 0), last)
    common_end = tl.minimum(tl.min(hi, 0), last)
    before = tl.cdiv(common - first, SIZE)
    whole = tl.maximum(common_end - first - before * SIZE, 0) // SIZE
    return first, last, before, whole, tl.cdiv(last - first, SIZE) - whole


@triton.jit
def near_blocks(start, sink_end, window, stop, SIZE: tl.constexpr):
    """``blocks`` of the runs of near keys; before that ``(first sink, end of sinks, blocks of sinks)``.

    Blocks of sinks end where those of the window begin. The masks of the window know both runs, so no key
    comes twice.
    """
    first, last, before, whole, masked = blocks(window, stop, SIZE)
    sink, sinks_end, _, _, _ = blocks(start, sink_end, SIZE)
    sinks_end = tl.minimum(sinks_end, first)
    sinks = tl.cdiv(tl.maximum(sinks_end - sink, 0), SIZE)
    return sink, sinks_end, sinks, first, last, before, whole, masked


@triton.jit
def near_block(t, sink, sinks_end, sinks, first, last, before, whole, SIZE: tl.constexpr):
    """First key of masked near block ``t``, sinks first, and the key before which it counts."""
    is_sink = t < sinks
    column = tl.where(is_sink, sink + t * SIZE, masked_block(t - sinks, first, before, whole, SIZE))
    return column, tl.where(is_sink, sinks_end, last)


@triton.jit
def masked_block(t, first, before, whole, SIZE: tl.constexpr):
    """First place of masked block ``t``: whole blocks are left out."""
    return first + (t + tl.where(t >= before, whole, 0)) * SIZE


@triton.jit
def in_run(places, lo, hi):
    """Whether a place lies in the run of a line: ``[lines, places]``."""
    return (places[None, :] >= lo[:, None]) & (places[None, :] < hi[:, None])


@triton.jit
def is_used(last, places, limit):
    """Whether places before ``limit`` belong to any segment, by the last line of their table of runs."""
    return tl.load(last + places, mask=places < limit, other=0) > 0


@triton.jit
def _attend(
    queries, keys, values, allowed, acc, total, peak, scale, IS_MASKED: tl.constexpr
):  # fmt: skip
    """Add a block of keys to the online softmax: ``acc [M, D]``, ``total``, ``peak`` (base 2, scale > 0)."""
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if IS_MASKED:
        logits = tl.where(allowed, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1) * scale)
    shift = new_peak
    if IS_MASKED:  # a row that has seen nothing yet
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits * scale - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_peak


@triton.jit(do_not_specialize=FREE)
def forward_kernel(
    q, k, v, q_lead, k_lead, out, lse, query_runs, key_runs,
    m, n, groups, kv_heads, query_runs_batch, key_runs_batch, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    ql_batch, ql_head, ql_row, kl_batch, kl_head, kl_row, out_batch, out_head, out_row,
    HAS_LEAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Output and natural log-sum-exp of a tile of queries; 0 and -inf where a query sees nothing.

    The grid is (tiles · G, B · H). ``query_runs [4, m]`` and ``key_runs [3, n]`` belong to one row, or to all
    rows.
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
    scale *= LOG2E

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    k += batch * k_batch + kv_head * k_head
    q += batch * q_batch + head * q_head
    queries = load_tile(q, q_row, first_row, rows < m, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
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
        acc, total, peak = _attend(queries, keys, values, allowed, acc, total, peak, scale, MASKED)
    for t in range(before, before + whole):
        column = first + t * BLOCK_N
        keys = load_tile(k, k_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
        values = load_tile(v, v_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
        acc, total, peak = _attend(queries, keys, values, None, acc, total, peak, scale, WHOLE)

    if HAS_LEAD:
        k_lead += batch * kl_batch + kv_head * kl_head
        q_lead += batch * ql_batch + head * ql_head
        queries = load_tile(q_lead, ql_row, first_row, rows < m, BLOCK_M, BLOCK_D, HEAD_DIM, MASKED)
        first, last, before, whole, masked = blocks(sink_end, window, BLOCK_N)
        for t in range(before, before + whole):
            column = first + t * BLOCK_N
            keys = load_tile(k_lead, kl_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
            values = load_tile(v, v_row, column, None, BLOCK_N, BLOCK_D, HEAD_DIM, WHOLE)
            acc, total, peak = _attend(queries, keys, values, None, acc, total, peak, scale, WHOLE)
        for t in range(0, masked):
            column = masked_block(t, first, before, whole, BLOCK_N)
            columns = column + tl.arange(0, BLOCK_N)
            inside = is_used(key_last, columns, last)
            allowed = in_run(columns, sink_end, window) & inside[None, :]
            keys = load_tile(k_lead, kl_row, column, inside, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
            values = load_tile(v, v_row, column, inside, BLOCK_N, BLOCK_D, HEAD_DIM, MASKED)
            acc, total, peak = _attend(queries, keys, values, allowed, acc, total, peak, scale, MASKED)

    sees_nothing = total == 0.0
    acc = acc / tl.where(sees_nothing, 1.0, total)[:, None]
    found = tl.where(sees_nothing, float("-inf"), (peak + tl.log2(total)) / LOG2E)
    out += batch * out_batch + head * out_head
    store_tile(out, out_row, first_row, m, acc, BLOCK_M, BLOCK_D, HEAD_DIM)
    tl.store(lse + (batch * kv_heads * groups + head) * m + rows, found, mask=rows < m)
