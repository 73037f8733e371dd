"""How likely given tokens are after the last hidden states, with few logits in memory at a time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS = 512  # of logits in memory at once: 512 x 49152 x 4 B = 100 MB
_OUTPUTS = 4096  # rows of the output projection that are converted to fp32 at a time
_UNLABELLED = -100  # torch's and transformers' label of a token that does not count


class TokenScores(NamedTuple):
    """Scores of the tokens of a tensor, of the same shape.

    Attributes:
        logprobs: log-probability of every token (nats, at least fp32); 0 where the token is -100.
        likeliest: the token that greedy decoding would produce in its place.
    """

    logprobs: Tensor
    likeliest: Tensor


def token_scores(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, rows: int = _ROWS
) -> TokenScores:
    """Scores of ``targets`` ``[B, m]``, given the last hidden states ``[B, m, D]``.

    Args:
        head: takes hidden states ``[r, D]`` and returns their logits ``[r, V]``, on any device.
        rows: hidden states that it takes at once.
    """
    states = hidden.reshape(-1, hidden.shape[-1])
    labels = targets.reshape(-1)
    logprobs, likeliest = [], []
    for chunk, label in zip(states.split(rows), labels.split(rows), strict=True):
        logits = head(chunk).to(targets.device)
        table = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        logprobs.append(-F.nll_loss(table, label, reduction="none", ignore_index=_UNLABELLED))
        likeliest.append(logits.argmax(dim=-1))
    return TokenScores(torch.cat(logprobs).view(targets.shape), torch.cat(likeliest).view(targets.shape))


def rows_in(num_bytes: int, vocab_size: int) -> int:
    """How many rows of fp32 logits fit into so many bytes, at least one."""
    return max(1, num_bytes // (4 * vocab_size))


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits ``[m, V]`` in at least fp32, which are nowhere rounded to 16 bits.

    GPUs write products of 16-bit numbers in fp32. CPUs would round them, so there the numbers are converted
    to fp32 first. With rounded logits, a divergence of 0.004 nats has a gradient that is wrong by a third.

    Args:
        hidden: ``[m, D]``.
        weight: ``[V, D]``.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype == wide:
        return F.linear(hidden, weight)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=wide)
    logits = hidden.new_empty(len(hidden), len(weight), dtype=wide)
    states = hidden.to(wide)
    # the whole weight in fp32 would be as large as a block of logits
    for columns, rows in zip(logits.split(_OUTPUTS, dim=1), weight.split(_OUTPUTS), strict=True):
        torch.mm(states, rows.to(wide).t(), out=columns)
    return logits
