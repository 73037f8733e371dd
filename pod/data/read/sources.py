"""Documents from any source.

Sources are files, folders, lists, MosaicML and hub data sets, the standard library and installed packages.
`load_documents` turns sources (see `DataArgs.sources`) into a stream of `Document`. Only one record at a time
is held in memory. A record or file that cannot be read is an error that names the file, or is counted and
left out: `unreadable` decides.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from pod.data.args import DataArgs
from pod.data.read.documents import Document, SourceReport
from pod.data.read.work_shards import plan_work_shards, read_work_shard


def load_documents(sources: Iterable[str], **settings: Any) -> Iterator[Document]:
    """Stream the documents of `sources` in a fixed order (files sorted by name).

    Args:
        settings: settings of the recipe's `data` section.

    Raises:
        ValueError: in one line: a source does not exist or holds no text; or, with `unreadable="error"`, a
            file or record cannot be read.
    """
    args = DataArgs(sources=list(sources), **settings)
    work_shards = plan_work_shards(args)
    for number, source in enumerate(args.sources):
        report = SourceReport(source)
        own = (
            read_work_shard(work_shard, args, report)
            for work_shard in work_shards
            if work_shard.source == number
        )
        for document in chain.from_iterable(own):
            report.add_document(document)
            yield document
        report.check_any()
