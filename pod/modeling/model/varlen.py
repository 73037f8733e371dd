"""Attention on CUDA as a few variable-length flash calls over all segments of a batch: forward and backward.

The ``B·n`` tokens of a batch are put behind each other, as the op packs them. All slices of one kind
(``Segment.slices``) become *one* call of PyTorch's op, whose causal masks are aligned at the bottom right.
The segments are the sequences of the call. Their bounds (``cu_seqlens``) are made once in a pass. If the
tokens of a call are not consecutive, they are copied together.

The op runs the kernels of FlashAttention 2, 3 or 4 (``flash_version``). All of them support the arguments
that are used here, forward and backward: bounds, longest sequences, scale, causal masks, windows and
log-sum-exps.

Outputs of the same rows are merged by their log-sum-exps in one pass with one rounding. Backward calls each
part's flash backward with the merged output and log-sum-exp.
"""

import math
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attend import Call, Segment, Slice, Span, Visibility, compute_dtype, span
from .flash_version import active_version, unsupported_by_version
from .sinks import Sink, merge_sink, sink_gradients

_aten = torch.ops.aten
_MERGE_ELEMENTS = 1 << 24
"""How many numbers of the output are merged at a time. Their fp32 copy takes 64 MiB; there is no other."""
_SINK_ROWS = 4096
"""How many queries share one copy of a document's sinks.

In flash's backward, one multiprocessor computes a block of keys, and would go over all queries alone. With
several copies of the sinks, several multiprocessors share the work.
"""
Place = Span | Tensor
"""Some of the ``B·n`` tokens of a batch: a span of consecutive ones, or their indices."""


class PackedCall(NamedTuple):
    """The arguments of a variable-length flash op besides its tensors.

    Attributes:
        bounds: the index at which each sequence starts, among the packed queries and among the packed keys.
            Each is int32 ``[sequences + 1]`` on the device.
        longest: tokens of the longest sequence, of queries and of keys.
        causal: whether the mask is causal, aligned at the bottom right.
        window: a number ``w`` = each query sees only the ``w`` newest of its visible keys. None = all.
        scale: factor on the logits.
    """

    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    causal: bool
    window: int | None
    scale: float


class FlashCall(NamedTuple):
    """One call of the op: some queries (rows) and some keys and values (columns) of a batch.

    Attributes:
        lead: whether queries and keys are those of the lead, instead of the own ones.
        rows: the queries.
        columns: the keys and values.
        call: the other arguments of the op.
        copies: if some tokens are in ``columns`` more than once: the different tokens, and for each column
            the index of its token among these. Else None.
    """

    lead: bool
    rows: Place
    columns: Place
    call: PackedCall
    copies: tuple[Place, Tensor] | None = None

    def add_to_columns(self, x: Any, values: Tensor) -> None:
        """Add ``values``, one row for each of ``columns``, to the rows of ``x`` ``[B·n, …]``."""
        if self.copies is None:
            _add(x, self.columns, values)
            return
        # There are up to n / 4096 copies of a token. They are summed in fp32: CUDA would otherwise round
        # once per copy, in no fixed order.
        original, copy_of = self.copies
        sums = torch.zeros_like(_take(x, original), dtype=compute_dtype(x.dtype))
        _add(x, original, sums.index_add_(0, copy_of, values.to(sums.dtype)).to(x.dtype))


def _take(x: Any, where: Place) -> Tensor:
    """Rows ``where`` of ``x``: a view for a span, else a copy."""
    if isinstance(where, Tensor):
        return x.index_select(0, where)
    return x.narrow(0, where[0], where[1] - where[0])


def _put(x: Tensor, where: Place, values: Tensor) -> None:
    """Write ``values`` to the rows ``where`` of ``x``."""
    if isinstance(where, Tensor):
        x.index_copy_(0, where, values)
    else:
        _take(x, where).copy_(values)


