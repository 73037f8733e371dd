"""Negative log-likelihood of a long text that is streamed through a method's cache.

The text's first tokens are one prompt, after which a method compresses; every token behind it is scored from the cache. Methods whose mask
is the same for a chunk and for single tokens take chunks (`CHUNKED`: equal to the decode path by test). For methods that compress while
they read (im, imdc, fm; `prefill=streaming`) the whole text is one prompt: a token is scored given the memory so far and what
stands before it in its own chunk, the first of a chunk given the chunk before, which is compressed behind it (IMDC §4.4, Figure 5). All
others take one token at a time, as in generation.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pod.eval.answer.methods import Method
from pod.eval.answer.perplexity import nll_behind, read_context

CHUNKED = frozenset({"full", "pod", "streamingllm", "lm_infinite", "wa", None})
"""Specs (None: the layout of the model itself) whose chunks equal single tokens."""


def reads_on(method: Method, options: dict[str, Any]) -> bool:
    """Whether a method with these options (`eval.method_options`) compresses while it reads a prompt."""
    return (
        re.split(r"[(+]", method.spec or "")[0] in ("im", "imdc", "fm")
        or options.get("prefill") == "streaming"
    )


def chunk_of(method: Method, chunk_size: int, options: dict[str, Any]) -> int:
    """Tokens that a method with these options may take at once behind the prompt.

    PoD's gate skip (`tau`) is decided when a single token is decoded, so that a layout with options takes single tokens.
    """
    exact = method.spec in CHUNKED and not (options and method.spec in ("pod", None))
    return chunk_size if exact or reads_on(method, options) else 1


def ends_of(prompt: int, length: int, every: int, common: int) -> tuple[int, ...]:
    """Positions at which sums are kept: every `every` tokens behind the prompt, `common` (where some methods stop) and `length`."""
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
) -> tuple[list[Tensor], list[int]]:
    """Summed NLL (nats, fp64 [B]) of every interval from position `prompt` on between `ends`, and the cache's bytes at its end.

    Args:
        cache: a new one; the first `prompt - 1` tokens of `tokens` [B, n] are its prompt: one token of the context is held out, so
            that already the first score is read from the compressed cache.
        chunk: tokens at once behind the prompt, see `chunk_of`; reads_on: the whole text is one prompt.
    """
    if reads_on:
        cache.begin_prompt(ends[-1] - 1)
    read_context(model, cache, tokens, prompt - 1)
    sums, held = [], []
    for start, end in pairwise((prompt, *ends)):
        sums.append(nll_behind(model, cache, tokens, start, end, chunk).double().sum(dim=1))
        held.append(cache.nbytes)
    return sums, held
