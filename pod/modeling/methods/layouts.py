"""The layouts that keep every token: dense, and PoD."""

from pod.modeling.cache import PodCache
from pod.modeling.config import PodConfig
from pod.modeling.methods.base import Method


def _full(config: PodConfig) -> PodCache:
    return PodCache(config, spec="full")


def _pod(config: PodConfig) -> PodCache:
    return PodCache(config, spec="pod")


METHODS = (
    Method(name="full", paper="—", frees="nothing", build=_full),
    Method(
        name="pod",
        paper="PoD (papers: Compressing KV Cache with Inter-Layer Attention Similarity), §2.2",
        frees="distant keys of heads that follow a lead; no token is dropped",
        build=_pod,
        needs_dense=False,
    ),
)
