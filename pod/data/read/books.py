"""Long texts that are one record: split without loss where the source asks for it.

They are split into essays or chapters.
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
    """The place of a source spec, and how its `#essays` or `#chapters=<characters>` splits texts.

    The latter is None without a fragment.
    """
    match = _FRAGMENT.search(source)
    if match is None:
        return source, None
    place, kind = source[: match.start()], match.group(1)
    if kind == "essays":
        return place, split_essays
    return place, lambda text: split_chapters(text, int(match.group(2)))


def split_essays(text: str) -> list[str]:
    """Split where an essay opens with its date; nothing is lost.

    Examples of openings: "April 2012A palliative …", "March 2005\\n\\n…".
    """
    starts = [match.start() for match in ESSAY_OPENING.finditer(text)]
    starts = [0] + [start for start in starts if start > 0]
    return [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]


def split_chapters(text: str, characters: int) -> list[str]:
    """Pieces of at most `characters`; nothing is lost.

    Each ends at the last paragraph, line or word that fits.
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
