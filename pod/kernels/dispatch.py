"""Choice of a backend, shared by the operation tables: an explicit request never falls back, ``auto`` takes the first that runs."""

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What our Triton kernels compute in."""

Entry = TypeVar("Entry", bound=Any)
"""A backend with ``unsupported``: why it cannot run on given queries (or a given call), None = it can."""


def choose(
    what: str, table: Mapping[str, Entry], order: Sequence[str], q: Tensor, backend: str, call: Any = None
) -> Entry:
    """The entry of ``table`` that will run on ``q``.

    Args:
        what: name of the operations in error messages, such as "attention".
        order: names that ``auto`` tries, fastest first; names that the table lacks are skipped.
        call: what backends are asked about where it is more than the queries.

    Raises:
        ValueError: an unknown backend, one that cannot run, or nothing that ``auto`` could take.
    """
    asked = q if call is None else call
    if backend == "auto":
        for name in order:
            if name in table and table[name].unsupported(asked) is None:
                return table[name]
        raise ValueError(f"no {what} backend runs on {q.dtype} on {q.device.type}")
    if backend not in table:
        raise ValueError(f"{what} backend {backend!r} is unknown; choose auto or one of {', '.join(table)}")
    reason = table[backend].unsupported(asked)
    if reason:
        raise ValueError(f"{what} backend {backend!r} cannot run: {reason}; choose auto or another backend")
    return table[backend]


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
