"""The operations of ``pod.kernels.fused`` as Triton kernels, one launch each.

Arithmetic is fp32. Intermediate results that the modules round to their dtype are rounded here as well.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod.kernels import triton_launch
from pod.kernels.fused import HeadNorms, NewToken, Operations
from pod.modeling.model.decode import role_table
from pod.modeling.model.sharing import Roles

GATE = {"BLOCK": 512, "num_warps": 2}  # 16 bytes of 16-bit numbers per thread


@triton.jit
def add_norm_kernel(
    x, delta, weight, total, out, eps, WITH_DELTA: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """``add_norm`` of one row."""
    dtype = out.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    here = tl.program_id(0).to(tl.int64) * SIZE + columns
    wide = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if WITH_DELTA:
        summed = (wide + tl.load(delta + here, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + here, summed, mask=inside)
        wide = summed.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, (weights * normed).to(dtype), mask=inside)


@triton.jit
def ring_slot(position, first, slots):
    """The slot of a position, see ``NewToken``."""
    return tl.where(position < slots, position, first + (position - first) % (slots - first))


@triton.jit
def rotated(
    head, weight, cos, sin, eps, features, inside,
    WITH_NORM: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Both halves of a head's features, with norm and rotation, in the dtype of ``head``."""
    dtype = head.dtype.element_ty
    low = tl.load(head + features, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(head + HEAD_DIM // 2 + features, mask=inside, other=0.0).to(tl.float32)
    if WITH_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / HEAD_DIM + eps)
        low_weight = tl.load(weight + features, mask=inside, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + HEAD_DIM // 2 + features, mask=inside, other=0.0).to(tl.float32)
        low = (low_weight * (low * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        high = (high_weight * (high * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    cosine = tl.load(cos + features, mask=inside, other=0.0)
    sine = tl.load(sin + features, mask=inside, other=0.0)
    return (low * cosine - high * sine).to(dtype), (high * cosine + low * sine).to(dtype)


@triton.jit(do_not_specialize=["leads", "followers", "windows"])
def rotate_kernel(
    q, k, v, q_weight, k_weight, cos, sin, past, table, keys, window, values, near_keys, near_values, out,
    leads, followers, windows, key_slots, window_sinks, window_slots, value_slots, eps,
    k_batch, k_head, k_row, w_batch, w_head, w_row, v_batch, v_head, v_row, n_batch, n_head, n_row,
    WITH_NORM: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``rotate_and_store`` of one head of one row; the grid is (Hq + 2·H, B).

    The first programs of a row take heads of queries, the next ones heads of keys, the last ones heads of
    values. Keys and values are in the order of ``table``, which is ``role_table``.
    """
    kv_heads = leads + followers + windows
    index = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    features = tl.arange(0, BLOCK)
    inside = features < HEAD_DIM // 2
    position = tl.load(past + row).to(tl.int64)
    cos += row * (HEAD_DIM // 2)
    sin += row * (HEAD_DIM // 2)
    if index < kv_heads * GROUPS:
        place = (row * kv_heads * GROUPS + index) * HEAD_DIM
        low, high = rotated(q + place, q_weight, cos, sin, eps, features, inside, WITH_NORM, HEAD_DIM)
        target = out + place
    elif index < kv_heads * (GROUPS + 1):
        role = (index - kv_heads * GROUPS).to(tl.int64)
        source = k + (row * kv_heads + tl.load(table + role)) * HEAD_DIM
        low, high = rotated(source, k_weight, cos, sin, eps, features, inside, WITH_NORM, HEAD_DIM)
        if role < leads:
            target = keys + row * k_batch + role * k_head + ring_slot(position, 0, key_slots) * k_row
        else:
            slot = ring_slot(position, window_sinks, window_slots)
            target = window + row * w_batch + (role - leads) * w_head + slot * w_row
            if role >= leads + followers:
                target = near_keys + row * n_batch + (role - leads - followers) * n_head + slot * n_row
    else:
        role = (index - kv_heads * (GROUPS + 1)).to(tl.int64)
        held = tl.load(table + 2 * kv_heads + role).to(tl.int64)
        source = v + (row * kv_heads + tl.load(table + role)) * HEAD_DIM
        low = tl.load(source + features, mask=inside, other=0.0)
        high = tl.load(source + HEAD_DIM // 2 + features, mask=inside, other=0.0)
        target = values + row * v_batch + held * v_head + ring_slot(position, 0, value_slots) * v_row
        if role >= leads + followers:
            slot = ring_slot(position, window_sinks, window_slots)
            target = near_values + row * n_batch + held * n_head + slot * n_row
    tl.store(target + features, low, mask=inside)
    tl.store(target + HEAD_DIM // 2 + features, high, mask=inside)


@triton.jit
def gate_kernel(gate, up, out, numbers, BLOCK: tl.constexpr):
    """Compute ``silu(gate) · up``."""
    dtype = out.dtype.element_ty
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < numbers
    x = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    y = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, (x * y).to(dtype), mask=inside)


# -- launch --------------------------------------------------------------------------------------------------


def _add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x)
    size = x.shape[-1]
    arguments = x, x if delta is None else delta, weight, total, out, eps
    options = norm_options(delta is not None, size)
    triton_launch.run(add_norm_kernel, (x.numel() // size,), x, *arguments, **options)
    return total, out


def norm_options(with_delta: bool, size: int) -> dict[str, int | bool]:
    """Constants and options to compile ``add_norm_kernel`` with, for rows of ``size`` numbers."""
    block = triton.next_power_of_2(size)
    warps = min(max(block // 256, 1), 16)  # 8 numbers per thread: 16 bytes of 16-bit ones
    return {"WITH_DELTA": with_delta, "SIZE": size, "BLOCK": block, "num_warps": warps}


def _rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor, ...],
    norms: HeadNorms | None,
    roles: Roles,
    token: NewToken,
) -> Tensor:
    q = q.contiguous()
    k = k.contiguous()
    v = v.contiguous()
    cos = tables[0].contiguous()
    sin = tables[1].contiguous()
    (batch, heads, head_dim), out = q.shape, torch.empty_like(q)
    nothing = q.unsqueeze(2)
    near_keys, near_values = (nothing, nothing) if token.near is None else token.near
    assert near_keys.stride() == near_values.stride(), "buffers that a layer made alike"
    keys = nothing if token.keys is None else token.keys
    window = nothing if token.window_keys is None else token.window_keys
    values = nothing if token.values is None else token.values
    slots = (near_keys if token.window_keys is None else window).shape[2]
    q_weight, k_weight, eps = (q, k, 0.0) if norms is None else norms
    triton_launch.run(
        rotate_kernel, (heads + 2 * k.shape[1], batch), q,
        q, k, v, q_weight, k_weight, cos, sin, token.past, role_table(roles, q.device),
        keys, window, values, near_keys, near_values, out,
        len(roles.leads), len(roles.followers), len(roles.windows),
        keys.shape[2], token.num_sink_tokens, slots, values.shape[2], eps,
        *(stride for x in (keys, window, values, near_keys) for stride in x.stride()[:3]),
        **rotate_options(norms is not None, heads // k.shape[1], head_dim),
    )  # fmt: skip
    return out


def rotate_options(with_norm: bool, groups: int, head_dim: int) -> dict[str, int | bool]:
    """Constants and options to compile ``rotate_kernel`` with."""
    sizes = {"GROUPS": groups, "HEAD_DIM": head_dim, "BLOCK": triton.next_power_of_2(head_dim // 2)}
    return {"WITH_NORM": with_norm, **sizes, "num_warps": 1}


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.contiguous()
    up = up.contiguous()
    out = torch.empty_like(gate)
    numbers = gate.numel()
    grid = (triton.cdiv(numbers, GATE["BLOCK"]),)
    triton_launch.run(gate_kernel, grid, gate, gate, up, out, numbers, **GATE)
    return out


OPERATIONS = Operations(_add_norm, _rotate_and_store, _gate, triton_launch.unsupported)
