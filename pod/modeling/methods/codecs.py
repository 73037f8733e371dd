"""Keys and values in 2, 4 or 8 bits, for every layout and selection (KIVI, Liu et al., 2024; rules in ``quantized.py``).

KIVI's are the 2 bits of ``kivi``, keys per channel and values per token, groups of 32 and a residual of 128 (§4.1), which ``int4`` and
``int8`` share. Ours are what the paper leaves to its code: fp16 zeros and scales are rounded outwards, not to the nearest, and the same
newest tokens of keys and values stay native, ``residual`` at least; KIVI's code packs keys ``residual`` at a time, so that of them 0 to
``residual - 1`` are native, and values one by one.
"""

from functools import partial

from pod.modeling.methods.base import Method, Request
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.quantized import make_codec
from pod.modeling.shipped.sharing import GROUP_SIZE, RESIDUAL
from pod.modeling.shipped.stores import Codec

_PARAMETERS = {
    "group_size": (GROUP_SIZE, "numbers that share a scale: tokens (keys) or channels (values)", 2),
    "residual": (RESIDUAL, "newest tokens that stay unpacked, and at most group_size - 1 more (tokens)", 0),
}


def _build(name: str, bits: int, config: PodConfig, request: Request) -> Codec:
    return make_codec(name, bits, config, request.params["group_size"], request.params["residual"])


METHODS = tuple(
    Method(
        name=name,
        paper="KIVI (Liu et al., 2024)",
        frees=f"{16 - bits} of 16 bits of every number but the newest tokens', less 1 bit for fp16 scale and zero",
        axis="codec",
        build=partial(_build, name, bits),
        parameters=_PARAMETERS,
    )
    for name, bits in (("kivi", 2), ("int4", 4), ("int8", 8))
)
