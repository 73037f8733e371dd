"""Decoding over keys and values in 4 bits, as ``triton_decode`` does it over native ones; read that first.

Codes are read as they are: the low and the high four bits of a byte are channels ``i`` and ``i + d/2``, so a tile is two tiles of
half the features, and every product is two products; nothing is interleaved. The newest tokens are native and near (this asks
for ``num_recent_tokens`` >= the ring that holds them): they get tiles of their own, behind the packed near ones. Window keys of
followers are native.
"""

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod.kernels import triton_launch
from pod.kernels.triton_decode import (
    _FREE,
    _LOG2E,
    ALL,
    FIRST,
    SECOND,
    boundary,
    combine,
    proximal_lse,
    splits,
    tiles,
)
from pod.modeling.shipped.decode import DecodeCall
from pod.modeling.shipped.packed import Packed


class Tile(NamedTuple):
    """Tokens per step of a program, query heads of a product, and how it is compiled."""

    BLOCK_N: int
    BLOCK_G: int
    num_warps: int
    num_stages: int


def tile(dtype: torch.dtype, head_dim: int, groups: int, part: int = ALL) -> Tile:
    """As in ``triton_decode``; a step is fewer bytes here, and more arithmetic. Distant tokens alone get a stage more where
    one fewer would spill (head_dim 128 on sm_90)."""
    block_g = max(16, triton.next_power_of_2(groups))
    if dtype == torch.float32:
        return Tile(32, block_g, 4, 1)
    return Tile(64 if head_dim <= 128 else 32, block_g, 4, 3 if part == SECOND and head_dim > 64 else 2)


@triton.jit
def two_products(q_low, q_high, k_low, k_high):
    """``[G, N]`` products in fp32 of queries and keys that come in halves."""
    out = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    return tl.dot(q_high, tl.trans(k_high), out, input_precision="ieee")


@triton.jit
def attend_halves(logits, v_low, v_high, peak, total, low, high):
    """Take a tile of tokens with base-2 logits ``[G, N]`` and values in halves ``[N, d/2]`` into the softmax."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - reference[:, None])
    shrink = tl.exp2(peak - reference)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v_low.dtype)
    low = tl.dot(weights, v_low, low * shrink[:, None], input_precision="ieee")
    high = tl.dot(weights, v_high, high * shrink[:, None], input_precision="ieee")
    return new_peak, total, low, high


@triton.jit
def packed_keys(codes, zero, scale, token, inside, dtype, HALF: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Halves ``[N, d/2]`` of keys at ``token`` ``[N, 1]``: one zero and scale per channel and ``GROUP_SIZE`` tokens."""
    features = tl.arange(0, HALF)[None, :]
    numbers = tl.load(codes + token * HALF + features, mask=inside, other=0, eviction_policy="evict_first")
    group = token // GROUP_SIZE * (2 * HALF) + features
    low_scale = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    low_zero = tl.load(zero + group, mask=inside, other=0.0).to(tl.float32)
    high_scale = tl.load(scale + group + HALF, mask=inside, other=0.0).to(tl.float32)
    high_zero = tl.load(zero + group + HALF, mask=inside, other=0.0).to(tl.float32)
    low = (numbers & 15).to(tl.float32) * low_scale + low_zero
    high = (numbers >> 4).to(tl.float32) * high_scale + high_zero
    return low.to(dtype), high.to(dtype)


