"""D2O (Wan et al., 2024): layers with dense attention keep more; dropped tokens merge into similar ones.

*Layer level* (section 4.1): a layer in which the accumulated attention of the tokens varies little (eq. 4) is
hard to prune and gets ``alpha`` times the budget of the others. *Token level* (section 4.2): each KV head
keeps sinks, recent tokens and the tokens with the most accumulated attention (eqs. 5–7). A dropped token is
merged into the kept token with the most similar key, if their similarity is at least the threshold: a moving
average of the similarities of tokens dropped so far (eqs. 8–11).

The first prompt of a row (the first chunk in streaming prefill) decides once and for all which of its layers
get more. All layers together never hold more than their number times ``budget``, unless ``budget_rule`` is
``printed``: the rule as the paper prints it.

Merging takes a few blocked matrix products and scatters: memory O(n), no loop over tokens. Similarities and
weights are computed in at least fp32. Here, a similarity is the cosine minus 1. Then the kept token's weight
in eq. 11, which is ``e`` over a sum, becomes 1 over the sum.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.kernels.statistics import attention_column_sums
from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.h2o import AccumulatingLayer, choose_slots
from pod.modeling.model.attend import compute_dtype
from pod.modeling.model.config import PodConfig
from pod.modeling.model.kv_buffer import take_slots
from pod.modeling.model.step import Step

# for each `similarity`, pairs: the tensor whose cosines decide, and the tensors that are merged accordingly
_MATCHES = {  # 0 = keys, 1 = values
    "keys": ((0, (0, 1)),),
    "values": ((1, (0, 1)),),
    "both": ((0, (0,)), (1, (1,))),
}
_THRESHOLDS = "threshold", "value_threshold"


class D2OLayer(AccumulatingLayer):
    """A layer that holds heavy hitters, sinks and recent tokens, into which dropped tokens were merged.

    ``statistics`` has more entries here than in ``AccumulatingLayer``: ``column_sums`` ``[B, Hq, held]``
    until the layer budgets are decided; ``variance`` ``[B, 1, 1]``, by which they were decided; and the
    thresholds as tau - 1, ``[B, H, 1]``, once a token was dropped.

    Attributes:
        budget: tokens of a KV head, as a mean over layers (with ``is_printed``: tokens in a layer of weight
            1).
        sinks: number of first tokens, which are never dropped.
        beta: weight of the newest similarity in the thresholds.
        weight: 1 or ``alpha``, according to ``variance``; None until the first prompt has ended.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        params = request.params
        self.budget = request.budget
        self.sinks = params["num_sink_tokens"]
        self.beta = params["beta"]
        self.gate = params["gate"]
        self.normalize_gate = params["normalize_gate"]
        self.alpha = Fraction(params["alpha"])
        self.recent_share = Fraction(str(params["recent_share"]))
        self.matches = _MATCHES[params["similarity"]]
        self.averages = params["merge"] == "average"
        self.is_printed = params["budget_rule"] == "printed"
        if self.normalize_gate and not 0 <= self.gate < 1:
            raise ValueError(
                f"d2o: gate = {self.gate} is compared with variance / tokens, which lies between 0 and 1, "
                "when normalize_gate is set: pass a gate such as 0.05"
            )
        layers = 1 if self.is_printed else config.num_hidden_layers
        smallest = smallest_budget(layers, self.sinks, self.alpha)
        if self.budget < smallest:
            raise ValueError(
                f"d2o: budget = {self.budget} can leave a layer fewer than {self.sinks + 1} tokens "
                f"(num_sink_tokens + 1) when the others get alpha = {float(self.alpha)} times as many: "
                f"raise the budget to {smallest} or more"
            )
        super().__init__(config, layer_idx, request.quantizer)

    def clear(self) -> None:
        super().clear()
        self.weight: Fraction | None = None

    def decisions(self, row: int) -> dict[str, float | None]:
        """For a row: the variance by which the layer's weight was decided, and the tokens of each KV head."""
        variance = self.statistics.get("variance")
        return {"variance": None if variance is None else float(variance[row]), "tokens": self.held}

    def observe_prompt(self, q: Tensor, step: Step) -> None:
        sums = attention_column_sums(q, self.lead_keys.read(self.held), scale=self.scale)
        self.accumulate("attention", self.group_mean(sums))
        if self.weight is None:
            self.accumulate("column_sums", sums)  # last, because it adds to ``sums`` in place

    def flush(self, step: Step) -> None:
        # until the weights are decided, budgets need the sums of every layer: see decide_weights
        if all(layer.weight is not None for layer in step.layers):
            super().flush(step)

    def evict(self, step: Step) -> None:
        if step.sizes is None:
            weights = [layer.weight for layer in step.layers]
            step.sizes = layer_budgets(weights, step.max_length, self.budget, self.is_printed)
        budget = step.sizes[self.layer_idx]
        if self.held <= budget:
            return
        recents = max(1, math.floor((budget - self.sinks) * self.recent_share))
        kept, dropped = choose_slots(self.statistics["attention"], budget, self.sinks, recents)
        beta = self.beta if step.is_decode else 1.0
        if kept is None:
            self._merge_one(dropped, beta)
        else:
            self._merge_many(kept, dropped, beta)

    def _merge_many(self, kept: Tensor, dropped: Tensor, beta: float) -> None:
        """Drop several tokens, and merge them into kept ones (eqs. 8 to 11).

        Args:
            kept, dropped: slots, from ``choose_slots``.
            beta: weight of the newest similarity in the thresholds.
        """
        buffers = self.lead_keys, self.all_values
        changed = []
        tokens = [buffer.read(self.held) for buffer in buffers]
        for by, parts in self.matches:
            similarity, nearest = nearest_kept(tokens[by], kept, dropped)
            threshold = self._next_threshold(by, similarity.mean(-1, keepdim=True), beta)
            merged = similarity >= threshold - rounding(similarity)
            if self.averages:
                similarity = torch.zeros_like(similarity)  # all count the same
            weights = merge_weights(similarity, nearest, merged, kept.shape[2])
            for part in parts:
                x = merge_tokens(tokens[part], kept, dropped, nearest, weights)
                changed.append((buffers[part], nearest, take_slots(x, nearest)))
        self.keep(kept, dropped)
        for buffer, slots, x in changed:
            buffer.write(slots, x)

    def _merge_one(self, dropped: Tensor, beta: float) -> None:
        """Do the same as ``_merge_many`` for a single dropped token, in a fourth of the operations."""
        buffers = self.lead_keys, self.all_values
        gone = [one_slot(buffer.read(self.held), dropped) for buffer in buffers]
        self.keep(None, dropped)
        tokens = [buffer.read(self.held) for buffer in buffers]
        for by, parts in self.matches:
            similarity, nearest = nearest_slot(tokens[by], gone[by])
            merged = similarity >= self._next_threshold(by, similarity, beta) - rounding(similarity)
            if self.averages:
                similarity = torch.zeros_like(similarity)
            share = share_of_one(similarity, merged)
            for part in parts:
                buffers[part].write(nearest, merge_one(tokens[part], nearest, gone[part], share))

    def _next_threshold(self, by: int, newest: Tensor, beta: float) -> Tensor:
        """Update the moving average ``[B, H, 1]`` of similarities (cosines - 1), and return it.

        Args:
            by: 0 for similarities of keys, 1 for those of values.
            newest: the newest similarity ``[B, H, 1]``.
            beta: its weight.
        """
        before = self.statistics.get(_THRESHOLDS[by])
        self.statistics[_THRESHOLDS[by]] = newest if before is None else torch.lerp(before, newest, beta)
        return self.statistics[_THRESHOLDS[by]]


