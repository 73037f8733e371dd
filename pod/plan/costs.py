"""What each role of a (layer, KV head) pair would cost, all in the same unit.

The cost of a role is ``mean ‖W (o' - o)‖² / ‖x‖²`` over queries that have distant tokens:

* ``o`` is what the pair's query heads put out;
* ``o'`` is what they put out under the role, while everything else stays dense;
* ``W`` are their columns of the output projection;
* ``x`` is the residual stream in front of the layer, which is what the next layers normalise.

Where a norm stands behind attention (OLMo 2), ``W`` includes that norm, which divides by the same number for
``o'`` as for ``o``. A factor on what attention adds to the residual stream (Granite) belongs to ``W`` too.

Costs are measured on text, and on random tokens that are repeated, where copying is all there is to do. Both
are in the same units, so their sum needs a weight and no scale.

* ``window`` ``[L, H]``: softmax over proximal tokens alone. With constant sinks (``calibration.py``) it is
  over these and the sink; then ``early`` ``[L, H]`` is added, which is what the sink costs at queries without
  distant tokens.
* ``follow`` ``[L, L, H, H]`` = [lead layer, layer, KV head of the lead layer, KV head of the layer], zero
  unless lead < layer: own logits for proximal tokens, the lead's logits for distant ones, one softmax (PoD,
  eq. 4). Query heads are matched inside the pair of groups.
* ``in_place`` ``[L, L, H]``: following the KV head of the same index, query head by query head. Nothing is
  re-ordered.
* ``lead4`` ``[L, H]``: 4 bits per number of a lead's keys and values. The newest tokens stay native.
* ``follow4`` ``[L, H]``: 4 bits per number of a follower's values. The newest tokens stay native.

L counts the layers that were trained to see every token. Other layers keep their windows under every plan.
Beside the model, measuring holds the distant attention rows of the sampled queries of all layers:
``4 · L · Hq · q · n`` bytes.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pod.kernels.statistics import attention_rows
from pod.modeling.model.config import PodConfig
from pod.modeling.model.decoder_layer import ForwardContext, PodDecoderLayer
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.packed import Packing
from pod.modeling.model.sharing import GROUP_SIZE, RESIDUAL
from pod.plan.checks import check_array, check_costs, check_groups
from pod.plan.solve import Floats


class AttentionInputs(NamedTuple):
    """What one layer's attention reads for one sequence.

    Attributes:
        hidden_states: ``[n, hidden]``, the residual stream before the layer.
        q: ``[Hq, n, d]``, rotated queries.
        k: ``[H, n, d]``, rotated keys.
        v: ``[H, n, d]``, values.
    """

    hidden_states: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def planned_layers(config: PodConfig) -> list[int]:
    """The layers that plans are made for: those that were trained to see every token.

    Raises:
        ValueError: the model has no such layer.
    """
    found = [layer for layer in range(config.num_hidden_layers) if config.window_of(layer) is None]
    if not found:
        raise ValueError("every layer of this model was trained with a window: there is nothing to plan")
    return found


def record_attention_inputs(model: PodForCausalLM, input_ids: Tensor) -> Iterator[AttentionInputs]:
    """Yield the `AttentionInputs` of each of a dense model's `planned_layers` on one sequence ``[1, n]``.

    Raises:
        ValueError: a model with a sharing plan or a window layout, or a batch of several sequences.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"need input_ids [1, n], got {list(input_ids.shape)}")
    for inputs in record_batch(model, input_ids):
        yield AttentionInputs(*(one[0] for one in inputs))


