"""Hub data sets, streamed through `datasets`, whole or one shard of them at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pod.data.read.records import Bad, BadRecord, Fields, Record, UnreadableFile, short_reason


class HubShard(NamedTuple):
    """Consecutive records of a hub data set: one of `count` parts of its stream."""

    name: str
    """Hub id of the data set, or a local folder."""
    config: str | None
    """Its configuration; None for the default."""
    split: str
    """Its split, such as `train`."""
    revision: str | None = None
    """Commit of the data set, the same for everything that is read; None for a folder of this machine."""
    index: int = 0
    """Number of this shard, from 0."""
    count: int = 1
    """Number of shards in the data set."""

    @property
    def where(self) -> str:
        """The shard's name in error messages."""
        config = f" config {self.config!r}" if self.config else ""
        part = f" shard {self.index}" if self.count > 1 else ""
        return f"hub data set {self.name!r}{config} split {self.split!r}{part}"


@dataclass
class _Position:
    """Where the reading of a shard has arrived."""

    record: int = 0
    """Number of the record, from 0, that an error of reading names."""


def hub_shards(name: str, config: str | None, split: str) -> list[HubShard]:
    """The shards of a data set at its present commit.

    Raises:
        ValueError: the data set cannot be found or read.
    """
    whole = HubShard(name, config, split)
    with _named(whole, _Position()):
        whole = whole._replace(revision=revision_of(name))
        count = int(getattr(_load(whole), "num_shards", 1) or 1)
    return [whole._replace(index=index, count=count) for index in range(count)]


def read_hub(shard: HubShard, fields: Fields, bad: Bad) -> Iterator[Record]:
    """Records of a shard. Records that cannot be used are reported to `bad`.

    Raises:
        ValueError: the connection broke off. `unreadable="skip"` does not skip this.
    """
    position = _Position()
    with _named(shard, position):
        stream = _load(shard)
        if shard.count > 1:
            stream = stream.shard(num_shards=shard.count, index=shard.index, contiguous=True)
        columns = getattr(stream, "column_names", None)
        if columns and fields.content in columns:
            stream = stream.select_columns([name for name in fields.names if name in columns])
        for number, values in enumerate(stream):
            position.record = number + 1
            where = f"{shard.where} record {number}"
            try:
                record = fields.record(number, values, where)
            except BadRecord as error:
                bad(str(error))
                continue
            yield record


def revision_of(name: str) -> str | None:
    """The present commit of data set `name` on the hub; None for a local folder."""
    from huggingface_hub import HfApi

    return None if Path(name).is_dir() else HfApi().dataset_info(name).sha


def _load(shard: HubShard) -> Any:
    import datasets

    return datasets.load_dataset(
        shard.name, shard.config, split=shard.split, revision=shard.revision, streaming=True
    )


@contextmanager
def _named(shard: HubShard, position: _Position) -> Iterator[None]:
    """Turn errors of the block into a ValueError of one line that names the shard and `position.record`."""
    try:
        yield
    except (UnreadableFile, BadRecord):
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{shard.where} cannot be read at record {position.record} ({short_reason(error)}): "
            "check the id, config and split, the network, or use a local copy"
        ) from error
