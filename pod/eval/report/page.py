"""Blocks of a report (tables, notes, pictures, heat maps) and their two forms: one self-contained HTML page, and Markdown."""

import base64
import html
import itertools
from dataclasses import dataclass, field
from typing import Literal

_SCALE = [
    "#f2b8b0",
    "#f6cdb6",
    "#fae3bd",
    "#e2e4c0",
    "#c5dfbf",
    "#a9d9bd",
]  # 0 to 1; dark text stays readable on all


@dataclass
class Cell:
    """One value of a table. small: lines under it (an interval); sort: what the column is sorted by; tone: better or worse than the base."""

    text: str
    small: str = ""
    sort: float | None = None
    tone: Literal["", "better", "worse", "failed"] = ""


@dataclass
class Table:
    """columns: heads; ours: numbers of the rows that stand out; cards: on a phone every row is a card (few rows, many facts), else the
    first column stays while the rest scrolls."""

    columns: list[str]
    rows: list[list[Cell]]
    title: str = ""
    ours: set[int] = field(default_factory=set)
    cards: bool = False


@dataclass
class HeatMap:
    """Shares (0 to 1, None = not measured) with the text of each cell, rows by columns."""

    title: str
    corner: str
    columns: list[str]
    rows: list[str]
    shares: list[list[float | None]]
    texts: list[list[str]]


@dataclass
class Notes:
    """Sentences as a list. alarm: something went wrong."""

    lines: list[str]
    alarm: bool = False


@dataclass
class Picture:
    """data: SVG text or the bytes of a PNG. title: printed above, if any; label: what it shows."""

    data: str | bytes
    label: str
    title: str = ""


@dataclass
class Fold:
    """Blocks behind a line that opens them; open on paper."""

    title: str
    blocks: "list[Block]"


Block = Table | HeatMap | Notes | Picture | Fold


@dataclass
class Section:
    """A headed part of the report; left out when it has no blocks."""

    title: str
    blocks: list[Block]


@dataclass
class Report:
    """A whole report. lead: the result in a sentence or two; origin: models, machine, versions."""

    title: str
    lead: str
    origin: list[str]
    sections: list[Section]

    def html(self) -> str:
        """One page without any other file."""
        shown = [section for section in self.sections if section.blocks]
        links = "".join(
            f'<a href="#s{number}">{html.escape(section.title)}</a>' for number, section in enumerate(shown)
        )
        body = "".join(
            f'<h2 id="s{number}">{html.escape(section.title)}</h2>{_all_html(section.blocks)}'
            for number, section in enumerate(shown)
        )
        origin = "".join(f'<p class="origin">{html.escape(line)}</p>' for line in self.origin)
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{_CSS}</style></head><body><h1>{html.escape(self.title)}</h1>"
            f'<p class="lead">{html.escape(self.lead)}</p>{origin}'
            f"{f'<nav>{links}</nav>' if len(shown) > 3 else ''}{body}<script>{_SCRIPT}</script></body></html>\n"
        )

    def markdown(self) -> str:
        """The same without pictures."""
        lines = [f"# {self.title}", "", self.lead]
        for line in self.origin:
            lines += ["", line]
        for section in self.sections:
            if section.blocks:
                lines += ["", f"## {section.title}"]
                lines += _all_markdown(section.blocks, 3)
        return "\n".join(lines) + "\n"


def text_table(columns: list[str], rows: list[list[str]], **more) -> Table:
    """A table of plain text."""
    return Table(columns, [[Cell(text) for text in row] for row in rows], **more)


# -- HTML ----------------------------------------------------------------------------------------------------


def _all_html(blocks: list[Block]) -> str:
    parts: list[str] = []
    for kind, group in itertools.groupby(blocks, key=_side_by_side):
        inner = "".join(_html(block) for block in group)
        parts.append(f'<div class="{kind}">{inner}</div>' if kind else inner)
    return "".join(parts)


def _side_by_side(block: Block) -> str:
    """The grid that neighbours of a kind share where the page is wide."""
    return "maps" if isinstance(block, HeatMap) else "pictures" if isinstance(block, Picture) else ""


def _html(block: Block) -> str:
    if isinstance(block, Table):
        return _table_html(block)
    if isinstance(block, HeatMap):
        return _heat_html(block)
    if isinstance(block, Notes):
        items = "".join(f"<li>{html.escape(line)}</li>" for line in block.lines)
        alarm = ' class="failed"' if block.alarm else ""
        return f"<ul{alarm}>{items}</ul>" if items else ""
    if isinstance(block, Fold):
        inner = _all_html(block.blocks)
        return f"<details><summary>{html.escape(block.title)}</summary>{inner}</details>"
    return _picture_html(block)


