"""Fill caches with random tokens: time and bytes of decoding do not depend on what a prompt said."""

from typing import Any

import torch
from torch import Tensor

from pod.measure.max_batch import random_rows
from pod.measure.speed_comparison import without_attention
from pod.modeling.model.cache import PodCache
from pod.modeling.model.kv_buffer import KVBuffer
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.rows import GroupedCache
from pod.modeling.model.window_buffer import WindowBuffer

_CHUNK = 1 << 26  # random numbers written to a buffer at a time
# Standard deviation of window keys whose logits drown those of distant tokens, also when queries are small.
_LOUD = 100.0


def is_filled_directly(cache: Any) -> bool:
    """Whether ``fill_with_random_tokens`` writes into the buffers of a cache, so that no prompt is read.

    It does so when what the cache holds depends on the plan alone, and not on the content of a prompt.
    """
    if type(cache) not in (PodCache, GroupedCache) or getattr(cache, "chunks", None) is not None:
        return False
    layer = cache.new_layer(0)
    return isinstance(layer, PodCacheLayer) and not layer.evicts


@torch.no_grad()
def fill_with_random_tokens(model: Any, cache: Any, batch: int, length: int, skip_share: float = 0.0) -> None:
    """Fill an empty cache with ``length`` random tokens in each of ``batch`` rows.

    Args:
        length: more than 1.
        skip_share: the share of the following pairs, spread over the layers, that get very large window keys.
            Proximal tokens then get nearly all attention of these pairs' query heads, so that the gate of tau
            lets them skip distant tokens.
    """
    if not is_filled_directly(cache):
        with without_attention(model):
            model(input_ids=random_rows(model, batch, length), past_key_values=cache, logits_to_keep=1)
        return
    # Reading one token allocates the buffers.
    model(input_ids=random_rows(model, batch, 1), past_key_values=cache, logits_to_keep=1)
    weight = model.lm_head.weight
    step, _ = cache.begin_step(model.config, weight.new_empty(batch, length - 1, 0), None, None)
    for _ in cache.prefill_chunks(step):
        _fill_layers([layer for layer, _ in cache._holders()], length, weight, skip_share)
    cache.end_step(step)


def _fill_layers(layers: list[Any], length: int, weight: Tensor, skip_share: float) -> None:
    """Fill the buffers of these layers up to ``length`` tokens, behind the one token that is there.

    Args:
        weight: has the dtype of the numbers; and their device, where a layer has none of its own.
        skip_share: as in ``fill_with_random_tokens``.
    """
    generators: dict[torch.device, torch.Generator] = {}
    seen = 0.0
    for layer in layers:
        like = weight.new_empty(0, device=layer.device or weight.device)
        if like.device not in generators:
            generators[like.device] = torch.Generator(like.device).manual_seed(length)
        generator = generators[like.device]
        loud = like.new_ones(len(layer.roles.followers), 1, 1)
        for index in range(len(loud)):
            seen += skip_share
            if seen >= 1 - 1e-9:
                seen -= 1
                loud[index] = _LOUD
        for name, buffer in layer.kv_buffers().items():
            _append_random(buffer, length, loud if name == "window_keys" else 1.0, like, generator)


def _append_random(
    buffer: KVBuffer, length: int, factor: Tensor | float, like: Tensor, generator: torch.Generator
) -> None:
    """Append random tokens behind the first one, a part at a time.

    Args:
        length: number of tokens in the end, the first one included.
        factor: multiplies the numbers of each head.
        like: a tensor with the dtype and the device of the numbers.
    """
    batch, heads, _, head_dim = buffer.shape
    size = max(1, _CHUNK // (batch * heads * head_dim) // 64) * 64
    for first in range(1, length, size):
        rows = min(size, length - first)
        # Only a plain window may leave out tokens that it would drop again. A packed one must be given all of
        # them, because it counts what it drops.
        if type(buffer) is WindowBuffer and 1 < first <= length - buffer.num_recent_tokens - rows:
            continue
        x = like.new_empty(batch, heads, rows, head_dim).normal_(generator=generator)
        buffer.append(x * factor, first)
        buffer.flush(first + rows)
