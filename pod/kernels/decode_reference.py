"""Decoding row by row and head by head with plain tensor operations: the truth that fast backends are held to."""

import torch
from torch import Tensor

from pod.kernels.decode_types import Call, Stored


def unsupported(call: Call) -> str | None:
    return None


def decode(call: Call) -> None:
    """See ``pod.kernels.decode.pod_decode``; computes in fp32, or in fp64 for fp64 queries."""
    for row, length in enumerate(call.lengths.tolist()):
        for head in range(call.roles.num_heads):
            _decode_head(call, row, head, length)


def _decode_head(call: Call, row: int, head: int, length: int) -> None:
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
    if isinstance(x, Tensor):
        return x[row, head, :length].to(dtype)
    return x.rows(slice(row, row + 1)).heads(slice(head, head + 1)).read(0, length, dtype)[0, 0]