def _picture_html(block: Picture) -> str:
    svg = isinstance(block.data, str)
    data = block.data.encode() if isinstance(block.data, str) else block.data
    kind = "image/svg+xml" if svg else "image/png"
    title = f"<h3>{html.escape(block.title)}</h3>" if block.title else ""
    source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return f'<div>{title}<img alt="{html.escape(block.label)}" src="{source}"></div>'


def _table_html(table: Table) -> str:
    if not table.rows:
        return ""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = []
    for number, row in enumerate(table.rows):
        kind = ' class="ours"' if number in table.ours else ""
        cells = (_cell_html(column, cell) for column, cell in zip(table.columns, row, strict=True))
        body.append(f"<tr{kind}>{''.join(cells)}</tr>")
    title = f"<h3>{html.escape(table.title)}</h3>" if table.title else ""
    layout = "cards" if table.cards else "matrix"
    sort = " sort" if len(table.rows) > 2 else ""
    return (
        f'{title}<div class="scroll"><table class="{layout}{sort}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell_html(column: str, cell: Cell) -> str:
    sort = "" if cell.sort is None else f' data-sort="{cell.sort:.10g}"'
    tone = f' class="{cell.tone}"' if cell.tone else ""
    empty = ' class="none"' if cell.text == "–" else ""
    lines = cell.small.splitlines()
    small = "".join(
        f"<small{tone if not number else ''}>{html.escape(line)}</small>" for number, line in enumerate(lines)
    )
    name = (
        html.escape(cell.text).replace("_", "_<wbr>").replace("@", "<wbr>@")
    )  # where a narrow screen may break it
    text = f"<span{'' if small else tone}>{name}</span>"
    return f'<td{empty} data-label="{html.escape(column)}"{sort}>{text}{small}</td>'


def _heat_html(block: HeatMap) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in block.columns)
    rows = []
    for name, shares, texts in zip(block.rows, block.shares, block.texts, strict=True):
        cells = "".join(
            f'<td style="background:{_shade(share)}">{html.escape(text)}</td>'
            for share, text in zip(shares, texts, strict=True)
        )
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return (
        f'<figure class="map"><figcaption>{html.escape(block.title)}</figcaption><div class="scroll"><table><thead><tr>'
        f"<th>{html.escape(block.corner)}</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></figure>"
    )


def _shade(share: float | None) -> str:
    if share is None:
        return "#f3f5f6"
    return _SCALE[min(len(_SCALE) - 1, max(0, int(share * len(_SCALE))))]


# -- Markdown ------------------------------------------------------------------------------------------------


def _all_markdown(blocks: list[Block], level: int) -> list[str]:
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Notes):
            lines += ["", *[f"* {line}" for line in block.lines]]
        elif isinstance(block, Fold):
            lines += ["", f"{'#' * level} {block.title}", *_all_markdown(block.blocks, level + 1)]
        elif isinstance(block, Table) and block.rows:
            rows = [[_cell_markdown(cell) for cell in row] for row in block.rows]
            lines += _table_markdown(block.title, block.columns, rows, level)
        elif isinstance(block, HeatMap):
            rows = [[name, *texts] for name, texts in zip(block.rows, block.texts, strict=True)]
            lines += _table_markdown(block.title, [block.corner, *block.columns], rows, level)
    return lines


