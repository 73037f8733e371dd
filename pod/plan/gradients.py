"""How the loss of a text depends on what the heads put out: the exchange rate from outputs to nats.

Let ``g`` be the gradient of the summed next-token loss of a text for the output of a KV head's query heads at
one position, where each token that is predicted is drawn from the model's own distribution. If the output
changes by ``e``, the distribution of all later tokens moves away from the model's own one by ``(g · e)² / 2``
nats, averaged over the draws, in second order of ``e``. This is the quadratic form of the Fisher information
(Amari, 1998, eq. 2.4; Martens, 2020, §5). Draws from the model, and not the tokens of the text, make the
first order vanish, so that few texts are enough.

Example: on SmolLM2-135M, with windows of 16 + 240 tokens in all heads, these numbers add up to 0.084 nats per
token over 90 KV heads. The measured divergence is 0.10.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.token_scores import rows_in, wide_logits
from pod.plan.recording import ReadText, planned_layers, through

LOGIT_BYTES = 1 << 28  # most bytes of logits in memory at a time


def output_gradients(model: PodForCausalLM, text: ReadText, gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the gradient for the output of all heads of every planned layer, the last layer first.

    The text is read again, one layer after the other, so that the memory of one layer is needed at a time.

    Args:
        model: dense.
        text: from `read_text`.
        gradient: ``[1, n, hidden]``, of what is differentiated, for the last of the text's streams.

    Yields:
        The index of a layer, and ``[Hq, n, d]``, at least fp32, on the device of the tokens.
    """
    planned = set(planned_layers(model.config))
    for number in reversed(range(len(model.model.layers))):
        layer: Any = model.model.layers[number]
        stream = text.streams[number].detach().requires_grad_()
        with (
            torch.enable_grad(),
            text.mixing(model, number, stream),
            _inputs_of(layer.self_attn.o_proj) as outputs,
        ):
            after = through(layer, stream, text.context)
        gradient, of_heads = torch.autograd.grad(after, (stream, outputs[0]), gradient.to(after.device))
        if number in planned:
            of_heads = of_heads[0].unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1)
            yield number, of_heads.to(text.device, torch.promote_types(of_heads.dtype, torch.float32))


@contextmanager
def _inputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """A list that receives the first input of the module at each of its calls."""
    found: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    try:
        yield found
    finally:
        hook.remove()


def gradient_of_draws(model: PodForCausalLM, stream: Tensor) -> Tensor:
    """The gradient of the summed loss of tokens that are drawn from the model, ``[1, n, hidden]``.

    Args:
        stream: ``[1, n, hidden]``, the residual stream behind the last layer.
    """
    stream, hidden = _last_hidden(model, stream)
    weight = model.lm_head.weight  # whose device need not be that of the tokens
    states = hidden.detach()[0].to(weight.device)
    size = rows_in(LOGIT_BYTES, len(weight))
    # drawn on the CPU, so that every device draws the same
    chances = torch.rand(len(states), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = []
    for rows, chance in zip(states.split(size), chances.split(size), strict=True):
        change = wide_logits(rows, weight).softmax(-1)
        labels = drawn(change, chance.to(change))
        change[torch.arange(len(labels), device=labels.device), labels] -= 1
        parts.append(change.to(weight.dtype) @ weight)
    return torch.autograd.grad(hidden, stream, torch.cat(parts)[None].to(hidden))[0]


def gradient_of_divergence(model: PodForCausalLM, stream: Tensor, dense: Tensor, at: Tensor) -> Tensor:
    """The gradient of the mean divergence ``KL(dense ‖ model)`` over some positions, ``[1, n, hidden]``.

    Args:
        stream: ``[1, n, hidden]``, the residual stream behind the last layer.
        dense: the same of the dense model.
        at: ``[a]``, the positions whose next token counts.
    """
    stream, hidden = _last_hidden(model, stream)
    weight = model.lm_head.weight
    with torch.no_grad():
        expected = model.model.after_layers(dense)
        own, wanted = (
            wide_logits(states[0, at.to(states.device)].to(weight.device), weight).softmax(-1)
            for states in (hidden, expected)
        )
        of_states = ((own - wanted) / len(at)).to(weight.dtype) @ weight
        gradient = torch.zeros_like(hidden)
        gradient[0, at.to(hidden.device)] = of_states.to(hidden)
    return torch.autograd.grad(hidden, stream, gradient)[0]


def _last_hidden(model: PodForCausalLM, stream: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf with the residual stream behind the last layer, and the hidden states that it leads to."""
    leaf = stream.detach().requires_grad_()
    with torch.enable_grad():
        return leaf, model.model.after_layers(leaf)


def drawn(probabilities: Tensor, chances: Tensor) -> Tensor:
    """Draw a token from each row of ``[m, V]``, by numbers ``[m]`` from 0 to below 1.

    Example: probabilities 0.2, 0.5, 0.3 give token 0 for chances below 0.2, token 1 below 0.7, else token 2.
    """
    sums = probabilities.cumsum(-1)
    labels = (sums <= chances[:, None] * sums[:, -1:]).sum(-1)
    return labels.clamp(max=probabilities.shape[1] - 1)
