"""Tokenizers: loading, identity, boundary tokens, encoding; and what tells documents apart."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.documents import Document

OPENING_WORDS = 48
OPENING_TOKENS = 64
PROBE = "Zwölf 12,345 naïve café — def f(x):\n\treturn x**2  # 中文 😀 I'll we'VE\r\n\n   end"
_WORD = re.compile(r"[^\W_]+")


def load_tokenizer(tokenizer: Any, gguf_file: str | None = None) -> Any:
    """`tokenizer` itself if it is one already, else the one of a folder or hub id (`AutoTokenizer`)."""
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer, **({"gguf_file": gguf_file} if gguf_file else {}))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"no tokenizer in {str(tokenizer)!r} ({reason}): give its folder or hub id"
        ) from error


def tokenizer_sha256(tokenizer: Any) -> str:
    """Identity of a tokenizer as 64 hex digits: its vocabulary and what it makes of a fixed probe text.

    A function of behaviour, not of files, so that a tokenizer keeps its identity when it is saved and loaded again.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    probe = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return hashlib.sha256(json.dumps([vocabulary, list(probe)], ensure_ascii=True).encode()).hexdigest()


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest token id."""
    return max(tokenizer.get_vocab().values()) + 1


@dataclass(frozen=True)
class BoundaryTokens:
    """Token ids put before and after each document."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def from_policy(cls, policy: str, tokenizer: Any) -> BoundaryTokens:
        """The ids for `DataArgs.boundary_tokens`; `ValueError` when the tokenizer lacks the token asked for."""
        if policy == "tokenizer":
            plain = tokenizer("a", add_special_tokens=False)["input_ids"]
            full = tokenizer("a", add_special_tokens=True)["input_ids"]
            start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
            return cls(tuple(full[:start]), tuple(full[start + len(plain) :]))
        for name in ("bos", "eos"):
            if name in policy and getattr(tokenizer, f"{name}_token_id", None) is None:
                raise ValueError(
                    f"boundary_tokens={policy!r} but the tokenizer has no {name} token: use 'tokenizer' or 'none'"
                )
        before = (tokenizer.bos_token_id,) if "bos" in policy else ()
        after = (tokenizer.eos_token_id,) if "eos" in policy else ()
        return cls(before, after)


class Encoder:
    """Texts → token ids, the same as `tokenizer(text, add_special_tokens=False)`, whatever the tokenizer's state says.

    Fast tokenizers are called without the offsets that nobody here reads, half as much time again. Truncation and padding
    that a `tokenizer.json` or an earlier call left behind do not apply.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32 [n] each, without special tokens around them, in the order given.

        A pair of surrogates becomes its character, a lone one U+FFFD: UTF-8 has neither.
        """
        if not texts:
            return []
        try:
            encoded = self._encode(list(texts))
        except (TypeError, UnicodeError):
            repaired = [without_surrogates(text) for text in texts]
            if repaired == list(texts):
                raise
            encoded = self._encode(repaired)
        return [np.array(ids, dtype=np.uint32) for ids in encoded]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self._backend is None:
            return self.tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                verbose=False,  # silences "longer than the model's maximum", which packing takes care of
            )["input_ids"]
        # Any call of the tokenizer in between may have set them.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return [item.ids for item in self._backend.encode_batch_fast(texts, add_special_tokens=False)]


def _plain_backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` of a fast tokenizer that does nothing else to a text, or None."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.set_truncation_and_padding is PreTrainedTokenizerFast.set_truncation_and_padding
        and not hasattr(tokenizer, "_switch_to_input_mode")
    )
    return tokenizer.backend_tokenizer if plain else None


def without_surrogates(text: str) -> str:
    """`text` as UTF-8 can hold it: pairs of surrogates joined to their character, lone ones as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def identity(document: Document) -> tuple[int, tuple[int, int]]:
    """(place in the held-out split, digest): what decides about a document and its copies.

    `place` in [0, 2**64) comes from the opening: the first 48 words, case, marks and spacing ignored, so that copies that
    differ in layout or at the end stand at the same place; a document that came as tokens is placed by its first 64.
    `digest` is the first 16 bytes of the SHA-256 of the whole text or of its tokens (uint32, little-endian) as two
    little-endian uint64.
    """
    if document.tokens is None:
        opening = opening_bytes(document.text)
        whole = document.text.encode("utf-8", "surrogatepass")
    else:
        tokens = np.ascontiguousarray(document.tokens, dtype="<u4")
        opening, whole = tokens[:OPENING_TOKENS].tobytes(), tokens.tobytes()
    digest = hashlib.sha256(whole).digest()
    place = int.from_bytes(hashlib.sha256(opening).digest()[:8], "big")
    return place, (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little"))


def opening_bytes(text: str) -> bytes:
    """The first 48 words of a text in lower case, letters and digits only, one space between them, as UTF-8."""
    words = _WORD.finditer(text[: OPENING_WORDS * 40].lower())
    return " ".join(word.group() for word in islice(words, OPENING_WORDS)).encode("utf-8", "surrogatepass")
