"""Tokenizers: identity, boundary tokens, encoding. Also the hashes by which documents are compared."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from pod.data.read.documents import Document
from pod.tokenizer import check_ids

SLACK_TOKENS = 16
"""Tokens that a tokenizer may add to any text, such as SentencePiece's first space."""
OPENING_WORDS = 48
"""Words of a text that make up its opening (see `Identity.held_out_key`)."""
OPENING_TOKENS = 64
"""Tokens that make up the opening of a document that came as token ids."""
PROBE = "Zwölf 12,345 naïve café — def f(x):\n\treturn x**2  # 中文 😀 I'll we'VE\r\n\n   end"
"""The text that `tokenizer_sha256` encodes."""
_WORD = re.compile(r"[^\W_]+")
_ASCII_WORDS = bytes(number if chr(number).isalnum() and number < 128 else 32 for number in range(256))
"""Table for `bytes.translate`: every byte that is no letter or digit of ASCII becomes a space."""


def tokenizer_sha256(tokenizer: Any) -> str:
    """Identity of a tokenizer as 64 hex digits: its vocabulary and what it makes of a fixed probe text.

    It depends on what the tokenizer does, not on its files. So a tokenizer keeps its identity when it is
    saved and loaded again.
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
        """The ids for a value of `DataArgs.boundary_tokens`.

        Raises:
            ValueError: the tokenizer has no such token, the model has no embedding for it, or with
                "tokenizer", it cannot be told what the tokenizer adds.
        """
        if policy == "tokenizer":
            plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
            full = list(tokenizer("a", add_special_tokens=True)["input_ids"])
            starts = [start for start in range(len(full)) if full[start : start + len(plain)] == plain]
            if not starts:
                raise ValueError(
                    "boundary_tokens='tokenizer' does not work with this tokenizer: it encodes 'a' as "
                    f"{full} with special tokens and as {plain} without them: set bos, eos, bos+eos or none"
                )
            return cls(tuple(full[: starts[0]]), tuple(full[starts[0] + len(plain) :]))
        for name in ("bos", "eos"):
            if name in policy and getattr(tokenizer, f"{name}_token_id", None) is None:
                raise ValueError(
                    f"boundary_tokens={policy!r} but the tokenizer has no {name} token: "
                    "use 'tokenizer' or 'none'"
                )
        before = (tokenizer.bos_token_id,) if "bos" in policy else ()
        after = (tokenizer.eos_token_id,) if "eos" in policy else ()
        check_ids(tokenizer, (*before, *after))
        return cls(before, after)


class Encoder:
    """Turns texts into token ids, as `tokenizer(text, add_special_tokens=False)` does.

    The tokenizer's state does not matter: truncation and padding that a `tokenizer.json` or an earlier call
    left behind do not apply. Fast tokenizers are called without offsets, which nobody here reads. This makes
    them half as fast again.

    A text may spell a special token, as a web page does that shows `</s>`. transformers' tokenizers turn it
    into the special token itself. Nearly all training pipelines leave it so, and a corpus that was written
    with a chat template needs it. But in text from unknown sources it ends the document, for the model, in
    the middle of the page. To prevent this, save the tokenizer with `split_special_tokens = True` (it is
    honoured here), or leave such documents out with `document_filter`.

    Attributes:
        holds_special: for each text of the last call, whether it became a special token somewhere.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.holds_special: list[bool] = []
        self._fast = _is_plainly_fast(tokenizer)
        plain = self._fast and tokenizer.backend_tokenizer.normalizer is None
        self._growth = 1 if plain else 12
        self._is_special, self._unknown = _special_tokens(tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32 [n] each, without special tokens around them, in the order given.

        UTF-8 has no surrogates: a pair of them becomes its character, a single one U+FFFD.

        Raises:
            ValueError: a text has a token that the tokenizer's model has no embedding for.
        """
        self.holds_special = [False] * len(texts)
        if not texts:
            return []
        try:
            encoded = self._encode(list(texts))
        except (TypeError, UnicodeError):
            # Only texts with surrogates are tried again. Anything that is not a text stays an error.
            if not all(isinstance(text, str) for text in texts):
                raise
            encoded = self._encode([without_surrogates(text) for text in texts])
        for ids in encoded:
            check_ids(self.tokenizer, ids)
        arrays = [np.array(ids, dtype=np.uint32) for ids in encoded]
        if len(self._is_special):
            self.holds_special = list(map(self._holds_special, texts, arrays))
        return arrays

    def most_tokens(self, num_bytes: int) -> int:
        """An upper bound for the tokens of a text of `num_bytes` bytes of UTF-8.

        A token has at least one byte, unless the tokenizer rewrites the text: Unicode's compatibility forms
        make a text at most 11 times longer.
        """
        return num_bytes * self._growth + SLACK_TOKENS

    def _holds_special(self, text: str, ids: np.ndarray) -> bool:
        # The unknown token also stands for unknown words. It counts only where the text spells its name.
        unknown = self._unknown is not None and self._unknown[0] in text and self._unknown[1] in ids
        return bool(unknown or self._is_special[ids].any())

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not self._fast:
            return self.tokenizer(
                texts,
                add_special_tokens=False,
                return_attention_mask=False,
                verbose=False,  # silences "longer than the model's maximum", which packing takes care of
            )["input_ids"]
        # The state is set each time, because any other call of the tokenizer may have changed it.
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        return [item.ids for item in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _is_plainly_fast(tokenizer: Any) -> bool:
    """Whether calling the tokenizer does nothing but call its `tokenizers.Tokenizer`."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.set_truncation_and_padding is PreTrainedTokenizerFast.set_truncation_and_padding
        and not hasattr(tokenizer, "_switch_to_input_mode")
    )


