"""PyTorch's flash attention ops on slices, merged by log-sum-exp: forward and backward.

This file runs them on the CPU, ``varlen`` on CUDA. A segment's slices (``Segment.slices``) become *parts*:
calls of an op that knows only square causal masks, and masks that are given as a tensor.

* A causal slice becomes two parts: the columns that all of its rows see, without a mask, and a causal square.
* A window is divided into strips of rows. One small mask serves all strips.

The outputs are merged by the gate ``sigmoid(lse_P - lse_D)`` (eq. 4). Backward calls each part's flash
backward with the merged output and log-sum-exp, which makes the gradient of the merge free.
"""

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from .attend import (
    Call,
    Implementation,
    Segment,
    SharedQK,
    Slice,
    Span,
    Tokens,
    compute_dtype,
    span,
    take_rows,
    takes_gradients,
)
from .sinks import merge_sink
from .varlen import attend_on_cuda, differentiable, unsupported_on_cuda

_STRIP_ROWS = 256  # the largest number of rows of a strip
_TILE_ELEMENTS = 1 << 22  # the largest number of elements of a strip's mask
_TILE_TOKENS = 4096  # how many packed tokens are unpacked at a time
_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_op_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def unsupported(call: Call) -> str | None:
    """Why no flash op can run a call. None = one can."""
    if call.visibility.positions is not None:
        return "tokens with positions of their own"
    if call.q.device.type != "cpu":
        return unsupported_on_cuda(call)
    return None if call.q.dtype.is_floating_point else f"dtype {call.q.dtype} is not floating point"


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``."""
    if call.q.device.type != "cpu":
        return attend_on_cuda(call)
    tensors, sink = _tensors(call), call.sink
    if not takes_gradients(*tensors, *(sink or ())):
        with torch.no_grad():
            return merge_sink(*_forward(call), sink)
    bare = call._replace(q=None, tokens=None, lead=None, sink=None)  # type: ignore[arg-type]
    q, keys, values, q_lead, k_lead = tensors
    end = call.segments.end
    keys, values, k_lead = (x if x is None else span(x, 0, end) for x in (keys, values, k_lead))
    return differentiable(
        [q, keys, values, q_lead, k_lead],
        lambda inputs: _forward(_with(bare, *inputs)),
        lambda inputs, *results: _backward(_with(bare, *inputs), *results),
        sink,
    )


def _tensors(call: Call) -> tuple:
    """Queries, keys, values, and the lead's queries and keys (None without a lead)."""
    return call.q, *call.tokens, *((None, None) if call.lead is None else call.lead[:2])


def _with(call: Call, q, keys, values, q_lead, k_lead) -> Call:
    """The call with other tensors, in the order of ``_tensors``."""
    lead = None if q_lead is None else SharedQK(q_lead, k_lead)
    return call._replace(q=q, tokens=Tokens(keys, values), lead=lead)


# -- which calls ---------------------------------------------------------------------------------------------


def parts(call: Call, segment: Segment) -> Iterator[Slice]:
    """The parts of one segment, each a call of the op. Causal parts are square.

    Parts of the same rows belong to the same softmax.
    """
    for piece in segment.slices(call.visibility, call.lead is not None):
        first, last = piece.columns
        if piece.window is not None:
            yield from _strips(call, piece)
        elif piece.causal:
            square = last - (piece.rows[1] - piece.rows[0])
            yield piece._replace(columns=(square, last))
            yield from _unmasked(call, piece, (first, square))
        else:
            yield from _unmasked(call, piece, piece.columns)


def _unmasked(call: Call, piece: Slice, columns: Span) -> Iterator[Slice]:
    """Parts without a mask, of all rows of a slice and these columns; in tiles if tokens must be unpacked."""
    is_packed = not all(x is None or isinstance(x, Tensor) for x in _tensors(call))
    width = _TILE_TOKENS if is_packed else columns[1] - columns[0]
    for start in range(*columns, max(width, 1)):
        yield piece._replace(columns=(start, min(start + width, columns[1])), causal=False)


