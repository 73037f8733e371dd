"""Text that training never sees: for perplexity, and long sequences for similarity search."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pod.data.args import DataArgs
from pod.data.documents import Document, SourceReport
from pod.data.job import Job, batches, reading_request
from pod.data.manifest import read_manifest
from pod.data.publish import HELD_OUT_LENGTHS, HELD_OUT_TOKENS
from pod.data.tokenizers import identity

Split = Literal["train", "held_out", "all"]


def long_sequences(
    args_or_sources: DataArgs | Sequence[str],
    tokenizer: Any,
    num_sequences: int,
    sequence_length: int,
    seed: int = 0,
    *,
    split: Split | None = None,
    short_documents: Literal["concatenate", "skip"] = "concatenate",
    prepared: str | Path | None = None,
) -> np.ndarray:
    """`num_sequences` disjoint sequences of `sequence_length` tokens, int64 [num_sequences, sequence_length].

    Documents of at least that length come first, one sequence from the start of each, then their further pieces; what
    is still missing is made of the remaining documents, concatenated in random order and cut (`short_documents=
    "concatenate"`), or is an error (`"skip"`). `split`: `held_out` (default for `DataArgs`: disjoint from the training
    rows), `train` or `all` (default for a plain list of sources). Deterministic in `seed`. `prepared` is a folder of prepared
    data: when it was made of the same sources and settings, its held-out text is taken instead of reading them again.
    Raises `ValueError` when there is too little text.
    """
    if isinstance(args_or_sources, DataArgs):
        args = args_or_sources
    else:
        args = DataArgs(sources=list(args_or_sources))
        split = split or "all"
    documents = _split_documents(args, tokenizer, split or "held_out", prepared)
    rng = np.random.default_rng(np.random.SeedSequence([seed, sequence_length]))
    documents = [documents[index] for index in rng.permutation(len(documents))]
    n = sequence_length
    starts = sorted(
        (start, index) for index, tokens in enumerate(documents) for start in range(0, len(tokens) - n + 1, n)
    )
    sequences = [documents[index][start : start + n] for start, index in starts[:num_sequences]]
    missing = num_sequences - len(sequences)
    if missing and short_documents == "concatenate":
        rest = _head((tokens[len(tokens) // n * n :] for tokens in documents), missing * n)
        sequences.extend(rest[: len(rest) // n * n].reshape(-1, n)[:missing])
    if len(sequences) < num_sequences:
        total = sum(map(len, documents))
        raise ValueError(
            f"{num_sequences} sequences of {n} tokens asked for, {len(sequences)} available ({len(documents)} documents, "
            f"{total} tokens): ask for fewer or shorter ones, add sources or raise data.held_out_fraction"
        )
    return np.stack(sequences).astype(np.int64)


def _head(documents: Iterable[np.ndarray], num_tokens: int) -> np.ndarray:
    """The first `num_tokens` tokens of `documents`, one after the other; fewer when there are not as many."""
    taken = [np.empty(0, np.uint32)]
    for tokens in documents:
        if num_tokens <= 0:
            break
        taken.append(tokens[:num_tokens])
        num_tokens -= len(taken[-1])
    return np.concatenate(taken)


def _split_documents(
    args: DataArgs, tokenizer: Any, split: Split, prepared: str | Path | None
) -> list[np.ndarray]:
    """Tokens [n] of all documents of `split`, in the order of their places."""
    if split == "held_out" and args.held_out_fraction == 0:
        raise ValueError(
            "data.held_out_fraction is 0, so nothing is held out: set it above 0 (0.05 = 5 % of the documents)"
        )
    job = Job(args, tokenizer, "held-out")  # only reads: nothing is written there
    if split == "held_out":
        found = _of_prepared(job, prepared)
        if found is not None:
            return found
    placed = []
    for batch in batches(_chosen(job, split)):
        placed.extend(zip((identity(document)[0] for document in batch), job.encode(batch), strict=True))
    placed.sort(key=lambda item: item[0])
    return [tokens for _, tokens in placed]


def _of_prepared(job: Job, prepared: str | Path | None) -> list[np.ndarray] | None:
    """The held-out documents that lie beside prepared rows; None when they are of other sources or settings, or not whole."""
    if prepared is None or not Path(prepared).is_dir():
        return None
    folder = Path(prepared)
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return None
    wanted = reading_request(job.args, job.tokenizer, job.units())
    if (manifest.get("request") or {}).get("reading") != json.loads(json.dumps(wanted)):
        return None
    held_out = manifest["held_out"]
    for entry in held_out["files"]:
        file = folder / entry["file"]
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            return None
    lengths = np.load(folder / HELD_OUT_LENGTHS, allow_pickle=False)
    if not len(lengths):
        return []
    tokens = np.memmap(folder / HELD_OUT_TOKENS, dtype=held_out["token_dtype"], mode="r")
    return np.split(tokens, np.cumsum(lengths)[:-1])


def _chosen(job: Job, split: Split) -> Iterator[Document]:
    """The documents of `split` in reading order, as preparation chooses them."""
    args, seen = job.args, set()
    reports = [SourceReport(spec) for spec in args.sources]
    for unit in job.units():
        report = SourceReport(args.sources[unit.source])
        read = reports[unit.source].documents
        for number, document in enumerate(job.documents_of(unit, report), start=read + 1):
            if args.max_documents is not None and number > args.max_documents:
                break
            place, digest = identity(document)
            if args.deduplicate and digest in seen:
                continue
            seen.add(digest)
            if split == "all" or (place / 2**64 < args.held_out_fraction) == (split == "held_out"):
                yield document
        reports[unit.source].add(report)
    job.check_reports(reports)
