"""Hub data sets, streamed through `datasets`, whole or one shard of them at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pod.data.records import Bad, BadRecord, Fields, Record, SourceChanged, UnreadableFile, one_line


class HubShard(NamedTuple):
    """A run of a data set's records, in the order of its stream."""

    name: str
    config: str | None
    split: str
    index: int = 0
    count: int = 1
    state: str = ""
    """Digest of what `datasets` says about the split: its size, and its files with their revision or time of change."""

    @property
    def where(self) -> str:
        """For messages."""
        config = f" config {self.config!r}" if self.config else ""
        part = f" shard {self.index}" if self.count > 1 else ""
        return f"hub data set {self.name!r}{config} split {self.split!r}{part}"


def hub_shards(name: str, config: str | None, split: str) -> list[HubShard]:
    """The shards that the stream of a data set consists of. Raises `ValueError` when there is no such data set."""
    whole = HubShard(name, config, split)
    with _named(whole, [0]):
        stream = _load(whole)
    count, state = _shape(stream, split)
    return [HubShard(name, config, split, index, count, state) for index in range(count)]


def read_hub(shard: HubShard, fields: Fields, bad: Bad) -> Iterator[Record]:
    """Records of a shard. A connection that breaks off is a `ValueError`, whatever the policy for unreadable files."""
    number = [0]
    with _named(shard, number):
        stream = _load(shard)
        if _shape(stream, shard.split) != (shard.count, shard.state):
            raise SourceChanged(f"{shard.where} was changed while the data was prepared: start again")
        if shard.count > 1:
            stream = stream.shard(num_shards=shard.count, index=shard.index, contiguous=True)
        columns = getattr(stream, "column_names", None)
        if columns and fields.content in columns:
            stream = stream.select_columns([name for name in fields.names if name in columns])
        for values in stream:
            where = f"{shard.where} record {number[0]}"
            number[0] += 1
            try:
                record = fields.record(number[0] - 1, values, where)
                if len(record.text) * 4 > fields.max_bytes:
                    fields.check_length(len(record.text.encode("utf-8", "surrogatepass")), where)
            except BadRecord as error:
                bad(str(error))
                continue
            yield record


def _load(shard: HubShard) -> Any:
    import datasets

    return datasets.load_dataset(shard.name, shard.config, split=shard.split, streaming=True)


def _shape(stream: Any, split: str) -> tuple[int, str]:
    """Shards of a stream, and a digest that changes with its files."""
    count = int(getattr(stream, "num_shards", 1) or 1)
    splits = getattr(getattr(stream, "info", None), "splits", None) or {}
    known = splits.get(split)
    size = [known.num_bytes, known.num_examples] if known is not None else []
    # No public name leads to the files; on the hub theirs hold the commit. Without them the size alone must do.
    arguments = getattr(getattr(stream, "_ex_iterable", None), "kwargs", None)
    files = [[name, *_local_state(name)] for name in _strings(arguments)]
    return count, hashlib.sha256(json.dumps([size, files]).encode()).hexdigest()[:16] if size or files else ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


def _local_state(name: str) -> list[int]:
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return []
    return [found.st_size, found.st_mtime_ns]


@contextmanager
def _named(shard: HubShard, number: list[int]) -> Iterator[None]:
    try:
        yield
    except (UnreadableFile, BadRecord, SourceChanged):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{shard.where} cannot be read at record {number[0]} ({one_line(error)}): check the id, config and split, the "
            "network, or use a local copy"
        ) from error