@torch.no_grad()
def record_batch(model: PodForCausalLM, input_ids: Tensor) -> Iterator[AttentionInputs]:
    """Yield the `AttentionInputs` of a batch of sequences ``[B, n]``, with the batch as first dimension.

    Raises:
        ValueError: a model with a sharing plan or a window layout.
    """
    config: PodConfig = model.config
    planned, plan = set(planned_layers(config)), config.sharing_plan
    if config.layout != "pod" or plan.packs or any(set(plan.lead[layer]) != {layer} for layer in planned):
        raise ValueError(
            "attention is measured on the dense model: load it with layout = 'pod' and without a plan"
        )
    decoder = model.model
    hidden_states = decoder.embed_tokens(input_ids)
    device = input_ids.device
    positions = torch.arange(input_ids.shape[1], device=device)
    context: ForwardContext = decoder.context(hidden_states, positions[None])
    shared_qk = (None,) * (2 * config.num_key_value_heads)
    layer: PodDecoderLayer
    for number, layer in enumerate(decoder.layers):  # type: ignore[assignment]
        if number in planned:
            own = hidden_states.to(layer.self_attn.o_proj.weight.device)  # layers may lie on several devices
            q, k, v = layer.self_attn._project(layer.attention_input(own))
            rope = context.ropes[number]
            yield AttentionInputs(own.to(device), rope(q.to(device)), rope(k.to(device)), v.to(device))
        hidden_states, *shared_qk = layer(hidden_states, context, *shared_qk)


@torch.no_grad()
def record_attention_rows(model: PodForCausalLM, input_ids: Tensor, num_queries: int) -> Iterator[Tensor]:
    """Yield, per planned layer of a dense model, the softmaxed attention of the last ``num_queries`` tokens.

    This is eq. 1 of the PoD paper.

    Args:
        input_ids: ``[1, n]``.
        num_queries: q, from 1 to n.

    Yields:
        ``[Hq, q, n]`` in fp32 (fp64 for fp64 models), zero above the diagonal.

    Raises:
        ValueError: unless 1 <= num_queries <= n.
    """
    n = input_ids.shape[1]
    if not 1 <= num_queries <= n:
        raise ValueError(f"need 1 <= num_queries <= {n} tokens, got {num_queries}")
    for inputs in record_attention_inputs(model, input_ids):
        yield attention_rows(inputs.q[None, :, n - num_queries :], inputs.k[None])[0]


EARLY = "early"  # what windows with constant sinks cost in addition, at queries without distant tokens
RETRIEVAL = "_retrieval"  # ends the name of a cost that was measured on repeated random tokens
MAX_COST = 1000.0  # larger costs are cut down to it
NOT_FINITE = "the model gives NaN or infinite values on this text: try model.dtype=float32"


class QuerySample(NamedTuple):
    """The queries that stand for a sequence, and how each of them sees each token.

    Attributes:
        positions: ``[q]``, of the queries.
        future: ``[q, n]``, whether the token comes after the query.
        distant: ``[q, n]``, whether the token is distant from the query.
    """

    positions: Tensor
    future: Tensor
    distant: Tensor


