"""Distillation: the model under its plan learns to predict what the dense model predicts.

The teacher is the model that the run starts from, in which every head leads. Under LoRA it has the same
weights, with the adapters off. So it takes no memory for weights, and costs one more forward pass. The loss
of a token is

    (1 - a) · cross entropy + a · KL(teacher ‖ student)

with a = `train.distill` (Hinton et al., 2015, §2, at temperature 1). With a = 1 the text has no labels: the
model moves back to what the dense model does, and learns nothing else from the text. A dense model that is
trained in this way stays as it is, because its divergence from itself is 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pod.data.rows.loader import IGNORED_LABEL
from pod.modeling.model.sharing import dense_lead
from pod.modeling.token_scores import rows_in, wide_logits

PARTS = ("objective", "loss", "divergence")
"""What is known of a step: the loss that is trained, the cross entropy, and the divergence."""


@torch.no_grad()
def teacher_states(model: Any, input_ids: Tensor, doc_ids: Tensor) -> Tensor:
    """The last hidden states of the dense model for this rank's slice, ``[B, n, hidden]``.

    Args:
        model: a PodForCausalLM with LoRA adapters.
        input_ids: this rank's slice, ``[B, n]``.
        doc_ids: the whole rows.
    """
    with _without_adapters(model), _dense(model):
        return model.model(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters of `peft` off.

    Its own switch also changes `requires_grad` of the adapters, which the engine relies on.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False


@contextmanager
def _dense(model: Any) -> Iterator[None]:
    """Let every head of a model lead, on all ranks of a sequence-parallel group, and keep no activations.

    Heads of layers that were trained with windows keep them.
    """
    decoder, config = model.model, model.config
    checkpoints = decoder.gradient_checkpointing
    sharing = [one for one in (decoder, decoder.sequence_parallel) if one is not None]
    plans = [one.lead for one in sharing]
    keyed = [layer.self_attn for layer in decoder.layers if layer.self_attn.sink_keys is not None]
    windows = [attention.are_windows for attention in keyed]
    decoder.gradient_checkpointing = False
    for one, lead in zip(sharing, plans, strict=True):
        one.lead = dense_lead(map(len, lead), config.trained_windows)
    for attention in keyed:
        attention.are_windows = [False] * len(attention.are_windows)
    try:
        yield
    finally:
        decoder.gradient_checkpointing = checkpoints
        for one, lead in zip(sharing, plans, strict=True):
            one.lead = lead
        for attention, are_windows in zip(keyed, windows, strict=True):
            attention.are_windows = are_windows


def distilled_losses(
    hidden: Tensor, weight: Tensor, taught: Tensor, labels: Tensor, share: float, chunk_bytes: int
) -> Tensor:
    """Sums over the labelled tokens, ``[3]`` in fp32, by the names of `PARTS`. Only the first is trained.

    Some tokens are worked through at a time. Their gradients are made with their losses, so logits are
    computed once.

    Args:
        hidden, taught: ``[B, n, hidden]``, last hidden states of the student and of the teacher.
        weight: ``[V, hidden]``, the frozen output projection of both.
        labels: ``[B, n]``, already shifted; -100 = no label.
        share: a, from 0 to 1.
        chunk_bytes: bytes of the logits of both models that are made at a time. With what is derived from
            them, about three times as much is held.

    Raises:
        ValueError: the output projection is trained.
    """
    if weight.requires_grad:
        raise ValueError("distillation needs an output projection that is frozen, as under LoRA")
    size = rows_in(chunk_bytes // 2, len(weight))
    states = hidden.flatten(0, 1), taught.flatten(0, 1)
    objective, others = _DistilledLosses.apply(*states, weight, labels.flatten(), share, size)  # type: ignore
    return torch.cat([objective[None], others])


class _DistilledLosses(torch.autograd.Function):
    """apply(student, teacher, weight, labels, share, size) → the objective, and the other two sums ``[2]``.

    Args as in `distilled_losses`, for m tokens: ``[m, hidden]``, ``[m]``. Tokens without a label are computed
    and count nothing: to leave them out would wait for the device.
    """

    @staticmethod
    def forward(ctx, student, teacher, weight, labels, share, size):
        gradient = torch.empty_like(student, dtype=torch.promote_types(student.dtype, torch.float32))
        sums = gradient.new_zeros(2)
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            wanted = wide_logits(teacher[part], weight).log_softmax(-1)
            own = wide_logits(student[part], weight).log_softmax(-1)
            ignored = labels[part, None] == IGNORED_LABEL
            targets = labels[part, None].clamp(min=0)
            sums[0] -= own.gather(1, targets).masked_fill_(ignored, 0).sum()
            chances = wanted.exp()
            sums[1] += wanted.sub_(own).mul_(chances).sum(-1, keepdim=True).masked_fill_(ignored, 0).sum()
            # of the logits: softmax - (1 - a) · one-hot - a · the teacher's softmax
            change = own.exp_().sub_(chances.mul_(share))
            change.scatter_add_(1, targets, change.new_full(targets.shape, share - 1.0))
            gradient[part] = (change.to(weight.dtype) @ weight).masked_fill_(ignored, 0)
            del wanted, own, chances, change  # before those of the next tokens are made
        ctx.save_for_backward(gradient)
        ctx.dtype = student.dtype
        ctx.mark_non_differentiable(sums)
        return (1 - share) * sums[0] + share * sums[1], sums

    @staticmethod
    def backward(ctx, *grad_outputs):
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_outputs[0]).to(ctx.dtype), *(None,) * 5