def attention_variance(column_sums: Tensor) -> Tensor:
    """Eq. 4: the variance of column sums ``[B, Hq, n]`` over the keys, as a mean over query heads, ``[B]``.

    The variance divides by n, not by n - 1.
    """
    return column_sums.var(dim=-1, correction=0).mean(dim=1)


def decide_weights(layers: Sequence[D2OLayer], step: Step) -> list[tuple[Fraction, ...]] | None:
    """Decide for each row, when its first prompt ends, which layers get ``alpha`` shares of the budget.

    Args:
        layers: all layers of a group of rows.
        step: a pass of these rows, when all layers have seen it.

    Returns:
        For each row the weight of each layer, 1 or ``alpha``. None if the first prompt has not ended yet, or
        if the weights were decided in an earlier pass.
    """
    if not (step.ends_prompt or step.is_decode) or layers[0].weight is not None:
        return None
    sums = [layer.statistics.pop("column_sums", None) for layer in layers]
    alpha, gate = layers[0].alpha, layers[0].gate
    if sums[0] is None:  # rows whose first token is a decoded one
        return [(alpha,) * len(layers)] * step.past.shape[0]
    scale = sums[0].shape[2] if layers[0].normalize_gate else 1
    found = [attention_variance(x) / scale for x in sums]  # type: ignore[arg-type]
    for layer, variance in zip(layers, found, strict=True):
        layer.statistics["variance"] = variance[:, None, None]
    device = found[0].device  # layers may lie on several devices
    variances = torch.stack([x.to(device) for x in found], dim=1)
    return [tuple(Fraction(1) if x > gate else alpha for x in row) for row in variances.tolist()]