@triton.jit
def scaled(numbers, zero, scale, BLOCK_N: tl.constexpr, HALF: tl.constexpr, COUNT: tl.constexpr):
    """Codes ``[N, d/2]`` with zeros and scales ``[N, COUNT]`` of neighbouring channels."""
    grouped = tl.reshape(numbers.to(tl.float32), [BLOCK_N, COUNT, HALF // COUNT])
    return tl.reshape(grouped * scale[:, :, None] + zero[:, :, None], [BLOCK_N, HALF])


@triton.jit
def packed_values(
    codes, zero, scale, token, inside, dtype,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Halves ``[N, d/2]`` of values at ``token`` ``[N, 1]``: one zero and scale per token and ``GROUP_SIZE`` channels."""
    PER_TOKEN: tl.constexpr = 2 * HALF // GROUP_SIZE
    COUNT: tl.constexpr = (PER_TOKEN + 1) // 2
    NEXT: tl.constexpr = PER_TOKEN - COUNT  # one group for all channels: both halves share it
    numbers = tl.load(
        codes + token * HALF + tl.arange(0, HALF)[None, :],
        mask=inside,
        other=0,
        eviction_policy="evict_first",
    )
    group = token * PER_TOKEN + tl.arange(0, COUNT)[None, :]
    low_scale = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    low_zero = tl.load(zero + group, mask=inside, other=0.0).to(tl.float32)
    high_scale = tl.load(scale + group + NEXT, mask=inside, other=0.0).to(tl.float32)
    high_zero = tl.load(zero + group + NEXT, mask=inside, other=0.0).to(tl.float32)
    low = scaled(numbers & 15, low_zero, low_scale, BLOCK_N, HALF, COUNT)
    high = scaled(numbers >> 4, high_zero, high_scale, BLOCK_N, HALF, COUNT)
    return low.to(dtype), high.to(dtype)


@triton.jit
def native(start, row, inside, HALF: tl.constexpr):
    """Halves ``[N, d/2]`` of native keys or values whose rows begin ``row`` ``[N, 1]`` behind ``start``."""
    where = start + row + tl.arange(0, HALF)[None, :]
    low = tl.load(where, mask=inside, other=0.0, eviction_policy="evict_first")
    return low, tl.load(where + HALF, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=_FREE)
def packed_decode_kernel(
    q, key_codes, key_zero, key_scale, key_tail, window,
    value_codes, value_zero, value_scale, value_tail, packed_lengths,
    lengths, table, logits, distant_lse, part_out, part_lse,
    leads, followers, programs, n_s, n_r, room, capacity, ring, scale, tau,
    q_batch, q_head, w_batch, w_head, w_row,
    PART: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One split of one head of one row; see ``triton_decode.decode_kernel``."""
    pid = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    tail = length - tl.load(packed_lengths + row).to(tl.int32)
    per_lead, per_follower = splits(length, tail, leads, followers, programs, n_s, n_r, PART, BLOCK_N)
    if pid >= leads * per_lead + followers * per_follower:
        return
    is_lead = pid < leads * per_lead
    behind = pid - leads * per_lead
    index = tl.where(is_lead, pid // tl.maximum(per_lead, 1), leads + behind // tl.maximum(per_follower, 1))
    head = tl.load(table + index).to(tl.int64)
    is_followed = tl.load(table + leads + followers + index) != 0
    count = tl.where(is_lead, per_lead, per_follower)
    split = tl.where(is_lead, pid, behind) % count
    far_tiles, near_tiles = tiles(length, tail, n_s, n_r, is_lead, PART, BLOCK_N)
    near_cost = tl.where(is_lead, 1, 2)
    first = boundary(split, count, far_tiles, near_tiles, near_cost)
    last = boundary(split + 1, count, far_tiles, near_tiles, near_cost)

    heads = tl.arange(0, BLOCK_G)
    features = tl.arange(0, HALF)
    tokens = tl.arange(0, BLOCK_N)
    near = tl.minimum(length, n_s + n_r)
    far = length - near
    real = heads < GROUPS
    stored_head = (row * (leads + followers) + head) * GROUPS
    lse_row = row * programs * GROUPS
    skips = heads >= BLOCK_G
    if PART == 2:
        first_per_lead, first_per_follower = splits(
            length, tail, leads, followers, programs, n_s, n_r,
            1, BLOCK_N,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        start = leads * first_per_lead + (index - leads) * first_per_follower
        near_lse = proximal_lse(part_lse + lse_row, start, first_per_follower, GROUPS, BLOCK_G, 16)  # pyright: ignore[reportArgumentType]
        far_lse = tl.load(distant_lse + stored_head + heads, mask=real, other=float("-inf"))
        skips = 1.0 / (1.0 + tl.exp(far_lse - near_lse)) >= tau
        skips = skips | (heads >= GROUPS)
        last = tl.where(tl.min(skips.to(tl.int32), 0) == 1, first, last)

    where_q = q + row * q_batch + (head * GROUPS + heads)[:, None] * q_head + features[None, :]
    q_low = tl.load(where_q, mask=real[:, None], other=0.0)
    q_high = tl.load(where_q + HALF, mask=real[:, None], other=0.0)
    dtype = q.dtype.element_ty
    lead_head = row * leads + index
    key_codes += lead_head * capacity * HALF
    key_zero += lead_head * (capacity // KEY_GROUP) * (2 * HALF)
    key_scale += lead_head * (capacity // KEY_GROUP) * (2 * HALF)
    key_tail += lead_head * ring * (2 * HALF)
    window += row * w_batch + (index - leads).to(tl.int64) * w_head
    value_head = row * (leads + followers) + head
    value_codes += value_head * capacity * HALF
    value_zero += value_head * capacity * (2 * HALF // VALUE_GROUP)
    value_scale += value_head * capacity * (2 * HALF // VALUE_GROUP)
    value_tail += value_head * ring * (2 * HALF)
    logits += stored_head * room
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    low = tl.zeros([BLOCK_G, HALF], tl.float32)
    high = tl.zeros([BLOCK_G, HALF], tl.float32)

    far_last = tl.minimum(last, far_tiles)
    if is_lead:
        if PART != 2:
            written = tl.where(is_followed, n_s + far, 0)
            for step in range(first, far_last):
                token = n_s + step * BLOCK_N + tokens
                inside = token < n_s + far
                token_64, rows = token.to(tl.int64)[:, None], inside[:, None]
                k_low, k_high = packed_keys(
                    key_codes, key_zero, key_scale, token_64, rows, dtype, HALF, KEY_GROUP
                )
                products = two_products(q_low, q_high, k_low, k_high) * scale
                place = logits + heads[:, None] * room + token[None, :]
                tl.store(place, products, mask=real[:, None] & (token < written)[None, :])
                products = tl.where(inside[None, :], products * _LOG2E, float("-inf"))
                v_low, v_high = packed_values(
                    value_codes, value_zero, value_scale, token_64, rows, dtype, BLOCK_N, HALF, VALUE_GROUP
                )
                peak, total, low, high = attend_halves(products, v_low, v_high, peak, total, low, high)
            where = part_lse + 2 * tl.num_programs(1) * programs * GROUPS + lse_row + pid * GROUPS + heads
            tl.store(where, peak + tl.log2(total), mask=real)
    else:
        if PART != 1:
            for step in range(first, far_last):
                token = n_s + step * BLOCK_N + tokens
                inside = token < n_s + far
                token_64, rows = token.to(tl.int64)[:, None], inside[:, None]
                products = tl.load(
                    logits + heads[:, None] * room + token[None, :],
                    mask=real[:, None],
                    other=0.0,
                )
                seen = inside[None, :]
                if PART == 2:
                    seen = seen & (skips[:, None] == 0)
                products = tl.where(seen, products * _LOG2E, float("-inf"))
                v_low, v_high = packed_values(
                    value_codes, value_zero, value_scale, token_64, rows, dtype, BLOCK_N, HALF, VALUE_GROUP
                )
                peak, total, low, high = attend_halves(products, v_low, v_high, peak, total, low, high)

    if PART != 2:
        packed_near = near - tail
        tail_first = far_tiles + tl.cdiv(packed_near, BLOCK_N)
        for step in range(tl.maximum(first, far_tiles), tl.minimum(last, tail_first)):
            place = (step - far_tiles) * BLOCK_N + tokens
            inside = place < packed_near
            token = tl.where(place < n_s, place, place + far)
            token_64, rows = token.to(tl.int64)[:, None], inside[:, None]
            if is_lead:
                k_low, k_high = packed_keys(
                    key_codes, key_zero, key_scale, token_64, rows, dtype, HALF, KEY_GROUP
                )
            else:
                slot = tl.where(token < n_s + n_r, token, n_s + (token - n_s) % n_r)
                k_low, k_high = native(window, slot.to(tl.int64)[:, None] * w_row, rows, HALF)
            products = two_products(q_low, q_high, k_low, k_high) * (scale * _LOG2E)
            products = tl.where(inside[None, :], products, float("-inf"))
            v_low, v_high = packed_values(
                value_codes, value_zero, value_scale, token_64, rows, dtype, BLOCK_N, HALF, VALUE_GROUP
            )
            peak, total, low, high = attend_halves(products, v_low, v_high, peak, total, low, high)
        if is_lead:
            newest_keys, newest_row = key_tail, 2 * HALF
        else:
            newest_keys, newest_row = window, w_row
        for step in range(tl.maximum(first, tail_first), last):
            token = length - tail + (step - tail_first) * BLOCK_N + tokens
            inside = token < length
            rows = inside[:, None]
            slot = tl.where(token < n_s + n_r, token, n_s + (token - n_s) % n_r)
            slot = tl.where(is_lead, token % ring, slot)
            k_low, k_high = native(newest_keys, slot.to(tl.int64)[:, None] * newest_row, rows, HALF)
            products = two_products(q_low, q_high, k_low, k_high) * (scale * _LOG2E)
            products = tl.where(inside[None, :], products, float("-inf"))
            v_low, v_high = native(value_tail, (token % ring).to(tl.int64)[:, None] * (2 * HALF), rows, HALF)
            peak, total, low, high = attend_halves(products, v_low, v_high, peak, total, low, high)

    part = (2 if PART == 2 else 1) - 1
    offset = (part * tl.num_programs(1) + row) * programs + pid
    tl.store(part_lse + offset * GROUPS + heads, peak + tl.log2(total), mask=real)
    share = 1.0 / tl.where(total == 0, 1.0, total)
    place = part_out + (offset * GROUPS + heads)[:, None] * (2 * HALF) + features[None, :]
    tl.store(place, low * share[:, None], mask=real[:, None])
    tl.store(place + HALF, high * share[:, None], mask=real[:, None])


# -- launch -------------------------------------------------------------------------------------------------------


def unsupported(call: DecodeCall) -> str | None:
    """Why the kernel cannot read these packed stores; None when it can."""
    keys, values = call.keys, call.values
    if not isinstance(values, Packed) or (keys is not None and not isinstance(keys, Packed)):
        return "packed keys with native values or the other way round"
    stores = [values] if keys is None else [keys, values]
    head_dim = values.shape[3]
    if head_dim < 32 or head_dim & (head_dim - 1):
        return f"head_dim {head_dim} of packed stores (32, 64, 128 or 256)"
    if any(x.group_size & (x.group_size - 1) for x in stores):
        return "a group_size of packed stores that is no power of two"
    if values.per_channel or (keys is not None and not keys.per_channel):
        return "packed stores other than keys per channel and values per token"
    if keys is not None and keys.tail.shape[2] != values.tail.shape[2]:
        return "keys and values with different numbers of native slots"
    if call.num_recent_tokens < values.tail.shape[2]:
        return f"num_recent_tokens {call.num_recent_tokens} below the {values.tail.shape[2]} native slots of packed stores"
    if not all(y.is_contiguous() for x in stores for y in (x.codes, x.zero, x.scale, x.tail)):
        return "packed stores that are not contiguous"
    return None


def decode(call: DecodeCall) -> None:
    """See ``pod.kernels.decode.pod_decode``; keys and values of a row have one ``packed_lengths``."""
    sizes = call.q.dtype, call.q.shape[2], call.q.shape[1] // call.roles.num_heads
    parts = (ALL,) if call.tau is None or not call.roles.followers else (FIRST, SECOND)
    for part in parts:
        _launch(call, part, tile(*sizes, part))
    combine(call, len(parts) == 2, tile(*sizes).BLOCK_N, _packed(call.values).packed_lengths)


def _packed(x) -> Packed:
    assert isinstance(x, Packed)
    return x


def _launch(call: DecodeCall, part: int, shape: Tile) -> None:
    batch, heads, head_dim = call.q.shape
    values = _packed(call.values)
    keys = values if call.keys is None else _packed(call.keys)
    window = call.q.unsqueeze(2) if call.window_keys is None else call.window_keys
    assert isinstance(window, Tensor)
    buffers, roles = call.buffers, call.roles
    triton_launch.run(
        packed_decode_kernel, (buffers.programs, batch), call.q,
        call.q, keys.codes, keys.zero, keys.scale, keys.tail, window,
        values.codes, values.zero, values.scale, values.tail, values.packed_lengths,
        call.lengths, roles.table, buffers.logits, buffers.distant_lse, buffers.partial_out, buffers.partial_lse,
        len(roles.leads), len(roles.followers), buffers.programs, call.num_sink_tokens, call.num_recent_tokens,
        buffers.logits.stride(2), values.shape[2], values.tail.shape[2], call.scale,
        2.0 if call.tau is None else call.tau, *call.q.stride()[:2], *window.stride()[:3],
        PART=part, GROUPS=heads // roles.num_heads, HALF=head_dim // 2,
        KEY_GROUP=keys.group_size, VALUE_GROUP=min(values.group_size, head_dim), **shape._asdict(),
    )  # fmt: skip
