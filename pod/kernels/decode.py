"""One new token per row: dense heads and heads that follow, in one call (paper §2.2, METHODS.md §1 fact 3).

A lead writes the logits of its distant tokens once; the later layers of its block read these numbers (4 bytes per query
head and token) instead of any distant key. Validation and dispatch; an explicit backend that cannot run raises.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pod.kernels import decode_grouped, decode_reference, dispatch
from pod.kernels.decode_types import (
    SPARE_COLUMNS,
    Call,
    DecodeBuffers,
    Packed,
    Roles,
    Stored,
    make_buffers,
    make_roles,
)

__all__ = ["DecodeBuffers", "Packed", "Roles", "make_buffers", "make_roles", "pod_decode"]


class Entry(NamedTuple):
    """A backend: its operation, and why it cannot run a call (None = it can)."""

    decode: Callable[[Call], None]
    unsupported: Callable[[Call], str | None]


def _triton():
    """The Triton kernels; imported when first asked for, because a CPU installation has no Triton."""
    return importlib.import_module("pod.kernels.triton_decode")


def _triton_unsupported(call: Call) -> str | None:
    try:
        return _triton().unsupported(call)
    except ImportError as error:
        return f"Triton cannot be imported ({error})"


BACKENDS: dict[str, Entry] = {
    "reference": Entry(decode_reference.decode, decode_reference.unsupported),
    "grouped": Entry(decode_grouped.decode, decode_grouped.unsupported),
    "triton": Entry(lambda call: _triton().decode(call), _triton_unsupported),
}
AUTO_ORDER: dict[str, list[str]] = {"cuda": ["triton", "grouped"]}
"""What ``auto`` tries on a device type, fastest first; devices not named use ``grouped``."""


def choose(call: Call, backend: str = "auto") -> Entry:
    """The backend that will run; ``ValueError`` when the asked one cannot."""
    order = AUTO_ORDER.get(call.q.device.type, ["grouped"])
    return dispatch.choose("decode", BACKENDS, order, call.q, backend, call)


@torch.no_grad()
def pod_decode(
    q: Tensor,
    keys: Stored | None,
    window_keys: Tensor | None,
    values: Stored,
    lengths: Tensor,
    roles: Roles,
    buffers: DecodeBuffers,
    num_sink_tokens: int,
    num_recent_tokens: int,
    scale: float | None = None,
    tau: float | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the newest token of every row.

    Heads that lead attend to all tokens with their own keys. Heads that follow take the logits of *distant* tokens
    ``n_s <= j < length - n_r`` from ``buffers.logits``, which the lead of their block filled in this step, and the others
    from ``window_keys``; one softmax over both, own values. Call the layers of a model in order, with the same
    ``buffers``, backend and lengths.

    Args:
        q: ``[B, Hq, d]`` rotated queries, ``Hq = G·H``.
        keys: ``[B, leads, C, d]``, slot = position; None when no head leads. May be ``Packed``.
        window_keys: ``[B, followers, n_s + n_r, d]``: token ``p`` at slot ``p`` while ``p < n_s + n_r``, later at
            ``n_s + (p - n_s) mod n_r``. None when no head follows. Never ``Packed``.
        values: ``[B, H, C, d]``. May be ``Packed``, with the ``packed_lengths`` of the keys.
        lengths: int32 or int64 ``[B]`` on the device of ``q``: tokens per row (at least 1), the new one, already stored,
            included. Slots behind a row's length may hold anything.
        roles, buffers: from ``make_roles`` and ``make_buffers``. Heads in ``roles.followed`` write ``buffers.logits`` and
            ``buffers.distant_lse``.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        tau: gate threshold (paper B.4), None = exact. A query head of a follower whose proximal tokens hold the share
            ``sigmoid(lse_P - lse_D) >= tau`` attends to these alone. Distant values are read only by KV heads with a query
            head that does not.
        out: ``[B, Hq, d]`` to write to.

    Returns:
        ``[B, Hq, d]`` in the dtype of ``q``.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run.
    """
    _check(q, keys, window_keys, values, lengths, roles, num_sink_tokens, num_recent_tokens)
    _check_buffers(q, values, roles, buffers, out)
    out = torch.empty_like(q) if out is None else out
    factor = float(q.shape[-1] ** -0.5) if scale is None else scale
    stores = keys, window_keys, values
    windows = num_sink_tokens, num_recent_tokens
    call = Call(q, *stores, lengths, roles, buffers, *windows, factor, tau, out)
    choose(call, backend).decode(call)
    return out


def _check(q, keys, window_keys, values, lengths, roles: Roles, n_s: int, n_r: int) -> None:
    if n_s < 0 or n_r < 1:
        raise ValueError(f"need n_s >= 0 and n_r >= 1, got {n_s} and {n_r}")
    if q.dim() != 3 or q.shape[1] % roles.num_heads or not q.dtype.is_floating_point:
        raise ValueError(
            f"q is {list(q.shape)} {q.dtype}, expected floats [B, Hq, d] with Hq a multiple of {roles.num_heads} KV heads"
        )
    if isinstance(window_keys, Packed):
        raise ValueError(
            "window_keys are packed; only keys and values may be: give the window in the model's dtype"
        )
    batch, _, head_dim = q.shape
    if lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths is {list(lengths.shape)} {lengths.dtype}, expected int32 or int64 [{batch}]"
        )
    capacity = values.shape[2] if len(values.shape) == 4 else 0
    for name, x, heads, slots in (
        ("keys", keys, len(roles.leads), capacity),
        ("window_keys", window_keys, len(roles.followers), n_s + n_r),
        ("values", values, roles.num_heads, capacity),
    ):
        if heads == 0:
            continue
        expected = batch, heads, slots, head_dim
        if x is None or tuple(x.shape) != expected:
            got = "None" if x is None else list(x.shape)
            raise ValueError(f"{name} is {got}, expected {list(expected)} for {roles.num_heads} KV heads")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; both must agree"
            )


def _check_buffers(
    q: Tensor, values: Stored, roles: Roles, buffers: DecodeBuffers, out: Tensor | None
) -> None:
    rows = q.shape[0], roles.num_heads, q.shape[1] // roles.num_heads
    got = [*buffers.logits.shape[:3], buffers.logits.shape[3] - SPARE_COLUMNS]
    if tuple(got[:3]) != rows or got[3] < values.shape[2] or buffers.partial_out.shape[4] != q.shape[2]:
        raise ValueError(
            f"buffers are for [B, H, G, C] = {got} and head_dim {buffers.partial_out.shape[4]}, needed are "
            f"{[*rows, values.shape[2]]} and {q.shape[2]}; make them with make_buffers"
        )
    if (
        buffers.logits.dtype != torch.promote_types(q.dtype, torch.float32)
        or buffers.logits.device != q.device
    ):
        raise ValueError(
            f"buffers are {buffers.logits.dtype} on {buffers.logits.device}, q is {q.dtype} on {q.device}; "
            "make them with make_buffers"
        )
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.device != q.device):
        raise ValueError(
            f"out is {list(out.shape)} {out.dtype}, expected {list(q.shape)} {q.dtype} on {q.device}"
        )
