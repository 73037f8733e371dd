"""The cache of a model's own layout and plan: what ``generate()`` makes when it is given none."""

from collections.abc import Sequence
from functools import partial

from .cache import PodCache
from .config import PodConfig
from .layout import LAYOUT_LAYERS
from .quantized import make_codec
from .rows import GroupedCache
from .sharing import GROUP_SIZE, RESIDUAL
from .stores import NATIVE, Codec


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
    bits = config.sharing_plan.bits if config.sharing_plan.packs else None
    made = {one: make_codec(f"int{one}", one, config, GROUP_SIZE, RESIDUAL) for one in set(bits or ()) - {16}}
    return LayerCodecs([made.get(one, NATIVE) for one in bits]) if bits else NATIVE


def own_cache(config: PodConfig, **options: int) -> PodCache:
    """An empty cache that holds what the model's layout, plan and bits say. ``options``: see ``PodCacheLayer``."""
    codec = planned_codec(config)
    make_layer = partial(LAYOUT_LAYERS[config.layout], codec=codec, **options)
    return (PodCache if codec.is_in_place else GroupedCache)(config, make_layer, config.own_method)