def _special_tokens(tokenizer: Any) -> tuple[np.ndarray, tuple[str, int] | None]:
    """The special tokens that a text can become.

    Returns:
        Whether each id is a special token other than the unknown token, bool [vocabulary], or [0] when the
        tokenizer has none; and text and id of the unknown token, or None when it is no special token.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: token.content for number, token in added.items() if token.special}
    if not special:
        return np.zeros(0, dtype=bool), None
    table = np.zeros(max(vocabulary_size(tokenizer), max(special) + 1), dtype=bool)
    table[list(special)] = True
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None or unknown not in special:
        return table, None
    table[unknown] = False
    return table, (special[unknown], unknown)


def without_surrogates(text: str) -> str:
    """`text` as UTF-8 can hold it: a pair of surrogates becomes its character, a single one U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Identity(NamedTuple):
    """Two hashes and the size of a document. They decide if it is held out or drawn, and what is a copy."""

    held_out_key: int
    """The documents with the smallest of these keys are held out, [0, 2**64).

    It is a hash of the opening: the first 48 words, with case, marks and spacing ignored. So copies that
    differ in layout or at the end have the same key, and are all held out or all trained on. For a document
    that came as tokens it is a hash of the first 64 tokens.
    """
    digest: int
    """The first 8 bytes of the SHA-256 of the whole text (UTF-8) or of its tokens (uint32, little-endian)."""
    size: int
    """Bytes of the text in UTF-8, or the number of tokens."""


def identity(document: Document) -> Identity:
    """Held-out key, digest and size of a document."""
    if document.tokens is None:
        opening = opening_bytes(document.text)
        whole = document.text.encode("utf-8", "surrogatepass")
        size = len(whole)
    else:
        tokens = np.ascontiguousarray(document.tokens, dtype="<u4")
        opening = tokens[:OPENING_TOKENS].tobytes()
        whole = tokens.tobytes()
        size = len(tokens)
    digest = hashlib.sha256(whole).digest()
    held_out_key = int.from_bytes(hashlib.sha256(opening).digest()[:8], "big")
    return Identity(held_out_key, int.from_bytes(digest[:8], "little"), size)


def opening_bytes(text: str) -> bytes:
    """The first 48 words of a text in lower case, as UTF-8.

    A word is made of letters and digits only. One space stands between two words.
    """
    head = text[: OPENING_WORDS * 40].lower()
    if head.isascii():  # five times as fast
        return b" ".join(head.encode().translate(_ASCII_WORDS).split(maxsplit=OPENING_WORDS)[:OPENING_WORDS])
    words = _WORD.finditer(head)
    return " ".join(word.group() for word in islice(words, OPENING_WORDS)).encode("utf-8", "surrogatepass")
