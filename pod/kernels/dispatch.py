"""Where the kernels of this folder can run, and where documents begin and end."""

import os
import shutil

import torch
from torch import Tensor

from pod.modeling.shipped.attend import Call

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


def not_whole_sequences(call: Call) -> str | None:
    """Why kernels for whole causal sequences cannot run a call; None when they can."""
    see = call.visibility
    if not call.segments.is_fresh:
        return "queries behind a filled cache (whole sequences only)"
    if see.positions is not None or see.bias is not None:
        return "tokens with positions or a bias of their own"
    return None if see.causal else "tokens that all came before the queries"


def document_bounds(doc_ids: Tensor) -> tuple[Tensor, Tensor]:
    """First position and end of the document of every token, int32 ``[B or 1, n]``; padding (-1) starts at n and ends at 0.

    A document is a run of equal ids. So token ``i`` sees ``j <= i`` exactly if ``j >= start[i]``, and nothing if it is padding.
    """
    n = doc_ids.shape[1]
    index = torch.arange(n, device=doc_ids.device)
    change = doc_ids[:, 1:] != doc_ids[:, :-1]
    edge = torch.ones_like(doc_ids[:, :1], dtype=torch.bool)
    starts = torch.where(torch.cat([edge, change], 1), index, 0).cummax(1).values
    ends = torch.where(torch.cat([change, edge], 1), index + 1, n).flip(1).cummin(1).values.flip(1)
    padding = doc_ids < 0
    return starts.masked_fill(padding, n).int(), ends.masked_fill(padding, 0).int()
