"""The layouts: what a model's own attention needs. Dense and PoD keep every token of dense weights; the others are trained."""

from pod.modeling.cache import LAYOUT_LAYERS, PodCache
from pod.modeling.config import PodConfig
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.rows import GroupedCache
from pod.modeling.stores import NATIVE


def _build(config: PodConfig, request: Request) -> PodCache:
    """The model's own layout and plan say which layers hold what."""
    if request.codec is NATIVE:
        return PodCache(config, spec=request.spec)
    make_layer = LAYOUT_LAYERS[config.layout]
    return GroupedCache(config, lambda config, i: make_layer(config, i, request.codec), request.spec)


METHODS = (
    Method(name="full", paper="—", frees="nothing", axis="layout", build=_build),
    Method(
        name="pod",
        paper="PoD (Compressing KV Cache with Inter-Layer Attention Similarity), §2.2",
        frees="distant keys of heads that follow a lead; no token is dropped",
        axis="layout",
        build=_build,
    ),
    Method(
        name="cla",
        paper="Cross-layer attention (Brandon et al., 2024); for models trained with layout='cla'",
        frees="keys and values of every layer of a block but its first; no token is dropped",
        axis="layout",
        build=_build,
        trained=True,
    ),
    Method(
        name="window",
        paper="Window attention (Beltagy et al., 2020); for models trained with layout='window'",
        frees="keys and values of tokens that have left the window",
        axis="layout",
        build=_build,
        trained=True,
    ),
)
