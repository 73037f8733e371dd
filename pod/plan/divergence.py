"""How far windows move the predictions of a model: the divergence from the dense model, and its slopes."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pod.modeling.model.attend import Visibility
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.token_scores import rows_in, wide_logits
from pod.plan.gradients import LOGIT_BYTES, Windows, last_hidden, read_with_gradients, stream_under
from pod.plan.layer_constants import LayerConstants
from pod.plan.recording import last_stream

NOT_FINITE = "the model gives NaN or infinite values on this text: try model.dtype=float32"


@torch.no_grad()
def measure_under(
    model: PodForCausalLM,
    input_ids: Tensor,
    at: Tensor,
    share: float | Tensor,
    sinks: Sequence[LayerConstants] | None = None,
    with_slopes: bool = True,
    dense: Tensor | None = None,
) -> tuple[float, Tensor | None]:
    """How far windows move a model's predictions, and the derivative for every head.

    Args:
        model: dense.
        input_ids: ``[n]``.
        at: ``[a]``, the positions whose next token counts.
        share: how far the heads have gone to their windows, one number or ``[L, H]``; 0 = leads, 1 = windows.
        sinks: constants that join each planned layer's windows; None = windows have none.
        dense: what `dense_states` gives for these tokens and positions; None = it is computed.

    Returns:
        The mean divergence ``KL(dense ‖ model)`` in nats per position, and its derivative for the share of
        each head ``[L, H]``, fp64 on the CPU, or None.

    Raises:
        ValueError: the model gives NaN or infinite values.
    """
    config = model.config
    windows = Windows(Visibility(config.num_sink_tokens, config.num_recent_tokens), sinks, share)
    states = dense_states(model, input_ids, at) if dense is None else dense
    objective = Divergence(states, at)
    input_ids = input_ids[None].to(model.device)
    slopes = None
    if with_slopes:
        found: list[Tensor] = []

        def receive(_: int, change: Tensor, gradient: Tensor) -> None:
            of_heads = (gradient * change).double().sum((1, 2))  # [Hq]
            found.append(of_heads.unflatten(0, (config.num_key_value_heads, -1)).sum(1).cpu())

        read_with_gradients(model, input_ids, windows, objective, receive)
        slopes = torch.stack(found[::-1])
    else:
        objective.measure(model, stream_under(model, input_ids, windows))
    if not math.isfinite(objective.value) or (slopes is not None and not bool(slopes.isfinite().all())):
        raise ValueError(NOT_FINITE)
    return objective.value, slopes


@torch.no_grad()
def dense_states(model: PodForCausalLM, input_ids: Tensor, at: Tensor) -> Tensor:
    """The final hidden states of the dense model ``[a, hidden]`` at positions ``[a]`` of tokens ``[n]``."""
    stream = last_stream(model, input_ids[None].to(model.device))
    hidden = model.model.after_layers(stream)[0]
    return hidden[at.to(hidden.device)]


class DenseStates:
    """Final hidden states of one dense model, on the CPU. A text that was read is not read again."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], Tensor] = {}

    def of(self, model: PodForCausalLM, input_ids: Tensor, at: Tensor) -> Tensor:
        """What `dense_states` gives for tokens ``[n]`` and positions ``[a]``."""
        key = _bytes(input_ids), _bytes(at)
        if key not in self._known:
            self._known[key] = dense_states(model, input_ids, at).cpu()
        return self._known[key]

    def keep(self, input_ids: Tensor, states: Tensor) -> None:
        """Keep the states ``[n, hidden]`` at all positions of tokens ``[n]``, which were found elsewhere."""
        self._known[_bytes(input_ids), _bytes(torch.arange(len(input_ids)))] = states.cpu()


def _bytes(numbers: Tensor) -> bytes:
    """Integers as bytes, for a key."""
    return numbers.long().cpu().numpy().tobytes()


class Divergence:
    """The mean divergence ``KL(dense ‖ model)`` over some positions: an objective of `read_with_gradients`.

    Attributes:
        dense: ``[a, hidden]``, final hidden states of the dense model.
        at: ``[a]``, their positions.
        value: in nats per position, of the stream that was given last.
    """

    def __init__(self, dense: Tensor, at: Tensor):
        self.dense, self.at, self.value = dense, at, math.nan

    def __call__(self, model: PodForCausalLM, stream: Tensor) -> Tensor:
        """The gradient for the residual stream behind the last layer, both ``[1, n, hidden]``."""
        leaf, hidden = last_hidden(model, stream)
        gradient = torch.zeros_like(hidden)
        weight = model.lm_head.weight
        with torch.no_grad():
            for places, wanted, own in self._measured(model, hidden):
                change = (own.exp() - wanted.exp()) / len(self.at)
                gradient[0, places] = (change.to(weight.dtype) @ weight).to(hidden)
        return torch.autograd.grad(hidden, leaf, gradient)[0]

    @torch.no_grad()
    def measure(self, model: PodForCausalLM, stream: Tensor) -> None:
        """Find ``value`` for a residual stream behind the last layer ``[1, n, hidden]``."""
        for _ in self._measured(model, model.model.after_layers(stream)):
            pass

    def _measured(self, model: PodForCausalLM, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some positions at a time, with log-probabilities ``[m, V]`` of the dense model and of ``hidden``.

        They lie where the output weights lie. Behind the last ones, ``value`` is found.
        """
        weight = model.lm_head.weight
        total = 0.0
        size = rows_in(LOGIT_BYTES // 4, len(weight))  # four numbers per logit are held at a time
        at = self.at.to(hidden.device)
        for places, states in zip(at.split(size), self.dense.split(size), strict=True):
            wanted, own = (
                wide_logits(one.to(weight.device), weight).log_softmax(-1)
                for one in (states, hidden[0, places])
            )
            total += (wanted.exp() * (wanted - own)).sum(-1).double().sum().item()
            yield places, wanted, own
        self.value = total / len(self.at)
