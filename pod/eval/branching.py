"""One compressed cache, several continuations: a prompt is read once, then each question goes on from a copy of its cache."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pod.eval.passkey import left_padded


def branch(cache: Any) -> Any:
    """A cache of its own with the same content; tensors are copied, the model's configuration is shared."""
    return copy.deepcopy(cache, {id(cache.config): cache.config})


@torch.no_grad()
def read_prompts(model: Any, tokenizer: Any, cache: Any, rows: Sequence[tuple[int, ...]]) -> Tensor:
    """Feed prompts (token ids, left padding) as one prompt each, after which `cache` has compressed; returns their mask [B, n]."""
    ids, mask = left_padded(list(rows), pad_id(tokenizer), next(model.parameters()).device)
    model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return mask


@torch.no_grad()
def answer_behind(
    model: Any, tokenizer: Any, cache: Any, mask: Tensor, rows: Sequence[tuple[int, ...]], new_tokens: int
) -> list[str]:
    """Greedy answers to questions (token ids, at least one each) behind the prompts that `cache` holds; it is used up.

    mask: [B, n] of what the cache has seen. The questions are one prompt more for the method, as in a conversation.
    """
    pad = pad_id(tokenizer)
    ids, new = left_padded(list(rows), pad, mask.device)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.cat((mask, new), dim=1),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pad,
    )
    return [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in out]


def pad_id(tokenizer: Any) -> int:
    """The id to pad with; what it is does not matter, because it is masked."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
