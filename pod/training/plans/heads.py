"""Data-free search for the heads that look far back: random tokens, repeated (RazorAttention §3.3).

A head that has learnt to retrieve finds the earlier copies of the current token (*echo*), or what followed them
(*induction*), even in text without meaning. One forward pass; no matrix of n x n is ever held.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pod.training.plans.recording import record_attention_inputs

BLOCK_ELEMENTS = 1 << 24  # logits computed at a time


def repeated_tokens(
    num_tokens: int, repeats: int, vocab_size: int, excluded: Iterable[int] = (), seed: int = 0
) -> Tensor:
    """``[repeats · K]`` ids: K distinct random tokens outside ``excluded``, the same order again and again.

    Raises: ValueError when the vocabulary has fewer than K tokens left.
    """
    allowed = torch.ones(vocab_size, dtype=torch.bool)
    allowed[[token for token in excluded if 0 <= token < vocab_size]] = False
    candidates = allowed.nonzero().flatten()
    if num_tokens < 2 or num_tokens > len(candidates):
        raise ValueError(f"{num_tokens} distinct tokens asked for, allowed are 2 to {len(candidates)}")
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return candidates[order[:num_tokens]].repeat(repeats)


def head_scores(
    q: Tensor, k: Tensor, num_tokens: int, block_elements: int = BLOCK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Echo and induction scores ``[Hq]`` of one layer on ``repeated_tokens``, fp64 on the CPU.

    With A the causal attention and K the number of distinct tokens, the means over the queries i >= K of
    ``Σ_r A[i, i - rK]`` and ``Σ_r A[i, i - rK + 1]`` over all earlier copies ``r >= 1``, ``rK <= i``.

    Args:
        q: ``[Hq, n, d]``; k: ``[H, n, d]``, rotated.
        num_tokens: K.
        block_elements: logits held at a time; memory is O(n) beside it.
    """
    heads, n, _ = q.shape
    compute = torch.promote_types(q.dtype, torch.float32)
    scaled = q.to(compute).unflatten(0, (k.shape[0], -1)) * q.shape[-1] ** -0.5
    keys = k.to(compute).transpose(1, 2)
    totals = torch.zeros(2, heads, dtype=torch.float64)
    size = max(1, block_elements // (heads * n))
    for start in range(num_tokens, n, size):
        stop = min(start + size, n)
        logits = (scaled[:, :, start:stop].flatten(1, 2) @ keys[:, :, :stop]).view(heads, stop - start, stop)
        query = torch.arange(start, stop, device=q.device)
        future = torch.arange(stop, device=q.device) > query[:, None]
        lse = logits.masked_fill_(future, float("-inf")).logsumexp(-1)
        for back in range(num_tokens, stop, num_tokens):
            first = max(back - start, 0)  # the first query of the block that has a copy this far back
            echo = logits[:, first:].diagonal(start + first - back, 1, 2)
            induction = logits[:, first:].diagonal(start + first - back + 1, 1, 2)
            for total, found in zip(totals, (echo, induction), strict=True):
                total += (found - lse[:, first:]).exp().double().sum(1).cpu()
    return totals[0] / (n - num_tokens), totals[1] / (n - num_tokens)


def search_heads(model: Any, input_ids: Tensor, num_tokens: int) -> tuple[Any, Any]:
    """Echo and induction scores ``[L][Hq]`` of a dense model on ``[n]`` repeated tokens."""
    layers = tqdm(
        record_attention_inputs(model, input_ids[None].to(model.device)),
        total=model.config.num_hidden_layers,
        desc=f"heads, {len(input_ids)} tokens",
        unit="layer",
    )
    scores = [head_scores(inputs.q, inputs.k, num_tokens) for inputs in layers]
    echo, induction = (tuple(tuple(one.tolist()) for one in kind) for kind in zip(*scores, strict=True))
    return echo, induction


def ordinary_tokens(tokenizer: Any, config: Any, wanted: int, repeats: int, seed: int) -> Tensor:
    """`repeated_tokens` that are not special: ``wanted`` distinct ones, or as many as the context and the vocabulary allow.

    Raises: ValueError when that is fewer than 2.
    """
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocab = min(len(tokenizer), config.vocab_size)
    special = {id for id in added | set(tokenizer.all_special_ids) if id < vocab}
    context = config.max_position_embeddings
    num_tokens = min(wanted, context // repeats, vocab - len(special))
    if num_tokens < 2:
        raise ValueError(
            f"explore.head_repeats is {repeats}: a context of {context} tokens and {vocab - len(special)} ordinary tokens leave fewer "
            "than 2 distinct ones; repeat less often"
        )
    return repeated_tokens(num_tokens, repeats, vocab, special, seed)
