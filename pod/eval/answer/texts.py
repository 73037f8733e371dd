"""Texts through the cache that generation uses.

It tells how likely their tokens are, and what is predicted in their place.

Where a prompt ends, a method with a cache gets it *without its last token*, compresses, and then reads the
rest token by token, with the true tokens as input. So the first scored token is already predicted from the
compressed cache. (Scoring in one forward pass, as is common, would let every token see the whole context.)
Perplexity asks so for the end of position buckets that double in length.

A long text may be streamed: its first tokens are the prompt, and every token behind them is scored. Methods
whose mask is the same for a chunk and for single tokens then take chunks (`CHUNKED`: equal to the decode path
by test). For methods that compress while they read (im, imdc, fm; `prefill=streaming`) the whole text is one
prompt. A token is then scored given the memory so far and what stands before it in its own chunk. The first
token of a chunk is scored given the chunk before, which is compressed behind it (IMDC §4.4, Figure 5).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pod.eval.answer.methods import EvaluatedMethod, parts_of
from pod.eval.answer.reading import judge_ahead
from pod.eval.suites.buckets import Bucket
from pod.registry import METHODS

_LOGIT_ROWS = 512  # rows of logits in memory at once: 512 x 49152 x 4 B = 100 MB


def token_nll(lm_head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    """NLL in nats of `targets` [B, m], given the last hidden states [B, m, D].

    It is computed in at least fp32, and logits are never held all at once.
    """
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    parts = []
    for chunk, label in zip(rows.split(_LOGIT_ROWS), labels.split(_LOGIT_ROWS), strict=True):
        logits = lm_head(chunk)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts.append(F.cross_entropy(logits, label.to(logits.device), reduction="none"))
    return torch.cat(parts).view(targets.shape).to(targets.device)


@torch.no_grad()
def score_by_forward(model: Any, tokens: Tensor, buckets: list[Bucket]) -> list[Tensor]:
    """NLL of each bucket's scored tokens [B, scored] from one pass over `tokens` [B, n] without a cache.

    Only for methods whose decode path equals that pass (`EvaluatedMethod.one_shot`).
    """
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return [
        token_nll(
            model.lm_head, hidden[:, bucket.first - 1 : bucket.end - 1], tokens[:, bucket.first : bucket.end]
        )
        for bucket in buckets
    ]


@torch.no_grad()
def score_by_decode(model: Any, cache: Any, tokens: Tensor, bucket: Bucket) -> Tensor:
    """NLL of the bucket's scored tokens [B, scored] through `cache`.

    The prompt is read and compressed; then one token is fed at a time, as in generation.

    Args:
        cache: a new cache; on return it has seen `bucket.held_length` tokens of every row.
        tokens: [B, n >= bucket.end].
    """
    read_context(model, cache, tokens, bucket.first - 1)
    return nll_behind(model, cache, tokens, bucket.first, bucket.end)


def read_context(model: Any, cache: Any, tokens: Tensor, prompt: int) -> None:
    """Read the first `prompt` of `tokens` [B, n] as a prompt, after which a method compresses.

    The next token is held out.
    """
    model.model(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True)
    judge_ahead(model, cache, None, last=tokens[:, prompt : prompt + 1])


def hidden_behind(
    model: Any, cache: Any, tokens: Tensor, start: int, end: int, chunk: int = 1
) -> Iterator[Tensor]:
    """Last hidden states from which `tokens` [B, n] from position `start` to `end` are predicted.

    Args:
        cache: it has seen all before `start - 1`.
        chunk: tokens fed at once.
    """
    for position in range(start - 1, end - 1, chunk):
        fed = tokens[:, position : min(position + chunk, end - 1)]
        yield model.model(input_ids=fed, past_key_values=cache, use_cache=True).last_hidden_state


@torch.no_grad()
def nll_behind(model: Any, cache: Any, tokens: Tensor, start: int, end: int, chunk: int = 1) -> Tensor:
    """NLL (nats) [B, end - start] of `tokens` [B, n] from `start` to `end`, see `hidden_behind`."""
    parts = []
    for number, hidden in enumerate(hidden_behind(model, cache, tokens, start, end, chunk)):
        first = start + number * chunk
        parts.append(token_nll(model.lm_head, hidden, tokens[:, first : first + hidden.shape[1]]))
    return torch.cat(parts, dim=1)


def forward_error(model: Any, cache: Any, tokens: Tensor, bucket: Bucket, checked: int) -> float:
    """Largest difference in nats between the two ways of scoring a bucket.

    It is taken over the bucket's last `checked` tokens of `tokens` [B, n].
    """
    short = Bucket(start=bucket.start, end=bucket.end, first=max(bucket.first, bucket.end - checked))
    by_forward = score_by_forward(model, tokens[:, : bucket.end], [short])[0]
    return float((score_by_decode(model, cache, tokens, short) - by_forward).abs().max())


# -- greedy predictions of the next token at the end of a text ----------------------------------------


@torch.no_grad()
def predict_by_forward(model: Any, tokens: Tensor, last: int) -> Tensor:
    """The model's predictions [B, last] of the last tokens of `tokens` [B, n], in one pass.

    Each is made from everything before its token.
    """
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, -last:]).argmax(dim=-1).to(tokens.device)


@torch.no_grad()
def predict_by_decode(model: Any, cache: Any, tokens: Tensor, last: int) -> Tensor:
    """The same as `predict_by_forward` through `cache`, a new one.

    The prompt ends one token before the first prediction, and the rest is fed as in generation.
    """
    prompt = tokens.shape[1] - last - 1
    read_context(model, cache, tokens, prompt)
    states = hidden_behind(model, cache, tokens, prompt + 1, tokens.shape[1])
    return torch.cat([model.lm_head(hidden).argmax(dim=-1) for hidden in states], dim=1).to(tokens.device)


@torch.no_grad()
def predict_by_window(model: Any, tokens: Tensor, last: int, window: int, rows_at_once: int) -> Tensor:
    """The same from the nearest `window` tokens only. Nothing else is fed for each prediction."""
    end = tokens.shape[1]
    pieces = torch.stack([tokens[:, p - window : p] for p in range(end - last, end)], dim=1)
    found = [
        model.lm_head(model.model(input_ids=part, use_cache=False).last_hidden_state[:, -1]).argmax(dim=-1)
        for part in pieces.flatten(0, 1).split(rows_at_once)
    ]
    return torch.cat(found).view(len(tokens), last).to(tokens.device)


# -- streams ------------------------------------------------------------


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
    """Positions at which sums are kept.

    They are every `every` tokens behind the prompt, `common` (where some methods stop), and `length`.
    """
    ends = {*range(prompt + every, length, every), common, length}
    return tuple(sorted(end for end in ends if prompt < end <= length))


@torch.no_grad()
def stream_nll(
    model: Any,
    cache: Any,
    tokens: Tensor,
    prompt: int,
    ends: Sequence[int],
    chunk: int,
    reads_on: bool = False,
) -> tuple[list[Tensor], list[list[int]]]:
    """Summed NLL of every interval from position `prompt` on between `ends`, and the bytes held at its end.

    Args:
        cache: a new one. The first `prompt - 1` tokens of `tokens` [B, n] are its prompt: one token of the
            context is held out, so that the first score is already read from the compressed cache.
        chunk: tokens at once behind the prompt, see `chunk_of`.
        reads_on: the whole text is one prompt.
    Returns: sums in nats (fp64 [B]) and bytes for each row, one of each per interval.
    """
    if reads_on:
        cache.begin_prompt(ends[-1] - 1)
    read_context(model, cache, tokens, prompt - 1)
    sums, held = [], []
    for start, end in pairwise((prompt, *ends)):
        sums.append(nll_behind(model, cache, tokens, start, end, chunk).double().sum(dim=1))
        held.append(cache.nbytes_by_row())
    return sums, held
