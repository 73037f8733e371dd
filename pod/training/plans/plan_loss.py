"""What a whole plan does to the model's own loss. Costs of roles add up (``costs.py``); errors of one layer change what the next ones see."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pod.modeling.loading import with_plan
from pod.modeling.methods import make_cache
from pod.modeling.shipped.llama import PodForCausalLM
from pod.modeling.shipped.sharing import GROUP_SIZE, SharingPlan

_LOGIT_ROWS = 512  # rows of logits in memory at once


@torch.no_grad()
def plan_loss(model: PodForCausalLM, plan: SharingPlan, sequences: Sequence[Tensor]) -> float:
    """Mean next-token loss under a plan, in nats per token; packed layers as the cache holds them, as in decoding.

    With torch.distributed initialised ranks divide the sequences; the result has the same bits for any number of ranks.

    Args:
        model: dense weights with the windows that the plan is for.
        sequences: N tensors ``[n]`` of token ids, the same on every rank.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shared = with_plan(model, plan)
    own = [_summed_loss(shared, row.reshape(1, -1).to(model.device)) for row in sequences[rank::world]]
    every: list[list[float]] = [own]
    if dist.is_initialized():
        every = [[] for _ in range(world)]
        dist.all_gather_object(every, own)
    total = sum(every[i % world][i // world] for i in range(len(sequences)))
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
    hidden, total = torch.cat(parts, dim=1)[0, :-1], 0.0
    for states, labels in zip(hidden.split(_LOGIT_ROWS), tokens[0, 1:].split(_LOGIT_ROWS), strict=True):
        logits = model.lm_head(states)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total += F.cross_entropy(wide, labels, reduction="sum").item()
    return total
