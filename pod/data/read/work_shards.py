"""Cuts sources into work shards: a work shard is what one process reads at a time.

It is a run of small files, one large file, a range of a large jsonl file, a MosaicML shard or a shard of a
hub data set. How sources are cut depends on the files and data.target_tokens only. Reading all work shards
one after the other gives the documents in the order of the sources and of their files' names.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pod.data.args import DataArgs
from pod.data.read.books import split_fragment
from pod.data.read.discovery import Files, files_of, hub_spec
from pod.data.read.documents import Document, SourceReport
from pod.data.read.hub import HubShard, hub_shards, read_hub
from pod.data.read.mds import MdsShard, read_shard
from pod.data.read.readers import is_compressed, kind_of, read_copy, read_records
from pod.data.read.records import Bad, Fields, Record, UnreadableFile
from pod.remote import is_remote, remote_state

WORK_SHARDS_PER_SOURCE = 64
"""Fewest work shards of a source, so that many processes have work. A small source has fewer."""
SMALLEST_GROUP_BYTES = 2**20
GROUP_BYTES = 32 * 2**20
"""Limits in bytes of the text in a run of small files: the smallest and the largest that is chosen."""
SMALLEST_RANGE_BYTES = 2**20
RANGE_BYTES = 64 * 2**20
"""Bytes in a range of a large jsonl file: the smallest and the largest that is chosen."""
BYTES_PER_TARGET_TOKEN = 0.25
"""Most bytes in a work shard per token of the target, so that reading can stop soon after the target."""
LISTED_RECORDS = 3
"""Bad records that are named of one file. If all of them were, they would leave no space for other files."""
COMPRESSION = 4
"""Text is about this many times larger than its compressed file."""
READING_VERSION = 3
"""To be raised when a change of the readers makes other documents of the same file."""


class FilePart(NamedTuple):
    """A file, or the bytes [start, stop) of it, as it was when the work shard was planned."""

    path: str
    size: int
    """Bytes; -1 = missing or no regular file."""
    mtime_ns: int
    """Time of its last change in nanoseconds; for a URL, the number that `remote_state` gives."""
    start: int = 0
    stop: int | None = None
    """None: the whole file is read."""
    shard: MdsShard | None = None
    """How a shard of a MosaicML data set is read; None for other files."""

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds."""
        if self.stop is not None:
            return self.stop - self.start
        if self.shard is not None:
            return self.shard.raw_bytes
        packed = is_compressed(self.path) or kind_of(self.path) == "parquet"
        return max(self.size, 0) * (COMPRESSION if packed else 1)

    def fingerprint_fields(self) -> list[Any]:
        """What a fingerprint says of it: absolute path, size, time of change, range and MosaicML shard."""
        path = self.path if is_remote(self.path) else os.path.abspath(self.path)
        shard = None
        if self.shard is not None:
            shard = [self.shard.columns, self.shard.samples, self.shard.raw_bytes, self.shard.file_bytes]
        return [path, self.size, self.mtime_ns, self.start, self.stop, shard]

    def check_unchanged(self) -> None:
        """Raise `ValueError` when the file has been changed since the work shard was planned."""
        if _state(self.path) != (self.size, self.mtime_ns):
            raise ValueError(f"{self.path} was changed while the data was prepared: start again")


