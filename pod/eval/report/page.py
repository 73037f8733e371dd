"""Blocks of a report (tables, notes, pictures), and how they are written as HTML and as Markdown.

The HTML is one self-contained page. The templates are `page.*.jinja`.
"""

import base64
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import jinja2
from markupsafe import Markup, escape

# 0 to 1; dark text stays readable on all
_SCALE = ["#f2b8b0", "#f6cdb6", "#fae3bd", "#e2e4c0", "#c5dfbf", "#a9d9bd"]

# names of numbers that are no share, however small
_RAW = re.compile(r"nats|nll|bits|loss|second|MB|×|/s")
_OURS = {"pod", "mean of the tasks"}  # rows that stand out: PoD as it is meant to be used


@dataclass
class Cell:
    """One value of a table.

    Attributes:
        text: the value as it is printed.
        small: lines in small print under it, for example an interval.
        sort: the number that the column is sorted by.
        tone: the verdict in words, with which one line of the cell ends.
        shade: the background as CSS, a colour or a bar.
    """

    text: str
    small: str = ""
    sort: float | None = None
    tone: Literal["", "better", "worse", "failed"] = ""
    shade: str = ""


NONE = Cell("–")


def cell(
    value: Any,
    form: str | Callable[[Any], str] = "{}",
    small: str = "",
    *,
    ends: Sequence[float] | None = None,
    shade: str = "",
) -> Cell:
    """The cell of a number, sorted by the number; a dash for None.

    Args:
        form: a pattern or a function that prints the number.
        small: lines under it, if there are no `ends`.
        ends: its interval, which is printed under it in the same form.
        shade: background.
    """
    text = form.format if isinstance(form, str) else form
    interval = f"[{', '.join(map(text, ends))}]" if ends else small
    return NONE if value is None else Cell(text(value), interval, float(value), shade=shade)


def is_share(name: str, values: Iterable[float]) -> bool:
    """Whether numbers of this name are shares or relative changes. Those are printed in percent."""
    return not _RAW.search(name) and all(-1 <= value <= 1 for value in values)


def shade(share: float | None) -> str:
    """The colour of a share from 0 to 1; grey for what was not measured."""
    return "#f3f5f6" if share is None else _SCALE[min(len(_SCALE) - 1, max(0, int(share * len(_SCALE))))]


def bar(share: float) -> str:
    """A bar of a share of the cell's width, as its background."""
    return f"linear-gradient(90deg, #cfe8dc {share:.1%}, transparent 0)"


@dataclass
class Table:
    """A table with a title.

    Attributes:
        columns: the headings of the columns.
        kind: `cards` (few rows, many facts) makes a card of every row on a phone. In a `matrix` the first
            column stays while the rest scrolls. A `map` has shaded cells and stands beside others.
    """

    columns: list[str]
    rows: list[list[Cell]]
    title: str = ""
    kind: Literal["matrix", "cards", "map"] = "matrix"

    @property
    def ours(self) -> set[int]:
        """Numbers of the rows that are highlighted (`_OURS`)."""
        return {number for number, row in enumerate(self.rows) if row[0].text.partition(" · ")[0] in _OURS}

    def texts(self) -> list[dict[str, str]]:
        """The text of every row's cells, by the heading of their column."""
        return [dict(zip(self.columns, map(_oneline, row), strict=True)) for row in self.rows]


@dataclass
class Notes:
    """Sentences as a list.

    Attributes:
        alarm: whether they say that something went wrong.
    """

    lines: list[str]
    alarm: bool = False
    kind: ClassVar = "notes"


def listed(lines: list[str], alarm: bool = False) -> "list[Block]":
    """A block of sentences; no block if there are no sentences."""
    return [Notes(lines, alarm)] if lines else []


@dataclass
class Picture:
    """A picture with the title that is printed above it.

    Attributes:
        data: SVG text, or the bytes of a PNG.
        title: what it shows.
    """

    data: str | bytes
    title: str
    kind: ClassVar = "picture"

    @property
    def source(self) -> str:
        """The picture as a `data:` URL."""
        kind, data = ("svg+xml", self.data.encode()) if isinstance(self.data, str) else ("png", self.data)
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@dataclass
class Section:
    """A part of the report with a heading. It is left out when it has no blocks.

    Inside another section only its title shows, and a click opens its blocks; on paper they are open.
    """

    title: str
    blocks: "list[Block]"
    kind: ClassVar = "fold"


Block = Table | Notes | Picture | Section


def render(form: str, title: str, lead: str, origin: list[str], sections: list[Section]) -> str:
    """A report as `html`, one page without any other file, or as `md`, the same without pictures.

    Args:
        lead: the result in a sentence or two.
        origin: sentences about models, machine and versions.
        sections: those without blocks are left out.
    """
    shown = [section for section in sections if section.blocks]
    return TEMPLATES.get_template(f"page.{form}.jinja").render(
        title=title, lead=lead, origin=origin, sections=shown
    )


def _groups(blocks: list[Block]) -> list[tuple[str, list[Block]]]:
    """Neighbouring blocks of one kind together, because they may share a grid: (kind, blocks)."""
    return [(kind, list(found)) for kind, found in itertools.groupby(blocks, key=lambda block: block.kind)]


def _breakable(text: str) -> Markup:
    """A name that a narrow screen may break."""
    return Markup(escape(text).replace("_", Markup("_<wbr>")).replace("@", Markup("<wbr>@")))


def _oneline(cell: Cell) -> str:
    """A cell's text and small print in one line, for a Markdown table."""
    return " ".join([cell.text, *cell.small.split()]).strip().replace("|", "\\|")


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: str(name).endswith(".html.jinja"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
TEMPLATES.filters |= {"groups": _groups, "breakable": _breakable, "oneline": _oneline}
