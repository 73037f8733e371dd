"""PyTorch's flash attention ops on slices, merged by log-sum-exp; forward and backward. Here on the CPU, on CUDA in ``varlen``.

Within a segment of ``n`` tokens, ``m`` of them queries, let ``h = n_s + n_r``. No mask grows with ``n``:

* rows below ``h`` see every token before them: one call on the past, one causal call on the chunk itself;
* later rows see sinks and window with their own queries and keys, in strips of rows under a mask of one strip's size;
* and the distant tokens through their lead: rows ``p`` see ``n_s <= j <= p - n_r``, a call on what all rows see and a *square
  causal* one.

The outputs are merged by the gate ``sigmoid(lse_P - lse_D)`` (eq. 4). Backward calls each part's flash backward with the
merged output and log-sum-exp, which makes the gradient of the merge free.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attend import (
    Call,
    Implementation,
    Lead,
    Segment,
    Source,
    Span,
    Tokens,
    span,
    take_rows,
    takes_gradients,
)
from .varlen import attend_on_cuda, unsupported_on_cuda

_STRIP_ROWS = 256
_TILE_ELEMENTS = 1 << 22  # of a strip's mask
_TILE_TOKENS = 4096  # packed tokens that are unpacked at a time
_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_op_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """One flash call: ``rows`` of the (own or lead) queries on ``columns`` of keys and values, both within a segment."""

    lead: bool
    rows: Span
    columns: tuple[Span, ...]
    causal: bool = False
    mask: Tensor | None = None


def unsupported(call: Call) -> str | None:
    """Why no flash op can run a call; None when one can."""
    if call.visibility.positions is not None or call.visibility.bias is not None:
        return "tokens with positions or a bias of their own"
    if call.q.device.type != "cpu":
        return unsupported_on_cuda(call)
    return None if call.q.dtype.is_floating_point else f"dtype {call.q.dtype} is not floating point"


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``."""
    if call.q.device.type != "cpu":
        return attend_on_cuda(call)
    lead = call.lead or Lead(None, None)  # type: ignore[arg-type]
    tensors = call.q, *call.tokens, lead.queries, lead.keys
    if not takes_gradients(*tensors):
        with torch.no_grad():
            return _forward(call)
    q, keys, values, q_lead, k_lead = (x if x is None else span(x, 0, x.shape[2]) for x in tensors)
    lead = None if q_lead is None or k_lead is None else Lead(q_lead, k_lead)
    call = call._replace(tokens=Tokens(keys, values), lead=lead)  # pyright: ignore
    return _Flash.apply(q, keys, values, q_lead, k_lead, call)  # type: ignore[return-value]


# -- which calls -------------------------------------------------------------------------------------------------


def parts(call: Call, segment: Segment) -> Iterator[Part]:
    """The calls for one segment; parts that share rows have the same softmax."""
    m, past = segment.queries[1] - segment.queries[0], segment.past
    see, n = call.visibility, segment.keys[1] - segment.keys[0]
    if not see.causal:
        yield from _unmasked(False, (0, m), (0, n), call.tokens)
    elif see.num_recent_tokens is None:
        yield from _causal(call, m, past)
    else:
        first = min(max(see.num_sink_tokens + see.num_recent_tokens - past, 0), m)
        if first:
            yield from _causal(call, first, past)
        if first < m:
            yield from _strips(call, first, m, past)
            if call.lead is not None:
                yield from _distant(call, first, m, past)


def _causal(call: Call, rows: int, past: int) -> Iterator[Part]:
    """The first rows on everything before them."""
    yield Part(False, (0, rows), ((past, past + rows),), causal=True)
    yield from _unmasked(False, (0, rows), (0, past), call.tokens)


def _unmasked(lead: bool, rows: Span, columns: Span, tokens: Tokens) -> Iterator[Part]:
    """All of these rows on all of these columns; what has to be unpacked comes in tiles."""
    width = columns[1] - columns[0] if all(isinstance(x, Tensor) for x in tokens) else _TILE_TOKENS
    for start in range(*columns, max(width, 1)):
        yield Part(lead, rows, ((start, min(start + width, columns[1])),))


