"""Decoding with every logit in memory, in torch alone: how exact a dtype lets the kernels be."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pod.modeling.model.attend import Implementation, compute_dtype
from pod.modeling.model.decode import DECODERS, DecodeCall
from pod.modeling.model.packed import Packed, Stored


def decode(call: DecodeCall) -> None:
    """Decode row by row and head by head. See ``decode.pod_decode``.

    Computes in fp32, or in fp64 for fp64 queries.
    """
    for row, length in enumerate(call.lengths.tolist()):
        for head in range(call.roles.num_heads):
            _decode_head(call, row, head, length)


def _decode_head(call: DecodeCall, row: int, head: int, length: int) -> None:
    compute = compute_dtype(call.q.dtype)
    groups = call.q.shape[1] // call.roles.num_heads
    mine = slice(head * groups, (head + 1) * groups)
    q = call.q[row, mine].to(compute) * call.scale
    if head in call.roles.windows:
        assert call.near is not None
        slots, place = call.num_sink_tokens + call.num_recent_tokens, call.roles.windows.index(head)
        keys, values = (_tokens(x, row, place, min(length, slots), compute) for x in call.near)
        logits = q @ keys.T
        if call.sink is not None:
            logits = torch.cat((logits, call.sink.logits[mine, None].to(compute)), dim=1)
            values = torch.cat((values, call.sink.values[head, None].to(compute)))
        call.out[row, mine] = (logits.softmax(-1) @ values).to(call.out.dtype)
        return
    assert call.values is not None
    values = _tokens(call.values, row, call.roles.held.index(head), length, compute)
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
        return x.rows(slice(row, row + 1)).heads(slice(head, head + 1)).span(0, length, dtype)[0, 0]
    return x[row, head, :length].to(dtype)


@contextmanager
def offered() -> Iterator[None]:
    """Offer it as the decode backend ``reference``, and to nobody afterwards.

    Other tests count the backends.
    """
    DECODERS["reference"] = Implementation(decode, lambda call: None)
    try:
        yield
    finally:
        del DECODERS["reference"]
