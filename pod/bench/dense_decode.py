"""Decode attention of others as backends of our decode engine, so that the dense cache is measured with the best there is.

They serve dense layers only: no head follows, and none is followed. Both work at static shapes, as CUDA graphs need it.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pod.modeling.shipped.attend import Implementation
from pod.modeling.shipped.decode import DECODERS, DecodeCall


def _reason(call: DecodeCall) -> str | None:
    if call.roles.followers or call.roles.followed or call.roles.windows:
        return "it serves dense caches only"
    if not isinstance(call.keys, torch.Tensor) or not isinstance(call.values, torch.Tensor):
        return "it does not read packed keys and values"
    return None


def sdpa(call: DecodeCall) -> None:
    """PyTorch's flash attention.

    It takes no lengths per row. On a GPU it attends to all reserved slots, with keys that are whatever stands there: what it
    costs is what it would cost, but its output is not the model's. On a CPU it attends to the longest row's tokens.
    """
    keys, values = call.keys, call.values
    assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
    if not call.q.is_cuda:
        longest = int(call.lengths.max())
        keys, values = keys[:, :, :longest], values[:, :, :longest]
    q = call.q.unsqueeze(2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, keys, values, scale=call.scale, enable_gqa=True)
    call.out.copy_(out.squeeze(2))


def flash_attn(call: DecodeCall) -> None:
    """Split-KV decoding of the flash-attn package."""
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    assert isinstance(call.keys, torch.Tensor) and isinstance(call.values, torch.Tensor)
    keys, values = call.keys.transpose(1, 2), call.values.transpose(1, 2)
    lengths = call.lengths.to(torch.int32)
    out = flash_attn_with_kvcache(
        call.q.unsqueeze(1), keys, values, cache_seqlens=lengths, softmax_scale=call.scale, causal=True
    )
    call.out.copy_(out.squeeze(1))


def _flash_attn_unsupported(call: DecodeCall) -> str | None:
    if not call.q.is_cuda:
        return "it needs CUDA"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    return _reason(call)


PEERS = {
    "sdpa": Implementation(sdpa, _reason),
    "flash_attn": Implementation(flash_attn, _flash_attn_unsupported),
}
"""Backends for dense caches by name."""


@contextmanager
def dense_peers() -> Iterator[None]:
    """Offer ``PEERS`` as decode backends by name; ``auto`` takes none of them."""
    DECODERS.update(PEERS)
    try:
        yield
    finally:
        for name in PEERS:
            del DECODERS[name]


def candidates(device: torch.device) -> list[str]:
    """Backends that may decode a dense cache on a device, apart from the reference, which is not meant to be fast.

    ``grouped`` asks the device for lengths, which no CUDA graph can record.
    """
    left_out = {"reference", "grouped"} if device.type == "cuda" else {"reference"}
    return [name for name in dict.fromkeys((*DECODERS, *PEERS)) if name not in left_out]
