"""Perplexity by position, scored through the cache that generation uses.

The scored tokens stand at the end of position buckets that double in length. A method with a cache gets the bucket's context
as its prompt, *without the last context token*, compresses, and then reads the rest token by token with the true tokens as input:
already the first scored token is predicted from the compressed cache. (Scoring in one forward pass, as is common, would let
every token see the whole context.)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.eval.answer.reading import judge_ahead
from pod.eval.suites.buckets import Bucket

_LOGIT_ROWS = 512  # rows of logits in memory at once: 512 x 49152 x 4 B = 100 MB


def token_nll(lm_head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    """NLL in nats of `targets` [B, m] given the last hidden states [B, m, D]; at least fp32, logits never held all at once."""
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    parts = []
    for chunk, label in zip(rows.split(_LOGIT_ROWS), labels.split(_LOGIT_ROWS), strict=True):
        logits = lm_head(chunk)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts.append(F.cross_entropy(logits, label, reduction="none"))
    return torch.cat(parts).view(targets.shape)


@torch.no_grad()
def score_by_forward(model: Any, tokens: Tensor, buckets: list[Bucket]) -> list[Tensor]:
    """NLL of each bucket's scored tokens [B, scored] from one forward pass over `tokens` [B, n] without a cache.

    Only for methods whose decode path equals that pass (`Method.one_shot`).
    """
    hidden = model.model(input_ids=tokens).last_hidden_state
    return [
        token_nll(
            model.lm_head, hidden[:, bucket.first - 1 : bucket.end - 1], tokens[:, bucket.first : bucket.end]
        )
        for bucket in buckets
    ]


@torch.no_grad()
def score_by_decode(model: Any, cache: Any, tokens: Tensor, bucket: Bucket) -> Tensor:
    """NLL of the bucket's scored tokens [B, scored] through `cache`: prompt, compression, then one token at a time as in generation.

    Args:
        cache: a new cache; on return it has seen `bucket.held_length` tokens of every row.
        tokens: [B, n >= bucket.end].
    """
    prompt = bucket.first - 1
    model.model(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True)
    judge_ahead(model, cache, None, last=tokens[:, prompt : prompt + 1])
    return score_behind(model, cache, tokens, bucket)


@torch.no_grad()
def score_behind(model: Any, cache: Any, tokens: Tensor, bucket: Bucket) -> Tensor:
    """The second half of `score_by_decode`: `cache` has compressed the prompt, all of `tokens` [B, n] before `bucket.first - 1`."""
    parts = []
    for position in range(bucket.first - 1, bucket.end - 1):
        fed = tokens[:, position : position + 1]
        hidden = model.model(input_ids=fed, past_key_values=cache, use_cache=True).last_hidden_state
        parts.append(token_nll(model.lm_head, hidden, tokens[:, position + 1 : position + 2]))
    return torch.cat(parts, dim=1)


def forward_error(model: Any, cache: Any, tokens: Tensor, bucket: Bucket, checked: int) -> float:
    """Largest difference in nats between the two ways of scoring the bucket's last `checked` tokens of `tokens` [B, n]."""
    short = Bucket(start=bucket.start, end=bucket.end, first=max(bucket.first, bucket.end - checked))
    by_forward = score_by_forward(model, tokens[:, : bucket.end], [short])[0]
    return float((score_by_decode(model, cache, tokens, short) - by_forward).abs().max())
