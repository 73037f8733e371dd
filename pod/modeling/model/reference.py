"""Attention in plain torch, with every logit in memory, a block of queries at a time.

Fast implementations are tested against it.
"""

import torch
from torch import Tensor

from .attend import Call, Implementation, Segment, Span, compute_dtype, span, take_rows

_BLOCK_ELEMENTS = 1 << 24


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``. Autograd gives the gradients of the output and of the log-sum-exp.

    It computes in fp32, or in fp64 for fp64 queries.
    """
    compute = compute_dtype(call.q.dtype)
    out = torch.zeros_like(call.q, memory_format=torch.contiguous_format)
    lse = torch.full(call.q.shape[:3], float("-inf"), dtype=compute, device=call.q.device)
    sources = *call.tokens, None if call.lead is None else call.lead.keys
    for segment in call.segments.all:
        own = [None if x is None else span(take_rows(x, segment.rows), *segment.keys) for x in sources]
        tokens = [None if x is None else x.repeat_interleave(call.groups, dim=1).to(compute) for x in own]
        num_tokens = segment.keys[1] - segment.keys[0]
        num_rows = (segment.rows[1] - segment.rows[0]) * call.q.shape[1]
        block = max(1, _BLOCK_ELEMENTS // (num_rows * max(1, num_tokens)))
        for start in range(*segment.queries, block):
            rows = start, min(start + block, segment.queries[1])
            place = slice(*segment.rows), slice(None), slice(*rows)
            found, lse[place] = _rows(call, tokens, segment, rows)
            out[place] = found.to(out.dtype)
    return out, lse


def _rows(call: Call, tokens: list, segment: Segment, rows: Span) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the queries ``rows`` of a segment: zeros and -inf if one sees nothing."""
    keys, values, far_keys = tokens

    def logits_of(queries: Tensor, keys: Tensor) -> Tensor:
        queries = queries[slice(*segment.rows), :, slice(*rows)]
        return (queries.to(keys.dtype) * call.scale) @ keys.transpose(2, 3)

    proximal, distant = _masks(call, segment, rows)
    logits, visible = logits_of(call.q, keys), proximal
    if call.lead is not None:
        far = logits_of(call.lead.queries, far_keys)
        logits = torch.where(proximal, logits, far)
        visible = proximal | distant
    nothing = ~visible.any(-1, keepdim=True)
    logits = logits.masked_fill(~visible & ~nothing, float("-inf"))
    if call.sink is not None:  # it adds one column of logits, and one row of values
        column, value = call.sink.columns()
        column = column.to(logits.dtype)
        value = value.to(logits.dtype)
        logits = torch.cat((logits, column.expand(*logits.shape[:3])[..., None]), dim=-1)
        values = torch.cat((values, value.expand(values.shape[0], -1, -1, -1)), dim=2)
    out = logits.softmax(-1).masked_fill(nothing, 0.0) @ values
    return out, logits.logsumexp(-1).masked_fill(nothing[..., 0], float("-inf"))


def _masks(call: Call, segment: Segment, rows: Span) -> tuple[Tensor, Tensor]:
    """Two masks for the queries ``rows`` of a segment: tokens that they see with own keys, and distant ones.

    The masks are ``[rows, n]``, or ``[b, Hq, rows, n]`` if the call gives the positions of tokens. Without a
    lead, distant tokens are not seen at all.
    """
    see, device = call.visibility, call.q.device
    query = torch.arange(*rows, device=device)[:, None] - segment.queries[0]
    if see.positions is None:
        key = torch.arange(segment.keys[1] - segment.keys[0], device=device)
        query = query + segment.past
    else:
        key = see.positions[slice(*segment.rows)].repeat_interleave(call.groups, dim=1)[:, :, None]
        query = query + see.start
    visible = (key >= 0) & ((key <= query) | (not see.causal))
    if see.num_recent_tokens is None:
        return visible, torch.zeros_like(visible)
    near = (key < see.num_sink_tokens) | (query - key < see.num_recent_tokens)
    return visible & near, visible & ~near


ATTEND_REFERENCE = Implementation(attend, lambda call: None)
