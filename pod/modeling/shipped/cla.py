"""One cache layer under cross-layer attention (Brandon et al., 2024): the lead of a block stores, its followers read."""

from torch import Tensor

from .attention import BACKENDS
from .cache_layer import Step
from .config import PodConfig
from .layout import PodCacheLayer, is_fresh, max_length
from .stores import NATIVE, Codec


class ClaCacheLayer(PodCacheLayer):
    """Keys and values of one layer if it leads its block of layers; otherwise nothing, and attention to the lead's.

    Followers find their lead in ``step.layers``, so that rows can be regrouped and copied as for any other layer.
    """

    def __init__(self, config: PodConfig, layer_idx: int, codec: Codec = NATIVE):
        super().__init__(config, layer_idx, codec)
        sources = [row[0] for row in config.sharing_plan.lead]
        self.source_layer = sources[layer_idx]
        self.is_last_of_block = sources[layer_idx + 1 : layer_idx + 2] != [self.source_layer]
        # with its keys and values in place every layer attends as a dense one
        self.lead = tuple((i,) * config.num_key_value_heads for i in range(len(sources)))
        self.leads, self.followers = list(range(config.num_key_value_heads)), []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """See ``CacheLayer.attend``; a follower gets ``k`` and ``v`` of no heads."""
        if self.source_layer == self.layer_idx:
            return super().attend(q, k, v, step)
        return step.layers[self.source_layer].attend_again(step.rope(q), step)

    def attend_again(self, q: Tensor, step: Step) -> Tensor:
        """Rotated queries ``[B, Hq, m, d]`` of a follower on what this lead stored in the same pass."""
        if step.num_new == 1 and step.all_real:
            return self._decode(q, step)
        keys, values = self.lead_keys.read(max_length(step)), self.all_values.read(max_length(step))
        if is_fresh(step) and step.backend is not BACKENDS["reference"]:
            return self._prefill(q, keys, values, step)
        return self._attend_blocked(q, keys, step)

    def settle(self, step: Step) -> None:
        """A lead's tokens come to rest when the last layer of its block has read them."""
        if self.is_last_of_block:
            PodCacheLayer.settle(step.layers[self.source_layer], step)
