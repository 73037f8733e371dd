"""Where our Triton kernels can run."""

import os
import shutil

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What our Triton kernels compute in."""


def no_triton(q: Tensor, interpreted: bool) -> str | None:
    """Why Triton kernels cannot run where ``q`` is; None when they can.

    Args:
        interpreted: whether they run in Triton's interpreter.
    """
    if interpreted:
        # its tl.dot multiplies the bit patterns of bfloat16 (Triton 3.6 to 3.9)
        return "bfloat16 under TRITON_INTERPRET=1" if q.dtype == torch.bfloat16 else None
    if not q.is_cuda:
        return f"device {q.device.type} (CUDA, or TRITON_INTERPRET=1)"
    if torch.version.hip is not None or torch.cuda.get_device_capability(q.device) < (8, 0):
        return "this GPU (NVIDIA, compute capability 8.0 or newer)"
    if not (os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")):
        return "no C compiler, which Triton starts its kernels with (install gcc or set CC)"
    return None
