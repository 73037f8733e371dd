"""Kept tokens on disk: one file for each work shard that was read.

A file holds the tokens of the work shard's pieces, the pieces themselves, and a report of what was read. It
appears in one step, so a file that exists is whole. It is rewritten when most of its tokens are no longer
needed.
"""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from pod.data.read.documents import SourceReport

PIECE = np.dtype(
    [
        ("sampling_key", "<u8"),
        ("held_out_key", "<u8"),
        ("start", "<u8"),
        ("length", "<u4"),
        ("document", "<u4"),
        ("work_shard", "<u4"),
        ("source", "<u2"),
        ("first", "?"),
        ("special", "?"),
        ("copy", "?"),
    ]
)
"""A document, or one of the pieces of the context's length into which a longer one is cut.

Fields:
    sampling_key: the draw takes the pieces with the smallest keys.
    held_out_key: a hash of the opening of its document, from 0 to 2**64. The documents with the smallest keys
        are held out.
    start, length: where its tokens lie in the file of its work shard, counted in tokens.
    document: number of tokens in the whole document.
    work_shard: number of its work shard.
    source: index of its source.
    first: whether it is the first piece of its document.
    special: whether the document's text spells a special token.
    copy: whether an equal piece came before. Its own tokens are then not kept.
"""
_TAIL = struct.Struct("<QQI8s")
"""End of a file: number of pieces, bytes of the report, CRC-32 of everything before, mark."""
_MARK = b"podunit1"
"""The last bytes of a complete file."""
Take = Callable[[int, int], np.ndarray]
"""Called as `take(start, stop)`; returns the tokens [start, stop) of the file that is copied."""


def own_tokens(pieces: np.ndarray) -> np.ndarray:
    """Tokens that each piece needs on disk, int64 [n]: none for copies."""
    return np.where(pieces["copy"], 0, pieces["length"].astype(np.int64))


def file_order(pieces: np.ndarray) -> np.ndarray:
    """Pieces of one work shard as its file lists them: in the order of their tokens, copies behind."""
    return pieces[np.lexsort((pieces["start"], pieces["copy"]))]


class TokenFile:
    """Tokens of a work shard while it is read, in a file without a name. It vanishes with the process.

    Args:
        folder: a folder on the disk that shall hold the file.
        dtype: type of the token ids on disk.

    Attributes:
        size: number of tokens in the file.
    """

    def __init__(self, folder: Path, dtype: np.dtype):
        self.folder, self.dtype = folder, dtype
        self.size = 0
        self._stream = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`

    def append(self, documents: Sequence[np.ndarray]) -> np.ndarray:
        """Add the token ids [n] of each document. Returns where each starts, in tokens, int64 [documents]."""
        lengths = np.array([len(one) for one in documents], dtype=np.int64)
        starts = self.size + np.cumsum(lengths) - lengths
        for tokens in documents:
            self._write(tokens)
        return starts

    def take(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop)."""
        self._stream.flush()
        size = self.dtype.itemsize
        found = os.pread(self._stream.fileno(), (stop - start) * size, start * size)
        return np.frombuffer(found, self.dtype)

    def keep(self, pieces: np.ndarray) -> None:
        """Drop all tokens except those of `pieces`, and set the `start` of each piece to its new position."""
        old = TokenFile(self.folder, self.dtype)
        old._stream, self._stream, self.size = self._stream, old._stream, 0
        _copy(pieces, old.take, self._write)
        old.close()

    def close(self) -> None:
        """Close the file, which frees its space on the disk."""
        self._stream.close()

    def _write(self, tokens: np.ndarray) -> bytes:
        self.size += len(tokens)
        return _write(self._stream, tokens, self.dtype)


class WorkShardFile(NamedTuple):
    """The file of a finished work shard."""

    path: Path
    dtype: np.dtype
    """Type of the token ids on disk."""

    def write(self, pieces: np.ndarray, take: Take, report: SourceReport) -> None:
        """Write or replace the file in one step.

        Args:
            pieces: PIECE records in `file_order`. The `start` of each is set to its position in the new file.
            take: returns their tokens, by their old positions.
            report: what was read.
        """
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        told = json.dumps(asdict(report)).encode()
        try:
            with open(temporary, "wb") as stream:
                checksum = _copy(pieces, take, lambda tokens: _write(stream, tokens, self.dtype))
                index = pieces.tobytes() + told
                stream.write(index + _TAIL.pack(len(pieces), len(told), zlib.crc32(index, checksum), _MARK))
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, verify: bool = False) -> tuple[np.ndarray, int, SourceReport] | None:
        """PIECE records, number of tokens in the file, and what was read; None if there is no complete file.

        Args:
            verify: also compare the checksum, which reads every byte. A machine that lost power may have left
                a file with missing bytes.
        """
        try:
            with open(self.path, "rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - _TAIL.size))
                count, told, checksum, mark = _TAIL.unpack(stream.read())
                index = size - _TAIL.size - told - count * PIECE.itemsize
                if (
                    mark != _MARK
                    or index < 0
                    or (verify and _checksum(stream, size - _TAIL.size) != checksum)
                ):
                    return None
                stream.seek(index)
                pieces = np.frombuffer(stream.read(count * PIECE.itemsize), PIECE).copy()
                report = SourceReport(**json.loads(stream.read(told)))
        except (FileNotFoundError, struct.error, ValueError):
            return None
        return pieces, index // self.dtype.itemsize, report

    def take(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), uint32."""
        size = self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, count=stop - start, offset=start * size)
        return found.astype(np.uint32, copy=False)


def _write(stream: BinaryIO, tokens: np.ndarray, dtype: np.dtype) -> bytes:
    data = tokens.astype(dtype, copy=False).tobytes()
    stream.write(data)
    return data


def _checksum(stream: BinaryIO, size: int) -> int:
    """CRC-32 of the first `size` bytes."""
    stream.seek(0)
    checksum = 0
    while size > 0 and (data := stream.read(min(size, 1 << 20))):
        checksum = zlib.crc32(data, checksum)
        size -= len(data)
    return checksum


def _copy(pieces: np.ndarray, take: Take, write: Callable[[np.ndarray], bytes]) -> int:
    """Write the tokens of all `pieces` except copies, one piece after the other.

    The `start` of each piece is set to the position of its tokens in what is written.

    Args:
        take: returns tokens by their old positions.
        write: writes tokens, and returns the bytes that it wrote.

    Returns:
        CRC-32 of all bytes written.
    """
    size = checksum = 0
    for number in np.flatnonzero(~pieces["copy"]).tolist():
        start = int(pieces["start"][number])
        length = int(pieces["length"][number])
        checksum = zlib.crc32(write(take(start, start + length)), checksum)
        pieces["start"][number] = size
        size += length
    return checksum
