"""Attention statistics the plain way, with the whole ``m x n`` matrix: what every other version is compared with."""

import torch
from torch import Tensor


def _logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled logits ``[B, Hq, m, n]``, hidden ones ``-inf``, in at least fp32."""
    m, n = q.shape[2], k.shape[2]
    compute = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(compute).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q.to(compute) @ keys.transpose(2, 3) * scale
    hidden = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(n - m + 1)
    return logits.masked_fill(hidden, float("-inf"))


def attention_column_sums(q: Tensor, k: Tensor, lse: Tensor | None, scale: float, squares: bool) -> Tensor:
    """See ``pod.kernels.statistics.attention_column_sums``."""
    logits = _logits(q, k, scale)
    weights = logits.softmax(-1) if lse is None else (logits - lse.to(logits.dtype)[..., None]).exp()
    return torch.stack([weights.sum(2), weights.square().sum(2)]) if squares else weights.sum(2)


def attention_rows(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """See ``pod.kernels.statistics.attention_rows``."""
    return _logits(q, k, scale).softmax(-1)
