"""Decoding as Triton kernels, split-KV: one launch for heads of all roles, and one that merges the splits.

* **Work of a program.** The grid is fixed, as CUDA graphs need it: a number of programs for each row. On the
  device, they are shared out among the row's heads according to its length, so that they finish together. A
  tile of tokens costs 2 (keys and values), but 1 for a follower's distant tokens (values; logits are small).
  A program reads *far* tiles (distant tokens) first, then *near* ones (sinks and recent tokens), so that a
  lead knows the log-sum-exp of its distant tokens alone.
* **With a gate threshold**, the first launch leaves out the distant tokens of followers, and a second launch
  reads them. By then, its programs know which query heads skip distant tokens: if all heads of a group do, no
  value is read.
* **Buffers of 4 bits** are read without unpacking them in memory. The low and the high four bits of a byte
  are channels ``i`` and ``i + d/2``. So a tile is two tiles of half the channels, every product is two, and
  nothing is interleaved. A native tile is a low half without a high one. The newest tokens of packed buffers
  are native and near, so ``num_recent_tokens`` must be at least the size of their ring. They get tiles of
  their own, after the packed near ones. Windows are always native.
* **A constant sink** begins the softmax of a window's first split: one token with the sink's logit and value.

Nothing here waits for the device or allocates. Logits and sums are fp32; for fp32 inputs full fp32, not TF32.
"""

from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod.kernels import triton_launch
from pod.kernels.triton_launch import boundary, dealt, splits, tiles
from pod.modeling.model.decode import DecodeCall, role_table
from pod.modeling.model.packed import Packed, Stored
from pod.modeling.model.sharing import Roles

_LOG2E = tl.constexpr(1.4426950408889634)
_SPLITS = 64  # partial results that the merging kernel reads at a time

ALL, FIRST, SECOND = range(3)
"""``PART`` of a launch. ALL: all tokens. FIRST: all tokens of leads, near tokens of others.
SECOND: distant tokens of followers, where a query head reads them."""


class DecodeTile(NamedTuple):
    """Tokens of a program's step, channels and query heads of a product, and options to compile with."""

    BLOCK_N: int
    BLOCK_D: int
    BLOCK_G: int
    num_warps: int
    num_stages: int


def tile(dtype: torch.dtype, head_dim: int, groups: int, packed: bool = False, part: int = ALL) -> DecodeTile:
    """The tile of a kernel. It has about 16 KiB of values, of which two programs load some 100 KiB ahead.

    A product has at least 16 rows; rows without a query head load nothing. A packed tile has fewer bytes, and
    more arithmetic. A launch of distant tokens alone gets 3 stages, because with 2 it would spill registers
    (head_dim 128 on sm_90).
    """
    block_g = max(16, triton.next_power_of_2(groups))
    block_d = head_dim // 2 if packed else max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return DecodeTile(32, block_d, block_g, 4, 1) if packed else DecodeTile(32, block_d, block_g, 8, 2)
    stages = 2 if packed and (part != SECOND or head_dim <= 64) else 3
    return DecodeTile(64 if head_dim <= 128 else 32, block_d, block_g, 4, stages)


# -- work of a program ---------------------------------------------------------------------------------------


