"""Keys and values in 4 or 8 bits: what a group of numbers becomes, and growing tensors of packed tokens.

Asymmetric quantization (as KIVI, Liu et al., 2024): a group is stored as codes ``0 … 2^bits - 1`` and its *zero*
(smallest value) and *scale* (step between codes), ``x̂ = zero + code · scale``. Both are fp16 whatever the model's dtype,
fp64 included: at 4 bits a group of 32 costs 5 bits per number, one of 64 costs 4.5.

The fp16 zero is rounded down and the fp16 scale up, and codes are computed with the *rounded* ones. So every number lies
inside the grid and ``|x - x̂| <= scale / 2``, also in groups far from zero and in constant ones. Numbers beyond the range
of fp16 (±65504) saturate there: a zero or scale never becomes inf. A scale below 6e-8 does not exist in fp16, which
bounds what can be told apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_SLACK = 128  # as native stores: grown by 1/128 of the length
_BLOCK_ELEMENTS = (
    1 << 18
)  # numbers packed or unpacked at a time: temporary copies are small, whatever the length
_HALF_MAX = torch.finfo(torch.float16).max
_MINUS_TINY = -(2**15) + 1  # bits of the largest fp16 number below 0, as int16


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How numbers of ``[b, h, n, d]`` are grouped and packed.

    Attributes:
        bits: 4 (two codes in a byte: channel ``i`` low, ``i + d/2`` high) or 8.
        group_size: numbers that share a zero and a scale.
        per_channel: a group is ``group_size`` consecutive tokens of one channel (``n`` must be a multiple); otherwise
            it is ``group_size`` consecutive channels of one token, or all of them when there are fewer.
    """

    bits: int
    group_size: int
    per_channel: bool

    def token_nbytes(self, head_dim: int) -> float:
        """Bytes of one token of one head."""
        groups = head_dim / (self.group_size if self.per_channel else self._channels(head_dim))
        return head_dim * self.bits / 8 + 4 * groups

    def _channels(self, head_dim: int) -> int:
        return min(self.group_size, head_dim)

    def _group(self, x: Tensor) -> tuple[Tensor, int]:
        """A view with the numbers of a group along their own dimension, and that dimension."""
        if self.per_channel:
            return x.unflatten(2, (-1, self.group_size)), 3
        return x.unflatten(3, (-1, self._channels(x.shape[3]))), 4

    def block_tokens(self, x: Tensor) -> int:
        """Tokens of ``[b, h, n, d]`` to pack or unpack at a time, whole groups."""
        batch, heads, _, head_dim = x.shape
        return max(1, _BLOCK_ELEMENTS // (batch * heads * head_dim * self.group_size)) * self.group_size

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes ``[b, h, n, d·bits/8]`` (uint8), zeros and scales ``[b, h, n, d/g]`` or, per channel, ``[b, h, n/g, d]``."""
        compute = torch.promote_types(x.dtype, torch.float32)
        groups, dim = self._group(x.to(compute).clamp(-_HALF_MAX, _HALF_MAX))
        zero = _half_below(groups.amin(dim, keepdim=True))
        levels = 2**self.bits - 1
        scale = _half_above((groups.amax(dim, keepdim=True) - zero.to(compute)) / levels)
        step = scale.to(compute)
        codes = (groups - zero.to(compute)) / torch.where(step == 0, 1, step)
        codes = codes.round_().clamp_(0, levels).to(torch.uint8).view(x.shape)
        if self.bits == 4:
            low, high = codes.chunk(2, dim=3)
            codes = low | (high << 4)
        return codes, zero.squeeze(dim), scale.squeeze(dim)

    def unpack(self, packed: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        """Write ``x̂`` into ``out`` ``[b, h, n, d]``; computed in at least fp32."""
        compute = torch.promote_types(out.dtype, torch.float32)
        block, per_step = self.block_tokens(out), self.group_size if self.per_channel else 1
        for start in range(0, out.shape[2], block):
            stop = min(start + block, out.shape[2])
            codes = packed[0][:, :, start:stop]
            zero, scale = (x[:, :, start // per_step : stop // per_step].to(compute) for x in packed[1:])
            if self.bits == 4:
                codes = torch.cat((codes & 15, codes >> 4), dim=3)
            groups, dim = self._group(codes.to(compute))
            groups.mul_(scale.unsqueeze(dim)).add_(zero.unsqueeze(dim))
            out[:, :, start:stop] = groups.flatten(dim - 1, dim)


def _half_below(x: Tensor) -> Tensor:
    """The largest fp16 number that is not above ``x``."""
    half = x.half()
    bits = half.view(torch.int16)  # by bits: nextafter does not know fp16 on every device
    below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, _MINUS_TINY)).view(torch.float16)
    return torch.where(half > x, below, half)


def _half_above(x: Tensor) -> Tensor:
    """The smallest fp16 number that is not below ``x``."""
    return -_half_below(-x)


class PackedTokens:
    """Packed tokens at slots 0, 1, …, in tensors that grow: codes, zeros, scales.

    Args:
        limit: slots that are never exceeded, None = any number.
    """

    def __init__(self, packing: Packing, limit: int | None = None):
        self.packing, self.limit = packing, limit
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return 0 if self._tensors is None else self._tensors[0].shape[2]

    def _per_entry(self, tensor: Tensor) -> int:
        """Tokens that share one entry of this tensor."""
        assert self._tensors is not None
        return self.packing.group_size if self.packing.per_channel and tensor is not self._tensors[0] else 1

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._tensors is not None:
            codes, zero, scale = self._tensors
            self._tensors = change(codes), change(zero), change(scale)

    def _reserve(self, like: tuple[Tensor, Tensor, Tensor], slots: int) -> None:
        """Room for ``slots`` tokens and, in whole groups, 1/128 more."""
        if slots <= self.capacity:
            return
        group = self.packing.group_size
        capacity = slots + slots // _SLACK // group * group
        capacity = capacity if self.limit is None else min(capacity, self.limit)

        def grown(tensor: Tensor, old: Tensor | None, per_entry: int) -> Tensor:
            new = tensor.new_zeros(*tensor.shape[:2], capacity // per_entry, tensor.shape[3])
            if old is not None:
                new[:, :, : old.shape[2]] = old
            return new

        old = self._tensors or (None, None, None)
        shared = group if self.packing.per_channel else 1
        codes, zero, scale = (
            grown(x, y, per) for x, y, per in zip(like, old, (1, shared, shared), strict=True)
        )
        self._tensors = codes, zero, scale

    def write(self, x: Tensor, start: int, mask: Tensor | None = None) -> None:
        """Pack ``[b, h, m, d]`` into the slots from ``start`` on; with a mask ``[b, h, m]`` only where it is True."""
        block = self.packing.block_tokens(x)
        for first in range(0, x.shape[2], block):
            rows = slice(first, first + block)
            packed = self.packing.pack(x[:, :, rows])
            self._reserve(packed, start + x.shape[2])
            assert self._tensors is not None
            for tensor, new in zip(self._tensors, packed, strict=True):
                target = tensor.narrow(2, (start + first) // self._per_entry(tensor), new.shape[2])
                target.copy_(new if mask is None else torch.where(mask[:, :, rows, None], new, target))

    def read(self, start: int, out: Tensor) -> None:
        """Unpack the slots from ``start`` on into ``out`` ``[b, h, m, d]``."""
        assert self._tensors is not None
        codes, zero, scale = (
            x[:, :, start // self._per_entry(x) : (start + out.shape[2]) // self._per_entry(x)]
            for x in self._tensors
        )
        self.packing.unpack((codes, zero, scale), out)

    def keep(self, index: Tensor) -> None:
        """Hold only the slots ``index`` ``[b, h, w]``: codes are copied, not quantized again. Per token only."""
        assert not self.packing.per_channel, "tokens of a group share its scale"
        if index.shape[2] == 0:
            self._tensors = None
        self._map(lambda x: x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])))

    def overwrite(self, slots: Tensor, x: Tensor, mask: Tensor) -> None:
        """Pack ``[b, h, c, d]`` into slots ``[b, h, c]`` where ``mask`` is True. Per token only."""
        assert not self.packing.per_channel, "tokens of a group share its scale"
        rows, heads, columns = mask.nonzero(as_tuple=True)
        if not len(rows):
            return
        assert self._tensors is not None
        for tensor, new in zip(self._tensors, self.packing.pack(x), strict=True):
            tensor[rows, heads, slots[rows, heads, columns]] = new[rows, heads, columns]

    def select_rows(self, index: Tensor) -> None:
        self._map(lambda x: x.index_select(0, index.to(x.device)))

    def tensors(self) -> list[Tensor]:
        return list(self._tensors or ())
