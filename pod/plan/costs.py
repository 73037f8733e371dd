"""What each role of a (layer, KV head) pair would cost, in nats per token.

A role changes what the pair's query heads put out by ``e = o' - o``: ``o'`` under the role, ``o`` in the
dense model. With the gradients ``g`` of the loss for ``o`` (``gradients.py``), ``(g · e)² / 2`` is by how
many nats the prediction of the text's tokens moves away from that of the dense model, in second order of
``e``. The cost is the sum of this over a text's positions, per token.

* ``windows`` ``[L, H, L, H]``: softmax over proximal tokens alone, or over these and a constant sink
  (``calibration.py``). Heads are not added up one by one: what two heads change may add up, or cancel. Let
  ``u_a(i) = g · e`` of head a at position i. The cost of windows in all heads of a set S is
  ``mean_i (Σ_S u_a(i))² / 2``: the sum of the entries ``[a, b]`` for a and b in S. The diagonal holds
  the costs of single heads. All positions count, the first ones too.
* ``follow`` ``[L, L, H, H]`` = [lead layer, layer, KV head of the lead layer, KV head of the layer], zero
  unless lead < layer: own logits for proximal tokens, the lead's logits for distant ones, one softmax (PoD,
  eq. 4). Query heads are matched inside the pair of groups.
* ``in_place`` ``[L, L, H]``: following the KV head of the same index, query head by query head. Nothing is
  re-ordered.
* ``lead4`` ``[L, H]``: 4 bits per number of a lead's keys and values. The newest tokens stay native.
* ``follow4`` ``[L, H]``: 4 bits per number of a follower's values. The newest tokens stay native.

All but ``windows`` are measured at sampled queries that have distant tokens, and are taken to add up. There
are few of these, and ``(g · e)²`` varies too much among them: followers that only seem to be cheap would be
chosen. So the mean of ``g gᵀ`` over all positions with distant tokens stands for it: the cost is the mean of
``eᵀ mean(g gᵀ) e / 2`` over the sampled queries, times the share of positions that have distant tokens. That
is the same if g and e are independent. (For windows of SmolLM2-135M, 16 queries of ``(g · e)²`` gave 0.14 to
0.64 times the cost of all positions, in the median over heads; the mean of ``g gᵀ`` gave 0.9 to 1.2 times.)

Costs are measured on text, and where retrieval is all there is to do: those of windows on prompts that ask
for a number far back (``needles.py``, `measure_retrieval`), the others on random tokens that are repeated.
All are in nats, so their sum needs a weight and no scale.

L counts the layers that were trained to see every token. Other layers keep their windows under every plan.
Beside the model, measuring holds what `held_activations` counts. Where heads may follow, it also holds the
distant attention rows of the sampled queries of all layers, ``4 · L · Hq · q · n`` bytes, and the residual
streams of the few texts on which query heads are matched.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pod.modeling.model.attend import Visibility
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.packed import Packing
from pod.modeling.model.packed_bytes import GROUP_SIZE, RESIDUAL
from pod.plan.checks import check_array, check_costs, check_groups
from pod.plan.divergence import NOT_FINITE, measure_under
from pod.plan.gradients import Windows, gradient_of_draws, read_with_gradients
from pod.plan.layer_constants import LayerConstants
from pod.plan.needles import Prompt
from pod.plan.recording import (
    AttentionInputs,
    QuerySample,
    ReadText,
    logits_of,
    planned_layers,
    sample_queries,
)
from pod.plan.solve import Floats

RETRIEVAL = "_retrieval"  # ends the name of a cost that was measured on prompts or repeated tokens
MAX_COST = 1000.0  # larger costs are cut down to it
SHARE = 0.3
"""How far from the dense model, on the way to windows in all heads, retrieval is measured."""


# The axes of each cost, as `check_array` takes them.
_AXES = {
    "windows": "L H L H",
    "follow": "L L H H",
    "in_place": "L L H",
    "lead4": "L H",
    "follow4": "L H",
}


FOLLOWER_COSTS = ("follow", "in_place", "follow4")
"""Costs that are left out where no head may follow, since measuring them takes most of the time."""


def cost_shapes(layers: int, heads: int, followers: bool = True) -> dict[str, tuple[int, ...]]:
    """The shape of each measured cost.

    Args:
        layers: number of planned layers.
        heads: number of KV heads.
        followers: whether heads may follow, so that FOLLOWER_COSTS are measured.
    """
    shapes = {
        "windows": (layers, heads, layers, heads),
        "follow": (layers, layers, heads, heads),
        "in_place": (layers, layers, heads),
        "lead4": (layers, heads),
        "follow4": (layers, heads),
    }
    return {name: shape for name, shape in shapes.items() if followers or name not in FOLLOWER_COSTS}


def total_costs(tensors: Mapping[str, Tensor], retrieval_weight: float) -> dict[str, Floats]:
    """For each name of `cost_shapes`: the cost on text, plus `retrieval_weight` x that of retrieval.

    FOLLOWER_COSTS are left out where none of them was measured.

    Raises:
        ValueError: a cost is missing, has NaN or -inf, or its shape does not fit the others.
    """
    followers = any(name in tensors for name in FOLLOWER_COSTS)
    wanted = cost_shapes(1, 1, followers)
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise ValueError(f"costs of {', '.join(missing)} are missing: measure them again with `pod explore`")
    sizes: dict[str, int] = {}
    for name, axes in _AXES.items():
        for one in (name, name + RETRIEVAL):
            if one in tensors:
                sizes = check_costs(one, tensors[one], axes, sizes)
    total = {name: tensors[name] + retrieval_weight * tensors.get(name + RETRIEVAL, 0.0) for name in wanted}
    return {name: cost.numpy() for name, cost in total.items()}


@torch.no_grad()
def measure_costs(
    model: PodForCausalLM, text: "TextWithGradients", order: Tensor | None
) -> dict[str, Tensor]:
    """Measure the cost of every role of every pair on one text, in nats per token.

    Args:
        model: the one that read the text.
        order: ``[L, L, H, H, G]``, see `match_query_heads`. None = no head may follow, and FOLLOWER_COSTS are
            left out.

    Returns:
        Costs up to 1000, fp64 on the CPU, in the shapes of `cost_shapes`.

    Raises:
        ValueError: an order of another shape, or outputs that are not finite.
    """
    heads, groups = model.config.num_key_value_heads, model.config.num_key_value_groups
    shapes = cost_shapes(len(planned_layers(model.config)), heads, order is not None)
    if order is not None:
        sizes = {"L": shapes["lead4"][0], "H": heads, "G": groups}
        check_array("order", order, "L L H H G", sizes)
        order = order.argsort(-1)  # [.., g]: the lead's query head that serves query head g of the follower
    costs = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    costs["windows"] = window_costs(text.changes)
    head = torch.arange(heads)[:, None]
    group = torch.arange(groups)
    for layer, own, lower in text.layers(model):
        for name, error in own.errors_of_packing().items():
            if name in costs:
                costs[name][layer] = own.cost(error)
        if order is None:
            lower.clear()  # nobody follows them
            continue
        for lead, rows in enumerate(lower):
            errors = own.errors(rows).unflatten(0, (heads, groups))  # [Hl, Gl, H, G, q, d]
            served = order[lead, layer].to(errors.device)  # [Hl, H, G]
            places = served[:, None, :, :, None, None].expand(-1, 1, -1, -1, *errors.shape[-2:])
            costs["follow"][lead, layer] = own.cost(errors.gather(1, places).squeeze(1))
            costs["in_place"][lead, layer] = own.cost(errors[head, group, head, group])
    if not all(bool(value.isfinite().all()) for value in costs.values()):
        raise ValueError(NOT_FINITE)
    # Integer sums over many sequences stay in range.
    return {name: value.clamp_(-MAX_COST, MAX_COST) for name, value in costs.items()}


def window_costs(changes: Tensor) -> Tensor:
    """The costs ``windows`` ``[L, H, L, H]`` from ``g · e`` ``[L, H, n]``; fp64 on the CPU."""
    flat = changes.flatten(0, 1).double()
    together = flat @ flat.T / (2 * changes.shape[-1])
    sizes = changes.shape[:2]
    return together.unflatten(1, sizes).unflatten(0, sizes).cpu()


@torch.no_grad()
def measure_retrieval(
    model: PodForCausalLM,
    prompt: Prompt,
    sinks: Sequence[LayerConstants] | None = None,
    dense: Tensor | None = None,
) -> Tensor:
    """What windows cost on one prompt, in nats per token of its answers.

    Near the dense model the answers hardly change, and where every head has a window nothing is left of them.
    So the divergence from the dense model is differentiated in between: at ``o + a · (o' - o)`` in every
    head, with a = `SHARE`. Its derivative for one head's a, divided by ``2 a``, is the head's share of the
    divergence at a = 1, if the divergence is quadratic (Aumann and Shapley, 1974).

    A window that helps on a prompt costs nothing there: the derivative is cut at 0 before the mean over
    prompts is taken. On SmolLM2-135M, the derivative for head 2 of layer 7 is between -0.4 and 0.6, about 0
    in the mean. With a window there, plans found 2 of 20 keys, and 18 without.

    Args:
        sinks: constants that join each layer's windows; None = windows have none.
        dense: ``[a, hidden]``, final hidden states of the dense model in front of the answers; None = they
            are computed.

    Returns:
        ``[L, H]``, from 0 to 1000, fp64 on the CPU.
    """
    _, slopes = measure_under(model, prompt.input_ids, prompt.answers, SHARE, sinks, dense=dense)
    assert slopes is not None, "they are wanted"
    return (slopes / (2 * SHARE)).clamp_(0.0, MAX_COST)


@torch.no_grad()
def measure_query_head_errors(model: PodForCausalLM, text: "TextWithGradients") -> Tensor:
    """What it costs one query head to take the distant logits of a query head of a lower layer.

    The other query heads of its KV head stay dense.

    Args:
        model: the one that read the text.

    Returns:
        ``[L, L, Hq, Hq]`` = [lead layer, layer, query head of the lead layer, query head of the layer], from
        0 to 1000, fp64 on the CPU.
    """
    layers, query_heads = len(planned_layers(model.config)), model.config.num_attention_heads
    found = torch.zeros(layers, layers, query_heads, query_heads, dtype=torch.float64)
    groups, d = model.config.num_key_value_groups, model.config.head_dim
    for layer, own, lower in text.layers(model):
        blocks = own.metric.unflatten(2, (groups, d)).unflatten(1, (groups, d))
        of_query_heads = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)  # [H, G, d, d]
        for lead, rows in enumerate(lower):
            alone = own.errors(rows).unsqueeze(-3)  # [Hl, H, G, 1, q, d]: of one query head each
            found[lead, layer] = mean_nats(alone, of_query_heads).flatten(1) * own.sample.share
    return found.nan_to_num_(MAX_COST).clamp_(max=MAX_COST)


def match_query_heads(errors: Tensor, num_key_value_heads: int) -> Tensor:
    """Find the cheapest order of the query heads of every follower, with each query head counted alone.

    Args:
        errors: ``[L, L, Hq, Hq]``, from `measure_query_head_errors`.
        num_key_value_heads: H.

    Returns:
        ``[L, L, H, H, G]``: which query head of the follower's group stands at each place when it follows.
        The query heads of the lead stand as they are.

    Raises:
        ValueError: errors of another shape, and NaN.
    """
    check_groups("errors", check_costs("errors", errors, "L L Hq Hq")["Hq"], num_key_value_heads)
    heads, groups = num_key_value_heads, errors.shape[-1] // num_key_value_heads
    by_pair = errors.unflatten(3, (heads, groups)).unflatten(2, (heads, groups)).transpose(3, 4).numpy()
    order = torch.arange(groups).expand(*by_pair.shape[:4], groups).clone()
    if groups == 1:
        return order
    for lead, layer, i, j in np.ndindex(by_pair.shape[:4]):
        if lead < layer:
            _, places = linear_sum_assignment(by_pair[lead, layer, i, j])
            order[lead, layer, i, j] = torch.from_numpy(places)
    return order


class _AttentionRows(NamedTuple):
    """Attention among distant tokens only.

    Attributes:
        probabilities: ``[Hq, q, n]``, whose rows sum to 1.
        lse: ``[Hq, q]``, log-sum-exp of the logits.
    """

    probabilities: Tensor
    lse: Tensor


class TextWithGradients(NamedTuple):
    """One text that a dense model has read, and how its loss depends on what the heads put out.

    Attributes:
        text: what the model read.
        sample: the queries at which followers and packing are measured.
        metrics: for each planned layer ``[H, G·d, G·d]``, the mean of ``g gᵀ`` over positions with distant
            tokens.
        changes: ``[L, H, n]``, ``g · e`` of windows at every position.
    """

    text: ReadText
    sample: QuerySample
    metrics: list[Tensor]
    changes: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: PodForCausalLM,
        input_ids: Tensor,
        num_queries: int,
        sinks: Sequence[LayerConstants] | None = None,
    ) -> "TextWithGradients":
        """Read one sequence ``[1, n]``.

        Args:
            model: dense, with the windows of the plan to come (``num_sink_tokens``, ``num_recent_tokens``).
            num_queries: q, at most ``n - n_s - n_r``.
            sinks: constants that join each layer's windows; None = windows have none.

        Raises:
            ValueError: a model with a plan, or a sequence without enough distant tokens.
        """
        config = model.config
        n, windows = input_ids.shape[1], (config.num_sink_tokens, config.num_recent_tokens)
        sample = sample_queries(n, num_queries, *windows).to(input_ids.device)
        metrics: list[Tensor] = []
        changes: list[Tensor] = []

        def receive(_: int, change: Tensor, gradient: Tensor) -> None:
            of_heads = (gradient * change).sum(-1)  # [Hq, n]
            changes.append(of_heads.unflatten(0, (config.num_key_value_heads, -1)).sum(1))
            late = gradient[:, sum(windows) :].unflatten(0, (config.num_key_value_heads, -1))
            late = late.transpose(1, 2).flatten(2)  # [H, m, G·d]
            metrics.append(late.mT @ late / late.shape[1])

        text = read_with_gradients(
            model, input_ids, Windows(Visibility(*windows), sinks), gradient_of_draws, receive
        )
        return cls(text, sample, metrics[::-1], torch.stack(changes[::-1]))

    @torch.no_grad()
    def final_states(self, model: PodForCausalLM) -> Tensor:
        """The final hidden states, ``[n, hidden]``."""
        return model.model.after_layers(self.text.streams[-1])[0]

    def layers(self, model: PodForCausalLM) -> Iterator[tuple[int, "_Layer", list[_AttentionRows]]]:
        """For each planned layer, yield its index among these, its sampled queries, and lower layers.

        Lower layers are given as the distant attention of all planned layers below, in order. The list is
        the same object every time, and a caller may empty it.
        """
        lower: list[_AttentionRows] = []
        for number, layer in enumerate(planned_layers(model.config)):
            own = _Layer(self.text.inputs_of(model, layer), self.sample, self.metrics[number])
            yield number, own, lower
            lower.append(own.rows)


def mean_nats(errors: Tensor, metric: Tensor) -> Tensor:
    """The mean over queries of ``eᵀ M e / 2``, ``[…]``, fp64 on the CPU.

    Args:
        errors: ``[…, G, q, d]``; ``e`` are those of G query heads, side by side.
        metric: M, ``[…, G·d, G·d]``.
    """
    together = errors.transpose(-3, -2).flatten(-2)  # [..., q, G·d]
    return ((together @ metric * together).double().sum(-1).mean(-1) / 2).cpu()


class _Layer:
    """One layer at its sampled queries: what its heads put out, and how errors of that become costs.

    Attributes:
        near: ``[H, G, q, d]``, the output of its heads from proximal tokens alone.
        lse: ``[H, G, q]``, log-sum-exp of the logits of proximal tokens.
        out: ``[H, G, q, d]``, the output of its heads from all tokens.
        rows: attention to distant tokens, for higher layers that may follow.
        metric: ``[H, G·d, G·d]``, of errors of ``out``.
    """

    def __init__(self, inputs: AttentionInputs, sample: QuerySample, metric: Tensor):
        self.inputs, self.sample, self.metric = inputs, sample, metric
        logits = logits_of(inputs, sample.positions).flatten(0, 1)  # [Hq, q, n]
        heads = inputs.k.shape[0]
        proximal = logits.masked_fill(sample.future | sample.distant, float("-inf"))
        self.v = inputs.v.to(logits.dtype)
        self.lse = proximal.logsumexp(-1).unflatten(0, (heads, -1))  # [H, G, q]
        self.near = proximal.softmax(-1).unflatten(0, (heads, -1)) @ self.v[:, None]
        logits.masked_fill_(~sample.distant, float("-inf"))
        lse = logits.logsumexp(-1)
        # Below the threshold lie subnormal numbers, with which CPUs compute a hundred times slower.
        self.rows = _AttentionRows(torch.threshold_((logits - lse[..., None]).exp_(), 1e-30, 0.0), lse)
        gate = torch.sigmoid(self.lse - lse.view_as(self.lse))[..., None]
        distant = self.rows.probabilities.unflatten(0, (heads, -1)) @ self.v[:, None]
        self.out = gate * self.near + (1 - gate) * distant

    def errors(self, lead: _AttentionRows) -> Tensor:
        """How the output of every query head changes when it takes the distant logits of another layer.

        Args:
            lead: the distant attention of the other layer, whose query heads are tried one by one.

        Returns:
            ``[Hq of the lead, H, G, q, d]``.
        """
        heads, n, d = self.v.shape
        values = self.v.transpose(0, 1).reshape(n, heads * d)
        distant = (lead.probabilities @ values).unflatten(-1, (heads, d)).transpose(1, 2)  # [Hl, H, q, d]
        gate = torch.sigmoid(self.lse - lead.lse[:, None, None])[..., None]  # [Hl, H, G, q, 1]
        return gate * self.near + (1 - gate) * distant[:, :, None] - self.out

    def errors_of_packing(self) -> dict[str, Tensor]:
        """Errors ``[H, G, q, d]`` of ``lead4`` and ``follow4``; each query's newest tokens are not packed."""
        heads, n, _ = self.v.shape
        positions = self.sample.positions
        logits = logits_of(self.inputs, positions).flatten(0, 1)
        whole = n // GROUP_SIZE * GROUP_SIZE
        position = torch.arange(n, device=logits.device)
        packs = (position <= positions[:, None] - RESIDUAL) & (position < whole)  # [q, n]
        packed = self.inputs._replace(k=_packed(self.inputs.k, per_channel=True))
        values = _packed(self.v, per_channel=False)
        errors = {}
        for name, other in (("lead4", logits_of(packed, positions).flatten(0, 1)), ("follow4", logits)):
            seen = torch.where(packs, other, logits).masked_fill_(self.sample.future, float("-inf"))
            weights = seen.softmax(-1).unflatten(0, (heads, -1))
            out = (weights * packs) @ values[:, None] + (weights * ~packs) @ self.v[:, None]
            errors[name] = out - self.out
        return errors

    def cost(self, errors: Tensor) -> Tensor:
        """The cost of each KV head ``[…, H]`` from errors ``[…, H, G, q, d]``; fp64 on the CPU."""
        return mean_nats(errors, self.metric) * self.sample.share


def _packed(x: Tensor, per_channel: bool) -> Tensor:
    """Pack ``[H, n, d]`` to 4 bits and unpack it; tokens that fill no group stay as they are."""
    packing = Packing(bits=4, group_size=GROUP_SIZE, per_channel=per_channel)
    whole = x.shape[1] // GROUP_SIZE * GROUP_SIZE
    out = x.clone()
    packing.unpack(packing.pack(x[None, :, :whole]), out[None, :, :whole])
    return out
