"""Prompts around a document that is too long: the document is cut, the instructions and the question stay whole.

The rule is that of L-Eval (An et al., ACL 2024; Baselines/*-test.py of github.com/OpenLMLab/LEval): words are dropped from one end, down
to as many words as there are tokens of room, then 250 fewer until it fits. There the document alone is measured; here the whole prompt
is, so that it never exceeds what the model reads.
"""

from collections.abc import Callable, Iterator
from typing import Literal

WORD_STEP = 250
_SMALL_ROOM = 8 * WORD_STEP  # below, steps of 250 words would drop most of the document


def cut_document(
    prompt: str, document: str, keep: Literal["start", "end"], room: int, count: Callable[[str], int]
) -> tuple[str, int]:
    """The prompt with as much of its document as fits, and how many words (between single blanks) were dropped.

    Args:
        prompt: the final text, chat template included; document: as it stands in the prompt (outer white space may be missing there).
        keep: the end of the document that stays.
        room: tokens that the prompt may have; count: the number of tokens of a text, special tokens included.
    Raises: ValueError, in one line, when the document is not in the prompt or the prompt is too long even without it.
    """
    if count(prompt) <= room:
        return prompt, 0
    if document not in prompt:
        document = document.strip()
    if not document or document not in prompt:
        raise ValueError(
            "the prompt is too long and does not hold its document as it is, so nothing can be cut"
        )
    before, _, after = prompt.partition(document)
    rest = count(before + after)
    if rest >= room:
        raise ValueError(
            f"the prompt has {rest} tokens without its document, and only {room} tokens may be read"
        )
    words = document.split(" ")
    for number in _word_counts(min(room - rest, len(words))):
        kept = words[:number] if keep == "start" else words[-number:]
        shorter = before + " ".join(kept) + after
        if count(shorter) <= room:
            return shorter, len(words) - number
    return _cut_characters(before, document, after, keep, room, count)


def _word_counts(most: int) -> Iterator[int]:
    step = WORD_STEP if most >= _SMALL_ROOM else max(1, most // 8)
    yield from range(most, 0, -step)


def _cut_characters(
    before: str, document: str, after: str, keep: str, room: int, count: Callable[[str], int]
) -> tuple[str, int]:
    """For text with hardly a blank: the longest piece of it that bisection finds."""
    low, high = 0, len(document)
    while high - low > 1:
        middle = (low + high) // 2
        piece = document[:middle] if keep == "start" else document[-middle:]
        low, high = (middle, high) if count(before + piece + after) <= room else (low, middle)
    piece = document[:low] if keep == "start" else document[len(document) - low :]
    return before + piece + after, len(document.split(" ")) - len(piece.split(" "))
