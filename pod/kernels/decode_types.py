"""What decoding hands from call to call and layer to layer: roles of heads, buffers, packed keys and values."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pod.modeling.shipped.packed_tokens import Packed

_PROGRAMS_PER_PROCESSOR = 2  # as many as fit by registers, so that all run at once
SPARE_COLUMNS = 64  # the last tile of a row of logits is read as a whole


Stored = Tensor | Packed
"""Keys or values ``[B, h, C, d]``."""


@dataclass(frozen=True)
class Roles:
    """Which KV heads of a layer lead and follow; made once per layer by ``make_roles``.

    Attributes:
        leads, followers: KV heads, ascending; together all of ``0 … H-1``.
        followed: leads of this layer that a later layer uses.
        table: int32 ``[2, H]`` on the device. Row 0: leads, then followers. Row 1: the same, 1 for heads in ``followed``.
    """

    leads: list[int]
    followers: list[int]
    followed: list[int]
    table: Tensor

    @property
    def num_heads(self) -> int:
        return len(self.leads) + len(self.followers)


def make_roles(leads: list[int], followers: list[int], followed: list[int], device) -> Roles:
    """Roles of a layer's KV heads, with the small tensors that kernels read.

    Raises:
        ValueError: heads that are not ``0 … H-1`` in two ascending lists, or ``followed`` heads that do not lead.
    """
    if sorted(leads + followers) != list(range(len(leads) + len(followers))) or not leads + followers:
        raise ValueError(f"leads {leads} and followers {followers} must name each of the heads 0 … H-1 once")
    if leads != sorted(leads) or followers != sorted(followers):
        raise ValueError(f"leads {leads} and followers {followers} must ascend")
    if not set(followed) <= set(leads):
        raise ValueError(
            f"heads {sorted(set(followed) - set(leads))} are followed but do not lead; leads are {leads}"
        )
    order = leads + followers
    table = torch.tensor([order, [int(head in followed) for head in order]], dtype=torch.int32, device=device)
    return Roles(list(leads), list(followers), sorted(followed), table)


@dataclass(frozen=True)
class DecodeBuffers:
    """What one model's decoding reuses in all layers and steps; made by ``make_buffers``.

    Attributes:
        logits: ``[B, H, G, >= C]``; column ``j`` of head ``h`` holds the scaled logit of distant token ``j``, written by the
            lead of ``h``'s block. The other columns are scratch. fp32 (fp64 for fp64 models).
        distant_lse: ``[B, H, G]``, log-sum-exp of these columns, -inf when there is no distant token.
        weights: private to ``grouped``: ``exp(logits - max)`` of distant tokens, so that followers need no exponential.
        weight_sums: their sums ``[B, H, G]``.
        partial_out: private to ``triton``: ``[2, B, P, G, d]`` fp32, results of its ``P`` programs per row.
        partial_lse: ``[3, B, P, G]`` fp32, base 2: of the two launches, and of the distant tokens alone.
    """

    logits: Tensor
    distant_lse: Tensor
    weights: Tensor | None
    weight_sums: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @property
    def programs(self) -> int:
        """Programs per row and launch."""
        return self.partial_lse.shape[2]


def num_programs(batch: int, kv_heads: int, device: torch.device) -> int:
    """Programs per row of the batch: two on every multiprocessor, and one for every head at least."""
    if device.type != "cuda":
        return 3 * kv_heads
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(kv_heads, -(-processors * _PROGRAMS_PER_PROCESSOR // batch))


def make_buffers(
    batch: int,
    kv_heads: int,
    groups: int,
    head_dim: int,
    capacity: int,
    dtype: torch.dtype,
    device,
    programs: int | None = None,
) -> DecodeBuffers:
    """Buffers for ``batch`` rows of at most ``capacity`` tokens. ``4·B·H·G·capacity`` bytes for the logits.

    Args:
        programs: splits per row of the Triton kernel, all heads together; None = by the device. At least ``kv_heads``.
    """
    device = torch.device(device)
    compute = torch.promote_types(dtype, torch.float32)
    if programs is None:
        programs = num_programs(batch, kv_heads, device)
    if programs < kv_heads:
        raise ValueError(f"{programs} programs are fewer than {kv_heads} KV heads; give at least one to each")
    room = -(-capacity // 16) * 16 + SPARE_COLUMNS  # in sixteens: rows are read 16 bytes at a time
    rows = batch, kv_heads, groups

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DecodeBuffers(
        logits=empty(*rows, room, dtype=compute),
        distant_lse=empty(*rows, dtype=compute),
        weights=None if device.type == "cuda" else empty(*rows, room, dtype=compute),
        weight_sums=empty(*rows, dtype=compute),
        partial_out=empty(2, batch, programs, groups, head_dim),
        partial_lse=empty(3, batch, programs, groups),
    )


class Call(NamedTuple):
    """One validated call of ``pod_decode``; see there."""

    q: Tensor
    keys: Stored | None
    window_keys: Stored | None
    values: Stored
    lengths: Tensor
    roles: Roles
    buffers: DecodeBuffers
    num_sink_tokens: int
    num_recent_tokens: int
    scale: float
    tau: float | None
    max_length: int | None
    out: Tensor