def set_weights(layers: Sequence[D2OLayer], step: Step, weights: tuple[Fraction, ...] | None) -> None:
    """Give the layers the ``weights`` that were decided for their rows, and evict. None = do nothing."""
    if not weights:
        return
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = weight
    for layer in layers:
        layer.flush(step)


def layer_budgets(weights: Sequence[Fraction], seen: int, budget: int, is_printed: bool = False) -> list[int]:
    """Tokens per KV head of each layer after ``seen`` tokens: ``min(seen, floor(w_l·S))``, computed exactly.

    Args:
        weights: ``w_l``, 1 or ``alpha >= 1`` for each of ``L`` layers.
        seen: tokens seen so far.
        budget: tokens of a layer, as a mean. ``S`` is the largest number with
            ``Σ_l min(seen, w_l·S) <= L·budget``.
        is_printed: True = ``S`` is the budget itself, as in section 4.1. All layers together may then hold
            more than ``L·budget`` tokens.
    """
    if seen <= budget:
        return [seen] * len(weights)
    total = len(weights) * budget
    largest = max(weights)
    ordinary = sum(weight == 1 for weight in weights)
    generous = len(weights) - ordinary
    share = total / (generous * largest + ordinary)
    if largest * share > seen and ordinary:
        share = Fraction(total - generous * seen, ordinary)
    return [min(seen, math.floor(weight * (budget if is_printed else share))) for weight in weights]


def smallest_budget(num_layers: int, sinks: int, alpha: Fraction) -> int:
    """The least budget with which every layer can hold its sinks and a recent token, whatever the weights."""
    return math.ceil((sinks + 1) * ((num_layers - 1) * alpha + 1) / num_layers)


_BLOCK_ELEMENTS = 1 << 22
# A matrix product with fewer rows is slow. Where this limit applies, a block grows with the kept tokens.
_LEAST_ROWS = 32


