"""Log-likelihoods through a compressed cache: prefill → compress → score.

One prefill serves all continuations of a context.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.eval.answer.reading import decided, held, judge_ahead, left_padded
from pod.eval.lm.batches import ScoredContext

Score = tuple[float, bool]
"""Log-likelihood of one continuation: the sum in nats, and whether greedy decoding would produce it."""


@torch.no_grad()
def score_by_decode(
    model: Any, cache: Any, units: Sequence[ScoredContext], pad: int, max_rows: int
) -> list[dict[str, Any]]:
    """The record of every unit through `cache`, a new one.

    A record has the `Score`s of the unit's continuations as `answers`, what was `held` at the end of the
    longest, and what was `decided` about the context.

    Every context is fed once, without its last token, and compressed. The cache is then branched: each branch
    reads the held-out token and one continuation, token by token as in generation. So the first token is
    already predicted from the compressed cache. A context of a single token (BOS) cannot be held out of
    itself; where there is one, all contexts must be of one token.

    Args:
        pad: id that fills shorter rows.
        max_rows: branches that run together.
    """
    alone = not units[0].holds_out
    assert all(unit.holds_out != alone for unit in units), "contexts of one token have a batch of their own"
    hidden, mask = _prefill(
        model, cache, [unit.context if alone else unit.context[:-1] for unit in units], pad
    )
    last = None if alone else torch.tensor([unit.context[-1:] for unit in units], device=mask.device)
    judge_ahead(model, cache, mask, hidden=hidden if alone else None, last=last)
    more = decided(cache)
    jobs = [(row, choice) for row, unit in enumerate(units) for choice in range(len(unit.continuations))]
    answers: list[list[Score]] = [[(0.0, True)] * len(unit.continuations) for unit in units]
    most = [{"bytes": 0, "held_tokens": 0} for _ in units]
    for start in range(0, len(jobs), max_rows):
        part = jobs[start : start + max_rows]
        index = torch.tensor([row for row, _ in part], device=mask.device)
        branch = cache if start + max_rows >= len(jobs) else copy.deepcopy(cache)
        branch.batch_select_indices(index)
        fed = [] if last is None else last[index].tolist()
        rows = [list(units[row].continuations[choice]) for row, choice in part]
        first = hidden[index] if alone else None
        found = _decode_rows(model, branch, fed, rows, mask[index], first, pad)
        for (row, choice), score, size in zip(part, found, held(branch), strict=True):
            answers[row][choice] = score
            most[row] = {name: max(most[row][name], number) for name, number in size.items()}
    records = zip(answers, most, more, strict=True)
    return [{"answers": scores, **size, **one} for scores, size, one in records]


def _prefill(model: Any, cache: Any, prompts: list[tuple[int, ...]], pad: int) -> tuple[Tensor, Tensor]:
    """Feed whole prompts (left padding), compressed at their end.

    Returns: the last hidden state [B, 1, D] and the mask [B, longest].
    """
    ids, mask = left_padded(prompts, pad, next(model.parameters()).device)
    cache.begin_prompt(ids.shape[1])
    out = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return out.last_hidden_state[:, -1:].to(mask.device), mask


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

    Args:
        last: the held-out token of each prompt, which is fed first; or none when `hidden` [B, 1, D] predicts
            the first token.
    """
    longest = max(len(row) for row in rows)
    targets = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=mask.device)
    fed = targets[:, :-1] if hidden is not None else torch.cat([targets.new_tensor(last), targets[:, :-1]], 1)

    def states(mask: Tensor) -> Iterator[Tensor]:
        if hidden is not None:
            yield hidden
        for token in fed.unbind(1):
            # Rows that ended are fed padding as if it were text: nobody reads what follows.
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            out = model.model(
                input_ids=token[:, None], attention_mask=mask, past_key_values=cache, use_cache=True
            )
            yield out.last_hidden_state

    logprobs, greedy = [], []
    for step, state in enumerate(states(mask)):
        logits = model.lm_head(state[:, -1]).to(mask.device)  # the head may lie on another device
        logits = F.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        logprobs.append(logits.gather(1, targets[:, step : step + 1])[:, 0])
        greedy.append(logits.argmax(dim=-1) == targets[:, step])
    table, hits = torch.stack(logprobs, dim=1), torch.stack(greedy, dim=1)
    return [
        (float(table[number, : len(row)].sum()), bool(hits[number, : len(row)].all()))
        for number, row in enumerate(rows)
    ]