@dataclass(frozen=True)
class WorkShard:
    """What one process reads at a time; can be pickled."""

    source: int
    """Index of its source in `args.sources`."""
    spec: str
    """The source as the user wrote it."""
    files: tuple[FilePart, ...] = ()
    """The files to read, in order; empty for a hub data set."""
    hub: HubShard | None = None
    """The shard to read of a hub data set."""
    tolerate: bool = False
    """Skip unreadable files even with `unreadable="error"`."""
    left_out: tuple[str, ...] = ()
    """Files of the source that are not read at all, each with the reason. The first work shard names them."""
    split: str = ""
    """The fragment of the source without `#`, which says how its texts are split: `essays`; or empty."""

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds; 0 for hub data sets, where that is not known."""
        return sum(one.text_bytes for one in self.files)

    def is_lenient(self, args: DataArgs) -> bool:
        """Whether files and records that cannot be read are counted and left out, and not an error."""
        return args.unreadable == "skip" or self.tolerate

    def fingerprint(self) -> str:
        """64 hex digits made of what is read: paths, sizes, times of change, ranges, hub shard and fragment.

        The settings are no part of it.
        """
        files = [one.fingerprint_fields() for one in self.files]
        content = [READING_VERSION, files, self.hub, self.tolerate, self.left_out, self.split]
        return hashlib.sha256(json.dumps(content).encode("utf-8", "surrogatepass")).hexdigest()


def plan_work_shards(args: DataArgs) -> list[WorkShard]:
    """The work shards of all sources, in reading order.

    Raises:
        ValueError: in one line: a source does not exist; or, with `unreadable="error"`, it has files of an
            unknown type or folders that cannot be listed.
    """
    work_shards = []
    for source, spec in enumerate(args.sources):
        without_fragment, _ = split_fragment(spec)
        hub = hub_spec(without_fragment)
        split = spec[len(without_fragment) + 1 :]
        if hub is not None:
            work_shards += [WorkShard(source, spec, hub=shard, split=split) for shard in hub_shards(*hub)]
            continue
        files = files_of(without_fragment, tuple(args.include))
        if files.unreadable and args.unreadable == "error" and not files.tolerate:
            raise ValueError(
                f"{files.unreadable[0]} ({len(files.unreadable)} in total): correct it, choose the files to "
                "read with data.include, or set data.unreadable=skip"
            )
        for number, group in enumerate(_groups(files, args.target_tokens, may_cut=not split)):
            left_out = () if number else (*files.left_out, *files.unreadable)
            work_shards.append(WorkShard(source, spec, group, None, files.tolerate, left_out, split))
    return work_shards


def read_work_shard(work_shard: WorkShard, args: DataArgs, report: SourceReport) -> Iterator[Document]:
    """The documents of a work shard, in order, without empty ones.

    Args:
        report: gets the number of files read, and everything that is left out. The documents are for the
            caller to count.

    Raises:
        ValueError: in one line: a file has changed since the work shard was planned; or, with
            `unreadable="error"`, a file or record cannot be read.
    """
    for reason in work_shard.left_out:
        report.skip(reason)
    if work_shard.hub is not None:
        yield from _read_hub_shard(work_shard, work_shard.hub, args, report)
    for part in work_shard.files:
        yield from _read_file(part, work_shard, args, report)


def _read_file(
    part: FilePart, work_shard: WorkShard, args: DataArgs, report: SourceReport
) -> Iterator[Document]:
    """The documents of a file.

    At damage, reading of the file ends, or raises ValueError with `unreadable="error"`. A changed file always
    raises ValueError.
    """
    if part.start == 0:
        report.files += 1
    left_out_before = report.empty, report.records_skipped
    fields = Fields.from_args(args)
    bad = _policy(work_shard, args, report)
    given = 0
    part.check_unchanged()
    try:
        if part.size < 0:
            raise UnreadableFile(f"{part.path} is missing or not a regular file")
        prefix, records = _records(part, fields, bad)
        for document in _not_empty(_documents(prefix, records, work_shard.spec, bad), report):
            given += 1
            yield document
    except UnreadableFile as error:
        part.check_unchanged()  # if the file was changed, that is the reason to name
        _leave_out(error, work_shard, args, report)
        return
    part.check_unchanged()
    is_whole = part.stop is None and part.shard is None
    if is_whole and given == 0 and left_out_before == (report.empty, report.records_skipped):
        report.empty += 1  # a file without any record


def _read_hub_shard(
    work_shard: WorkShard, hub: HubShard, args: DataArgs, report: SourceReport
) -> Iterator[Document]:
    """The documents of a shard of a hub data set."""
    if hub.index == 0:
        report.files += 1
    without_fragment, _ = split_fragment(work_shard.spec)
    prefix = f"{without_fragment}:{hub.index}:" if hub.count > 1 else f"{without_fragment}:"
    bad = _policy(work_shard, args, report)
    try:
        records = read_hub(hub, Fields.from_args(args), bad)
        yield from _not_empty(_documents(prefix, records, work_shard.spec, bad), report)
    except UnreadableFile as error:
        _leave_out(error, work_shard, args, report)


def _policy(work_shard: WorkShard, args: DataArgs, report: SourceReport) -> Bad:
    """The function to call for each bad record of a file: it counts the record, or raises UnreadableFile."""

    def stop(reason: str) -> None:
        raise UnreadableFile(reason)

    numbers = count()

    def skip(reason: str) -> None:
        report.skip_record(reason, is_listed=next(numbers) < LISTED_RECORDS)

    return skip if work_shard.is_lenient(args) else stop


def _leave_out(error: UnreadableFile, work_shard: WorkShard, args: DataArgs, report: SourceReport) -> None:
    """Count a file that cannot be read, or raise `ValueError` with `unreadable="error"`."""
    if not work_shard.is_lenient(args):
        raise ValueError(f"{error}; repair or remove it, or set data.unreadable=skip") from error
    report.skip(str(error))


def _not_empty(documents: Iterator[Document], report: SourceReport) -> Iterator[Document]:
    """The documents that hold something; the others are counted."""
    for document in documents:
        if document.tokens is None:
            is_empty = not document.text.strip()
        else:
            is_empty = len(document.tokens) == 0
        if is_empty:
            report.empty += 1
        else:
            yield document


def _records(part: FilePart, fields: Fields, bad: Bad) -> tuple[str, Iterator[Record]]:
    """The text with which the names of a file's records begin, and the records."""
    if part.shard is not None:
        return f"{part.path}:", read_shard(part.shard, fields, bad)
    if is_remote(part.path):
        return f"{part.path}:", read_copy(part.path, fields, bad)
    prefix = f"{part.path}:" if part.stop is None else f"{part.path}:byte "
    return prefix, read_records(Path(part.path), fields, bad, part.start, part.stop)


