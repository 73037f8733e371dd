"""Prompts that are too long: drop their middle, start, end or a part of their document until they fit. Text in, text out."""

from collections.abc import Callable
from typing import Any, Literal

_ROUNDS = 8  # pieces of text that are joined anew may encode to a few tokens more than they had


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
    """The text within `room` tokens.

    drop: `middle` (both ends stay, half of the room each, as the official LongBench and InfiniteBench code does it), `start`, `end`, or
        `document` (only the document is cut).
    count: tokens of a text as the model reads it, special tokens included.
    span: the characters of the user's message in a rendered chat: only it is cut. None: the whole text may be.
    document: the document within the text; keep: which end of it stays.
    Raises: ValueError, in one line, when what may not be dropped exceeds the room.
    """
    if drop == "document":
        if not document:
            raise ValueError("too long, and the document that may be cut is not known")
        from pod.eval.lm.documents import cut_document

        return cut_document(text, document, keep, room, count)[0]
    start, end = span or (0, len(text))
    head, body, tail = text[:start], text[start:end], text[end:]
    pieces = _Pieces(tokenizer, body)
    kept = room - (count(text) - len(pieces))
    for _ in range(_ROUNDS):
        if kept < 1:
            break
        shorter = head + pieces.without(drop, kept) + tail
        excess = count(shorter) - room
        if excess <= 0:
            return shorter
        kept -= excess
    raise ValueError("too long, even without what may be dropped")


class _Pieces:
    """A text's tokens as pieces of the text. Offsets keep characters whole that decoding a part of their bytes would break."""

    def __init__(self, tokenizer: Any, text: str):
        self.tokenizer, self.text = tokenizer, text
        self.offsets: list[tuple[int, int]] | None = None
        if getattr(tokenizer, "is_fast", False):
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            self.ids, self.offsets = found["input_ids"], found["offset_mapping"]
        else:
            self.ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, tokens: int) -> str:
        if tokens < 1:
            return ""
        if self.offsets is None:
            return self.tokenizer.decode(self.ids[:tokens])
        return self.text[: self.offsets[tokens - 1][1]]

    def last(self, tokens: int) -> str:
        if tokens < 1:
            return ""
        if self.offsets is None:
            return self.tokenizer.decode(self.ids[-tokens:])
        return self.text[self.offsets[-tokens][0] :]

    def without(self, drop: str, kept: int) -> str:
        """What stays when `kept` tokens stay; an odd token of a dropped middle goes, too."""
        if drop == "middle":
            return self.first(kept // 2) + self.last(kept // 2)
        return self.last(kept) if drop == "start" else self.first(kept)
