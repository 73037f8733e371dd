"""Documents from files, folders, hub data sets, the standard library and installed packages.

`load_documents` turns source specs (see `DataArgs.sources`) into a stream of `Document`; nothing is held in memory but
the record at hand. What cannot be read is an error that names the file, or is counted, by the policy of the caller.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pod.data.readers import UnreadableFile, one_line, read_records, text_of

LISTED_SKIPS = 20
STDLIB_OUTSIDE = {"site-packages", "dist-packages"}

_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_DATE = rf"{_MONTH},? (?:19|20)\d\d"
# An essay opens with its date, glued to the end of the essay before it and often to its own first word.
ESSAY_OPENING = re.compile(rf"(?:(?<=\n)|(?<=\S)){_DATE}(?:, (?:rev\.? )?{_DATE})*(?=[A-Z\"'(\[_*]|[ \t]*\n)")
MIN_ESSAYS = 20
LONG_TEXT_CHARACTERS = 200_000
CHAPTER_CHARACTERS = 20_000
_FRAGMENT = re.compile(r"#(essays|whole|chapters=([1-9]\d*))$")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Document:
    """One text with where it came from: `name` is a file, `file:record` or `hub id:record`."""

    text: str
    source: str
    name: str


@dataclass
class SourceReport:
    """What one source gave, for the manifest."""

    source: str
    """The spec as the user wrote it."""
    files: int = 0
    """Files opened (hub data sets: 1)."""
    documents: int = 0
    """Documents with text."""
    characters: int = 0
    """Their characters."""
    empty: int = 0
    """Documents without any text, left out."""
    skipped: int = 0
    """Files left out or left early because they cannot be read."""
    skipped_files: list[str] = field(default_factory=list)
    """The first of them with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    def skip(self, reason: str) -> None:
        """Count an unreadable file."""
        self.skipped += 1
        if len(self.skipped_files) < LISTED_SKIPS:
            self.skipped_files.append(reason)


@dataclass(frozen=True)
class _File:
    path: Path
    tolerate: bool = False
    """Skip it when it is unreadable, whatever the policy (deliberately broken files of the standard library)."""


def load_documents(
    sources: Iterable[str],
    *,
    text_field: str = "text",
    include: Iterable[str] = (),
    unreadable: str = "error",
    max_documents: int | None = None,
    reports: list[SourceReport] | None = None,
) -> Iterator[Document]:
    """Stream the documents of `sources`, in a fixed order (files sorted by name), at most `max_documents` of each source.

    `reports`, when given, receives one `SourceReport` per source, complete once the source is read. Raises `ValueError`
    in one line for a source that does not exist or holds no text and, with `unreadable="error"`, for any unreadable file.
    """
    for source in sources:
        report = SourceReport(source)
        if reports is not None:
            reports.append(report)
        for document in _read_source(source, text_field, tuple(include), unreadable, report):
            if not document.text.strip():
                report.empty += 1
                continue
            report.documents += 1
            report.characters += len(document.text)
            yield document
            if report.documents == max_documents:
                break
        if not report.documents:
            detail = f" ({report.skipped_files[0]})" if report.skipped_files else ""
            raise ValueError(
                f"source {source!r} holds no text: {report.files} files read, {report.empty} empty documents, "
                f"{report.skipped} unreadable{detail}; remove it from data.sources or correct it"
            )


def source_state(source: str, include: Iterable[str] = ()) -> list[list[Any]]:
    """Names, sizes [bytes] and change times [ns] of a source's files, to see whether prepared data is up to date.

    A hub data set is represented by its spec alone.
    """
    place, _ = _split_fragment(source)
    if _hub_spec(place) is not None:
        return [[source]]
    stats = ((file.path, file.path.stat()) for file in _files_of(place, tuple(include)))
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def _read_source(
    source: str, text_field: str, include: tuple[str, ...], unreadable: str, report: SourceReport
) -> Iterator[Document]:
    place, splitter = _split_fragment(source)
    hub = _hub_spec(place)
    if hub is not None:
        report.files = 1
        for number, text in enumerate(_read_hub(*hub, text_field)):
            yield Document(text, source, f"{place}:{number}")
        return
    for file in _files_of(place, include):
        report.files += 1
        try:
            for name, text in _read_file(file.path, text_field, splitter):
                yield Document(text, source, name)
        except UnreadableFile as error:
            if unreadable == "error" and not file.tolerate:
                raise ValueError(f"{error}; repair or remove it, or set data.unreadable=skip") from error
            report.skip(str(error))


def _read_file(
    path: Path, text_field: str, splitter: Callable[[str], list[str]] | None
) -> Iterator[tuple[str, str]]:
    """(name, text) of every document of a file; a file with a single, very long JSON record is split."""
    records = read_records(path, text_field)
    first = next(records, None)
    if first is None:
        return
    second = next(records, None)
    if second is None:
        is_book = path.name.endswith(".json") and len(first) >= LONG_TEXT_CHARACTERS
        split = splitter or (split_book if is_book else None)
        pieces = split(first) if split else [first]
        for number, piece in enumerate(pieces):
            yield (f"{path}:{number}" if len(pieces) > 1 else str(path)), piece
        return
    yield f"{path}:0", first
    yield f"{path}:1", second
    for number, text in enumerate(records, start=2):
        yield f"{path}:{number}", text


