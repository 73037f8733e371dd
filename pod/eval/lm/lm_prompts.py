"""Prompts that are too long: drop their middle, start, end or a part of their document until they fit.

These functions take a text and return a text.

A document is cut by the rule of L-Eval (An et al., ACL 2024; Baselines/*-test.py of
github.com/OpenLMLab/LEval). As many of its words stay as tokens of room are left, then 250 words fewer at a
time until the prompt fits. Instructions and question stay whole. L-Eval measures the document alone. Here the
whole prompt is measured, so that it never exceeds what the model reads.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

WORD_STEP = 250
_SMALL_ROOM = 8 * WORD_STEP  # below this, steps of 250 words would drop most of the document

_ROUNDS = 8  # pieces of text that are joined anew may encode to a few tokens more than they had


class Unanswerable(ValueError):
    """A prompt cannot be asked. The message says why in one line; the request is then skipped."""


def shorten(
    tokenizer: Any,
    text: str,
    drop: str,
    room: int,
    count: Callable[[str], int],
    *,
    span: tuple[int, int] | None = None,
    document: str | None = None,
    keep: Literal["start", "end"] = "start",
) -> str:
    """A text that is too long, shortened to at most `room` tokens.

    Args:
        drop: `middle` (both ends stay, half of the room each, as the official LongBench and InfiniteBench
            code does it), `start`, `end`, or `document` (only the document is cut).
        count: tokens of a text as the model reads it, special tokens included.
        span: the characters of the user's message in a rendered chat: only it is cut. None: the whole text
            may be cut.
        document: the document within the text.
        keep: which end of the document stays.
    Raises:
        Unanswerable: when the parts that may not be dropped have more than `room` tokens.
    """
    if drop == "document":
        if not document:
            raise Unanswerable("too long, and the document that may be cut is not known")
        return cut_document(text, document, keep, room, count)
    start, end = span or (0, len(text))
    head = text[:start]
    body = text[start:end]
    tail = text[end:]
    pieces = _Pieces(tokenizer, body)
    kept = room - (count(text) - len(pieces.ids))
    for _ in range(_ROUNDS):
        if kept < 1:
            break
        shorter = head + pieces.without(drop, kept) + tail
        excess = count(shorter) - room
        if excess <= 0:
            return shorter
        kept -= excess
    raise Unanswerable("too long, even without what may be dropped")


class _Pieces:
    """Cuts a text between its tokens.

    A token may hold only some of a character's bytes, and decoding it would break the character. Offsets of
    a fast tokenizer keep characters whole.
    """

    def __init__(self, tokenizer: Any, text: str):
        has_offsets = bool(getattr(tokenizer, "is_fast", False))
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=has_offsets)
        self.tokenizer, self.text, self.ids = tokenizer, text, found["input_ids"]
        self.offsets = found["offset_mapping"] if has_offsets else None

    def first(self, tokens: int) -> str:
        """The text of the first `tokens` tokens."""
        if self.offsets is None:
            return self.tokenizer.decode(self.ids[:tokens])
        return self.text[: self.offsets[tokens - 1][1]] if tokens else ""

    def last(self, tokens: int) -> str:
        """The text of the last `tokens` tokens."""
        if self.offsets is None:
            return self.tokenizer.decode(self.ids[len(self.ids) - tokens :])
        return self.text[self.offsets[-tokens][0] :] if tokens else ""

    def without(self, drop: str, kept: int) -> str:
        """The text of the `kept` tokens that stay when its middle, start or end is dropped.

        Where the middle is dropped and `kept` is odd, one token less stays.
        """
        if drop == "middle":
            return self.first(kept // 2) + self.last(kept // 2)
        return self.last(kept) if drop == "start" else self.first(kept)


def cut_document(
    prompt: str, document: str, keep: Literal["start", "end"], room: int, count: Callable[[str], int]
) -> str:
    """The prompt with about as many words (between single blanks) of its document as fit.

    If not even the smallest number of words that is tried fits, as in a text with hardly a blank, the
    document is cut by characters.

    Args:
        prompt: the final text, chat template included.
        document: as it stands in the prompt (outer white space may be missing there).
        keep: the end of the document that stays.
        room: tokens that the prompt may have.
        count: the number of tokens of a text, special tokens included.
    Raises:
        Unanswerable: when the document is not in the prompt, or the prompt is too long even without it.
    """
    if count(prompt) <= room:
        return prompt
    if document not in prompt:
        document = document.strip()
    if not document or document not in prompt:
        raise Unanswerable(
            "the prompt is too long and does not contain its document unchanged, so nothing can be cut"
        )
    before, _, after = prompt.partition(document)
    rest = count(before + after)
    if rest >= room:
        raise Unanswerable(
            f"the prompt has {rest} tokens without its document, and only {room} tokens may be read"
        )

    def cut(parts: Sequence[str], number: int, glue: str) -> str:
        kept = parts[:number] if keep == "start" else parts[len(parts) - number :]
        return before + glue.join(kept) + after

    words = document.split(" ")
    most = min(room - rest, len(words))
    step = WORD_STEP if most >= _SMALL_ROOM else max(1, most // 8)
    for number in range(most, 0, -step):
        shorter = cut(words, number, " ")
        if count(shorter) <= room:
            return shorter
    # Not even a few words fit: bisect for the most characters that do. The prompt fits without any.
    low, high = 0, len(document) - 1
    while low < high:
        size = (low + high + 1) // 2
        if count(cut(document, size, "")) <= room:
            low = size
        else:
            high = size - 1
    return cut(document, low, "")
