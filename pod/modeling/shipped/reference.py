"""Plain PyTorch attention: the truth that every fast backend is tested against, and what an exported checkpoint runs.

Logits and softmax use at least fp32 (fp64 for fp64 inputs). Queries are processed in blocks, so that a forward
pass without gradients needs memory linear in the sequence length.
"""

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 24


def document_positions(doc_ids: Tensor) -> Tensor:
    """Position of every token inside its document: ``[B, n]`` ids, equal ids contiguous, to ``[B, n]`` int64."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Dense causal attention; see ``pod_attention`` for shapes and documents."""
    return _attention(q, k, v, None, None, 0, 0, doc_ids, scale)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention to the ``num_recent_tokens`` newest tokens, the query's own included (Beltagy et al., 2020).

    Shapes and documents as in ``pod_attention``.
    """
    return _attention(q, k, v, None, None, 0, num_recent_tokens, doc_ids, scale, only_window=True)


def pod_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lead: Tensor,
    k_lead: Tensor,
    num_sink_tokens: int,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of heads that follow a lead (paper eqs. 3 and 4; METHODS of PoD).

    Own logits for proximal tokens (``j < n_s`` or ``i - j < n_r``), the lead's logits for all others, one softmax
    over both, the layer's own values. Positions count from the start of each document.

    Args:
        q, q_lead: ``[B, Hq, n, d]``, rotated.
        k, v, k_lead: ``[B, H, n, d]``, ``Hq = G·H``; query head ``i`` belongs to KV head ``i // G``.
        doc_ids: ``[B, n]``; tokens attend inside their document only, -1 is padding and gets a zero output.
        scale: factor on logits, ``1/sqrt(d)`` when None.

    Returns:
        ``[B, Hq, n, d]``.
    """
    return _attention(q, k, v, q_lead, k_lead, num_sink_tokens, num_recent_tokens, doc_ids, scale)


def _attention(
    q, k, v, q_lead, k_lead, num_sink_tokens, num_recent_tokens, doc_ids, scale, only_window=False
):
    batch, heads, n, head_dim = q.shape
    groups = heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    compute = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(groups, dim=1).to(compute) for x in (k, v))
    if doc_ids is None:
        doc_ids = torch.zeros(1, n, dtype=torch.long, device=q.device)
    position_ids = document_positions(doc_ids)
    doc_ids = torch.where(
        doc_ids < 0, -1, (position_ids == 0).long().cumsum(1)
    )  # an id that returns is a new document
    if k_lead is not None:
        k_lead = k_lead.repeat_interleave(groups, dim=1).to(compute)
    block = max(1, _BLOCK_ELEMENTS // (batch * heads * n))
    outputs = []
    for start in range(0, n, block):
        rows = slice(start, min(start + block, n))
        allowed, distance = _visible(doc_ids, position_ids, rows)
        if only_window:
            allowed = allowed & (distance < num_recent_tokens)
        logits = (q[:, :, rows].to(compute) * scale) @ k.transpose(2, 3)
        if k_lead is not None:
            distant = (distance >= num_recent_tokens) & (position_ids[:, None] >= num_sink_tokens)
            lead_logits = (q_lead[:, :, rows].to(compute) * scale) @ k_lead.transpose(2, 3)
            logits = torch.where(distant[:, None], lead_logits, logits)
        outputs.append(_softmax_where(logits, allowed[:, None]) @ v)
    return torch.cat(outputs, dim=2).to(q.dtype)


def _visible(doc_ids: Tensor, position_ids: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Causal, same-document mask ``[B, rows, n]`` and distance ``i - j`` in tokens."""
    distance = position_ids[:, rows, None] - position_ids[:, None]
    same = (doc_ids[:, rows, None] == doc_ids[:, None]) & (doc_ids[:, rows, None] >= 0)
    return same & (distance >= 0), distance


def _softmax_where(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed columns; rows without any get zeros (and zero gradients) instead of NaN."""
    nothing = ~allowed.any(-1, keepdim=True)
    logits = logits.masked_fill(~allowed & ~nothing, float("-inf"))
    return logits.softmax(-1).masked_fill(nothing, 0.0)
