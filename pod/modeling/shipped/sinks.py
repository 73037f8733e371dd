"""A constant sink: one logit per query head and one value per KV head in the place of the first tokens.

With the output ``o`` and the log-sum-exp ``l`` of what a query sees, the share of the sink is
``p = sigmoid(s - l)``, the output ``(1 - p) o + p u`` and the log-sum-exp ``logaddexp(l, s)``. Every
implementation of attention that gives a log-sum-exp gets its sink here. Flash's backward, run with the
output and the log-sum-exp of the whole softmax, gives the gradients of queries, keys and values; those of the
sink are made from the same two tensors: ``du = sum p g`` and ``ds = sum p <g, u - out>`` for the gradient
``g`` of the output.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_TILE_ELEMENTS = {"cpu": 1 << 20}
"""Numbers of the output that are merged at a time, as they become wide; 2^24 elsewhere, 64 MiB."""


PARAMETERS = ("self_attn.sinks", "self_attn.sink_values")
"""Of a decoder layer with constant sinks: ``[Hq]`` and ``[H, d]``."""


def is_constant(name: str) -> bool:
    """Whether a parameter of a model, by its name, is one of the ``PARAMETERS``."""
    return name.endswith(PARAMETERS)


class SinkReader(nn.Module):
    """Gives parameters as tensors of this pass. A module of its own, because ZeRO-3 gathers weights when a
    module runs, and attention itself has no such hooks (``drop_carry_hooks``)."""

    def forward(self, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return logits.clone(), values.clone()


class Sink(NamedTuple):
    """What stands for the first tokens: ``logits`` ``[Hq]``, scaled, of query heads; ``values`` ``[H, d]``
    of KV heads."""

    logits: Tensor
    values: Tensor

    def of_heads(self, heads: Sequence[int]) -> "Sink":
        """That of these KV heads and of their query heads."""
        neighbours = heads[-1] - heads[0] == len(heads) - 1
        index = slice(heads[0], heads[-1] + 1) if neighbours else list(heads)  # of a slice nothing is copied
        logits = self.logits.unflatten(0, (self.values.shape[0], -1))
        return Sink(logits[index].flatten(), self.values[index])

    def columns(self) -> tuple[Tensor, Tensor]:
        """Logits ``[Hq, 1]`` and values ``[Hq, 1, d]``, which broadcast to a log-sum-exp and an output."""
        groups = len(self.logits) // len(self.values)
        return self.logits[:, None], self.values.repeat_interleave(groups, dim=0)[:, None]


def add_sink(out: Tensor, lse: Tensor, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over what gave ``out`` ``[…, d]`` and ``lse`` ``[…]``, and a token with these logits and
    values.

    Logits and values broadcast to ``lse`` and ``out``. Where nothing was seen nothing is added.
    Differentiable in everything.
    """
    wide = lse.dtype
    logits = logits.to(wide)
    sees_nothing = lse == float("-inf")
    share = torch.sigmoid(logits - lse).masked_fill(sees_nothing, 0.0)[..., None]
    merged = (1 - share) * out.to(wide) + share * values.to(wide)
    total = torch.logaddexp(lse, logits).masked_fill(sees_nothing, float("-inf"))
    return merged.to(out.dtype), total


def merge_sink(out: Tensor, lse: Tensor, sink: Sink | None) -> tuple[Tensor, Tensor]:
    """``out`` ``[B, Hq, n, d]`` and ``lse`` ``[B, Hq, n]`` with the sink in them, in place and a tile at a
    time; without gradients."""
    if sink is None:
        return out, lse
    columns = sink.columns()
    for rows in _tiles(out):
        out[:, :, rows], lse[:, :, rows] = add_sink(out[:, :, rows], lse[:, :, rows], *columns)
    return out, lse


def sink_gradients(sink: Sink, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the logits ``[Hq]`` and of the values ``[H, d]``; ``out`` and ``lse`` are those with
    the sink in them."""
    wide = lse.dtype
    logits, values = (x.to(wide) for x in sink.columns())
    of_logits = torch.zeros_like(logits[:, 0])
    of_values = torch.zeros_like(values[:, 0])
    for rows in _tiles(out):
        total = lse[:, :, rows]
        sees_nothing = total == float("-inf")  # padding, whose gradient may be anything
        grad = grad_out[:, :, rows].to(wide).masked_fill(sees_nothing[..., None], 0.0)
        share = (logits - total).exp().masked_fill(sees_nothing, 0.0)
        of_logits += (share * (grad * (values - out[:, :, rows])).sum(-1)).sum((0, 2))
        of_values += (share[..., None] * grad).sum((0, 2))
    of_heads = of_values.unflatten(0, (len(sink.values), -1)).sum(1)
    return of_logits.to(sink.logits.dtype), of_heads.to(sink.values.dtype)


def _tiles(out: Tensor) -> Iterator[slice]:
    batch, heads, n, head_dim = out.shape
    tile = max(1, _TILE_ELEMENTS.get(out.device.type, 1 << 24) // max(1, batch * heads * head_dim))
    return (slice(start, start + tile) for start in range(0, n, tile))