def _strips(call: Call, first: int, m: int, past: int) -> Iterator[Part]:
    """Own queries on sinks and window, for the rows that also have distant tokens."""
    n_s, n_r = call.windows
    rows = min(_STRIP_ROWS, max(32, n_r // 4), max(16, _TILE_ELEMENTS // (n_s + n_r)), m - first)
    key = "strip", rows, n_s, n_r, call.q.dtype
    mask = call.segments.derived(key, lambda: _strip_mask(rows, n_s, n_r, call.q))
    for start in range(first, m, rows):
        end = min(start + rows, m)
        columns = ((0, n_s), (past + start - n_r + 1, past + end))
        yield Part(False, (start, end), columns, mask=mask[: end - start, : n_s + n_r - 1 + end - start])


def _strip_mask(rows: int, num_sink_tokens: int, num_recent_tokens: int, like: Tensor) -> Tensor:
    """Additive ``[rows, n_s + n_r - 1 + rows]``: all sinks, and the band of the window."""
    row = torch.arange(rows)[:, None]
    column = torch.arange(num_recent_tokens - 1 + rows)
    hidden = (column < row) | (column >= row + num_recent_tokens)
    mask = torch.zeros(rows, num_sink_tokens + column.shape[0], dtype=like.dtype)
    mask[:, num_sink_tokens:].masked_fill_(hidden, float("-inf"))
    return mask


def _distant(call: Call, first: int, m: int, past: int) -> Iterator[Part]:
    """The lead's queries on its distant keys: those that every row sees, and the triangle behind them."""
    n_s, n_r = call.windows
    assert call.lead is not None
    seen = past + first - n_r  # the first row sees distant tokens up to this one
    yield Part(True, (first, m), ((seen, seen + m - first),), causal=True)
    yield from _unmasked(True, (first, m), (n_s, seen), Tokens(call.lead.keys, call.tokens.values))


# -- forward and backward ----------------------------------------------------------------------------------------


class _Views(NamedTuple):
    """One segment's slices."""

    q: Any
    keys: Any
    values: Any
    q_lead: Any
    k_lead: Any

    def of(self, part: Part, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a part; ``first`` is the column of the segment's first key."""
        q, keys = (self.q_lead, self.k_lead) if part.lead else (self.q, self.keys)
        keys, values = (_columns(x, part.columns, first) for x in (keys, self.values))
        return q[:, :, slice(*part.rows)], keys, values


def _columns(x: Source, columns: tuple[Span, ...], first: int) -> Tensor:
    spans = [span(x, first + start, first + end) for start, end in columns if end > start]
    return spans[0] if len(spans) == 1 else torch.cat(spans, dim=2)


def _views(call: Call, segment: Segment) -> _Views:
    lead = call.lead or Lead(None, None)  # type: ignore[arg-type]
    rows, queries = segment.rows, slice(*segment.queries)
    q, q_lead = (x if x is None else take_rows(x, rows)[:, :, queries] for x in (call.q, lead.queries))
    keys, values, k_lead = (take_rows(x, rows) for x in (*call.tokens, lead.keys))
    return _Views(q, keys, values, q_lead, k_lead)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    whole = Segment(
        (0, call.q.shape[0]), (0, call.q.shape[2]), call.segments.all[0].keys if call.segments.all else (0, 0)
    )
    if call.segments.all == (whole,) and len(calls := list(parts(call, whole))) == 1:
        return _run(call, whole, _views(call, whole), calls[0])  # nothing to merge: no second output
    wide = torch.promote_types(call.q.dtype, torch.float32)
    out = torch.zeros_like(call.q, memory_format=torch.contiguous_format)
    lse = torch.full(call.q.shape[:3], float("-inf"), dtype=wide)
    for segment in call.segments.all:
        views, rows, queries = _views(call, segment), slice(*segment.rows), slice(*segment.queries)
        _forward_segment(call, segment, views, out[rows, :, queries], lse[rows, :, queries])
    return out, lse


def _forward_segment(call: Call, segment: Segment, views: _Views, out: Tensor, lse: Tensor) -> None:
    calls, narrow = list(parts(call, segment)), out
    ends = accumulate((part.rows[1] for part in calls), max, initial=0)
    merges = any(part.rows[0] < end for part, end in zip(calls, ends, strict=False))
    if merges and lse.dtype != out.dtype:  # one rounding, however many parts
        out = torch.zeros(out.shape, dtype=lse.dtype)
    written = 0  # rows below this already hold a result that the next part must be merged into
    for part in calls:
        rows = slice(*part.rows)
        part_out, part_lse = _run(call, segment, views, part)
        if part.rows[0] >= written:
            out[:, :, rows], lse[:, :, rows] = part_out, part_lse
            written = part.rows[1]
        else:
            _merge(out[:, :, rows], lse[:, :, rows], part_out, part_lse)
    if narrow is not out:
        narrow.copy_(out)


def _run(call: Call, segment: Segment, views: _Views, part: Part) -> tuple[Tensor, Tensor]:
    inputs = views.of(part, segment.keys[0])
    return _op(*inputs, 0.0, part.causal, attn_mask=part.mask, scale=call.scale)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part into ``out`` and ``lse`` in place: the gate of eq. 4."""
    gate = torch.sigmoid(lse - part_lse)[..., None]
    torch.lerp(part_out.to(out.dtype), out, gate.to(out.dtype), out=out)
    torch.logaddexp(lse, part_lse, out=lse)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_lead, k_lead, call: Call):
        out, lse = _forward(call)
        ctx.save_for_backward(q, k, v, q_lead, k_lead, out, lse)
        ctx.mark_non_differentiable(lse)
        nothing = call.q.new_empty(0)  # tensors are saved above, where they may be offloaded
        lead = None if call.lead is None else Lead(nothing, nothing)
        ctx.call = call._replace(q=nothing, tokens=Tokens(nothing, nothing), lead=lead)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _):
        *inputs, out, lse = ctx.saved_tensors
        q, k, v, q_lead, k_lead = inputs
        lead = None if ctx.call.lead is None else Lead(q_lead, k_lead)
        call = ctx.call._replace(q=q, tokens=Tokens(k, v), lead=lead)
        grads = [None if x is None else torch.zeros(x.shape, dtype=lse.dtype) for x in inputs]
        for segment in call.segments.all:
            _backward_segment(call, segment, _Views(*grads), grad_out, out, lse)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)), None


def _backward_segment(call: Call, segment: Segment, grads: _Views, grad_out, out, lse) -> None:
    views, rows, queries = _views(call, segment), slice(*segment.rows), slice(*segment.queries)
    grad_out, out, lse = (x[rows, :, queries] for x in (grad_out, out, lse))
    first = segment.keys[0]
    for part in parts(call, segment):
        at = slice(*part.rows)
        saved = out[:, :, at], lse[:, :, at].contiguous(), 0.0, part.causal
        q, k, v = _op_backward(
            grad_out[:, :, at].contiguous(),
            *views.of(part, first),
            *saved,
            attn_mask=part.mask,
            scale=call.scale,
        )
        grad_q, grad_k = (grads.q_lead, grads.k_lead) if part.lead else (grads.q, grads.keys)
        grad_q[rows, :, queries][:, :, at] += q
        for target, found in ((grad_k, k), (grads.values, v)):
            _add_columns(target[rows], part.columns, first, found)


def _add_columns(target: Tensor, columns: tuple[Span, ...], first: int, x: Tensor) -> None:
    for start, end in columns:
        target[:, :, first + start : first + end] += x[:, :, : end - start]
        x = x[:, :, end - start :]


FLASH = Implementation(attend, unsupported)