def nearest_kept(keys: Tensor, kept: Tensor, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8: the kept key that is most similar to each dropped one, by cosine.

    Args:
        keys: ``[B, H, n, d]``.
        kept: slots ``[B, H, c]``, ascending.
        dropped: slots ``[B, H, e]``.

    Returns:
        Cosine - 1 ``[B, H, e]``, and the index in ``kept`` ``[B, H, e]``; in a tie the lower index.
    """
    compute = compute_dtype(keys.dtype)
    candidates = F.normalize(take_slots(keys, kept).to(compute), dim=-1).transpose(2, 3)
    batch, heads, count = dropped.shape
    similarity = torch.empty(batch, heads, count, dtype=compute, device=keys.device)
    nearest = torch.empty_like(dropped)
    for block in _blocks(count, batch * heads * kept.shape[2]):
        queries = F.normalize(take_slots(keys, dropped[..., block]).to(compute), dim=-1)
        similarity[..., block], nearest[..., block] = first_largest(queries @ candidates)
    return similarity.sub_(1), nearest


def rounding(cosines: Tensor) -> float:
    """The difference below which two cosines count as equal.

    Values of the first layer depend on the token alone, so a token that occurs twice gives equal cosines. But
    the last bits of a matrix product depend on the index of the row, and must not decide between them.
    """
    return 64 * torch.finfo(cosines.dtype).eps


def first_largest(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """The largest cosine ``[…]`` of ``[…, c]``, and the lowest index with it; see ``rounding`` for ties."""
    largest = cosines.amax(dim=-1, keepdim=True)
    ties = cosines >= largest - rounding(cosines)
    return largest.squeeze(-1), ties.max(dim=-1).indices


def merge_weights(
    similarity: Tensor, nearest: Tensor, merged: Tensor, num_kept: int
) -> tuple[Tensor, Tensor]:
    """Eq. 11: the weights of each kept token and of the tokens merged into it; together they add up to one.

    In the printed equation, the numerator of a dropped token's weight is the sum over all of them. Here it is
    the token's own ``exp(u)``.

    Args:
        similarity, nearest: from ``nearest_kept``.
        merged: bool ``[B, H, e]``, False for dropped tokens that are not merged.
        num_kept: ``c``.

    Returns:
        Weights of kept tokens ``[B, H, c]``, and of dropped ones ``[B, H, e]``, which are 0 for tokens that
        are not merged.
    """
    raw = similarity.exp() * merged
    total = raw.new_ones(*raw.shape[:2], num_kept).scatter_add_(2, nearest, raw)
    return 1 / total, raw / total.gather(2, nearest)


def merge_tokens(
    x: Tensor, kept: Tensor, dropped: Tensor, nearest: Tensor, weights: tuple[Tensor, Tensor]
) -> Tensor:
    """Eq. 10: merge dropped keys or values into kept ones.

    Args:
        x: keys or values ``[B, H, n, d]``.
        kept, dropped: slots, as in ``nearest_kept``.
        nearest: from ``nearest_kept``.
        weights: from ``merge_weights``.

    Returns:
        The kept keys or values with the dropped ones merged in, ``[B, H, c, d]``.
    """
    own, others = weights
    out = take_slots(x, kept) * own[..., None]
    head_dim = x.shape[3]
    for block in _blocks(dropped.shape[2], x.shape[0] * x.shape[1] * head_dim):
        moved = take_slots(x, dropped[..., block]) * others[..., block, None]
        out.scatter_add_(2, nearest[..., block, None].expand(-1, -1, -1, head_dim), moved)
    return out.to(x.dtype)


def one_slot(x: Tensor, slots: Tensor) -> Tensor:
    """Copy one slot of each head: slots ``[B, H, 1]`` of ``x`` ``[B, H, n, d]``, as ``[B, H, 1, d]``."""
    return x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[3]))


def nearest_slot(keys: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8 for one dropped key ``[B, H, 1, d]`` and the kept keys ``[B, H, c, d]``.

    Returns:
        Cosine - 1 and the slot of the most similar kept key, ``[B, H, 1]`` each.
    """
    compute = compute_dtype(keys.dtype)
    wide = keys.to(compute)
    key = key.to(compute)
    products = (wide @ key.transpose(2, 3)).squeeze(3)
    lengths = (torch.linalg.vector_norm(x, dim=-1) for x in (wide, key))
    tiny, minus_one = _numbers(compute, keys.device)
    similarity = torch.addcdiv(minus_one, products, torch.addcmul(tiny, *lengths))
    largest, nearest = first_largest(similarity)
    return largest[..., None], nearest[..., None]


def share_of_one(similarity: Tensor, merged: Tensor) -> Tensor:
    """Eq. 11 for one dropped token: its weight ``[B, H, 1]``, or 0 if it is not merged."""
    return similarity.sigmoid() * merged


def merge_one(x: Tensor, nearest: Tensor, dropped: Tensor, share: Tensor) -> Tensor:
    """Eq. 10 for one dropped token: the kept token ``nearest`` after the merge, ``[B, H, 1, d]``.

    Args:
        x: kept keys or values ``[B, H, c, d]``.
        nearest: slot of the kept token ``[B, H, 1]``.
        dropped: the dropped key or value ``[B, H, 1, d]``.
        share: weight of the dropped one ``[B, H, 1]``.
    """
    own = one_slot(x, nearest).to(share.dtype)
    other = dropped.to(share.dtype)
    return torch.lerp(own, other, share[..., None]).to(x.dtype)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _numbers(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest normal number of a dtype, and -1, as tensors that are made once."""
    tiny = torch.tensor(torch.finfo(dtype).tiny, dtype=dtype, device=device)
    return tiny, torch.tensor(-1.0, dtype=dtype, device=device)


def _blocks(count: int, elements_each: int) -> Iterator[slice]:
    """Cut ``count`` tokens into slices that work on at most ``_BLOCK_ELEMENTS`` numbers.

    Slices have at least ``_LEAST_ROWS`` tokens, so that they may exceed this number.

    Args:
        count: number of tokens.
        elements_each: numbers to work on for each token.
    """
    rows = max(_LEAST_ROWS, _BLOCK_ELEMENTS // max(1, elements_each))
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))


BUILDERS = {"d2o": Builder(build=cache_of(D2OLayer, decide=decide_weights, after_layers=set_weights))}
