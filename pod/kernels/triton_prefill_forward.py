"""The forward pass of ``triton_prefill``: each program computes a tile of queries of one head.

It goes over the near keys with the layer's own queries and keys. Then, if the head follows, it goes over the
distant keys with the lead's queries and keys, in the same online softmax. This is equations 3 and 4 of the
paper, whose gate merges two softmaxes into one.

The keys that a query sees are *runs* of consecutive columns (``triton_prefill.Runs``): ``start`` to
``sink_end`` and ``window`` to ``stop`` are near, ``sink_end`` to ``window`` is distant. These four numbers
describe windows, sinks, documents and older tokens before a chunk. A tile goes over the blocks of keys
between the smallest and the largest of the numbers of its queries. Blocks that all queries of the tile see
need no mask.

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
"""Arguments for whose values kernels are not compiled anew, as they vary by layer, batch or call."""


@triton.jit
def load_tile(
    base, row, first, inside,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Load rows ``first … first + ROWS - 1`` as ``[ROWS, BLOCK_D]``.

    With IS_MASKED, rows for which ``inside`` is False are 0. ``row`` is the stride of a row. The offset of
    the tile is one 64-bit scalar; offsets inside it have the type of ``row``.
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
    """Write ``values [ROWS, BLOCK_D]`` to the rows from ``first`` on, only before ``limit`` and HEAD_DIM."""
    rows = tl.arange(0, ROWS)
    features = tl.arange(0, BLOCK_D)[None, :]
    where = base + tl.cast(first, tl.int64) * row + (rows[:, None] * row + features)
    inside = (first + rows < limit)[:, None] & (features < HEAD_DIM)
    tl.store(where, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_runs(runs, count, places):
    """Load ``(start, sink_end, window, stop)`` of the queries ``places``; 0 for those not below ``count``."""
    inside = places < count
    start = tl.load(runs + places, mask=inside, other=0)
    sink_end = tl.load(runs + count + places, mask=inside, other=0)
    window = tl.load(runs + 2 * count + places, mask=inside, other=0)
    stop = tl.load(runs + 3 * count + places, mask=inside, other=0)
    return start, sink_end, window, stop


@triton.jit
def blocks(lo, hi, SIZE: tl.constexpr):
    """Cut the runs ``lo`` to ``hi`` of all lines of a tile into common blocks of ``SIZE`` places.

    A line is a query, and places are columns of keys; or the other way round. The first block begins at the
    smallest ``lo``. A *whole* block lies in the runs of all lines, so it needs no mask.

    Returns ``(first place, place behind the last, masked blocks before the whole ones, whole blocks, masked
    blocks)``.
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
    """``(first sink, end of sinks, blocks of sinks)``, then the results of ``blocks`` for the windows.

    Blocks of sinks end where those of the windows begin. The masks of the latter cover both runs, so each key
    is read once.
    """
    first, last, before, whole, masked = blocks(window, stop, SIZE)
    sink, sinks_end, _, _, _ = blocks(start, sink_end, SIZE)
    sinks_end = tl.minimum(sinks_end, first)
    sinks = tl.cdiv(tl.maximum(sinks_end - sink, 0), SIZE)
    return sink, sinks_end, sinks, first, last, before, whole, masked


@triton.jit
def near_block(t, sink, sinks_end, sinks, first, last, before, whole, SIZE: tl.constexpr):
    """The first key of masked near block ``t`` (sinks come first), and the key at which it ends."""
    is_sink = t < sinks
    column = tl.where(is_sink, sink + t * SIZE, masked_block(t - sinks, first, before, whole, SIZE))
    return column, tl.where(is_sink, sinks_end, last)


@triton.jit
def masked_block(t, first, before, whole, SIZE: tl.constexpr):
    """The first place of masked block ``t``, not counting whole blocks."""
    return first + (t + tl.where(t >= before, whole, 0)) * SIZE


@triton.jit
def in_run(places, lo, hi):
    """Whether each place lies in the run ``lo`` to ``hi`` of each line: ``[lines, places]``."""
    return (places[None, :] >= lo[:, None]) & (places[None, :] < hi[:, None])


@triton.jit
def is_used(last, places, limit):
    """Whether places belong to a segment, and are below ``limit``; ``last``: last row of their table."""
    return tl.load(last + places, mask=places < limit, other=0) > 0


@triton.jit
def _attend(
    queries, keys, values, allowed, acc, total, peak, scale, IS_MASKED: tl.constexpr
):  # fmt: skip
    """Add a block of keys to the online softmax, which is ``acc [M, D]``, ``total`` and ``peak`` (base 2).

    ``scale`` must be positive.
    """
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if IS_MASKED:
        logits = tl.where(allowed, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1) * scale)
    shift = new_peak
    if IS_MASKED:  # a row may have seen no key yet
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
    """Output and log-sum-exp (base e) of a tile of queries; 0 and -inf if a query sees nothing.

    The grid is (tiles · G, B · H). ``query_runs`` and ``key_runs`` are the tables of ``Runs``. Their strides
    from row to row, ``query_runs_batch`` and ``key_runs_batch``, are 0 if one table serves all rows.
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