@triton.jit
def proximal_lse(part_lse, first, count, groups, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """Log-sum-exp (base e) ``[BLOCK_G]`` over the splits of a head in the first launch."""
    rows = tl.arange(0, BLOCK_G)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(0, count, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        inside = (split < count)[:, None] & (rows < groups)[None, :]
        where = (first + split)[:, None] * groups + rows[None, :]
        lse = tl.load(part_lse + where, mask=inside, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - reference) + tl.sum(tl.exp2(lse - reference[None, :]), 0)
        peak = new_peak
    return (peak + tl.log2(total)) / _LOG2E


@triton.jit
def window_slot(place, far, n_s, n_r):
    """Slot of near token ``place`` in a window after ``far`` distant tokens; the ring wraps at most once."""
    slot = place + tl.where(place < n_s, 0, far % n_r)
    return slot - tl.where(slot < n_s + n_r, 0, n_r)


# -- tiles of tokens -----------------------------------------------------------------------------------------


@triton.jit
def products(q_low, q_high, k_low, k_high, PACKED: tl.constexpr):
    """Products ``[G, N]`` of queries and keys, in fp32."""
    out = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
    if PACKED:
        out = tl.dot(q_high, tl.trans(k_high), out, input_precision="ieee")
    return out


@triton.jit
def attend(logits, v_low, v_high, peak, total, low, high, PACKED: tl.constexpr):
    """Add a tile of tokens with base-2 logits ``[G, N]`` and values ``[N, D]`` to the online softmax."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - reference[:, None])
    shrink = tl.exp2(peak - reference)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v_low.dtype)
    low = tl.dot(weights, v_low, low * shrink[:, None], input_precision="ieee")
    if PACKED:
        high = tl.dot(weights, v_high, high * shrink[:, None], input_precision="ieee")
    return new_peak, total, low, high


@triton.jit
def native(rows, inside, PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load native keys or values ``[N, D]`` from the pointers ``rows`` ``[N, 1]``; with PACKED as halves."""
    where = rows + tl.arange(0, BLOCK_D)[None, :]
    if PACKED:
        low = tl.load(where, mask=inside, other=0.0, eviction_policy="evict_first")
        return low, tl.load(where + BLOCK_D, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        wide = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
        whole = tl.load(where, mask=inside & wide, other=0.0, eviction_policy="evict_first")
        return whole, whole


@triton.jit
def packed_keys(codes, zero, scale, token, inside, dtype, HALF: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Both halves ``[N, d/2]`` of packed keys ``token [N, 1]``, in groups of GROUP_SIZE tokens."""
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
    """Unpack codes ``[N, d/2]`` by zeros and scales ``[N, COUNT]`` of groups of consecutive channels."""
    grouped = tl.reshape(numbers.to(tl.float32), [BLOCK_N, COUNT, HALF // COUNT])
    return tl.reshape(grouped * scale[:, :, None] + zero[:, :, None], [BLOCK_N, HALF])


@triton.jit
def packed_values(
    codes, zero, scale, token, inside, dtype,
    BLOCK_N: tl.constexpr, HALF: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Both halves ``[N, d/2]`` of packed values ``token [N, 1]``, in groups of GROUP_SIZE channels."""
    PER_TOKEN: tl.constexpr = 2 * HALF // GROUP_SIZE
    COUNT: tl.constexpr = (PER_TOKEN + 1) // 2
    NEXT: tl.constexpr = PER_TOKEN - COUNT  # one group for all channels: both halves share it
    where = codes + token * HALF + tl.arange(0, HALF)[None, :]
    numbers = tl.load(where, mask=inside, other=0, eviction_policy="evict_first")
    group = token * PER_TOKEN + tl.arange(0, COUNT)[None, :]
    low_scale = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    low_zero = tl.load(zero + group, mask=inside, other=0.0).to(tl.float32)
    high_scale = tl.load(scale + group + NEXT, mask=inside, other=0.0).to(tl.float32)
    high_zero = tl.load(zero + group + NEXT, mask=inside, other=0.0).to(tl.float32)
    low = scaled(numbers & 15, low_zero, low_scale, BLOCK_N, HALF, COUNT)
    high = scaled(numbers >> 4, high_zero, high_scale, BLOCK_N, HALF, COUNT)
    return low.to(dtype), high.to(dtype)


@triton.jit
def keys_at(
    keys, zero, scale, start, token, row, inside, dtype,
    PACKED: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the keys of a lead for the tokens ``start + token`` ``[N, 1]``."""
    if PACKED:
        return packed_keys(keys, zero, scale, start + token, inside, dtype, BLOCK_D, GROUP_SIZE)
    else:
        return native(keys + start * row + token * row, inside, PACKED, HEAD_DIM, BLOCK_D)


@triton.jit
def values_at(
    values, zero, scale, start, token, row, inside, dtype, PACKED: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load the values of the tokens ``start + token`` ``[N, 1]``."""
    if PACKED:
        return packed_values(values, zero, scale, start + token, inside, dtype, BLOCK_N, BLOCK_D, GROUP_SIZE)
    else:
        return native(values + start * row + token * row, inside, PACKED, HEAD_DIM, BLOCK_D)


@triton.jit
def sink_at(
    logits, values, groups, low, high,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Peak, sum and output of a softmax that ``groups`` query heads begin with a token: a constant sink."""
    heads, features = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    peak = tl.load(logits + heads, mask=heads < groups, other=float("-inf")).to(tl.float32) * _LOG2E
    total = tl.where(peak == float("-inf"), 0.0, 1.0)
    value = tl.load(values + features, mask=features < HEAD_DIM, other=0.0).to(tl.float32)
    low += total[:, None] * value[None, :]
    if PACKED:
        value = tl.load(values + BLOCK_D + features).to(tl.float32)
        high += total[:, None] * value[None, :]
    return peak, total, low, high


# Kernels are not compiled anew for values of these arguments, which vary by layer, batch or call.
_FREE = ["leads", "followers", "windows", "programs", "scale", "tau"]


@triton.jit(do_not_specialize=_FREE)
def decode_kernel(
    q, keys, key_zero, key_scale, key_tail, window, values, value_zero, value_scale, value_tail,
    near_keys, near_values, lengths, packed_lengths, table, sink_logits, sink_values, logits, distant_lse,
    part_out, part_lse, leads, followers, windows, programs, n_s, n_r, room, capacity, ring, scale, tau,
    q_batch, q_head, k_batch, k_head, k_row, w_batch, w_head, w_row, v_batch, v_head, v_row,
    n_batch, n_head, n_row, PART: tl.constexpr, PACKED: tl.constexpr, KEY_GROUP: tl.constexpr,
    VALUE_GROUP: tl.constexpr, WITH_SINK: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Attention of one head of one row to one split of its tokens.

    ``logits`` are ``[B, H, G, room]``; see ``DecodeBuffers`` for the partial results. If keys and values are
    packed, ``keys`` and ``values`` are codes, and arguments that begin with ``key_``, ``value_`` and
    ``packed_`` are given too.
    """
    pid = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    tail = 0
    if PACKED:
        tail = length - tl.load(packed_lengths + row).to(tl.int32)
    per_lead, per_follower, per_window = splits(
        length, tail, leads, followers, windows, programs, n_s, n_r, PART, BLOCK_N
    )
    of_leads = leads * per_lead
    before_windows = of_leads + followers * per_follower
    if pid >= before_windows + windows * per_window:
        return
    is_lead = pid < of_leads
    is_window = pid >= before_windows
    if is_lead:
        index = pid // per_lead
    elif is_window:
        index = leads + followers + (pid - before_windows) // per_window
    else:
        index = leads + (pid - of_leads) // per_follower
    first, count = dealt(index, leads, followers, per_lead, per_follower, per_window)
    split = pid - first
    kv_heads = leads + followers + windows
    head = tl.load(table + index).to(tl.int64)
    is_followed = tl.load(table + kv_heads + index) != 0
    far_tiles, near_tiles = tiles(length, tail, n_s, n_r, is_lead, is_window, PART, BLOCK_N)
    near_cost = tl.where(is_lead, 1, 2)
    first = boundary(split, count, far_tiles, near_tiles, near_cost)
    last = boundary(split + 1, count, far_tiles, near_tiles, near_cost)

    heads = tl.arange(0, BLOCK_G)
    features = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, BLOCK_N)
    near = tl.minimum(length, n_s + n_r)
    far = tl.where(is_window, 0, length - near)  # a window is read in the order of its slots
    real = heads < GROUPS
    stored_head = (row * kv_heads + head) * GROUPS
    lse_row = row * programs * GROUPS
    skips = heads >= BLOCK_G
    if PART == 2:
        first_per_lead, first_per_follower, _ = splits(
            length, tail, leads, followers, windows, programs, n_s, n_r,
            1, BLOCK_N,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        start = leads * first_per_lead + (index - leads) * first_per_follower
        near_lse = proximal_lse(
            part_lse + lse_row, start, first_per_follower, GROUPS,
            BLOCK_G, 16,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        far_lse = tl.load(distant_lse + stored_head + heads, mask=real, other=float("-inf"))
        skips = 1.0 / (1.0 + tl.exp(far_lse - near_lse)) >= tau
        skips = skips | (heads >= GROUPS)
        last = tl.where(tl.min(skips.to(tl.int32), 0) == 1, first, last)

    q_low, q_high = native(
        q + row * q_batch + (head * GROUPS + heads)[:, None] * q_head, real[:, None],
        PACKED, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    dtype = q.dtype.element_ty
    keys += row * k_batch + index.to(tl.int64) * k_head
    window += row * w_batch + (index - leads).to(tl.int64) * w_head
    held = tl.load(table + 2 * kv_heads + index).to(tl.int64)
    values += row * v_batch + held * v_head
    logits += stored_head * room
    if PACKED:
        lead_head = row * leads + index
        key_zero += lead_head * (capacity // KEY_GROUP) * HEAD_DIM
        key_scale += lead_head * (capacity // KEY_GROUP) * HEAD_DIM
        value_head = row * (leads + followers) + held
        value_zero += value_head * capacity * (HEAD_DIM // VALUE_GROUP)
        value_scale += value_head * capacity * (HEAD_DIM // VALUE_GROUP)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    low = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    high = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if WITH_SINK:
        groups = tl.where(is_window & (split == 0), GROUPS, 0)
        peak, total, low, high = sink_at(
            sink_logits + head * GROUPS, sink_values + head * HEAD_DIM, groups, low, high,
            PACKED, HEAD_DIM, BLOCK_G, BLOCK_D,
        )  # fmt: skip

    far_last = tl.minimum(last, far_tiles)
    if is_lead:
        if PART != 2:
            written = tl.where(is_followed, n_s + far, 0)
            for step in range(first, far_last):
                start = n_s + step * BLOCK_N
                inside = start + tokens < n_s + far
                k_low, k_high = keys_at(
                    keys, key_zero, key_scale, tl.cast(start, tl.int64), tokens[:, None], k_row,
                    inside[:, None], dtype, PACKED, KEY_GROUP, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
                found = products(q_low, q_high, k_low, k_high, PACKED) * scale
                place = logits + heads[:, None] * room + (start + tokens)[None, :]
                tl.store(place, found, mask=real[:, None] & (start + tokens < written)[None, :])
                found = tl.where(inside[None, :], found * _LOG2E, float("-inf"))
                v_low, v_high = values_at(
                    values, value_zero, value_scale, tl.cast(start, tl.int64), tokens[:, None], v_row,
                    inside[:, None], dtype, PACKED, VALUE_GROUP, HEAD_DIM, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                peak, total, low, high = attend(found, v_low, v_high, peak, total, low, high, PACKED)
            where = part_lse + 2 * tl.num_programs(1) * programs * GROUPS + lse_row + pid * GROUPS + heads
            tl.store(where, peak + tl.log2(total), mask=real)
    else:
        if PART != 1:
            for step in range(first, far_last):
                start = n_s + step * BLOCK_N
                inside = start + tokens < n_s + far
                # Spare columns exist behind the last token (SPARE_COLUMNS), so no mask: 16 bytes at a time.
                found = tl.load(
                    logits + heads[:, None] * room + (start + tokens)[None, :], mask=real[:, None], other=0.0
                )
                seen = inside[None, :]
                if PART == 2:
                    seen = seen & (skips[:, None] == 0)
                found = tl.where(seen, found * _LOG2E, float("-inf"))
                v_low, v_high = values_at(
                    values, value_zero, value_scale, tl.cast(start, tl.int64), tokens[:, None], v_row,
                    inside[:, None], dtype, PACKED, VALUE_GROUP, HEAD_DIM, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                peak, total, low, high = attend(found, v_low, v_high, peak, total, low, high, PACKED)

    if PART != 2:
        begin = 0  # index of the first native token among the near ones
        native_first = far_tiles
        if PACKED:
            begin = tl.where(is_window, 0, near - tail)
            native_first += tl.cdiv(begin, BLOCK_N)
            for step in range(tl.maximum(first, far_tiles), tl.minimum(last, native_first)):
                place = (step - far_tiles) * BLOCK_N + tokens
                inside = (place < begin)[:, None]
                token = tl.where(place < n_s, place, place + far)
                token_64 = token.to(tl.int64)[:, None]
                if is_lead:
                    k_low, k_high = packed_keys(
                        keys, key_zero, key_scale, token_64, inside, dtype, BLOCK_D, KEY_GROUP
                    )
                else:
                    slot = window_slot(place, far, n_s, n_r).to(tl.int64)[:, None]
                    k_low, k_high = native(window + slot * w_row, inside, PACKED, HEAD_DIM, BLOCK_D)
                found = products(q_low, q_high, k_low, k_high, PACKED) * (scale * _LOG2E)
                found = tl.where((place < begin)[None, :], found, float("-inf"))
                v_low, v_high = packed_values(
                    values, value_zero, value_scale, token_64, inside, dtype, BLOCK_N, BLOCK_D, VALUE_GROUP
                )
                peak, total, low, high = attend(found, v_low, v_high, peak, total, low, high, PACKED)
            recent_keys, key_row = key_tail + lead_head * ring * HEAD_DIM, HEAD_DIM
            recent_values, value_row = value_tail + value_head * ring * HEAD_DIM, HEAD_DIM
            wrap = tl.where(is_window, near, ring)
        else:
            recent_keys, key_row = keys, k_row
            recent_values, value_row = values, v_row
        if is_window:
            begin_of_head = row * n_batch + (index - leads - followers).to(tl.int64) * n_head
            recent_keys, key_row = near_keys + begin_of_head, n_row
            recent_values, value_row = near_values + begin_of_head, n_row
        elif not is_lead:
            recent_keys, key_row = window, w_row
        for step in range(tl.maximum(first, native_first), last):
            place = begin + (step - native_first) * BLOCK_N + tokens
            inside = place < near
            token = tl.where(place < n_s, place, place + far)
            own_slot = token
            if PACKED:
                own_slot = token % wrap
            key_slot = tl.where(is_lead, own_slot, window_slot(place, far, n_s, n_r)).to(tl.int64)[:, None]
            rows = recent_keys + key_slot * key_row
            k_low, k_high = native(rows, inside[:, None], PACKED, HEAD_DIM, BLOCK_D)
            found = products(q_low, q_high, k_low, k_high, PACKED) * (scale * _LOG2E)
            found = tl.where(inside[None, :], found, float("-inf"))
            rows = recent_values + own_slot.to(tl.int64)[:, None] * value_row
            v_low, v_high = native(rows, inside[:, None], PACKED, HEAD_DIM, BLOCK_D)
            peak, total, low, high = attend(found, v_low, v_high, peak, total, low, high, PACKED)

    part = (2 if PART == 2 else 1) - 1
    offset = (part * tl.num_programs(1) + row) * programs + pid
    tl.store(part_lse + offset * GROUPS + heads, peak + tl.log2(total), mask=real)
    share = 1.0 / tl.where(total == 0, 1.0, total)[:, None]
    place = part_out + (offset * GROUPS + heads)[:, None] * HEAD_DIM + features[None, :]
    tl.store(place, low * share, mask=real[:, None] & (features < HEAD_DIM)[None, :])
    if PACKED:
        tl.store(place + BLOCK_D, high * share, mask=real[:, None])


@triton.jit
def merge(part_out, part_lse, first, count, peak, total, out, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
          BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Add ``count`` splits of one query head to a softmax, which is its peak, sum and output."""
    features = tl.arange(0, BLOCK_D)
    for start in range(0, count, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        inside = split < count
        lse = tl.load(part_lse + (first + split) * GROUPS, mask=inside, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - reference)
        shrink = tl.exp2(peak - reference)
        parts = tl.load(
            part_out + ((first + split) * GROUPS * HEAD_DIM)[:, None] + features[None, :],
            mask=inside[:, None] & (features < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(weights, 0)
        out = out * shrink + tl.sum(weights[:, None] * parts, 0)
        peak = new_peak
    return peak, total, out


@triton.jit(do_not_specialize=["leads", "followers", "windows", "programs"])
def combine_kernel(
    lengths, packed_lengths, table, distant_lse, part_out, part_lse, out,
    leads, followers, windows, programs, n_s, n_r, out_batch, out_head,
    WITH_GATE: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query head. For followed heads, also the log-sum-exps of distant tokens."""
    index = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    length = tl.load(lengths + row).to(tl.int32)
    tail = 0
    if PACKED:
        tail = length - tl.load(packed_lengths + row).to(tl.int32)
    kv_heads = leads + followers + windows
    head = tl.load(table + index).to(tl.int64)
    features = tl.arange(0, BLOCK_D)
    peak = float("-inf")
    total = 0.0
    result = tl.zeros([BLOCK_D], tl.float32)
    for part in tl.static_range(2 if WITH_GATE else 1):  # pyright: ignore[reportGeneralTypeIssues]
        if WITH_GATE:
            per_lead, per_follower, per_window = splits(
                length, tail, leads, followers, windows, programs, n_s, n_r, part + 1, BLOCK_N
            )
        else:
            per_lead, per_follower, per_window = splits(
                length, tail, leads, followers, windows, programs, n_s, n_r,
                0, BLOCK_N,  # pyright: ignore[reportArgumentType]
            )  # fmt: skip
        first, count = dealt(index, leads, followers, per_lead, per_follower, per_window)
        offset = (part * rows + row) * programs
        peak, total, result = merge(
            part_out + (offset * GROUPS + group) * HEAD_DIM, part_lse + offset * GROUPS + group,
            first, count, peak, total, result, GROUPS, HEAD_DIM, BLOCK_S, BLOCK_D,
        )  # fmt: skip
        if part == 0 and tl.load(table + kv_heads + index) != 0:
            lse = proximal_lse(
                part_lse + (2 * rows + row) * programs * GROUPS + group, first, count, GROUPS,
                1, BLOCK_S,  # pyright: ignore[reportArgumentType]
            )  # fmt: skip
            tl.store(distant_lse + (row * kv_heads + head) * GROUPS + group + tl.arange(0, 1), lse)
    place = out + row * out_batch + (head * GROUPS + group) * out_head + features
    tl.store(place, (result / total).to(out.dtype.element_ty), mask=features < HEAD_DIM)


# -- launch --------------------------------------------------------------------------------------------------


def unsupported(call: DecodeCall) -> str | None:
    """Why the kernels cannot run a call. None = they can."""
    q = call.q
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} (at most 256)"
    kv_buffers = [x for x in (call.keys, call.window_keys, call.values, *(call.near or ())) if x is not None]
    if any(isinstance(x, Packed) for x in kv_buffers) and (reason := _cannot_unpack(call)) is not None:
        return reason
    if any(x.stride(-1) != 1 for x in (q, call.out, *kv_buffers) if isinstance(x, Tensor)):
        return "features that are not neighbours in memory (stride 1 in the last dimension)"
    if call.near is not None and call.near.keys.stride() != call.near.values.stride():
        return "near keys and values with different strides"
    if call.sink is not None and not all(x.is_contiguous() for x in call.sink):
        return "a constant sink that is not contiguous"
    if call.buffers.programs < call.roles.num_heads or not call.buffers.logits.is_contiguous():
        return "buffers that make_buffers did not make for these heads"
    return triton_launch.unsupported(q)


def _cannot_unpack(call: DecodeCall) -> str | None:
    """Why the kernel cannot read the packed buffers of a call. None = it can."""
    keys, values = call.keys, call.values
    if not isinstance(values, Packed) or (keys is not None and not isinstance(keys, Packed)):
        return "packed keys with native values or the other way round"
    kv_buffers = [values] if keys is None else [keys, values]
    head_dim = values.shape[3]
    if any(x.packing.bits != 4 for x in kv_buffers):
        return "packed buffers of other than 4 bits"
    if head_dim < 32 or head_dim & (head_dim - 1):
        return f"head_dim {head_dim} of packed buffers (32, 64, 128 or 256)"
    if any(x.group_size & (x.group_size - 1) for x in kv_buffers):
        return "a group_size of packed buffers that is no power of two"
    if values.per_channel or (keys is not None and not keys.per_channel):
        return "packed buffers other than keys per channel and values per token"
    if keys is not None and keys.tail.shape[2] != values.tail.shape[2]:
        return "keys and values with different numbers of native slots"
    if call.num_recent_tokens < values.tail.shape[2]:
        slots = f"{values.tail.shape[2]} native slots of packed buffers"
        return f"num_recent_tokens {call.num_recent_tokens} below the {slots}"
    if not all(y.is_contiguous() for x in kv_buffers for y in (x.codes, x.zero, x.scale, x.tail)):
        return "packed buffers that are not contiguous"
    return None


def decode(call: DecodeCall) -> None:
    """See ``pod.modeling.model.decode.pod_decode``; packed keys and values share one ``packed_lengths``."""
    parts = (ALL,) if call.tau is None or not call.roles.followers else (FIRST, SECOND)
    for part in parts:
        _launch(call, part)
    _combine(call, len(parts) == 2)


def _launch(call: DecodeCall, part: int) -> None:
    batch, heads, head_dim = call.q.shape
    buffers, roles, nothing = call.buffers, call.roles, call.q.unsqueeze(2)
    values = nothing if call.values is None else call.values
    window: Any = nothing if call.window_keys is None else call.window_keys
    near_keys, near_values = (nothing, nothing) if call.near is None else call.near
    keys = values if call.keys is None else call.keys
    packed_lengths, ring, group_sizes = None, 1, (1, 1)
    if isinstance(keys, Packed) and isinstance(values, Packed):
        packed_lengths, ring = values.packed_lengths, values.tail.shape[2]
        group_sizes = keys.group_size, min(values.group_size, head_dim)
    of_keys, of_values, groups = _tensors(keys), _tensors(values), heads // roles.num_heads
    strides = (stride for x in (of_keys[0], window, of_values[0], near_keys) for stride in x.stride()[:3])
    triton_launch.run(
        decode_kernel, (buffers.programs, batch), call.q,
        call.q, *of_keys, window, *of_values, near_keys, near_values, call.lengths, packed_lengths,
        role_table(roles, call.q.device), *((None, None) if call.sink is None else call.sink),
        buffers.logits, buffers.distant_lse, buffers.partial_out, buffers.partial_lse,
        *_counts(roles), buffers.programs, call.num_sink_tokens, call.num_recent_tokens,
        buffers.logits.stride(2), call.num_slots, ring, call.scale, 2.0 if call.tau is None else call.tau,
        *call.q.stride()[:2], *strides,
        PART=part, PACKED=packed_lengths is not None, KEY_GROUP=group_sizes[0], VALUE_GROUP=group_sizes[1],
        WITH_SINK=call.sink is not None, GROUPS=groups, HEAD_DIM=head_dim,
        **tile(call.q.dtype, head_dim, groups, packed_lengths is not None, part)._asdict(),
    )  # fmt: skip


def _counts(roles: Roles) -> tuple[int, int, int]:
    return len(roles.leads), len(roles.followers), len(roles.windows)


def _tensors(x: Stored) -> tuple[Any, ...]:
    """The tensor of a buffer, or its codes, and then zero, scale and tail (None if it is native)."""
    return (x.codes, x.zero, x.scale, x.tail) if isinstance(x, Packed) else (x, None, None, None)


def _combine(call: DecodeCall, with_gate: bool) -> None:
    """Merge the partial results of one launch, or of two, in ``call.buffers``, into ``call.out``."""
    batch, heads, head_dim = call.q.shape
    buffers, roles, groups = call.buffers, call.roles, heads // call.roles.num_heads
    packed_lengths = call.values.packed_lengths if isinstance(call.values, Packed) else None
    shape = tile(call.q.dtype, head_dim, groups)
    triton_launch.run(
        combine_kernel, (heads, batch), call.q,
        call.lengths, packed_lengths, role_table(roles, call.q.device),
        buffers.distant_lse, buffers.partial_out, buffers.partial_lse, call.out, *_counts(roles),
        buffers.programs, call.num_sink_tokens, call.num_recent_tokens, *call.out.stride()[:2],
        WITH_GATE=with_gate, PACKED=packed_lengths is not None, GROUPS=groups, HEAD_DIM=head_dim,
        BLOCK_N=shape.BLOCK_N, BLOCK_S=_SPLITS, BLOCK_D=shape.BLOCK_D, num_warps=4,
    )  # fmt: skip
