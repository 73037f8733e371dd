"""Cross entropy of a large vocabulary without the logits of the whole row.

DeepSpeed's fused projection and cross entropy works through the tokens in chunks, keeps one fp32 log-sum-exp per
token and recomputes the logits in vocabulary blocks during backward; the loss is fp32 and the gradients exact.
"""

from typing import Any

import torch
from torch import nn

from pod.training import deepspeed_bridge as bridge

MEBIBYTE = 2**20
IGNORED_LABEL = -100
"""Label of a token that counts in no loss."""


class LossHead(nn.Module):
    """Sum of the next-token losses of a row (slice), holding at most `chunk_mib` MiB of fp32 logits.

    It registers the output projection [V, hidden] (tied or not) as its own parameter: ZeRO-3 then gathers the weight around
    this module's forward and backward as it does for any other module.
    """

    def __init__(self, weight: nn.Parameter, chunk_mib: int = 256):
        super().__init__()
        self.weight = weight
        self.chunk_bytes = chunk_mib * MEBIBYTE
        self.vocab_size = weight.shape[0]

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """hidden [B, n, hidden], labels [B, n] (already shifted, -100 = no label) -> fp32 scalar sum."""
        rows = max(1, min(labels.numel(), self.chunk_bytes // (4 * self.vocab_size)))
        return bridge.linear_cross_entropy(hidden, self.weight, labels, IGNORED_LABEL, rows)


class LanguageModelLoss(nn.Module):
    """Decoder (a PodForCausalLM, or its `peft` wrapper) plus chunked loss: the module that the DeepSpeed engine wraps.

    Parameter names are those of `model` with the prefix "model."; the loss head's weight is the model's own.
    """

    def __init__(self, model: Any, chunk_mib: int = 256):
        super().__init__()
        self.model = model
        self.loss_head = LossHead(self._causal_model.lm_head.weight, chunk_mib)

    @property
    def _causal_model(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, doc_ids: torch.Tensor) -> torch.Tensor:
        """input_ids, labels: this rank's slice [B, n_local]; doc_ids: the whole rows [B, n]. Sum of the losses."""
        hidden = self._causal_model.model(input_ids=input_ids, doc_ids=doc_ids).last_hidden_state
        return self.loss_head(hidden, labels)
