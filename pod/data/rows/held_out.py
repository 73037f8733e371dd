"""Held-out text: whole documents beside the prepared rows, which training never sees.

`long_sequences` cuts it, or other documents, into the long sequences that `pod explore` and perplexity need.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.read.records import short_reason
from pod.data.read.sources import load_documents
from pod.data.rows.manifest import REPAIR, check_file, read_manifest, token_dtype
from pod.data.tokens.tokenizers import BoundaryTokens, Encoder, tokenizer_sha256
from pod.files import sha256_file
from pod.tokenizer import check_ids, model_vocabulary

HELD_OUT_TOKENS, HELD_OUT_LENGTHS = "held_out.tokens.bin", "held_out.lengths.npy"


def write_held_out(folder: Path, documents: Iterable[np.ndarray], vocab_size: int) -> dict[str, Any]:
    """Write the held-out documents into the folder of the rows. Returns their manifest entry.

    Args:
        documents: token ids of each document, [n].
        vocab_size: decides the type of the ids on disk (see `token_dtype`).
    """
    dtype, lengths = token_dtype(vocab_size), []
    with open(folder / HELD_OUT_TOKENS, "wb") as stream:
        for tokens in documents:
            stream.write(tokens.astype(dtype, copy=False).tobytes())
            lengths.append(len(tokens))
    with open(folder / HELD_OUT_LENGTHS, "wb") as stream:
        np.lib.format.write_array(stream, np.array(lengths, dtype="<i8"), allow_pickle=False)
    return {
        "documents": len(lengths),
        "tokens": sum(lengths),
        "token_dtype": dtype.name,
        "files": [
            {"file": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
            for name in (HELD_OUT_TOKENS, HELD_OUT_LENGTHS)
        ],
    }


def held_out_documents(path: str | Path, tokenizer: Any = None) -> list[np.ndarray]:
    """The held-out documents of prepared data: token ids [n] of each, mapped from the file.

    They are sorted by their keys for the held-out split, a hash of their first words.

    Args:
        path: a folder that `pod data` wrote.
        tokenizer: the tokenizer that must have made the data; None does not check this.

    Raises:
        ValueError: in one line: the folder has no prepared data, files are damaged, another tokenizer made
            the data, or a document has tokens that the tokenizer's model lacks.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if tokenizer is not None and tokenizer_sha256(tokenizer) != manifest["tokenizer_sha256"]:
        raise ValueError(f"{folder} was prepared with another tokenizer than the model's: {REPAIR}")
    documents = map_held_out(folder, manifest)
    if tokenizer is not None and manifest["vocab_size"] > model_vocabulary(tokenizer):
        for one in documents:
            check_ids(tokenizer, np.unique(one))
    return documents


def map_held_out(folder: Path, manifest: dict[str, Any]) -> list[np.ndarray]:
    """Like `held_out_documents`, for a manifest that was read already. Tokenizers are not compared."""
    held_out = manifest.get("held_out") or {}
    if not held_out.get("documents"):
        return []
    for entry in held_out.get("files", []):
        check_file(folder, entry, verify=False)
    try:
        lengths = np.load(folder / HELD_OUT_LENGTHS, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{folder / HELD_OUT_LENGTHS} is not a readable .npy array ({short_reason(error)}): {REPAIR}"
        ) from None
    tokens = np.memmap(folder / HELD_OUT_TOKENS, dtype=held_out["token_dtype"], mode="r")
    if len(tokens) != lengths.sum():
        raise ValueError(
            f"{folder / HELD_OUT_TOKENS} has {len(tokens):,} tokens, but {HELD_OUT_LENGTHS} says "
            f"{lengths.sum():,}: {REPAIR}"
        )
    return np.split(tokens, np.cumsum(lengths)[:-1])


def source_documents(sources: Sequence[str], tokenizer: Any) -> list[np.ndarray]:
    """Token ids [n], uint32, of each document of text sources, which are written as in `data.sources`.

    The boundary tokens are those that the tokenizer adds by itself. Equal texts give one document.
    """
    boundary = BoundaryTokens.from_policy("tokenizer", tokenizer)
    encoder = Encoder(tokenizer)
    texts = dict.fromkeys(document.text for document in load_documents(sources))
    before = np.array(boundary.before, dtype=np.uint32)
    after = np.array(boundary.after, dtype=np.uint32)
    return [np.concatenate([before, tokens, after]) for tokens in encoder(list(texts))]


def long_sequences(
    documents: Sequence[np.ndarray], num_sequences: int, sequence_length: int, seed: int = 0
) -> np.ndarray:
    """`num_sequences` disjoint sequences of `sequence_length` tokens, int64 [num_sequences, sequence_length].

    The documents are taken in a random order that `seed` decides. First comes one sequence from the start of
    each document that is long enough, then the second sequence of each, and so on. If these are too few, the
    short documents and the ends of the long ones are concatenated and cut into the missing sequences.

    Raises:
        ValueError: the documents have too few tokens.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, sequence_length]))
    documents = [documents[index] for index in rng.permutation(len(documents))]
    n = sequence_length
    starts = sorted(
        (start, index) for index, tokens in enumerate(documents) for start in range(0, len(tokens) - n + 1, n)
    )
    sequences = [documents[index][start : start + n] for start, index in starts[:num_sequences]]
    if missing := num_sequences - len(sequences):
        rest = np.concatenate(list(_head((one[len(one) // n * n :] for one in documents), missing * n)))
        sequences.extend(rest[: len(rest) // n * n].reshape(-1, n))
    if len(sequences) < num_sequences:
        raise ValueError(
            f"asked for {num_sequences} sequences of {n} tokens, but only {len(sequences)} are available "
            f"({len(documents)} documents, {sum(map(len, documents))} tokens): ask for fewer or shorter "
            "ones, or prepare more text"
        )
    return np.stack(sequences).astype(np.int64)


def _head(documents: Iterable[np.ndarray], num_tokens: int) -> Iterator[np.ndarray]:
    """The first `num_tokens` tokens of `documents`."""
    yield np.empty(0, np.uint32)
    for tokens in documents:
        if num_tokens <= 0:
            return
        yield tokens[:num_tokens]
        num_tokens -= len(tokens)