def split_book(text: str) -> list[str]:
    """A long text as essays if at least 20 dated openings are found, else as chapters of 20,000 characters."""
    essays = split_essays(text)
    return essays if len(essays) >= MIN_ESSAYS else split_chapters(text)


def split_essays(text: str) -> list[str]:
    """Split where an essay opens with its date ("April 2012A palliative …", "March 2005\\n\\n…"); nothing is lost."""
    starts = [match.start() for match in ESSAY_OPENING.finditer(text)]
    starts = [0] + [start for start in starts if start > 0]
    return [text[start:stop] for start, stop in zip(starts, [*starts[1:], len(text)], strict=True)]


def split_chapters(text: str, characters: int = CHAPTER_CHARACTERS) -> list[str]:
    """Pieces of at most `characters`, each ended at the last paragraph, line or word that fits; nothing is lost."""
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


def _split_fragment(source: str) -> tuple[str, Callable[[str], list[str]] | None]:
    match = _FRAGMENT.search(source)
    if match is None:
        return source, None
    place, kind = source[: match.start()], match.group(1)
    if kind == "essays":
        return place, split_essays
    if kind == "whole":
        return place, lambda text: [text]
    characters = int(match.group(2))
    return place, lambda text: split_chapters(text, characters)


def _files_of(place: str, include: tuple[str, ...]) -> list[_File]:
    """The files of a local source, sorted. Raises `ValueError` when there are none."""
    if place.startswith("stdlib:"):
        return _stdlib_files(place.removeprefix("stdlib:"))
    path = _package_path(place) if place.startswith("package:") else Path(place).expanduser()
    if path.is_file():
        return [_File(path)]
    if path.is_dir():
        files = [
            file for file in _walk(path) if not include or any(fnmatch(file.name, one) for one in include)
        ]
        wanted = f" matching {', '.join(include)}" if include else ""
        if not files:
            raise ValueError(f"folder {path} holds no file{wanted}: correct data.sources or data.include")
        return [_File(file) for file in files]
    if glob.has_magic(place):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
        if files:
            return [_File(file) for file in files]
        raise ValueError(f"no file matches {place!r}: correct data.sources")
    raise ValueError(
        f"source {place!r} does not exist: expected a file, folder or glob, hub:<id>, stdlib: or package:<name>/<file>"
    )


def _walk(folder: Path, outside: frozenset[str] = frozenset({"__pycache__"})) -> list[Path]:
    """All files below `folder` in a fixed order, without hidden ones and the folders named in `outside`."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in outside)
        found.extend(Path(parent, name) for name in sorted(files) if not name.startswith("."))
    return found


def _stdlib_files(inside: str) -> list[_File]:
    folder = Path(sysconfig.get_paths()["stdlib"], inside)
    outside = frozenset({"__pycache__", *STDLIB_OUTSIDE})
    files = [_File(file, tolerate=True) for file in _walk(folder, outside) if file.suffix == ".py"]
    if not files:
        raise ValueError(
            f"{folder} holds no .py files: this Python carries no such part of the standard library"
        )
    return files


def _package_path(place: str) -> Path:
    """The file of `package:<import name>/<relative file>`, found without importing the package."""
    name, _, relative = place.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ValueError(
            f"source {place!r}: no installed package {name!r}; pip install what provides it or drop the source"
        )
    for folder in folders:
        path = Path(folder, relative)
        if path.exists():
            return path
    raise ValueError(f"source {place!r}: package {name!r} in {folders[0]} has no file {relative!r}")


def _hub_spec(place: str) -> tuple[str, str | None, str] | None:
    """(id, config, split) of a hub data set, None for anything local."""
    explicit = place.startswith("hub:")
    rest, _, split = place.removeprefix("hub:").partition("@")
    name, _, config = rest.partition(":")
    if not explicit and (
        Path(place).expanduser().exists() or not _HUB_ID.fullmatch(name) or name.startswith(".")
    ):
        return None
    if not explicit and Path(name).suffix and not config and not split:
        return None  # `texts/book.txt` is a file that does not exist, not a data set
    return name, config or None, split or "train"


def _read_hub(name: str, config: str | None, split: str, text_field: str) -> Iterator[str]:
    """Texts of a hub data set, streamed through `datasets`."""
    import datasets

    where = f"hub data set {name!r}" + (f" config {config!r}" if config else "") + f" split {split!r}"
    number = 0
    try:
        for record in datasets.load_dataset(name, config, split=split, streaming=True):
            yield text_of(record, text_field, f"{where} record {number}")
            number += 1
    except UnreadableFile:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{where} cannot be read at record {number} ({one_line(error)}): check the id, config and split, the "
            "network, or use a local copy"
        ) from error
