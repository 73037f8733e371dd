"""Log-likelihoods through a compressed cache: prefill → compress → score, one prefill for all continuations of a context."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.eval.answer.reading import judge_ahead, left_padded


@dataclass(frozen=True)
class Score:
    """Log-likelihood of one continuation: sum in nats, and whether greedy decoding would have produced it."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True)
class Scored:
    """Scores per context and continuation; bytes held per row and tokens seen by the longest row at the end."""

    scores: list[list[Score]]
    held_bytes: int
    held_tokens: int


@torch.no_grad()
def score_by_decode(
    model: Any,
    cache: Any,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
    pad: int,
    max_rows: int,
) -> Scored:
    """Scores of every context's continuations through `cache`, a new one.

    Every context is fed once, without its last token, and compressed. The cache is then branched: each branch reads the held-out token
    and one continuation, token by token as in generation, so that already the first token is predicted from the compressed cache. A
    context of a single token (BOS) cannot be held out of itself; then all must be of one token.

    Args:
        contexts, continuations: token ids; continuations[i] are those of contexts[i].
        pad: id that fills shorter rows.
        max_rows: branches that run together.
    """
    alone = len(contexts[0]) == 1
    assert all((len(row) == 1) == alone for row in contexts), (
        "contexts of one token have a batch of their own"
    )
    prompts = [list(row) if alone else list(row[:-1]) for row in contexts]
    hidden, mask = _prefill(model, cache, prompts, pad)
    last = None if alone else torch.tensor([row[-1:] for row in contexts], device=mask.device)
    judge_ahead(model, cache, mask, hidden=hidden if alone else None, last=last)
    jobs = [(row, choice) for row, choices in enumerate(continuations) for choice in range(len(choices))]
    scores: list[list[Score]] = [[Score(0.0, True)] * len(choices) for choices in continuations]
    held = tokens = 0
    for start in range(0, len(jobs), max_rows):
        part = jobs[start : start + max_rows]
        index = torch.tensor([row for row, _ in part], device=mask.device)
        branch = cache if start + max_rows >= len(jobs) else copy.deepcopy(cache)
        branch.batch_select_indices(index)
        last = [] if alone else [list(contexts[row][-1:]) for row, _ in part]
        rows = [list(continuations[row][choice]) for row, choice in part]
        first = hidden[index] if alone else None
        found = _decode_rows(model, branch, last, rows, mask[index], first, pad)
        for (row, choice), score in zip(part, found, strict=True):
            scores[row][choice] = score
        held, tokens = max(held, branch.nbytes // len(part)), max(tokens, int(branch.lengths.max()))
    return Scored(scores, held, tokens)


def _prefill(model: Any, cache: Any, prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Feed whole prompts (left padding), compressed at their end; the last hidden state [B, 1, D] and the mask [B, longest]."""
    device = next(model.parameters()).device
    ids, mask = left_padded([tuple(row) for row in prompts], pad, device)
    cache.begin_prompt(ids.shape[1])
    out = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return out.last_hidden_state[:, -1:], mask


def _decode_rows(
    model: Any,
    cache: Any,
    last: list[list[int]],
    rows: list[list[int]],
    mask: Tensor,
    hidden: Tensor | None,
    pad: int,
) -> list[Score]:
    """Scores of `rows` after the prompts in the cache.

    last: the held-out token of each prompt, fed first; or none when `hidden` [B, 1, D] predicts the first token.
    """
    longest = max(len(row) for row in rows)
    targets = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=mask.device)
    fed = targets[:, :-1] if hidden is not None else torch.cat([targets.new_tensor(last), targets[:, :-1]], 1)
    logprobs, greedy = [], []
    for step in range(longest):
        if hidden is None or step:
            # Rows that ended are fed padding as if it were text: nobody reads what follows.
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            column = step if hidden is None else step - 1
            state = model.model(
                input_ids=fed[:, column : column + 1],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        else:
            state = hidden
        logits = model.lm_head(state[:, -1])
        logits = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        logprobs.append(logits.gather(1, targets[:, step : step + 1])[:, 0])
        greedy.append(logits.argmax(dim=-1) == targets[:, step])
    table, hits = torch.stack(logprobs, dim=1), torch.stack(greedy, dim=1)
    return [
        Score(float(table[number, : len(row)].sum()), bool(hits[number, : len(row)].all()))
        for number, row in enumerate(rows)
    ]
