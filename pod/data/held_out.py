"""Text that training never sees: for perplexity, and long sequences for similarity search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pod.data.args import DataArgs
from pod.data.tokenize import (
    BoundaryTokens,
    ReadReport,
    Split,
    load_tokenizer,
    select_documents,
    split_position,
    tokenize_documents,
)


def held_out_tokens(args: DataArgs, tokenizer: Any, num_tokens: int) -> np.ndarray:
    """Exactly `num_tokens` tokens of held-out documents, one after the other, the last one cut: int64 [num_tokens].

    Documents are ordered by the hash that decides the split: the same text for every seed, and a longer request starts
    with a shorter one. Raises `ValueError` when there are not enough held-out documents.
    """
    documents = _split_documents(args, tokenizer, "held_out")
    available = sum(len(tokens) for _, tokens in documents)
    if available < num_tokens:
        raise ValueError(
            f"{num_tokens} held-out tokens asked for, {available} available in {len(documents)} documents: "
            f"raise data.held_out_fraction (now {args.held_out_fraction}) or add sources"
        )
    return np.concatenate([tokens for _, tokens in documents])[:num_tokens].astype(np.int64)


def long_sequences(
    args_or_sources: DataArgs | Sequence[str],
    tokenizer: Any,
    num_sequences: int,
    sequence_length: int,
    seed: int = 0,
    *,
    split: Split | None = None,
    short_documents: Literal["concatenate", "skip"] = "concatenate",
) -> np.ndarray:
    """`num_sequences` disjoint sequences of `sequence_length` tokens, int64 [num_sequences, sequence_length].

    Documents of at least that length come first, one sequence from the start of each, then their further pieces; what
    is still missing is made of the remaining documents, concatenated in random order and cut (`short_documents=
    "concatenate"`), or is an error (`"skip"`). `split`: `held_out` (default for `DataArgs`: disjoint from the training
    rows), `train` or `all` (default for a plain list of sources). Deterministic in `seed`.
    """
    if isinstance(args_or_sources, DataArgs):
        args = args_or_sources
    else:
        args = DataArgs(sources=list(args_or_sources))
        split = split or "all"
    documents = [tokens for _, tokens in _split_documents(args, tokenizer, split or "held_out")]
    rng = np.random.default_rng(np.random.SeedSequence([seed, sequence_length]))
    documents = [documents[index] for index in rng.permutation(len(documents))]
    n = sequence_length
    starts = sorted(
        (start, index) for index, tokens in enumerate(documents) for start in range(0, len(tokens) - n + 1, n)
    )
    sequences = [documents[index][start : start + n] for start, index in starts[:num_sequences]]
    missing = num_sequences - len(sequences)
    if missing and short_documents == "concatenate":
        rest = np.concatenate(
            [np.empty(0, np.int32), *(tokens[len(tokens) // n * n :] for tokens in documents)]
        )
        sequences.extend(rest[: len(rest) // n * n].reshape(-1, n)[:missing])
    if len(sequences) < num_sequences:
        total = sum(map(len, documents))
        raise ValueError(
            f"{num_sequences} sequences of {n} tokens asked for, {len(sequences)} available ({len(documents)} documents, "
            f"{total} tokens): ask for fewer or shorter ones, add sources or raise data.held_out_fraction"
        )
    return np.stack(sequences).astype(np.int64)


def _split_documents(args: DataArgs, tokenizer: Any, split: Split) -> list[tuple[float, np.ndarray]]:
    """(place in the split, tokens int32 [n]) of all documents of `split`, in the order of their places."""
    if split == "held_out" and args.held_out_fraction == 0:
        raise ValueError(
            "data.held_out_fraction is 0, so nothing is held out: set it above 0 (0.05 = 5 % of the documents)"
        )
    tokenizer = load_tokenizer(tokenizer)
    boundary = BoundaryTokens.from_policy(args.boundary_tokens, tokenizer)
    documents = select_documents(args, split, ReadReport())
    placed = [
        (split_position(document.text), tokens)
        for document, tokens in tokenize_documents(documents, tokenizer, boundary)
    ]
    placed.sort(key=lambda item: item[0])
    return placed
