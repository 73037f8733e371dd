"""Attention with every logit in memory, a block of queries at a time: the truth that fast implementations are held to."""

from typing import NamedTuple

import torch
from torch import Tensor

from .attend import Call, Implementation, Segment, Source, span, take_rows
from .decode import DecodeCall, Decoder
from .packed import Packed, Stored

_BLOCK_ELEMENTS = 1 << 24


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``; computes in fp32, or in fp64 for fp64 queries, with gradients of both by autograd."""
    batch, heads, m, _ = call.q.shape
    compute = torch.promote_types(call.q.dtype, torch.float32)
    out = torch.zeros_like(call.q, memory_format=torch.contiguous_format)
    lse = torch.full((batch, heads, m), float("-inf"), dtype=compute, device=call.q.device)
    for segment in call.segments.all:
        inputs = _inputs(call, segment, compute)
        block = max(1, _BLOCK_ELEMENTS // (inputs.q.shape[0] * heads * max(1, inputs.keys.shape[2])))
        for start in range(0, inputs.q.shape[2], block):
            stop = min(start + block, inputs.q.shape[2])
            part = (
                slice(*segment.rows),
                slice(None),
                slice(segment.queries[0] + start, segment.queries[0] + stop),
            )
            found, lse_of_rows = _rows(call, inputs, segment, start, stop)
            out[part], lse[part] = found.to(out.dtype), lse_of_rows
    return out, lse


class _Inputs(NamedTuple):
    """One segment, keys and values repeated for every query head."""

    q: Tensor
    keys: Tensor
    values: Tensor
    q_lead: Tensor | None
    k_lead: Tensor | None


def _inputs(call: Call, segment: Segment, compute: torch.dtype) -> _Inputs:
    rows, queries = slice(*segment.rows), slice(*segment.queries)

    def repeated(x: Source) -> Tensor:
        return (
            span(take_rows(x, segment.rows), *segment.keys).repeat_interleave(call.groups, dim=1).to(compute)
        )

    lead = None, None
    if call.lead is not None:
        lead = call.lead.queries[rows, :, queries].to(compute), repeated(call.lead.keys)
    keys, values = map(repeated, call.tokens)
    return _Inputs(call.q[rows, :, queries].to(compute), keys, values, *lead)


def _rows(call: Call, inputs: _Inputs, segment: Segment, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries ``start`` to ``stop`` of a segment; zeros and -inf where nothing is seen."""
    proximal, distant = masks(call, segment, start, stop)
    logits = (inputs.q[:, :, start:stop] * call.scale) @ inputs.keys.transpose(2, 3)
    if call.visibility.bias is not None:
        bias = call.visibility.bias[slice(*segment.rows)]
        logits = logits + bias.repeat_interleave(call.groups, dim=1)[:, :, None]
    visible = proximal
    if inputs.q_lead is not None and inputs.k_lead is not None:
        far = (inputs.q_lead[:, :, start:stop] * call.scale) @ inputs.k_lead.transpose(2, 3)
        logits, visible = torch.where(proximal, logits, far), proximal | distant
    nothing = ~visible.any(-1, keepdim=True)
    logits = logits.masked_fill(~visible & ~nothing, float("-inf"))
    out = logits.softmax(-1).masked_fill(nothing, 0.0) @ inputs.values
    return out, logits.logsumexp(-1).masked_fill(nothing[..., 0], float("-inf"))


def masks(call: Call, segment: Segment, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """What queries ``start`` to ``stop`` of a segment see, and what of the rest their leads see: ``[stop - start, n]``, or
    ``[b, Hq, stop - start, n]`` for tokens with positions of their own."""
    see, device = call.visibility, call.q.device
    query = torch.arange(start, stop, device=device)[:, None]
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


# -- decoding ----------------------------------------------------------------------------------------------------


def decode(call: DecodeCall) -> None:
    """Row by row and head by head. See ``decode.pod_decode``; computes in fp32, or in fp64 for fp64 queries."""
    for row, length in enumerate(call.lengths.tolist()):
        for head in range(call.roles.num_heads):
            _decode_head(call, row, head, length)


def _decode_head(call: DecodeCall, row: int, head: int, length: int) -> None:
    compute = torch.promote_types(call.q.dtype, torch.float32)
    groups = call.q.shape[1] // call.roles.num_heads
    mine = slice(head * groups, (head + 1) * groups)
    q = call.q[row, mine].to(compute) * call.scale
    values = _tokens(call.values, row, head, length, compute)
    position = torch.arange(length, device=q.device)
    oldest_recent = max(length - call.num_recent_tokens, 0)
    distant = (position >= call.num_sink_tokens) & (position < oldest_recent)
    stored = call.buffers.logits[row, head]
    if head in call.roles.leads:
        assert call.keys is not None
        logits = q @ _tokens(call.keys, row, call.roles.leads.index(head), length, compute).T
        if head in call.roles.followed:
            stored[:, :length][:, distant] = logits[:, distant]
            call.buffers.distant_lse[row, head] = logits[:, distant].logsumexp(-1)
    else:
        assert call.window_keys is not None
        n_s, n_r = call.num_sink_tokens, call.num_recent_tokens
        slot = torch.where(position < n_s + n_r, position, n_s + (position - n_s) % n_r)
        slot = torch.where(distant, 0, slot)
        keys = _tokens(call.window_keys, row, call.roles.followers.index(head), n_s + n_r, compute)
        logits = torch.where(distant, stored[:, :length], q @ keys[slot].T)
        if call.tau is not None:
            proximal = logits.masked_fill(distant, float("-inf"))
            gate = torch.sigmoid(proximal.logsumexp(-1) - call.buffers.distant_lse[row, head])
            logits = torch.where((gate >= call.tau)[:, None], proximal, logits)
    call.out[row, mine] = (logits.softmax(-1) @ values).to(call.out.dtype)


def _tokens(x: Stored, row: int, head: int, length: int, dtype: torch.dtype) -> Tensor:
    """``[length, d]`` of one row and head."""
    if isinstance(x, Packed):
        return x.rows(slice(row, row + 1)).heads(slice(head, head + 1)).read(0, length, dtype)[0, 0]
    return x[row, head, :length].to(dtype)


ATTEND_REFERENCE = Implementation(attend, lambda call: None)
DECODE_REFERENCE = Decoder(decode, lambda call: None)
