"""Greedy predictions of the next token at the end of a text: from the whole context, through a cache, or from the nearest tokens only."""

from typing import Any

import torch
from torch import Tensor

from pod.eval.answer.perplexity import hidden_behind, read_context


@torch.no_grad()
def predict_by_forward(model: Any, tokens: Tensor, last: int) -> Tensor:
    """The model's predictions [B, last] of the last tokens of `tokens` [B, n], each from everything before it, in one pass."""
    hidden = model.model(input_ids=tokens[:, :-1]).last_hidden_state
    return model.lm_head(hidden[:, -last:]).argmax(dim=-1)


@torch.no_grad()
def predict_by_decode(model: Any, cache: Any, tokens: Tensor, last: int) -> Tensor:
    """The same through `cache`, a new one: the prompt ends one token before the first prediction, the rest is fed as in generation."""
    prompt = tokens.shape[1] - last - 1
    read_context(model, cache, tokens, prompt)
    states = hidden_behind(model, cache, tokens, prompt + 1, tokens.shape[1])
    return torch.cat([model.lm_head(hidden).argmax(dim=-1) for hidden in states], dim=1)


@torch.no_grad()
def predict_by_window(model: Any, tokens: Tensor, last: int, window: int, rows_at_once: int) -> Tensor:
    """The same from the nearest `window` tokens only: nothing else is fed for each prediction."""
    end = tokens.shape[1]
    pieces = torch.stack([tokens[:, p - window : p] for p in range(end - last, end)], dim=1)
    found = [
        model.lm_head(model.model(input_ids=part).last_hidden_state[:, -1]).argmax(dim=-1)
        for part in pieces.flatten(0, 1).split(rows_at_once)
    ]
    return torch.cat(found).view(len(tokens), last)
