"""What a batch of requests asks of a model through a cache: log-likelihoods (prefill → compress → score) and generation."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.eval.passkey import left_padded


@dataclass(frozen=True)
class Score:
    """Log-likelihood of one continuation: sum in nats, and whether greedy decoding would have produced it."""

    logprob: float
    is_greedy: bool


def prefill(model: Any, cache: Any, contexts: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Feed whole prompts (left padding) through an empty cache, which compresses at their end; returns the mask [B, longest]."""
    device = next(model.parameters()).device
    ids, mask = left_padded([tuple(row) for row in contexts], pad, device)
    cache.begin_prompt(ids.shape[1])
    model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return mask


@torch.no_grad()
def score_by_decode(
    model: Any,
    cache: Any,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
    pad: int,
    max_rows: int,
) -> tuple[list[list[Score]], int]:
    """Scores of every context's continuations through `cache`, and the bytes per row at the end.

    One prefill for every context, without its last token; the cache is then branched, and each branch reads the held-out token and a
    continuation token by token, as in generation. At most `max_rows` branches run together.
    """
    mask = prefill(model, cache, [row[:-1] or row for row in contexts], pad)
    jobs = [(row, choice) for row, choices in enumerate(continuations) for choice in range(len(choices))]
    scores: list[list[Score]] = [[Score(0.0, True)] * len(choices) for choices in continuations]
    held = 0
    for start in range(0, len(jobs), max_rows):
        part = jobs[start : start + max_rows]
        last = start + max_rows >= len(jobs)
        branch = cache if last else copy.deepcopy(cache)
        branch.batch_select_indices(torch.tensor([row for row, _ in part]))
        rows = [list(contexts[row][-1:]) + list(continuations[row][choice]) for row, choice in part]
        found = _decode_rows(model, branch, rows, mask[[row for row, _ in part]], pad)
        for (row, choice), score in zip(part, found, strict=True):
            scores[row][choice] = score
        held = max(held, branch.nbytes // len(part))
    return scores, held


def _decode_rows(model: Any, cache: Any, rows: list[list[int]], mask: Tensor, pad: int) -> list[Score]:
    """Scores of rows[i][1:], each token predicted from the tokens before it; rows[i][0] is fed first."""
    steps = max(len(row) for row in rows) - 1
    tokens = torch.tensor([row + [pad] * (steps + 1 - len(row)) for row in rows], device=mask.device)
    logprobs, greedy = [], []
    for step in range(steps):
        # rows that ended are fed padding as if it were text: nobody reads what follows
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        out = model(
            input_ids=tokens[:, step : step + 1],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        logits = out.logits[:, -1]
        logits = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        target = tokens[:, step + 1]
        logprobs.append(logits.gather(1, target[:, None])[:, 0])
        greedy.append(logits.argmax(dim=-1) == target)
    table, hits = torch.stack(logprobs, dim=1), torch.stack(greedy, dim=1)
    return [
        Score(float(table[row, : len(ids) - 1].sum()), bool(hits[row, : len(ids) - 1].all()))
        for row, ids in enumerate(rows)
    ]
