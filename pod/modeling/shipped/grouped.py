"""Decoding as grouped matrix products on views: the query heads of a KV head share each key and value that is read.

Products run over blocks of tokens, keys as the left factor: behind many tokens twice as fast on CPUs as one product with the
queries left. Keys and values of 16 bits (or packed) become fp32 a block at a time, which is faster there than products in bf16, and exact.
Rows of unlike length run one after the other. The work of a lead on distant tokens serves its block: followers reuse
``exp(logit - max)`` and its sum, and merge both parts by the gate ``g = sigmoid(lse_P - lse_D)`` (METHODS.md §1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .attend import Call, Implementation, Span, Tokens, compute_dtype, span, take_heads, take_rows
from .decode import DecodeCall, Decoder
from .packed import Packed, Stored
from .sharing import Roles

_BLOCK_ELEMENTS = {"cpu": 1 << 19}
"""Keys or values per product: they stay in a CPU's cache while they are converted and used; 2^26 elsewhere."""

_FEW_TOKENS = 4096
"""Up to which one product with the queries left is the faster one on CPUs."""


def decode(call: DecodeCall) -> None:
    """See ``decode.pod_decode``; computes in fp32, or in fp64 for fp64 queries."""
    lengths = call.lengths.tolist() if call.rows is None else call.rows
    out = call.out.unflatten(1, (call.roles.num_heads, -1))
    if call.near is not None:
        heads, limit = _chosen(call.roles.windows), call.near.keys.shape[2]
        for row, slots in _alike([min(length, limit) for length in lengths]):
            out[row, heads] = _near(call, row, slots).to(out.dtype)
    for heads, part in _held(call):
        for row, length in _alike(lengths):
            mine = part if row.stop - row.start == len(lengths) else _take_row(part, (row.start, row.stop))
            out[row, heads] = _decode_rows(mine, length)


def _alike(lengths: Sequence[int]) -> list[tuple[slice, int]]:
    """Rows with their length: all at once when they agree, else one after the other."""
    if min(lengths) == max(lengths):
        return [(slice(0, len(lengths)), lengths[0])]
    return [(slice(row, row + 1), length) for row, length in enumerate(lengths)]


def _near(call: DecodeCall, row: slice, slots: int) -> Tensor:
    """``[b, windows, G, d]`` of heads that keep their windows: all slots in use are seen, in whatever order."""
    assert call.near is not None
    q, (keys, values) = call.q.unflatten(1, (call.roles.num_heads, -1)), call.near
    q = q[row, _chosen(call.roles.windows)].to(call.buffers.logits.dtype) * call.scale
    logits = q.new_empty(*q.shape[:3], slots)
    _scores(q, keys[row], logits)
    return _weighted(logits.softmax(-1), values[row], 0, slots)


def _held(call: DecodeCall) -> Iterator[tuple[Any, DecodeCall]]:
    """The call without heads that keep their windows, in parts of evenly spaced heads, so that stores and buffers are views."""
    roles = call.roles
    if not roles.windows:
        yield slice(None), call
        return
    place, names = 0, ("leads", "followers", "followed")
    q = call.q.unflatten(1, (roles.num_heads, -1))
    for heads in _progressions(roles.held):
        chosen = _chosen(heads)
        mine = {name: [h for h in heads if h in getattr(roles, name)] for name in names}
        buffers = {
            name: x if x is None else x[:, chosen]
            for name in ("logits", "distant_lse", "weights", "weight_sums")
            for x in (getattr(call.buffers, name),)
        }
        yield (
            chosen,
            call._replace(
                q=q[:, chosen].flatten(1, 2),
                keys=_places(call.keys, roles.leads, mine["leads"]),
                window_keys=_places(call.window_keys, roles.followers, mine["followers"]),
                values=take_heads(call.values, range(place, place + len(heads))),
                buffers=replace(call.buffers, **buffers),
                roles=_renumbered(heads, *map(tuple, mine.values())),
                near=None,
            ),
        )
        place += len(heads)


@lru_cache(maxsize=1024)
def _renumbered(heads: tuple[int, ...], *roles: tuple[int, ...]) -> Roles:
    """The roles of some heads, numbered by their places among these."""
    return Roles(*(tuple(map(heads.index, role)) for role in roles))


