"""One new token per row: dense heads and heads that follow, in one call (paper §2.2, METHODS.md §1 fact 3).

A lead writes the logits of its distant tokens once. The later layers of its block read these numbers (4 bytes
per query head and token) instead of any distant key. This file has types, validation and dispatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attend import Implementation, Tokens, check_sink, choose, compute_dtype
from .packed import Stored
from .sharing import Roles
from .sinks import Sink

_PROGRAMS_PER_PROCESSOR = 2  # as many as fit by registers, so that all run at once
SPARE_COLUMNS = 64  # they are needed because the last tile of a row of logits is read as a whole


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def role_table(roles: Roles, device: torch.device) -> Tensor:
    """The table of roles that kernels read, int32 ``[3, H]``.

    * Row 0: leads, then followers, then windows.
    * Row 1: for the heads in this order, 1 for those that are in ``followed``.
    * Row 2: their places in ``values``, or in ``near``.
    """
    order = roles.leads + roles.followers + roles.windows
    places = [(roles.windows if head in roles.windows else roles.held).index(head) for head in order]
    rows = [order, [int(head in roles.followed) for head in order], places]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class DecodeBuffers:
    """What one model's decoding reuses in all layers and steps. ``make_buffers`` makes it.

    Attributes:
        logits: ``[B, H, G, >= C]``, fp32 (fp64 for fp64 models). Column ``j`` of head ``h`` holds the scaled
            logit of distant token ``j``, written by the lead of ``h``'s block. The other columns are scratch.
        distant_lse: ``[B, H, G]``, log-sum-exp of these columns, -inf when there is no distant token.
        weights: private to ``grouped``: ``exp(logits - max)`` of distant tokens, so that followers need no
            exponential.
        weight_sums: private to ``grouped``: the sums of ``weights``, ``[B, H, G]``.
        partial_out: private to ``triton``: ``[2, B, P, G, d]`` fp32, results of its ``P`` programs per row.
        partial_lse: private to ``triton``: ``[3, B, P, G]`` fp32, log-sum-exps in base 2, of the two launches
            and of the distant tokens alone.
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
    """Programs per row of the batch: two on every multiprocessor, but at least one for every head."""
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
    """Buffers for ``batch`` rows of at most ``capacity`` tokens.

    The logits take ``4·B·H·G·capacity`` bytes.

    Args:
        programs: splits per row of the Triton kernel, all heads together, at least ``kv_heads``. None = the
            device decides.

    Raises:
        ValueError: fewer programs than KV heads.
    """
    device, compute = torch.device(device), compute_dtype(dtype)
    programs = programs or num_programs(batch, kv_heads, device)
    if programs < kv_heads:
        raise ValueError(f"{programs} programs are fewer than {kv_heads} KV heads; give at least one to each")
    room = -(-capacity // 16) * 16 + SPARE_COLUMNS  # a multiple of 16, as rows are read 16 bytes at a time
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


class DecodeCall(NamedTuple):
    """Arguments of ``pod_decode``.

    Attributes:
        q: ``[B, Hq, d]`` rotated queries, ``Hq = G·H``.
        keys: ``[B, leads, C, d]``, slot = position. None when no head leads. May be ``Packed``.
        window_keys: ``[B, followers, n_s + n_r, d]``. Token ``p`` is at slot ``p`` while ``p < n_s + n_r``,
            later at ``n_s + (p - n_s) mod n_r``. None when no head follows. Never ``Packed``.
        values: ``[B, leads + followers, C, d]``, heads in rising order. None when all heads keep their
            windows. May be ``Packed``, with the ``packed_lengths`` of the keys.
        lengths: int32 or int64 ``[B]`` on the device of ``q``: tokens per row (at least 1). The new token is
            already stored and is counted. Slots behind a row's length may hold anything.
        buffers: from ``make_buffers``. Heads in ``roles.followed`` write ``buffers.logits`` and
            ``buffers.distant_lse``.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        tau: gate threshold (paper B.4). None = exact. A query head of a follower attends to its proximal
            tokens alone if they hold the share ``sigmoid(lse_P - lse_D) >= tau``. Distant values are read
            only by KV heads with a query head whose proximal tokens hold less.
        out: ``[B, Hq, d]`` to write to.
        rows: ``lengths`` on the host, for implementations that would otherwise wait for the device.
        near: keys and values ``[B, windows, n_s + n_r, d]`` of the heads that keep their windows, with tokens
            at the slots of ``window_keys``. None when there is no such head. Never ``Packed``.
        sink: of all heads of the layer. It is read for the heads that keep their windows. None = they see
            ``near`` alone.
    """

    q: Tensor
    keys: Stored | None
    window_keys: Stored | None
    values: Stored | None
    lengths: Tensor
    roles: Roles
    buffers: DecodeBuffers
    num_sink_tokens: int
    num_recent_tokens: int
    scale: float = None  # type: ignore[assignment]
    tau: float | None = None
    out: Tensor = None  # type: ignore[assignment]
    rows: Sequence[int] | None = None
    near: Tokens | None = None
    sink: Sink | None = None

    @property
    def num_slots(self) -> int:
        """``C``: the slots of a buffer that holds every token."""
        return 0 if self.values is None else self.values.shape[2]


DECODERS: dict[str, Implementation] = {}
"""Implementations by name: ``grouped`` of this folder, and what ``pod.kernels`` adds."""
RECORDABLE: set[str] = {"triton"}
"""Implementations that ask the device nothing, so that a CUDA graph can record them."""
DECODE_ORDER: dict[str, list[str]] = {"cuda": ["triton", "grouped"]}
"""What ``auto`` tries on a device type, fastest first. Devices that are not named use ``grouped``."""


def choose_decoder(call: DecodeCall, backend: str = "auto") -> Implementation:
    """The implementation that will run.

    Raises:
        ValueError: the one that was asked for cannot run.
    """
    order = DECODE_ORDER.get(call.q.device.type, ["grouped"])
    return choose("decode", DECODERS, order, call, backend)


@torch.no_grad()
def pod_decode(*arguments: Any, backend: str = "auto", **options: Any) -> Tensor:
    """Attention of the newest token of every row, ``[B, Hq, d]`` in the dtype of ``q``.

    The arguments are those of ``DecodeCall``. Heads that lead attend to all tokens with their own keys. Heads
    that follow take the logits of *distant* tokens ``n_s <= j < length - n_r`` from ``buffers.logits``, which
    the lead of their block filled in this step. They take the other logits from ``window_keys``, make one
    softmax over both, and use their own values. Heads that keep their windows attend to ``near``.

    Call the layers of a model in order, with the same ``buffers``, backend and lengths.

    Raises:
        ValueError: shapes do not fit, or the backend cannot run.
    """
    call = DecodeCall(*arguments, **options)
    _check(call)
    q = call.q
    call = call._replace(
        out=torch.empty_like(q) if call.out is None else call.out,
        scale=float(q.shape[-1] ** -0.5) if call.scale is None else call.scale,
    )
    choose_decoder(call, backend).run(call)
    return call.out


def _check(call: DecodeCall) -> None:
    """Check shapes, dtypes and devices: with wrong ones a kernel would read and write elsewhere."""
    q, roles, rows, logits = call.q, call.roles, call.rows, call.buffers.logits
    (batch, heads, head_dim), room, near = q.shape, call.num_slots, call.near or (None, None)
    assert call.lengths.shape == (batch,) and heads % roles.num_heads == 0, (
        "rows or heads of no length or role"
    )
    _check_tensor("keys", call.keys, (batch, len(roles.leads), room, head_dim), q)
    _check_tensor("values", call.values, (batch, len(roles.held), room, head_dim), q)
    for name, x, of in (
        ("window_keys", call.window_keys, roles.followers),
        ("near.keys", near[0], roles.windows),
        ("near.values", near[1], roles.windows),
    ):
        slots = call.num_sink_tokens + call.num_recent_tokens
        # a window that is not full may have room for its tokens only
        if x is not None and rows is not None:
            slots = min(slots, max(x.shape[2], *rows))
        _check_tensor(name, x, (batch, len(of), slots, head_dim), q)
    if call.sink is not None:
        check_sink(call.sink, heads, roles.num_heads, head_dim)
    if call.out is not None:
        _check_tensor("out", call.out, tuple(q.shape), q)
    room = min(room, max(rows)) if rows else room
    sizes = batch, roles.num_heads, heads // roles.num_heads
    made_for = tuple(logits.shape[:3]), logits.dtype, logits.device, call.buffers.partial_out.shape[4]
    if (
        made_for != (sizes, compute_dtype(q.dtype), q.device, head_dim)
        or logits.shape[3] < room + SPARE_COLUMNS
    ):
        raise ValueError(
            f"buffers are for {made_for}, not for {list(q.shape)} and {room} slots: use make_buffers"
        )


def _check_tensor(name: str, x: Stored | None, expected: tuple[int, ...], q: Tensor) -> None:
    """A buffer of at least one head must have this shape, and the dtype and device of ``q``."""
    if not expected[1]:
        return
    if x is None or tuple(x.shape) != expected:
        raise ValueError(f"{name} is {None if x is None else list(x.shape)}, expected {list(expected)}")
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; both must agree")
