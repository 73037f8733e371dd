"""Rows of parquet and arrow files, column by column and a few at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pod.data.read.records import Bad, BadRecord, Fields, Record, UnreadableFile, short_reason

ROWS_AT_A_TIME = 64
"""Rows of a parquet file that are held in memory."""


def read_table(path: Path, kind: str, fields: Fields, bad: Bad) -> Iterator[Record]:
    """Records of a parquet file or an arrow file.

    Arrow files may have either IPC layout: stream, as `datasets` writes it, or random access. Only the wanted
    columns are read.

    Args:
        kind: "parquet" or "arrow".
        bad: called with the reason for each row that cannot be used.

    Raises:
        UnreadableFile: the file is damaged, or has no column of the wanted name.
    """
    import pyarrow

    number = 0
    try:
        with _batches(path, kind, fields) as batches:
            for batch in batches:
                for row in range(batch.num_rows):
                    where = f"{path} row {number + row}"
                    try:
                        record = fields.record(number + row, _row(batch, row, fields, where), where)
                    except BadRecord as error:
                        bad(str(error))
                        continue
                    yield record
                number += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise UnreadableFile(
            f"{path} is not a readable {kind} file at row {number} ({short_reason(error)})"
        ) from error


@contextmanager
def _batches(path: Path, kind: str, fields: Fields) -> Iterator[Iterator[Any]]:
    """Yield the file's rows as batches of pyarrow that have the wanted columns only."""
    import pyarrow
    import pyarrow.parquet

    if kind == "parquet":
        # pre_buffer would hold whole row groups, which can be gigabytes of text.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
            columns = _wanted(file.schema_arrow.names, fields, path)
            yield file.iter_batches(ROWS_AT_A_TIME, columns=columns, use_threads=False)
        return
    with pyarrow.OSFile(str(path)) as source:
        try:
            reader: Any = pyarrow.ipc.open_stream(source)
            found = iter(reader)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(source)
            found = (reader.get_batch(number) for number in range(reader.num_record_batches))
        columns = _wanted(reader.schema.names, fields, path)
        yield (batch.select(columns) for batch in found)


def _wanted(names: list[str], fields: Fields, path: Path) -> list[str]:
    """The columns to read.

    Raises:
        UnreadableFile: when the column with the documents is missing.
    """
    for name in (fields.content, fields.bounds):
        if name is not None and name not in names:
            try:
                fields.record(0, dict.fromkeys(names, ()), f"{path} row 0")
            except BadRecord as error:
                raise UnreadableFile(str(error)) from error
    return [name for name in fields.names if name in names]


def _row(batch: Any, row: int, fields: Fields, where: str) -> dict[str, Any]:
    """The wanted values of a row.

    Texts and lists above the limit are refused before they become Python objects.
    """
    import pyarrow

    values = {}
    for name in batch.schema.names:
        cell = batch.column(name)[row]
        if not cell.is_valid:
            values[name] = None
        elif name == fields.tokens and isinstance(cell, pyarrow.ListScalar | pyarrow.LargeListScalar):
            fields.check_length(4 * len(cell.values), where)
            values[name] = cell.values.to_numpy(zero_copy_only=False)
        else:
            if name == fields.content and hasattr(cell, "as_buffer"):
                fields.check_length(cell.as_buffer().size, where)
            try:
                values[name] = cell.as_py()
            except UnicodeDecodeError as error:
                raise BadRecord(f"{where}: field {name!r} is not UTF-8 ({short_reason(error)})") from error
    return values
