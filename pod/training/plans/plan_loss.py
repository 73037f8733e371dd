"""What a whole plan does to the model's own loss. Costs of roles add up (``costs.py``); errors of one layer change what the next ones see."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pod.modeling.loading import load_model
from pod.modeling.methods import make_cache
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import GROUP_SIZE, SharingPlan
from pod.training.observe.validation import token_scores

_LOGIT_BYTES = 1 << 28  # of logits in memory at once


@torch.no_grad()
def plan_loss(model: PodForCausalLM, plan: SharingPlan, sequences: Sequence[Tensor]) -> float:
    """Mean next-token loss under a plan, in nats per token; packed layers as the cache holds them, as in decoding.

    Args:
        model: dense weights with the windows that the plan is for.
        sequences: N tensors ``[n]`` of token ids.
    """
    shared = load_model(model, plan=plan, attention_backend=model.config.attention_backend)
    total = sum(_summed_loss(shared, row.reshape(1, -1).to(model.device)) for row in sequences)
    return total / sum(len(row) - 1 for row in sequences)


def _summed_loss(model: PodForCausalLM, tokens: Tensor) -> float:
    """Of ``[1, n]``. Where layers are packed every token reads what the model's own cache holds in its place: a group at a time,
    since nothing is packed between two multiples of its size."""
    packs = model.config.sharing_plan.packs
    cache: Any = make_cache(model) if packs else None
    parts = [
        model.model(input_ids=part, past_key_values=cache, use_cache=packs).last_hidden_state
        for part in tokens.split(GROUP_SIZE if packs else tokens.shape[1], dim=1)
    ]
    hidden = torch.cat(parts, dim=1)[:, :-1]
    losses, _ = token_scores(hidden, model.lm_head.weight, tokens[:, 1:], _LOGIT_BYTES)
    return losses.double().sum().item()