def _add(x: Any, where: Place, values: Tensor) -> None:
    """Add ``values`` to the rows ``where`` of ``x``."""
    if isinstance(where, Tensor):
        x.index_add_(0, where, values)
    else:
        _take(x, where).add_(values)


Plan = list[list[FlashCall]]
"""Groups of calls. The calls of a group have the same rows in the same order, and no other group has these.

So the results of a group are merged into one softmax.
"""


def make_plan(
    segments: Sequence[Segment], sizes: tuple[int, int], see: Visibility, has_lead: bool, scale: float, device
) -> Plan:
    """The calls for these segments.

    Args:
        segments: the segments of a batch.
        sizes: how many columns of queries, and of keys, a row of the batch has.
        see: what a query sees.
        has_lead: whether there is a lead.
        scale: factor on the logits.
        device: device of the tensors.
    """
    found: dict[Slice, list[tuple[Span, Span]]] = {}
    for segment in segments:
        for piece in segment.slices(see, has_lead, cuts_windows=False):
            kind = piece._replace(rows=(0, 0), columns=(0, 0))
            for row in range(*segment.rows):
                rows = _moved(piece.rows, row * sizes[0])
                columns = _moved(piece.columns, row * sizes[1])
                found.setdefault(kind, []).append((rows, columns))
    first, late = [], []
    for kind, spans in found.items():
        is_first = kind.causal and kind.window is None and not kind.lead
        are_sinks = not kind.causal and see.num_recent_tokens is not None
        part = _part(kind, spans, _SINK_ROWS if are_sinks else sys.maxsize, scale, device)
        (first if is_first else late).append(part)
    return [group for group in (first, late) if group]


def _moved(span: Span, distance: int) -> Span:
    return span[0] + distance, span[1] + distance


def _part(kind: Slice, spans: list[tuple[Span, Span]], most_rows: int, scale: float, device) -> FlashCall:
    """One call for slices of one kind, whose sequences have at most ``most_rows`` queries.

    A longer sequence is divided, and each piece gets a copy of its columns.

    Args:
        kind: a slice, whose rows and columns are not read.
        spans: rows and columns of each sequence, among the ``B·n`` tokens.
    """
    rows, columns, copy_of = [], [], []
    for number, (all_rows, own_columns) in enumerate(spans):
        for start in range(*all_rows, most_rows):
            rows.append((start, min(start + most_rows, all_rows[1])))
            columns.append(own_columns)
            copy_of.append(number)
    row_bounds, longest_rows = _bounds(rows, device)
    column_bounds, longest = _bounds(columns, device)
    call = PackedCall((row_bounds, column_bounds), (longest_rows, longest), kind.causal, kind.window, scale)
    part = FlashCall(kind.lead, _place(rows, device), _place(columns, device), call)
    if len(rows) == len(spans):
        return part
    index = torch.tensor(copy_of)[:, None] * longest + torch.arange(longest)
    originals = _place([columns for _, columns in spans], device)
    return part._replace(copies=(originals, index.flatten().to(device, non_blocking=True)))


def _bounds(spans: Sequence[Span], device: torch.device) -> tuple[Tensor, int]:
    """The index at which each sequence starts when they are packed, and the tokens of the longest one."""
    lengths = [end - start for start, end in spans]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return starts.to(device, non_blocking=True), max(lengths)


def _place(spans: Sequence[Span], device: torch.device) -> Place:
    """The tokens of all spans: one span if each begins where the last one ended, else their indices."""
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return spans[0][0], spans[-1][1]
    return torch.cat([torch.arange(*span) for span in spans]).to(device, non_blocking=True)


def unsupported_on_cuda(call: Call) -> str | None:
    """Why CUDA's flash op cannot run a call. None = it can."""
    q = call.q
    if q.device.type != "cuda":
        return f"device {q.device.type} has no flash op"
    if (reason := unsupported_sizes(q.dtype, q.shape[-1])) is not None:
        return reason
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return "this GPU (needs compute capability 8.0)"
    return unsupported_by_version(active_version(), q.shape[-1], capability)


