"""A dense layer that holds some of the tokens seen, in their order: what methods that rank tokens have in common."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.grouped import slot_logits, weigh_slots
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import NATIVE, Codec


class HeldLayer(PodCacheLayer):
    """Slots are held tokens, ``held`` of them in every row and KV head, in position order; keys keep their rotation.

    It sees rows that are alike (``rows.GroupedCache``). A method overrides

    * ``observe_prompt``, ``observe_decode``: to accumulate what it ranks by;
    * ``evict``: called when a prompt or chunk ends and after each decoded token; it calls ``keep``.

    Attributes:
        held: tokens held by each row and KV head.
        statistics: name to ``[B, H, held]``; ``keep`` drops what belongs to dropped tokens.
    """

    evicts = True

    def __init__(self, config: PodConfig, layer_idx: int, codec: Codec = NATIVE):
        super().__init__(config, layer_idx, codec)
        assert not self.followers, "a dense layer"

    def clear(self) -> None:
        super().clear()
        self.held = 0
        self.statistics: dict[str, Tensor] = {}

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().parts()
        yield from (("statistics", tensor) for tensor in self.statistics.values())

    def select_rows(self, index: Tensor) -> None:
        super().select_rows(index)
        self.statistics = {name: x.index_select(0, index.to(x.device)) for name, x in self.statistics.items()}

    def predicted_nbytes(self, length: int) -> int:
        """For the tokens held now; ``length`` tokens were seen."""
        statistics = sum(x.numel() * x.element_size() for x in self.statistics.values())
        return super().predicted_nbytes(self.held) + statistics

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope.pair(q, k)
        in_slots = replace(step, uniform_past=self.held)
        self.held += step.num_new
        self.weights: Tensor | None = None
        out = self.attend_rotated(q, k, v, in_slots)
        weights, self.weights = self.weights, None
        if step.is_decode:
            assert weights is not None
            self.observe_decode(weights, step)
        else:
            self.observe_prompt(q, step)
        return out

    def _decode(self, q: Tensor, step: Step) -> Tensor:
        logits = slot_logits(q, self.lead_keys.stored, self.held, self.scale)
        self.weights = logits.softmax(-1)
        return weigh_slots(self.weights, self.all_values.stored, q.dtype)

    def settle(self, step: Step) -> None:
        if step.ends_prompt or step.is_decode:
            self.evict(step)
            for store in (self.lead_keys, self.all_values):
                store.settle(self.held)

    def keep(self, index: Tensor) -> None:
        """Hold only the slots ``index`` ``[B, H, w]``, ascending in each head."""
        for store in (self.lead_keys, self.all_values):
            store.keep(index, self.held)
        self.statistics = {name: x.gather(2, index) for name, x in self.statistics.items()}
        self.held = index.shape[2]

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        """After a chunk of a prompt: its rotated queries ``[B, Hq, m, d]``; the keys held, chunk included, are in
        ``lead_keys.read(held)``."""

    def observe_decode(self, weights: Tensor, step: Step) -> None:
        """After a decoded token: its attention ``[B, H, G, held]``, itself included."""

    def evict(self, step: Step) -> None:
        """Choose what stays, and call ``keep``."""


def best_slots(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best slots of ``[B, H, n]`` in ascending order; of equal scores the lower slot wins."""
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values
