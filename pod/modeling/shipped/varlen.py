"""Attention as a few variable-length flash calls over all segments of a batch at once, on CUDA; forward and backward.

The slices are those of ``flash``: rows below ``h = n_s + n_r`` of every segment see all before them; later rows see the window,
the sinks, and through the lead's queries and keys a causal slice of distant tokens. Each of these four is *one* call of PyTorch's op,
causal from the bottom right, whose sequences are the segments; ``cu_seqlens`` are made once in a pass. Where the rows of a call
are not neighbours they are gathered. Which kernels run is PyTorch's choice: its FlashAttention 2, or what
``torch.nn.attention.activate_flash_attention_impl`` put in its place.

Outputs of the later rows are merged by their log-sum-exps in one pass with one rounding; backward calls each part's flash
backward with the merged output and log-sum-exp.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .attend import Call, Segment, Span, Visibility, span

_aten = torch.ops.aten
_MERGE_ELEMENTS = 1 << 24
"""Elements of output merged at a time: the only wide temporary, 64 MiB."""
_SINK_ROWS = 4096
"""Rows that share a copy of a document's sinks. Flash's backward gives each block of keys to one multiprocessor, which would pass over
all rows alone; copies are what lets others help."""


class PackedCall(NamedTuple):
    """What a variable-length flash op must know besides its tensors.

    Attributes:
        bounds: int32 ``[sequences + 1]`` on the device, where each sequence starts among the packed queries, and among the keys.
        longest: tokens of the longest sequence, of queries and of keys.
        causal: bottom-right aligned. With a ``window`` of w tokens only the w newest visible keys count.
    """

    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    causal: bool
    window: int | None
    scale: float


class Ops(NamedTuple):
    """A library's flash attention on packed sequences; every sequence has queries and keys.

    Attributes:
        forward: ``(q [R, Hq, d], k [C, H, d], v [C, H, d], call)`` to the output ``[R, Hq, d]`` and the fp32 log-sum-exp
            ``[Hq, R]``, natural.
        backward: ``(grad, q, k, v, out, lse, call)`` to the gradients of q, k and v. The output and log-sum-exp may be those of a
            softmax over more keys than these.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class Columns(NamedTuple):
    """Some tokens of all ``B·n``: one span, or an index; and the bounds of the sequences among them."""

    select: Span | Tensor
    bounds: Tensor
    lengths: tuple[int, ...]

    def take(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.select) if isinstance(self.select, Tensor) else _cut(x, self.select)

    def put(self, x: Tensor, values: Tensor) -> None:
        if isinstance(self.select, Tensor):
            x.index_copy_(0, self.select, values)
        else:
            _cut(x, self.select).copy_(values)

    def add(self, x: Tensor, values: Tensor) -> None:
        if isinstance(self.select, Tensor):
            x.index_add_(0, self.select, values)
        else:
            _cut(x, self.select).add_(values)

    def piece(self, start: int, end: int) -> "Columns":
        """Tokens ``start`` to ``end`` of these, for ``put``; bounds and lengths stay those of all."""
        if isinstance(self.select, Tensor):
            return self._replace(select=_cut(self.select, (start, end)))
        first = self.select[0]
        return self._replace(select=(first + start, first + end))


def _cut(x: Tensor, span: Span) -> Tensor:
    return x.narrow(0, span[0], span[1] - span[0])


class Part(NamedTuple):
    """One flash call: these rows of the (own or lead) queries on these columns of keys and values.

    Attributes:
        copies: where the columns are copies, the original tokens, and which of them each column is of.
    """

    lead: bool
    rows: Columns
    columns: Columns
    causal: bool
    window: int | None = None
    copies: tuple[Columns, Tensor] | None = None

    def call(self, scale: float) -> PackedCall:
        rows, columns = self.rows, self.columns
        longest = max(rows.lengths), max(columns.lengths)
        return PackedCall((rows.bounds, columns.bounds), longest, self.causal, self.window, scale)

    def add_to_columns(self, x: Tensor, values: Tensor) -> None:
        if self.copies is None:
            self.columns.add(x, values)
            return
        original, copy_of = self.copies
        # Up to n / 4096 copies: on CUDA their sum would otherwise be rounded as often, in no fixed order.
        wide = torch.promote_types(x.dtype, torch.float32)
        sums = torch.zeros(sum(original.lengths), *values.shape[1:], dtype=wide, device=x.device)
        original.add(x, sums.index_add_(0, copy_of, values.to(wide)).to(x.dtype))


Plan = list[list[Part]]
"""Groups of parts. The parts of a group have the same rows in the same order, and no other group has them."""


class _Piece(NamedTuple):
    """One row of one segment: where its queries and keys start among all ``B·m`` and ``B·n``, and how many they are."""

    query: int
    key: int
    m: int
    n: int

    def rows(self, start: int, stop: int) -> Span:
        return self.query + start, self.query + stop

    def columns(self, start: int, stop: int) -> Span:
        return self.key + start, self.key + stop


