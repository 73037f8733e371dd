"""What attention reads, layer by layer, without ever holding an n x n matrix or all layers at once."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pod.kernels.statistics import attention_rows
from pod.modeling.shipped.attention import ForwardContext
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.llama import PodDecoderLayer, PodForCausalLM


class AttentionInputs(NamedTuple):
    """What one layer's attention reads for one sequence: the residual stream before the layer ``[n, hidden]``, rotated
    queries ``[Hq, n, d]``, rotated keys and values ``[H, n, d]``."""

    hidden_states: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def planned_layers(config: PodConfig) -> list[int]:
    """The layers that plans are made for: those that were trained to see everything. ValueError for a model without any."""
    found = [layer for layer in range(config.num_hidden_layers) if config.window_of(layer) is None]
    if not found:
        raise ValueError(
            "every layer of this model was trained with a window, and keeps it: there is nothing to plan"
        )
    return found


@torch.no_grad()
def record_attention_inputs(model: PodForCausalLM, input_ids: Tensor) -> Iterator[AttentionInputs]:
    """Yield the `AttentionInputs` of each of the `planned_layers` of a dense model on one sequence ``[1, n]``.

    Raises: ValueError for a model with a sharing plan or a window layout, and for a batch.
    """
    config: PodConfig = model.config
    n = input_ids.shape[1]
    planned, plan = set(planned_layers(config)), config.sharing_plan
    if config.layout != "pod" or plan.packs or any(set(plan.lead[layer]) != {layer} for layer in planned):
        raise ValueError("attention is measured on the dense model: load it without a plan, layout = 'pod'")
    if input_ids.shape[0] != 1:
        raise ValueError(f"need input_ids [1, n], got {list(input_ids.shape)}")
    decoder = model.model
    hidden_states = decoder.embed_tokens(input_ids)
    context: ForwardContext = decoder.context(hidden_states, torch.arange(n, device=input_ids.device)[None])
    carry = (None,) * (2 * config.num_key_value_heads)
    layer: PodDecoderLayer
    for number, layer in enumerate(decoder.layers):  # type: ignore[assignment]
        if number in planned:
            q, k, v = layer.self_attn._project(layer.attention_input(hidden_states))
            rope = context.ropes[number]
            yield AttentionInputs(hidden_states[0], rope(q)[0], rope(k)[0], v[0])
        hidden_states, *carry = layer(hidden_states, context, *carry)


@torch.no_grad()
def record_attention_rows(model: PodForCausalLM, input_ids: Tensor, num_queries: int) -> Iterator[Tensor]:
    """Yield, per planned layer of a dense model, the softmaxed attention of the last ``num_queries`` tokens of ``[1, n]`` (eq. 1 of the PoD
    paper): ``[Hq, q, n]`` fp32 (fp64 for fp64 models), zero above the diagonal.

    Raises: ValueError unless 1 <= num_queries <= n.
    """
    n = input_ids.shape[1]
    if not 1 <= num_queries <= n:
        raise ValueError(f"need 1 <= num_queries <= {n} tokens, got {num_queries}")
    for inputs in record_attention_inputs(model, input_ids):
        yield attention_rows(inputs.q[None, :, n - num_queries :], inputs.k[None])[0]