def _strips(call: Call, piece: Slice) -> Iterator[Slice]:
    """Parts of a slice with a window: strips of rows with all columns that these see, and a mask."""
    (first, last), window = piece.rows, piece.window
    assert window is not None
    past = piece.columns[1] - last
    rows = min(_STRIP_ROWS, max(32, window // 4), max(16, _TILE_ELEMENTS // window), last - first)
    key = "strip", rows, window, call.q.dtype
    mask = call.segments.derived(key, lambda: _strip_mask(rows, window, call.q))
    for start in range(first, last, rows):
        end = min(start + rows, last)
        columns = past + start - window + 1, past + end
        own_mask = mask[: end - start, : columns[1] - columns[0]]
        yield Slice((start, end), columns, causal=False, mask=own_mask)


def _strip_mask(rows: int, window: int, like: Tensor) -> Tensor:
    """The additive mask of a strip, ``[rows, window - 1 + rows]``: 0 in the window of a row, else -inf."""
    row = torch.arange(rows)[:, None]
    column = torch.arange(window - 1 + rows)
    mask = torch.zeros(rows, column.shape[0], dtype=like.dtype)
    return mask.masked_fill_((column < row) | (column >= row + window), float("-inf"))


# -- forward and backward ------------------------------------------------------------------------------------


def _rows(segment: Segment, part: Slice) -> tuple[slice, slice, slice]:
    """The index of a part's queries in ``[B, Hq, m, …]``."""
    return slice(*segment.rows), slice(None), slice(*part.rows)


def _inputs(call: Call, segment: Segment, part: Slice) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a part."""
    queries, keys = call.q, call.tokens.keys
    if part.lead:
        assert call.lead is not None
        queries, keys = call.lead[:2]
    columns = (span(take_rows(x, segment.rows), *part.columns) for x in (keys, call.tokens.values))
    return queries[_rows(segment, part)], *columns  # type: ignore[return-value]


def _run(call: Call, segment: Segment, part: Slice) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a part."""
    return _op(*_inputs(call, segment, part), 0.0, part.causal, attn_mask=part.mask, scale=call.scale)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call, without its sink."""
    segments, all_rows = call.segments.all, ((0, call.q.shape[0]), (0, call.q.shape[2]))
    calls = [list(parts(call, segment)) for segment in segments]
    if len(calls) == 1 == len(calls[0]) and segments[0][:2] == all_rows:
        return _run(call, segments[0], calls[0][0])  # nothing is merged, so no second output is needed
    # lse is fp64 while parts are merged, because in backward its rounding error enters every weight
    lse = torch.full(call.q.shape[:3], float("-inf"), dtype=torch.float64)
    compute = compute_dtype(call.q.dtype)
    # where parts are merged, the output is rounded once, however many parts there are
    dtype = compute if any(map(_overlap, calls)) else call.q.dtype
    out = torch.zeros(call.q.shape, dtype=dtype)
    for segment, found in zip(segments, calls, strict=True):
        written = 0  # rows below this already hold a result that the next part must be merged into
        for part in found:
            rows = _rows(segment, part)
            results = _run(call, segment, part)
            if part.rows[0] >= written:
                out[rows], lse[rows] = results
                written = part.rows[1]
            else:
                _merge(out[rows], lse[rows], *results)
    return out.to(call.q.dtype), lse.to(compute)


def _overlap(calls: list[Slice]) -> bool:
    """Whether two parts of a segment have a row in common."""
    ends = accumulate((part.rows[1] for part in calls), max, initial=0)
    return any(part.rows[0] < end for part, end in zip(calls, ends, strict=False))


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part's results into ``out`` and ``lse`` in place, by the gate of eq. 4."""
    gate = torch.sigmoid(lse - part_lse)[..., None]
    torch.lerp(part_out.to(out.dtype), out, gate.to(out.dtype), out=out)
    torch.logaddexp(lse, part_lse.double(), out=lse)


def _backward(call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> list[Tensor | None]:
    """The gradients of ``_tensors(call)``, given results of the whole call and the gradient of ``out``."""
    inputs = _tensors(call)
    grads = [None if x is None else torch.zeros(x.shape, dtype=lse.dtype) for x in inputs]
    for segment in call.segments.all:
        for part in parts(call, segment):
            rows, columns = _rows(segment, part), (slice(*segment.rows), slice(None), slice(*part.columns))
            found = _op_backward(
                grad_out[rows].contiguous(),
                *_inputs(call, segment, part),
                *(out[rows], lse[rows].contiguous(), 0.0, part.causal),
                attn_mask=part.mask,
                scale=call.scale,
            )
            targets = (grads[3], grads[4], grads[2]) if part.lead else grads[:3]
            for target, where, grad in zip(targets, (rows, columns, columns), found, strict=True):
                assert target is not None
                target[where].add_(grad)
    return [None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)]


FLASH = Implementation(attend, unsupported)