def unsupported_sizes(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no GPU can run this dtype and head dimension. None = some GPUs can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {dtype} on CUDA (needs float16 or bfloat16)"
    if head_dim > 256 or head_dim % 8:
        return f"head_dim {head_dim} on CUDA (a multiple of 8, at most 256)"
    return None


def attend_on_cuda(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``. The output is laid out in memory as ``[B, m, Hq, d]``."""
    n = call.segments.end
    sizes, see, has_lead, device = (call.q.shape[2], n), call.visibility, call.lead is not None, call.q.device
    plan = call.segments.derived(
        ("varlen", sizes, see[:3], has_lead, call.scale, device),
        lambda: make_plan(call.segments.all, sizes, see, has_lead, call.scale, device),
    )
    keys, values = call.tokens.span(0, n)
    lead = (None, None) if call.lead is None else (call.lead.queries, span(call.lead.keys, 0, n))
    return differentiable(
        (call.q, keys, values, *lead),
        lambda inputs: forward(inputs, plan),
        lambda inputs, grad_out, out, lse: backward(inputs, grad_out, out, lse, plan),
        call.sink,
    )


Inputs = Sequence[Tensor | None]
"""Queries, keys, values, and the lead's queries and keys (None without a lead)."""


def differentiable(
    inputs: Inputs, forward: Callable, backward: Callable, sink: Sink | None = None
) -> tuple[Tensor, Tensor]:
    """Make a forward and a backward function one differentiable operation, and add a sink to its result.

    Args:
        inputs: the tensors.
        forward: ``(inputs) -> (out, lse)``, without the sink.
        backward: ``(inputs, grad_out, out, lse) -> gradients of the inputs``, given results with the sink.
        sink: None = there is none.

    Both functions must hold no tensors. Then autograd holds all of them, and hooks can offload them.

    Returns:
        The output, which has gradients, and the log-sum-exp, which has none.
    """
    logits, values = (None, None) if sink is None else sink
    return _Differentiable.apply(logits, values, *inputs, forward, backward)  # type: ignore[return-value]


class _Differentiable(torch.autograd.Function):
    """See ``differentiable``."""

    @staticmethod
    def forward(ctx, logits, values, *arguments):
        *inputs, forward, ctx.backward_of_inputs = arguments
        out, lse = forward(inputs)
        if logits is not None:
            out, lse = merge_sink(out, lse, Sink(logits, values))
        ctx.save_for_backward(logits, values, *inputs, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _):
        logits, values, *inputs, out, lse = ctx.saved_tensors
        of_sink = (None, None)
        if logits is not None:
            of_sink = sink_gradients(Sink(logits, values), grad_out, out, lse)
        return *of_sink, *ctx.backward_of_inputs(inputs, grad_out, out, lse), None, None


def forward(inputs: Inputs, plan: Plan) -> tuple[Tensor, Tensor]:
    """Output ``[B, Hq, m, d]`` and log-sum-exp ``[B, Hq, m]`` of the calls of a plan."""
    packed = [_packed(x) for x in inputs]
    q = packed[0]
    assert q is not None and inputs[0] is not None
    # Padding is in no part and keeps its zeros.
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=compute_dtype(q.dtype), device=q.device)
    for parts in plan:
        results = _merged([op_forward(*_arguments(part, packed), part.call) for part in parts])
        for x, values in zip((out, lse), results, strict=True):
            _put(x, parts[0].rows, values)
    return _unpacked(out, inputs[0]), lse.unflatten(0, (inputs[0].shape[0], -1)).transpose(1, 2)


def backward(inputs: Inputs, grad_out: Tensor, out: Tensor, lse: Tensor, plan: Plan) -> list[Tensor | None]:
    """The gradients of the inputs, from the gradient of the output, and output and log-sum-exp themselves."""
    packed = [_packed(x) for x in inputs]
    grad_rows = _packed(grad_out)
    out_rows = _packed(out)
    lse = lse.transpose(1, 2).flatten(0, 1)
    # At most three parts add to a token, so the inputs' dtype is exact enough, and no fp32 copy is needed.
    grads = [None if x is None else torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in packed]
    for parts in plan:
        rows = parts[0].rows
        grad, saved = _take(grad_rows, rows), (_take(out_rows, rows), _take(lse, rows).t().contiguous())
        for part in parts:
            found = op_backward(grad, *_arguments(part, packed), *saved, part.call)
            _add(grads[3 if part.lead else 0], rows, found[0])
            part.add_to_columns(grads[4 if part.lead else 1], found[1])
            part.add_to_columns(grads[2], found[2])
    return [None if g is None else _unpacked(g, x) for g, x in zip(grads, inputs, strict=True)]


def _packed(x):
    """``[B, h, n, d]`` as ``[B·n, h, d]`` with consecutive channels: a view if the strides allow it."""
    if x is None:
        return None
    x = x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpacked(x: Tensor, like: Any) -> Tensor:
    """The inverse of ``_packed``: ``[B·n, h, d]`` in the shape of ``like``, as a view."""
    return x.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def _arguments(part: FlashCall, packed: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a call."""
    q, k, v, q_lead, k_lead = packed
    queries, keys = (q_lead, k_lead) if part.lead else (q, k)
    return _take(queries, part.rows), _take(keys, part.columns), _take(v, part.columns)


def _merged(results: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge results into one softmax over the keys of all parts: the gate of eq. 4 for any number of parts.

    It works on some rows at a time.

    Args:
        results: of each part, the output ``[r, Hq, d]`` and the log-sum-exp ``[Hq, r]``.

    Returns:
        Output ``[r, Hq, d]``, in the memory of the first part's output, and log-sum-exp ``[r, Hq]``.
    """
    outs = [out for out, _ in results]
    lses = torch.stack([lse.t() for _, lse in results])
    total = lses.logsumexp(0)
    if len(outs) == 1:
        return outs[0], total
    weights = (lses - total).exp_().unsqueeze(-1)
    size = max(1, _MERGE_ELEMENTS // math.prod(outs[0].shape[1:]))
    for shares, *parts in zip(weights.split(size, dim=1), *(x.split(size) for x in outs), strict=True):
        pairs = zip(shares.unbind(), parts, strict=True)
        sum_ = torch.mul(*next(pairs))
        for share, part in pairs:
            sum_.addcmul_(share, part)
        parts[0].copy_(sum_)
    return outs[0], total


def op_forward(q: Tensor, k: Tensor, v: Tensor, call: PackedCall) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences, each of which has queries and keys.

    Args:
        q: ``[R, Hq, d]``.
        k: ``[C, H, d]``.
        v: ``[C, H, d]``.
        call: the other arguments.

    Returns:
        The output and its fp32 log-sum-exp ``[Hq, R]``.
    """
    arguments, options = _op_arguments(call)
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *arguments, False, **options)
    return out, lse


def op_backward(grad, q, k, v, out, lse, call: PackedCall) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; see ``op_forward`` for the arguments.

    ``out`` and ``lse`` may be those of a softmax over more keys than ``k``, and ``grad`` the gradient of it.
    """
    arguments, options = _op_arguments(call)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of dropout, which is off
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return _aten._flash_attention_backward(grad, q, k, v, out, lse, *arguments, state, unused, **options)


def _op_arguments(call: PackedCall) -> tuple[tuple, dict]:
    """The op's positional arguments after its tensors, and its options.

    The arguments are bounds, longest sequences, no dropout, and whether the call is causal. The options are
    scale and window. A window is causal because it reaches 0 tokens to the right.
    """
    options: dict = {"scale": call.scale}
    if call.window is not None:
        options |= {"window_size_left": call.window - 1, "window_size_right": 0}
    return (*call.bounds, *call.longest, 0.0, call.causal and call.window is None), options