def sample_queries(n: int, num_queries: int, num_sink_tokens: int, num_recent_tokens: int) -> QuerySample:
    """Choose `num_queries` evenly spaced positions among those that have at least one distant token.

    The last token is one of them.

    Raises:
        ValueError: the sequence has fewer such positions.
    """
    first = num_sink_tokens + num_recent_tokens
    if n - first < num_queries:
        raise ValueError(
            f"explore.num_queries is {num_queries}, but only {max(0, n - first)} positions of a sequence of "
            f"{n} tokens have distant tokens, with windows of {num_sink_tokens} sink and {num_recent_tokens} "
            "recent tokens: lower explore.num_queries or the windows, or raise explore.sequence_length"
        )
    positions = (n - 1 - torch.arange(num_queries) * (n - first) // num_queries).flip(0)
    key = torch.arange(n)
    query = positions[:, None]
    return QuerySample(positions, key > query, (key >= num_sink_tokens) & (key <= query - num_recent_tokens))


# The axes of each cost, as `check_array` takes them.
_AXES = {
    "window": "L H",
    EARLY: "L H",
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
        "window": (layers, heads),
        "follow": (layers, layers, heads, heads),
        "in_place": (layers, layers, heads),
        "lead4": (layers, heads),
        "follow4": (layers, heads),
    }
    return {name: shape for name, shape in shapes.items() if followers or name not in FOLLOWER_COSTS}


def total_costs(tensors: Mapping[str, Tensor], retrieval_weight: float) -> dict[str, Floats]:
    """For each name of `cost_shapes`: the cost on text, plus `retrieval_weight` x that on repeated tokens.

    FOLLOWER_COSTS are left out where none of them was measured. The cost EARLY is added to ``window``.

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
    if EARLY in tensors:
        total["window"] = (
            total["window"] + tensors[EARLY] + retrieval_weight * tensors.get(EARLY + RETRIEVAL, 0.0)
        )
    return {name: cost.numpy() for name, cost in total.items()}


@torch.no_grad()
def measure_costs(
    model: PodForCausalLM, input_ids: Tensor, num_queries: int, order: Tensor | None
) -> dict[str, Tensor]:
    """Measure the cost of every role of every pair on one sequence ``[1, n]``.

    Args:
        model: dense, with the windows of the plan to come (``num_sink_tokens``, ``num_recent_tokens``).
        num_queries: q, at most ``n - n_s - n_r``.
        order: ``[L, L, H, H, G]``, see `match_query_heads`. None = no head may follow, and FOLLOWER_COSTS are
            left out.

    Returns:
        Costs from 0 to 1000, fp64 on the CPU, in the shapes of `cost_shapes`.

    Raises:
        ValueError: a model with a plan, a sequence without enough distant tokens, or outputs that are not
            finite.
    """
    heads, groups = model.config.num_key_value_heads, model.config.num_key_value_groups
    shapes = cost_shapes(len(planned_layers(model.config)), heads, order is not None)
    if order is not None:
        check_array("order", order, "L L H H G", {"L": shapes["window"][0], "H": heads, "G": groups})
        order = order.argsort(-1)  # [.., g]: the lead's query head that serves query head g of the follower
    costs = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    head = torch.arange(heads)[:, None]
    group = torch.arange(groups)
    for layer, own, lower in _layers(model, input_ids, num_queries):
        costs["window"][layer] = own.cost(own.near - own.out)
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
    # A relative error says no more beyond the limit, and integer sums over many sequences stay in range.
    return {name: value.clamp_(max=MAX_COST) for name, value in costs.items()}


@torch.no_grad()
def measure_query_head_errors(model: PodForCausalLM, input_ids: Tensor, num_queries: int) -> Tensor:
    """What it costs one query head to take the distant logits of a query head of a lower layer.

    The other query heads of its KV head stay dense.

    Returns:
        ``[L, L, Hq, Hq]`` = [lead layer, layer, query head of the lead layer, query head of the layer], from
        0 to 1000, fp64 on the CPU.
    """
    layers, query_heads = len(planned_layers(model.config)), model.config.num_attention_heads
    found = torch.zeros(layers, layers, query_heads, query_heads, dtype=torch.float64)
    for layer, own, lower in _layers(model, input_ids, num_queries):
        for lead, rows in enumerate(lower):
            found[lead, layer] = own.mean(own.errors(rows) @ own.factor_of_query_heads.mT).flatten(1)
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


def _layers(
    model: PodForCausalLM, input_ids: Tensor, num_queries: int
) -> Iterator[tuple[int, "_Layer", list[_AttentionRows]]]:
    """For each planned layer, yield its index among the planned ones, its sampled queries, and lower layers.

    Lower layers are given as the distant attention of all planned layers below, in order. The list is the
    same object every time, and a caller may empty it.
    """
    config = model.config
    sample = sample_queries(input_ids.shape[1], num_queries, config.num_sink_tokens, config.num_recent_tokens)
    sample = QuerySample(*(x.to(input_ids.device) for x in sample))
    lower: list[_AttentionRows] = []
    inputs = record_attention_inputs(model, input_ids)
    for number, (layer, own_inputs) in enumerate(zip(planned_layers(config), inputs, strict=True)):
        own = _Layer(own_inputs, sample, model.model.layers[layer])
        yield number, own, lower
        lower.append(own.rows)


class OutputScale(NamedTuple):
    """The factors that turn errors of attention's output into costs.

    Attributes:
        residual: ``[q]``, the squared length of the residual stream at each query; squared errors are divided
            by it.
        columns: ``[H, hidden, G·d]``, from the output of a KV head's query heads to what the residual stream
            gets.
        factor: ``[H, r, G·d]``, upper triangular; products with it are as long as products with ``columns``.
    """

    residual: Tensor
    columns: Tensor
    factor: Tensor

    @classmethod
    def of(cls, layer: Any, out: Tensor, residual: Tensor) -> "OutputScale":
        """The scale of a decoder layer.

        The number by which a norm behind attention divides goes into ``residual``.

        Args:
            layer: the decoder layer.
            out: ``[H, G, q, d]``, the output of its attention.
            residual: ``[q]``, the squared length of the residual stream in front of the layer.
        """
        projection, place = layer.self_attn.o_proj, layer.norms[1]
        weight = projection.weight.to(out)
        if place is not None:
            norm = getattr(layer, f"{place}_layernorm")
            added = out.permute(2, 0, 1, 3).flatten(1) @ weight.T  # [q, hidden]
            bias = 0.0 if projection.bias is None else projection.bias.to(out)
            residual = residual * ((added + bias).square().mean(-1) + norm.eps)
            weight = weight * (norm.weight.to(out) + norm.offset)[:, None]
        weight = weight * layer.residual_multiplier
        columns = weight.unflatten(1, (out.shape[0], -1)).transpose(0, 1)
        return cls(residual, columns, torch.linalg.qr(columns, mode="r").R)  # ‖R e‖ = ‖W e‖


class _Layer:
    """One layer at its sampled queries: what its heads put out, and how errors of that become costs.

    Attributes:
        near: ``[H, G, q, d]``, the output of its heads from proximal tokens alone.
        lse: ``[H, G, q]``, log-sum-exp of the logits of proximal tokens.
        out: ``[H, G, q, d]``, the output of its heads from all tokens.
        rows: attention to distant tokens, for higher layers that may follow.
        residual, factor: see `OutputScale`.
        factor_of_query_heads: ``[H, G, r, d]``, the factor of each query head alone.
    """

    def __init__(self, inputs: AttentionInputs, sample: QuerySample, layer: Any):
        self.inputs, self.sample = inputs, sample
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
        residual = inputs.hidden_states[sample.positions].to(logits.dtype).square().sum(-1)
        scale = OutputScale.of(layer, self.out, residual)
        self.residual, self.factor = scale.residual, scale.factor
        alone = scale.columns.unflatten(2, (self.lse.shape[1], -1)).transpose(1, 2)  # [H, G, hidden, d]
        self.factor_of_query_heads = torch.linalg.qr(alone, mode="r").R

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
        flat = errors.transpose(-3, -2).flatten(-2)  # […, H, q, G·d], as o_proj reads it
        return self.mean(flat @ self.factor.mT)

    def mean(self, projected: Tensor) -> Tensor:
        """The mean over queries of squared errors relative to the residual; fp64 on the CPU.

        Args:
            projected: ``[…, q, r]``, errors behind the output projection.
        """
        return (projected.square().sum(-1) / self.residual).double().mean(-1).cpu()


def _packed(x: Tensor, per_channel: bool) -> Tensor:
    """Pack ``[H, n, d]`` to 4 bits and unpack it; tokens that fill no group stay as they are."""
    packing = Packing(bits=4, group_size=GROUP_SIZE, per_channel=per_channel)
    whole = x.shape[1] // GROUP_SIZE * GROUP_SIZE
    out = x.clone()
    packing.unpack(packing.pack(x[None, :, :whole]), out[None, :, :whole])
    return out


def logits_of(inputs: AttentionInputs, positions: Tensor) -> Tensor:
    """Logits ``[H, G, q, n]`` of the queries at these positions ``[q]``, at least fp32, without a mask."""
    compute = torch.promote_types(inputs.q.dtype, torch.float32)
    q = inputs.q[:, positions].unflatten(0, (inputs.k.shape[0], -1)).to(compute)
    k = inputs.k.to(compute)
    return q @ k[:, None].mT * q.shape[-1] ** -0.5
