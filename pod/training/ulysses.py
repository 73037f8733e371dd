"""Ulysses sequence parallelism over KV-head groups, exact for head counts that the group does not divide.

Outside attention every rank of a sequence-parallel group holds a contiguous slice of the row's tokens and all
heads; inside it holds all tokens of a contiguous share of the heads (Jacobs et al., "DeepSpeed Ulysses"). One
all-to-all takes q, k and v there, one brings the output back. The lead queries and keys that PoD layers hand on
are already head-sharded, so sharing adds no communication.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist


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
        lead: the model's plan, lead[layer][kv_head].
        num_attention_heads, num_key_value_heads: Hq and H of the model (before replication).
        group: process group of the ranks that share a row, in the order of their slices.
        row_length: n, tokens of a row over all ranks; `set_row_length` changes it.

    Attributes:
        lead: plan of the KV heads that this rank computes, [L][H_local].
        sent_bytes: bytes this rank handed to all-to-all since the start, by direction, forward (recomputation in
            backward included) and backward.

    Raises:
        ValueError: group sizes that cannot work, naming those that do.
    """

    def __init__(
        self,
        lead: Sequence[Sequence[int]],
        num_attention_heads: int,
        num_key_value_heads: int,
        group: "dist.ProcessGroup",
        row_length: int,
    ):
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.repeats = kv_head_repeats(num_attention_heads, num_key_value_heads, self.size)
        self.groups = num_attention_heads // (num_key_value_heads * self.repeats)
        self.kv_counts = split_evenly(num_key_value_heads * self.repeats, self.size)
        self.kv_starts = offsets(self.kv_counts)
        self.sent_bytes = dict.fromkeys(
            ("to_heads", "to_sequence", "to_heads_backward", "to_sequence_backward"), 0
        )
        self.lead = self.local_lead(lead)
        self.set_row_length(row_length)

    def local_lead(self, lead: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """The part of a plan lead[layer][kv_head] of the model that this rank's heads follow."""
        start, end = self.kv_starts[self.rank], self.kv_starts[self.rank + 1]
        return tuple(tuple(head for head in row for _ in range(self.repeats))[start:end] for row in lead)

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

    def to_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B,Hq,n_local,d], k, v [B,H,n_local,d] -> [B,Hq_local,n,d], [B,H_local,n,d] twice; differentiable.

        k and v of no heads (a layer that attends to another one's) stay so, and only q is sent.
        """
        batch, _, local, dim = q.shape
        if local != self.lengths[self.rank]:
            raise ValueError(
                f"rank {self.rank} of the sequence-parallel group got {local} tokens of a row of "
                f"{self.row_length}; its slice holds {self.lengths[self.rank]} (call set_row_length first)"
            )
        if self.repeats > 1:
            k, v = (x.repeat_interleave(self.repeats, dim=1) for x in (k, v))
        parts = []
        for peer in range(self.size):
            heads = slice(self.kv_starts[peer], self.kv_starts[peer + 1])
            query_heads = slice(heads.start * self.groups, heads.stop * self.groups)
            parts += [q[:, query_heads], k[:, heads], v[:, heads]]
        own = 1 if k.shape[1] else 0
        width = self.groups + 2 * own
        per_head = batch * dim
        send = [per_head * local * count * width for count in self.kv_counts]
        mine = self.kv_counts[self.rank]
        receive = [per_head * length * mine * width for length in self.lengths]
        pieces = self._exchange(parts, send, receive, "to_heads")
        shapes = [
            (batch, mine * width, length, dim) for length in self.lengths
        ]  # viewed below: q, k and v of one source follow each other
        split = [mine * self.groups, mine * own, mine * own]
        sources = [self._unpack(piece, shape, split) for piece, shape in zip(pieces, shapes, strict=True)]
        query, key, value = (torch.cat(x, dim=2) for x in zip(*sources, strict=True))
        return query, key, value

    def to_sequence(self, out: torch.Tensor) -> torch.Tensor:
        """[B,Hq_local,n,d] -> [B,Hq,n_local,d]; differentiable."""
        batch, heads, _, dim = out.shape
        parts = [out[:, :, self.starts[peer] : self.starts[peer + 1]] for peer in range(self.size)]
        local = self.lengths[self.rank]
        send = [batch * heads * dim * length for length in self.lengths]
        counts = [count * self.groups for count in self.kv_counts]
        receive = [batch * count * dim * local for count in counts]
        pieces = self._exchange(parts, send, receive, "to_sequence")
        return torch.cat(
            [piece.view(batch, count, local, dim) for piece, count in zip(pieces, counts, strict=True)], dim=1
        )

    def _exchange(self, parts, send, receive, direction) -> tuple[torch.Tensor, ...]:
        """Flatten the parts into one buffer, send it, and return the received piece of every rank (flat)."""
        flat = torch.cat([part.reshape(-1) for part in parts])

        def count(tensor: torch.Tensor, suffix: str) -> None:
            self.sent_bytes[direction + suffix] += tensor.numel() * tensor.element_size()

        received: torch.Tensor = _AllToAll.apply(flat, send, receive, self.group, count)  # type: ignore[assignment]
        return received.split(receive)

    @staticmethod
    def _unpack(piece, shape, split) -> list[torch.Tensor]:
        """One source's flat q, k, v -> [B, heads, length, d] each."""
        batch, _, length, dim = shape
        sizes = [batch * heads * length * dim for heads in split]
        return [x.view(batch, heads, length, dim) for x, heads in zip(piece.split(sizes), split, strict=True)]
