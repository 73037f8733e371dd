"""The operations between the matrix products of a decoder layer, for one new token per row.

There are three: residual and norm (``add_norm``); head norms, rotation and storing of keys and values
(``rotate_and_store``); and the gate of the feed-forward part (``gate``). This file chooses their backend, and
has their plain form, which runs in any dtype. It computes the same as the modules of ``pod.modeling.model``,
and rounds in the same order.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.modeling.model import attend
from pod.modeling.model.attend import Tokens
from pod.modeling.model.decoder_layer import rms_norm
from pod.modeling.model.sharing import Roles


class HeadNorms(NamedTuple):
    """Norms of single heads (Qwen3): their weights ``[d]`` for queries and for keys, and their epsilon."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class NewToken(NamedTuple):
    """The tensors of a layer into which the new token of each row is written, and its position.

    All tensors are ``[B, h, slots, d]``. Token ``p`` goes to slot ``p`` if there are so many slots. Otherwise
    it goes to a ring, which is made of the slots from ``first`` on: to slot
    ``first + (p - first) mod (slots - first)``.

    Attributes:
        past: int64 ``[B]``, position of the new token.
        keys: keys of the leads; None if there are no leads. ``first`` is 0.
        window_keys: own keys of the followers; None if there are none. ``first`` is ``num_sink_tokens``.
        values: values of leads and followers; None if there are none. ``first`` is 0.
        num_sink_tokens: slots before the ring of ``window_keys`` and ``near``.
        near: keys and values of the heads that keep their windows; None if there are none. ``first`` is
            ``num_sink_tokens``.
    """

    past: Tensor
    keys: Tensor | None
    window_keys: Tensor | None
    values: Tensor | None
    num_sink_tokens: int
    near: Tokens | None = None


class Operations(NamedTuple):
    """The operations of a backend, with the arguments of the functions of these names in this file.

    Attributes:
        gate: ``silu(gate) · up`` of two tensors.
        unsupported: why the operations cannot run on tensors like a given one. None = they can.
    """

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate_and_store: Callable[..., Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]
    unsupported: Callable[[Tensor], str | None]


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x + delta`` (None = 0), and its root-mean-square norm times ``weight``.

    Shapes: ``weight`` ``[size]``, all others ``[…, size]``.
    """
    total = x if delta is None else x + delta
    return total, rms_norm(total, weight, eps)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor, ...],
    norms: HeadNorms | None,
    roles: Roles,
    token: NewToken,
) -> Tensor:
    """Norm and rotate the heads of ``q`` and ``k``, and write ``k`` and ``v`` to their slots.

    Args:
        q: ``[B, Hq, d]``.
        k: ``[B, H, d]``.
        v: ``[B, H, d]``.
        tables: cos and sin ``[B, d / 2]`` of the new positions, in the dtype of the computation (at least
            fp32).
        norms: norms of the heads; None = there are none.
        roles: roles of the KV heads.
        token: the tensors to write to.

    Returns:
        ``[B, Hq, d]``, the rotated queries.
    """
    if norms is not None:
        q = rms_norm(q, norms.q_weight, norms.eps)
        k = rms_norm(k, norms.k_weight, norms.eps)
    q = _rotate(q, *tables)
    k = _rotate(k, *tables)
    near_keys, near_values = token.near or (None, None)
    for target, x, heads, ring in (
        (token.values, v, roles.held, False),
        (token.keys, k, roles.leads, False),
        (token.window_keys, k, roles.followers, True),
        (near_keys, k, roles.windows, True),
        (near_values, v, roles.windows, True),
    ):
        if target is not None:
            x = x if len(heads) == x.shape[1] else torch.stack([x[:, head] for head in heads], dim=1)
            slot = _ring_slot(token, target.shape[2]) if ring else token.past % target.shape[2]
            target.transpose(1, 2)[torch.arange(len(slot), device=slot.device), slot] = x
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.to(cos.dtype).chunk(2, dim=-1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def _ring_slot(token: NewToken, slots: int) -> Tensor:
    """Slots ``[B]`` of the new tokens among the slots of a window, whose ring begins behind the sinks."""
    past, first = token.past, token.num_sink_tokens
    return torch.where(past < slots, past, first + (past - first) % (slots - first))


REFERENCE = Operations(
    add_norm, rotate_and_store, lambda gate, up: F.silu(gate) * up, unsupported=lambda x: None
)
ORDER = {"cuda": ["triton", "reference"]}
"""Backends that ``auto`` tries on a type of device, in this order. Other devices use the plain form."""


def choose(x: Tensor, backend: str = "auto") -> Operations:
    """The operations that will run on tensors like ``x``.

    Args:
        x: a tensor with the device and dtype of the step.
        backend: the decode implementation, ``auto`` or a name. For any name but ``triton``, whose
            implementation is written in torch, the plain form runs.

    Raises:
        ValueError: the named backend cannot run.
    """
    if backend not in ("auto", "triton") or (backend == "auto" and x.device.type not in ORDER):
        return REFERENCE
    table = {"triton": _triton(), "reference": REFERENCE}
    return attend.choose("decode step", table, ORDER.get(x.device.type, []), x, backend)


def _triton() -> Operations:
    """The Triton kernels, imported when first asked for, because a CPU installation has no Triton."""
    try:
        return importlib.import_module("pod.kernels.triton_fused").OPERATIONS
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
        return REFERENCE._replace(unsupported=lambda x: reason)
