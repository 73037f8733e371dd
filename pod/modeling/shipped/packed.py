"""Packed keys and values, unpacked: for backends that have no kernel for codes."""

import torch
from torch import Tensor

from pod.kernels.decode_types import Stored


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
