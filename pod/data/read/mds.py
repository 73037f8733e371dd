"""MosaicML data sets, read without their library.

A data set is a folder with `index.json` and `.mds` shards, plain or compressed.

A shard begins with the number of samples n. Then come n + 1 offsets in bytes: where each sample starts, and
where the last one ends. Then come a JSON header and the samples. All these numbers are little-endian uint32.
A sample begins with the sizes of those of its columns that have no fixed size, and then has the bytes of all
columns.

Source: the MDS format of github.com/mosaicml/streaming (version 2).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from pod.data.read.readers import BUFFER_BYTES, OPENERS, damage_named, open_bytes
from pod.data.read.records import Bad, BadRecord, Fields, Record, UnreadableFile, short_reason, too_long

ARRAY_TYPES = {
    8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2",
    32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8", 65: "<i8", 66: "<f8",
}  # fmt: skip
"""NumPy's type of an array whose encoding does not fix it, by the array's first byte."""


class MdsColumn(NamedTuple):
    """A column of a shard."""

    name: str
    encoding: str
    """How its values are stored: `str`, `json`, `ndarray:…` or another."""
    size: int | None
    """Bytes of each value; None where they differ."""


class MdsShard(NamedTuple):
    """A shard as its index describes it."""

    path: str
    """The file to read: the decompressed one if it exists."""
    names: tuple[str, ...]
    """The paths under which this shard may lie, decompressed and compressed."""
    columns: tuple[MdsColumn, ...]
    samples: int
    """Number of samples."""
    raw_bytes: int
    """Size of the shard when it is decompressed."""
    file_bytes: int
    """Size of the file to read."""


def read_index(path: Path) -> dict[str, Any] | None:
    """The content of an MDS `index.json`; None for a file that is something else."""
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or not isinstance(index.get("shards"), list) or "version" not in index:
        return None
    return index


def mds_shards(folder: Path, index: dict[str, Any]) -> list[MdsShard]:
    """The shards that `index` of `folder` names.

    Raises:
        ValueError: the index is not of MDS version 2, is incomplete, or names a shard outside its folder.
    """
    where = folder / "index.json"
    if index["version"] != 2:
        raise ValueError(f"{where} has version {index['version']!r}, expected 2")
    try:
        return [_shard(folder, entry, where) for entry in index["shards"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is not a complete MDS index ({type(error).__name__}: {error})") from error


def _shard(folder: Path, entry: dict[str, Any], where: Path) -> MdsShard:
    if entry["format"] != "mds":
        raise ValueError(f"{where} names a shard of format {entry['format']!r}, expected 'mds'")
    files = [one for one in (entry["raw_data"], entry.get("zip_data")) if one]
    paths = [os.path.join(folder, one["basename"]) for one in files]
    for path in paths:
        if os.path.relpath(path, folder).startswith(".."):
            raise ValueError(f"{where} names a shard outside its folder: {path}")
    # The first file that exists is read. When none does, the compressed one, as published, is named as
    # missing.
    chosen = next((number for number, path in enumerate(paths) if os.path.isfile(path)), len(paths) - 1)
    columns = zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True)
    return MdsShard(
        path=paths[chosen],
        names=tuple(paths),
        columns=tuple(MdsColumn(*column) for column in columns),
        samples=int(entry["samples"]),
        raw_bytes=int(files[0]["bytes"]),
        file_bytes=int(files[chosen]["bytes"]),
    )


def read_shard(shard: MdsShard, fields: Fields, bad: Bad) -> Iterator[Record]:
    """Records of a shard in its order, one sample in memory at a time. Only the wanted columns are decoded.

    Hashes that an index may hold are not compared: reading would take twice as long.

    Raises:
        UnreadableFile: the shard's size differs from the index, or its offsets and sizes do not add up.
    """
    path = Path(shard.path)
    decoders = _decoders(shard, fields)
    with damage_named(path):
        _check_file(shard)
        with open_bytes(path) as stream:
            sizes = _sample_sizes(stream, shard)
            for number, size in enumerate(sizes):
                where = f"{path} sample {number}"
                try:
                    values = _read_sample(stream, int(size), shard, decoders, fields, where)
                    record = fields.record(number, values, where)
                except BadRecord as error:
                    bad(str(error))
                    continue
                yield record


def _check_file(shard: MdsShard) -> None:
    suffix = os.path.splitext(shard.path)[1]
    if suffix not in (".mds", *OPENERS):
        raise UnreadableFile(
            f"{shard.path} has compression {suffix!r}, which is not supported; supported are "
            f"{', '.join(OPENERS)}"
        )
    size = os.stat(shard.path).st_size
    if size != shard.file_bytes:
        raise UnreadableFile(f"{shard.path} has {size:,} bytes, but index.json says {shard.file_bytes:,}")


def _sample_sizes(stream: IO[bytes], shard: MdsShard) -> np.ndarray:
    """Size of each sample, int64 [samples]. The stream then stands at the first sample."""
    samples = int(np.frombuffer(_exactly(stream, 4, shard), "<u4")[0])
    if samples != shard.samples:
        raise UnreadableFile(f"{shard.path} has {samples} samples, but index.json says {shard.samples}")
    offsets = np.frombuffer(_exactly(stream, 4 * (samples + 1), shard), "<u4").astype(np.int64)
    header = int(offsets[0]) - 4 * (samples + 2)
    sizes = np.diff(offsets)
    if header < 0 or np.any(sizes < 0) or int(offsets[-1]) != shard.raw_bytes:
        raise UnreadableFile(
            f"{shard.path} is damaged: its offsets do not add up to {shard.raw_bytes:,} bytes"
        )
    _skip(stream, header, shard)
    return sizes


def _read_sample(
    stream: IO[bytes], size: int, shard: MdsShard, decoders: dict[str, Decoder], fields: Fields, where: str
) -> dict[str, Any]:
    """The wanted columns of the next sample, by name.

    A column above the limit is passed over and never held in memory.

    Raises:
        BadRecord: a wanted column is too long, or does not fit its encoding.
        UnreadableFile: the shard is damaged.
    """
    fixed = [column.size for column in shard.columns]
    num_variable = sum(not one for one in fixed)
    variable = iter(np.frombuffer(_exactly(stream, 4 * num_variable, shard), "<u4").tolist())
    lengths = [one or next(variable) for one in fixed]
    if sum(lengths) + 4 * num_variable != size:
        raise UnreadableFile(f"{where} is damaged: its columns do not add up to its {size:,} bytes")
    # Ids can be stored as int64 and are kept as uint32.
    limit = fields.max_bytes * (2 if fields.tokens else 1) + 64
    values: dict[str, Any] = dict.fromkeys(column.name for column in shard.columns)
    wrong = ""
    for column, length in zip(shard.columns, lengths, strict=True):
        if column.name not in decoders or length > limit:
            _skip(stream, length, shard)
            if column.name in decoders:
                wrong = too_long(f"{where}: field {column.name!r}", length, fields.max_bytes)
            continue
        data = _exactly(stream, length, shard)
        try:
            values[column.name] = decoders[column.name](data)
        except (ValueError, IndexError, KeyError, RecursionError) as error:
            wrong = f"{where}: field {column.name!r} is not {column.encoding} ({short_reason(error)})"
    if wrong:
        raise BadRecord(wrong)
    return values


def _exactly(stream: IO[bytes], size: int, shard: MdsShard) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise UnreadableFile(f"{shard.path} ends before its last sample")
    return data


def _skip(stream: IO[bytes], size: int, shard: MdsShard) -> None:
    while size > 0:
        size -= len(_exactly(stream, min(size, BUFFER_BYTES), shard))


Decoder = Callable[[bytes], Any]


def _decoders(shard: MdsShard, fields: Fields) -> dict[str, Decoder]:
    """Decoder of each wanted column, by the column's name.

    Other columns, and origins that are not text, are passed over. They may have any encoding.
    """
    return {
        one.name: _decoder(one, shard)
        for one in shard.columns
        if one.name in (fields.content, fields.bounds) or (one.name in fields.names and one.encoding == "str")
    }


def _decoder(column: MdsColumn, shard: MdsShard) -> Decoder:
    kind, _, details = column.encoding.partition(":")
    if kind == "ndarray":
        return _array_decoder(details, column, shard)
    if kind == "str":
        return bytes.decode
    if kind == "json":
        return json.loads
    raise UnreadableFile(
        f"{shard.path}: field {column.name!r} has encoding {column.encoding!r}; supported for text and "
        "token ids are str, json and ndarray"
    )


def _array_decoder(details: str, column: MdsColumn, shard: MdsShard) -> Decoder:
    """Decoder of arrays, which are stored as [type] [shape] [values].

    The type is one byte. It is absent when the encoding fixes the type. The shape is one byte (axes × 4 +
    log2 of the bytes per number), then the number of each axis. It is absent when the encoding fixes the
    shape.
    """
    name, _, axes = details.partition(":")
    try:
        fixed_type = np.dtype(name).newbyteorder("<") if name else None
        fixed_shape = tuple(int(one) for one in axes.split(",")) if axes else None
        if fixed_type is not None and fixed_type.kind not in "iuf":
            raise ValueError(name)
    except (TypeError, ValueError) as error:
        raise UnreadableFile(
            f"{shard.path}: field {column.name!r} has encoding {column.encoding!r}, which is not a numeric "
            "array"
        ) from error

    def decode(data: bytes) -> np.ndarray:
        at = 0
        dtype, shape = fixed_type, fixed_shape
        if dtype is None:
            dtype, at = np.dtype(ARRAY_TYPES[data[0]]), 1
        if shape is None:
            num_axes = data[at] >> 2
            width = 1 << (data[at] & 3)
            shape = tuple(np.frombuffer(data, f"<u{width}", num_axes, at + 1).tolist())
            at += 1 + num_axes * width
        return np.frombuffer(data, dtype, offset=at).reshape(shape)

    return decode
