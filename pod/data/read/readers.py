"""Readers of single files: text, jsonl, json, csv, parquet, arrow, plain or compressed (.gz .zst .bz2 .xz).

Each reader gives `Record`s one at a time and never holds more than the record at hand (tables: a small batch
of rows, `.json`: one value).
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import tokenize
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pod.data.read.records import Bad, BadRecord, Fields, Record, UnreadableFile, short_reason, too_long
from pod.data.read.table_files import read_table
from pod.remote import local_copy

_TEXTS = """txt text md markdown rst tex org adoc
py pyi pyx c h cc cpp cxx hh hpp hxx cu cuh m java kt scala go rs swift cs js mjs jsx ts tsx rb php pl pm \
lua r hs ml clj ex erl
f f90 sh bash zsh ps1 bat sql css scss proto cmake mk tcl vim el lisp asm s v sv vhd dart zig nim sol gradle
yaml yml toml ini cfg"""
KINDS = {
    **dict.fromkeys(["", *(f".{name}" for name in _TEXTS.split())], "text"),
    **dict.fromkeys([".jsonl", ".jsonlines", ".ndjson"], "lines"),
    **{f".{kind}": kind for kind in ("json", "csv", "parquet", "arrow", "mds")},
}
"""How files are read, by their suffix. A text is the whole file."""
DAMAGE = (OSError, EOFError, UnicodeError, zlib.error, lzma.LZMAError)
BUFFER_BYTES = 2**20
ZSTD_BUFFER_BYTES = 2**13
JSON_BYTES = 256 * 2**20
"""Largest `.json` file that is one object or array: it is parsed whole."""
CSV_FIELD_CHARACTERS = 64 * 2**20
"""Longest field of a `.csv` file. A longer one is a quote that is never closed, as good as always."""


def kind_of(path: str | Path) -> str:
    """`parquet`, `arrow`, `lines`, `json`, `csv`, `mds` or `text`, by the name alone.

    What is unknown but wanted is text.
    """
    return KINDS.get(_suffix(path), "text")


def is_known(path: str | Path) -> bool:
    """Whether a file's name says how it is read."""
    return _suffix(path) in KINDS


def _suffix(path: str | Path) -> str:
    """The suffix in lower case, without the suffix of compression."""
    root, suffix = os.path.splitext(str(path).lower())
    return os.path.splitext(root)[1] if suffix in OPENERS else suffix


def is_compressed(path: str | Path) -> bool:
    """Whether a file is decompressed while it is read."""
    return Path(path).suffix.lower() in OPENERS


