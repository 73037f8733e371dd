"""Keys and values in 2, 4 or 8 bits: attention computes with them without unpacking them as a whole.

This file has the format, the tensors that hold it, and the products of queries and weights with them.

**Numbers.** Quantization is asymmetric (as KIVI, Liu et al., 2024). A group is stored as codes
``0 … 2^bits - 1``, its *zero* (smallest value) and its *scale* (step between codes):
``x̂ = zero + code · scale``. Zero and scale are fp16 whatever the model's dtype. At 4 bits, a group of 32
costs 5 bits per number, and a group of 64 costs 4.5.

The fp16 zero is rounded down and the fp16 scale up, and codes are computed with the *rounded* ones. So every
number lies between the lowest and the highest code, and ``|x - x̂| <= scale / 2``. This also holds in groups
far from zero and in constant groups. Numbers beyond the range of fp16 (±65504) saturate there. fp16 has no
scale below 6e-8, so numbers that differ by less become equal.

The size of a group over channels divides ``head_dim``: it is the divisor nearest to ``group_size``. So 80
channels make two groups of 40, and 112 make four of 28. There 4 bits cost 4.8 and 5.14 bits per number.

**When tokens are packed.** While a prompt runs, its tokens stay *native*: in the model's dtype. So attention
inside it is exact and does not depend on its chunks. ``flush`` packs when the prompt ends and after every
decoded token. Of ``n`` tokens held, the first ``P(n) = ⌊(n - residual) / group_size⌋ · group_size`` are then
packed (none if negative). ``residual`` to ``residual + group_size - 1`` tokens stay native, the same ones for
keys and values. A token is packed only once: ``keep`` copies codes and does not quantize again.

**Products.** ``q · k̂ = (q ∘ scale) · code + q · zero`` and ``Σ w v̂ = Σ (w · scale) code + Σ w · zero``,
with codes counted from the middle code. The scales multiply the smaller factor, ``q`` or ``w``. Codes become
floats a tile at a time, inside the processor's cache. Nothing else is unpacked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .attend import compute_dtype, tile_elements
from .packed_bytes import channel_group

_HALF_MAX = torch.finfo(torch.float16).max
_MINUS_TINY = -(2**15) + 1  # the bits of the largest fp16 number below 0, as int16


@dataclass(frozen=True)
class Packing:
    """How numbers of ``[b, h, n, d]`` are grouped and packed.

    Attributes:
        bits: 2, 4 or 8. Byte ``i`` of a token holds the codes of ``P = 8 / bits`` channels: ``i`` in its
            lowest bits, then ``i + d/P``, and so on.
        group_size: how many numbers share a zero and a scale. For groups over channels, see ``channels``.
        per_channel: True = a group is ``group_size`` consecutive tokens of one channel (``n`` must be a
            multiple). False = it is ``channels(d)`` consecutive channels of one token.
    """

    bits: int
    group_size: int
    per_channel: bool

    @property
    def shared(self) -> int:
        """How many tokens share one entry of the tensors of zeros and scales."""
        return self.group_size if self.per_channel else 1

    def channels(self, head_dim: int) -> int:
        """How many channels of one token share a zero and a scale: a divisor of ``head_dim``.

        It is 1 if groups run over tokens, else the divisor that ``channel_group`` gives.
        """
        return 1 if self.per_channel else channel_group(head_dim, self.group_size)

    @property
    def parts(self) -> int:
        """How many codes are in a byte."""
        return 8 // self.bits

    def allocate(self, like: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, zeros and scales for ``slots`` tokens, in the shapes that ``pack`` returns, filled with 0.

        Args:
            like: ``[b, h, …, d]``, which gives the sizes and the device.
            slots: number of tokens; per channel, a multiple of ``group_size``.
        """
        batch, heads, _, head_dim = like.shape
        entries = slots // self.shared, head_dim // self.channels(head_dim)
        codes = like.new_zeros(batch, heads, slots, head_dim * self.bits // 8, dtype=torch.uint8)
        zero = like.new_zeros(batch, heads, *entries, dtype=torch.float16)
        scale = torch.zeros_like(zero)
        return codes, zero, scale

    def _group(self, x: Tensor) -> tuple[Tensor, int]:
        """A view of ``x`` in which each group lies along a dimension of its own, and that dimension."""
        if self.per_channel:
            return x.unflatten(2, (-1, self.group_size)), 3
        return x.unflatten(3, (-1, self.channels(x.shape[3]))), 4

    def pack(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize ``[b, h, n, d]``.

        Returns:
            Codes ``[b, h, n, d·bits/8]`` (uint8), zeros and scales (fp16). Zeros and scales are
            ``[b, h, n, d/channels]``, or per channel ``[b, h, n/group_size, d]``.
        """
        compute = compute_dtype(x.dtype)
        groups, dim = self._group(x.to(compute).clamp(-_HALF_MAX, _HALF_MAX))
        zero = _half_below(groups.amin(dim, keepdim=True))
        levels = 2**self.bits - 1
        # the scale is rounded up, so that no number lies beyond the last code
        scale = -_half_below((zero.to(compute) - groups.amax(dim, keepdim=True)) / levels)
        step = scale.to(compute)
        codes = (groups - zero.to(compute)) / torch.where(step == 0, 1, step)
        codes = codes.round_().clamp_(0, levels).to(torch.uint8).view(x.shape)
        parts = (part << i * self.bits for i, part in enumerate(codes.chunk(self.parts, dim=3)))
        return reduce(torch.bitwise_or, parts), zero.squeeze(dim), scale.squeeze(dim)

    def unpack(self, packed: Sequence[Tensor], out: Tensor) -> None:
        """Write ``x̂ = zero + code · scale`` into ``out`` ``[b, h, n, d]``, computed in at least fp32.

        Args:
            packed: codes, zeros and scales, as ``pack`` returns them.
            out: where to write, in any floating dtype.
        """
        compute = compute_dtype(out.dtype)
        for start, stop in tiles(out, 0, out.shape[2], self.group_size):
            codes = packed[0][:, :, start:stop]
            entries = slice(start // self.shared, stop // self.shared)
            zero = packed[1][:, :, entries].to(compute)
            scale = packed[2][:, :, entries].to(compute)
            codes = torch.cat([codes >> shift & 2**self.bits - 1 for shift in range(0, 8, self.bits)], dim=3)
            groups, dim = self._group(codes.to(compute))
            groups.mul_(scale.unsqueeze(dim)).add_(zero.unsqueeze(dim))
            out[:, :, start:stop] = groups.flatten(dim - 1, dim)

    def unpack_span(self, packed: Sequence[Tensor], start: int, stop: int, out: Tensor) -> None:
        """Unpack tokens ``start … stop - 1`` into ``out``, even if they begin or end inside a group.

        Args:
            packed: codes, zeros and scales of tokens from 0 on, as ``pack`` returns them.
            out: ``[b, h, stop - start, d]``.
        """
        shared = self.shared
        first = start // shared
        last = -(-stop // shared)
        codes = packed[0][:, :, first * shared : last * shared]
        groups = [x[:, :, first:last] for x in packed[1:]]
        if (first * shared, last * shared) == (start, stop):
            self.unpack((codes, *groups), out)
            return
        whole = out.new_empty(*codes.shape[:3], out.shape[3])
        self.unpack((codes, *groups), whole)
        out.copy_(whole[:, :, start - first * shared : stop - first * shared])


def _half_below(x: Tensor) -> Tensor:
    """The largest fp16 number that is not above ``x``."""
    half = x.half()
    bits = half.view(torch.int16)  # bits are used, because nextafter does not know fp16 on every device
    below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, _MINUS_TINY)).view(torch.float16)
    return torch.where(half > x, below, half)


def tiles(like: "Tensor | Packed", start: int, stop: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cut the tokens ``[start, stop)`` of ``like`` ``[b, h, …, d]`` into tiles of about ``tile_elements``.

    Each tile has a multiple of ``multiple`` tokens, and at least so many; the last one may be shorter.

    Returns:
        ``(first, last)`` of each tile, which has the tokens ``first … last - 1``.
    """
    batch, heads, _, head_dim = like.shape
    size = max(1, tile_elements(like.device) // (batch * heads * head_dim * multiple)) * multiple
    return ((first, min(first + size, stop)) for first in range(start, stop, size))


class Packed(NamedTuple):
    """Keys or values ``[B, h, C, d]`` as attention reads them: the first tokens packed, the newest native.

    Token ``p`` of row ``b`` is ``zero + code · scale`` for ``p < packed_lengths[b]``. Later tokens are in
    ``tail``.

    Attributes:
        codes: uint8 ``[B, h, C, d·bits/8]``, see ``Packing``.
        zero, scale: fp16 ``[B, h, C/group_size, d]`` per channel, else ``[B, h, C, d/channels]``, see
            ``Packing.channels``.
        tail: ``[B, h, R, d]`` in the model's dtype, token ``p`` at slot ``(p - tail_start) mod R``.
        packed_lengths: int32 ``[B]``, or ``[B, h]`` where heads differ (only without ``per_channel``).
        group_size: how many numbers share a zero and a scale. Without ``per_channel`` it is the divisor of d
            nearest to ``group_size``.
        per_channel: True = groups run over tokens (keys). False = they run over channels (values).
        bounds: two numbers known on the host. The first is at most the smallest of ``packed_lengths``, the
            second at least the largest.
        tail_start: position of the token at slot 0 of ``tail``. Kernels need 0, which a ring has.
    """

    codes: Tensor
    zero: Tensor
    scale: Tensor
    tail: Tensor
    packed_lengths: Tensor
    group_size: int
    per_channel: bool
    bounds: tuple[int, int]
    tail_start: int = 0

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
        """The format of ``codes``, ``zero`` and ``scale``."""
        bits = 8 * self.codes.shape[3] // self.tail.shape[3]
        return Packing(bits=bits, group_size=self.group_size, per_channel=self.per_channel)

    def rows(self, rows: slice) -> "Packed":
        """The same for these rows of the batch only, as views."""
        names = "codes", "zero", "scale", "tail", "packed_lengths"
        return self._replace(**{name: getattr(self, name)[rows] for name in names})

    def heads(self, heads: slice | Sequence[int]) -> "Packed":
        """The same for these heads only: views if their numbers are consecutive, else copies."""
        if not isinstance(heads, slice) and heads[-1] - heads[0] == len(heads) - 1:
            heads = slice(heads[0], heads[-1] + 1)
        parts = {name: getattr(self, name)[:, heads] for name in ("codes", "zero", "scale", "tail")}
        lengths = self.packed_lengths[:, heads] if self.packed_lengths.ndim == 2 else self.packed_lengths
        return self._replace(**parts, packed_lengths=lengths)

    def span(self, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Unpack tokens ``start … stop - 1``: a copy ``[B, h, stop - start, d]``.

        It is computed in at least fp32, and returned in ``dtype`` (None = the model's). Positions at which a
        row has no token hold garbage.
        """
        lowest, highest = self.bounds
        out = self.tail.new_empty(*self.shape[:2], stop - start, self.shape[3], dtype=dtype or self.dtype)
        packed = min(max(highest, start), stop)
        native = min(max(lowest, start), stop)
        if packed > start:
            tensors = self.codes, self.zero, self.scale
            self.packing.unpack_span(tensors, start, packed, out[:, :, : packed - start])
        position = torch.arange(native, stop, device=self.device)
        newest = self.tail[:, :, (position - self.tail_start) % self.tail.shape[2]]
        if packed > native:
            lengths = self.packed_lengths if self.packed_lengths.ndim == 2 else self.packed_lengths[:, None]
            is_packed = (position < lengths[..., None])[..., None]
            newest = torch.where(is_packed, out[:, :, native - start :], newest)
        out[:, :, native - start :] = newest
        return out

    # -- products --------------------------------------------------------------------------------------------

    def scores(self, q: Tensor, out: Tensor) -> None:
        """Write the products ``q · k̂`` with the first ``n`` tokens into ``out``.

        Args:
            q: ``[B, h, G, d]``, fp32 or fp64.
            out: ``[B, h, G, n]``.
        """
        n, shared = out.shape[3], self.packing.shared
        packed = min(n, self.bounds[0]) // shared * shared
        if packed:
            write = self._channel_scores if self.per_channel else self._token_scores
            write(q, out[..., :packed])
        for tokens, first, stop in self._natives(packed, n, q.dtype):
            out[..., first:stop] = q @ tokens.transpose(2, 3)

    def weighted(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Weighted sums ``Σ w v̂`` of tokens ``start … stop - 1``, ``[B, h, G, d]``.

        Args:
            weights: ``[B, h, G, stop - start]``, fp32 or fp64.
        """
        packed = start if self.per_channel else min(max(self.bounds[0], start), stop)
        out = self._weighted(weights[..., : packed - start], start, packed) if packed > start else 0
        for tokens, first, last in self._natives(packed, stop, weights.dtype):
            out = out + weights[..., first - start : last - start] @ tokens
        return out if isinstance(out, Tensor) else weights.new_zeros(*weights.shape[:3], self.shape[3])

    def _natives(self, start: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, int, int]]:
        """Tokens ``[start, stop)`` as floats, in pieces ``(tokens [B, h, last - first, d], first, last)``."""
        native = min(max(self.bounds[1], start), stop)
        room = self.tail.shape[2]
        for first, last in tiles(self, start, native):
            yield self.span(first, last, dtype), first, last
        while native < stop:
            slot = (native - self.tail_start) % room
            last = min(stop, native + room - slot)
            yield self.tail[:, :, slot : slot + last - native].to(dtype), native, last
            native = last

    def _room(self, like: Tensor, tokens: int) -> Tensor:
        """Memory for the floats of one tile, used for every tile in turn.

        Allocating it anew for each tile would take as long as computing the floats.
        """
        first = next(iter(tiles(self, 0, tokens, self.group_size)))
        return like.new_empty(first[1] * math.prod((*self.shape[:2], self.shape[3])))

    def _numbers(self, start: int, stop: int, room: Tensor) -> Tensor:
        """Codes ``c`` as floats ``(c - 2^(bits-1)) · 2^(8-bits)``, ``[P, B, h, n, d/P]``.

        ``P`` is the number of codes in a byte. Codes are counted from the middle code. Counted from 0, the
        sum over codes and the sum over zeros would both be far larger than their total, and digits would be
        lost. The result lies in ``room``, so it is valid until the next call.
        """
        codes, bits = self.codes[:, :, start:stop], self.packing.bits
        numbers = codes.new_empty(self.packing.parts, *codes.shape)
        into = numbers
        signs = sum(128 >> shift for shift in range(0, 8, bits))
        top = 256 - 2 ** (8 - bits)
        if codes.shape[3] % 4 == 0:  # four bytes at a time take half the time
            codes = codes.view(torch.int32)
            into = into.view(torch.int32)
            signs = signs * 0x01010101 - 2**32
            top = top * 0x01010101 - 2**32
        torch.bitwise_xor(codes, signs, out=into[-1])
        for i, part in enumerate(into[:-1], 1):
            torch.bitwise_left_shift(into[-1], 8 - i * bits, out=part)
        if bits < 8:
            into.bitwise_and_(top)
        return room[: numbers.numel()].view(numbers.shape).copy_(numbers.view(torch.int8))

    def _middle_and_scale(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The value that the float 0 of ``_numbers`` stands for, and the value of a difference of 1.

        Both are ``[B, h, n/g, d]`` per channel, else ``[B, h, d/g, n]``, with ``g`` numbers in a group.
        """
        entries = slice(start // self.packing.shared, stop // self.packing.shared)
        zero = self.zero[:, :, entries]
        scale = self.scale[:, :, entries]
        if not self.per_channel:
            zero = zero.transpose(2, 3)
            scale = scale.transpose(2, 3)
        zero = zero.to(dtype, memory_format=torch.contiguous_format)
        scale = scale.to(dtype, memory_format=torch.contiguous_format)
        bits = self.packing.bits
        return zero.add_(scale, alpha=2 ** (bits - 1)), scale.mul_(2.0 ** (bits - 8))

    def _channel_scores(self, q: Tensor, out: Tensor) -> None:
        """``scores`` of packed tokens, for groups over tokens."""
        parts, group = self.packing.parts, self.group_size
        middle, scale = self._middle_and_scale(0, out.shape[3], q.dtype)
        out = out.unflatten(3, (-1, group))
        out.copy_((q @ middle.transpose(2, 3))[..., None].expand_as(out))
        groups = q.shape[2]
        q = _rows_of_four(q).unflatten(3, (parts, 1, -1)).permute(3, 0, 1, 4, 2, 5)  # [P, B, h, 1, G, d/P]
        scale = scale.unflatten(3, (parts, 1, -1)).permute(3, 0, 1, 2, 4, 5)  # [P, B, h, n/g, 1, d/P]
        room = self._room(q, out.shape[3] * group)
        for first, last in tiles(self, 0, out.shape[3] * group, group):
            entries = slice(first // group, last // group)
            scaled = _product(q, scale[:, :, :, entries])
            keys = self._numbers(first, last, room).unflatten(3, (-1, group)).flatten(0, 3)
            products = torch.bmm(scaled.flatten(0, 3), keys.transpose(1, 2))
            for product in products.view(*scaled.shape[:5], group):
                out[:, :, :, entries].add_(product.transpose(2, 3)[:, :, :groups])

    def _units(self, x: Tensor) -> Tensor:
        """Turn entries of groups ``[B, h, d/g, n]`` into entries of runs of channels, ``[U, P, B, h, n]``.

        A run is the largest number of consecutive channels that never crosses the border of a group, nor of
        the ``P`` parts of ``d/P`` channels whose codes have the same place in their bytes. A part has ``U``
        runs.
        """
        part = self.shape[3] // self.packing.parts
        group = self.shape[3] // x.shape[2]
        unit = math.gcd(group, part)
        x = x.repeat_interleave(group // unit, 2) if group > unit else x
        return x.unflatten(2, (self.packing.parts, part // unit)).permute(3, 2, 0, 1, 4)

    def _token_scores(self, q: Tensor, out: Tensor) -> None:
        """``scores`` of packed tokens, for groups over channels."""
        middle, scale = self._middle_and_scale(0, out.shape[3], q.dtype)
        torch.matmul(q.unflatten(3, (middle.shape[2], -1)).sum(4), middle, out=out)
        scale = self._units(scale)
        q = q.unflatten(3, (scale.shape[1], len(scale), -1)).permute(4, 3, 0, 1, 2, 5)  # [U, P, B, h, G, c]
        room = self._room(q, out.shape[3])
        for first, last in tiles(self, 0, out.shape[3], self.group_size):
            numbers = self._numbers(first, last, room).unflatten(4, (len(scale), -1))
            for unit, steps in enumerate(scale[..., first:last]):
                products = q[unit] @ numbers[..., unit, :].transpose(3, 4)
                out[..., first:last].add_((products * steps.unsqueeze(3)).sum(0))

    def _weighted(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weighted`` of packed tokens, for groups over channels."""
        middle, scale = self._middle_and_scale(start, stop, weights.dtype)
        rows = _rows_of_four(weights)
        scaled = _product(rows, self._units(scale).unsqueeze(4))  # [U, P, B, h, G, n]
        units = scaled.flatten(1, 3)
        width = self.shape[3] // (scaled.shape[0] * scaled.shape[1])
        sums = scaled.new_empty(*units.shape[:3], width)
        room = self._room(weights, stop - start)
        for first, last in tiles(self, start, stop, self.group_size):
            numbers = self._numbers(first, last, room).flatten(0, 2)
            tile = units[..., first - start : last - start]
            for unit, (total, left) in enumerate(zip(sums, tile, strict=True)):
                right = numbers[..., unit * width : (unit + 1) * width]
                torch.baddbmm(total, left, right, beta=float(first > start), out=total)
        out = sums.view(*scaled.shape[:5], width).permute(2, 3, 4, 1, 0, 5).flatten(3)
        out = out[:, :, : weights.shape[2]]
        out.unflatten(3, (middle.shape[2], -1)).add_((weights @ middle.transpose(2, 3)).unsqueeze(4))
        return out


def _rows_of_four(x: Tensor) -> Tensor:
    """``x`` ``[B, h, G, n]`` with one more row of zeros if ``G`` is 3, 7, 11, ….

    A matrix product of ``4i + 3`` rows takes longer than one of ``4i + 4``.
    """
    return F.pad(x, (0, 0, 0, 1)) if x.shape[2] % 4 == 3 else x


def _product(x: Tensor, y: Tensor) -> Tensor:
    """``x * y`` as a contiguous tensor, whatever strides ``x`` and ``y`` have."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return torch.mul(x, y, out=x.new_empty(shape))


Stored = Tensor | Packed
"""Keys or values ``[B, h, C, d]``, native or packed."""
