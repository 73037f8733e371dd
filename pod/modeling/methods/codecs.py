"""Keys and values in 4 or 8 bits, for every layout and selection (KIVI, Liu et al., 2024; rules in ``quantized.py``)."""

from collections.abc import Sequence
from functools import partial

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.quantized import make_codec
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.sharing import GROUP_SIZE, RESIDUAL
from pod.modeling.shipped.stores import NATIVE, Codec

_PARAMETERS = {
    "group_size": (GROUP_SIZE, "numbers that share a scale: tokens (keys) or channels (values)", 2),
    "residual": (
        RESIDUAL,
        "newest tokens that stay unpacked, at most group_size - 1 more of them (tokens)",
        0,
    ),
}


def _build(name: str, bits: int, config: PodConfig, request: Request) -> Codec:
    return make_codec(name, bits, config, request.params["group_size"], request.params["residual"])


class LayerCodecs(Codec):
    """A codec per layer."""

    def __init__(self, codecs: Sequence[Codec]):
        self.codecs = tuple(codecs)
        self.is_in_place = all(codec.is_in_place for codec in self.codecs)

    def of_layer(self, layer_idx: int) -> Codec:
        return self.codecs[layer_idx]

    def in_place(self, capacity: int) -> Codec:
        return LayerCodecs([codec.in_place(capacity) for codec in self.codecs])


def planned_codec(config: PodConfig) -> Codec:
    """What the bits of a model's plan ask for."""
    plan = config.sharing_plan
    if not plan.packs:
        return NATIVE
    sizes = GROUP_SIZE, RESIDUAL
    made = {bits: make_codec(f"int{bits}", bits, config, *sizes) for bits in set(plan.bits or ()) - {16}}
    return LayerCodecs([made.get(bits, NATIVE) for bits in plan.bits or ()])


METHODS = tuple(
    Method(
        name=f"int{bits}",
        paper="KIVI (Liu et al., 2024)",
        frees=f"{16 - bits} of 16 bits of every number but the newest tokens', less 1 bit for fp16 scale and zero",
        axis="codec",
        build=partial(_build, f"int{bits}", bits),
        parameters=_PARAMETERS,
    )
    for bits in (4, 8)
)
