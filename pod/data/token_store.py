"""Tokens of all documents on disk between the passes: one *part* per unit of reading.

A part is a folder: `tokens.bin` (uint16 or uint32, documents one after the other), `index.bin` (`DOCUMENT` records) and
`part.json` (counts, what was left out). The folder appears in one step, so a part that exists is complete. Readers
seek and read; nothing is mapped, so that memory does not grow with the corpus.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from pod.data.documents import DOCUMENT, SourceReport
from pod.files import explain_disk_full, read_json, write_json

TOKENS, INDEX, PART = "tokens.bin", "index.bin", "part.json"
SCHEMA_VERSION = 2


class PartWriter:
    """Writes one part into an empty folder that the caller makes atomic. A context manager; `finish` writes `part.json`."""

    def __init__(self, folder: Path, dtype: np.dtype):
        self.folder, self.dtype = folder, dtype
        self._tokens: IO[bytes] = open(folder / TOKENS, "wb")  # noqa: SIM115 - closed by __exit__
        self._index: IO[bytes] = open(folder / INDEX, "wb")  # noqa: SIM115
        self.num_documents = self.num_tokens = 0

    def add(self, tokens: list[np.ndarray], places: list[int], digests: list[tuple[int, int]]) -> None:
        """Append documents: ids [n] each, place in the split (× 2**64) and digest."""
        if not tokens:
            return
        records = np.empty(len(tokens), dtype=DOCUMENT)
        records["tokens"] = [len(ids) for ids in tokens]
        records["place"], records["digest"] = places, digests
        self._write(self._tokens, np.concatenate(tokens).astype(self.dtype, copy=False).tobytes())
        self._write(self._index, records.tobytes())
        self.num_documents += len(tokens)
        self.num_tokens += int(records["tokens"].sum(dtype=np.int64))

    def finish(self, unit: str, report: SourceReport) -> None:
        """Close the files and write `part.json`."""
        for stream in (self._tokens, self._index):
            stream.flush()
            os.fsync(stream.fileno())
        content = {
            "schema_version": SCHEMA_VERSION,
            "unit": unit,
            "dtype": self.dtype.str,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "report": report.as_dict(),
        }
        write_json(self.folder / PART, content)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._index.close()

    def _write(self, stream: IO[bytes], data: bytes) -> None:
        with explain_disk_full(self.folder, needed_bytes=len(data)):
            stream.write(data)


class Part:
    """A complete part, opened by its folder; `ValueError` when it is damaged.

    `source` is the number of its source in `data.sources` (not stored: the same file can be in several recipes).
    """

    def __init__(self, folder: Path, source: int = 0):
        self.folder = Path(folder)
        content = read_json(self.folder / PART)
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{self.folder} was written by another version: remove it and run again (its unit is tokenised again)"
            )
        self.content: dict[str, Any] = content
        self.name: str = content["unit"]
        self.source = source
        self.num_documents: int = content["documents"]
        self.num_tokens: int = content["tokens"]
        self.dtype = np.dtype(content["dtype"])
        self.report = SourceReport(**content["report"])
        sizes = {TOKENS: self.num_tokens * self.dtype.itemsize, INDEX: self.num_documents * DOCUMENT.itemsize}
        for name, expected in sizes.items():
            found = (self.folder / name).stat().st_size if (self.folder / name).is_file() else None
            if found != expected:
                raise ValueError(
                    f"{self.folder / name} has {found} bytes, expected {expected}: remove {self.folder} and run again"
                )

    def index(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Records of documents [start, stop), `DOCUMENT` [stop - start]."""
        stop = self.num_documents if stop is None else min(stop, self.num_documents)
        return np.fromfile(
            self.folder / INDEX, dtype=DOCUMENT, count=max(0, stop - start), offset=start * DOCUMENT.itemsize
        )

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids [start, stop) of the part, uint32 [stop - start]."""
        found = np.fromfile(
            self.folder / TOKENS, dtype=self.dtype, count=stop - start, offset=start * self.dtype.itemsize
        )
        if len(found) != stop - start:
            raise ValueError(
                f"{self.folder / TOKENS} ends before token {stop}: remove {self.folder} and run again"
            )
        return found.astype(np.uint32, copy=False)


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a complete part of this version."""
    try:
        Part(folder)
    except ValueError:
        return False
    return True
