"""cuDNN's attention where PyTorch offers it with a log-sum-exp: square causal calls on sequences of one length.

Those are the large ones: dense attention, the rows below ``n_s + n_r`` and the distant tokens, when every row of the batch is one
document. Windows, sinks and packed documents run on PyTorch's flash op, because cuDNN is given no window here and would plan
(compile) anew for every length of a document.
"""

import torch
from torch import Tensor

from pod.kernels import flash_ops, flash_varlen
from pod.kernels.flash_varlen import Call, Ops

_aten = torch.ops.aten
_lse_dims = 4
"""Dimensions of the log-sum-exp that cuDNN's forward returned last; a version of PyTorch has ``[B, Hq, n]`` or ``[B, Hq, n, 1]``,
and its backward wants the same."""


def unsupported(q: Tensor) -> str | None:
    """Why cuDNN cannot run on such queries; None when it can."""
    reason = flash_ops.unsupported_cuda(q)
    if reason:
        return reason
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    if not torch.backends.cuda.can_use_cudnn_attention(parameters):
        return f"PyTorch refuses cuDNN attention for head_dim {q.shape[-1]} in {q.dtype} on this device"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """See ``flash_varlen.Ops``."""
    global _lse_dims
    if not _serves(call):
        return flash_ops.PACKED.forward(q, k, v, call)
    heads_first = [_batched(x, call) for x in (q, k, v)]
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, True, False, scale=call.scale
    )
    _lse_dims = lse.dim()
    lse = lse.reshape(*out.shape[:3])
    return _flat(out), lse.transpose(0, 1).flatten(1)


def backward(grad, q, k, v, out, lse, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """See ``flash_varlen.Ops``."""
    if not _serves(call):
        return flash_ops.PACKED.backward(grad, q, k, v, out, lse, call)
    grad, q, k, v, out = (_batched(x, call) for x in (grad, q, k, v, out))
    lse = lse.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1).contiguous()
    lse = lse.unsqueeze(-1) if _lse_dims == 4 else lse
    state = torch.zeros((), dtype=torch.long, device=q.device)  # of dropout, which is off
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, state, state, None, None, None, *call.longest, 0.0, True, scale=call.scale
    )
    return _flat(grads[0]), _flat(grads[1]), _flat(grads[2])


OPS = Ops(forward, backward)
causal_attention, pod_attention, window_attention = flash_varlen.operations(lambda q: OPS)


def _serves(call: Call) -> bool:
    return call.causal and call.window is None and call.equal and call.longest[0] == call.longest[1]


def _batched(x: Tensor, call: Call) -> Tensor:
    """Packed ``[N·r, h, d]`` to ``[N, h, r, d]``, laid out as ``[N, r, h, d]``.

    PyTorch keeps cuDNN's plans by the strides of q, k and v alone: in this one layout for all, which a model's projections have,
    a plan made elsewhere in the process cannot have other strides for the output or its gradient.
    """
    return x.contiguous().unflatten(0, (-1, call.longest[0])).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)
