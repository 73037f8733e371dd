"""Keys and values in 4 or 8 bits, read as they are packed: the format, tensors that hold it, and products with them.

**Numbers.** Asymmetric quantization (as KIVI, Liu et al., 2024): a group is stored as codes ``0 … 2^bits - 1`` and its
*zero* (smallest value) and *scale* (step between codes), ``x̂ = zero + code · scale``. Both are fp16 whatever the model's
dtype: at 4 bits a group of 32 costs 5 bits per number, one of 64 costs 4.5. The fp16 zero is rounded down and the fp16
scale up, and codes are computed with the *rounded* ones. So every number lies inside the grid and ``|x - x̂| <= scale / 2``,
also in groups far from zero and in constant ones. Numbers beyond the range of fp16 (±65504) saturate there. A scale below
6e-8 does not exist in fp16, which bounds what can be told apart.

**What is packed when.** While a prompt runs its tokens stay native, so that attention inside it is exact and does not
depend on its chunks. When it ends, and after every decoded token, ``settle`` packs so that of ``n`` tokens held the first
``P(n) = ⌊(n - residual) / group_size⌋ · group_size`` are packed (none if negative): ``residual`` to
``residual + group_size - 1`` tokens stay native, the same ones for keys and values. Tokens are packed once; ``keep``
copies codes.

**Products.** ``q · k̂ = (q ∘ scale) · code + q · zero`` and ``Σ w v̂ = Σ (w · scale) code + Σ w · zero``, counted from the middle code: scales go into the
small factor, codes become floats a tile at a time, inside the processor's cache, and nothing else is unpacked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_TILE = 1 << 20  # numbers packed or unpacked at a time: as fp32 they stay in the cache while they are used
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

    @property
    def shared(self) -> int:
        """Tokens that share an entry of zeros and scales."""
        return self.group_size if self.per_channel else 1

    def token_nbytes(self, head_dim: int) -> float:
        """Bytes of one token of one head."""
        group = self.group_size if self.per_channel else min(self.group_size, head_dim)
        return head_dim * self.bits / 8 + 4 * head_dim / group

    def allocate(self, like: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros as ``pack`` would return for ``slots`` tokens, whole groups, of ``[b, h, …, d]``."""
        (batch, heads, _, head_dim), group = like.shape, self.group_size
        entries = (
            (slots // group, head_dim) if self.per_channel else (slots, head_dim // min(group, head_dim))
        )
        codes = like.new_zeros(batch, heads, slots, head_dim * self.bits // 8, dtype=torch.uint8)
        zero, scale = (like.new_zeros(batch, heads, *entries, dtype=torch.float16) for _ in range(2))
        return codes, zero, scale

    def _group(self, x: Tensor) -> tuple[Tensor, int]:
        """A view with the numbers of a group along their own dimension, and that dimension."""
        if self.per_channel:
            return x.unflatten(2, (-1, self.group_size)), 3
        return x.unflatten(3, (-1, min(self.group_size, x.shape[3]))), 4

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
        for start, stop in tiles(out, 0, out.shape[2], self.group_size):
            codes = packed[0][:, :, start:stop]
            zero, scale = (
                x[:, :, start // self.shared : stop // self.shared].to(compute) for x in packed[1:]
            )
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


def tiles(like: "Tensor | Packed", start: int, stop: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` in pieces of a multiple of so many tokens of ``like`` ``[b, h, …, d]``."""
    batch, heads, _, head_dim = like.shape
    size = max(1, _TILE // (batch * heads * head_dim * multiple)) * multiple
    return ((first, min(first + size, stop)) for first in range(start, stop, size))


class Packed(NamedTuple):
    """Tokens of which the first are packed and the newest native: keys or values ``[B, h, C, d]``, as attention reads them.

    Token ``p`` of row ``b`` is ``zero + code · scale`` for ``p < packed_lengths[b]``; the others stand in ``tail``.

    Attributes:
        codes: uint8 ``[B, h, C, d·bits/8]``; of 4 bits channel ``i`` in the low half of a byte, ``i + d/2`` in the high one.
        zero, scale: fp16 ``[B, h, C/group_size, d]`` per channel, else ``[B, h, C, d/group_size]``.
        tail: ``[B, h, R, d]`` in the model's dtype, token ``p`` at slot ``(p - tail_start) mod R``.
        packed_lengths: int32 ``[B]``, or ``[B, h]`` where heads differ (only without ``per_channel``).
        group_size: numbers that share a zero and a scale; without ``per_channel`` at most d.
        per_channel: groups run over tokens (keys); else over channels (values).
        tail_start: 0 for a ring, which kernels want.
        bounds: smallest and largest of ``packed_lengths``; None = ask the device.
    """

    codes: Tensor
    zero: Tensor
    scale: Tensor
    tail: Tensor
    packed_lengths: Tensor
    group_size: int
    per_channel: bool
    tail_start: int = 0
    bounds: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, h, C, d)``."""
        batch, heads, capacity, _ = self.codes.shape
        return batch, heads, capacity, self.tail.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.tail.dtype

    @property
    def device(self) -> torch.device:
        return self.tail.device

    @property
    def packing(self) -> Packing:
        bits = 8 * self.codes.shape[3] // self.tail.shape[3]
        return Packing(bits=bits, group_size=self.group_size, per_channel=self.per_channel)

    def span(self, start: int, stop: int) -> Tensor:
        """Tokens ``[B, h, stop - start, d]`` in the model's dtype, a copy."""
        return self.read(start, stop, self.dtype)

    def rows(self, which: slice) -> "Packed":
        """These rows of the batch, as views."""
        names = "codes", "zero", "scale", "tail", "packed_lengths"
        return self._replace(**{name: getattr(self, name)[which] for name in names})

    def heads(self, which: slice | Sequence[int]) -> "Packed":
        """These heads: views of neighbours, else copies."""
        if not isinstance(which, slice) and which[-1] - which[0] == len(which) - 1:
            which = slice(which[0], which[-1] + 1)
        parts = {name: getattr(self, name)[:, which] for name in ("codes", "zero", "scale", "tail")}
        lengths = self.packed_lengths[:, which] if self.packed_lengths.ndim == 2 else self.packed_lengths
        return self._replace(**parts, packed_lengths=lengths)

    def _bounds(self) -> tuple[int, int]:
        if self.bounds is not None:
            return self.bounds
        lowest, highest = self.packed_lengths.aminmax()
        return int(lowest), int(highest)

    def read(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Tokens ``[B, h, stop - start, d]``, a copy; slots without a token are garbage. Computed in at least fp32."""
        lowest, highest = self._bounds()
        out = self.tail.new_empty(*self.shape[:2], stop - start, self.shape[3], dtype=dtype)
        packed, native = min(max(highest, start), stop), min(max(lowest, start), stop)
        if packed > start:
            self._unpack(start, packed, out[:, :, : packed - start])
        position = torch.arange(native, stop, device=self.device)
        newest = self.tail[:, :, (position - self.tail_start) % self.tail.shape[2]]
        if packed > native:
            lengths = self.packed_lengths if self.packed_lengths.ndim == 2 else self.packed_lengths[:, None]
            is_packed = (position < lengths[..., None])[..., None]
            newest = torch.where(is_packed, out[:, :, native - start :], newest)
        out[:, :, native - start :] = newest
        return out

    def _unpack(self, start: int, stop: int, out: Tensor) -> None:
        """Write packed tokens from any ``start`` on; groups of tokens are unpacked whole."""
        shared = self.packing.shared
        first, last = start // shared, -(-stop // shared)
        groups = self.zero[:, :, first:last], self.scale[:, :, first:last]
        codes = self.codes[:, :, first * shared : last * shared]
        if (first * shared, last * shared) == (start, stop):
            self.packing.unpack((codes, *groups), out)
            return
        whole = out.new_empty(*codes.shape[:3], out.shape[3])
        self.packing.unpack((codes, *groups), whole)
        out.copy_(whole[:, :, start - first * shared : stop - first * shared])

    # -- products --------------------------------------------------------------------------------------------

    def scores(self, q: Tensor, out: Tensor) -> None:
        """Write ``q · k̂`` of ``q`` ``[B, h, G, d]`` (fp32 or fp64) and the first tokens to ``out`` ``[B, h, G, n]``."""
        n, shared = out.shape[3], self.packing.shared
        stop = min(n, self._bounds()[0]) // shared * shared
        product = self._channel_scores if self.per_channel else self._token_scores
        scratch = _Scratch(q)
        for first, last in tiles(self, 0, stop, self.group_size):
            product(q, first, last, out[..., first:last], scratch)
        for first, last in tiles(self, stop, n):
            out[..., first:last] = q @ self.read(first, last, q.dtype).transpose(2, 3)

    def weighted(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Sums ``[B, h, G, d]`` of tokens ``start … stop - 1`` with ``weights`` ``[B, h, G, stop - start]`` (fp32 or fp64)."""
        out = weights.new_zeros(*weights.shape[:3], self.shape[3])
        packed = start if self.per_channel else min(max(self._bounds()[0], start), stop)
        scratch = _Scratch(weights)
        for first, last in tiles(self, start, packed):
            self._add_weighted(weights[..., first - start : last - start], first, last, out, scratch)
        for first, last in tiles(self, packed, stop):
            out += weights[..., first - start : last - start] @ self.read(first, last, weights.dtype)
        return out

    def _numbers(self, start: int, stop: int, scratch: "_Scratch") -> Tensor:
        """Codes ``c`` as floats ``2 c - 15`` (8 bits: ``c - 128``), ``[P, B, h, n, d/P]``, ``P`` codes to a byte.

        Sums of codes and of zeros would be far larger than what they sum up to, and lose as many digits. Valid until the
        next call.
        """
        codes = self.codes[:, :, start:stop]
        if codes.shape[3] == self.shape[3]:
            return scratch.floats((codes ^ 128).view(torch.int8).unsqueeze(0))
        halves = scratch.bytes(2, *codes.shape)
        mask, into = 0x1E, halves
        if codes.shape[3] % 4 == 0:  # four bytes at a time: half the time
            mask, codes, into = 0x1E1E1E1E, codes.view(torch.int32), halves.view(torch.int32)
        torch.bitwise_left_shift(codes, 1, out=into[0])
        torch.bitwise_right_shift(codes, 3, out=into[1])
        into.bitwise_and_(mask)
        return scratch.floats(halves.view(torch.int8).sub_(15))

    def _middle_and_scale(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What the number 0 stands for, and the step between numbers, of the groups of these tokens."""
        entries = slice(start // self.packing.shared, stop // self.packing.shared)
        zero, scale = (x[:, :, entries].to(dtype) for x in (self.zero, self.scale))
        if self.packing.bits == 8:
            return zero.add_(scale, alpha=128), scale
        return zero.add_(scale, alpha=7.5), scale.mul_(0.5)

    def _channel_scores(self, q: Tensor, start: int, stop: int, out: Tensor, scratch: "_Scratch") -> None:
        numbers = self._numbers(start, stop, scratch)
        parts, group = numbers.shape[0], self.group_size
        middle, scale = self._middle_and_scale(start, stop, q.dtype)
        scaled = _by_part(q, parts).unsqueeze(3) * _by_part(scale, parts).unsqueeze(4)
        keys = numbers.unflatten(3, (-1, group)).flatten(0, 3)
        products = torch.bmm(scaled.flatten(0, 3), keys.transpose(1, 2)).view(*scaled.shape[:5], group)
        target = out.unflatten(3, (-1, group))
        target.copy_((q @ middle.transpose(2, 3)).unsqueeze(4).expand_as(target))
        for product in products:
            target += product.transpose(2, 3)

    def _units(self, x: Tensor, parts: int) -> Tensor:
        """Middles or scales ``[B, h, n, d/g]`` for runs of channels within a group and a part: ``[P, B, h, U, n]``."""
        group, part = self.shape[3] // x.shape[3], self.shape[3] // parts
        x = x.repeat_interleave(group // math.gcd(group, part), dim=3)
        return _by_part(x, parts).transpose(3, 4).contiguous()

    def _token_scores(self, q: Tensor, start: int, stop: int, out: Tensor, scratch: "_Scratch") -> None:
        numbers = self._numbers(start, stop, scratch)
        groups = self._middle_and_scale(start, stop, q.dtype)
        middle, scale = (self._units(x, numbers.shape[0]) for x in groups)
        units = _by_part(q, numbers.shape[0]).unflatten(4, (scale.shape[3], -1))  # [P, B, h, G, U, c]
        own = torch.diag_embed(units.movedim(4, -1)).movedim(-1, 3).transpose(-1, -2)  # 0 in other units
        products = (own.flatten(5).flatten(3, 4) @ numbers.transpose(3, 4)).unflatten(3, own.shape[3:5])
        out.copy_((products * scale.unsqueeze(4)).sum((0, 3)))
        out += torch.einsum("pbhgu,pbhun->bhgn", units.sum(5), middle)

    def _add_weighted(self, weights: Tensor, start: int, stop: int, out: Tensor, scratch: "_Scratch") -> None:
        numbers = self._numbers(start, stop, scratch)
        parts = numbers.shape[0]
        middle, scale = self._middle_and_scale(start, stop, weights.dtype)
        scale = self._units(scale, parts)
        scaled = weights.contiguous().unsqueeze(2) * scale.unsqueeze(4)  # [P, B, h, U, G, n]
        sums = torch.bmm(scaled.flatten(3, 4).flatten(0, 2), numbers.flatten(0, 2))
        sums = sums.view(*scaled.shape[:5], scale.shape[3], -1).diagonal(dim1=3, dim2=5)  # [P, B, h, G, c, U]
        out += sums.permute(1, 2, 3, 0, 5, 4).flatten(3)
        out.unflatten(3, (middle.shape[3], -1)).add_((weights @ middle).unsqueeze(4))


Stored = Tensor | Packed
"""Keys or values ``[B, h, C, d]``."""


def _by_part(x: Tensor, parts: int) -> Tensor:
    """``[B, h, n, P·c]`` as contiguous ``[P, B, h, n, c]``."""
    return x.unflatten(3, (parts, -1)).movedim(3, 0).contiguous()


class _Scratch:
    """Memory for one tile, kept from tile to tile so that it stays in the processor's cache."""

    def __init__(self, like: Tensor):
        self._floats, self._bytes = like.new_empty(0), like.new_empty(0, dtype=torch.uint8)

    def bytes(self, *shape: int) -> Tensor:
        if self._bytes.numel() < math.prod(shape):
            self._bytes = self._bytes.new_empty(math.prod(shape))
        return self._bytes[: math.prod(shape)].view(shape)

    def floats(self, x: Tensor) -> Tensor:
        """A copy of ``x`` in the dtype of the products."""
        if self._floats.numel() < x.numel():
            self._floats = self._floats.new_empty(x.numel())
        return self._floats[: x.numel()].view(x.shape).copy_(x)
