"""PoD attention as ordinary flash attention on slices, merged by log-sum-exp; forward and backward.

This is the CPU's way, document by document; ``flash_varlen`` does the same on CUDA for all documents at once.

Within one document of ``n`` tokens let ``h = n_s + n_r``. Rows below ``h`` have no distant token: one causal call.
Rows from ``h`` on see

* proximal tokens (sinks and window) with the layer's own queries and keys, and
* distant tokens with the lead's: a *square causal* call of ``Q_lead[h:]`` on ``K_lead[n_s : n - n_r]``.

The two outputs are merged with the gate ``sigmoid(lse_P - lse_D)`` (eq. 4). Backward calls each part's flash backward
with the merged output and the merged log-sum-exp, which makes the gradient of the merge free. No mask grows with n².
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pod.kernels import flash_ops, flash_varlen
from pod.kernels.documents import Span, document_segments

_STRIP_ROWS = 256


class Part(NamedTuple):
    """One flash call: ``rows`` of the (own or lead) queries on ``columns`` of keys and values."""

    lead: bool
    rows: Span
    columns: tuple[Span, ...]
    causal: bool
    mask: Tensor | None = None


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Dense causal attention; shapes and documents as in ``pod_attention``."""
    return _attend(q, k, v, None, (0, q.shape[2]), doc_ids, scale)


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
    """Attention of heads that follow a lead.

    Args:
        q, q_lead: ``[B, Hq, n, d]``, rotated; k, v, k_lead: ``[B, H, n, d]`` with ``Hq = G·H``.
        num_sink_tokens, num_recent_tokens: ``n_s >= 0`` and ``n_r >= 1``, counted per document.
        doc_ids: ``[B, n]`` packed documents, -1 = padding (zero output).
        scale: factor on logits, ``1/sqrt(d)`` when None.

    Returns:
        ``[B, Hq, n, d]``.
    """
    return _attend(q, k, v, (q_lead, k_lead), (num_sink_tokens, num_recent_tokens), doc_ids, scale)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention to the ``num_recent_tokens`` newest tokens, the query's own included: PoD without its lead.

    Shapes and documents as in ``pod_attention``.
    """
    return _attend(q, k, v, None, (0, num_recent_tokens), doc_ids, scale)


def _attend(q, k, v, lead, windows, doc_ids, scale) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.device.type != "cpu":
        return flash_varlen.attend(q, k, v, lead, windows, doc_ids, scale, flash_ops.PACKED)
    segments = document_segments(doc_ids, q.shape[0], q.shape[2])
    return _FlashAttention.apply(q, k, v, *(lead or (None, None)), *windows, segments, scale)


def _proximal_parts(n: int, num_sink_tokens: int, num_recent_tokens: int, like: Tensor) -> Iterator[Part]:
    """Own queries on sinks and window, for the rows that also have distant tokens."""
    first = num_sink_tokens + num_recent_tokens
    rows = min(_STRIP_ROWS, max(32, num_recent_tokens // 4), n - first)
    mask = _strip_mask(rows, num_sink_tokens, num_recent_tokens, like)
    for start in range(first, n, rows):
        end = min(start + rows, n)
        columns = ((0, num_sink_tokens), (start - num_recent_tokens + 1, end))
        width = num_sink_tokens + num_recent_tokens - 1 + end - start
        yield Part(False, (start, end), columns, causal=False, mask=mask[: end - start, :width])


def _strip_mask(rows: int, num_sink_tokens: int, num_recent_tokens: int, like: Tensor) -> Tensor:
    """Additive ``[rows, n_s + n_r - 1 + rows]``: all sinks, and the band of the window."""
    row = torch.arange(rows, device=like.device)[:, None]
    column = torch.arange(num_recent_tokens - 1 + rows, device=like.device)
    hidden = (column < row) | (column >= row + num_recent_tokens)
    mask = torch.zeros(rows, num_sink_tokens + column.shape[0], dtype=like.dtype, device=like.device)
    mask[:, num_sink_tokens:].masked_fill_(hidden, float("-inf"))
    return mask


def _all_parts(
    n: int, num_sink_tokens: int, num_recent_tokens: int, like: Tensor, has_lead: bool
) -> Iterator[Part]:
    first = min(n, num_sink_tokens + num_recent_tokens)
    yield Part(False, (0, first), ((0, first),), causal=True)
    if n > first:
        yield from _proximal_parts(n, num_sink_tokens, num_recent_tokens, like)
        if has_lead:
            yield Part(True, (first, n), ((num_sink_tokens, n - num_recent_tokens),), causal=True)


def _columns(x: Tensor, columns: tuple[Span, ...]) -> Tensor:
    spans = [x[:, :, start:end] for start, end in columns if end > start]
    return spans[0] if len(spans) == 1 else torch.cat(spans, dim=2)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_lead, k_lead, num_sink_tokens, num_recent_tokens, segments, scale):
        out = torch.zeros_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        for row, spans in enumerate(segments):
            for start, end in spans:
                views = [
                    x if x is None else x[row : row + 1, :, start:end] for x in (q, k, v, q_lead, k_lead)
                ]
                target = out[row : row + 1, :, start:end], lse[row : row + 1, :, start:end]
                _forward_segment(views, target, num_sink_tokens, num_recent_tokens, scale)
        ctx.save_for_backward(q, k, v, q_lead, k_lead, out, lse)
        ctx.settings = num_sink_tokens, num_recent_tokens, segments, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        *inputs, out, lse = ctx.saved_tensors
        num_sink_tokens, num_recent_tokens, segments, scale = ctx.settings
        wide = torch.promote_types(out.dtype, torch.float32)
        grads = [None if x is None else torch.zeros(x.shape, dtype=wide, device=x.device) for x in inputs]
        for row, spans in enumerate(segments):
            for start, end in spans:
                cut = lambda x: None if x is None else x[row : row + 1, :, start:end]  # noqa: B023, E731
                arguments = [cut(x) for x in (*inputs, grad_out, out, lse)]
                _backward_segment(
                    arguments, [cut(x) for x in grads], num_sink_tokens, num_recent_tokens, scale
                )
        grads = [None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)]
        return *grads, None, None, None, None


def _forward_segment(views, target, num_sink_tokens, num_recent_tokens, scale) -> None:
    q, k, v, q_lead, k_lead = views
    out, lse = target
    written = 0  # rows below this already hold a result that the next part must be merged into
    for part in _all_parts(q.shape[2], num_sink_tokens, num_recent_tokens, q, q_lead is not None):
        rows = slice(*part.rows)
        queries, keys = (q_lead, k_lead) if part.lead else (q, k)
        part_out, part_lse = flash_ops.forward(
            queries[:, :, rows], _columns(keys, part.columns), _columns(v, part.columns), part, scale
        )
        if part.rows[0] >= written:
            out[:, :, rows], lse[:, :, rows] = part_out, part_lse
            written = part.rows[1]
        else:
            _merge(out[:, :, rows], lse[:, :, rows], part_out, part_lse)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a part into ``out`` and ``lse`` in place: the gate of eq. 4."""
    gate = torch.sigmoid(lse - part_lse)[..., None]
    out.copy_(gate * out + (1 - gate) * part_out)
    lse.copy_(torch.logaddexp(lse, part_lse))


def _backward_segment(arguments, grads, num_sink_tokens, num_recent_tokens, scale) -> None:
    q, k, v, q_lead, k_lead, grad_out, out, lse = arguments
    grad_q, grad_k, grad_v, grad_q_lead, grad_k_lead = grads
    for part in _all_parts(q.shape[2], num_sink_tokens, num_recent_tokens, q, q_lead is not None):
        rows = slice(*part.rows)
        queries, keys = (q_lead, k_lead) if part.lead else (q, k)
        saved = grad_out[:, :, rows], out[:, :, rows], lse[:, :, rows]
        part_q, part_k, part_v = flash_ops.backward(
            queries[:, :, rows], _columns(keys, part.columns), _columns(v, part.columns), *saved, part, scale
        )
        (grad_q_lead if part.lead else grad_q)[:, :, rows] += part_q
        begin = 0
        for start, end in part.columns:
            size = end - start
            (grad_k_lead if part.lead else grad_k)[:, :, start:end] += part_k[:, :, begin : begin + size]
            grad_v[:, :, start:end] += part_v[:, :, begin : begin + size]
            begin += size
