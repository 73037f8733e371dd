"""Self-distillation: the model under its plan learns from the dense model that it started from.

In the teacher every head leads. Under LoRA it is the same weights with the adapters off, so it costs a forward pass and no memory for weights; full fine-tuning needs a frozen copy, which ZeRO-3
divides among the ranks like everything else. Two objectives (Hinton et al., 2015; Romero et al., 2015):

* `distill_logits`: T² KL(teacher, student) of the next-token distributions at temperature T, which replaces that share
  of the cross entropy;
* `distill_attention`: the squared distance between the attention outputs (after `o_proj`) of student and teacher over
  the teacher's squared norm, per token, averaged over the layers.

Both are sums over this rank's labelled tokens, like the cross entropy, so any split over ranks gives the same loss.

Memory beside plain training: the teacher's last hidden state, one fp32 [V, hidden] when the output projection is
trained, and for `distill_attention` one hidden state per layer, as much as activation checkpoints hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pod.training.args import TrainArgs
from pod.training.loss import IGNORED_LABEL, LossHead, causal_model


def is_distilling(args: TrainArgs) -> bool:
    """Whether a teacher is needed at all."""
    return args.distill_logits > 0 or args.distill_attention > 0


def needs_teacher(args: TrainArgs, layout: str) -> bool:
    """Whether the teacher must be a frozen copy: weights that are trained, or that lack keys and values (`cla`)."""
    return is_distilling(args) and (args.method != "lora" or layout == "cla")


def make_distillation(args: TrainArgs, layout: str, teacher: Any = None) -> "Distillation | None":
    """What `LanguageModelLoss` takes; None when nothing is distilled.

    Args:
        layout: of the student.
        teacher: the start model with every head leading, a PodForCausalLM; needed when `needs_teacher` says so.

    Raises:
        ValueError: no teacher.
    """
    if not is_distilling(args):
        return None
    if not needs_teacher(args, layout):
        teacher = None
    elif teacher is None:
        raise ValueError(
            f"distillation with train.method={args.method} and layout {layout} needs a copy of the start model as "
            "its teacher: give one to Trainer, or set method=lora with layout pod or window"
        )
    return Distillation(args.distill_logits, args.distill_attention, args.distill_temperature, teacher)


class Distillation(nn.Module):
    """The teacher of a run and the objectives that compare the student with it.

    Args:
        logits: share of the divergence, 0 to 1; attention: weight of the attention error.
        temperature: of both distributions.
        teacher: frozen PodForCausalLM; None = the student with its adapters off.
    """

    def __init__(self, logits: float, attention: float, temperature: float, teacher: Any = None):
        super().__init__()
        self.logits, self.attention, self.temperature = logits, attention, temperature
        self.teacher = None if teacher is None else teacher.requires_grad_(False)

    def make_head(self, weight: nn.Parameter, chunk_mib: int) -> LossHead:
        """The loss head of the student's output projection."""
        if not self.logits:
            return LossHead(weight, chunk_mib)
        teacher_weight = None if self.teacher is None else self.teacher.lm_head.weight
        return DistillationHead(weight, chunk_mib, self.logits, self.temperature, teacher_weight)

    def objective(
        self, student: Any, head: LossHead, input_ids: Tensor, labels: Tensor, doc_ids: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective of this rank's tokens, and its detached parts by name (arguments: `LanguageModelLoss`)."""
        labelled = labels != IGNORED_LABEL
        taught, outputs = self._teach(student, input_ids, doc_ids)
        decoder = causal_model(student).model
        error = AttentionError(outputs, labelled)
        with _watching(decoder, error.add if self.attention else None):
            hidden = decoder(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
        if self.logits:
            objective, cross_entropy, divergence = head(hidden, labels, taught)
            parts = {"cross_entropy": cross_entropy, "kl": divergence}
        else:
            objective = head(hidden, labels)
            parts = {"cross_entropy": objective.detach()}
        if self.attention:
            attention = error.finish()
            objective = objective + self.attention * attention
            parts["attention"] = attention.detach()
        return objective, parts

    @torch.no_grad()
    def _teach(self, student: Any, input_ids: Tensor, doc_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The teacher's last hidden state [B, n_local, hidden], and its attention outputs when they are compared."""
        own = causal_model(student).model
        decoder = own if self.teacher is None else self.teacher.model
        outputs: list[Tensor] = []
        watch = (lambda layer, out: outputs.append(out)) if self.attention else None
        # a copy has no adapters to switch off, and peft need not be installed
        switch = _without_adapters(student) if self.teacher is None else nullcontext()
        with switch, _dense(decoder, own.sequence_parallel), _watching(decoder, watch):
            hidden = decoder(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
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
def _dense(decoder: Any, parallel: Any) -> Iterator[None]:
    """A PodModel in which every head leads and nothing is kept for a backward pass."""
    before = decoder.lead, decoder.sequence_parallel, decoder.gradient_checkpointing
    local = None if parallel is None else parallel.lead
    decoder.lead = _leading(decoder.lead)
    decoder.sequence_parallel, decoder.gradient_checkpointing = parallel, False
    if parallel is not None:
        parallel.lead = _leading(local)
    try:
        yield
    finally:
        decoder.lead, decoder.sequence_parallel, decoder.gradient_checkpointing = before
        if parallel is not None:
            parallel.lead = local


def _leading(lead: Any) -> tuple[tuple[int, ...], ...]:
    return tuple((layer,) * len(row) for layer, row in enumerate(lead))


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

    Without a third argument it is the plain `LossHead`.

    Args:
        teacher_weight: output projection of the teacher [V, hidden]; None = the student's.
        Others: see `LossHead` and `linear_distillation`.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        chunk_mib: int,
        share: float,
        temperature: float,
        teacher_weight: nn.Parameter | None = None,
    ):
        super().__init__(weight, chunk_mib)
        self.share, self.temperature = share, temperature
        self.teacher_weight = teacher_weight

    def forward(self, hidden: Tensor, labels: Tensor, taught: Tensor | None = None) -> Any:
        """hidden, taught [B, n, hidden], labels [B, n] -> objective, and detached cross entropy and divergence (sums)."""
        if taught is None:
            return super().forward(hidden, labels)
        teacher_weight = self.weight if self.teacher_weight is None else self.teacher_weight
        return linear_distillation(
            hidden,
            self.weight,
            taught,
            teacher_weight,
            labels,
            self.share,
            self.temperature,
            self.chunk_bytes,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """`(1 - share) CE + share T² KL(softmax(t / T), softmax(s / T))` of logits s, t, summed over the labelled tokens.

    Gradients with respect to `hidden` and `weight` are made in the forward pass, chunk by chunk: logits are computed
    once. The teacher gets none.

    Args:
        hidden, taught: [B, n, hidden]; weight, teacher_weight: [V, hidden].
        labels: [B, n], already shifted, -100 = no label.
        chunk_bytes: of fp32 logits (student and teacher) that are held at a time, without what is derived from them.

    Returns:
        The objective (differentiable), Σ CE and T² Σ KL, scalars in at least fp32.
    """
    flat = labels.flatten()
    rows = (flat != IGNORED_LABEL).nonzero().squeeze(-1)
    size = torch.promote_types(hidden.dtype, torch.float32).itemsize
    chunk = max(1, chunk_bytes // (2 * size * weight.shape[0]))
    tensors = hidden.flatten(0, 1)[rows], weight, taught.flatten(0, 1)[rows], teacher_weight, flat[rows]
    return _LinearDistillation.apply(*tensors, share, temperature, chunk)  # type: ignore[return-value]


class _LinearDistillation(torch.autograd.Function):
    """See `linear_distillation`; rows without a label are already left out."""

    @staticmethod
    def forward(ctx, hidden, weight, taught, teacher_weight, labels, share, temperature, chunk):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden, dtype=wide) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if need_weight else None
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            student = _logits(hidden[part], weight, wide)
            teacher = _logits(taught[part], teacher_weight, wide)
            values, gradient = _compare(student, teacher, labels[part], share, temperature)
            sums += values
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.t() @ hidden[part]
            del student, teacher, gradient  # before the next chunk's
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        cross_entropy, divergence = sums[0].clone(), sums[1].clone()
        ctx.mark_non_differentiable(cross_entropy, divergence)
        return (1 - share) * cross_entropy + share * divergence, cross_entropy, divergence

    @staticmethod
    def backward(ctx, *grad_outputs):
        scale = grad_outputs[0]
        gradients = [
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None, None, None)


def _compare(
    student: Tensor, teacher: Tensor, labels: Tensor, share: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Of logits [c, V] (both overwritten): [Σ CE, T² Σ KL], and the gradient of the mixture, [c, V]."""
    index = torch.arange(len(labels), device=labels.device)
    plain = student.log_softmax(-1) if temperature != 1 else None
    log_q = _log_softmax_(student.div_(temperature))
    log_p = _log_softmax_(teacher.div_(temperature))
    own = log_q if plain is None else plain
    cross_entropy = -own[index, labels].sum()
    p = log_p.exp()
    divergence = torch.einsum("cv,cv->", p, log_p.sub_(log_q)) * temperature**2
    q = log_q.exp_()
    if plain is None:
        gradient = q.sub_(p, alpha=share)
    else:
        gradient = q.sub_(p).mul_(share * temperature).add_(plain.exp_(), alpha=1 - share)
    gradient[index, labels] -= 1 - share
    return torch.stack([cross_entropy, divergence]), gradient


def _log_softmax_(logits: Tensor) -> Tensor:
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _logits(hidden: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    if hidden.is_cuda and hidden.dtype != wide:  # a product that leaves its accumulator in fp32
        return torch.mm(hidden, weight.t(), out_dtype=wide)
    return (hidden @ weight.t()).to(wide)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