def make_plan(
    segments: Sequence[Segment], sizes: tuple[int, int], see: Visibility, has_lead: bool, device
) -> Plan:
    """The calls for these segments; ``sizes`` are the columns of queries and of keys in a row of the batch."""
    pieces = [
        _Piece(
            row * sizes[0] + s.queries[0],
            row * sizes[1] + s.keys[0],
            s.queries[1] - s.queries[0],
            s.keys[1] - s.keys[0],
        )
        for s in segments
        for row in range(*s.rows)
    ]
    n_s, n_r = see.num_sink_tokens, see.num_recent_tokens
    if n_r is None or (not has_lead and not n_s):  # a window is causal attention of all rows, cut on its left
        window = n_r if n_r is not None and n_r < max((p.n for p in pieces), default=0) else None
        part = _part(pieces, lambda p: p.rows(0, p.m), lambda p: p.columns(0, p.n), device)
        return [[part._replace(causal=see.causal, window=window)]] if pieces else []
    first = [min(max(n_s + n_r - (p.n - p.m), 0), p.m) for p in pieces]
    heads = [p._replace(m=f, n=p.n - p.m + f) for p, f in zip(pieces, first, strict=True) if f]
    plan = []
    if heads:
        plan.append([_part(heads, lambda p: p.rows(0, p.m), lambda p: p.columns(0, p.n), device)])
    long = [p._replace(query=p.query + f, m=p.m - f) for p, f in zip(pieces, first, strict=True) if f < p.m]
    if long:
        plan.append(_late_parts(long, n_s, n_r, has_lead, device))
    return plan


def _late_parts(pieces: list[_Piece], n_s: int, n_r: int, has_lead: bool, device) -> list[Part]:
    """Rows that have distant tokens: window, sinks, and the lead's."""

    def rows(p: _Piece) -> Span:
        return p.rows(0, p.m)

    window = _part(pieces, rows, lambda p: p.columns(p.n - p.m - n_r + 1, p.n), device)
    parts = [window._replace(window=n_r)]
    if n_s:
        parts.append(_sink_part(pieces, n_s, device))
    if has_lead:
        distant = _part(pieces, rows, lambda p: p.columns(n_s, p.n - n_r), device)
        parts.append(distant._replace(lead=True))
    return parts


def _part(
    pieces: list[_Piece], rows: Callable[[_Piece], Span], columns: Callable[[_Piece], Span], device
) -> Part:
    """A causal call whose sequences are these."""
    return Part(
        False, _tokens(list(map(rows, pieces)), device), _tokens(list(map(columns, pieces)), device), True
    )


def _sink_part(pieces: list[_Piece], num_sink_tokens: int, device: torch.device) -> Part:
    """Sinks of these sequences for all of their rows, in pieces of rows with a copy of the sinks each."""
    rows, columns, copy_of = [], [], []
    for number, p in enumerate(pieces):
        for start in range(0, p.m, _SINK_ROWS):
            rows.append(p.rows(start, min(start + _SINK_ROWS, p.m)))
            columns.append(p.columns(0, num_sink_tokens))
            copy_of.append(number)
    part = Part(False, _tokens(rows, device), _tokens(columns, device), causal=False)
    if len(rows) == len(pieces):
        return part
    originals = _tokens([p.columns(0, num_sink_tokens) for p in pieces], device)
    index = torch.tensor(copy_of)[:, None] * num_sink_tokens + torch.arange(num_sink_tokens)
    return part._replace(copies=(originals, index.flatten().to(device, non_blocking=True)))


def _tokens(spans: Sequence[Span], device: torch.device) -> Columns:
    lengths = tuple(end - start for start, end in spans)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return Columns((spans[0][0], spans[-1][1]), bounds, lengths)
    index = torch.cat([torch.arange(start, end) for start, end in spans]).to(device, non_blocking=True)
    return Columns(index, bounds, lengths)


def unsupported_on_cuda(call: Call) -> str | None:
    """Why CUDA's flash op cannot run a call; None when it can."""
    q = call.q
    if q.device.type != "cuda":
        return f"device {q.device.type} has no flash op"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {q.dtype} on CUDA (needs float16 or bfloat16)"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"head_dim {q.shape[-1]} on CUDA (a multiple of 8, at most 256)"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "this GPU (needs compute capability 8.0)"
    return None


