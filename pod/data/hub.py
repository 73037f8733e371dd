"""Hub data sets, streamed through `datasets`, whole or one shard of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pod.data.records import Bad, BadRecord, Fields, Record, UnreadableFile, one_line


class HubShard(NamedTuple):
    """A run of a data set's records, in the order of its stream."""

    name: str
    config: str | None
    split: str
    index: int = 0
    count: int = 1
    state: str = ""
    """What `datasets` says about the split's size, to notice when it changes."""

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
    count = int(getattr(stream, "num_shards", 1) or 1)
    splits = getattr(getattr(stream, "info", None), "splits", None) or {}
    known = splits.get(split) if isinstance(splits, dict) else None
    state = f"{known.num_bytes} bytes, {known.num_examples} records" if known is not None else ""
    return [HubShard(name, config, split, index, count, state) for index in range(count)]


def read_hub(shard: HubShard, fields: Fields, bad: Bad) -> Iterator[Record]:
    """Records of a shard. A connection that breaks off is a `ValueError`, whatever the policy for unreadable files."""
    number = [0]
    with _named(shard, number):
        stream = _load(shard)
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


@contextmanager
def _named(shard: HubShard, number: list[int]) -> Iterator[None]:
    try:
        yield
    except (UnreadableFile, BadRecord):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{shard.where} cannot be read at record {number[0]} ({one_line(error)}): check the id, config and split, the "
            "network, or use a local copy"
        ) from error
