"""From a record of any format to text or token ids, checked field by field.

A record is a JSON object, a table row or an MDS sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pod.errors import one_line

if TYPE_CHECKING:
    from pod.data.args import DataArgs

ORIGIN_FIELDS = ("source", "domain")
"""Fields that say where a record comes from: Dolma's `source`, ProLong's `domain`."""


class UnreadableFile(ValueError):
    """A file is damaged, or has another encoding or format. The message names it in one line."""


class BadRecord(ValueError):
    """A record is damaged, too long, or lacks the wanted field.

    The message names the file, and where in it the record is, in one line.
    """


class Record(NamedTuple):
    """What one record holds: a text, or token ids with the bounds of their documents."""

    place: int | None
    """Number of the record in its file. If only a part of the file is read, the byte where its line starts.

    None: the whole file is one record.
    """
    text: str
    """The text; empty for a record of token ids."""
    tokens: np.ndarray | None = None
    """Token ids, uint32 [n]; None for a record of text."""
    bounds: np.ndarray | None = None
    """[start, stop) of each document in `tokens`, int64 [documents, 2]; None: they are one document."""
    origin: str = ""
    """Where the record's own field says that it comes from (ORIGIN_FIELDS); empty without one."""


Bad = Callable[[str], None]
"""Called with the reason when a record cannot be used.

It counts the record, or raises, by the policy of the caller.
"""


@dataclass(frozen=True)
class Fields:
    """Which fields of a record are read, and how long a record may be."""

    text: str = "text"
    """Name of the field with the text."""
    tokens: str | None = None
    """Name of the field with token ids, which are then read in place of the text."""
    bounds: str | None = None
    """Name of the field with [start, stop) pairs of the documents in the token ids."""
    max_bytes: int = 16 * 2**20
    """Most bytes of a text (UTF-8) or of token ids (4 bytes each)."""

    @classmethod
    def from_args(cls, args: DataArgs) -> Fields:
        """The fields of the recipe's `data` section."""
        return cls(args.text_field, args.token_field, args.token_bounds_field, args.max_record_bytes)

    @property
    def content(self) -> str:
        """Name of the field with the document itself: token ids or text."""
        return self.tokens or self.text

    @property
    def names(self) -> list[str]:
        """Names of all fields that are read. A record may lack those that tell its origin."""
        wanted = [self.content, *([self.bounds] if self.bounds else []), *ORIGIN_FIELDS]
        return list(dict.fromkeys(wanted))

    def record(self, place: int, values: Any, where: str) -> Record:
        """Make a record from its fields.

        Args:
            place: number of the record, or byte where it starts (see `Record.place`).
            values: the fields by name.
            where: the file and the record, as messages begin.

        Raises:
            BadRecord: `values` is no mapping, lacks the wanted field, or has something else in it; or the
                record is too long.
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
        """The first text in one of ORIGIN_FIELDS; empty without one."""
        for name in ORIGIN_FIELDS:
            origin = values.get(name)
            if isinstance(origin, str) and name != self.text:
                return origin
        return ""

    def _token_record(self, place: int, values: Any, where: str) -> Record:
        """`record` for data that is tokenised already."""
        assert self.tokens is not None
        ids = _field(values, self.tokens, where, "token_field")
        tokens = token_ids(ids if ids is not None else [], f"{where}: field {self.tokens!r}")
        self.check_length(tokens.nbytes, where)
        bounds = None
        if self.bounds is not None:
            pairs = _field(values, self.bounds, where, "token_bounds_field")
            bounds = document_bounds(pairs, len(tokens), f"{where}: field {self.bounds!r}")
        return Record(place, "", tokens, bounds, self._origin(values))


def short_reason(error: BaseException) -> str:
    """The message of an error as one line of at most 200 characters. It may quote a record."""
    return one_line(error, limit=200)


def too_long(where: str, num_bytes: int | None, limit: int) -> str:
    """The message about a record above the limit.

    Args:
        where: the file and the record.
        num_bytes: length of the record; None where it is not known.
        limit: data.max_record_bytes.
    """
    size = f"{num_bytes:,} bytes, more than" if num_bytes is not None else "more bytes than"
    return f"{where} has {size} data.max_record_bytes = {limit:,}"


def text_of(values: Any, text_field: str, where: str) -> str:
    """The text of one record. A text that is null counts as empty.

    Raises:
        BadRecord: the field is missing (the message names the fields that exist), or does not hold a text.
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
        BadRecord: `values` is not a list of whole numbers from 0 to 2**32 - 1.
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
    """[start, stop) pairs as int64 [documents, 2].

    Raises:
        BadRecord: the pairs do not ascend, overlap, or reach beyond `length` tokens.
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
    """`values` as an array of whole numbers. Raises BadRecord when they are ragged or of another type."""
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
    """The field `name` of a record. Raises BadRecord when it is missing; the message names data.`setting`."""
    if not isinstance(values, Mapping):
        raise BadRecord(f"{where} is a {type(values).__name__}, expected an object with a field {name!r}")
    try:
        return values[name]
    except KeyError:
        seen = ", ".join(sorted(map(str, values))[:12]) or "none"
        kind = "text field" if setting == "text_field" else "field"
        raise BadRecord(f"{where} has no {kind} {name!r} (fields seen: {seen}); set data.{setting}") from None
