"""D2O (Wan et al., 2024): budgets by how dense a layer's attention is, and dropped tokens that move into similar ones.

*Layer level* (section 4.1): a layer in which the accumulated attention of the tokens varies little (eq. 4) is hard to prune
and gets ``alpha`` times the budget of the others. *Token level* (section 4.2): each KV head keeps sinks, recent tokens and
the tokens with the most accumulated attention (eqs. 5–7); a dropped token is merged into the kept token with the most
similar key, if it is at least as similar as a moving average of what was dropped before (eqs. 8–11, ``merging.py``).

The first prompt of a row (the first chunk in streaming prefill) decides which of its layers get more, for good. All
layers together never hold more than their number times ``budget``.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods import merging
from pod.modeling.methods.accumulate import AccumulatingLayer, choose_slots
from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.streaming import PREFILL_PARAMETERS, cache_of
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import take_slots

_RECENT_SHARE = 4  # of four tokens that are not sinks one is recent: N:M = 3:1 (section 5.1)


class D2OLayer(AccumulatingLayer):
    """Heavy hitters, sinks and recent tokens, with what was dropped merged into them.

    Until the layer budgets are decided, ``statistics`` also has ``column_sums``, ``[B, Hq, held]``.

    Attributes:
        budget: tokens of a KV head, mean over layers; sinks: first tokens, never dropped.
        beta: weight of the newest similarity in the threshold, of which ``statistics`` has tau - 1, ``[B, H, 1]``, once something was
            dropped.
        weight: 1 or ``alpha``; None until the first prompt has ended.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        names = "num_sink_tokens", "beta", "gate", "normalize_gate"
        self.sinks, self.beta, self.gate, self.normalize_gate = (request.params[name] for name in names)
        self.budget, self.alpha = request.budget, Fraction(request.params["alpha"])
        if self.normalize_gate and not 0 <= self.gate < 1:
            raise ValueError(
                f"d2o: gate = {self.gate} is compared with variance / tokens, which lies between 0 and 1, when normalize_gate "
                "is set: pass a gate such as 0.05"
            )
        smallest = smallest_budget(config.num_hidden_layers, self.sinks, self.alpha)
        if self.budget < smallest:
            raise ValueError(
                f"d2o: budget = {self.budget} can leave a layer fewer than {self.sinks + 1} tokens (num_sink_tokens + 1) when "
                f"the others get alpha = {float(self.alpha)} times as many: raise the budget to {smallest} or more"
            )
        super().__init__(config, layer_idx, request.codec)

    def clear(self) -> None:
        super().clear()
        self.weight: Fraction | None = None

    def keep(self, kept: Tensor | None, dropped: Tensor) -> None:
        threshold = self.statistics.pop("threshold", None)
        super().keep(kept, dropped)
        if threshold is not None:
            self.statistics["threshold"] = threshold

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        sums = attention_column_sums(q, self.lead_keys.read(self.held), scale=self.scale)
        self.accumulate("attention", self.group_mean(sums))
        if self.weight is None:
            self.accumulate("column_sums", sums)  # which adds to them in place

    def settle(self, step: Step) -> None:
        if all(layer.weight is not None for layer in step.layers):
            super().settle(step)  # before that, budgets need the sums of every layer: see decide_weights

    def evict(self, step: Step) -> None:
        if step.sizes is None:
            weights = [layer.weight for layer in step.layers]
            step.sizes = layer_budgets(weights, step.max_length, self.budget)
        budget = step.sizes[self.layer_idx]
        if self.held <= budget:
            return
        recents = max(1, (budget - self.sinks) // _RECENT_SHARE)
        kept, dropped = choose_slots(self.statistics["attention"], budget, self.sinks, recents)
        beta = self.beta if step.is_decode else 1.0
        if kept is None:
            self._merge_one(dropped, beta)
        else:
            self._merge_many(kept, dropped, beta)

    def _merge_many(self, kept: Tensor, dropped: Tensor, beta: float) -> None:
        """At the end of a prompt, and where a decode step drops several tokens: eqs. 8 to 11."""
        keys, values = self.lead_keys.read(self.held), self.all_values.read(self.held)
        similarity, nearest = merging.nearest_kept(keys, kept, dropped)
        merged = similarity >= self._next_threshold(similarity.mean(-1, keepdim=True), beta)
        weights = merging.merge_weights(similarity, nearest, merged, kept.shape[2])
        changed = [
            take_slots(merging.merge_tokens(x, kept, dropped, nearest, weights), nearest)
            for x in (keys, values)
        ]
        self.keep(kept, dropped)
        self._write(nearest, *changed)

    def _merge_one(self, dropped: Tensor, beta: float) -> None:
        """As ``_merge_many`` in a fourth of the operations: what a decoded token costs."""
        stores = self.lead_keys, self.all_values
        key, value = (merging.one_slot(store.read(self.held), dropped) for store in stores)
        self.keep(None, dropped)
        keys, values = (store.read(self.held) for store in stores)
        similarity, nearest = merging.nearest_slot(keys, key)
        share = merging.share_of_one(similarity, self._next_threshold(similarity, beta))
        self._write(
            nearest, *(merging.merge_one(x, nearest, y, share) for x, y in ((keys, key), (values, value)))
        )

    def _next_threshold(self, newest: Tensor, beta: float) -> Tensor:
        """Moving average ``[B, H, 1]`` of similarities (``merging``: cosines - 1), of which the newest has weight ``beta``."""
        before = self.statistics.get("threshold")
        self.statistics["threshold"] = newest if before is None else torch.lerp(before, newest, beta)
        return self.statistics["threshold"]

    def _write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.lead_keys.write(slots, keys)
        self.all_values.write(slots, values)


def attention_variance(column_sums: Tensor) -> Tensor:
    """Eq. 4 with column sums ``[B, Hq, n]``: variance over keys (divided by n), mean over query heads; ``[B]``."""
    return column_sums.var(dim=-1, correction=0).mean(dim=1)


def decide_weights(layers: Sequence[D2OLayer], step: Step) -> list[tuple[Fraction, ...]] | None:
    """When the first prompt of rows ends: for each row, which layers get ``alpha`` shares of the budget. None before and later.

    ``step`` is that of a group, after its last layer.
    """
    if not (step.ends_prompt or step.is_decode) or layers[0].weight is not None:
        return None
    sums = [layer.statistics.get("column_sums") for layer in layers]
    alpha, gate = layers[0].alpha, layers[0].gate
    if sums[0] is None:  # rows whose first token is a decoded one
        return [(alpha,) * len(layers)] * step.past.shape[0]
    scale = sums[0].shape[2] if layers[0].normalize_gate else 1
    variances = torch.stack([attention_variance(x) for x in sums], dim=1) / scale  # type: ignore[arg-type]
    return [tuple(Fraction(1) if x > gate else alpha for x in row) for row in variances.tolist()]


def set_weights(layers: Sequence[D2OLayer], step: Step, weights: tuple[Fraction, ...] | None) -> None:
    """Let rows for which these ``weights`` were decided know them, and evict."""
    for layer, weight in zip(layers, weights or (), strict=bool(weights)):
        layer.statistics.pop("column_sums", None)
        layer.weight = weight
    for layer in layers if weights else ():
        layer.settle(step)


def layer_budgets(weights: Sequence[Fraction], seen: int, budget: int) -> list[int]:
    """Tokens per KV head of each layer after ``seen`` tokens.

    The largest ``S`` with ``Σ_l min(seen, w_l·S) <= L·budget`` gives ``min(seen, floor(w_l·S))``; in exact arithmetic.

    Args:
        weights: 1 or ``alpha >= 1`` per layer.
        budget: mean over layers.
    """
    if seen <= budget:
        return [seen] * len(weights)
    total, largest = len(weights) * budget, max(weights)
    ordinary = sum(weight == 1 for weight in weights)
    generous = len(weights) - ordinary
    share = total / (generous * largest + ordinary)
    if largest * share > seen and ordinary:
        share = Fraction(total - generous * seen, ordinary)
    return [min(seen, math.floor(weight * share)) for weight in weights]


def smallest_budget(num_layers: int, sinks: int, alpha: Fraction) -> int:
    """The least budget with which every layer holds its sinks and one recent token, whatever the weights."""
    return math.ceil((sinks + 1) * ((num_layers - 1) * alpha + 1) / num_layers)


METHOD = Method(
    name="d2o",
    paper="D2O (Wan et al., 2024)",
    frees="tokens with the least accumulated attention, after merging them into similar ones; dense layers keep more",
    axis="selection",
    build=cache_of(D2OLayer, decide=decide_weights, after_layers=set_weights),
    parameters={
        "num_sink_tokens": (4, "first tokens, always kept (tokens)", 0),
        "alpha": (3.0, "budget of a layer with dense attention over that of the others", 1, 1000),
        "gate": (
            100.0,
            "variance of accumulated attention above which a layer is not dense; grows with the prompt",
        ),
        "normalize_gate": (
            False,
            "compare variance / tokens, between 0 and 1, with the gate: same at any length",
        ),
        "beta": (0.5, "weight of the newest similarity in the merging threshold", 0, 1),
    }
    | PREFILL_PARAMETERS,
    takes_budget=True,
    refuses={
        "pod": "d2o merges keys within one layer, while followers of a PoD block use the lead's keys, of which each layer "
        "would need its own merge"
    },
)
