"""How selections become caches, and the two ways in which they take a prompt: whole or chunk by chunk."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pod.modeling.methods.base import Parameter, Request
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.rows import FixedChunks, GroupedCache
from pod.modeling.shipped.step import CacheLayer
from pod.modeling.shipped.stores import NATIVE

PREFILL_PARAMETERS = {
    "prefill": Parameter(
        "exact",
        "exact: compress when the prompt ends; streaming: after every chunk_size tokens of it",
        choices=("exact", "streaming"),
    ),
    "chunk_size": (512, "tokens of a prompt after which streaming prefill compresses (tokens)", 1),
}


def cache_of(
    make_layer: Callable[..., CacheLayer], takes_any_rows: bool = False, **grouped: Any
) -> Callable[[PodConfig, Request], PodCache]:
    """``Method.build`` of a selection.

    Args:
        make_layer: ``(config, layer_idx, request) -> CacheLayer``; raises ``ValueError`` for a request that it cannot serve.
        takes_any_rows: whether its layers see the whole batch, rows of unlike length too; packed stores do not.
        grouped: arguments of ``GroupedCache``.
    """

    def build(config: PodConfig, request: Request) -> PodCache:
        make_layer(config, 0, request)
        make = partial(make_layer, request=request)
        if takes_any_rows and request.codec is NATIVE:
            return PodCache(config, make, request.spec)
        is_streaming = request.params.get("prefill") == "streaming"
        chunks = FixedChunks(request.params["chunk_size"]) if is_streaming else None
        return GroupedCache(config, make, request.spec, chunks=chunks, **grouped)

    return build
