"""Splits a long text that is one record, such as a book, into essays or chapters if the source asks for it.

No character is lost.
"""

import re
from collections.abc import Callable

_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = rf"{_MONTH},? (?:19|20)\d\d"
# An essay opens with its date. The date is glued to the end of the essay before it, and often to its own
# first word.
ESSAY_OPENING = re.compile(rf"(?:(?<=\n)|(?<=\S)){_DATE}(?:, (?:rev\.? )?{_DATE})*(?=[A-Z\"'(\[_*]|[ \t]*\n)")
_FRAGMENT = re.compile(r"#(essays|chapters=([1-9]\d*))$")

Splitter = Callable[[str], list[str]]


def split_fragment(source: str) -> tuple[str, Splitter | None]:
    """Cut the fragment, `#essays` or `#chapters=<characters>`, off a source.

    Returns:
        The source without its fragment, and the function that splits each of its texts; None without a
        fragment.
    """
    match = _FRAGMENT.search(source)
    if match is None:
        return source, None
    without_fragment = source[: match.start()]
    kind = match.group(1)
    if kind == "essays":
        return without_fragment, split_essays
    return without_fragment, lambda text: split_chapters(text, int(match.group(2)))


def split_essays(text: str) -> list[str]:
    """Split where an essay opens with its date; nothing is lost.

    Examples of openings: "April 2012A palliative …", "March 2005\\n\\n…".
    """
    starts = [match.start() for match in ESSAY_OPENING.finditer(text)]
    starts = [0] + [start for start in starts if start > 0]
    return [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]


def split_chapters(text: str, characters: int) -> list[str]:
    """Split into pieces of at most `characters`; nothing is lost.

    A piece ends after the last paragraph in its second half, else after the last line or the last word there,
    else after `characters`.
    """
    pieces, start = [], 0
    while len(text) - start > characters:
        limit = start + characters
        for mark in ("\n\n", "\n", " "):
            stop = text.rfind(mark, start + characters // 2, limit)
            if stop >= 0:
                stop += len(mark)
                break
        else:
            stop = limit
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]