def read_records(
    path: Path, fields: Fields, bad: Bad, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Records of a file in its order. The format follows from its name.

    Args:
        bad: called for records that cannot be used; it may raise.
        start, stop: bytes of a plain jsonl file. Its records are those whose lines begin in [start, stop).

    Raises:
        UnreadableFile: as soon as damage of the file itself is met. Records before it have been given out by
            then.
    """
    kind = kind_of(path)
    if kind == "mds":
        raise UnreadableFile(f"{path} is an MDS shard: name the folder with its index.json instead")
    if kind in ("parquet", "arrow"):
        yield from read_table(path, kind, fields, bad)
        return
    with damage_named(path):
        if kind == "lines":
            with open_bytes(path) as stream:
                yield from _read_lines(path, stream, fields, bad, start, stop)
        elif kind == "json":
            yield from _read_json(path, fields, bad)
        elif kind == "csv":
            yield from _read_csv(path, fields, bad)
        else:
            yield from _read_text(path, fields, bad)


def read_copy(url: str, fields: Fields, bad: Bad) -> Iterator[Record]:
    """`read_records` of a file of another machine, which is copied here first. Messages name its URL."""
    with local_copy(url) as path:

        def named(message: str) -> str:
            return message.replace(str(path), url)

        try:
            yield from read_records(path, fields, lambda reason: bad(named(reason)))
        except UnreadableFile as error:
            raise UnreadableFile(named(str(error))) from error


@contextmanager
def damage_named(path: Path | str) -> Iterator[None]:
    """Errors of reading and decompressing inside the block become an `UnreadableFile` that names `path`."""
    try:
        yield
    except UnreadableFile:
        raise
    except DAMAGE as error:
        raise UnreadableFile(f"{path} cannot be read to its end ({short_reason(error)})") from error


def open_bytes(path: Path) -> Any:
    """Buffered binary stream of a file, decompressed by its suffix.

    A truncated file raises while it is read.
    """
    opener = OPENERS.get(path.suffix.lower())
    return opener(path) if opener else open(path, "rb", buffering=BUFFER_BYTES)


def _open_zstd(path: Path) -> IO[bytes]:
    """Buffered stream of a zstd file of one or more frames."""
    import pyarrow

    # zstandard's own reader ends silently on a truncated file. This one raises; what it has in its buffer
    # then is lost.
    stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(stream, ZSTD_BUFFER_BYTES)


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
    ".zstd": _open_zstd,
}
"""What decompresses a file, by its last suffix."""


def _read_text(path: Path, fields: Fields, bad: Bad) -> Iterator[Record]:
    if fields.tokens is not None:
        raise UnreadableFile(f"{path} is text, but data.token_field = {fields.tokens!r} asks for token ids")
    data = _text_bytes(path, fields, bad)
    if data is None:
        return
    try:
        text = data.decode(_encoding_of(path, data))
    except LookupError as error:  # a codec that is not one of text
        raise UnreadableFile(f"{path} cannot be read in its declared encoding ({error})") from error
    if "\0" in text:
        raise UnreadableFile(f"{path} is binary (it has NUL characters), expected text")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    yield Record(None, text)


def _text_bytes(path: Path, fields: Fields, bad: Bad) -> bytes | None:
    """The bytes of a text file; None for one that is too long, which `bad` is told."""
    limit = fields.max_bytes
    if is_compressed(path):
        with open_bytes(path) as stream:
            data = _read_up_to(stream, limit + 1)
        if len(data) > limit:
            bad(too_long(str(path), None, limit))
            return None
        return data
    # Unbuffered: small files are most of a source tree, and each is read with two system calls.
    with open(path, "rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            bad(too_long(str(path), size, limit))
            return None
        return _read_up_to(stream, size + 1)


def _read_up_to(stream: IO[bytes], limit: int) -> bytes:
    """At most `limit` bytes, to the end of the stream or the limit (one `read` may give less)."""
    found = [stream.read(limit)]
    size = len(found[0])
    while found[-1] and size < limit:
        found.append(stream.read(limit - size))
        size += len(found[-1])
    return found[0] if len(found) <= 2 else b"".join(found)


def _encoding_of(path: Path, data: bytes) -> str:
    """UTF-8 with or without byte-order mark; for `.py` the declared encoding."""
    if path.suffix.lower() != ".py":
        return "utf-8-sig"
    try:
        return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError as error:
        raise UnreadableFile(
            f"{path} cannot be read in its declared encoding ({short_reason(error)})"
        ) from error


def _read_lines(
    path: Path, stream: IO[bytes], fields: Fields, bad: Bad, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """JSON lines, as bytes and with a limit, so that an endless line never enters memory."""
    part = start > 0 or stop is not None
    if start:
        # A line belongs to the range that holds its first byte. So the line that `start` may cut belongs to
        # the range before.
        stream.seek(start - 1)
        start += _skip_line(stream, None if stop is None else stop - start + 1) - 1
    number = record_number = 0
    position, limit = start, fields.max_bytes
    while stop is None or position < stop:
        line = stream.readline(limit + 2)  # the line end does not count, and may be CRLF
        if not line:
            return
        rest = 0 if line.endswith(b"\n") or len(line) <= limit else _skip_line(stream)
        number, begin = number + 1, position
        position += len(line) + rest
        where = f"{path} line at byte {begin}" if part else f"{path} line {number}"
        if begin == 0 and line.startswith(codecs.BOM_UTF8):
            line = line[len(codecs.BOM_UTF8) :]
        try:
            if rest or (len(line) > limit and len(line.rstrip(b"\r\n")) > limit):
                raise BadRecord(too_long(where, len(line) + rest, limit))
            values = _parse_line(line, where)
            if values is _BLANK:
                continue
            record = fields.record(begin if part else record_number, values, where)
        except BadRecord as error:
            bad(str(error))
            continue
        record_number += 1
        yield record


_BLANK = object()


def _parse_line(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRecord(f"{where} is not UTF-8 ({short_reason(error)})") from error
    except json.JSONDecodeError as error:
        if not line.strip():
            return _BLANK
        raise BadRecord(f"{where} is not JSON ({error.msg} at character {error.pos})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets without end
        raise BadRecord(f"{where} is not JSON ({short_reason(error)})") from error


def _skip_line(stream: IO[bytes], at_most: int | None = None) -> int:
    """Read to the end of the line, or `at_most` bytes, without holding them; returns the bytes read."""
    size = 0
    while chunk := stream.readline(BUFFER_BYTES if at_most is None else min(BUFFER_BYTES, at_most - size)):
        size += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return size


def _read_json(path: Path, fields: Fields, bad: Bad) -> Iterator[Record]:
    """A `.json` file: JSON lines (Dolma names them so), or one object, or one array of objects or texts."""
    with open_bytes(path) as stream:
        is_lines = _holds_lines(stream, fields.max_bytes)
    with open_bytes(path) as stream:
        if is_lines:
            yield from _read_lines(path, stream, fields, bad)
            return
        data = _read_up_to(stream, JSON_BYTES + 1)
    for number, value in enumerate(_json_values(path, data)):
        where = f"{path} record {number}"
        try:
            is_text = isinstance(value, str) and fields.tokens is None
            record = fields.record(number, {fields.text: value} if is_text else value, where)
        except BadRecord as error:
            bad(str(error))
            continue
        yield record


def _read_csv(path: Path, fields: Fields, bad: Bad) -> Iterator[Record]:
    """A `.csv` file: commas, double quotes, and a first row with the names of the fields."""
    if fields.tokens is not None:
        raise UnreadableFile(
            f"{path} is csv, a table of texts, but data.token_field = {fields.tokens!r} asks for token ids"
        )
    csv.field_size_limit(CSV_FIELD_CHARACTERS)
    number = -1
    # Bytes that are not UTF-8 become lone surrogates, which are found in the field that is read.
    with io.TextIOWrapper(open_bytes(path), "utf-8-sig", "surrogateescape", newline="") as stream:
        rows = filter(None, csv.reader(stream, strict=True))  # without blank lines
        try:
            names = _csv_names(path, next(rows, [fields.text]), fields.text)
            for number, row in enumerate(rows):
                where = f"{path} row {number}"
                try:
                    record = fields.record(number, _csv_values(names, row, fields, where), where)
                except BadRecord as error:
                    bad(str(error))
                    continue
                yield record
        except csv.Error as error:
            place = f"behind row {number}" if number >= 0 else "from its beginning"
            raise UnreadableFile(f"{path} is not csv {place} ({short_reason(error)})") from error


def _csv_names(path: Path, names: list[str], text_field: str) -> list[str]:
    """The names of the fields, checked."""
    found = names.count(text_field)
    if found == 1:
        return names
    seen = ", ".join(names[:12]).encode(errors="backslashreplace").decode()
    raise UnreadableFile(
        f"{path} has {found or 'no'} text fields {text_field!r}, expected one (fields seen: {seen}); set "
        "data.text_field"
    )


def _csv_values(names: list[str], row: list[str], fields: Fields, where: str) -> dict[str, str]:
    """The fields of a row by name. Those that are read must be UTF-8."""
    if len(row) != len(names):
        raise BadRecord(f"{where} has {len(row)} fields, the first row names {len(names)}")
    values = dict(zip(names, row, strict=True))
    for name in fields.names:
        try:
            values.get(name, "").encode()
        except UnicodeEncodeError as error:
            raise BadRecord(f"{where}: field {name!r} is not UTF-8") from error
    return values


def _holds_lines(stream: IO[bytes], limit: int) -> bool:
    """Whether one of the first two lines that are not blank is a whole JSON object, however long."""
    seen = 0
    while seen < 2 and (line := stream.readline(limit + 2)):
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        if not text:
            continue
        if text.startswith(b"["):
            return False
        if not line.endswith(b"\n") and len(line) > limit:
            # Too long to look at: JSON lines if more lines follow, one large object if not.
            _skip_line(stream)
            return bool(stream.readline(limit).strip())
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(text), dict):
                return True
        seen += 1
    return False


def _json_values(path: Path, data: bytes) -> list[Any]:
    """The elements of the array that `data` holds, or the one other value that it is.

    The list is empty when `data` is blank.
    """
    if len(data) > JSON_BYTES:
        raise UnreadableFile(
            f"{path} is one JSON value of more than {JSON_BYTES:,} bytes: make it JSON lines"
        )
    text = data.decode("utf-8-sig")
    if not text.strip():
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path} is not JSON ({short_reason(error)})") from error
    return value if isinstance(value, list) else [value]
