"""Where our Triton kernels can run, and one launch."""

import contextlib
import os
import shutil

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor


def unsupported(x: Tensor) -> str | None:
    """Why kernels cannot run on tensors like ``x``; None when they can."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} (float32, float16 or bfloat16)"
    if triton.knobs.runtime.interpret:  # pyright: ignore[reportAttributeAccessIssue]
        # its tl.dot multiplies the bit patterns of bfloat16 (Triton 3.6 to 3.9)
        return "bfloat16 under TRITON_INTERPRET=1" if x.dtype == torch.bfloat16 else None
    if not x.is_cuda:
        return f"device {x.device.type} (CUDA, or TRITON_INTERPRET=1)"
    if torch.version.hip is not None or torch.cuda.get_device_capability(x.device) < (8, 0):
        return "this GPU (NVIDIA, compute capability 8.0 or newer)"
    if not (os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")):
        return "no C compiler, which Triton starts its kernels with (install gcc or set CC)"
    return None


def run(kernel, grid: tuple[int, ...], on: Tensor, *arguments, **options) -> None:
    """On the device of a tensor; waits for nothing."""
    with torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext():
        kernel[grid](*arguments, **options)
