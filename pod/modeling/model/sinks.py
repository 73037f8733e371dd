"""A constant sink: a logit per query head, a value and a key per KV head, instead of stored first tokens.

Let ``o`` be the output and ``l`` the log-sum-exp of the tokens that a query sees, ``s`` the sink's logit and
``u`` its value. The share of the sink is ``p = sigmoid(s - l)``. With the sink, the output is
``(1 - p) o + p u`` and the log-sum-exp is ``logaddexp(l, s)``. So a sink can be added to the result of any
implementation of attention that gives a log-sum-exp.

The logit of the first tokens depends on the query. Where keys have large biases, it varies so much that no
constant can stand for it: on Qwen2.5-Coder-0.5B by hundreds, in two layers. So the sink has a key ``c``,
which is subtracted from all keys of the window. Without rotation, each of their logits changes by
``-<q, c>``, and their softmax stays. The constant ``s`` beside them does not change, and so acts like
``s + <q, c>`` (scaled like all logits). Example: with ``<q, c> = 20`` and ``s = 1``, logits of 25 and 20
become 5 and 0. The softmax of 5, 0 and 1 is that of 25, 20 and 21.

RoPE turns ``c`` by an angle that depends on the distance. So the measured ``c`` is zero in channels that turn
much within a window. Training may change that.

Flash's backward, run with the output and the log-sum-exp of the whole softmax, gives the gradients of
queries, keys and values. The gradients of the sink follow from the same two tensors: ``du = sum p g`` and
``ds = sum p <g, u - out>``, with the gradient ``g`` of the output.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_TILE_ELEMENTS = {"cpu": 1 << 20}
"""How many numbers of the output are merged at a time, by type of device. Others take 2^24 (64 MiB).

The number is limited because these numbers are copied to the wider dtype of the log-sum-exp.
"""


PARAMETERS = ("self_attn.sinks", "self_attn.sink_values", "self_attn.sink_keys")
"""The parameters of a decoder layer with constant sinks: logits ``[Hq]``, values and keys ``[H, d]``."""


def is_constant(name: str) -> bool:
    """Whether a parameter of a model, by its name, is one of the ``PARAMETERS``."""
    return name.endswith(PARAMETERS)


class SinkReader(nn.Module):
    """Copies the sink's parameters, so that the copies can be used anywhere in the pass.

    It is a module of its own because of ZeRO-3, which gathers a module's weights only while the module runs.
    The attention module itself has no such hooks (``drop_shared_qk_hooks``).
    """

    def forward(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.clone() for parameter in parameters)


class Sink(NamedTuple):
    """A constant sink of some heads of one layer.

    Attributes:
        logits: ``[Hq]``, one scaled logit per query head.
        values: ``[H, d]``, one value per KV head.
    """

    logits: Tensor
    values: Tensor

    def of_heads(self, heads: Sequence[int]) -> "Sink":
        """The sink of these KV heads and of their query heads."""
        neighbours = heads[-1] - heads[0] == len(heads) - 1
        # a slice copies nothing
        index = slice(heads[0], heads[-1] + 1) if neighbours else list(heads)
        logits = self.logits.unflatten(0, (self.values.shape[0], -1))
        return Sink(logits[index].flatten(), self.values[index])

    def columns(self) -> tuple[Tensor, Tensor]:
        """Logits ``[Hq, 1]`` and values ``[Hq, 1, d]``, to broadcast to a log-sum-exp and an output."""
        groups = len(self.logits) // len(self.values)
        return self.logits[:, None], self.values.repeat_interleave(groups, dim=0)[:, None]


def add_sink(out: Tensor, lse: Tensor, logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink to the result of attention, as if its softmax had included the sink.

    Where a query saw nothing, nothing is added. The result is differentiable in every argument.

    Args:
        out: ``[…, d]``, the output without the sink.
        lse: ``[…]``, its log-sum-exp.
        logits: the sink's logits, in a shape that broadcasts to ``lse``.
        values: the sink's values, in a shape that broadcasts to ``out``.

    Returns:
        The output and the log-sum-exp with the sink.
    """
    wide = lse.dtype
    logits = logits.to(wide)
    sees_nothing = lse == float("-inf")
    share = torch.sigmoid(logits - lse).masked_fill(sees_nothing, 0.0)[..., None]
    merged = (1 - share) * out.to(wide) + share * values.to(wide)
    total = torch.logaddexp(lse, logits).masked_fill(sees_nothing, float("-inf"))
    return merged.to(out.dtype), total


def merge_sink(out: Tensor, lse: Tensor, sink: Sink | None) -> tuple[Tensor, Tensor]:
    """Add a sink to ``out`` ``[B, Hq, n, d]`` and ``lse`` ``[B, Hq, n]``, in place, a tile at a time.

    Autograd cannot differentiate this: see ``sink_gradients``. Without a sink nothing changes.
    """
    if sink is None:
        return out, lse
    columns = sink.columns()
    for rows in _tiles(out):
        out[:, :, rows], lse[:, :, rows] = add_sink(out[:, :, rows], lse[:, :, rows], *columns)
    return out, lse


def sink_gradients(sink: Sink, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the sink's logits ``[Hq]`` and values ``[H, d]``.

    Args:
        sink: the sink that was added.
        grad_out: the gradient of ``out``, ``[B, Hq, n, d]``.
        out: the output with the sink added, ``[B, Hq, n, d]``.
        lse: the log-sum-exp with the sink added, ``[B, Hq, n]``.
    """
    wide = lse.dtype
    logits, values = sink.columns()
    logits = logits.to(wide)
    values = values.to(wide)
    of_logits = torch.zeros_like(logits[:, 0])
    of_values = torch.zeros_like(values[:, 0])
    for rows in _tiles(out):
        total = lse[:, :, rows]
        # these rows are padding, whose gradient may be anything
        sees_nothing = total == float("-inf")
        grad = grad_out[:, :, rows].to(wide).masked_fill(sees_nothing[..., None], 0.0)
        share = (logits - total).exp().masked_fill(sees_nothing, 0.0)
        of_logits += (share * (grad * (values - out[:, :, rows])).sum(-1)).sum((0, 2))
        of_values += (share[..., None] * grad).sum((0, 2))
    of_heads = of_values.unflatten(0, (len(sink.values), -1)).sum(1)
    return of_logits.to(sink.logits.dtype), of_heads.to(sink.values.dtype)


def _tiles(out: Tensor) -> Iterator[slice]:
    """Cut the ``n`` queries of ``out`` ``[B, Hq, n, d]`` into slices of about ``_TILE_ELEMENTS`` numbers."""
    batch, heads, n, head_dim = out.shape
    tile = max(1, _TILE_ELEMENTS.get(out.device.type, 1 << 24) // max(1, batch * heads * head_dim))
    return (slice(start, start + tile) for start in range(0, n, tile))
