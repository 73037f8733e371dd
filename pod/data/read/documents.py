"""What reading gives: documents, and a report of what was read and left out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

LISTED_SKIPS = 20
"""Unreadable files and records that a report names."""
LISTED_ORIGINS = 200
"""Different origins that a report counts one by one."""


@dataclass(frozen=True)
class Document:
    """One text, and where it came from."""

    text: str
    """The text; empty for a document that came as token ids."""
    source: str
    """The source as the user wrote it in `data.sources`."""
    name: str
    """Where it was read: a file, `file:record` or `hub id:record`."""
    tokens: np.ndarray | None = None
    """Token ids, uint32 [n], of a document that was tokenised already; None for a text."""
    origin: str = ""
    """The record's own field `source` or `domain` (Dolma, mixtures made by others); empty without one."""


@dataclass
class SourceReport:
    """What one source (or a part of it) gave, for the manifest."""

    source: str
    """The source as the user wrote it in `data.sources`."""
    files: int = 0
    """Files opened (hub data sets: 1)."""
    documents: int = 0
    """Documents that hold something and passed the filter."""
    characters: int = 0
    """Characters of these documents."""
    empty: int = 0
    """Documents without any text, left out."""
    skipped: int = 0
    """Files that are left out, or are read up to a damaged place only."""
    records_skipped: int = 0
    """Records left out because they are damaged, too long or without the wanted field."""
    skipped_files: list[str] = field(default_factory=list)
    """The first 20 of these files and records, each with the reason."""
    filtered: int = 0
    """Documents that `document_filter` left out."""
    origins: dict[str, int] = field(default_factory=dict)
    """Origin → number of its documents."""

    @property
    def skips(self) -> int:
        """Number of files and records that were left out."""
        return self.skipped + self.records_skipped

    def check_any(self) -> None:
        """Raise `ValueError` when no document was read: the source's name or the filter must be wrong."""
        if self.documents:
            return
        detail = f" ({self.skipped_files[0]})" if self.skipped_files else ""
        raise ValueError(
            f"source {self.source!r} has no text: {self.files} files read, {self.empty} empty documents, "
            f"{self.filtered} filtered out, {self.skips} unreadable{detail}; "
            "remove it from data.sources or correct it"
        )

    def skip(self, reason: str) -> None:
        """Count a file that is left out, for this reason."""
        self.skipped += 1
        self._name(reason)

    def skip_record(self, reason: str, is_listed: bool) -> None:
        """Count an unreadable record of a file whose other records are read.

        Args:
            is_listed: also name the record in `skipped_files`.
        """
        self.records_skipped += 1
        if is_listed:
            self._name(reason)

    def add_document(self, document: Document) -> None:
        """Count a document that was read."""
        self.documents += 1
        self.characters += len(document.text)
        if document.origin:
            self._count_origin(document.origin, 1)

    def add(self, other: SourceReport) -> None:
        """Add the counts of another part of the same source."""
        for name, count in asdict(other).items():
            if isinstance(count, int):
                setattr(self, name, getattr(self, name) + count)
        self.skipped_files = (self.skipped_files + other.skipped_files)[:LISTED_SKIPS]
        for origin, count in other.origins.items():
            self._count_origin(origin, count)

    def _count_origin(self, origin: str, count: int) -> None:
        """Count an origin. After 200 different origins the others are counted as `(others)`."""
        if origin not in self.origins and len(self.origins) >= LISTED_ORIGINS:
            origin = "(others)"
        self.origins[origin] = self.origins.get(origin, 0) + count

    def _name(self, reason: str) -> None:
        if len(self.skipped_files) < LISTED_SKIPS:
            # A file name need not be UTF-8; what is printed must.
            self.skipped_files.append(reason.encode("utf-8", "backslashreplace").decode())
