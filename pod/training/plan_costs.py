"""What it would cost a (layer, KV head) pair to use another layer's distant logits: costs beyond row similarity.

Every cost is a tensor ``[L, L, H]``: ``cost[lead, layer, head]`` for ``lead < layer``, zero elsewhere, smaller = better to
share. All are measured on the *dense* model's hidden states, one pair at a time, from the attention rows of `q` queries
spread over the positions that have distant tokens. Beside the model this holds the distant attention rows of those
queries, ``4 · L · Hq · q · n`` bytes (as measuring similarity does); nothing of size ``n x n`` exists.

The four costs, with ``p`` the layer's own attention, ``p'`` what eq. 4 of the paper makes of it (own logits for proximal
tokens, the lead's for distant ones, one softmax), ``o`` and ``o'`` the head's outputs with its own values:

* ``distant``: share of attention on distant tokens × JSD₂ between the two layers' attention *among* distant tokens.
* ``output``: ``Σ ‖o' - o‖² / Σ ‖o‖²``.
* ``projected``: mean over tokens of ``‖W_o (o' - o)‖² / ‖x‖²``, ``x`` the residual stream in front of the layer: what the
  next layers see of the error, since they normalise ``x``.
* ``loss``: ``½ Σ (∂NLL/∂o · (o' - o))²`` per token: the growth of the loss to second order, with the empirical Fisher
  information in place of the Hessian and without terms between tokens (Kunstner et al., 2019, eq. 3). One backward pass.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from pod.files import atomic_write_bytes
from pod.modeling.recording import AttentionInputs, record_attention_inputs
from pod.modeling.shipped.llama import PodForCausalLM

SCHEMA_VERSION = "1"
MEASURED_COSTS = ("distant", "output", "projected", "loss")
MAX_COST = 1000.0
_LOGIT_ROWS = 512  # rows of logits in memory at once while the loss is differentiated


@dataclass(kw_only=True)
class PlanCosts:
    """Measured costs with what they were measured on."""

    values: dict[str, Tensor]
    """Name → ``[L, L, H]`` fp64, means over all sequences."""

    provenance: dict[str, Any] = field(default_factory=dict)
    """As that of a similarity, with the windows."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write safetensors with metadata, atomically."""
        metadata = {"schema": SCHEMA_VERSION, "provenance": json.dumps(self.provenance, sort_keys=True)}
        tensors = {name: value.contiguous() for name, value in self.values.items()}
        atomic_write_bytes(path, save(tensors, metadata=metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PlanCosts":
        """Read what `save` wrote; ValueError of one line that names the file when it is something else."""
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("schema") != SCHEMA_VERSION:
                    raise KeyError("schema")
                values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls(values=values, provenance=json.loads(metadata["provenance"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is not a file of plan costs of schema {SCHEMA_VERSION} ({error}): delete it and measure again"
            ) from None


RETRIEVAL = "_retrieval"
"""Ends the name of a cost that was measured on repeated random tokens."""


def combined_cost(values: dict[str, Tensor], name: str) -> Tensor:
    """The cost `name` of text plus that of retrieval, where it was measured, scaled to the same sum over all pairs: ``[L, L, H]``."""
    text, retrieval = values[name], values.get(name + RETRIEVAL)
    if retrieval is None or not retrieval.any():
        return text
    return text + retrieval * (text.sum() / retrieval.sum())


@dataclass(frozen=True)
class Sample:
    """The queries that stand for a sequence, and which tokens each of them sees how.

    Attributes:
        positions: ``[q]`` query positions.
        future, distant: ``[q, n]``.
    """

    positions: Tensor
    future: Tensor
    distant: Tensor


def sample_queries(n: int, num_queries: int, num_sink_tokens: int, num_recent_tokens: int) -> Sample:
    """`num_queries` evenly spaced positions among those with at least one distant token; the last token is one of them.

    Raises: ValueError when the sequence has fewer such positions.
    """
    first = num_sink_tokens + num_recent_tokens
    if n - first < num_queries:
        raise ValueError(
            f"{num_queries} queries with distant tokens asked for, a sequence of {n} tokens has {max(0, n - first)} behind "
            f"{num_sink_tokens} sink and {num_recent_tokens} recent tokens: lower explore.num_queries or the windows, "
            "or raise explore.sequence_length"
        )
    positions = n - 1 - torch.arange(num_queries) * (n - first) // num_queries
    positions = positions.flip(0)
    key = torch.arange(n)
    return Sample(
        positions,
        key > positions[:, None],
        (key >= num_sink_tokens) & (key <= positions[:, None] - num_recent_tokens),
    )


def measure_pair_costs(
    model: PodForCausalLM,
    input_ids: Tensor,
    num_queries: int,
    names: Sequence[str] = MEASURED_COSTS,
) -> Tensor:
    """The costs `names` of every pair on one sequence.

    Args:
        model: dense, with the windows of the plan to come (``num_sink_tokens``, ``num_recent_tokens``).
        input_ids: ``[1, n]``.
        num_queries: q, at most ``n - n_s - n_r``.

    Returns: ``[len(names), L, L, H]`` fp64 on the CPU, from 0 to 1000.
    Raises: ValueError for a model with a plan and for a sequence without enough distant tokens.
    """
    config = model.config
    sample = sample_queries(input_ids.shape[1], num_queries, config.num_sink_tokens, config.num_recent_tokens)
    sample = Sample(*(x.to(input_ids.device) for x in (sample.positions, sample.future, sample.distant)))
    gradients = output_gradients(model, input_ids, sample.positions) if "loss" in names else None
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    costs = torch.zeros(len(names), layers, layers, heads, dtype=torch.float64)
    rows: list[_DistantRows] = []  # of all heads of the layers below
    for layer, inputs in enumerate(record_attention_inputs(model, input_ids)):
        gradient = None if gradients is None else gradients[layer]
        own = _DistantRows.of(inputs, sample)
        for head in range(heads) if layer else ():
            follower = _Follower(model, layer, head, inputs, own, sample, gradient)
            for lead, lead_rows in enumerate(rows):
                found = follower.costs(lead_rows.head(head, heads), names)
                costs[:, lead, layer, head] = torch.stack(found).cpu()
        rows.append(own)
    # A relative error says no more beyond the limit, and integer sums over many sequences stay in range.
    return costs.clamp_(max=MAX_COST)


class _DistantRows(NamedTuple):
    """Attention of some query heads among distant tokens only.

    Attributes:
        probabilities: ``[Hq, q, n]``, rows sum to 1.
        lse: log-sum-exp of the distant logits ``[Hq, q]``.
        negentropy: ``Σ p log₂ p`` ``[Hq, q]``.
    """

    probabilities: Tensor
    lse: Tensor
    negentropy: Tensor

    @classmethod
    def of(cls, inputs: AttentionInputs, sample: Sample) -> "_DistantRows":
        logits = _logits(inputs, sample).masked_fill_(~sample.distant, float("-inf"))
        lse = logits.logsumexp(-1)
        # Below the threshold lie subnormal numbers, with which CPUs compute a hundred times slower.
        probabilities = torch.threshold_((logits - lse[..., None]).exp_(), 1e-30, 0.0)
        return cls(probabilities, lse, _x_log2_x(probabilities).sum(-1))

    def head(self, head: int, num_key_value_heads: int) -> "_DistantRows":
        """Those of the query heads of one KV head."""
        groups = self.lse.shape[0] // num_key_value_heads
        return _DistantRows(*(x[head * groups : (head + 1) * groups] for x in self))


class _Follower:
    """One (layer, KV head) pair that tries one lead after the other."""

    def __init__(
        self,
        model: PodForCausalLM,
        layer: int,
        head: int,
        inputs: AttentionInputs,
        rows: _DistantRows,
        sample: Sample,
        gradient: Tensor | None,
    ):
        groups = model.config.num_key_value_groups
        columns = slice(head * groups * model.config.head_dim, (head + 1) * groups * model.config.head_dim)
        self.rows = rows.head(head, model.config.num_key_value_heads)
        logits = _logits(inputs, sample, slice(head, head + 1))
        proximal = logits.masked_fill_(sample.future | sample.distant, float("-inf"))
        self.v = inputs.v[head].to(logits.dtype)
        self.lse = proximal.logsumexp(-1)  # [G, q]
        self.proximal_out = proximal.softmax(-1) @ self.v  # [G, q, d]
        self.mass = torch.sigmoid(self.rows.lse - self.lse)
        self.out = self._merge(self.rows)
        attention: Any = model.model.layers[layer].self_attn
        self.weight = attention.o_proj.weight[:, columns].detach().to(logits.dtype)
        self.residual = inputs.hidden_states[sample.positions].to(logits.dtype).square().sum(-1)  # [q]
        self.gradient = None if gradient is None else gradient[:, columns].to(logits.dtype)  # [q, G * d]

    def _merge(self, rows: _DistantRows) -> Tensor:
        """Output ``[G, q, d]`` with own proximal logits and these distant ones (paper, eq. 4)."""
        gate = torch.sigmoid(self.lse - rows.lse)[..., None]
        return gate * self.proximal_out + (1 - gate) * (rows.probabilities @ self.v)

    def costs(self, lead: _DistantRows, names: Sequence[str]) -> list[Tensor]:
        """The costs `names` of following a lead with these rows, fp64 scalars."""
        error = self._merge(lead) - self.out
        flat = error.transpose(0, 1).flatten(1)  # [q, G * d], as o_proj reads it
        values = []
        for name in names:
            if name == "distant":
                value = (self.mass * _jensen_shannon(self.rows, lead)).mean()
            elif name == "output":
                value = error.square().sum() / self.out.square().sum()
            elif name == "projected":
                value = ((flat @ self.weight.T).square().sum(-1) / self.residual).mean()
            else:
                assert self.gradient is not None
                value = (self.gradient * flat).sum(-1).square().mean() / 2
            values.append(value.double())
        return values


def _logits(inputs: AttentionInputs, sample: Sample, heads: slice = slice(None)) -> Tensor:
    """Logits of the sampled queries of these KV heads, ``[h * G, q, n]``, at least fp32, nothing masked."""
    compute = torch.promote_types(inputs.q.dtype, torch.float32)
    q = inputs.q[:, sample.positions].unflatten(0, (inputs.k.shape[0], -1))[heads].to(compute)
    k = inputs.k[heads].to(compute)
    return (q @ k[:, None].transpose(2, 3) * q.shape[-1] ** -0.5).flatten(0, 1)


def _jensen_shannon(p: _DistantRows, q: _DistantRows) -> Tensor:
    """JSD₂ of rows ``[G, q]``: 0 = equal, 1 = disjoint."""
    joint = _x_log2_x(p.probabilities + q.probabilities).sum(-1)
    return (1 + (p.negentropy + q.negentropy - joint) / 2).clamp(0, 1)


def _x_log2_x(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny).log2_().mul_(x)


def output_gradients(model: PodForCausalLM, input_ids: Tensor, positions: Tensor) -> list[Tensor]:
    """``∂ Σ NLL / ∂ o`` of every layer at `positions`: ``[q, Hq · d]`` each, ``o`` being what o_proj reads.

    Activations are checkpointed, logits made in slices; weights get no gradient.
    """
    found: dict[int, Tensor] = {}
    handles = []
    for index, layer in enumerate(model.model.layers):

        def keep(module, grad_input, grad_output, index=index):
            found[index] = grad_input[0][0, positions].detach()

        handles.append(layer.self_attn.o_proj.register_full_backward_hook(keep))  # type: ignore[union-attr]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training, checkpointing = model.training, model.model.gradient_checkpointing
    try:
        model.requires_grad_(False).train()
        model.model.gradient_checkpointing = True
        embedded = model.model.embed_tokens(input_ids).requires_grad_()
        with torch.enable_grad():
            hidden = model.model(inputs_embeds=embedded).last_hidden_state
            hidden.backward(_loss_gradient(model.lm_head, hidden.detach(), input_ids))
    finally:
        for handle in handles:
            handle.remove()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        model.train(training)
        model.model.gradient_checkpointing = checkpointing
    return [found[index] for index in range(len(found))]


def _loss_gradient(lm_head: nn.Module, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """Gradient ``[1, n, hidden]`` of the sum of next-token NLL with respect to the last hidden states."""
    gradient = torch.zeros_like(hidden)
    for start in range(0, hidden.shape[1] - 1, _LOGIT_ROWS):
        rows = slice(start, min(start + _LOGIT_ROWS, hidden.shape[1] - 1))
        targets = input_ids[0, rows.start + 1 : rows.stop + 1]
        part = hidden[0, rows].clone().requires_grad_()
        logits = lm_head(part)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        F.cross_entropy(wide, targets, reduction="sum").backward()
        assert part.grad is not None
        gradient[0, rows] = part.grad
    return gradient
