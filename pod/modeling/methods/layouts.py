"""The layouts that keep every token: dense, and PoD."""

from pod.modeling.cache import PodCache
from pod.modeling.config import PodConfig
from pod.modeling.layout import PodCacheLayer
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.stores import NATIVE


def _build(config: PodConfig, request: Request) -> PodCache:
    """The model's own plan says which layers hold keys."""
    if request.codec is NATIVE:
        return PodCache(config, spec=request.spec)
    return GroupedCache(config, lambda config, i: PodCacheLayer(config, i, request.codec), request.spec)


METHODS = (
    Method(name="full", paper="—", frees="nothing", axis="layout", build=_build),
    Method(
        name="pod",
        paper="PoD (Compressing KV Cache with Inter-Layer Attention Similarity), §2.2",
        frees="distant keys of heads that follow a lead; no token is dropped",
        axis="layout",
        build=_build,
    ),
)
