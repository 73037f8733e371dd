"""Decoding as grouped matrix products: each key and value is read once for all query heads of its KV head.

Keys are the left factor and queries the transposed right one. On CPUs, from 500 tokens on, this is one and a
half to three times as fast as queries on the left. Keys and values of 16 bits (or packed) become fp32 a block
at a time. On CPUs this is faster than products in bf16, and exact. Rows of unequal length run one by one.

A lead computes ``exp(logit - max)`` of distant tokens and its sum, and its followers use them again. They
merge this part with their proximal tokens by the gate ``g = sigmoid(lse_P - lse_D)`` (PoD, §2.2).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

from .attend import Call, Implementation, Span, Tokens, span, take_heads, take_rows
from .decode import DecodeCall
from .packed import Packed, Stored
from .sinks import Sink

_BLOCK_ELEMENTS = {"cpu": 1 << 19}
"""How many numbers of keys or values are converted and multiplied at a time, by type of device.

On a CPU so many stay in its cache. Devices that are not listed take 2^26.
"""

_FEW_TOKENS = 2048
"""Up to so many tokens, dividing a head's tokens among cores costs as much time as it saves."""


def decode(call: DecodeCall) -> None:
    """See ``decode.pod_decode``. It computes in fp32, or in fp64 for fp64 queries."""
    lengths = call.lengths.tolist() if call.rows is None else call.rows
    q = call.q.unflatten(1, (call.roles.num_heads, -1))
    q = q.to(call.buffers.logits.dtype) * call.scale
    out = call.out.unflatten(1, (call.roles.num_heads, -1))
    if call.near is not None:
        heads = chosen(call.roles.windows)
        limit = call.near.keys.shape[2]
        sink = None if call.sink is None else call.sink.of_heads(call.roles.windows)
        for row, slots in _alike([min(length, limit) for length in lengths]):
            keys = call.near.keys[row]
            values = call.near.values[row]
            out[row, heads] = _attend_all(q[row, heads], keys, values, slots, sink).to(out.dtype)
    if call.roles.held:
        heads = chosen(call.roles.held)
        for row, length in _alike(lengths):
            mine = call if row.stop - row.start == len(lengths) else _take_row(call, (row.start, row.stop))
            out[row, heads] = _decode_rows(mine, q[row, heads], length).to(out.dtype)


