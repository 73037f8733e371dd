"""What a dense model's attention reads from a text, layer by layer, and which queries stand for a text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pod.kernels.statistics import attention_rows
from pod.modeling.model.attend import Tokens, Visibility, attend
from pod.modeling.model.config import PodConfig
from pod.modeling.model.decoder_layer import ForwardContext
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sinks import Sink


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
    _check_one(input_ids)
    for inputs in record_batch(model, input_ids):
        yield AttentionInputs(*(one[0] for one in inputs))


@torch.no_grad()
def record_batch(model: PodForCausalLM, input_ids: Tensor) -> Iterator[AttentionInputs]:
    """Yield the `AttentionInputs` of a batch of sequences ``[B, n]``, with the batch as first dimension.

    Raises:
        ValueError: a model with a sharing plan or a window layout.
    """
    planned = set(planned_layers(model.config))
    hidden_states, context = _start(model, input_ids)
    for number, layer in enumerate(model.model.layers):
        if number in planned:
            yield _inputs_of(layer, hidden_states, context, input_ids.device)
        hidden_states = through(layer, hidden_states, context)


class Mixture(NamedTuple):
    """Attention on the way from all tokens to windows: ``o + share · (o' - o)`` in every head.

    Attributes:
        share: 0 = all tokens, 1 = windows.
        window: what windows see.
        sinks: constants that join each planned layer's windows; None = windows have none.
    """

    share: float
    window: Visibility
    sinks: Sequence[Sink] | None = None


class ReadText(NamedTuple):
    """One text that a dense model has read.

    Attributes:
        streams: ``[1, n, hidden]`` each, the residual stream before each layer and behind the last one.
        context: the context of the pass.
        device: of the tokens.
        mixture: how planned layers attended; None = to all tokens.
    """

    streams: list[Tensor]
    context: ForwardContext
    device: torch.device
    mixture: Mixture | None = None

    @torch.no_grad()
    def inputs_of(self, model: PodForCausalLM, layer: int) -> AttentionInputs:
        """What the attention of a layer reads."""
        found = _inputs_of(model.model.layers[layer], self.streams[layer], self.context, self.device)
        return AttentionInputs(*(one[0] for one in found))

    @contextmanager
    def mixing(self, model: PodForCausalLM, layer: int, stream: Tensor) -> Iterator[None]:
        """Let a layer attend as the mixture says, while it computes ``stream`` ``[1, n, hidden]``."""
        layers = planned_layers(model.config)
        if self.mixture is None or layer not in layers:
            yield
            return
        share, window, sinks = self.mixture
        own: Any = model.model.layers[layer]
        sink = None if sinks is None else sinks[layers.index(layer)]

        def mix(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor]:
            out = given[0]
            inputs = _inputs_of(own, stream, self.context, out.device)
            near = near_output(inputs, window, sink).transpose(1, 2).reshape(out.shape)
            return (out + share * (near.to(out.dtype) - out),)

        hook = own.self_attn.o_proj.register_forward_pre_hook(mix)
        try:
            yield
        finally:
            hook.remove()


def near_output(inputs: AttentionInputs, window: Visibility, sink: Sink | None = None) -> Tensor:
    """What the heads of a layer put out when they see a window, ``[B, Hq, n, d]``, at least fp32.

    Args:
        inputs: with the batch as first dimension.
        sink: joins the window.
    """
    wide = torch.promote_types(inputs.q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (inputs.q, inputs.k, inputs.v))
    if sink is not None:
        sink = Sink(*(x.to(q) for x in sink))
    return attend(q, Tokens(k, v), visibility=window, sink=sink)[0]


@torch.no_grad()
def read_text(model: PodForCausalLM, input_ids: Tensor, mixture: Mixture | None = None) -> ReadText:
    """Read one sequence ``[1, n]`` with a dense model. Holds ``2 or 4 · (L + 1) · n · hidden`` bytes.

    Args:
        mixture: how planned layers attend; None = to all tokens.

    Raises:
        ValueError: a model with a sharing plan or a window layout, or a batch of several sequences.
    """
    _check_one(input_ids)
    hidden_states, context = _start(model, input_ids)
    text = ReadText([hidden_states], context, input_ids.device, mixture)
    for number, layer in enumerate(model.model.layers):
        with text.mixing(model, number, text.streams[-1]):
            text.streams.append(through(layer, text.streams[-1], context))
    return text


def _check_one(input_ids: Tensor) -> None:
    if input_ids.shape[0] != 1:
        raise ValueError(f"need input_ids [1, n], got {list(input_ids.shape)}")


def _start(model: PodForCausalLM, input_ids: Tensor) -> tuple[Tensor, ForwardContext]:
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


def _inputs_of(layer: Any, hidden_states: Tensor, context: ForwardContext, device: Any) -> AttentionInputs:
    """What the attention of a layer reads, on ``device``."""
    attention = layer.self_attn
    own = hidden_states.to(attention.o_proj.weight.device)  # layers may lie on several devices
    q, k, v = attention._project(layer.attention_input(own))
    rope = context.ropes[attention.layer_idx]
    return AttentionInputs(own.to(device), rope(q.to(device)), rope(k.to(device)), v.to(device))


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
