"""The loss of a training step, and the module that the DeepSpeed engine wraps.

The loss never needs the logits of the whole row. DeepSpeed's fused projection and cross entropy works
through the tokens in chunks and keeps one fp32 log-sum-exp per token. During backward it computes the logits
again, in blocks of the vocabulary. The loss is computed in fp32, and the gradients are exact.
"""

from typing import Any

import torch
from torch import nn

from pod.training import deepspeed_bridge as bridge

MEBIBYTE = 2**20
IGNORED_LABEL = -100
"""Label of a token that counts in no loss."""


class LossHead(nn.Module):
    """Sum of the next-token losses of a row, or of a slice of one.

    The output projection [V, hidden], tied or not, is a parameter of this module. ZeRO-3 then gathers it
    around this module's forward and backward, as it does for every other module.

    Args:
        chunk_mib: most MiB of fp32 logits that are held at a time.
    """

    def __init__(self, weight: nn.Parameter, chunk_mib: int = 256):
        super().__init__()
        self.weight = weight
        self.chunk_bytes = chunk_mib * MEBIBYTE
        self.vocab_size = weight.shape[0]

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the losses, an fp32 scalar.

        Args:
            hidden: [B, n, hidden].
            labels: [B, n], already shifted; -100 = no label.
        """
        rows = max(1, min(labels.numel(), self.chunk_bytes // (4 * self.vocab_size)))
        return bridge.linear_cross_entropy(hidden, self.weight, labels, IGNORED_LABEL, rows)


class LanguageModelLoss(nn.Module):
    """The decoder with its chunked loss: the module that the DeepSpeed engine wraps.

    Its parameters have the names of `model`'s parameters, with the prefix "model.". The loss head's weight
    is the model's own.

    Args:
        model: a PodForCausalLM, or its `peft` wrapper.
    """

    def __init__(self, model: Any, chunk_mib: int = 256):
        super().__init__()
        self.model = model
        self.loss_head = LossHead(self._causal_model.lm_head.weight, chunk_mib)

    @property
    def _causal_model(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor) -> torch.Tensor:
        """The sum of the losses.

        Args:
            input_ids, labels: this rank's slice, [B, n_local].
            doc_ids: the whole rows, [B, n].
        """
        hidden = self._causal_model.model(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
        return self.loss_head(hidden, labels)
