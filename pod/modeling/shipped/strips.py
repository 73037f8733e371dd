"""Attention of a chunk of queries over keys that end with the chunk, in strips of rows: no mask grows with the length.

``blocked`` does the same for any mask and any number of logit sources, with its logits in memory. Here the mask is a
band, which PyTorch's own attention takes strip by strip: about four times as fast on CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_STRIP_ROWS = 256
_PADDING = 8  # channels; keeps the head size a multiple of what fused kernels ask for


class Aside(NamedTuple):
    """A part of the same softmax that was reduced elsewhere: ``lse`` ``[B, Hq, m]`` of its logits, ``out`` ``[B, Hq, m, d]``."""

    lse: Tensor
    out: Tensor


def strip_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    num_recent_tokens: int | None = None,
    aside: Aside | None = None,
) -> Tensor:
    """Causal attention of ``m`` queries at the last ``m`` of ``n`` columns.

    Args:
        q: ``[B, Hq, m, d]``; k, v: ``[B, H, n, d]``; rotated.
        num_recent_tokens: columns that a query sees, its own included; None = all up to its own.
        aside: logits that take part in every query's softmax besides these columns.

    Returns:
        ``[B, Hq, m, d]``.
    """
    m, n, head_dim = q.shape[2], k.shape[2], q.shape[3]
    past, window = n - m, num_recent_tokens or n
    if m == 1 and aside is None:
        grouped = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # the queries of a group share their keys
        return F.scaled_dot_product_attention(
            grouped, k[:, :, -window:], v[:, :, -window:], scale=scale
        ).flatten(1, 2)[:, :, None]
    if aside is not None:
        q, k, v = _with_dummy_column(q, k, v, aside.lse / scale)
    rows = min(m, _STRIP_ROWS, max(32, window // 4))
    outputs = []
    for start in range(0, m, rows):
        end = min(start + rows, m)
        columns = slice(max(0, past + start - window + 1), past + end)
        hidden = _band(columns, range(past + start, past + end), window, q)
        keys, values = k[:, :, columns], v[:, :, columns]
        if aside is not None:
            keys, values = (torch.cat((x, x_all[:, :, -1:]), dim=2) for x, x_all in ((keys, k), (values, v)))
            hidden = F.pad(hidden, (0, 1))
        outputs.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], keys, values, attn_mask=hidden, scale=scale, enable_gqa=True
            )
        )
    out = torch.cat(outputs, dim=2)
    if aside is None:
        return out
    return out[..., :head_dim] + out[..., head_dim : head_dim + 1] * aside.out


def _band(columns: slice, queries: range, window: int, like: Tensor) -> Tensor:
    """Additive mask ``[rows, columns]``: 0 where ``query - window < column <= query``, -inf elsewhere."""
    column = torch.arange(columns.start, columns.stop, device=like.device)
    query = torch.arange(queries.start, queries.stop, device=like.device)[:, None]
    hidden = (column > query) | (column <= query - window)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _with_dummy_column(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One more key, whose logit differs by query: ``logit`` ``[B, Hq, m]`` before scaling. Its weight comes out as a channel.

    The logit is carried by two extra channels, high and low part, so that it keeps its precision in half precision.
    """
    head_dim = q.shape[3]
    high = logit.to(q.dtype)
    low = (logit - high.to(logit.dtype)).to(q.dtype)
    q = F.pad(q, (0, _PADDING))
    q[..., head_dim], q[..., head_dim + 1] = high, low
    k, v = F.pad(k, (0, _PADDING, 0, 1)), F.pad(v, (0, _PADDING, 0, 1))
    k[:, :, -1, head_dim : head_dim + 2] = 1
    v[:, :, -1, head_dim] = 1
    return q, k, v
