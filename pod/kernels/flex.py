"""PoD attention as two FlexAttention calls, merged by the gate of eq. 4: on CUDA, where flash cannot run.

All rows of a batch are put behind each other as one sequence. *Place* ``j`` of it is column ``j % n`` of row
``j // n``. A query sees at most two runs of consecutive places: its sinks and its window. Through its lead it
sees one run: the places between these two. So four int32 numbers per query describe documents, windows and
chunks behind older tokens, and the same compiled kernels serve all of them. The numbers are made once in a
pass, from the segments. A call computes only some blocks of 128 x 128 logits. These follow from the smallest
and the largest of the numbers in each block of queries, never from a mask of size ``n x n``.

KV heads take the dimension that is FlexAttention's batch. The reason: layers differ in how many heads lead
and follow, and FlexAttention compiles anew for every number of heads, but not for every size of a batch.

On CUDA both calls and the merge are compiled together, and a call that cannot be compiled raises. On the CPU
they run uncompiled, with ``n x n`` logits; this is for tests.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from pod.modeling.model.attend import Call, Segments, Visibility, span
from pod.modeling.model.sinks import add_sink

_BLOCK = 128
_NEVER = torch.iinfo(torch.int32).max
_MOST_COMPILED = 64
"""How many variants of the function may be compiled.

Variants differ in whether there is a lead and gradients, in dtype, and in which shapes are static.
"""


def unsupported(call: Call) -> str | None:
    """Why FlexAttention cannot run a call. None = it can."""
    q = call.q
    if call.visibility.positions is not None:
        return "tokens with positions of their own"
    if q.device.type != "cuda":
        return f"device {q.device.type} (CUDA only: elsewhere it holds n x n logits and has no backward)"
    if (reason := unsupported_sizes(q.dtype, q.shape[-1])) is not None:
        return reason
    if any(getattr(x, "dtype", q.dtype) != q.dtype for x in call.tokens):
        return f"keys or values of another dtype than the queries ({q.dtype})"
    from pod.kernels import triton_launch  # here, since Triton is not everywhere

    return triton_launch.unsupported(q)


def unsupported_sizes(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no GPU can run this dtype and head dimension. None = some GPUs can."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {dtype} (float32, float16 or bfloat16)"
    return None if 16 <= head_dim <= 256 else f"head_dim {head_dim} (16 to 256)"


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``; the output is laid out as ``[B, m, Hq, d]``."""
    # sources may have slots for more tokens
    num_keys = max(1, call.segments.end)
    shape = call.q.shape[0], call.q.shape[2], num_keys
    keys, values = call.tokens.span(0, num_keys)
    queries, all_keys, masks = [call.q], [keys], [_mask(call, shape, is_far=False)]
    if call.lead is not None:
        queries.append(call.lead.queries)
        all_keys.append(span(call.lead.keys, 0, num_keys))
        masks.append(_mask(call, shape, is_far=True))
    layout = _layout(call, shape)
    out, lse = _function(call.q.device.type)(
        [_sequence(x, call.groups, layout.idle_queries) for x in queries],
        [_sequence(x, 1, layout.idle_keys) for x in all_keys],
        _sequence(values, 1, layout.idle_keys),
        masks,
        call.scale,
        _by_kv_head(call),
    )
    # autocast may have chosen another dtype
    return _batch(out, shape[0]).to(call.q.dtype), _batch(lse, shape[0])


def _sequence(x: Tensor, groups: int, idle: Tensor | None) -> Tensor:
    """Turn ``[B, H·groups, n, d]`` into ``[H, groups, B·n, d]``: a view if the strides allow it.

    ``idle`` marks columns of no segment, see ``Layout``. They may hold NaN, which a weight of 0 would not
    remove. So they are set to 0, in a copy.
    """
    tokens = x.transpose(1, 2).flatten(0, 1)
    if idle is not None:
        tokens = tokens.masked_fill(idle[:, None, None], 0.0)
    return tokens.unflatten(1, (-1, groups)).permute(1, 2, 0, 3)


def _by_kv_head(call: Call) -> tuple[Tensor, Tensor] | None:
    """The sink's logits ``[H, G, 1]`` and values ``[H, 1, 1, d]``. None = there is no sink."""
    if call.sink is None:
        return None
    return call.sink.logits.unflatten(0, (-1, call.groups))[..., None], call.sink.values[:, None, None]


def _batch(x: Tensor, batch: int) -> Tensor:
    """Turn ``[H, groups, B·m, …]`` into ``[B, H·groups, m, …]``."""
    return x.flatten(0, 1).unflatten(1, (batch, -1)).transpose(0, 1)


# -- what is compiled ----------------------------------------------------------------------------------------


@cache
def _function(device_type: str):
    """``attend_to_places``, compiled on CUDA."""
    if device_type != "cuda":
        return attend_to_places
    config = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
    config.recompile_limit = max(_MOST_COMPILED, config.recompile_limit)
    # With fullgraph, PyTorch raises beyond the limit. Without it, it would run with n x n logits in memory.
    return torch.compile(attend_to_places, fullgraph=True)


