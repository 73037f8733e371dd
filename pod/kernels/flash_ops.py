"""PyTorch's own flash attention ops, forward and backward with log-sum-exp.

On the CPU they work on one ``[1, h, n, d]`` slice. On CUDA they take packed sequences; which kernels run there is PyTorch's
choice: its FlashAttention 2, or what ``torch.nn.attention.activate_flash_attention_impl`` put in its place.
"""

import torch
from torch import Tensor

from pod.kernels.flash_varlen import Call, Ops

_aten = torch.ops.aten


def unsupported(q: Tensor) -> str | None:
    """Why these ops cannot run on such queries; None when they can."""
    if q.device.type == "cpu":
        return None if q.dtype.is_floating_point else f"dtype {q.dtype} is not floating point"
    return unsupported_cuda(q)


def unsupported_cuda(q: Tensor) -> str | None:
    """Why no flash attention library's CUDA kernels can run on such queries."""
    if q.device.type != "cuda":
        return f"device {q.device.type} has no flash op"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {q.dtype} on CUDA (needs float16 or bfloat16)"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]} on CUDA (a multiple of 8, at most 256)"
    major, minor = torch.cuda.get_device_capability(q.device)
    if major < 8:
        return f"compute capability {major}.{minor} (needs 8.0)"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, part, scale: float) -> tuple[Tensor, Tensor]:
    """On the CPU, ``[1, Hq, r, d]`` on ``[1, H, c, d]`` to the output and its log-sum-exp ``[1, Hq, r]``."""
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, part.causal, attn_mask=part.mask, scale=scale
    )


def backward(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, out: Tensor, lse: Tensor, part, scale: float):
    """On the CPU, gradients of q, k, v of one part, given the *merged* output and log-sum-exp of its rows."""
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


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    arguments, options = _packed_arguments(call)
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *arguments, False, **options)
    return out, lse


def _packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    arguments, options = _packed_arguments(call)
    # The state of dropout, which is off.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return _aten._flash_attention_backward(grad, q, k, v, out, lse, *arguments, state, unused, **options)


def _packed_arguments(call: Call) -> tuple[tuple, dict]:
    """Bounds, longest sequences, no dropout, whether causal; and scale and window. A window is causal by its right side of 0."""
    options: dict = {"scale": call.scale}
    if call.window is not None:
        options |= {"window_size_left": call.window - 1, "window_size_right": 0}
    return (*call.bounds, *call.longest, 0.0, call.causal and call.window is None), options


PACKED = Ops(_packed_forward, _packed_backward)
"""PyTorch's ops on packed sequences, on CUDA."""
