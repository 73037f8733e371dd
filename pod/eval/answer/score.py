"""How likely tokens are, scored through the cache that generation uses: prefill → compress → score.

A context is read *without its last token* and compressed. Then that token is fed, and behind it the true
tokens, one at a time as in generation. So the first scored token is already predicted from the compressed
cache. (Scoring in one forward pass, as is common, would let every token see the whole context.) Choices of a
benchmark, the ends of perplexity's position buckets, predictions and streamed texts are all scored this way.

A long text may be streamed: its first tokens are the prompt, and every token behind them is scored. Methods
whose mask is the same for a chunk and for single tokens then take chunks (`takes_chunks`: equal to the decode
path by test). For methods that compress while they read (im, imdc, fm; `prefill=streaming`) the whole text is
one prompt. A token is then predicted from the memory so far and the tokens before it in its own chunk. The
first token of a chunk is predicted from the whole previous chunk, which is compressed only afterwards (IMDC
§4.4, Figure 5).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pod.eval.answer.methods import EvaluatedMethod, parts_of
from pod.eval.answer.reading import Seen, branch, decided, held, read
from pod.eval.suites.buckets import Bucket
from pod.modeling.token_scores import TokenScores, token_scores
from pod.registry import METHODS


class Scored(NamedTuple):
    """The scores of one context's continuations.

    Attributes:
        continuations: `TokenScores` [m] of each continuation of m tokens.
        held: `bytes` and `held_tokens` at the end of the longest continuation.
        decided: what the method decided about the context (`reading.decided`).
    """

    continuations: list[TokenScores]
    held: dict[str, int]
    decided: dict[str, Any]


@torch.no_grad()
def score(
    model: Any,
    cache: Any,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[Sequence[int]]],
    pad: int = 0,
    max_rows: int | None = None,
) -> list[Scored]:
    """Score continuations of contexts through `cache`, which must be new and is used up.

    Every context is fed once, without its last token, and compressed. The cache is then branched: each branch
    reads one continuation of a context. A context of a single token (BOS) is fed whole, because nothing would
    be left without its last token; if one context is so short, all must be.

    Args:
        contexts: token ids.
        continuations: for each context its continuations, at least one, as token ids.
        pad: id that fills shorter rows.
        max_rows: branches that run together; None = all.
    """
    seen = read(model, cache, contexts, pad, hold_out=len(contexts[0]) > 1)
    said = decided(cache)
    jobs = [(row, choice) for row, choices in enumerate(continuations) for choice in range(len(choices))]
    scores: list[list[TokenScores]] = [[] for _ in contexts]
    most = [{"bytes": 0, "held_tokens": 0} for _ in contexts]
    at_once = max_rows or len(jobs)
    for start in range(0, len(jobs), at_once):
        part = jobs[start : start + at_once]
        used = cache if start + at_once >= len(jobs) else branch(cache)
        taken = _take(used, seen, [row for row, _ in part])
        rows = [list(continuations[row][choice]) for row, choice in part]
        # Rows that ended are fed padding as if it were text: nobody reads what follows.
        longest = max(map(len, rows))
        targets = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=seen.mask.device)
        found = score_behind(model, used, taken, targets)
        for place, size in enumerate(held(used)):
            row = part[place][0]
            length = len(rows[place])
            scores[row].append(TokenScores(*(one[place, :length] for one in found)))
            most[row] = {name: max(most[row][name], number) for name, number in size.items()}
    return [Scored(*one) for one in zip(scores, most, said, strict=True)]


def _take(cache: Any, seen: Seen, rows: list[int]) -> Seen:
    """Select rows of a cache and of what it has seen, in this order. A row may be selected several times."""
    if rows == list(range(len(seen.mask))):
        return seen
    index = torch.tensor(rows, device=seen.mask.device)
    cache.batch_select_indices(index)
    last = None if seen.last is None else seen.last[index]
    hidden = None if seen.hidden is None else seen.hidden[index]
    return Seen(seen.mask[index], last, hidden)


@torch.no_grad()
def score_behind(model: Any, cache: Any, seen: Seen, targets: Tensor, chunk: int = 1) -> TokenScores:
    """Scores [B, m] of the tokens `targets` [B, m] behind what `cache` has seen.

    Afterwards the cache has seen all of them but the last, see `Seen.after`.

    Args:
        chunk: tokens fed at once.
    """
    mask, parts, first = seen.mask, list[TokenScores](), 0
    if seen.last is None:
        assert seen.hidden is not None, "where no token is held out, the state behind it predicts the first"
        parts.append(token_scores(model.lm_head, seen.hidden, targets[:, :1]))
        first, fed = 1, targets[:, :-1]
    else:
        fed = torch.cat([seen.last, targets[:, :-1]], dim=1)
    for start in range(0, fed.shape[1], chunk):
        tokens = fed[:, start : start + chunk]
        mask = torch.cat([mask, mask.new_ones(tokens.shape)], dim=1)
        out = model.model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
        predicted = targets[:, first + start : first + start + tokens.shape[1]]
        parts.append(token_scores(model.lm_head, out.last_hidden_state, predicted))
    return TokenScores(*(torch.cat(of_parts, dim=1) for of_parts in zip(*parts, strict=True)))


# -- one forward pass without a cache ------------------------------------------------------------------------


@torch.no_grad()
def score_by_forward(model: Any, tokens: Tensor, buckets: Sequence[Bucket]) -> list[TokenScores]:
    """Scores [B, scored] of each bucket's scored tokens from one pass over `tokens` [B, n] without a cache.

    Only for methods whose decode path equals that pass (`EvaluatedMethod.one_shot`).
    """
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    found = []
    for bucket in buckets:
        states = hidden[:, bucket.first - 1 : bucket.end - 1]
        found.append(token_scores(model.lm_head, states, tokens[:, bucket.first : bucket.end]))
    return found


def score_bucket(model: Any, cache: Any, tokens: Tensor, bucket: Bucket) -> list[Scored]:
    """`score` of a bucket's scored tokens through a new cache, for each row of `tokens` [B, n >= bucket.end].

    On return the cache has seen `bucket.held_length` tokens of every row.
    """
    scored = tokens[:, bucket.first : bucket.end].tolist()
    return score(model, cache, tokens[:, : bucket.first].tolist(), [[row] for row in scored])


def forward_error(model: Any, cache: Any, tokens: Tensor, bucket: Bucket, checked: int) -> float:
    """Largest difference (nats) between log-probabilities of one forward pass and of the decode path.

    It is taken over the bucket's last `checked` tokens of each row of `tokens` [B, n].
    """
    short = Bucket(start=bucket.start, end=bucket.end, first=max(bucket.first, bucket.end - checked))
    (by_forward,) = score_by_forward(model, tokens[:, : bucket.end], [short])
    by_decode = [one.continuations[0].logprobs for one in score_bucket(model, cache, tokens, short)]
    return float((torch.stack(by_decode) - by_forward.logprobs).abs().max())


@torch.no_grad()
def predict_by_forward(model: Any, tokens: Tensor, last: int) -> Tensor:
    """The model's predictions [B, last] of the last tokens of `tokens` [B, n], in one pass.

    Each is made from everything before its token.
    """
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return token_scores(model.lm_head, hidden[:, -last:], tokens[:, -last:]).likeliest


def predict_by_decode(model: Any, cache: Any, tokens: Tensor, last: int) -> Tensor:
    """The predictions of `predict_by_forward`, but made through `cache`, a new one, as in generation."""
    ends = [[row] for row in tokens[:, -last:].tolist()]
    found = score(model, cache, tokens[:, :-last].tolist(), ends)
    return torch.stack([one.continuations[0].likeliest for one in found])


@torch.no_grad()
def predict_by_window(model: Any, tokens: Tensor, last: int, window: int, rows_at_once: int) -> Tensor:
    """Predictions [B, last] of the last tokens of `tokens` [B, n] from the nearest `window` tokens only.

    Each prediction is a forward pass over these tokens alone; `rows_at_once` of them run together.
    """
    end = tokens.shape[1]
    pieces = torch.stack([tokens[:, p - window : p] for p in range(end - last, end)], dim=1)
    found = []
    for part in pieces.flatten(0, 1).split(rows_at_once):
        hidden = model.model(input_ids=part, use_cache=False).last_hidden_state
        found.append(token_scores(model.lm_head, hidden[:, -1:], part[:, -1:]).likeliest)
    return torch.cat(found).view(len(tokens), last)


# -- streams -------------------------------------------------------------------------------------------------


def reads_on(method: EvaluatedMethod, options: dict[str, Any]) -> bool:
    """Whether a method with these options (`eval.method_options`) compresses while it reads a prompt."""
    in_chunks = any(METHODS[part].reads_in_chunks for part in parts_of(method))
    return in_chunks or options.get("prefill") == "streaming"


def chunk_of(method: EvaluatedMethod, chunk_size: int, options: dict[str, Any]) -> int:
    """Tokens that a method with these options may take at once behind the prompt.

    PoD's gate skip (`tau`) is decided when a single token is decoded, so a layout with options takes single
    tokens.
    """
    takes_chunks = method.spec is None or (method.spec in METHODS and METHODS[method.spec].takes_chunks)
    exact = takes_chunks and not (options and method.spec in ("pod", None))
    return chunk_size if exact or reads_on(method, options) else 1


def ends_of(prompt: int, length: int, every: int, common: int) -> tuple[int, ...]:
    """The ends of the intervals over which `score_stream` sums, as positions in tokens.

    There is one every `every` tokens behind the prompt, one at `common` (where some methods stop), and one at
    `length`.
    """
    ends = {*range(prompt + every, length, every), common, length}
    return tuple(sorted(end for end in ends if prompt < end <= length))


@torch.no_grad()
def score_stream(
    model: Any,
    cache: Any,
    tokens: Tensor,
    prompt: int,
    ends: Sequence[int],
    chunk: int,
    reads_on: bool = False,
) -> tuple[list[Tensor], list[list[int]]]:
    """Summed NLL of every interval of a stream, and the bytes held at its end.

    The intervals are `[prompt, ends[0])`, `[ends[0], ends[1])` and so on.

    Args:
        cache: a new one. The first `prompt` tokens of `tokens` [B, n] are its context.
        chunk: tokens at once behind the prompt, see `chunk_of`.
        reads_on: the whole text is one prompt.
    Returns: sums in nats (fp64 [B]) and bytes for each row, one of each per interval.
    """
    columns = ends[-1] - 1 if reads_on else None
    seen = read(model, cache, tokens[:, :prompt].tolist(), hold_out=True, prompt_columns=columns)
    sums, sizes = [], []
    for start, end in pairwise((prompt, *ends)):
        targets = tokens[:, start:end]
        sums.append(-score_behind(model, cache, seen, targets, chunk).logprobs.double().sum(dim=1))
        sizes.append(cache.nbytes_by_row())
        seen = seen.after(targets)
    return sums, sizes
