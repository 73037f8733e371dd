"""Ulysses sequence parallelism over KV-head groups, exact for head counts that the group does not divide.

Outside attention, every rank of a group holds a contiguous slice of the row's tokens, and all heads. Inside
attention, it holds all tokens of some heads (Jacobs et al., "DeepSpeed Ulysses"). One all-to-all exchanges q,
k and v on the way into attention, and another one the output on the way back. The lead queries and keys that
PoD layers hand on are already divided by heads, so sharing adds no communication.

Every rank computes as many heads as the others, give or take one. Windows cost less than heads that see
everything, and each layer waits for the rank that has most to do. `place_heads` therefore deals heads out
layer by layer, except those inside a block: their `shared_qk` stays where it is. Where ranks still wait,
`share_heads` splits the query heads of a KV head over several ranks. Each of these ranks gets the keys and
values of the KV head.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pod.modeling.model.sharing import Lead, is_followed
from pod.modeling.model.sinks import Sink
from pod.training.predict.shapes import visible_pairs

SENT_PAIRS = 1000
"""(query, key) pairs of one query head that take as long as sending one token's key and value.

The number holds for 500 TFLOP/s and 300 GB/s.
"""


def split_evenly(total: int, parts: int) -> list[int]:
    """Sizes of contiguous shares of `total` items: they differ by at most one, the larger ones come first.

    Example: 10 items in 4 parts give 3, 3, 2, 2.
    """
    quotient, remainder = divmod(total, parts)
    return [quotient + 1] * remainder + [quotient] * (parts - remainder)


def own_slice(sizes: Sequence[int], index: int) -> slice:
    """The slice of all items that forms share `index`, when the shares have these sizes."""
    return slice(sum(sizes[:index]), sum(sizes[: index + 1]))


def kv_head_repeats(num_attention_heads: int, num_key_value_heads: int, size: int) -> int:
    """How often each KV head is replicated so that each of `size` ranks gets one.

    Example: 32 query heads and 8 KV heads on 16 ranks need 2 replicas of each KV head.

    Returns:
        The smallest divisor r of G = Hq / H with H * r >= size.

    Raises:
        ValueError: there are more ranks than query heads; the message names the sizes that work.
    """
    groups = num_attention_heads // num_key_value_heads
    for repeats in range(1, groups + 1):
        if groups % repeats == 0 and num_key_value_heads * repeats >= size:
            return repeats
    raise ValueError(
        f"sequence_parallel_size {size} cannot work with {num_attention_heads} query and "
        f"{num_key_value_heads} KV heads: every rank needs a query head; use a size from 1 to "
        f"{num_attention_heads}"
    )


def head_pairs(lead: Lead, repeats: int, row_length: int, windows: tuple[int, int]) -> list[list[int]]:
    """(query, key) pairs that each replica of a KV head sees in a row of one document, `[L][H · repeats]`.

    Args:
        repeats: replicas of each KV head.
        row_length: tokens of the row.
        windows: (n_s, n_r) in tokens.
    """
    return [
        [visible_pairs(owner, row_length, windows) for owner in row for _ in range(repeats)] for row in lead
    ]


class Shares(NamedTuple):
    """Which KV heads the ranks of a sequence-parallel group compute."""

    repeats: int
    """Replicas of each KV head; each replica serves an equal part of the KV head's query heads."""

    orders: tuple[tuple[int, ...], ...]
    """The order of the replicas in each layer: see `place_heads`."""

    waited: int
    """(query, key) pairs of query heads that a forward pass waits for, summed over the layers."""


