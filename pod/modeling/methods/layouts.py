"""The layouts: what a model's own attention needs. Dense and PoD keep every token of dense weights; the others are trained."""

from pod.engine import attach
from pod.modeling.methods.base import Method, Request
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.generation import own_cache

_CAPACITY = {
    "capacity": (None, "tokens per row to reserve room for; the decode engine (pod.engine) then decodes")
}
_OF_POD = {
    "tau": (None, "gate from which a follower's query head skips distant tokens; None = never", 0.0, 1.0),
    "extra_slots": (
        0,
        "tokens that followers hold behind their windows, so that as many can be taken back: crop, assisted decoding",
        0,
    ),
}


def _build(config: PodConfig, request: Request) -> PodCache:
    """The model's own layout and plan say which layers hold what."""
    capacity, extra_slots = request.params.get("capacity"), request.params.get("extra_slots")
    if extra_slots and capacity is not None:
        raise ValueError(
            f"{request.spec}: extra_slots = {extra_slots} must be 0 with a capacity: the engine serves windows without them"
        )
    codec = request.codec if capacity is None else request.codec.in_place(capacity)
    options = {name: request.params[name] for name in _OF_POD if name in request.params}
    cache = own_cache(config, codec, request.spec, **options)
    if capacity is not None:
        attach(cache, capacity)
    return cache


METHODS = (
    Method(name="full", paper="—", frees="nothing", axis="layout", build=_build, parameters=_CAPACITY),
    Method(
        name="pod",
        paper="PoD (Compressing KV Cache with Inter-Layer Attention Similarity), §2.2",
        frees="distant keys of heads that follow a lead; no token is dropped",
        axis="layout",
        build=_build,
        parameters=_CAPACITY | _OF_POD,
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
        parameters=_CAPACITY,
    ),
)