def _alike(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Slices of rows of equal length, each with this length: all rows at once, or one after the other."""
    if min(lengths) == max(lengths):
        return [(slice(0, len(lengths)), lengths[0])]
    return [(slice(row, row + 1), length) for row, length in enumerate(lengths)]


def _attend_all(
    q: Tensor, keys: Stored | None, values: Stored | None, n: int, sink: Sink | None = None
) -> Tensor:
    """Attention ``[b, h, G, d]`` of queries ``q`` ``[b, h, G, d]`` to the first ``n`` slots, and to a sink.

    The tokens of keys and values ``[b, h, C, d]`` may be in any order.
    """
    logits = q.new_empty(*q.shape[:3], n)
    write_scores(q, keys, logits)
    if sink is None:
        return _weighted(logits.softmax(-1), values, 0, n)
    column = sink.logits.to(q.dtype).view(1, *q.shape[1:3], 1).expand(q.shape[0], -1, -1, -1)
    weights, share = torch.cat((logits, column), dim=-1).softmax(-1).split((n, 1), dim=-1)
    return _weighted(weights, values, 0, n) + share * sink.values.to(q.dtype)[:, None]


def _take_row(call: DecodeCall, row: Span) -> DecodeCall:
    """The call for these rows of the batch only, as views."""

    def taken(of: Any, *names: str) -> dict[str, Any]:
        return {name: take_rows(getattr(of, name), row) for name in names}

    buffers = taken(call.buffers, "logits", "distant_lse", "weights", "weight_sums")
    kv_buffers = taken(call, "keys", "window_keys", "values")
    return call._replace(buffers=replace(call.buffers, **buffers), **kv_buffers)


def _decode_rows(call: DecodeCall, q: Tensor, length: int) -> Tensor:
    """Attention ``[b, h, G, d]`` of the heads ``roles.held``, in rows of ``length`` tokens each."""
    roles, n_window = call.roles, call.num_sink_tokens + call.num_recent_tokens
    if length > n_window and (roles.followers or roles.followed):
        return _two_parts(call, q, length)
    if roles.followed:
        call.buffers.distant_lse[:, chosen(roles.followed)] = float("-inf")
    out = torch.empty_like(q)
    for heads, keys in ((roles.leads, call.keys), (roles.followers, call.window_keys)):
        if heads:  # no head needs the logits of another one here
            at = chosen(heads, roles.held)
            values = take_heads(call.values, [*map(roles.held.index, heads)])
            out[:, at] = _attend_all(q[:, at], keys, values, length)
    return out


def _two_parts(call: DecodeCall, q: Tensor, length: int) -> Tensor:
    """``_decode_rows`` for rows with distant tokens, some of whose heads follow or are followed."""
    n_s, n_r, roles = call.num_sink_tokens, call.num_recent_tokens, call.roles
    proximal = q.new_empty(*q.shape[:3], n_s + n_r)
    if roles.leads:
        _lead(call, q, length, proximal)
    if roles.followers:
        _window_scores(call, q, length, proximal)
    weights, lse, sums = _exponentials(proximal, proximal)
    near = _weighted(weights[..., n_s:], call.values, length - n_r, length)
    if n_s:
        near += _weighted(weights[..., :n_s], call.values, 0, n_s)
    gate = torch.sigmoid(lse - call.buffers.distant_lse[:, chosen(roles.held)])
    if call.tau is not None:
        for head in map(roles.held.index, roles.followers):
            gate[:, head].masked_fill_(gate[:, head] >= call.tau, 1.0)
    far = _distant(call, gate, length)
    return near * (gate / sums)[..., None] + far * (1 - gate)[..., None]


def _lead(call: DecodeCall, q: Tensor, length: int, proximal: Tensor) -> None:
    """Compute the leads' logits of all tokens, and store those of distant tokens for their followers.

    Args:
        call: the call, whose ``buffers`` get logits, log-sum-exps and weights of distant tokens.
        q: ``[b, h, G, d]`` of the heads ``roles.held``, scaled.
        length: tokens of each row.
        proximal: ``[b, h, G, n_s + n_r]``, gets the logits of proximal tokens, in the order of positions.
    """
    n_s, oldest_recent, buffers = call.num_sink_tokens, length - call.num_recent_tokens, call.buffers
    heads = chosen(call.roles.leads)
    at = chosen(call.roles.leads, call.roles.held)
    logits = buffers.logits[:, heads, :, :length]
    write_scores(q[:, at], call.keys, logits)
    proximal[:, at, :, :n_s] = logits[..., :n_s]
    proximal[:, at, :, n_s:] = logits[..., oldest_recent:]
    distant = logits[..., n_s:oldest_recent]
    if not isinstance(heads, slice):
        buffers.logits[:, heads, :, :length] = logits
    if buffers.weights is None:
        buffers.distant_lse[:, heads] = distant.logsumexp(-1)
        return
    weights = buffers.weights[..., n_s:oldest_recent]
    own, lse, sums = _exponentials(distant, weights[:, heads] if isinstance(heads, slice) else None)
    buffers.distant_lse[:, heads], buffers.weight_sums[:, heads] = lse, sums
    if not isinstance(heads, slice):
        weights[:, heads] = own


def _window_scores(call: DecodeCall, q: Tensor, length: int, proximal: Tensor) -> None:
    """Write the followers' logits of a full window to ``proximal``, in the order of positions."""
    n_s, n_r = call.num_sink_tokens, call.num_recent_tokens
    at = chosen(call.roles.followers, call.roles.held)
    own = proximal.new_empty(q.shape[0], len(call.roles.followers), *proximal.shape[2:])
    write_scores(q[:, at], call.window_keys, own)
    wrap = (length - n_s) % n_r  # ring slots before this one hold the newest tokens
    proximal[:, at, :, :n_s] = own[..., :n_s]
    proximal[:, at, :, n_s : n_s + n_r - wrap] = own[..., n_s + wrap :]
    proximal[:, at, :, n_s + n_r - wrap :] = own[..., n_s : n_s + wrap]


def _distant(call: DecodeCall, gate: Tensor, length: int) -> Tensor:
    """Means ``[b, h, G, d]`` of distant values by their weights; 0 for KV heads that need not read them.

    ``gate`` ``[b, h, G]`` is 1 for query heads that skip distant tokens. A KV head need not read them if all
    of its query heads do.
    """
    start, stop = call.num_sink_tokens, length - call.num_recent_tokens
    buffers, held = call.buffers, chosen(call.roles.held)
    if buffers.weights is None:
        logits = buffers.logits[:, held, :, start:stop]
        weights = (logits - buffers.distant_lse[:, held, :, None]).exp()
        sums = torch.ones_like(gate)
    else:
        weights = buffers.weights[:, held, :, start:stop]
        sums = buffers.weight_sums[:, held]
    reads = torch.ones(gate.shape[:2], dtype=torch.bool)
    if call.tau is not None:
        for head in map(call.roles.held.index, call.roles.followers):
            reads[:, head] = (gate[:, head] < 1).any(-1).cpu()
    if call.tau is None or reads.all():
        return _weighted(weights, call.values, start, stop) / sums[..., None]
    out = torch.zeros(*gate.shape, call.q.shape[-1], dtype=gate.dtype, device=gate.device)
    for row, head in reads.nonzero().tolist():
        one = slice(row, row + 1), slice(head, head + 1)
        values = take_heads(take_rows(call.values, (row, row + 1)), [head])
        out[one] = _weighted(weights[one], values, start, stop) / sums[one][..., None]
    return out


def attend_slots(
    q: Tensor,
    keys: Stored,
    values: Stored,
    scale: float,
    lengths: Tensor | None = None,
    also: Sequence[tuple[Tokens, float]] = (),
    num_slots: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one query per row to all tokens in slots, which may be in any order.

    Args:
        q: ``[B, Hq, 1, d]``.
        keys, values: ``[B, H, n, d]``.
        scale: factor on the logits.
        lengths: ``[B]`` or ``[B, H]``, how many of the first slots are in use. A number above ``n`` means
            all. None = all.
        also: a few tokens that are stored elsewhere, as tensors ``[B, H, c, d]``, each with a number to add
            to their logits.
        num_slots: how many slots hold tokens, if keys and values are packed. None = ``n``.

    Returns:
        Output ``[B, Hq, 1, d]``, log-sum-exp ``[B, Hq, 1]``, and weights ``[B, H, G, n + c + …]`` of the
        slots, then of the tokens in ``also``. The last two are in at least fp32.
    """
    held = slot_logits(q, keys, num_slots or keys.shape[2], scale)
    if lengths is not None:
        used = torch.arange(held.shape[3], device=q.device) < lengths.view(len(lengths), -1, 1)
        held.masked_fill_(~used[:, :, None], float("-inf"))
    parts = [held, *(slot_logits(q, x.keys, x.keys.shape[2], scale) + extra for x, extra in also)]
    logits = torch.cat(parts, dim=3) if also else held
    weights = logits.softmax(-1)
    lse = logits.logsumexp(-1)
    counts, stored = [x.shape[3] for x in parts], (values, *(x.values for x, _ in also))
    shares = zip(weights.split(counts, dim=3), stored, strict=True)
    out = reduce(torch.add, (_weighted(share, own, 0, share.shape[3]) for share, own in shares))
    return out.flatten(1, 2)[:, :, None].to(q.dtype), lse.flatten(1)[..., None], weights


def slot_logits(q: Tensor, keys: Any, length: int, scale: float) -> Tensor:
    """Logits ``[B, H, G, length]`` of one query per row, in at least fp32.

    Args:
        q: queries ``[B, H·G, 1, d]``.
        keys: ``[B, H, n, d]``, of which the first ``length`` are used.
        length: number of keys.
        scale: factor on the logits.
    """
    wide = q if q.dtype == torch.float64 else q.float()
    grouped = wide[:, :, 0].unflatten(1, (keys.shape[1], -1)) * scale
    if isinstance(keys, Tensor) and keys.dtype == grouped.dtype:
        return _logits(grouped, keys[:, :, :length])
    logits = grouped.new_empty(*grouped.shape[:3], length)
    write_scores(grouped, keys, logits)
    return logits


def weigh_slots(weights: Tensor, values: Any, dtype: torch.dtype) -> Tensor:
    """Sums ``[B, H·G, 1, d]``, in ``dtype``, of values ``[B, H, n, d]`` with weights ``[B, H, G, n]``."""
    return _weighted(weights, values, 0, weights.shape[3]).flatten(1, 2)[:, :, None].to(dtype)


def _attend_one(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``, for one query per row that sees all tokens."""
    n = call.segments.all[0].keys[1]
    keys = _first(call.tokens.keys, n)
    values = _first(call.tokens.values, n)
    out, lse, _ = attend_slots(call.q, keys, values, call.scale, num_slots=n)
    return out, lse


def _first(x: Any, count: int) -> Any:
    """The first ``count`` tokens. Packed ones stay whole, since whoever reads them is told the number."""
    return x if isinstance(x, Packed) else span(x, 0, count)


def _unsupported_one(call: Call) -> str | None:
    """Why grouped products cannot run a call, which must have one query per row. None = they can."""
    if call.sink is not None:
        return "a constant sink"
    unlike = "more than one query per row, a lead, or rows of unlike length"
    if call.q.shape[2] != 1 or call.lead is not None or not call.segments.all:
        return unlike
    segment = call.segments.all[0]
    has_all_rows = segment.rows == (0, call.q.shape[0])
    has_the_query = segment.queries == (0, 1)
    if not (has_all_rows and has_the_query):
        return unlike
    if call.visibility.num_recent_tokens is not None or call.visibility.positions is not None:
        return "a window"
    return None


# -- products ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def chosen(heads: tuple[int, ...], among: tuple[int, ...] | None = None) -> slice | list[int]:
    """An index for these heads into a dimension of all heads, or of the heads ``among``.

    It is a slice if the heads are evenly spaced, so that indexing gives a view. Else it is a list, and
    indexing gives a copy.
    """
    places = list(heads) if among is None else [*map(among.index, heads)]
    step = places[1] - places[0] if len(places) > 1 else 1
    even = range(places[0], places[-1] + 1, step)
    return slice(even.start, even.stop, step) if list(even) == places else places


def _blocks(x: Tensor, start: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Cut tokens ``start … stop - 1`` into spans: one, or several if they are converted to ``dtype``."""
    batch, heads, _, head_dim = x.shape
    elements = _BLOCK_ELEMENTS.get(x.device.type, 1 << 26)
    block = stop if x.dtype == dtype else max(16, elements // (batch * heads * head_dim))
    return ((first, min(first + block, stop)) for first in range(start, max(stop, start + 1), block))


def write_scores(q: Tensor, keys: Stored | None, out: Tensor) -> None:
    """Write the products ``q · k`` to ``out``.

    Args:
        q: ``[b, h, G, d]``.
        keys: ``[b, h, C, d]``, of which the first ``n`` are used.
        out: ``[b, h, G, n]``.
    """
    assert keys is not None, "heads without keys"
    if not isinstance(keys, Tensor):
        keys.scores(q, out)
        return
    for start, stop in _blocks(keys, 0, out.shape[3], q.dtype):
        out[..., start:stop] = _logits(q, keys[:, :, start:stop].to(q.dtype))


def _logits(q: Tensor, keys: Tensor) -> Tensor:
    """Products ``q · k`` ``[b, h, G, n]`` of ``[b, h, G, d]`` and ``[b, h, n, d]``, which have one dtype.

    The result is transposed in memory.
    """
    # they must be rows in memory: with columns in memory, the product would be a slow one
    columns = q.flatten(0, 1).transpose(1, 2)
    return torch.bmm(keys.flatten(0, 1), columns).unflatten(0, q.shape[:2]).transpose(2, 3)


def _weighted(weights: Tensor, values: Stored | None, start: int, stop: int) -> Tensor:
    """Sums ``[b, h, G, d]`` of the values ``start … stop - 1`` with weights ``[b, h, G, stop - start]``."""
    assert values is not None, "heads without values"
    if isinstance(values, Packed):
        return values.weighted(weights, start, stop)
    parts = (
        _product(weights[..., first - start : last - start], values[:, :, first:last].to(weights.dtype))
        for first, last in _blocks(values, start, stop, weights.dtype)
    )
    return reduce(torch.add, parts)


def _product(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values``, with the work divided evenly among the cores of a CPU.

    Each core computes whole heads. If the number of heads is not a multiple of the cores, the tokens of the
    last heads are divided among all cores.
    """
    batch, heads, tokens, _ = values.shape
    cores = torch.get_num_threads() if values.device.type == "cpu" else 1
    if batch > 1 or tokens <= _FEW_TOKENS or heads % cores == 0:
        return weights @ values
    whole = heads - heads % cores
    cut = tokens - tokens % cores
    out = [weights[:, :whole] @ values[:, :whole]]
    for left, right in zip(weights[0, whole:], values[0, whole:], strict=True):
        weights_of = left[:, :cut].unflatten(1, (cores, -1))
        values_of = right[:cut].unflatten(0, (cores, -1))
        parts = weights_of.transpose(0, 1) @ values_of
        out.append((parts.sum(0) + left[:, cut:] @ right[cut:])[None, None])
    return torch.cat(out, 1)


def _exponentials(logits: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``exp(logits - max)`` over the last dimension, in ``out`` if it is given.

    Returns:
        The exponentials, the log-sum-exp of the logits, and the sum of the exponentials, both over the last
        dimension.
    """
    peak = logits.amax(-1, keepdim=True)
    out = torch.sub(logits, peak, out=out).exp_()
    sums = out.sum(-1)
    return out, peak.squeeze(-1) + sums.log(), sums


DECODE_GROUPED = Implementation(decode, lambda call: None)
ATTEND_GROUPED = Implementation(_attend_one, _unsupported_one)