def share_heads(
    lead: Lead,
    num_attention_heads: int,
    num_key_value_heads: int,
    size: int,
    row_length: int,
    windows: tuple[int, int],
) -> Shares:
    """The shares of `size` ranks that take least time for attention and for sending keys and values.

    Args:
        row_length: tokens of a row over all ranks. The row counts as one document.
        windows: (n_s, n_r) in tokens.

    Raises:
        ValueError: as in `kv_head_repeats`.
    """
    groups = num_attention_heads // num_key_value_heads
    least = kv_head_repeats(num_attention_heads, num_key_value_heads, size)
    found: list[tuple[int, Shares]] = []
    most = groups if size > 1 else 1
    for repeats in range(least, most + 1):
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
    """The order of the replicas of KV heads in each layer, `[L][H · repeats]`.

    The first positions of an order (*places*) are computed by rank 0, the next ones by rank 1, and so on.
    Replica i is one of head `i // repeats`. From a lead to its last follower, a replica keeps its place
    from layer to layer. The others change places when that lowers the work of their layer's busiest rank.
    Where the work that all layers wait for becomes no smaller, the order is 0, 1, 2, … in every layer.

    Args:
        pairs: the work of each replica, from `head_pairs`.
        size: number of ranks.
    """
    in_order = list(range(len(pairs[0])))
    ranks, placed = _ranks(len(in_order), size), [in_order]
    for layer, work in enumerate(pairs):
        order = list(placed[-1])
        free = [p for p, i in enumerate(order) if not layer or not is_followed(lead, layer - 1, i // repeats)]
        _balance(order, work, ranks, free)
        placed.append(order)
    best = min([in_order] * len(lead), placed[1:], key=lambda some: busiest_pairs(some, pairs, size))
    return tuple(map(tuple, best))


def _ranks(places: int, size: int) -> list[int]:
    """The rank of every place."""
    return [rank for rank, count in enumerate(split_evenly(places, size)) for _ in range(count)]


def _balance(order: list[int], work: Sequence[int], ranks: Sequence[int], free: Sequence[int]) -> None:
    """Swap heads at `free` places between the busiest rank and the others, in place, while that helps.

    Each swap is the one that lowers the larger load of its two ranks most.
    """
    while True:
        loads = _loads(order, work, ranks)
        busiest = loads.index(max(loads))
        found = (loads[busiest], 0, 0)
        of_busiest = [place for place in free if ranks[place] == busiest]
        of_others = [place for place in free if ranks[place] != busiest]
        for here in of_busiest:
            for there in of_others:
                moved = work[order[here]] - work[order[there]]
                most = max(loads[busiest] - moved, loads[ranks[there]] + moved)
                found = min(found, (most, here, there))
        most, here, there = found
        if most == loads[busiest]:
            return
        order[here], order[there] = order[there], order[here]


def _loads(order: Sequence[int], work: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """The work of every rank in one layer."""
    loads = [0] * (ranks[-1] + 1)
    for place, head in enumerate(order):
        loads[ranks[place]] += work[head]
    return loads


def busiest_pairs(orders: Sequence[Sequence[int]], pairs: Sequence[Sequence[int]], size: int) -> int:
    """(query, key) pairs that a step waits for: of the busiest rank of each layer, summed over the layers."""
    ranks = _ranks(len(pairs[0]), size)
    return sum(max(_loads(order, work, ranks)) for order, work in zip(orders, pairs, strict=True))


class _AllToAll(torch.autograd.Function):
    """apply(flat, send, receive, exchange) sends a flat buffer in parts of the sizes `send`.

    It returns the buffer that this rank receives, in parts of the sizes `receive`. The gradient travels the
    other way.
    """

    @staticmethod
    def forward(ctx, flat, send, receive, exchange):
        ctx.send, ctx.receive, ctx.exchange = send, receive, exchange
        return exchange(flat, send, receive, "")

    @staticmethod
    def backward(ctx, *grad_outputs):
        gradient = ctx.exchange(grad_outputs[0].contiguous(), ctx.receive, ctx.send, "_backward")
        return gradient, None, None, None


class _TakesGradients(torch.autograd.Function):
    """apply(x, *others) returns `x`; in the backward, the others get gradients of zero."""

    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(*others)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0], *(torch.zeros_like(other) for other in ctx.saved_tensors)


def _whole_row(parts: Sequence[Tensor]) -> Tensor:
    """Heads [B, heads, n, d] of a whole row.

    Args:
        parts: the slice of the row from every peer, [places, B, heads of a place, n_local, d].
    """
    return torch.cat([part.transpose(0, 1) for part in parts], dim=3).flatten(1, 2)


class Ulysses:
    """How one rank of a sequence-parallel group exchanges tokens and heads: `PodModel.sequence_parallel`.

    Args:
        config: a PodConfig.
        group: process group of the ranks that share a row, in the order of their slices.
        row_length: n, tokens of a row over all ranks; `set_row_length` changes it.

    Attributes:
        slice: the tokens of a row that this rank holds outside attention.
        lengths: tokens of every rank's slice.
        repeats, orders: replicas of each KV head and their order, see `Shares`.
        kv_counts: replicas that each rank computes.
        groups: query heads that one replica serves.
        lead: plan of the KV heads that this rank computes, [L][H_local].
        heads: which of the model's KV heads these are, [L][H_local].
        sent_bytes: bytes that this rank has handed to all-to-all since the start, by direction. What the
            backward recomputes is included.

    Raises:
        ValueError: a group size that cannot work; the message names those that do.
    """

    def __init__(self, config: Any, group: "dist.ProcessGroup", row_length: int):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        directions = "to_heads", "to_sequence", "to_heads_backward", "to_sequence_backward"
        self.sent_bytes: dict[str, int] = dict.fromkeys(directions, 0)
        self.set_row_length(row_length)
        heads, windows = config.num_key_value_heads, (config.num_sink_tokens, config.num_recent_tokens)
        lead = config.sharing_plan.lead
        shares = share_heads(lead, config.num_attention_heads, heads, self.size, row_length, windows)
        self.repeats, self.orders = shares.repeats, shares.orders
        self.groups = config.num_attention_heads // (heads * self.repeats)
        self.kv_counts = split_evenly(heads * self.repeats, self.size)
        mine = own_slice(self.kv_counts, self.rank)
        self.heads = tuple(tuple(i // self.repeats for i in order[mine]) for order in self.orders)
        local = zip(lead, self.heads, strict=True)
        self.lead: Lead = tuple(tuple(row[head] for head in heads) for row, heads in local)

    def set_row_length(self, row_length: int) -> None:
        """Declare the number n of tokens of the next rows. This rank then holds `self.slice` of them.

        Raises:
            ValueError: there are fewer tokens than ranks.
        """
        if row_length < self.size:
            raise ValueError(
                f"a row of {row_length} tokens cannot be split over {self.size} ranks; "
                f"use longer rows or sequence_parallel_size <= {row_length}"
            )
        self.row_length = row_length
        self.lengths = split_evenly(row_length, self.size)
        self.slice = own_slice(self.lengths, self.rank)

    def to_heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's tokens of all heads for all tokens of its heads; differentiable.

        Args:
            q: [B,Hq,n_local,d].
            k, v: [B,H,n_local,d]; or without heads (H = 0) in a layer that attends to the keys and values of
                another layer. They then stay without heads, and only q is sent.

        Returns:
            q [B,Hq_local,n,d], k and v [B,H_local,n,d].
        """
        batch, _, local, dim = q.shape
        if local != self.lengths[self.rank]:
            raise ValueError(
                f"rank {self.rank} of the sequence-parallel group got {local} tokens of a row of "
                f"{self.row_length}; its slice holds {self.lengths[self.rank]} (call set_row_length first)"
            )
        queries = q.split(self.groups, dim=1)
        own = [k, v] if k.shape[1] else []
        replicas = [
            torch.cat([queries[i], *(x[:, i // self.repeats, None] for x in own)], dim=1)
            for i in self.orders[layer]
        ]
        outgoing = [replicas[own_slice(self.kv_counts, peer)] for peer in range(self.size)]
        widths = [self.groups, len(own) // 2, len(own) // 2]
        mine = self.kv_counts[self.rank]
        incoming = [(mine, batch, sum(widths), length, dim) for length in self.lengths]
        pieces = [piece.split(widths, dim=2) for piece in self._exchange("to_heads", outgoing, incoming)]
        queries_of, keys_of, values_of = zip(*pieces, strict=True)  # of every peer
        return _whole_row(queries_of), _whole_row(keys_of), _whole_row(values_of)

    def own_sink(self, layer: int, q: Tensor, sink: Sink) -> tuple[Tensor, Sink]:
        """The queries [B,Hq_local,n,d] as they are, and the sink of this rank's heads.

        Where none of these heads keeps its window, the queries are made to give the whole sink a gradient of
        zero. A rank without any gradient for the sink would let the other ranks wait for it.
        """
        mine = self.orders[layer][own_slice(self.kv_counts, self.rank)]
        if None not in self.lead[layer]:
            q = _TakesGradients.apply(q, *sink)  # type: ignore[assignment]
        logits = sink.logits.unflatten(0, (-1, self.groups))[list(mine)].flatten()
        return q, Sink(logits, sink.values[[i // self.repeats for i in mine]])

    def to_sequence(self, layer: int, out: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads for its tokens of all heads; differentiable.

        Args:
            out: [B,Hq_local,n,d].

        Returns:
            [B,Hq,n_local,d].
        """
        batch, _, _, dim = out.shape
        outgoing = [[part] for part in out.split(self.lengths, dim=2)]
        local = self.lengths[self.rank]
        incoming = [(batch, count * self.groups, local, dim) for count in self.kv_counts]
        pieces = self._exchange("to_sequence", outgoing, incoming)
        placed = [queries for piece in pieces for queries in piece.split(self.groups, dim=1)]
        order = self.orders[layer]
        places = sorted(range(len(order)), key=order.__getitem__)
        return torch.cat([placed[place] for place in places], dim=1)

    def _exchange(
        self, direction: str, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[tuple[int, ...]]
    ) -> list[Tensor]:
        """Send every rank its tensors in one buffer.

        Returns:
            What each rank sent, in the shapes `incoming`.
        """

        def exchange(flat: Tensor, send: list[int], receive: list[int], suffix: str) -> Tensor:
            self.sent_bytes[direction + suffix] += flat.nbytes
            out = flat.new_empty(sum(receive))
            dist.all_to_all_single(out, flat, receive, send, group=self.group)
            return out

        flat = torch.cat([part.reshape(-1) for parts in outgoing for part in parts])
        send = [sum(part.numel() for part in parts) for parts in outgoing]
        receive = [math.prod(shape) for shape in incoming]
        received: Tensor = _AllToAll.apply(flat, send, receive, exchange)  # type: ignore[assignment]
        return [piece.view(shape) for piece, shape in zip(received.split(receive), incoming, strict=True)]
