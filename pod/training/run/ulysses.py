"""Ulysses sequence parallelism over KV-head groups, exact for head counts that the group does not divide.

Outside attention every rank of a sequence-parallel group holds a contiguous slice of the row's tokens and all
heads; inside it holds all tokens of some of the heads (Jacobs et al., "DeepSpeed Ulysses"). One all-to-all takes q,
k and v there, one brings the output back. The lead queries and keys that PoD layers hand on are already head-sharded,
so sharing adds no communication.

Every rank computes as many heads as the others, give or take one. Heads that keep their window cost less than heads that
see everything, and each layer waits for the rank that has most to do: `place_heads` deals them out layer by layer, and a
head whose carry is open stays where it is. Where that leaves ranks waiting, `share_heads` splits the query heads of a KV
head over several ranks, each of which gets its keys and values.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pod.modeling.shipped.sharing import Lead as PlanLead
from pod.modeling.shipped.sharing import is_followed
from pod.training.predict.shapes import Lead, visible_pairs

SENT_PAIRS = 1000
"""(query, key) pairs of one query head that take as long as sending a token's key and value: at 500 TFLOP/s and 300 GB/s."""


def split_evenly(total: int, parts: int) -> list[int]:
    """Contiguous shares of `total` items whose sizes differ by at most one, the larger shares first."""
    quotient, remainder = divmod(total, parts)
    return [quotient + (index < remainder) for index in range(parts)]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Start of every share plus the end of the last one: [len(sizes) + 1]."""
    result = [0]
    for size in sizes:
        result.append(result[-1] + size)
    return result


def kv_head_repeats(num_attention_heads: int, num_key_value_heads: int, size: int) -> int:
    """How often each KV head is replicated so that `size` ranks all get one.

    The smallest divisor r of G = Hq / H with H * r >= size: each replica then serves G / r query heads.

    Raises:
        ValueError: if the group has more ranks than query heads; the message names the sizes that work.
    """
    if size < 1:
        raise ValueError(f"sequence_parallel_size must be at least 1, got {size}")
    groups = num_attention_heads // num_key_value_heads
    for repeats in range(1, groups + 1):
        if groups % repeats == 0 and num_key_value_heads * repeats >= size:
            return repeats
    raise ValueError(
        f"sequence_parallel_size {size} cannot work with {num_attention_heads} query and {num_key_value_heads} "
        f"KV heads: every rank needs a query head; use a size from 1 to {num_attention_heads}"
    )


def head_pairs(lead: Lead, repeats: int, row_length: int, windows: tuple[int, int]) -> list[list[int]]:
    """(query, key) pairs that every replica of a KV head sees in a row of one document, `[L][H · repeats]`.

    Args:
        lead: plan of the model, lead[layer][kv_head]; repeats: replicas of each head.
        windows: (n_s, n_r) in tokens.
    """
    return [
        [visible_pairs(owner, row_length, windows) for owner in row for _ in range(repeats)] for row in lead
    ]


class Shares(NamedTuple):
    """Which heads a rank of a sequence-parallel group computes.

    Attributes:
        repeats: replicas of each KV head, which serve an equal part of its query heads.
        orders: see `place_heads`.
        waited: (query, key) pairs of query heads that a forward pass waits for, summed over the layers.
    """

    repeats: int
    orders: tuple[tuple[int, ...], ...]
    waited: int


def share_heads(
    lead: Lead,
    num_attention_heads: int,
    num_key_value_heads: int,
    size: int,
    row_length: int,
    windows: tuple[int, int],
) -> Shares:
    """The shares of `size` ranks that take least time over attention and over sending keys and values.

    Args:
        lead: plan of the model, lead[layer][kv_head].
        row_length: tokens of a row over all ranks, taken for one document.
        windows: (n_s, n_r) in tokens.

    Raises:
        ValueError: see `kv_head_repeats`.
    """
    groups = num_attention_heads // num_key_value_heads
    least = kv_head_repeats(num_attention_heads, num_key_value_heads, size)
    found: list[tuple[int, Shares]] = []
    for repeats in range(least, 1 + (groups if size > 1 else 1)):
        if groups % repeats == 0:
            pairs = head_pairs(lead, repeats, row_length, windows)
            orders = place_heads(lead, repeats, pairs, size)
            waited = busiest_pairs(orders, pairs, size) * (groups // repeats)
            sent = SENT_PAIRS * len(lead) * num_key_value_heads * repeats * row_length // size
            found.append((waited + sent, Shares(repeats, orders, waited)))
    return min(found, key=lambda one: one[0])[1]


def place_heads(
    lead: Lead, repeats: int, pairs: Sequence[Sequence[int]], size: int
) -> tuple[tuple[int, ...], ...]:
    """Which replica of a KV head each place of a layer computes, `[L][H · repeats]`; ranks have neighbouring places.

    Replica i is one of head `i // repeats`. Those whose lead is followed above keep their place. The others change places
    when that lowers what the busiest rank of their layer does. Plans that this does not help keep their order.
    """
    ranks = [rank for rank, count in enumerate(split_evenly(len(pairs[0]), size)) for _ in range(count)]
    orders = [list(range(len(ranks)))]
    for layer, work in enumerate(pairs):
        order, before = list(orders[-1]), layer - 1
        free = [
            place
            for place in range(len(order))
            if not layer or not is_followed(lead, before, order[place] // repeats)
        ]
        _balance(order, work, ranks, free)
        orders.append(order)
    in_order, placed = orders[:1] * len(lead), orders[1:]
    best = min((in_order, placed), key=lambda some: busiest_pairs(some, pairs, size))
    return tuple(map(tuple, best))


def _balance(order: list[int], work: Sequence[int], ranks: Sequence[int], free: Sequence[int]) -> None:
    """Swap heads at `free` places between the busiest rank and others, each time that brings the most of the two down most."""
    while True:
        loads = _loads(order, work, ranks)
        busiest = loads.index(max(loads))
        found = (loads[busiest], 0, 0)
        for here in free:
            for there in free:
                if ranks[here] == busiest != ranks[there]:
                    moved = work[order[here]] - work[order[there]]
                    most = max(loads[busiest] - moved, loads[ranks[there]] + moved)
                    found = min(found, (most, here, there))
        most, here, there = found
        if most == loads[busiest]:
            return
        order[here], order[there] = order[there], order[here]


def _loads(order: Sequence[int], work: Sequence[int], ranks: Sequence[int]) -> list[int]:
    loads = [0] * (ranks[-1] + 1)
    for place, head in enumerate(order):
        loads[ranks[place]] += work[head]
    return loads


def busiest_pairs(orders: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]], size: int) -> int:
    """Pairs that a step waits for: of the rank that has most to do, summed over the layers."""
    ranks = [rank for rank, count in enumerate(split_evenly(len(pairs[0]), size)) for _ in range(count)]
    return sum(max(_loads(order, work, ranks)) for order, work in zip(orders, pairs, strict=True))


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` of flat buffers with given split sizes; the gradient travels the way back.

    count(tensor, suffix) is told every buffer that this rank hands over, with the suffix "" or "_backward".
    """

    @staticmethod
    def forward(ctx, flat, send, receive, group, count):
        ctx.send, ctx.receive, ctx.group, ctx.count = send, receive, group, count
        out = flat.new_empty(sum(receive))
        count(flat, "")
        dist.all_to_all_single(out, flat.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,) = grad_outputs
        out = grad.new_empty(sum(ctx.send))
        ctx.count(grad, "_backward")
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None, None


