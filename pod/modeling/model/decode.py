"""Attention of one new token per row, for all roles of heads in one call (PoD, §2.2).

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
SPARE_COLUMNS = 64  # columns beyond the tokens, because kernels read the last tile of a row of logits whole


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def role_table(roles: Roles, device: torch.device) -> Tensor:
    """The roles of KV heads as a table that kernels read, int32 ``[3, H]``.

    * Row 0: the KV heads: leads, then followers, then windows.
    * Row 1: 1 for a head of row 0 that is in ``roles.followed``, else 0.
    * Row 2: the index of this head among the heads of ``DecodeCall.values``, or of ``near`` for windows.
    """
    order = roles.leads + roles.followers + roles.windows
    places = [(roles.windows if head in roles.windows else roles.held).index(head) for head in order]
    rows = [order, [int(head in roles.followed) for head in order], places]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class DecodeBuffers:
    """Memory that a model's decoding uses again in every layer and step. ``make_buffers`` allocates it.

    Attributes:
        logits: ``[B, H, G, >= C]``, fp32 (fp64 for fp64 models). Column ``j`` of head ``h`` holds the scaled
            logit of distant token ``j``, written by the lead of ``h``'s block. The other columns are scratch.
        distant_lse: ``[B, H, G]``, log-sum-exp of the logits of distant tokens; -inf if there is none.
        weights: private to ``grouped``: ``exp(logits - max)`` of distant tokens, in the shape of ``logits``,
            so that followers need no exponential. None on CUDA.
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
        """``P``, the number of Triton programs per row and launch."""
        return self.partial_lse.shape[2]


def num_programs(batch: int, kv_heads: int, device: torch.device) -> int:
    """How many Triton programs each row of the batch gets.

    All rows together get two programs for every multiprocessor, but each row at least one for every KV head.
    """
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
    """Allocate buffers for ``batch`` rows of at most ``capacity`` tokens.

    The logits take ``4·B·H·G·capacity`` bytes (8 for fp64 models).

    Args:
        batch: rows, ``B``.
        kv_heads: KV heads, ``H``.
        groups: query heads per KV head, ``G``.
        head_dim: channels of a head.
        capacity: tokens of the longest row.
        dtype: dtype of the model.
        device: where to allocate.
        programs: programs per row of the Triton kernel, for all heads together, at least ``kv_heads``.
            None = as many as suit the device (``num_programs``).

    Raises:
        ValueError: fewer programs than KV heads.
    """
    device = torch.device(device)
    compute = compute_dtype(dtype)
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
        keys: keys of the leads ``[B, leads, C, d]``, token ``p`` at slot ``p``. None when no head leads. May
            be ``Packed``.
        window_keys: own keys of the followers ``[B, followers, n_s + n_r, d]``. Token ``p`` is at slot ``p``
            while ``p < n_s + n_r``, later at ``n_s + (p - n_s) mod n_r``. None when no head follows. Never
            ``Packed``.
        values: ``[B, leads + followers, C, d]``, heads in ascending order. None when all heads keep their
            windows. May be ``Packed``, with the same ``packed_lengths`` as the keys.
        lengths: int32 or int64 ``[B]`` on the device of ``q``: tokens per row (at least 1). The new token is
            already stored and is counted. Slots behind a row's length may hold anything.
        roles: the role of each KV head of the layer.
        buffers: from ``make_buffers``. Heads in ``roles.followed`` write ``buffers.logits`` and
            ``buffers.distant_lse``, which followers in later layers read.
        num_sink_tokens, num_recent_tokens: ``n_s`` and ``n_r``, the windows in tokens.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        tau: threshold on the gate ``sigmoid(lse_P - lse_D)``, which is the share of attention that a query
            head's proximal tokens hold (paper B.4). A follower's query head whose gate is at least ``tau``
            attends to its proximal tokens alone. A KV head all of whose query heads do so reads no distant
            value. None = every head attends to all tokens, which is exact.
        out: ``[B, Hq, d]`` to write to. None = a new tensor.
        rows: ``lengths`` on the host, for implementations that would otherwise wait for the device. None =
            not known there.
        near: keys and values ``[B, windows, n_s + n_r, d]`` of the heads that keep their windows, with tokens
            at the same slots as in ``window_keys``. None when there is no such head. Never ``Packed``.
        sink: logits and values for all heads of the layer. Only heads that keep their windows use it. None =
            these heads see ``near`` alone.
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
"""Names of implementations that never wait for the device, so that a CUDA graph can record them."""
DECODE_ORDER: dict[str, list[str]] = {"cuda": ["triton", "grouped"]}
"""Implementations that ``auto`` tries on a type of device, fastest first. Other devices use ``grouped``."""


def choose_decoder(call: DecodeCall, backend: str = "auto") -> Implementation:
    """The implementation that will run a call.

    Args:
        call: the arguments of ``pod_decode``.
        backend: ``auto`` or a name in ``DECODERS``.

    Raises:
        ValueError: the backend is unknown or cannot run the call; or no backend can.
    """
    order = DECODE_ORDER.get(call.q.device.type, ["grouped"])
    return choose("decode", DECODERS, order, call, backend)


@torch.no_grad()
def pod_decode(*arguments: Any, backend: str = "auto", **options: Any) -> Tensor:
    """Attention of the newest token of every row, ``[B, Hq, d]`` in the dtype of ``q``.

    The arguments are those of ``DecodeCall``. Leads attend to all tokens with their own keys. Followers take
    the logits of *distant* tokens ``n_s <= j < length - n_r`` from ``buffers.logits``, which their leads have
    filled in this step. They compute the other logits with ``window_keys``, make one softmax over both, and
    use their own values. Heads that keep their windows attend to ``near``.

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
        # the tensor of a window that is not full may have slots for its present tokens only
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
    """Refuse a tensor that has not this shape, or not the dtype and device of ``q`` (``ValueError``).

    If no head is expected, nothing is checked.
    """
    if not expected[1]:
        return
    if x is None or tuple(x.shape) != expected:
        raise ValueError(f"{name} is {None if x is None else list(x.shape)}, expected {list(expected)}")
    if x.dtype != q.dtype or x.device != q.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}; both must agree")
