"""Caches that hold random tokens: time and bytes of decoding do not depend on what a prompt said."""

from typing import Any

import torch
from torch import Tensor

from pod.measure.max_batch import random_rows
from pod.measure.race import without_attention
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.rows import GroupedCache
from pod.modeling.shipped.stores import TokenStore

_CHUNK = 1 << 26  # random numbers written to a store at a time
_LOUD = 100.0  # standard deviation of window keys whose logits drown those of distant tokens, also of small queries


def is_filled_directly(cache: Any) -> bool:
    """Whether ``fill`` writes into the stores of a cache, so that no prompt is read: what it holds follows from the plan alone."""
    if type(cache) not in (PodCache, GroupedCache) or getattr(cache, "chunks", None) is not None:
        return False
    layer = cache.new_layer(0)
    return isinstance(layer, PodCacheLayer) and not layer.evicts


@torch.no_grad()
def fill(model: Any, cache: Any, batch: int, length: int, skip_share: float = 0.0) -> None:
    """Let a cache hold ``length`` random tokens in each of ``batch`` rows, more than one.

    Args:
        skip_share: this share of the following pairs, spread over the layers, gets window keys so loud that proximal
            tokens hold nearly all attention of their query heads.
    """
    if not is_filled_directly(cache):
        with without_attention(model):
            model(input_ids=random_rows(model, batch, length), past_key_values=cache, logits_to_keep=1)
        return
    model(
        input_ids=random_rows(model, batch, 1), past_key_values=cache, logits_to_keep=1
    )  # stores take their place
    weight = model.lm_head.weight
    step, _ = cache.begin_step(weight.new_empty(batch, length - 1, 0), None, None)
    for piece in cache.pieces(step):
        _fill_layers([layer for layer, _ in cache._holders()], length, weight, skip_share)
        cache.end_piece(piece)
    cache.end_step(step)


def _fill_layers(layers: list[Any], length: int, weight: Tensor, skip_share: float) -> None:
    """See ``fill``; the first token is there."""
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
                seen, loud[index] = seen - 1, _LOUD
        for name, store in layer.stores().items():
            _append_random(store, length, loud if name == "window_keys" else 1.0, like, generator)


def _append_random(
    store: TokenStore, length: int, factor: Tensor | float, like: Tensor, generator: torch.Generator
) -> None:
    """Random tokens behind the first, times a factor per head, a part at a time, of the dtype and device of ``like``."""
    batch, heads, _, head_dim = store.shape
    overwrites = type(store) is TokenStore and store.has_window  # what a packed window drops it still counts
    size = max(1, _CHUNK // (batch * heads * head_dim) // 64) * 64
    for first in range(1, length, size):
        rows = min(size, length - first)
        if first > 1 and overwrites and first + rows <= length - store.num_recent_tokens:
            continue
        x = like.new_empty(batch, heads, rows, head_dim).normal_(generator=generator)
        store.append(x * factor, first)
        store.settle(first + rows)
