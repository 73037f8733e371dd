"""The layouts ``full``, ``pod``, ``cla`` and ``window``, and the codecs ``kivi``, ``int4`` and ``int8``.

A layout holds all tokens that a model's own attention needs. ``full`` and ``pod`` keep every token and work
with the weights of dense models. ``cla`` and ``window`` need models that were trained for them.

Codecs hold keys and values in 2, 4 or 8 bits, for every layout and selection (KIVI, Liu et al., 2024; the
rules are in ``quantized.py``). From KIVI come the 2 bits of ``kivi``, keys packed per channel and values per
token, groups of 32 and a residual of 128 (§4.1). ``int4`` and ``int8`` share all of these but the bits.

Two things on which KIVI's paper is silent differ from KIVI's code. Zeros and scales in fp16 are rounded
outwards, not to the nearest. At least ``residual`` of the newest tokens stay native, the same ones for keys
and values. KIVI's code packs ``residual`` keys at a time, so that 0 to ``residual - 1`` keys are native, and
packs values one by one.
"""

from functools import partial

from pod.engine import attach
from pod.modeling.methods.base import Builder, Request
from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import PodConfig
from pod.modeling.model.generation import own_cache
from pod.modeling.model.group_quantizer import make_quantizer
from pod.modeling.model.kv_quantizer import KVQuantizer
from pod.registry import METHODS


def _build(config: PodConfig, request: Request) -> PodCache:
    """A cache of the model's own layout and plan, with a decode engine if ``capacity`` is given."""
    capacity = request.params.get("capacity")
    extra_slots = request.params.get("extra_slots")
    if extra_slots and capacity is not None:
        raise ValueError(
            f"{request.spec}: extra_slots = {extra_slots} must be 0 with a capacity: the engine serves "
            "windows without them"
        )
    quantizer = request.quantizer if capacity is None else request.quantizer.in_place(capacity)
    # parameters of the layout pod
    options = {name: request.params[name] for name in ("tau", "extra_slots") if name in request.params}
    cache = own_cache(config, quantizer, request.spec, **options)
    if capacity is not None:
        attach(cache, capacity)
    return cache


def _build_codec(name: str, config: PodConfig, request: Request) -> KVQuantizer:
    bits = METHODS[name].bits
    assert bits is not None
    return make_quantizer(name, bits, config, request.params["group_size"], request.params["residual"])


BUILDERS = {name: Builder(build=_build) for name in ("full", "pod", "cla", "window")} | {
    name: Builder(build=partial(_build_codec, name)) for name in ("kivi", "int4", "int8")
}