def attend_to_places(
    queries: list[Tensor],
    keys: list[Tensor],
    values: Tensor,
    masks: list[BlockMask],
    scale: float,
    sink: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One softmax over the places of one or two masks, each with its own queries and keys, and over a sink.

    Args:
        queries: ``[H, G, M, d]`` each.
        keys: ``[H, 1, N, d]`` each.
        values: ``[H, 1, N, d]``.
        masks: which places each query sees.
        scale: factor on logits.
        sink: logits and values that broadcast to ``[H, G, M]`` and ``[H, G, M, d]``. None = no sink.

    Returns:
        The output ``[H, G, M, d]``, with gradients, and the log-sum-exp ``[H, G, M]``, without. They are 0
        and -inf where a query sees nothing.
    """
    options = kernel_options(values.dtype, values.shape[-1])
    found = [
        _flex(q, k, values, mask, scale, options) for q, k, mask in zip(queries, keys, masks, strict=True)
    ]
    near, near_lse = found[0]
    if sink is not None:  # added before the merge, because the merged log-sum-exp has no gradient
        near, near_lse = add_sink(near, near_lse, *sink)
    if len(found) == 1:
        return near, near_lse.detach()
    far, far_lse = found[1]
    # Every query sees its own token. Only padding sees none, and -inf minus -inf would be NaN.
    gate = torch.sigmoid(near_lse.masked_fill(near_lse == float("-inf"), 0.0) - far_lse)[..., None]
    out = gate * near + (1 - gate) * far
    return out.to(near.dtype), torch.logaddexp(near_lse.detach(), far_lse.detach())


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    out, aux = flex_attention(
        *(q, k, v),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=options,  # type: ignore[arg-type]
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out, aux.lse


class FlexTiles(NamedTuple):
    """Sizes of FlexAttention's tiles, each as (queries, keys).

    Attributes:
        forward: tiles of the forward pass.
        of_queries: tiles for the gradient of the queries.
        of_keys: tiles for the gradients of keys and values.
    """

    forward: tuple[int, int]
    of_queries: tuple[int, int]
    of_keys: tuple[int, int]


def float32_tiles(head_dim: int) -> FlexTiles:
    """The tiles for full fp32 products.

    Of all tiles that spill few registers, these load the fewest bytes. At head dimension 128, PyTorch's own
    tiles are (32, 64) for the forward pass and (16, 16) for both gradients. They load three times as much,
    and spill 1.7 KB a thread in the forward pass. For head dimensions that are not in its table, PyTorch
    needs more shared memory than an A100 has.
    """
    if head_dim > 128:
        return FlexTiles(forward=(32, 16), of_queries=(16, 16), of_keys=(16, 16))
    return FlexTiles(forward=(64, 16), of_queries=(64, 16), of_keys=(16, 64))


def kernel_options(dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """``kernel_options`` of ``flex_attention``: its own tiles for 16 bits, ours for fp32.

    The backend is Triton's kernel, which is the same for all lengths.
    """
    options: dict[str, Any] = {"BACKEND": "TRITON"}
    if dtype == torch.float32:
        tiles = float32_tiles(head_dim)
        options |= {"fwd_BLOCK_M": tiles.forward[0], "fwd_BLOCK_N": tiles.forward[1]}
        options |= {"bwd_BLOCK_M1": tiles.of_keys[0], "bwd_BLOCK_N1": tiles.of_keys[1]}
        options |= {"bwd_BLOCK_M2": tiles.of_queries[0], "bwd_BLOCK_N2": tiles.of_queries[1]}
        options |= {"num_warps": 8, "fwd_num_stages": 2, "bwd_num_stages": 1}
    return options


# -- what is seen --------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """The places of each query's segment.

    ``start``, ``own`` and ``end`` are int32 ``[B·m]``, one number for each query. Padding has 0, -1 and 0, so
    that it sees no place.

    Attributes:
        start: the place where the query's segment begins.
        own: the place of the query's own key; ``own - start`` is its position.
        end: the place behind the query's segment.
        idle_queries: bool ``[B·m]``, True for columns of queries in no segment; None = there are none.
        idle_keys: bool ``[B·n]``, True for columns of keys in no segment; None = there are none.
    """

    start: Tensor
    own: Tensor
    end: Tensor
    idle_queries: Tensor | None
    idle_keys: Tensor | None


def _layout(call: Call, shape: tuple[int, int, int]) -> Layout:
    """The layout of a call's segments, made once in a pass."""
    device = call.q.device
    return call.segments.derived(("flex", shape, device), lambda: lay_out(call.segments, shape, device))


def lay_out(segments: Segments, shape: tuple[int, int, int], device: torch.device) -> Layout:
    """The layout of segments in a batch of ``shape = (B, m, n)``: rows, columns of queries and of keys."""
    batch, num_queries, num_keys = shape
    start = torch.zeros(batch, num_queries, dtype=torch.int32)
    own = torch.full((batch, num_queries), -1, dtype=torch.int32)
    end = torch.zeros(batch, num_queries, dtype=torch.int32)
    idle_keys = torch.ones(batch, num_keys, dtype=torch.bool)
    for segment in segments.all:
        where = slice(*segment.rows), slice(*segment.queries)
        first, last = segment.keys
        row = torch.arange(*segment.rows, dtype=torch.int32)[:, None] * num_keys
        start[where] = row + first
        own[where] = row + first + segment.past + torch.arange(segment.queries[1] - segment.queries[0])
        end[where] = row + last
        idle_keys[where[0], first:last] = False

    def moved(x: Tensor) -> Tensor:
        return x.flatten().to(device, non_blocking=True)

    idle = (moved(x) if x.any() else None for x in (start == end, idle_keys))
    return Layout(moved(start), moved(own), moved(end), *idle)


class PlaceRuns(NamedTuple):
    """The places that each query sees: ``first <= place < stop`` and ``other_first <= place < other_stop``.

    Each is int32 ``[M]``. A run without places has the bounds ``_NEVER`` and 0.
    """

    first: Tensor
    stop: Tensor
    other_first: Tensor
    other_stop: Tensor


def runs_of(layout: Layout, see: Visibility, is_far: bool) -> PlaceRuns:
    """The runs of sinks and window. With ``is_far``, those of the places between, seen through the lead."""
    start, own, end, *_ = layout
    stop = own + 1 if see.causal else end
    if see.num_recent_tokens is None:
        window = start
    else:
        window = torch.maximum(own - min(see.num_recent_tokens, _NEVER // 2) + 1, start)
    sinks = start + min(see.num_sink_tokens, _NEVER // 2)
    if is_far:
        return PlaceRuns(*_run(sinks, window), *_run(window, window))
    touch = sinks >= window
    sinks = torch.where(touch, start, sinks)
    window = torch.where(touch, start, window)
    return PlaceRuns(*_run(start, sinks), *_run(window, stop))


def _run(first: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds of a run, with ``_NEVER`` and 0 for runs without places."""
    is_empty = first >= stop
    return first.masked_fill(is_empty, _NEVER), stop.masked_fill(is_empty, 0)


def _mask(call: Call, shape: tuple[int, int, int], is_far: bool) -> BlockMask:
    """The mask of a call, made once in a pass for all layers that have these windows."""

    def make() -> BlockMask:
        runs = runs_of(_layout(call, shape), call.visibility, is_far)
        return block_mask(runs, shape[0] * shape[2])

    return call.segments.derived(("flex", shape, call.q.device, call.visibility[:3], is_far), make)


def block_mask(runs: PlaceRuns, num_places: int) -> BlockMask:
    """The mask of one FlexAttention call."""
    partial, full = blocks_of(runs, num_places)
    return BlockMask.from_kv_blocks(
        *_as_lists(partial),
        *_as_lists(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_mask_function(*runs),
        seq_lengths=(len(runs.first), num_places),
    )


def _mask_function(first: Tensor, stop: Tensor, other_first: Tensor, other_stop: Tensor):
    def is_seen(batch: Tensor, head: Tensor, query: Tensor, place: Tensor) -> Tensor:
        in_run = (first[query] <= place) & (place < stop[query])
        in_other = (other_first[query] <= place) & (place < other_stop[query])
        return in_run | in_other

    return is_seen


def blocks_of(runs: PlaceRuns, num_places: int) -> tuple[Tensor, Tensor]:
    """Which pairs of a block of queries and a block of places must be computed.

    A pair may be marked although no query of it sees a place of it, which only costs time. A pair with a
    visible place is always marked.

    Returns:
        Pairs that need the mask, and pairs in which every query sees every place: bool
        ``[blocks of queries, blocks of places]`` each.
    """
    begin = torch.arange(0, num_places, _BLOCK, device=runs.first.device)
    end = (begin + _BLOCK).clamp(max=num_places)
    some = every = torch.zeros((), dtype=torch.bool, device=begin.device)
    for first, stop in (runs[:2], runs[2:]):
        least_first, greatest_first = _bounds(first)
        least_stop, greatest_stop = _bounds(stop)
        some = some | ((least_first < end) & (greatest_stop > begin))
        every = every | ((greatest_first <= begin) & (least_stop >= end))
    num_queries = len(runs.first)
    is_whole = torch.arange(0, num_queries, _BLOCK, device=begin.device) + _BLOCK <= num_queries
    every = every & is_whole[:, None] & (begin + _BLOCK <= num_places)
    return some & ~every, every


def _bounds(per_query: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of the numbers ``[M]`` in every block of queries, ``[blocks, 1]`` each."""
    missing = -len(per_query) % _BLOCK
    blocks = torch.cat([per_query, per_query[-1:].expand(missing)]).unflatten(0, (-1, _BLOCK))
    return blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)


def _as_lists(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Turn marks ``[rows, columns]`` into the lists that ``BlockMask`` takes.

    Returns:
        How many columns of each row are marked, int32 ``[1, 1, rows]``, and the indices of all columns, the
        marked ones first, int32 ``[1, 1, rows, columns]``.
    """
    columns = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]
