"""Decode attention of PyTorch and of flash-attn as backends of our decode engine.

With them, the dense cache is measured with the best attention there is. They serve dense layers only: no head
follows, and none is followed. Both work with static shapes and never wait for the device. A step with them
can therefore be a CUDA graph with fused kernels between its products, like a step with our own kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pod.modeling.model.attend import Implementation
from pod.modeling.model.decode import DECODERS, RECORDABLE, DecodeCall


def _dense_buffers(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, H, slots, d]`` of a dense layer.

    Raises:
        ValueError: a head follows or keeps its window, or a codec packs keys or values.
    """
    keys, values, roles = call.keys, call.values, call.roles
    if roles.followers or roles.windows or not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        raise ValueError("it serves dense caches only, without a codec")
    return keys, values


def sdpa(call: DecodeCall) -> None:
    """PyTorch's flash attention, written into ``call.out``.

    It takes no lengths of rows. On a GPU it attends to all reserved slots, also to those without a token: the
    time is right, but the output is not the model's. On a CPU it attends to as many slots as the longest row
    has tokens.
    """
    longest = None if call.q.is_cuda else int(call.lengths.max())
    keys, values = _dense_buffers(call)
    keys = keys[:, :, :longest]
    values = values[:, :, :longest]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            call.q[:, :, None], keys, values, scale=call.scale, enable_gqa=True
        )
    call.out.copy_(out[:, :, 0])


def flash_attn(call: DecodeCall) -> None:
    """Split-KV decoding of the flash-attn package, written into ``call.out``."""
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    keys, values = _dense_buffers(call)
    keys = keys.transpose(1, 2)
    values = values.transpose(1, 2)
    lengths = call.lengths.to(torch.int32)
    out = flash_attn_with_kvcache(
        call.q[:, None], keys, values, cache_seqlens=lengths, softmax_scale=call.scale, causal=True
    )
    call.out.copy_(out[:, 0])


PEERS = {
    name: Implementation(run, lambda call: None) for name, run in (("sdpa", sdpa), ("flash_attn", flash_attn))
}
"""Backends for dense caches, by name."""


@contextmanager
def dense_peers() -> Iterator[None]:
    """Offer ``PEERS`` as decode backends by name while the block runs; ``auto`` takes none of them."""
    DECODERS.update(PEERS)
    RECORDABLE.update(PEERS)
    try:
        yield
    finally:
        for name in PEERS:
            del DECODERS[name]
        RECORDABLE.difference_update(PEERS)


def candidates(device: torch.device) -> list[str]:
    """Names of the backends that may decode a dense cache on a device.

    The reference is not among them, since it is not meant to be fast. On a GPU ``grouped`` is left out: it
    reads lengths from the device, which no CUDA graph can record.
    """
    left_out = {"grouped"} if device.type == "cuda" else set()
    return [name for name in dict.fromkeys((*DECODERS, *PEERS)) if name not in left_out]
