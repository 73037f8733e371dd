"""Self-distillation: the model under its plan learns from the dense model that it started from.

In the teacher every head leads. Under LoRA it is the same weights with the adapters off, so it costs a forward pass and no memory for weights; full fine-tuning needs a frozen copy, which ZeRO-3
divides among the ranks like everything else. Two objectives (Hinton et al., 2015; Romero et al., 2015):

* `distill_logits`: T² KL(teacher, student) of the next-token distributions at temperature T, which replaces that share
  of the cross entropy;
* `distill_attention`: the squared distance between the attention outputs (after `o_proj`) of student and teacher over
  the teacher's squared norm, per token, averaged over the layers.

Both are sums over this rank's labelled tokens, like the cross entropy, so any split over ranks gives the same loss.
`distill_context` c weights the divergence of a token by `1 + c need`: need is how far, from 0 to 5 nats, the teacher's loss
of the token rises in a second pass in which every head keeps only its window.

Memory beside plain training: the teacher's last hidden state of each pass, one fp32 [V, hidden] when the output projection is
trained, and for `distill_attention` one hidden state per layer, as much as activation checkpoints hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pod.training.args import TrainArgs
from pod.training.predict.shapes import teacher_plans
from pod.training.run.loss import IGNORED_LABEL, LossHead, causal_model

MOST_NEED = 5.0
"""Nats of distant context that a token counts at most: a few tokens shall not be the whole divergence."""


def needs_teacher(args: TrainArgs, layout: str) -> bool:
    """Whether the teacher must be a frozen copy: weights that are trained, or that lack keys and values (`cla`)."""
    return args.teacher_passes > 0 and (args.method != "lora" or layout == "cla")


def make_distillation(args: TrainArgs, layout: str, teacher: Any = None) -> "Distillation | None":
    """What `LanguageModelLoss` takes; None when nothing is distilled.

    Args:
        layout: of the student.
        teacher: the start model with every head leading, a PodForCausalLM; needed when `needs_teacher` says so.

    Raises:
        ValueError: no teacher.
    """
    if not args.teacher_passes:
        return None
    if not needs_teacher(args, layout):
        teacher = None
    elif teacher is None:
        raise ValueError(
            f"distillation with train.method={args.method} and layout {layout} needs a copy of the start model as "
            "its teacher: give one to Trainer, or set method=lora with layout pod or window"
        )
    return Distillation(args, teacher)


class Distillation(nn.Module):
    """The teacher of a run and the objectives that compare the student with it.

    Args:
        args: its `distill_…`.
        teacher: frozen PodForCausalLM; None = the student with its adapters off.
    """

    def __init__(self, args: TrainArgs, teacher: Any = None):
        super().__init__()
        self.args = args
        self.teacher = None if teacher is None else teacher.requires_grad_(False)

    def make_head(self, weight: nn.Parameter, chunk_mib: int) -> LossHead:
        """The loss head of the student's output projection."""
        if not self.args.distill_logits:
            return LossHead(weight, chunk_mib)
        teacher_weight = None if self.teacher is None else self.teacher.lm_head.weight
        return DistillationHead(weight, chunk_mib, self.args, teacher_weight)

    def objective(
        self, student: Any, head: LossHead, input_ids: Tensor, labels: Tensor, doc_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective of this rank's tokens, and its detached parts by name (arguments: `LanguageModelLoss`)."""
        labelled = labels != IGNORED_LABEL
        taught, outputs = self._teach(student, input_ids, doc_ids)
        decoder = causal_model(student).model
        error = AttentionError(outputs, labelled)
        with _watching(decoder, error.add if self.args.distill_attention else None):
            hidden = decoder(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
        if self.args.distill_logits:
            objective, cross_entropy, divergence = head(hidden, labels, *taught)
            parts = {"cross_entropy": cross_entropy, "kl": divergence}
        else:
            objective = head(hidden, labels)
            parts = {"cross_entropy": objective.detach()}
        if self.args.distill_attention:
            attention = error.finish()
            objective = objective + self.args.distill_attention * attention
            parts["attention"] = attention.detach()
        return objective, parts

    @torch.no_grad()
    def _teach(self, student: Any, input_ids: Tensor, doc_ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The teacher's last hidden state [B, n_local, hidden] under each of its plans, and its attention outputs under the first
        when they are compared."""
        own = causal_model(student).model
        decoder = own if self.teacher is None else self.teacher.model
        hidden: list[Tensor] = []
        outputs: list[Tensor] = []
        watch = (lambda layer, out: outputs.append(out)) if self.args.distill_attention else None
        # a copy has no adapters to switch off, and peft need not be installed
        switch = _without_adapters(student) if self.teacher is None else nullcontext()
        with switch:
            for index in range(self.args.teacher_passes):
                under = _teaching(decoder, own.sequence_parallel, self.args, index)
                with under, _watching(decoder, None if index else watch):
                    hidden.append(decoder(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state)
        return hidden, outputs


@contextmanager
def _without_adapters(model: Any) -> Iterator[None]:
    """`peft`'s switch without its change of requires_grad, which the engine's gradient hooks depend on."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    switched = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in switched:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in switched:
            module._disable_adapters = False


@contextmanager
def _teaching(decoder: Any, parallel: Any, args: TrainArgs, index: int) -> Iterator[None]:
    """A PodModel under one of `teacher_plans`, which keeps nothing for a backward pass."""
    before = decoder.lead, decoder.sequence_parallel, decoder.gradient_checkpointing
    local = None if parallel is None else parallel.lead
    decoder.lead = teacher_plans(decoder.lead, args)[index]
    decoder.sequence_parallel, decoder.gradient_checkpointing = parallel, False
    if parallel is not None:
        parallel.lead = teacher_plans(parallel.lead, args)[index]
    try:
        yield
    finally:
        decoder.lead, decoder.sequence_parallel, decoder.gradient_checkpointing = before
        if parallel is not None:
            parallel.lead = local


@contextmanager
def _watching(decoder: Any, callback: Any) -> Iterator[None]:
    decoder.on_attention = callback
    try:
        yield
    finally:
        decoder.on_attention = None


class AttentionError:
    """Distance of a student's attention outputs from a teacher's, taken layer by layer inside the student's forward.

    Checkpointed layers call `add` again in backward, for the values that its gradient needs; only calls before `finish`
    count. No output of the student is held here.

    Args:
        outputs: of the teacher, `[L]` tensors [B, n, hidden].
        labelled: [B, n], tokens that count.
    """

    def __init__(self, outputs: list[Tensor], labelled: Tensor):
        self.outputs = outputs
        self.weights = [self._weight(out, labelled) for out in outputs]
        self.layers: dict[int, Tensor] | None = {}

    @staticmethod
    def _weight(out: Tensor, labelled: Tensor) -> Tensor:
        """1 / squared norm of a token's output, 0 for tokens that do not count: [B, n, 1]."""
        energy = _wide(out).square().sum(-1, keepdim=True)
        return labelled[..., None] / energy.clamp_min(torch.finfo(energy.dtype).tiny ** 0.5)

    def add(self, layer: int, out: Tensor) -> None:
        """Layer `layer` of the student gave `out`."""
        difference = _wide(out) - _wide(self.outputs[layer])
        error = (self.weights[layer] * difference.square()).sum()
        if self.layers is not None:
            self.layers[layer] = error

    def finish(self) -> Tensor:
        """Sum over the tokens of the mean over the layers."""
        assert self.layers is not None and len(self.layers) == len(self.outputs), "a layer was not seen"
        errors = [self.layers[layer] for layer in range(len(self.outputs))]
        self.layers = None
        return torch.stack(errors).mean()


class DistillationHead(LossHead):
    """Cross entropy and divergence from a teacher, both of chunks of tokens: logits of the row are never held.

    Without a teacher's hidden states it is the plain `LossHead`.

    Args:
        teacher_weight: output projection of the teacher [V, hidden]; None = the student's.
        Others: see `LossHead` and `Distillation`.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        chunk_mib: int,
        args: TrainArgs,
        teacher_weight: nn.Parameter | None = None,
    ):
        super().__init__(weight, chunk_mib)
        self.args, self.teacher_weight = args, teacher_weight

    def forward(self, hidden: Tensor, labels: Tensor, *taught: Tensor) -> Any:
        """hidden and each taught [B, n, hidden], labels [B, n] -> objective, and detached cross entropy and divergence (sums)."""
        if not taught:
            return super().forward(hidden, labels)
        teacher_weight = self.weight if self.teacher_weight is None else self.teacher_weight
        return linear_distillation(
            hidden,
            self.weight,
            taught[0],
            teacher_weight,
            labels,
            self.args.distill_logits,
            self.args.distill_temperature,
            self.chunk_bytes,
            *taught[1:],
            context=self.args.distill_context,
        )


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    taught: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    share: float,
    temperature: float,
    chunk_bytes: int,
    near: Tensor | None = None,
    context: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(1 - share) CE + share w T² KL(softmax(t / T), softmax(s / T))` of logits s, t, summed over the labelled tokens.

    w is 1 without `near`, else `1 + context need`: need is the cross entropy of the teacher's logits from `near` less that of t,
    in nats from 0 to `MOST_NEED`, whatever T.

    Gradients with respect to `hidden` and `weight` are made in the forward pass, chunk by chunk: logits are computed
    once. The teacher gets none.

    Args:
        hidden, taught: [B, n, hidden]; weight, teacher_weight: [V, hidden].
        labels: [B, n], already shifted, -100 = no label.
        chunk_bytes: of fp32 logits (student and teacher) that are held at a time, without what is derived from them.
        near: [B, n, hidden], the teacher's where every head keeps its window.

    Returns:
        The objective (differentiable), Σ CE and T² Σ KL, scalars in at least fp32. The last is without w, to be compared
        between runs.
    """
    flat = labels.flatten()
    rows = (flat != IGNORED_LABEL).nonzero().squeeze(-1)
    size = torch.promote_types(hidden.dtype, torch.float32).itemsize
    chunk = max(1, chunk_bytes // (2 * size * weight.shape[0]))
    near = None if near is None else near.flatten(0, 1)[rows]
    tensors = hidden.flatten(0, 1)[rows], weight, taught.flatten(0, 1)[rows], teacher_weight, flat[rows], near
    return _LinearDistillation.apply(*tensors, share, temperature, context, chunk)  # type: ignore[return-value]


class _LinearDistillation(torch.autograd.Function):
    """See `linear_distillation`; rows without a label are already left out."""

    @staticmethod
    def forward(
        ctx, hidden, weight, taught, teacher_weight, labels, near, share, temperature, context, chunk
    ):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden, dtype=wide) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        sums = torch.zeros(3, dtype=wide, device=hidden.device)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            teacher, counts = _logits(taught[part], teacher_weight, wide), 1.0
            if near is not None:
                need = _losses(_logits(near[part], teacher_weight, wide), labels[part])
                need -= _losses(teacher, labels[part])
                counts = 1 + context * need.clamp(0, MOST_NEED)
            student = _logits(hidden[part], weight, wide)
            values, gradient = _compare(student, teacher, labels[part], share, temperature, counts)
            sums += values
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.t() @ hidden[part]
            del student, teacher, gradient  # before the next chunk's
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        cross_entropy, divergence, counted = sums.unbind()
        objective = (1 - share) * cross_entropy + share * counted
        parts = cross_entropy.clone(), divergence.clone()
        ctx.mark_non_differentiable(*parts)
        return objective, *parts

    @staticmethod
    def backward(ctx, *grad_outputs):
        scale = grad_outputs[0]
        gradients = [
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, *(None,) * 8


def _compare(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    share: float,
    temperature: float,
    counts: Tensor | float,
) -> tuple[Tensor, Tensor]:
    """Of logits [c, V] (both overwritten), whose divergence counts `counts` [c, 1]: [Σ CE, T² Σ KL, T² Σ counts KL], and the
    gradient of the mixture, [c, V]."""
    index = torch.arange(len(labels), device=labels.device)
    plain = student.log_softmax(-1) if temperature != 1 else None
    log_q = _log_softmax_(student.div_(temperature))
    log_p = _log_softmax_(teacher.div_(temperature))
    own = log_q if plain is None else plain
    cross_entropy = -own[index, labels].sum()
    p = log_p.exp()
    divergence = log_p.sub_(log_q).mul_(p).sum(-1, keepdim=True) * temperature**2
    share_of_each = share * counts
    q = log_q.exp_()
    if plain is None:
        gradient = q.mul_(1 - share + share_of_each).sub_(p.mul_(share_of_each))
    else:
        gradient = q.sub_(p).mul_(share_of_each * temperature).add_(plain.exp_(), alpha=1 - share)
    gradient[index, labels] -= 1 - share
    return torch.stack([cross_entropy, divergence.sum(), (counts * divergence).sum()]), gradient


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each row of logits [c, V], nats: [c, 1]."""
    return logits.logsumexp(-1, keepdim=True) - logits.gather(1, labels[:, None])


def _log_softmax_(logits: Tensor) -> Tensor:
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _logits(hidden: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    if hidden.is_cuda and hidden.dtype != wide:  # a product that leaves its accumulator in fp32
        return torch.mm(hidden, weight.t(), out_dtype=wide)
    return (hidden @ weight.t()).to(wide)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
