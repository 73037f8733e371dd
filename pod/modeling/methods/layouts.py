"""What stands beside a selection: the layout, and the codec.

The layouts are what a model's own attention needs. Dense and PoD keep every token and run on dense weights;
models of the other layouts are trained.

Codecs hold keys and values in 2, 4 or 8 bits, for every layout and selection (KIVI, Liu et al., 2024; the
rules are in ``quantized.py``). From KIVI come the 2 bits of ``kivi``, keys packed per channel and values per
token, groups of 32 and a residual of 128 (§4.1); ``int4`` and ``int8`` share all of these but the bits. What
the paper leaves to its code is different here. Zeros and scales in fp16 are rounded outwards, not to the
nearest. The newest tokens stay native, the same ones for keys and values, and at least ``residual`` of them.
KIVI's code packs ``residual`` keys at a time, so that 0 to ``residual - 1`` keys are native, and packs values
one by one.
"""

from functools import partial

from pod.engine import attach
from pod.modeling.methods.base import Method, Request
from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import PodConfig
from pod.modeling.model.generation import own_cache
from pod.modeling.model.quantized import make_codec
from pod.modeling.model.sharing import GROUP_SIZE, RESIDUAL
from pod.modeling.model.stores import KVQuantizer

_CAPACITY = {"capacity": (None, "tokens per row to reserve space for; pod.engine then decodes")}
_OF_POD = {
    "tau": (None, "gate from which a follower's query head skips distant tokens; None = never", 0.0, 1.0),
    "extra_slots": (
        0,
        "extra tokens kept after windows, so that crop and assisted decoding can remove tokens",
        0,
    ),
}
_OF_CODECS = {
    "group_size": (GROUP_SIZE, "numbers that share a scale: tokens (keys) or channels (values)", 2),
    "residual": (RESIDUAL, "newest tokens that stay unpacked, and at most group_size - 1 more (tokens)", 0),
}


def _build(config: PodConfig, request: Request) -> PodCache:
    """A cache in which the model's own layout and plan say which layers hold what."""
    capacity = request.params.get("capacity")
    extra_slots = request.params.get("extra_slots")
    if extra_slots and capacity is not None:
        raise ValueError(
            f"{request.spec}: extra_slots = {extra_slots} must be 0 with a capacity: the engine serves "
            "windows without them"
        )
    codec = request.codec if capacity is None else request.codec.in_place(capacity)
    options = {name: request.params[name] for name in _OF_POD if name in request.params}
    cache = own_cache(config, codec, request.spec, **options)
    if capacity is not None:
        attach(cache, capacity)
    return cache


LAYOUTS = (
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
        frees="keys and values of all layers in a block except the first; no token is dropped",
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


def _build_codec(name: str, bits: int, config: PodConfig, request: Request) -> KVQuantizer:
    return make_codec(name, bits, config, request.params["group_size"], request.params["residual"])


QUANTIZERS = tuple(
    Method(
        name=name,
        paper="KIVI (Liu et al., 2024)",
        frees=f"{16 - bits} of 16 bits per number, minus 1 bit for scale and zero in fp16; "
        "the newest tokens stay in 16 bits",
        axis="codec",
        build=partial(_build_codec, name, bits),
        parameters=_OF_CODECS,
    )
    for name, bits in (("kivi", 2), ("int4", 4), ("int8", 8))
)
