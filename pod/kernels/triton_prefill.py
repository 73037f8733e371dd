"""PoD attention of training and prompts as one fused Triton pass, forward and backward; chosen by name only.

A tile of queries goes over its near keys with the layer's own queries and keys, and over its distant keys
with the lead's, in one softmax. No tensor of size ``n x n`` exists. Besides inputs and output there is one
fp32 number per query and head.

The kernels are in ``triton_prefill_forward`` and ``triton_prefill_backward``. This file launches them, and
makes two tables for them: the runs of keys that each query sees, and the runs of queries that see each key.
Both are made once in a pass, from the segments. Sums are fp32. Products of fp32 inputs are full fp32, never
TF32.
"""

import functools
from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from pod.kernels import triton_launch, triton_prefill_backward, triton_prefill_forward
from pod.kernels.flex import unsupported_sizes
from pod.modeling.model.attend import Call, Segments, Visibility, span
from pod.modeling.model.varlen import differentiable

_WHOLE_PAST = 2**30
"""A window, in tokens, that is larger than any sequence."""


class Tile(NamedTuple):
    """How many queries, keys and channels a matrix product has, and options to compile the kernel with."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Tiles of the forward kernel, of the kernel for dQ, and of the kernel for dK and dV."""

    forward: Tile
    of_queries: Tile
    of_keys: Tile


