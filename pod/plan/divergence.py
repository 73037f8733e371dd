"""How far windows move the predictions of a model: the divergence from the dense model, and its slopes."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pod.modeling.model.attend import Visibility
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.sinks import Sink
from pod.modeling.token_scores import rows_in, wide_logits
from pod.plan.gradients import LOGIT_BYTES, Windows, last_hidden, read_with_gradients, stream_under
from pod.plan.recording import last_stream

NOT_FINITE = "the model gives NaN or infinite values on this text: try model.dtype=float32"


@torch.no_grad()
def measure_under(
    model: PodForCausalLM,
    input_ids: Tensor,
    at: Tensor,
    share: float | Tensor,
    sinks: Sequence[Sink] | None = None,
    with_slopes: bool = True,
) -> tuple[float, Tensor | None]:
    """How far windows move a model's predictions, and the derivative for every head.

    Args:
        model: dense.
        input_ids: ``[n]``.
        at: ``[a]``, the positions whose next token counts.
        share: how far the heads have gone to their windows, one number or ``[L, H]``; 0 = leads, 1 = windows.
        sinks: constants that join each planned layer's windows; None = windows have none.

    Returns:
        The mean divergence ``KL(dense ‖ model)`` in nats per position, and its derivative for the share of
        each head ``[L, H]``, fp64 on the CPU, or None.

    Raises:
        ValueError: the model gives NaN or infinite values.
    """
    config = model.config
    windows = Windows(Visibility(config.num_sink_tokens, config.num_recent_tokens), sinks, share)
    input_ids = input_ids[None].to(model.device)
    dense = last_stream(model, input_ids)
    found: list[Tensor] = []

    def receive(_: int, change: Tensor, gradient: Tensor) -> None:
        of_heads = (gradient * change).double().sum((1, 2))  # [Hq]
        found.append(of_heads.unflatten(0, (config.num_key_value_heads, -1)).sum(1).cpu())

    slopes = None
    if with_slopes:
        objective = partial(gradient_of_divergence, dense=dense, at=at)
        stream = read_with_gradients(model, input_ids, windows, objective, receive).streams[-1]
        slopes = torch.stack(found[::-1])
    else:
        stream = stream_under(model, input_ids, windows)
    value = divergence(model, stream, dense, at)
    if not math.isfinite(value) or (slopes is not None and not bool(slopes.isfinite().all())):
        raise ValueError(NOT_FINITE)
    return value, slopes


def gradient_of_divergence(model: PodForCausalLM, stream: Tensor, dense: Tensor, at: Tensor) -> Tensor:
    """The gradient of the mean divergence ``KL(dense ‖ model)`` over some positions, ``[1, n, hidden]``.

    Arguments are those of `divergence`.
    """
    stream, hidden = last_hidden(model, stream)
    weight = model.lm_head.weight
    with torch.no_grad():
        gradient = torch.zeros_like(hidden)
        for places, wanted, own in _predictions(model, dense, hidden, at):
            change = (own.exp() - wanted.exp()) / len(at)
            gradient[0, places.to(hidden.device)] = (change.to(weight.dtype) @ weight).to(hidden)
    return torch.autograd.grad(hidden, stream, gradient)[0]


@torch.no_grad()
def divergence(model: PodForCausalLM, stream: Tensor, dense: Tensor, at: Tensor) -> float:
    """The mean divergence ``KL(dense ‖ model)`` over some positions, in nats.

    Args:
        stream: ``[1, n, hidden]``, the residual stream behind the last layer.
        dense: the same of the dense model.
        at: ``[a]``, the positions whose next token counts.
    """
    hidden = model.model.after_layers(stream)
    parts = [
        (wanted.exp() * (wanted - own)).double().sum().item()
        for _, wanted, own in _predictions(model, dense, hidden, at)
    ]
    return sum(parts) / len(at)


def _predictions(
    model: PodForCausalLM, dense: Tensor, hidden: Tensor, at: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some of the positions ``at`` at a time, and their log-probabilities ``[m, V]``.

    The dense model's come first, then those from the hidden states ``[1, n, hidden]``. They lie where the
    output weights lie.
    """
    weight = model.lm_head.weight
    expected = model.model.after_layers(dense)
    for places in at.split(rows_in(LOGIT_BYTES, len(weight))):
        wanted, own = (
            wide_logits(states[0, places.to(states.device)].to(weight.device), weight).log_softmax(-1)
            for states in (expected, hidden)
        )
        yield places, wanted, own
