"""From a record of any format to text or token ids, checked field by field.

A record is a JSON object, a table row or an MDS sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pod.data.args import DataArgs

ORIGIN_FIELDS = ("source", "domain")
"""Fields that say where a record comes from: Dolma's `source`, ProLong's `domain`."""


class UnreadableFile(ValueError):
    """A file that is damaged or of another encoding or format. The message names it in one line."""


class BadRecord(ValueError):
    """A record that is damaged, too long or without the wanted field.

    The message names its file and place in one line.
    """


class Record(NamedTuple):
    """What one record holds: a text, or token ids with the bounds of their documents.

    Token ids are uint32 [n], bounds int64 [documents, 2].
    """

    place: int | None
    """Its number in the file, or the byte where its line starts when only a part of the file is read.

    None: the record is the file.
    """
    text: str
    tokens: np.ndarray | None = None
    bounds: np.ndarray | None = None
    origin: str = ""


Bad = Callable[[str], None]
"""Called with the reason when a record cannot be used.

It counts the record, or raises, by the policy of the caller.
"""


@dataclass(frozen=True)
class Fields:
    """Which fields of a record are read, and how long it may be."""

    text: str = "text"
    tokens: str | None = None
    bounds: str | None = None
    max_bytes: int = 16 * 2**20

    @classmethod
    def from_args(cls, args: DataArgs) -> Fields:
        """The fields of the recipe's `data` section."""
        return cls(args.text_field, args.token_field, args.token_bounds_field, args.max_record_bytes)

    @property
    def content(self) -> str:
        """The field with the document itself."""
        return self.tokens or self.text

    @property
    def names(self) -> list[str]:
        """All fields that are read where they exist."""
        wanted = [self.content, *([self.bounds] if self.bounds else []), *ORIGIN_FIELDS]
        return list(dict.fromkeys(wanted))

    def record(self, place: int, values: Any, where: str) -> Record:
        """The record of a mapping of fields.

        Raises:
            BadRecord: when it cannot be used.
        """
        if self.tokens is not None:
            return self._token_record(place, values, where)
        text = text_of(values, self.text, where)
        if 4 * len(text) > self.max_bytes:
            self.check_length(len(text.encode("utf-8", "surrogatepass")), where)
        return Record(place, text, origin=self._origin(values))

    def check_length(self, num_bytes: int, where: str) -> None:
        """Raise `BadRecord` for a record of more than `max_bytes`."""
        if num_bytes > self.max_bytes:
            raise BadRecord(too_long(where, num_bytes, self.max_bytes))

    def _origin(self, values: Mapping[str, Any]) -> str:
        for name in ORIGIN_FIELDS:
            origin = values.get(name)
            if isinstance(origin, str) and name != self.text:
                return origin
        return ""

    def _token_record(self, place: int, values: Any, where: str) -> Record:
        assert self.tokens is not None
        ids = _field(values, self.tokens, where, "token_field")
        tokens = token_ids(ids if ids is not None else [], f"{where}: field {self.tokens!r}")
        self.check_length(tokens.nbytes, where)
        bounds = None
        if self.bounds is not None:
            pairs = _field(values, self.bounds, where, "token_bounds_field")
            bounds = document_bounds(pairs, len(tokens), f"{where}: field {self.bounds!r}")
        return Record(place, "", tokens, bounds, self._origin(values))


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def too_long(where: str, num_bytes: int | None, limit: int) -> str:
    """The message for a record above the limit. `num_bytes` None: its length is not known."""
    size = f"{num_bytes:,} bytes, more than" if num_bytes is not None else "more bytes than"
    return f"{where} has {size} data.max_record_bytes = {limit:,}"


def text_of(values: Any, text_field: str, where: str) -> str:
    """The text of one record. A null text is an empty one.

    Raises:
        BadRecord: when there is no text; it names the fields seen.
    """
    text = _field(values, text_field, where, "text_field")
    if text is None:
        return ""
    if not isinstance(text, str):
        raise BadRecord(f"{where}: field {text_field!r} is a {type(text).__name__}, expected text")
    return text


def token_ids(values: Any, where: str) -> np.ndarray:
    """Token ids as uint32 [n].

    Raises:
        BadRecord: for what is no list of whole numbers from 0 to 2**32 - 1.
    """
    ids = _whole_numbers(values, where, "token ids")
    if ids.ndim != 1:
        raise BadRecord(f"{where} has {ids.ndim} dimensions, expected a list of token ids")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        raise BadRecord(
            f"{where} holds {ids.min() if int(ids.min()) < 0 else ids.max()}, which is no token id"
        )
    return ids.astype(np.uint32)


def document_bounds(values: Any, length: int, where: str) -> np.ndarray:
    """[start, stop) pairs as int64 [documents, 2], ascending, inside `length` tokens and apart.

    Raises:
        BadRecord: when they are not so.
    """
    bounds = _whole_numbers(values, where, "[start, stop) pairs").astype(np.int64)
    if bounds.size == 0:
        return np.empty((0, 2), dtype=np.int64)
    if bounds.ndim != 2 or bounds.shape[1] != 2:
        raise BadRecord(f"{where} has shape {list(bounds.shape)}, expected [documents, 2]")
    edges = bounds.ravel()
    if edges[0] < 0 or edges[-1] > length or np.any(np.diff(edges) < 0):
        raise BadRecord(f"{where} must ascend from 0 to {length} without overlap")
    return bounds


def _whole_numbers(values: Any, where: str, expected: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:  # ragged lists
        raise BadRecord(f"{where} is ragged, expected {expected}") from error
    if array.size == 0 and array.ndim:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise BadRecord(f"{where} holds {array.dtype.name} values, expected {expected}")
    return array


def _field(values: Any, name: str, where: str, setting: str) -> Any:
    if not isinstance(values, Mapping):
        raise BadRecord(f"{where} is a {type(values).__name__}, expected an object with a field {name!r}")
    try:
        return values[name]
    except KeyError:
        seen = ", ".join(sorted(map(str, values))[:12]) or "none"
        kind = "text field" if setting == "text_field" else "field"
        raise BadRecord(f"{where} has no {kind} {name!r} (fields seen: {seen}); set data.{setting}") from None
