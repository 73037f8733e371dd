"""Packed keys and values as decode kernels read them, and unpacked for those that have no kernel for codes."""

from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Tokens in 4 bits, the newest ones native: keys or values ``[B, h, C, d]`` (pod/modeling/methods/packing.py).

    Token ``p`` of row ``b`` is ``zero + code · scale`` for ``p < packed_lengths[b]``; the others stand in ``tail``.

    Attributes:
        codes: uint8 ``[B, h, C, d/2]``; channel ``i`` in the low four bits, ``i + d/2`` in the high ones.
        zero, scale: fp16. Keys: ``[B, h, C/group_size, d]``, one per channel and ``group_size`` tokens. Values:
            ``[B, h, C, d/group_size]``, one per token and ``group_size`` channels.
        tail: ``[B, h, R, d]`` in the model's dtype, token ``p`` at slot ``p mod R``; ``R >= residual + group_size``.
        packed_lengths: int32 ``[B]``.
        group_size: numbers that share a zero and a scale, at most d for values.
        per_channel: groups run over tokens (keys); else over channels (values).
    """

    codes: Tensor
    zero: Tensor
    scale: Tensor
    tail: Tensor
    packed_lengths: Tensor
    group_size: int
    per_channel: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, h, C, d)``."""
        batch, heads, capacity, half = self.codes.shape
        return batch, heads, capacity, 2 * half

    @property
    def dtype(self) -> torch.dtype:
        return self.tail.dtype

    @property
    def device(self) -> torch.device:
        return self.tail.device


Stored = Tensor | Packed
"""Keys or values ``[B, h, C, d]``."""


def read(x: Stored, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Tokens ``[B, h, stop - start, d]``: a view where that is possible. Slots without a token are garbage."""
    if isinstance(x, Tensor):
        return x[:, :, start:stop].to(dtype)
    position = torch.arange(start, stop, device=x.device)
    codes = x.codes[:, :, start:stop]
    numbers = torch.cat((codes & 15, codes >> 4), dim=3).to(dtype)
    if x.per_channel:
        zero, scale = (y[:, :, position // x.group_size].to(dtype) for y in (x.zero, x.scale))
    else:
        group = min(x.group_size, numbers.shape[3])
        zero, scale = (
            y[:, :, start:stop].to(dtype).repeat_interleave(group, dim=3) for y in (x.zero, x.scale)
        )
    native = x.tail[:, :, position % x.tail.shape[2]].to(dtype)
    is_packed = position < x.packed_lengths[:, None]
    return torch.where(is_packed[:, None, :, None], zero + numbers * scale, native)


def rows(x: Stored, which: slice) -> Stored:
    """These rows of the batch, as views."""
    if isinstance(x, Tensor):
        return x[which]
    tensors = {name: getattr(x, name)[which] for name in ("codes", "zero", "scale", "tail", "packed_lengths")}
    return x._replace(**tensors)


def heads(x: Stored, which: slice) -> Stored:
    """These heads, as views."""
    if isinstance(x, Tensor):
        return x[:, which]
    return x._replace(**{name: getattr(x, name)[:, which] for name in ("codes", "zero", "scale", "tail")})
