"""Perplexity by position, scored through the cache that generation uses.

The scored tokens stand at the end of position buckets that double in length. A method with a cache gets the bucket's context
as its prompt, *without the last context token*, compresses, and then reads the rest token by token with the true tokens as input:
already the first scored token is predicted from the compressed cache. (Scoring in one forward pass, as is common, would let
every token see the whole context.)
"""

from collections.abc import Callable, Iterator
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
    read_context(model, cache, tokens, bucket.first - 1)
    return nll_behind(model, cache, tokens, bucket.first, bucket.end)


def read_context(model: Any, cache: Any, tokens: Tensor, prompt: int) -> None:
    """The first `prompt` of `tokens` [B, n] are a prompt, after which a method compresses; the next one is held out."""
    model.model(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True)
    judge_ahead(model, cache, None, last=tokens[:, prompt : prompt + 1])


def hidden_behind(
    model: Any, cache: Any, tokens: Tensor, start: int, end: int, chunk: int = 1
) -> Iterator[Tensor]:
    """Last hidden states from which `tokens` [B, n] from position `start` to `end` are predicted, through a cache that has seen all before
    `start - 1`; chunk: tokens fed at once."""
    for position in range(start - 1, end - 1, chunk):
        fed = tokens[:, position : min(position + chunk, end - 1)]
        yield model.model(input_ids=fed, past_key_values=cache, use_cache=True).last_hidden_state


@torch.no_grad()
def nll_behind(model: Any, cache: Any, tokens: Tensor, start: int, end: int, chunk: int = 1) -> Tensor:
    """NLL (nats) [B, end - start] of these tokens."""
    parts = []
    for number, hidden in enumerate(hidden_behind(model, cache, tokens, start, end, chunk)):
        first = start + number * chunk
        parts.append(token_nll(model.lm_head, hidden, tokens[:, first : first + hidden.shape[1]]))
    return torch.cat(parts, dim=1)


def forward_error(model: Any, cache: Any, tokens: Tensor, bucket: Bucket, checked: int) -> float:
    """Largest difference in nats between the two ways of scoring the bucket's last `checked` tokens of `tokens` [B, n]."""
    short = Bucket(start=bucket.start, end=bucket.end, first=max(bucket.first, bucket.end - checked))
    by_forward = score_by_forward(model, tokens[:, : bucket.end], [short])[0]
    return float((score_by_decode(model, cache, tokens, short) - by_forward).abs().max())