def _documents(prefix: str, records: Iterator[Record], spec: str, bad: Bad) -> Iterator[Document]:
    """The documents of a file's records.

    A record is one document. A record of token ids with bounds, and a text whose source has a fragment, is
    several.

    Args:
        prefix: what the names of the records begin with.
        spec: the source as the user wrote it.
    """
    splitter = split_fragment(spec)[1]
    for record in records:
        name = prefix.removesuffix(":") if record.place is None else f"{prefix}{record.place}"
        if record.tokens is not None:
            yield from _documents_of_tokens(record, record.tokens, name, spec, bad)
        elif splitter is None:
            yield Document(record.text, spec, name, None, record.origin)
        else:
            for number, piece in enumerate(splitter(record.text)):
                yield Document(piece, spec, f"{name}:{number}", None, record.origin)


def _documents_of_tokens(
    record: Record, tokens: np.ndarray, name: str, spec: str, bad: Bad
) -> Iterator[Document]:
    """The documents of a record of token ids. Ids that lie in no document are reported to `bad`."""
    if record.bounds is None:
        yield Document("", spec, name, tokens, record.origin)
        return
    for number, (start, stop) in enumerate(record.bounds.tolist()):
        # A copy: a document that waits in a batch must not keep the whole sample in memory.
        yield Document("", spec, f"{name}:{number}", tokens[start:stop].copy(), record.origin)
    left = len(tokens) - int(np.diff(record.bounds).sum())
    if left:
        bad(f"{name} has {left} token ids outside the documents of data.token_bounds_field")


def _groups(files: Files, target_tokens: int | None, may_cut: bool) -> Iterator[tuple[FilePart, ...]]:
    """The files of a source in groups, each for one work shard.

    Consecutive small files form a group. A large file, a range of a large jsonl file and a MosaicML shard are
    groups of their own.

    Args:
        may_cut: whether large jsonl files may be read in ranges.
    """
    whole = [FilePart(one.path, *_state(one.path), shard=one.shard) for one in files.found]
    share = sum(one.text_bytes for one in whole) // WORK_SHARDS_PER_SOURCE
    if target_tokens is not None:
        share = min(share, int(BYTES_PER_TARGET_TOKEN * target_tokens))
    limit = min(GROUP_BYTES, max(SMALLEST_GROUP_BYTES, share))
    range_bytes = min(RANGE_BYTES, max(SMALLEST_RANGE_BYTES, share))
    group: list[FilePart] = []
    group_bytes = 0
    for part in whole:
        alone = _ranges(part, range_bytes) if may_cut else []
        if part.shard is not None:
            alone = [part]
        if group and (alone or group_bytes + part.text_bytes > limit):
            yield tuple(group)
            group, group_bytes = [], 0
        if alone:
            yield from ((one,) for one in alone)
            continue
        group.append(part)
        group_bytes += part.text_bytes
    if group:
        yield tuple(group)


def _ranges(part: FilePart, range_bytes: int) -> list[FilePart]:
    """The ranges of a large plain jsonl file on this machine; empty for every other file."""
    whole = is_compressed(part.path) or is_remote(part.path)
    if part.size <= range_bytes or kind_of(part.path) != "lines" or whole:
        return []
    starts = range(0, part.size, range_bytes)
    return [part._replace(start=start, stop=min(start + range_bytes, part.size)) for start in starts]


def _state(path: str) -> tuple[int, int]:
    """Size in bytes and time of the last change in nanoseconds; for a URL as in `remote_state`.

    (-1, 0) for a path that is missing or no regular file. It counts as unreadable when its turn comes.
    """
    if is_remote(path):
        return remote_state(path)
    try:
        found = os.stat(path)
    except OSError:
        return -1, 0
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else (-1, 0)
