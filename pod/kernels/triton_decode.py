"""Decoding as Triton kernels: split-KV over mixed heads, one launch for leads and followers, and one that merges the splits.

**Who does what.** The programs of a row are dealt to its heads on the device, by ``lengths``: a tile of tokens costs a lead two
units (keys and values), a follower two for tokens of its window and one for distant ones (values; logits are small). So the
grid is fixed, as CUDA graphs need it, and programs still finish together. A program walks over *far* tiles (distant tokens)
first, then *near* ones (sinks and recent tokens), so that a lead knows the log-sum-exp of its distant tokens alone.

**With a gate threshold** the first launch leaves out the distant tokens of followers; a second one takes them, and its programs
know by then which query heads skip: where a whole group does, no value is read.

Nothing here waits for the device or allocates. Logits and sums are fp32; those of fp32 inputs full fp32, not TF32.
"""

import importlib
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod.kernels import triton_launch
from pod.modeling.shipped.decode import DecodeCall
from pod.modeling.shipped.packed import Packed, Stored

_LOG2E = tl.constexpr(1.4426950408889634)
_SPLITS = 64  # partial results that the merging kernel reads at a time

ALL = 0
"""A launch over all tokens."""
FIRST = 1
"""All tokens of leads, near ones of followers."""
SECOND = 2
"""Distant tokens of followers, where a query head does not skip them."""


class Tile(NamedTuple):
    """Tokens per step of a program, features of a product, query heads of a product, and how it is compiled."""

    BLOCK_N: int
    BLOCK_D: int
    BLOCK_G: int
    num_warps: int
    num_stages: int


def tile(dtype: torch.dtype, head_dim: int, groups: int) -> Tile:
    """About 16 KiB of values per step: two programs on a multiprocessor have some 100 KiB under way.

    A product has at least 16 rows; rows without a query head cost no traffic.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_g = max(16, triton.next_power_of_2(groups))
    if dtype == torch.float32:
        return Tile(32, block_d, block_g, 4, 2)
    return Tile(64 if block_d <= 128 else 32, block_d, block_g, 4, 3)


# -- work of a program --------------------------------------------------------------------------------------------


@triton.jit
def tiles(length, tail, n_s, n_r, is_lead, PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """(far tiles, near tiles) that a launch takes of a head with ``length`` tokens, the newest ``tail`` in tiles of their own."""
    near = tl.minimum(length, n_s + n_r)
    far_tiles = tl.cdiv(length - near, BLOCK_N)
    near_tiles = tl.cdiv(near - tail, BLOCK_N) + tl.cdiv(tail, BLOCK_N)
    if PART == 1:
        far_tiles = tl.where(is_lead, far_tiles, 0)
    if PART == 2:
        far_tiles = tl.where(is_lead, 0, far_tiles)
        near_tiles = 0
    return far_tiles, near_tiles


@triton.jit
def splits(length, tail, leads, followers, programs, n_s, n_r, PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """(programs of each lead, programs of each follower); leads come first. At least one where there is a tile."""
    lead_far, lead_near = tiles(length, tail, n_s, n_r, True, PART, BLOCK_N)
    far, near = tiles(length, tail, n_s, n_r, False, PART, BLOCK_N)
    lead_cost = 2 * (lead_far + lead_near)
    cost = far + 2 * near
    total = tl.maximum(leads * lead_cost + followers * cost, 1)
    per_lead = tl.maximum(programs * lead_cost // total, 1)
    per_lead = tl.minimum(per_lead, (programs - followers) // tl.maximum(leads, 1))
    per_lead = tl.minimum(per_lead, lead_far + lead_near)
    per_follower = (programs - leads * per_lead) // tl.maximum(followers, 1)
    per_follower = tl.minimum(per_follower, far + near)
    return per_lead, per_follower


@triton.jit
def boundary(split, count, far_tiles, near_tiles, near_cost):
    """First tile of a split, so that all cost the same; far tiles come first."""
    units = split * (far_tiles + near_tiles * near_cost) // count
    return tl.where(units < far_tiles, units, far_tiles + (units - far_tiles) // near_cost)


@triton.jit
def attend(logits, values, peak, total, out):
    """Take a tile of tokens with base-2 logits ``[G, N]`` and values ``[N, D]`` into the softmax."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - reference[:, None])
    shrink = tl.exp2(peak - reference)
    total = total * shrink + tl.sum(weights, 1)
    out = tl.dot(weights.to(values.dtype), values, out * shrink[:, None], input_precision="ieee")
    return new_peak, total, out