class Ulysses:
    """The sequence-parallel hook of `PodModel.sequence_parallel`.

    Args:
        lead: the model's plan, lead[layer][kv_head]; `use_plan` changes it.
        num_attention_heads, num_key_value_heads: Hq and H of the model (before replication).
        group: process group of the ranks that share a row, in the order of their slices.
        row_length: n, tokens of a row over all ranks; `set_row_length` changes it.
        windows: (n_s, n_r) in tokens.

    Attributes:
        lead: plan of the KV heads that this rank computes, [L][H_local].
        heads: which KV heads of the model these are, [L][H_local].
        sent_bytes: bytes this rank handed to all-to-all since the start, by direction, forward (recomputation in
            backward included) and backward.

    Raises:
        ValueError: group sizes that cannot work, naming those that do.
    """

    def __init__(
        self,
        lead: Lead,
        num_attention_heads: int,
        num_key_value_heads: int,
        group: "dist.ProcessGroup",
        row_length: int,
        windows: tuple[int, int],
    ):
        self.group, self.windows = group, windows
        self.num_heads = num_attention_heads, num_key_value_heads
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent_bytes = dict.fromkeys(
            ("to_heads", "to_sequence", "to_heads_backward", "to_sequence_backward"), 0
        )
        self.set_row_length(row_length)
        self.use_plan(lead)

    def use_plan(self, lead: Lead) -> None:
        """Compute heads as a plan lead[layer][kv_head] of the model says from the next forward pass on; the same on all ranks."""
        shares = share_heads(lead, *self.num_heads, self.size, self.row_length, self.windows)
        self.repeats, self.orders = shares.repeats, shares.orders
        replicas = self.num_heads[1] * self.repeats
        self.groups = self.num_heads[0] // replicas
        self.kv_counts = split_evenly(replicas, self.size)
        self.kv_starts = offsets(self.kv_counts)
        mine = slice(*self.kv_starts[self.rank : self.rank + 2])
        self.heads = tuple(tuple(i // self.repeats for i in order[mine]) for order in self.orders)
        self.lead: PlanLead = tuple(
            tuple(row[head] for head in heads) for row, heads in zip(lead, self.heads, strict=True)
        )

    def set_row_length(self, row_length: int) -> None:
        """Declare the tokens n of the next rows; rank r then holds `self.slice` of them."""
        if row_length < self.size:
            raise ValueError(
                f"a row of {row_length} tokens cannot be split over {self.size} ranks; "
                f"use longer rows or sequence_parallel_size <= {row_length}"
            )
        self.row_length = row_length
        self.lengths = split_evenly(row_length, self.size)
        self.starts = offsets(self.lengths)
        self.slice = slice(self.starts[self.rank], self.starts[self.rank + 1])

    def to_heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,Hq,n_local,d], k, v [B,H,n_local,d] -> [B,Hq_local,n,d], [B,H_local,n,d] twice; differentiable.

        k and v of no heads (a layer that attends to another one's) stay so, and only q is sent.
        """
        batch, _, local, dim = q.shape
        if local != self.lengths[self.rank]:
            raise ValueError(
                f"rank {self.rank} of the sequence-parallel group got {local} tokens of a row of "
                f"{self.row_length}; its slice holds {self.lengths[self.rank]} (call set_row_length first)"
            )
        queries, keys, values = q.split(self.groups, dim=1), k.split(1, dim=1), v.split(1, dim=1)
        own = 1 if k.shape[1] else 0
        parts = []
        for peer in range(self.size):
            heads = self.orders[layer][self.kv_starts[peer] : self.kv_starts[peer + 1]]
            parts += [queries[i] for i in heads]
            parts += [x[i // self.repeats] for x in (keys, values)[: 2 * own] for i in heads]
        widths = (self.groups, own, own)
        mine, per_head = self.kv_counts[self.rank], batch * dim * sum(widths)
        send = [per_head * local * count for count in self.kv_counts]
        receive = [per_head * length * mine for length in self.lengths]
        pieces = self._exchange(parts, send, receive, "to_heads")
        sources = []
        for piece, length in zip(pieces, self.lengths, strict=True):
            shapes = [
                (mine, batch, width, length, dim) for width in widths
            ]  # head by head, as they were sent
            flat = piece.split([math.prod(shape) for shape in shapes])
            sources.append([x.view(shape).transpose(0, 1) for x, shape in zip(flat, shapes, strict=True)])
        query, key, value = (torch.cat(x, dim=3).flatten(1, 2) for x in zip(*sources, strict=True))
        return query, key, value

    def to_sequence(self, layer: int, out: Tensor) -> Tensor:
        """[B,Hq_local,n,d] -> [B,Hq,n_local,d]; differentiable."""
        batch, heads, _, dim = out.shape
        parts = [out[:, :, self.starts[peer] : self.starts[peer + 1]] for peer in range(self.size)]
        local = self.lengths[self.rank]
        send = [batch * heads * dim * length for length in self.lengths]
        counts = [count * self.groups for count in self.kv_counts]
        receive = [batch * count * dim * local for count in counts]
        pieces = self._exchange(parts, send, receive, "to_sequence")
        placed = []
        for piece, count in zip(pieces, counts, strict=True):
            placed += piece.view(batch, count, local, dim).split(self.groups, dim=1)
        order = self.orders[layer]
        return torch.cat([placed[place] for place in sorted(range(len(order)), key=order.__getitem__)], dim=1)

    def _exchange(self, parts, send, receive, direction) -> tuple[Tensor, ...]:
        """Flatten the parts into one buffer, send it, and return the received piece of every rank (flat)."""
        flat = torch.cat([part.reshape(-1) for part in parts])

        def count(tensor: Tensor, suffix: str) -> None:
            self.sent_bytes[direction + suffix] += tensor.numel() * tensor.element_size()

        received: Tensor = _AllToAll.apply(flat, send, receive, self.group, count)  # type: ignore[assignment]
        return received.split(receive)
