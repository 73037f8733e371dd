"""The ``flash-attn`` packages on packed sequences: version 3 (``flash_attn_interface``, Hopper), else 2 (``flash_attn``, 2.7 or newer).

Their functions with log-sum-exp are private and have changed names of arguments, so calls are fitted to the signature found.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from pod.kernels import flash_ops, flash_varlen
from pod.kernels.flash_varlen import Call, Ops


def unsupported(q: Tensor) -> str | None:
    """Why the packages cannot run on such queries; None when one can."""
    reason = flash_ops.unsupported_cuda(q)
    if reason:
        return reason
    found = _ops(*torch.cuda.get_device_capability(q.device))
    return found if isinstance(found, str) else None


def ops_for(q: Tensor) -> Ops:
    """Forward and backward of the package that fits the device of ``q``."""
    found = _ops(*torch.cuda.get_device_capability(q.device))
    if isinstance(found, str):
        raise ValueError(f"flash-attn cannot run: {found}")
    return found


causal_attention, pod_attention, window_attention = flash_varlen.operations(ops_for)


@cache
def _ops(major: int, minor: int) -> Ops | str:
    """Version 3 where it runs and is installed, else version 2, else why neither does."""
    reasons = []
    if (major, minor) == (9, 0):  # its kernels are written for Hopper
        try:
            return version_3(importlib.import_module("flash_attn_interface"))
        except ImportError as error:
            reasons.append(f"flash_attn_interface ({error})")
    try:
        interface = importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError as error:
        return f"cannot import {' nor '.join([*reasons, f'flash_attn ({error})'])}; pip install flash-attn"
    if "window_size_left" not in _parameters(interface._flash_attn_varlen_forward):
        return "flash_attn is older than 2.7; pip install -U flash-attn"
    return version_2(interface)


def version_3(interface: ModuleType) -> Ops:
    """Ops of ``flash_attn_interface``."""
    return _ops_of(interface._flash_attn_forward, interface._flash_attn_backward)


def version_2(interface: ModuleType) -> Ops:
    """Ops of ``flash_attn.flash_attn_interface``."""
    options = {"dropout_p": 0.0}
    return _ops_of(interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward, **options)


def _ops_of(run_forward: Callable, run_backward: Callable, **options) -> Ops:
    def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _fitted(run_forward, q=q, k=k, v=v, **options, **_sequences(call))
        return out, lse

    def backward(grad, q, k, v, out, lse, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        tensors = {"dout": grad, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
        more = {"softcap": 0.0, "deterministic": torch.are_deterministic_algorithms_enabled(), **options}
        _fitted(run_backward, **tensors, dq=dq, dk=dk, dv=dv, **more, **_sequences(call))
        return dq, dk, dv

    return Ops(forward, backward)


def _sequences(call: Call) -> dict:
    """The call in the packages' words; their windows count the keys left of the query and are causal by a right side of 0."""
    left, right = (-1, -1) if call.window is None else (call.window - 1, 0)
    return {
        "cu_seqlens_q": call.bounds[0],
        "cu_seqlens_k": call.bounds[1],
        "max_seqlen_q": call.longest[0],
        "max_seqlen_k": call.longest[1],
        "softmax_scale": call.scale,
        "causal": call.causal and call.window is None,
        "window_size_left": left,
        "window_size_right": right,
    }


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    # A function made a custom op keeps its signature inside.
    return dict(inspect.signature(getattr(function, "_init_fn", function)).parameters)


def _fitted(function: Callable, **given):
    """Call with the names this version has: one window pair or two sides, ``causal`` or ``is_causal``; None for what else it asks."""
    parameters = _parameters(function)
    if "window_size" in parameters:
        given["window_size"] = given.pop("window_size_left"), given.pop("window_size_right")
    if "is_causal" in parameters:
        given["is_causal"] = given.pop("causal")
    missing = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in given]
    return function(**given, **dict.fromkeys(missing))
