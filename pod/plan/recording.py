"""What a dense model's attention reads from a text, layer by layer, and which queries stand for a text."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pod.kernels.statistics import attention_rows
from pod.modeling.model.config import PodConfig
from pod.modeling.model.decoder_layer import ForwardContext
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.rope import Rope


class AttentionInputs(NamedTuple):
    """What one layer's attention reads for one sequence.

    Attributes:
        hidden_states: ``[n, hidden]``, the residual stream before the layer.
        q: ``[Hq, n, d]``, rotated queries.
        k: ``[H, n, d]``, rotated keys.
        v: ``[H, n, d]``, values.
        rope: the rotation at the positions of the sequence.
    """

    hidden_states: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    rope: Rope

    def first(self) -> "AttentionInputs":
        """The first sequence of a batch."""
        return AttentionInputs(self.hidden_states[0], self.q[0], self.k[0], self.v[0], self.rope)

    def relative_to(self, keys: Tensor | None) -> "AttentionInputs":
        """The same, with keys relative to the key ``[H, d]`` of a sink; None = as they are.

        It is subtracted before rotation, see ``pod.modeling.model.sinks``.
        """
        if keys is None:
            return self
        wide = torch.promote_types(self.k.dtype, torch.float32)
        n = self.k.shape[-2]
        turned = self.rope(keys.to(self.k.device, wide)[None, :, None].expand(-1, -1, n, -1))
        return self._replace(k=self.k.to(wide) - turned[0])


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
    check_one(input_ids)
    for inputs in record_batch(model, input_ids):
        yield inputs.first()


@torch.no_grad()
def record_batch(model: PodForCausalLM, input_ids: Tensor) -> Iterator[AttentionInputs]:
    """Yield the `AttentionInputs` of a batch of sequences ``[B, n]``, with the batch as first dimension.

    Raises:
        ValueError: a model with a sharing plan or a window layout.
    """
    planned = set(planned_layers(model.config))
    hidden_states, context = start(model, input_ids)
    for number, layer in enumerate(model.model.layers):
        if number in planned:
            yield inputs_of(layer, hidden_states, context, input_ids.device)
        hidden_states = through(layer, hidden_states, context)


def check_one(input_ids: Tensor) -> None:
    """ValueError unless there is one sequence, ``[1, n]``."""
    if input_ids.shape[0] != 1:
        raise ValueError(f"need input_ids [1, n], got {list(input_ids.shape)}")


class ReadText(NamedTuple):
    """One text that a dense model has read.

    Attributes:
        streams: ``[1, n, hidden]`` each, the residual stream before each layer and behind the last one.
        context: the context of the pass.
        device: of the tokens.
    """

    streams: list[Tensor]
    context: ForwardContext
    device: torch.device

    @torch.no_grad()
    def inputs_of(self, model: PodForCausalLM, layer: int) -> AttentionInputs:
        """What the attention of a layer reads."""
        return inputs_of(model.model.layers[layer], self.streams[layer], self.context, self.device).first()


@torch.no_grad()
def last_stream(model: PodForCausalLM, input_ids: Tensor) -> Tensor:
    """The residual stream behind the last layer of a dense model, ``[1, n, hidden]``.

    Raises:
        ValueError: a model with a sharing plan or a window layout, or a batch of several sequences.
    """
    check_one(input_ids)
    hidden_states, context = start(model, input_ids)
    for layer in model.model.layers:
        hidden_states = through(layer, hidden_states, context)
    return hidden_states


def start(model: PodForCausalLM, input_ids: Tensor) -> tuple[Tensor, ForwardContext]:
    """The residual stream before the first layer ``[B, n, hidden]``, and the context of the pass.

    Raises:
        ValueError: a model with a sharing plan or a window layout.
    """
    config: PodConfig = model.config
    planned = planned_layers(config)
    plan = config.sharing_plan
    if config.layout != "pod" or plan.packs or any(set(plan.lead[layer]) != {layer} for layer in planned):
        raise ValueError(
            "attention is measured on the dense model: load it with layout = 'pod' and without a plan"
        )
    hidden_states = model.model.embed_tokens(input_ids)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    return hidden_states, model.model.context(hidden_states, positions[None])


def inputs_of(layer: Any, hidden_states: Tensor, context: ForwardContext, device: Any) -> AttentionInputs:
    """What the attention of a layer reads, on ``device``."""
    attention = layer.self_attn
    own = hidden_states.to(attention.o_proj.weight.device)  # layers may lie on several devices
    q, k, v = attention._project(layer.attention_input(own))
    rope = context.ropes[attention.layer_idx]
    return AttentionInputs(own.to(device), rope(q.to(device)), rope(k.to(device)), v.to(device), rope)


def through(layer: Any, hidden_states: Tensor, context: ForwardContext) -> Tensor:
    """The residual stream behind a layer in which every head leads, and nobody follows."""
    nothing = (None,) * len(context.lead[0]) * 2
    return layer(hidden_states, context, *nothing)[0]


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


def logits_of(inputs: AttentionInputs, positions: Tensor) -> Tensor:
    """Logits ``[H, G, q, n]`` of the queries at these positions ``[q]``, at least fp32, without a mask."""
    compute = torch.promote_types(inputs.q.dtype, torch.float32)
    q = inputs.q[:, positions].unflatten(0, (inputs.k.shape[0], -1)).to(compute)
    k = inputs.k.to(compute)
    return q @ k[:, None].mT * q.shape[-1] ** -0.5


class QuerySample(NamedTuple):
    """The queries that stand for a sequence, and how each of them sees each token.

    Attributes:
        positions: ``[q]``, of the queries.
        future: ``[q, n]``, whether the token comes after the query.
        distant: ``[q, n]``, whether the token is distant from the query.
        share: of the sequence's positions that have distant tokens.
    """

    positions: Tensor
    future: Tensor
    distant: Tensor
    share: float

    def to(self, device: torch.device) -> "QuerySample":
        """The same on another device."""
        tensors = (x.to(device) for x in (self.positions, self.future, self.distant))
        return QuerySample(*tensors, share=self.share)


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
    distant = (key >= num_sink_tokens) & (key <= query - num_recent_tokens)
    return QuerySample(positions, key > query, distant, (n - first) / n)