_TILES = {  # family -> head dimension rounded up -> for each kernel of Tiles: queries, keys, warps, stages
    80: {
        64: ((128, 64, 8, 3), (64, 64, 4, 2), (64, 128, 8, 2)),
        128: ((64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2)),
        256: ((64, 32, 8, 2), (32, 16, 4, 1), (16, 32, 4, 1)),
    },
    90: {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
        128: ((128, 64, 8, 3), (128, 64, 8, 2), (32, 128, 8, 2)),
        256: ((128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
    },
    100: {
        64: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
        128: ((128, 64, 8, 3), (128, 64, 8, 3), (64, 128, 8, 2)),
        256: ((128, 32, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2)),
    },
    "fp32": {
        64: ((32, 16, 8, 1), (16, 16, 8, 1), (16, 32, 8, 1)),
        128: ((32, 16, 8, 1), (16, 16, 8, 1), (16, 32, 8, 1)),
        256: ((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    },
}
"""Tiles by family and head dimension. Only those of head dimension 128 were timed, on an H200.

Tiles for 16 bits up to head_dim 128, and those for fp32, compile to no spilled register. On sm_90 at head_dim
128, the forward kernel would spill 128 bytes a thread with 128 keys instead of 64. Full fp32 products hold
their operands in registers. With them, the forward tile (64, 16), which loads less, would spill 488 bytes a
thread, and the gradients' tiles (64, 16) and (16, 64) would spill 472 and 672.
"""


def tiles(dtype: torch.dtype, head_dim: int, chip: int) -> Tiles:
    """The tiles that a chip of compute capability ``chip`` (90 = 9.0) runs.

    For 16-bit inputs the families are 90 (H100, H200), 100 (B200), and 80 (A100 and all others).
    """
    block_d = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:
        family = "fp32"
    elif chip == 90:
        family = 90
    elif 100 <= chip < 120:
        family = 100
    else:
        family = 80
    sizes = _TILES[family][max(64, block_d)]
    return Tiles(*(Tile(m, n, block_d, warps, stages) for m, n, warps, stages in sizes))


@functools.cache
def _chip(device: torch.device) -> int:
    if device.type != "cuda":
        return 90  # Triton's interpreter
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot run a call. None = they can."""
    q = call.q
    if call.visibility.positions is not None:
        return "tokens with positions of their own"
    if (reason := unsupported_sizes(q.dtype, q.shape[-1])) is not None:
        return reason
    sources = call.tokens if call.lead is None else (*call.tokens, *call.lead)
    if any(getattr(x, "dtype", q.dtype) != q.dtype for x in sources):
        return f"keys, values or a lead of another dtype than the queries ({q.dtype})"
    if call.scale <= 0:
        return f"scale {call.scale} (greater than 0)"
    return triton_launch.unsupported(q)


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``; the output is laid out as ``q``."""
    # sources may have slots for more tokens
    num_keys = max(1, call.segments.end)
    keys, values = call.tokens.span(0, num_keys)
    lead = None, None
    if call.lead is not None:
        lead = call.lead.queries, span(call.lead.keys, 0, num_keys)
    inputs = [_rows_apart(x) for x in (call.q, keys, values, *lead)]
    runs = _runs(call, num_keys)
    scale = float(call.scale)
    return differentiable(
        inputs,
        lambda inputs: forward(inputs, runs, scale),
        lambda inputs, grad_out, out, lse: backward(inputs, grad_out, out, lse, runs, scale),
        call.sink,
    )


def _rows_apart(x: Tensor | None) -> Tensor | None:
    """``x`` with its channels consecutive in memory, as the kernels need them: a copy if they are not."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


# -- launches ------------------------------------------------------------------------------------------------


def forward(inputs, runs: "Runs", scale: float) -> tuple[Tensor, Tensor]:
    """The output ``[B, Hq, m, d]``, with strides as the queries, and the log-sum-exp ``[B, Hq, m]``.

    The log-sum-exp has base e, and is fp32.
    """
    q, k = inputs[:2]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if out.numel():
        tile = tiles(q.dtype, q.shape[-1], _chip(q.device)).forward
        triton_launch.run(
            triton_prefill_forward.forward_kernel, _query_grid(q, k, tile), q,
            *inputs, out, lse, *_sizes(inputs, runs), scale, *_strides(*inputs, out),
            **_constants(inputs, tile),
        )  # fmt: skip
    return out, lse


def backward(
    inputs, grad_out: Tensor, out: Tensor, lse: Tensor, runs: "Runs", scale: float
) -> list[Tensor | None]:
    """The gradients of the inputs, with their dtypes and strides."""
    q, k = inputs[:2]
    if not out.numel():
        return [None if x is None else torch.zeros_like(x) for x in inputs]
    grads = [None if x is None else torch.empty_like(x) for x in inputs]
    dq, dk, dv, dq_lead, dk_lead = grads
    dout = _rows_apart(grad_out)
    delta = torch.empty_like(lse)
    sizes = *_sizes(inputs, runs), scale
    of_queries, of_keys = tiles(q.dtype, q.shape[-1], _chip(q.device))[1:]
    triton_launch.run(
        triton_prefill_backward.queries_kernel, _query_grid(q, k, of_queries), q,
        *inputs, out, dout, lse, delta, dq, dq_lead, *sizes, *_strides(*inputs, out, dout, dq, dq_lead),
        **_constants(inputs, of_queries),
    )  # fmt: skip
    triton_launch.run(
        triton_prefill_backward.keys_kernel, _key_grid(k, of_keys), q,
        *inputs, dout, lse, delta, dk, dv, dk_lead, *sizes, *_strides(*inputs, dout, dk, dv, dk_lead),
        **_constants(inputs, of_keys),
    )  # fmt: skip
    return grads


def _query_grid(q: Tensor, k: Tensor, tile: Tile) -> tuple[int, int]:
    groups = q.shape[1] // k.shape[1]
    return triton.cdiv(q.shape[2], tile.BLOCK_M) * groups, k.shape[0] * k.shape[1]


def _key_grid(k: Tensor, tile: Tile) -> tuple[int, int]:
    return triton.cdiv(k.shape[2], tile.BLOCK_N), k.shape[0] * k.shape[1]


def _sizes(inputs, runs: "Runs") -> tuple:
    """The tables of runs, sizes, and the tables' strides from row to row, in the kernels' order."""
    q, k = inputs[:2]
    strides = (x.stride(0) if x.shape[0] > 1 else 0 for x in runs)
    return *runs, q.shape[2], k.shape[2], q.shape[1] // k.shape[1], k.shape[1], *strides


def _strides(*tensors: Tensor | None) -> list[int]:
    """Strides of batch, head and row of each tensor; zeros for None, which the kernels do not read."""
    return [stride for x in tensors for stride in ((0, 0, 0) if x is None else x.stride()[:3])]


def _constants(inputs, tile: Tile) -> dict:
    return {"HAS_LEAD": inputs[3] is not None, "HEAD_DIM": inputs[0].shape[-1], **tile._asdict()}


# -- what is seen --------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """Which keys a query sees, and which queries see a key.

    Both tables are int32, with one table for each of B rows, or one table ``[1, …]`` for all rows. Columns of
    no segment have only zeros.

    Attributes:
        queries: ``[B, 4, m]``: for each query the columns ``start``, ``sink_end``, ``window`` and ``stop``.
            Its near keys are ``start <= j < sink_end`` and ``window <= j < stop``, its distant keys are
            ``sink_end <= j < window``.
        keys: ``[B, 3, n]``: for each key the columns ``first``, ``middle`` and ``last``. It is near for the
            queries ``first <= i < middle``, and distant for ``middle <= i < last``.
    """

    queries: Tensor
    keys: Tensor


def _runs(call: Call, num_keys: int) -> Runs:
    """The runs of a call, made once in a pass for all layers that have these windows."""
    shape, device = (call.q.shape[0], call.q.shape[2], num_keys), call.q.device

    def make() -> Runs:
        found = runs_of(call.segments, shape, call.visibility)
        return Runs(*(x.to(device, non_blocking=True) for x in found))

    return call.segments.derived(("triton", shape, device, call.visibility[:3]), make)


def runs_of(segments: Segments, shape: tuple[int, int, int], see: Visibility) -> Runs:
    """The tables of runs for a batch of ``shape = (B, m, n)``: rows, columns of queries and of keys."""
    batch, num_queries, num_keys = shape
    are_alike = all(segment.rows == (0, batch) for segment in segments.all)
    tables = 1 if are_alike else batch
    of_queries = torch.zeros(tables, 4, num_queries, dtype=torch.int32)
    of_keys = torch.zeros(tables, 3, num_keys, dtype=torch.int32)
    n_s = min(see.num_sink_tokens, num_keys)
    n_r = _WHOLE_PAST if see.num_recent_tokens is None else min(see.num_recent_tokens, _WHOLE_PAST)
    for segment in segments.all:
        rows = slice(0, 1) if are_alike else slice(*segment.rows)
        (query, last_query), (key, last_key) = segment.queries, segment.keys

        own = torch.arange(query, last_query) - query + key + segment.past
        stop = own + 1 if see.causal else torch.full_like(own, last_key)
        window = (own - n_r + 1).clamp(min=key)
        sink_end = window.clamp(max=key + n_s)
        start = torch.full_like(own, key)
        of_queries[rows, :, query:last_query] = torch.stack([start, sink_end, window, stop]).int()

        own = torch.arange(key, last_key) - key + query - segment.past  # the query at the key's position
        first = own.clamp(min=query) if see.causal else torch.full_like(own, query)
        middle = torch.maximum((own + n_r).clamp(max=last_query), first)
        middle[:n_s] = last_query
        last = torch.full_like(own, last_query)
        of_keys[rows, :, key:last_key] = torch.stack([first, middle, last]).int()
    return Runs(of_queries, of_keys)
