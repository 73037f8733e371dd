"""The loss of a training step, its scale, and the module that the DeepSpeed engine wraps.

The loss never needs the logits of the whole row. DeepSpeed's fused projection and cross entropy works
through the tokens in chunks and keeps one fp32 log-sum-exp per token. During backward it computes the logits
again, in blocks of the vocabulary. The loss is computed in fp32, and the gradients are exact. What
distillation adds is in ``distillation.py``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pod.data.rows.loader import IGNORED_LABEL
from pod.training import deepspeed_bridge as bridge
from pod.training.args import TrainArgs
from pod.training.run.attention_matching import AttentionMatching
from pod.training.run.distillation import PARTS, distilled_losses, teacher_states

MEBIBYTE = 2**20
HiddenReader = Callable[[Tensor, Tensor, Tensor], Any]
"""What is computed where the loss would be.

It takes the last hidden states [B, n, hidden], the output projection [V, hidden] and the labels [B, n].
ZeRO-3 gathers the output projection before the call.
"""


def loss_scale(args: TrainArgs, mesh: Any, num_labels: float) -> float:
    """The factor of a rank's summed loss, so that gradients are those of the mean over all labels.

    The loss of a step is the sum over all its labels (all ranks, all micro-batches), divided by their number.
    The engine sums micro-batches and divides gradients by a number of ranks, which the factor undoes. With
    `reduce_scatter`, stage 3 divides by the number of ranks (`stage3.py`, `__avg_scatter_grads`). Stages 1
    and 2 divide by the number of ranks over the sequence-parallel size (`stage_1_and_2.py`,
    `average_tensor`).

    Args:
        num_labels: labels of the step, over all ranks and micro-batches.

    Example: 4 ranks of stage 3 and 8,192 labels give 4 / 8192.
    """
    divided_by = mesh.world_size if args.zero_stage == 3 else mesh.dp_size
    return divided_by / num_labels


class LossHead(nn.Module):
    """Sum of the next-token losses of a row, or of a slice of one.

    The output projection [V, hidden], tied or not, is a parameter of this module. ZeRO-3 then gathers it
    around this module's forward and backward, as it does for every other module.

    Args:
        chunk_mib: most MiB of fp32 logits that are held at a time.
        distill: as in `train.distill`; above 0 the weight must be frozen.
    """

    def __init__(self, weight: nn.Parameter, chunk_mib: int = 256, distill: float = 0.0):
        super().__init__()
        self.weight, self.distill = weight, distill
        self.chunk_bytes = chunk_mib * MEBIBYTE
        self.vocab_size = weight.shape[0]

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        reader: HiddenReader | None = None,
        taught: Tensor | None = None,
    ) -> Any:
        """The sum of the losses, [1] in fp32; with a reader, what it returns.

        Args:
            hidden: [B, n, hidden].
            labels: [B, n], already shifted; -100 = no label.
            taught: the teacher's hidden states, like `hidden`; `distilled_losses` are returned then.
        """
        if reader is not None:
            return reader(hidden, self.weight, labels)
        if taught is not None:
            return distilled_losses(hidden, self.weight, taught, labels, self.distill, self.chunk_bytes)
        rows = max(1, min(labels.numel(), self.chunk_bytes // (4 * self.vocab_size)))
        return bridge.linear_cross_entropy(hidden, self.weight, labels, IGNORED_LABEL, rows).reshape(1)


class LanguageModelLoss(nn.Module):
    """The decoder with its chunked loss: the module that the DeepSpeed engine wraps.

    Its parameters have the names of `model`'s parameters, with the prefix "model.". The loss head's weight
    is the model's own.

    Args:
        model: a PodForCausalLM, or its `peft` wrapper.
        distill: as in `train.distill`; above 0 the model must have adapters.
        distill_attention: as in `train.distill_attention`.

    Attributes:
        parts: names of the sums that `forward` returns; the first is what is trained.

    Raises:
        ValueError: attention is distilled without a teacher.
    """

    def __init__(
        self, model: Any, chunk_mib: int = 256, distill: float = 0.0, distill_attention: float = 0.0
    ):
        super().__init__()
        if distill_attention and not distill:
            raise ValueError("distill_attention needs a teacher: distill must be above 0")
        self.model = model
        self.parts: tuple[str, ...] = PARTS if distill else ("loss",)
        self.distill_attention = distill_attention
        self._matching = None
        if distill_attention:
            self.parts += ("attention_error",)
            self._matching = AttentionMatching(self._causal_model)
        self.loss_head = LossHead(self._causal_model.lm_head.weight, chunk_mib, distill)

    @property
    def _causal_model(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(
        self, input_ids: Tensor, labels: Tensor, doc_ids: Tensor, reader: HiddenReader | None = None
    ) -> Any:
        """The sums `parts` of this rank's tokens, [k] in fp32; with a reader, what it returns for them.

        Args:
            input_ids, labels: this rank's slice, [B, n_local].
            doc_ids: the whole rows, [B, n].
        """
        model, matching = self._causal_model, self._matching
        if reader is not None or not self.loss_head.distill:
            hidden = model.model(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
            return self.loss_head(hidden, labels, reader=reader)

        if matching is None:
            taught = teacher_states(model, input_ids, doc_ids)  # first, while no activations are kept
            hidden = model.model(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
            return self.loss_head(hidden, labels, taught=taught)

        with matching.teaching():
            taught = teacher_states(model, input_ids, doc_ids)
        with matching.learning(labels):
            hidden = model.model(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
        objective, *others = self.loss_head(hidden, labels, taught=taught).unbind()
        error = matching.error()
        return torch.stack([objective + self.distill_attention * error, *others, error.detach()])
