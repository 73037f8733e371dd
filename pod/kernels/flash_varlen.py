"""PoD attention as a few variable-length flash calls over all documents of a batch at once; forward and backward.

The slices are those of ``flash``: rows below ``h = n_s + n_r`` of every document see it causally; later rows see the window,
the sinks, and through the lead's queries and keys a square causal slice of distant tokens. Each of these four is *one* call
whose sequences are the documents, ``cu_seqlens`` being made once per layout of documents. Where the rows of a call are not
neighbours they are gathered; one row of one document is only ever sliced.

Outputs of the later rows are merged by their log-sum-exps in one pass with one rounding; backward calls each part's flash
backward with the merged output and log-sum-exp. Nothing here waits for the device but the first look at new ``doc_ids``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pod.kernels.documents import DocumentCache, Span, document_segments

_MERGE_ELEMENTS = 1 << 24
"""Elements of output merged at a time: the only wide temporary, 64 MiB."""
_SINK_ROWS = 4096
"""Rows that share a copy of a document's sinks. Flash's backward gives each block of keys to one multiprocessor, which would pass over
all rows alone; copies are what lets others help."""


class Call(NamedTuple):
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


class Tokens(NamedTuple):
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

    def piece(self, start: int, end: int) -> "Tokens":
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
    rows: Tokens
    columns: Tokens
    causal: bool
    window: int | None = None
    copies: tuple[Tokens, Tensor] | None = None

    def call(self, scale: float) -> Call:
        rows, columns = self.rows, self.columns
        longest = max(rows.lengths), max(columns.lengths)
        return Call((rows.bounds, columns.bounds), longest, self.causal, self.window, scale)

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

_PLANS = DocumentCache(size=8)


def make_plan(spans: Sequence[Span], windows: tuple[int, int], has_lead: bool, device: torch.device) -> Plan:
    """The calls for these documents (spans of all ``B·n`` tokens); without a lead, of sinks and window only."""
    num_sink_tokens, num_recent_tokens = windows
    tokens = partial(_tokens, device=device)
    if not has_lead and not num_sink_tokens:  # a window is causal attention of all rows, cut on its left
        longest = max((end - start for start, end in spans), default=0)
        window = num_recent_tokens if longest > num_recent_tokens else None
        everything = tokens(spans)
        return [[Part(False, everything, everything, causal=True, window=window)]] if spans else []
    first = num_sink_tokens + num_recent_tokens
    plan = []
    if spans:
        head = tokens([(start, min(end, start + first)) for start, end in spans])
        plan.append([Part(False, head, head, causal=True)])
    long = [(start, end) for start, end in spans if end - start > first]
    if long:
        rows = tokens([(start + first, end) for start, end in long])
        window = tokens([(start + num_sink_tokens + 1, end) for start, end in long])
        parts = [Part(False, rows, window, causal=True, window=num_recent_tokens)]
        if num_sink_tokens:
            parts.append(_sink_part(long, first, num_sink_tokens, device))
        if has_lead:
            distant = tokens([(start + num_sink_tokens, end - num_recent_tokens) for start, end in long])
            parts.append(Part(True, rows, distant, causal=True))
        plan.append(parts)
    return plan


def _sink_part(long: Sequence[Span], first: int, num_sink_tokens: int, device: torch.device) -> Part:
    """Sinks of these documents, for their rows from ``first`` on, in pieces of rows with a copy of the sinks each."""
    pieces, columns, copy_of = [], [], []
    for document, (start, end) in enumerate(long):
        for row in range(start + first, end, _SINK_ROWS):
            pieces.append((row, min(row + _SINK_ROWS, end)))
            columns.append((start, start + num_sink_tokens))
            copy_of.append(document)
    rows, sinks = _tokens(pieces, device), _tokens(columns, device)
    if len(pieces) == len(long):
        return Part(False, rows, sinks, causal=False)
    originals = _tokens([(start, start + num_sink_tokens) for start, _ in long], device)
    index = torch.tensor(copy_of)[:, None] * num_sink_tokens + torch.arange(num_sink_tokens)
    copies = originals, index.flatten().to(device, non_blocking=True)
    return Part(False, rows, sinks, causal=False, copies=copies)


def _tokens(spans: Sequence[Span], device: torch.device) -> Tokens:
    lengths = tuple(end - start for start, end in spans)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return Tokens((spans[0][0], spans[-1][1]), bounds, lengths)
    index = torch.cat([torch.arange(start, end) for start, end in spans]).to(device, non_blocking=True)
    return Tokens(index, bounds, lengths)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lead: tuple[Tensor, Tensor] | None,
    windows: tuple[int, int],
    doc_ids: Tensor | None,
    scale: float,
    ops: Ops,
) -> Tensor:
    """Attention with these ops, differentiable; ``[B, Hq, n, d]``, laid out as ``[B, n, Hq, d]``.

    Args:
        q: ``[B, Hq, n, d]``; k, v: ``[B, H, n, d]``; lead: its queries and keys, of the same shapes, or None for attention to
            sinks and window alone.
        windows: ``(n_s, n_r)`` in tokens; ``(0, n)`` without a lead is dense attention.
    """
    batch, _, n, _ = q.shape

    def make() -> Plan:
        segments = document_segments(doc_ids, batch, n)
        spans = [(row * n + s, row * n + e) for row, spans in enumerate(segments) for s, e in spans]
        return make_plan(spans, windows, lead is not None, q.device)

    plan = _PLANS.get(doc_ids, (batch, n, windows, lead is not None, q.device), make)
    return _Varlen.apply(q, k, v, *(lead or (None, None)), plan, scale, ops)


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
    def forward(ctx, q, k, v, q_lead, k_lead, plan: Plan, scale: float, ops: Ops):
        inputs = [_packed(x) for x in (q, k, v, q_lead, k_lead)]
        tokens = inputs[0]
        assert tokens is not None
        # Padding is in no part and keeps its zeros.
        out = torch.zeros(tokens.shape, dtype=q.dtype, device=q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.full(tokens.shape[:2], float("-inf"), dtype=wide, device=q.device)
        for parts in plan:
            results = [ops.forward(*_arguments(part, inputs), part.call(scale)) for part in parts]
            for rows, rows_out, rows_lse in _merged(parts[0].rows, results):
                rows.put(out, rows_out)
                rows.put(lse, rows_lse)
        out = _unpacked(out, q)
        ctx.save_for_backward(q, k, v, q_lead, k_lead, out, lse)
        ctx.settings = plan, scale, ops
        return out

    @staticmethod
    def backward(ctx, grad_out):
        *inputs, out, lse = ctx.saved_tensors
        plan, scale, ops = ctx.settings
        *tensors, grad_out, out = [_packed(x) for x in (*inputs, grad_out, out)]
        # At most three parts add to a token, so their dtype is enough, and no n-sized fp32 buffer is made.
        grads = [None if x is None else torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        for parts in plan:
            rows = parts[0].rows
            saved = rows.take(out), rows.take(lse).t().contiguous()
            grad = rows.take(grad_out)
            for part in parts:
                found = ops.backward(grad, *_arguments(part, tensors), *saved, part.call(scale))
                rows.add(grads[3 if part.lead else 0], found[0])
                part.add_to_columns(grads[4 if part.lead else 1], found[1])
                part.add_to_columns(grads[2], found[2])
        unpacked = (None if g is None else _unpacked(g, x) for g, x in zip(grads, inputs, strict=True))
        return *unpacked, None, None, None


def _merged(rows: Tokens, results: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tokens, Tensor, Tensor]]:
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