def _places(x: Stored | None, heads: Sequence[int], wanted: Sequence[int]) -> Any:
    """The part of a store of ``heads`` that belongs to ``wanted``, neighbours among these; None for none."""
    return take_heads(x, [heads.index(head) for head in wanted]) if wanted else None


@lru_cache(maxsize=1024)
def _progressions(heads: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Rising numbers in as few parts as a walk finds whose numbers are evenly spaced."""
    found: list[tuple[int, ...]] = []
    for head in heads:
        last = found[-1] if found else ()
        if len(last) == 1 or (last and head - last[-1] == last[1] - last[0]):
            found[-1] = (*last, head)
        else:
            found.append((head,))
    return found


def _take_row(call: DecodeCall, row: Span) -> DecodeCall:
    def taken(of: Any, *names: str) -> dict[str, Any]:
        return {name: take_rows(getattr(of, name), row) for name in names}

    buffers = taken(call.buffers, "logits", "distant_lse", "weights", "weight_sums")
    stores = taken(call, "q", "keys", "window_keys", "values")
    return call._replace(buffers=replace(call.buffers, **buffers), **stores)


def _decode_rows(call: DecodeCall, length: int) -> Tensor:
    """``[b, H, G, d]`` of rows of ``length`` tokens each."""
    compute = call.buffers.logits.dtype
    q = call.q.unflatten(1, (call.roles.num_heads, -1)).to(compute) * call.scale
    shares = bool(call.roles.followers or call.roles.followed)
    if length > call.num_sink_tokens + call.num_recent_tokens and shares:
        return _two_parts(call, q, length)
    if call.roles.followed:
        call.buffers.distant_lse[:, _chosen(call.roles.followed)] = float("-inf")
    return _one_part(call, q, length)


def _one_part(call: DecodeCall, q: Tensor, length: int) -> Tensor:
    """``[B, H, G, d]`` when no head takes logits from another: no distant token, or a dense layer."""
    logits = call.buffers.logits[:, :, :, :length]
    _scores(q, call.keys, logits, call.roles.leads)
    _scores(q, call.window_keys, logits, call.roles.followers)
    weights, _, sums = _exponentials(logits, logits)
    return _weighted(weights, call.values, 0, length) / sums[..., None]


def _two_parts(call: DecodeCall, q: Tensor, length: int) -> Tensor:
    """``[B, H, G, d]`` from proximal and distant tokens, of which there are some."""
    n_s, n_r = call.num_sink_tokens, call.num_recent_tokens
    proximal = q.new_empty(*q.shape[:3], n_s + n_r)
    if call.roles.leads:
        _lead(call, q, length, proximal)
    if call.roles.followers:
        _window_scores(call, q, length, proximal)
    weights, lse, sums = _exponentials(proximal, proximal)
    near = _weighted(weights[..., n_s:], call.values, length - n_r, length)
    if n_s:
        near += _weighted(weights[..., :n_s], call.values, 0, n_s)
    gate = torch.sigmoid(lse - call.buffers.distant_lse)
    if call.tau is not None:
        for head in call.roles.followers:
            gate[:, head].masked_fill_(gate[:, head] >= call.tau, 1.0)
    far = _distant(call, gate, length)
    return near * (gate / sums)[..., None] + far * (1 - gate)[..., None]


def _lead(call: DecodeCall, q: Tensor, length: int, proximal: Tensor) -> None:
    """Logits of all tokens; the distant ones also as the block will use them."""
    n_s, oldest_recent = call.num_sink_tokens, length - call.num_recent_tokens
    buffers, heads = call.buffers, _chosen(call.roles.leads)
    _scores(q, call.keys, buffers.logits[..., :length], call.roles.leads)
    logits = buffers.logits[:, heads, :, :length]
    proximal[:, heads, :, :n_s] = logits[..., :n_s]
    proximal[:, heads, :, n_s:] = logits[..., oldest_recent:]
    distant = logits[..., n_s:oldest_recent]
    if buffers.weights is None:
        buffers.distant_lse[:, heads] = distant.logsumexp(-1)
        return
    weights = buffers.weights[..., n_s:oldest_recent]
    own, lse, sums = _exponentials(distant, weights[:, heads] if isinstance(heads, slice) else None)
    buffers.distant_lse[:, heads], buffers.weight_sums[:, heads] = lse, sums
    if not isinstance(heads, slice):
        weights[:, heads] = own


def _window_scores(call: DecodeCall, q: Tensor, length: int, proximal: Tensor) -> None:
    """Logits of a full window, put in the order of positions."""
    n_s, n_r, heads = call.num_sink_tokens, call.num_recent_tokens, _chosen(call.roles.followers)
    own = proximal.new_empty(q.shape[0], len(call.roles.followers), *proximal.shape[2:])
    _scores(q[:, heads], call.window_keys, own)
    wrap = (length - n_s) % n_r  # ring slots before this one hold the newest tokens
    proximal[:, heads, :, :n_s] = own[..., :n_s]
    proximal[:, heads, :, n_s : n_s + n_r - wrap] = own[..., n_s + wrap :]
    proximal[:, heads, :, n_s + n_r - wrap :] = own[..., n_s : n_s + wrap]


def _distant(call: DecodeCall, gate: Tensor, length: int) -> Tensor:
    """Means ``[B, H, G, d]`` of distant values; 0 for KV heads in which every query head skips them."""
    start, stop = call.num_sink_tokens, length - call.num_recent_tokens
    buffers = call.buffers
    logits = buffers.logits[..., start:stop]
    if buffers.weights is None:
        weights, sums = (logits - buffers.distant_lse[..., None]).exp(), torch.ones_like(gate)
    else:
        weights, sums = buffers.weights[..., start:stop], buffers.weight_sums
    reads = torch.ones(gate.shape[:2], dtype=torch.bool)
    if call.tau is not None:
        for head in call.roles.followers:
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
    """Attention of one query per row to tokens that it sees in whatever order they are held.

    Args:
        q: ``[B, Hq, 1, d]``; keys, values: ``[B, H, n, d]``.
        lengths: ``[B]`` or ``[B, H]`` slots in use, the first ones (more than there are = all); None = all.
        num_slots: of packed tokens, how many there are; None = ``n``.
        also: a few tokens that are held elsewhere, with what is added to their logits: tensors ``[B, H, c, d]``.

    Returns:
        Output ``[B, Hq, 1, d]``, log-sum-exp ``[B, Hq, 1]`` and weights ``[B, H, G, n + …]`` of the slots and of the tokens
        of ``also``, both in at least fp32.
    """
    compute, heads, n = compute_dtype(q.dtype), keys.shape[1], num_slots or keys.shape[2]
    grouped = q[:, :, 0].unflatten(1, (heads, -1)).to(compute) * scale
    parts = [(n, keys, values, 0.0), *((x.keys.shape[2], *x, extra) for x, extra in also)]
    ends = list(accumulate(part[0] for part in parts))
    logits = grouped.new_empty(*grouped.shape[:3], ends[-1])
    for end, (count, part_keys, _, extra) in zip(ends, parts, strict=True):
        part = logits[..., end - count : end]
        _scores(grouped, part_keys, part)
        if extra:
            part += extra
    if lengths is not None:
        used = torch.arange(n, device=q.device) < lengths.view(len(lengths), -1, 1)
        logits[..., :n].masked_fill_(~used[:, :, None], float("-inf"))
    weights, lse = logits.softmax(-1), logits.logsumexp(-1)
    products = (
        _weighted(weights[..., end - count : end], part_values, 0, count)
        for end, (count, _, part_values, _) in zip(ends, parts, strict=True)
    )
    out = reduce(torch.add, products)
    return out.flatten(1, 2)[:, :, None].to(q.dtype), lse.flatten(1)[..., None], weights


def slot_logits(q: Tensor, keys: Any, length: int, scale: float) -> Tensor:
    """Logits ``[B, H, G, length]`` in at least fp32 of queries ``[B, H·G, 1, d]`` and the first keys of ``[B, H, n, d]``."""
    grouped = q[:, :, 0].unflatten(1, (keys.shape[1], -1)).to(compute_dtype(q.dtype)) * scale
    if isinstance(keys, Tensor) and keys.dtype == grouped.dtype and length <= _FEW_TOKENS:
        return grouped @ keys[:, :, :length].transpose(2, 3)
    logits = grouped.new_empty(*grouped.shape[:3], length)
    _scores(grouped, keys, logits)
    return logits


def weigh_slots(weights: Tensor, values: Any, dtype: torch.dtype) -> Tensor:
    """``[B, H·G, 1, d]`` of ``dtype``: values ``[B, H, n, d]`` with weights ``[B, H, G, n]``."""
    return _weighted(weights, values, 0, weights.shape[3]).flatten(1, 2)[:, :, None].to(dtype)


def _attend_one(call: Call) -> tuple[Tensor, Tensor]:
    n = call.segments.all[0].keys[1]
    keys, values = (x if isinstance(x, Packed) else span(x, 0, n) for x in call.tokens)
    out, lse, _ = attend_slots(call.q, keys, values, call.scale, num_slots=n)
    return out, lse


def _unsupported_one(call: Call) -> str | None:
    """Why one query per row cannot be attended by grouped products; None when it can."""
    first, see = call.segments.all[:1] and call.segments.all[0][:2], call.visibility
    if call.q.shape[2] != 1 or call.lead is not None or first != ((0, call.q.shape[0]), (0, 1)):
        return "more than one query per row, a lead, or rows of unlike length"
    return None if see.num_recent_tokens is None and see.positions is None else "a window"


# -- products ----------------------------------------------------------------------------------------------------


def _chosen(heads: Sequence[int]) -> slice | list[int]:
    """Heads as an index: of evenly spaced ones views, of others copies."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    even = slice(heads[0], heads[-1] + 1, step)
    return even if list(range(heads[0], heads[-1] + 1, step)) == list(heads) else list(heads)


def _blocks(x: Tensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    batch, heads, _, head_dim = x.shape
    elements = _BLOCK_ELEMENTS.get(x.device.type, 1 << 26)
    block = max(16, elements // (batch * heads * head_dim))
    return ((first, min(first + block, stop)) for first in range(start, stop, block))


def _scores(q: Tensor, keys: Stored | None, out: Tensor, heads: Sequence[int] | None = None) -> None:
    """Write ``q · k`` of ``q`` ``[b, H, G, d]`` and the first tokens of the keys of ``heads`` (None = all) to ``out``
    ``[b, H, G, n]``."""
    if keys is None:
        return
    chosen = slice(None) if heads is None else _chosen(heads)
    if isinstance(chosen, list):
        part = out[:, chosen]
        _scores(q[:, chosen], keys, part)
        out[:, chosen] = part
        return
    if heads is not None:
        q, out = q[:, chosen], out[:, chosen]
    if isinstance(keys, Packed):
        keys.scores(q, out)
        return
    q = q.transpose(2, 3)
    for start, stop in _blocks(keys, 0, out.shape[3]):
        out[..., start:stop] = (keys[:, :, start:stop].to(q.dtype) @ q).transpose(2, 3)


def _weighted(weights: Tensor, values: Stored | None, start: int, stop: int) -> Tensor:
    """Sums ``[b, h, G, d]`` of the values from ``start`` to ``stop`` with weights ``[b, h, G, stop - start]``."""
    assert values is not None
    if isinstance(values, Packed):
        return values.weighted(weights, start, stop)
    assert values is not None, "heads without values"
    if values.dtype == weights.dtype:
        return weights @ values[:, :, start:stop]
    out = weights.new_zeros(*weights.shape[:3], values.shape[3])
    for first, last in _blocks(values, start, stop):
        out += weights[..., first - start : last - start] @ values[:, :, first:last].to(weights.dtype)
    return out


def _exponentials(logits: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """``exp(logits - max)``, written to ``out`` if it is given; also their log-sum-exp and sum over the last dimension."""
    peak = logits.amax(-1, keepdim=True)
    out = torch.sub(logits, peak, out=out).exp_()
    sums = out.sum(-1)
    return out, peak.squeeze(-1) + sums.log(), sums


DECODE_GROUPED = Decoder(decode, lambda call: None)
ATTEND_GROUPED = Implementation(_attend_one, _unsupported_one)