def _table_markdown(title: str, columns: list[str], rows: list[list[str]], level: int) -> list[str]:
    lines = ["", f"{'#' * level} {title}", ""] if title else [""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _cell_markdown(cell: Cell) -> str:
    return " ".join([cell.text, *cell.small.split()]).strip()


_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1d2528; background: #fff;
  max-width: 78rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-top: 1px solid #dde3e6; padding-top: .8rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
p.lead { font-size: 1.1rem; max-width: 54rem; }
p.origin { color: #5b676d; font-size: .8rem; overflow-wrap: anywhere; margin: .2rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .4rem; margin: 1rem 0; }
nav a { border: 1px solid #c9d2d6; border-radius: 1rem; padding: .15rem .7rem; font-size: .85rem; color: #0b5a41; text-decoration: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .35rem .55rem; border-bottom: 1px solid #dde3e6; text-align: right; vertical-align: top; white-space: nowrap; }
th { font-weight: 600; border-bottom-width: 2px; vertical-align: bottom; white-space: normal; min-width: 4.2rem; }
th button { font: inherit; color: inherit; text-align: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th[aria-sort] button { text-decoration: underline; } th[aria-sort=ascending] button::after { content: " ↑"; }
th[aria-sort=descending] button::after { content: " ↓"; }
td small { display: block; color: #5b676d; } .better, td small.better { color: #0b5a41; } .worse, td small.worse { color: #9a1c1c; }
.better::before { content: "▲ "; } .worse::before { content: "▼ "; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { background: #eef7f2; font-weight: 600; } tr.ours td small { font-weight: 400; }
table.matrix td:first-child, table.matrix th:first-child { position: sticky; left: 0; background: #fff; }
table.matrix tr.ours td:first-child { background: #eef7f2; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: .5rem 1.5rem; }
figure.map { margin: 0; min-width: 0; } figure.map figcaption { font-weight: 600; font-size: .9rem; }
figure.map table { font-size: .75rem; } figure.map th, figure.map td { padding: .2rem .35rem; text-align: center; border: 1px solid #fff; }
figure.map td { print-color-adjust: exact; -webkit-print-color-adjust: exact; } figure.map th { font-weight: 400; color: #5b676d; min-width: 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: .5rem 2rem; align-items: end; }
.pictures > div { max-width: 36rem; } img { display: block; width: 100%; height: auto; margin: .5rem 0; }
ul { padding-left: 1.2rem; font-size: .9rem; max-width: 60rem; } li { overflow-wrap: anywhere; } .failed { color: #9a1c1c; }
details { border: 1px solid #dde3e6; border-radius: .4rem; padding: .3rem .7rem; margin: .4rem 0; } summary { cursor: pointer; }
@media (max-width: 44rem) {
  table.matrix td:first-child, table.matrix th:first-child { min-width: 5.6rem; max-width: 7.5rem; white-space: normal; overflow-wrap: break-word; }
  table.cards, table.cards tbody { display: block; } table.cards thead { display: none; }
  table.cards.sort thead { display: block; } table.cards.sort thead tr { border: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem; }
  table.cards.sort th { border: 1px solid #c9d2d6; border-radius: 1rem; padding: .05rem .6rem; font-size: .75rem; font-weight: 400; }
  table.cards.sort thead tr::before { content: "sort:"; font-size: .75rem; color: #5b676d; align-self: center; }
  table.cards tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.2rem, 1fr)); border: 1px solid #dde3e6;
    border-radius: .4rem; margin: .5rem 0; padding: .3rem; }
  table.cards tr.ours { background: #eef7f2; }
  table.cards td { border: 0; padding: .2rem .4rem; text-align: left; white-space: normal; }
  table.cards td.none { display: none; }
  table.cards td::before { content: attr(data-label); display: block; color: #5b676d; font-size: .75rem; font-weight: 400; }
  table.cards td:first-child { font-weight: 700; grid-column: 1 / -1; } table.cards td:first-child::before { display: none; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; } .scroll { overflow: visible; }
  table { font-size: 8pt; } th, td { white-space: normal; padding: .15rem .3rem; } tr, img, figure { break-inside: avoid; }
  details::details-content { content-visibility: visible; } h2, h3 { break-after: avoid; } .pictures { grid-template-columns: 1fr 1fr; }
}
"""

_SCRIPT = """
document.querySelectorAll('table.sort').forEach(function (table) {
  Array.from(table.tHead.rows[0].cells).forEach(function (head, column) {
    var button = document.createElement('button');
    button.type = 'button'; button.textContent = head.textContent; button.title = 'sort';
    head.textContent = ''; head.appendChild(button);
    button.addEventListener('click', function () {
      var was = head.getAttribute('aria-sort'), body = table.tBodies[0], rows = Array.from(body.rows);
      function value(row) {
        var cell = row.cells[column];
        return cell.dataset.sort !== undefined ? parseFloat(cell.dataset.sort) : cell.firstChild.textContent;
      }
      var numeric = rows.some(function (row) { return typeof value(row) === 'number'; });
      var down = was ? was === 'ascending' : numeric;
      function missing(v) { return numeric ? typeof v !== 'number' : v === '–'; }
      rows.sort(function (a, b) {
        var x = value(a), y = value(b);
        if (missing(x) || missing(y)) return missing(x) - missing(y);
        var order = numeric ? x - y : x.localeCompare(y, 'en', { numeric: true });
        return down ? -order : order;
      });
      rows.forEach(function (row) { body.appendChild(row); });
      Array.from(head.parentNode.cells).forEach(function (other) { other.removeAttribute('aria-sort'); });
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    });
  });
});
var closed = [];
window.addEventListener('beforeprint', function () {
  closed = Array.from(document.querySelectorAll('details:not([open])'));
  closed.forEach(function (fold) { fold.open = true; });
});
window.addEventListener('afterprint', function () { closed.forEach(function (fold) { fold.open = false; }); });
"""