def attend_on_cuda(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``; the output is laid out as ``[B, m, Hq, d]``."""
    n = max((segment.keys[1] for segment in call.segments.all), default=0)  # sources may have room for more
    sizes, see, has_lead = (call.q.shape[2], n), call.visibility, call.lead is not None
    key = "varlen", sizes, see[:3], has_lead, call.q.device
    plan = call.segments.derived(
        key, lambda: make_plan(call.segments.all, sizes, see, has_lead, call.q.device)
    )
    keys, values = (span(x, 0, n) for x in call.tokens)
    lead = (None, None) if call.lead is None else (call.lead.queries, span(call.lead.keys, 0, n))
    return _Varlen.apply(call.q, keys, values, *lead, plan, call.scale)  # type: ignore[return-value]


def _packed(x: Tensor | None) -> Tensor | None:
    """``[B, h, n, d]`` to ``[B·n, h, d]`` with neighbouring channels; a view where the layout allows."""
    if x is None:
        return None
    x = x.transpose(1, 2).flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpacked(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def _arguments(part: Part, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    q, k, v, q_lead, k_lead = inputs
    queries, keys = (q_lead, k_lead) if part.lead else (q, k)
    assert queries is not None and keys is not None and v is not None
    return [part.rows.take(queries), part.columns.take(keys), part.columns.take(v)]


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_lead, k_lead, plan: Plan, scale: float):
        inputs = [_packed(x) for x in (q, k, v, q_lead, k_lead)]
        tokens = inputs[0]
        assert tokens is not None
        # Padding is in no part and keeps its zeros.
        out = torch.zeros(tokens.shape, dtype=q.dtype, device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(tokens.shape[:2], float("-inf"), dtype=wide, device=q.device)
        for parts in plan:
            results = [OPS.forward(*_arguments(part, inputs), part.call(scale)) for part in parts]
            for rows, rows_out, rows_lse in _merged(parts[0].rows, results):
                rows.put(out, rows_out)
                rows.put(lse, rows_lse)
        out, lse = _unpacked(out, q), lse.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
        ctx.save_for_backward(q, k, v, q_lead, k_lead, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.settings = plan, scale
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, _):
        *inputs, out, lse = ctx.saved_tensors
        plan, scale = ctx.settings
        *tensors, grad_out, out = [_packed(x) for x in (*inputs, grad_out, out)]
        lse = lse.transpose(1, 2).flatten(0, 1)
        # At most three parts add to a token, so their dtype is enough, and no n-sized fp32 buffer is made.
        grads = [None if x is None else torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        for parts in plan:
            rows = parts[0].rows
            saved = rows.take(out), rows.take(lse).t().contiguous()
            grad = rows.take(grad_out)
            for part in parts:
                found = OPS.backward(grad, *_arguments(part, tensors), *saved, part.call(scale))
                rows.add(grads[3 if part.lead else 0], found[0])
                part.add_to_columns(grads[4 if part.lead else 1], found[1])
                part.add_to_columns(grads[2], found[2])
        unpacked = (None if g is None else _unpacked(g, x) for g, x in zip(grads, inputs, strict=True))
        return *unpacked, None, None


def _merged(rows: Columns, results: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Columns, Tensor, Tensor]]:
    """One softmax over the keys of all parts (the gate of eq. 4 for any number of them), some rows at a time.

    Yields:
        The rows, their output ``[r, Hq, d]`` and log-sum-exp ``[r, Hq]``.
    """
    if len(results) == 1:
        out, lse = results[0]
        yield rows, out, lse.t()
        return
    outs = [out for out, _ in results]
    lses = torch.stack([lse for _, lse in results]).transpose(1, 2)
    total = lses.logsumexp(0)
    weights = (lses - total).exp_().unsqueeze(-1).unbind()
    num_rows, *per_row = outs[0].shape
    size = max(1, _MERGE_ELEMENTS // math.prod(per_row))
    for start in range(0, num_rows, size):
        span = start, min(start + size, num_rows)
        sum_ = _cut(weights[0], span) * _cut(outs[0], span)
        for weight, out in zip(weights[1:], outs[1:], strict=True):
            sum_.addcmul_(_cut(weight, span), _cut(out, span))
        yield rows.piece(*span), sum_.to(outs[0].dtype), _cut(total, span)


def _op_forward(q: Tensor, k: Tensor, v: Tensor, call: PackedCall) -> tuple[Tensor, Tensor]:
    arguments, options = _op_arguments(call)
    out, lse, *_ = _aten._flash_attention_forward(q, k, v, *arguments, False, **options)
    return out, lse


def _op_backward(grad, q, k, v, out, lse, call: PackedCall) -> tuple[Tensor, Tensor, Tensor]:
    arguments, options = _op_arguments(call)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is off
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return _aten._flash_attention_backward(grad, q, k, v, out, lse, *arguments, state, unused, **options)


def _op_arguments(call: PackedCall) -> tuple[tuple, dict]:
    """Bounds, longest sequences, no dropout, whether causal; and scale and window. A window is causal by its right side of 0."""
    options: dict = {"scale": call.scale}
    if call.window is not None:
        options |= {"window_size_left": call.window - 1, "window_size_right": 0}
    return (*call.bounds, *call.longest, 0.0, call.causal and call.window is None), options


OPS = Ops(_op_forward, _op_backward)
