"""Layers of packed stores that stay in place, so that a decoded token is written and read at fixed addresses."""

from dataclasses import replace

from torch import Tensor

from pod.modeling.methods.quantized import QuantizedCodec
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import Codec


class PackedLayer(PodCacheLayer):
    """A layer of packed stores, which packs as soon as it has attended."""

    is_croppable = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        out = super().attend(q, k, v, step)
        self.settle(step)
        return out


def packed_layer(config: PodConfig, layer_idx: int, codec: Codec, capacity: int) -> PackedLayer:
    """A layer whose stores the decode kernels read, in place of one that ``codec`` makes.

    Raises:
        ValueError: a codec without such kernels, or a layout other than full or pod.
    """
    if not isinstance(codec, QuantizedCodec) or codec.bits != 4 or config.layout != "pod":
        raise ValueError(
            "no decode engine here: it serves full and pod caches in the model's dtype or in 4 bits; leave capacity out"
        )
    return PackedLayer(config, layer_idx, replace(codec, capacity=capacity))