@triton.jit
def proximal_lse(part_lse, first, count, groups, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """Natural log-sum-exp ``[BLOCK_G]`` over the splits of a head in the first launch."""
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
def window_base(length, n_s, n_r):
    """(slot from which the ring holds older tokens, token minus slot before it), for a row that has distant tokens."""
    newest = (length - n_s) % n_r
    return n_s + newest, length - newest - n_s


_FREE = [
    "leads",
    "followers",
    "programs",
    "scale",
    "tau",
]  # vary by layer, batch or call: one compiled kernel for all


@triton.jit(do_not_specialize=_FREE)
def decode_kernel(
    q, keys, window, values, lengths, table, logits, distant_lse, part_out, part_lse,
    leads, followers, programs, n_s, n_r, room, scale, tau,
    q_batch, q_head, k_batch, k_head, k_row, w_batch, w_head, w_row, v_batch, v_head, v_row,
    PART: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One split of one head of one row; ``logits`` ``[B, H, G, room]``, see ``DecodeBuffers`` for the partial results."""
    pid = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    per_lead, per_follower = splits(length, 0, leads, followers, programs, n_s, n_r, PART, BLOCK_N)
    if pid >= leads * per_lead + followers * per_follower:
        return
    is_lead = pid < leads * per_lead
    behind = pid - leads * per_lead
    index = tl.where(is_lead, pid // tl.maximum(per_lead, 1), leads + behind // tl.maximum(per_follower, 1))
    head = tl.load(table + index).to(tl.int64)
    is_followed = tl.load(table + leads + followers + index) != 0
    count = tl.where(is_lead, per_lead, per_follower)
    split = tl.where(is_lead, pid, behind) % count
    far_tiles, near_tiles = tiles(length, 0, n_s, n_r, is_lead, PART, BLOCK_N)
    near_cost = tl.where(is_lead, 1, 2)
    first = boundary(split, count, far_tiles, near_tiles, near_cost)
    last = boundary(split + 1, count, far_tiles, near_tiles, near_cost)

    heads = tl.arange(0, BLOCK_G)
    features = tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, BLOCK_N)
    near = tl.minimum(length, n_s + n_r)
    far = length - near
    real = heads < GROUPS
    wide = (features < HEAD_DIM)[None, :]
    stored_head = (row * (leads + followers) + head) * GROUPS
    lse_row = row * programs * GROUPS
    skips = heads >= BLOCK_G
    if PART == 2:
        first_per_lead, first_per_follower = splits(
            length, 0, leads, followers, programs, n_s, n_r,
            1, BLOCK_N,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        start = leads * first_per_lead + (index - leads) * first_per_follower
        near_lse = proximal_lse(part_lse + lse_row, start, first_per_follower, GROUPS, BLOCK_G, 16)  # pyright: ignore[reportArgumentType]
        far_lse = tl.load(distant_lse + stored_head + heads, mask=real, other=float("-inf"))
        skips = 1.0 / (1.0 + tl.exp(far_lse - near_lse)) >= tau
        skips = skips | (heads >= GROUPS)
        last = tl.where(tl.min(skips.to(tl.int32), 0) == 1, first, last)

    q_tile = tl.load(
        q + row * q_batch + (head * GROUPS + heads)[:, None] * q_head + features[None, :],
        mask=real[:, None] & wide, other=0.0,
    )  # fmt: skip
    k_head_start = keys + row * k_batch + index.to(tl.int64) * k_head
    w_head_start = window + row * w_batch + (index - leads).to(tl.int64) * w_head
    v_head_start = values + row * v_batch + head * v_head
    logits_start = logits + stored_head * room
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)

    far_last = tl.minimum(last, far_tiles)
    if is_lead:
        if PART != 2:
            written = tl.where(is_followed, n_s + far, 0)
            for step in range(first, far_last):
                start = n_s + step * BLOCK_N
                inside = start + tokens < n_s + far
                k_tile = tl.load(
                    k_head_start + tl.cast(start, tl.int64) * k_row + tokens[:, None] * k_row + features[None, :],
                    mask=inside[:, None] & wide, other=0.0, eviction_policy="evict_first",
                )  # fmt: skip
                v_tile = tl.load(
                    v_head_start + tl.cast(start, tl.int64) * v_row + tokens[:, None] * v_row + features[None, :],
                    mask=inside[:, None] & wide, other=0.0, eviction_policy="evict_first",
                )  # fmt: skip
                products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
                place = logits_start + heads[:, None] * room + (start + tokens)[None, :]
                tl.store(place, products, mask=real[:, None] & (start + tokens < written)[None, :])
                products = tl.where(inside[None, :], products * _LOG2E, float("-inf"))
                peak, total, out = attend(products, v_tile, peak, total, out)
            where = part_lse + 2 * tl.num_programs(1) * programs * GROUPS + lse_row + pid * GROUPS + heads
            tl.store(where, peak + tl.log2(total), mask=real)
    else:
        if PART != 1:
            for step in range(first, far_last):
                start = n_s + step * BLOCK_N
                inside = start + tokens < n_s + far
                # columns behind the last are there (see make_buffers), and unused: no mask, so 16 bytes at a time
                products = tl.load(
                    logits_start + heads[:, None] * room + (start + tokens)[None, :],
                    mask=real[:, None], other=0.0,
                )  # fmt: skip
                v_tile = tl.load(
                    v_head_start + tl.cast(start, tl.int64) * v_row + tokens[:, None] * v_row + features[None, :],
                    mask=inside[:, None] & wide, other=0.0, eviction_policy="evict_first",
                )  # fmt: skip
                seen = inside[None, :]
                if PART == 2:
                    seen = seen & (skips[:, None] == 0)
                products = tl.where(seen, products * _LOG2E, float("-inf"))
                peak, total, out = attend(products, v_tile, peak, total, out)

    if PART != 2:
        # of slots n_s … in a full ring, those from `older` on hold tokens that are n_r older than the ones before
        older, ahead = window_base(length, n_s, n_r)
        older = tl.where(is_lead | (far == 0), near, older)
        ahead = tl.where(is_lead, far, tl.where(far == 0, 0, ahead))
        if is_lead:
            key_start, key_row = k_head_start, k_row
        else:
            key_start, key_row = w_head_start, w_row
        for step in range(tl.maximum(first, far_tiles), last):
            slot = (step - far_tiles) * BLOCK_N + tokens
            inside = slot < near
            token = tl.where(slot < n_s, slot, slot + ahead - tl.where(slot >= older, n_r, 0)).to(tl.int64)
            k_tile = tl.load(
                key_start + tl.where(is_lead, token, slot)[:, None] * key_row + features[None, :],
                mask=inside[:, None] & wide, other=0.0, eviction_policy="evict_first",
            )  # fmt: skip
            v_tile = tl.load(
                v_head_start + token[:, None] * v_row + features[None, :],
                mask=inside[:, None] & wide, other=0.0, eviction_policy="evict_first",
            )  # fmt: skip
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * _LOG2E)
            products = tl.where(inside[None, :], products, float("-inf"))
            peak, total, out = attend(products, v_tile, peak, total, out)

    part = (2 if PART == 2 else 1) - 1
    offset = (part * tl.num_programs(1) + row) * programs + pid
    tl.store(part_lse + offset * GROUPS + heads, peak + tl.log2(total), mask=real)
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    place = part_out + (offset * GROUPS + heads)[:, None] * HEAD_DIM + features[None, :]
    tl.store(place, out, mask=real[:, None] & wide)


@triton.jit
def merge(part_out, part_lse, first, count, peak, total, out,
          GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Add ``count`` splits of one query head to the running peak, sum and output."""
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


@triton.jit(do_not_specialize=["leads", "followers", "programs"])
def combine_kernel(
    lengths, packed_lengths, table, distant_lse, part_out, part_lse, out,
    leads, followers, programs, n_s, n_r, out_batch, out_head,
    WITH_GATE: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Output of one query head from its splits; for heads that are followed, also the lse of their distant tokens."""
    index = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    length = tl.load(lengths + row).to(tl.int32)
    tail = 0
    if PACKED:
        tail = length - tl.load(packed_lengths + row).to(tl.int32)
    head = tl.load(table + index).to(tl.int64)
    is_followed = tl.load(table + leads + followers + index) != 0
    is_lead = index < leads
    features = tl.arange(0, BLOCK_D)
    peak = float("-inf")
    total = 0.0
    result = tl.zeros([BLOCK_D], tl.float32)
    for part in tl.static_range(2 if WITH_GATE else 1):  # pyright: ignore[reportGeneralTypeIssues]
        if WITH_GATE:
            per_lead, per_follower = splits(
                length, tail, leads, followers, programs, n_s, n_r, part + 1, BLOCK_N
            )
        else:
            per_lead, per_follower = splits(length, tail, leads, followers, programs, n_s, n_r, 0, BLOCK_N)  # pyright: ignore[reportArgumentType]
        first = tl.where(is_lead, index * per_lead, leads * per_lead + (index - leads) * per_follower)
        count = tl.where(is_lead, per_lead, per_follower)
        offset = (part * rows + row) * programs
        peak, total, result = merge(
            part_out + (offset * GROUPS + group) * HEAD_DIM, part_lse + offset * GROUPS + group,
            first, count, peak, total, result, GROUPS, HEAD_DIM, BLOCK_S, BLOCK_D,
        )  # fmt: skip
        if part == 0 and is_followed:
            lse = proximal_lse(
                part_lse + (2 * rows + row) * programs * GROUPS + group,
                first,
                count,
                GROUPS,
                1,  # pyright: ignore[reportArgumentType]
                BLOCK_S,
            )
            tl.store(distant_lse + (row * (leads + followers) + head) * GROUPS + group + tl.arange(0, 1), lse)
    place = out + row * out_batch + (head * GROUPS + group) * out_head + features
    tl.store(place, (result / total).to(out.dtype.element_ty), mask=features < HEAD_DIM)


# -- launch -------------------------------------------------------------------------------------------------------


def unsupported(call: DecodeCall) -> str | None:
    """Why the kernels cannot run a call; None when they can."""
    q = call.q
    if q.shape[-1] > 256:
        return f"head_dim {q.shape[-1]} (at most 256)"
    stores = [x for x in (call.keys, call.window_keys, call.values) if x is not None]
    if any(isinstance(x, Packed) for x in stores):
        reason = _packed().unsupported(call)
        if reason:
            return reason
    if any(x.stride(-1) != 1 for x in (q, call.out, *stores) if isinstance(x, Tensor)):
        return "features that are not neighbours in memory (stride 1 in the last dimension)"
    if call.buffers.programs < call.roles.num_heads or not call.buffers.logits.is_contiguous():
        return "buffers that make_buffers did not make for these heads"
    return triton_launch.unsupported(q)


def _packed():
    """The kernels that read codes; they use what is defined here."""
    return importlib.import_module("pod.kernels.triton_decode_packed")


def decode(call: DecodeCall) -> None:
    """See ``pod.kernels.decode.pod_decode``."""
    if isinstance(call.values, Packed):
        _packed().decode(call)
        return
    shape = tile(call.q.dtype, call.q.shape[2], call.q.shape[1] // call.roles.num_heads)
    parts = (ALL,) if call.tau is None or not call.roles.followers else (FIRST, SECOND)
    for part in parts:
        _launch(call, part)
    combine(call, len(parts) == 2, shape.BLOCK_N)


def _launch(call: DecodeCall, part: int) -> None:
    batch, heads, head_dim = call.q.shape
    groups = heads // call.roles.num_heads
    values = _native(call.values)
    keys, window = (values if x is None else _native(x) for x in (call.keys, call.window_keys))
    buffers, roles = call.buffers, call.roles
    triton_launch.run(
        decode_kernel, (buffers.programs, batch), call.q,
        call.q, keys, window, values, call.lengths, roles.table,
        buffers.logits, buffers.distant_lse, buffers.partial_out, buffers.partial_lse,
        len(roles.leads), len(roles.followers), buffers.programs, call.num_sink_tokens, call.num_recent_tokens,
        buffers.logits.stride(2), call.scale, 2.0 if call.tau is None else call.tau,
        *call.q.stride()[:2], *keys.stride()[:3], *window.stride()[:3], *values.stride()[:3],
        PART=part, GROUPS=groups, HEAD_DIM=head_dim, **tile(call.q.dtype, head_dim, groups)._asdict(),
    )  # fmt: skip


def combine(
    call: DecodeCall, with_gate: bool, tokens_per_step: int, packed_lengths: Tensor | None = None
) -> None:
    """Merge what the programs of one launch, or of two, left in ``call.buffers``."""
    batch, heads, head_dim = call.q.shape
    groups = heads // call.roles.num_heads
    buffers, roles = call.buffers, call.roles
    triton_launch.run(
        combine_kernel, (heads, batch), call.q,
        call.lengths, call.lengths if packed_lengths is None else packed_lengths, roles.table,
        buffers.distant_lse, buffers.partial_out, buffers.partial_lse, call.out,
        len(roles.leads), len(roles.followers), buffers.programs, call.num_sink_tokens, call.num_recent_tokens,
        *call.out.stride()[:2],
        WITH_GATE=with_gate, PACKED=packed_lengths is not None, GROUPS=groups, HEAD_DIM=head_dim, BLOCK_N=tokens_per_step, BLOCK_S=_SPLITS,
        BLOCK_D=tile(call.q.dtype, head_dim, groups).BLOCK_D, num_warps=4,
    )  # fmt: skip


def _native(x: Stored | None) -> Tensor:
    assert isinstance(x, Tensor)
    return x
