"""PyTorch's own flash attention ops, forward and backward with log-sum-exp, on one ``[1, h, n, d]`` slice."""

import torch
from torch import Tensor

_aten = torch.ops.aten


def unsupported(q: Tensor) -> str | None:
    """Why these ops cannot run on such queries; None when they can."""
    if q.device.type == "cpu":
        return None if q.dtype.is_floating_point else f"dtype {q.dtype} is not floating point"
    if q.device.type != "cuda":
        return f"device {q.device.type} has no flash op"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {q.dtype} on CUDA (needs float16 or bfloat16)"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]} on CUDA (a multiple of 8, at most 256)"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, part, scale: float) -> tuple[Tensor, Tensor]:
    """``[1, Hq, r, d]`` on ``[1, H, c, d]`` to the output and its log-sum-exp ``[1, Hq, r]``."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, part.causal, attn_mask=part.mask, scale=scale
        )
    tokens = [x[0].transpose(0, 1) for x in (q, k, v)]
    bounds, options = _varlen(q, k, part, scale)
    out, lse, *_ = _aten._flash_attention_forward(*tokens, *bounds, 0.0, part.causal, False, **options)
    return out.transpose(0, 1)[None], lse[None]


def backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, part, scale: float):
    """Gradients of q, k, v of one part, given the *merged* output and log-sum-exp of its rows."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            lse.contiguous(),
            0.0,
            part.causal,
            attn_mask=part.mask,
            scale=scale,
        )
    grad, q_t, k_t, v_t, out = (x[0].transpose(0, 1) for x in (grad, q, k, v, out))
    bounds, options = _varlen(q, k, part, scale)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = _aten._flash_attention_backward(
        grad.contiguous(),
        q_t,
        k_t,
        v_t,
        out,
        lse[0].contiguous(),
        *bounds,
        0.0,
        part.causal,
        state,
        unused,
        **options,
    )
    return tuple(x.transpose(0, 1)[None] for x in grads)


def _varlen(q: Tensor, k: Tensor, part, scale: float) -> tuple[tuple, dict]:
    """Sequence bounds and options of the CUDA op for one document; its causal mask is bottom-right aligned."""
    rows, columns = q.shape[2], k.shape[2]
    bounds = [torch.tensor([0, size], dtype=torch.int32, device=q.device) for size in (rows, columns)]
    options = {"scale": scale}
    if part.window is not None:
        options |= {"window_size_left": part.window - 1, "window_size_right": 0}
    return (*bounds, rows, columns), options
