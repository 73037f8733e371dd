"""Readers of single files: text, jsonl, json, parquet and arrow, plain or compressed (.gz, .zst, .bz2, .xz)."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
JSON_LINES = {".jsonl", ".ndjson"}
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_DAMAGE = (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError)


class UnreadableFile(ValueError):
    """A file that is corrupt, of another encoding or without the wanted field; the message names it in one line."""


def read_records(path: Path, text_field: str) -> Iterator[str]:
    """Texts of all records of a file; the format follows from its name, everything unknown is one text.

    Raises `UnreadableFile` as soon as the damage is met; records before it have been given out by then.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = suffixes[-1] if suffixes else ""
    if kind in TABLES:
        yield from _read_table(path, TABLES[kind], text_field)
        return
    if kind in COMPRESSED:
        kind = suffixes[-2] if len(suffixes) > 1 else ""
    try:
        if kind in JSON_LINES:
            with open_text(path) as stream:
                yield from _read_json_lines(path, stream, text_field)
        elif kind == ".json":
            yield from _read_json(path, text_field)
        else:
            yield _read_text(path)
    except UnreadableFile:
        raise
    except _DAMAGE as error:
        raise UnreadableFile(f"{path} cannot be read to its end ({one_line(error)})") from error


def open_text(path: Path) -> IO[str]:
    """Text stream of a file: UTF-8 without byte-order mark (`.py`: the declared encoding), decompressed by its suffix."""
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    suffix = path.suffix.lower()
    if suffix in openers:
        return openers[suffix](path, "rt", encoding="utf-8-sig")
    if suffix == ".zst":
        import pyarrow

        # zstandard's own reader ends silently on a truncated file, this one raises.
        stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        return io.TextIOWrapper(stream, encoding="utf-8-sig")
    if suffix == ".py":
        try:
            return tokenize.open(path)
        except SyntaxError as error:
            raise UnreadableFile(
                f"{path} declares an encoding that does not read it ({one_line(error)})"
            ) from error
    return open(path, encoding="utf-8-sig")


def text_of(record: Any, text_field: str, where: str) -> str:
    """The text of one record; `UnreadableFile` names the fields seen when there is none. A null text is an empty one."""
    if not isinstance(record, dict):
        raise UnreadableFile(
            f"{where} is a {type(record).__name__}, expected an object with a field {text_field!r}"
        )
    if text_field not in record:
        seen = ", ".join(sorted(map(str, record))[:12]) or "none"
        raise UnreadableFile(
            f"{where} has no text field {text_field!r} (fields seen: {seen}); set data.text_field"
        )
    text = record[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UnreadableFile(f"{where}: field {text_field!r} is a {type(text).__name__}, expected text")
    return text


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def _read_text(path: Path) -> str:
    with open_text(path) as stream:
        text = stream.read()
    if "\0" in text:
        raise UnreadableFile(f"{path} is binary (it holds NUL characters), expected text")
    return text


def _read_json_lines(path: Path, stream: Iterable[str], text_field: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UnreadableFile(f"{where} is not JSON ({error.msg} at character {error.pos})") from error
        yield text_of(record, text_field, where)


def _read_json(path: Path, text_field: str) -> Iterator[str]:
    """A `.json` file: JSON lines (Dolma names them so), or one object, or one array of objects or texts."""
    with open_text(path) as stream:
        first = next((line for line in stream if line.strip()), "")
        if _is_object(first):
            yield from _read_json_lines(path, itertools.chain([first], stream), text_field)
            return
    with open_text(path) as stream:
        try:
            content = json.load(stream)
        except json.JSONDecodeError as error:
            if not first:
                yield ""
                return
            raise UnreadableFile(f"{path} is not JSON ({error.msg} at line {error.lineno})") from error
    records = content if isinstance(content, list) else [content]
    for number, record in enumerate(records):
        yield record if isinstance(record, str) else text_of(record, text_field, f"{path} record {number}")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _read_table(path: Path, builder: str, text_field: str) -> Iterator[str]:
    """Rows of a parquet or arrow file, streamed through `datasets`."""
    import datasets
    from datasets.exceptions import DatasetsError

    number = 0
    try:
        for record in datasets.load_dataset(builder, data_files=[str(path)], split="train", streaming=True):
            yield text_of(record, text_field, f"{path} row {number}")
            number += 1
    except (UnreadableFile, GeneratorExit):
        raise
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise UnreadableFile(
            f"{path} is not a readable {builder} file at row {number} ({one_line(error)})"
        ) from error
