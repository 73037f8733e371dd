"""Reads the sources: tokenises documents, and keeps the pieces that the draw may need.

Each work shard is read by one process, whichever is free. The results are taken in the order that the seed
gives.
"""

from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from pod.data.balance.reservoir import Limits, Reservoir
from pod.data.read.documents import Document, SourceReport
from pod.data.read.filters import imported_filter, passes
from pod.data.read.work_shards import WorkShard, read_work_shard
from pod.data.run.data_progress import Progress
from pod.data.run.job import Job
from pod.data.run.workers import Count, in_order
from pod.data.tokens.token_file import PIECE, TokenFile, file_order, own_tokens
from pod.data.tokens.tokenizers import identity

BATCH_CHARACTERS = 1_000_000
"""Characters (or given token ids) after which a batch of documents is tokenised."""
BATCH_DOCUMENTS = 256
"""Most documents in a batch."""
PRUNE_TOKENS = 1 << 22
"""Tokens, at least, that a process adds from its work shard before it drops those that are not needed."""
PRUNE_SHARE = 16
"""The kept pieces are pruned whenever the number of work shards read has grown by one 16th."""
LEAST_WORK_SHARDS = 16
"""Fewest work shards to read, if there are so many. Fewer would be no fair sample of the sources."""


@dataclass
class Reading:
    """What was read, up to the work shard after which the draw had enough."""

    reservoir: Reservoir
    """The kept pieces."""
    reports: list[SourceReport]
    """What was read of each source, in the order of `sources`."""
    num_work_shards: int = 0
    """Work shards read; they are the first ones of `Job.order`."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Tokens in the file of each work shard."""


def read_sources(job: Job) -> Reading:
    """Read work shards until every interval is full, or all of them.

    Work shards that an earlier run finished are not read again. The result depends on the order of the work
    shards alone, not on the number of workers, nor on the moment at which an earlier run was killed.

    Raises:
        ValueError: a source cannot be read, or was read whole and has no text.
    """
    order = job.order()
    reservoir = Reservoir(job.args, job.seed, job.held_out_tokens)
    reading = Reading(reservoir, [SourceReport(spec) for spec in job.args.sources])
    progress = Progress(sum(work_shard.text_bytes for work_shard in job.work_shards))
    calls = ((number, deepcopy(reservoir.limits)) for number in order)
    with closing(progress), closing(in_order(_Task(job), calls, job.workers, progress.read)) as work_shards:
        next_prune = 1
        for position, number in enumerate(work_shards, start=1):
            _take_in(job, reading, number)
            if position < min(next_prune, len(order)):
                continue
            next_prune = prune_after(position)
            reservoir.prune()
            _compact(job, reading)
            progress.show(reservoir)
            if reservoir.is_full and position >= LEAST_WORK_SHARDS:
                break
    unread = {job.work_shards[number].source for number in order[reading.num_work_shards :]}
    for source in set(range(len(job.args.sources))) - unread:
        reading.reports[source].check_any()
    return reading


def prune_after(position: int) -> int:
    """Number of work shards read at which the kept pieces are pruned next, after a prune at `position`."""
    return position + max(1, position // PRUNE_SHARE)


def read_one(job: Job, number: int, limits: Limits, count: Count) -> None:
    """Read work shard `number` into its file, unless the file is there.

    Only documents that the draw may need are tokenised.

    Args:
        limits: the limits of the kept pieces when this work shard was given out.
        count: called with the bytes of text that were read since the last call.

    Raises:
        ValueError: a file or record cannot be read, and the settings do not skip it.
    """
    work_shard = job.work_shards[number]
    file = job.work_shard_file(number)
    found = file.read(verify=True)
    if found is not None and not (
        found[2].skips and job.args.unreadable == "error" and not work_shard.tolerate
    ):
        count(work_shard.text_bytes)
        return
    report = SourceReport(work_shard.spec)
    reservoir = Reservoir(job.args, job.seed, job.held_out_tokens, limits)
    counted = 0
    with closing(TokenFile(job.work_dir, job.dtype)) as token_file:
        for batch in batches(documents_of(job, work_shard, report)):
            documents = _tokenised(job, work_shard, batch, reservoir, token_file)
            reservoir.add(reservoir.cut(documents))
            if reservoir.num_added > max(PRUNE_TOKENS, token_file.size // 2):
                reservoir.prune()
                reservoir.pieces = file_order(reservoir.pieces)
                if token_file.size > 2 * own_tokens(reservoir.pieces).sum():
                    token_file.keep(reservoir.pieces)
            # The size of hub shards is not known: their bytes are not counted.
            size = min(sum(len(one.text) for one in batch), max(0, work_shard.text_bytes - counted))
            counted += size
            count(size)
        reservoir.prune()
        file.write(file_order(reservoir.pieces), token_file.take, report)
    count(work_shard.text_bytes - counted)


def documents_of(job: Job, work_shard: WorkShard, report: SourceReport) -> Iterator[Document]:
    """The documents of a work shard that `document_filter` keeps. All that is read is counted in `report`."""
    name = job.args.document_filter
    own_filter = imported_filter(name) if name else None
    for document in read_work_shard(work_shard, job.args, report):
        if name and own_filter and not passes(own_filter, name, document):
            report.filtered += 1
            continue
        report.add_document(document)
        yield document


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in batches that are tokenised together (BATCH_CHARACTERS, BATCH_DOCUMENTS)."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text) + (0 if document.tokens is None else len(document.tokens))
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode(job: Job, batch: list[Document]) -> list[np.ndarray]:
    """Token ids of each document, uint32 [n], boundary tokens included.

    Ids of a document that came tokenised are taken as they are.

    Raises:
        ValueError: such ids are not in the tokenizer's vocabulary.
    """
    before = np.array(job.boundary.before, dtype=np.uint32)
    after = np.array(job.boundary.after, dtype=np.uint32)
    encoded = iter(job.encoder([document.text for document in batch if document.tokens is None]))
    tokens = []
    for document in batch:
        if document.tokens is None:
            tokens.append(np.concatenate([before, next(encoded), after]))
            continue
        if len(document.tokens) and int(document.tokens.max()) >= job.vocab_size:
            raise ValueError(
                f"{document.name} has token id {document.tokens.max()}, but the tokenizer has only "
                f"{job.vocab_size} tokens: set data.tokenizer to the tokenizer of these ids"
            )
        tokens.append(document.tokens)
    return tokens


class _Task:
    """`read_one` as the workers call it; can be pickled."""

    def __init__(self, job: Job):
        self.job = job

    def __call__(self, count: Count, number: int, limits: Limits) -> int:
        read_one(self.job, number, limits, count)
        return number


def _tokenised(
    job: Job, work_shard: WorkShard, batch: list[Document], reservoir: Reservoir, token_file: TokenFile
) -> np.ndarray:
    """Tokenise those documents of a batch that may be kept, and append them to the token file.

    Returns:
        PIECE records of these documents, uncut, with digests in place of sampling keys.
    """
    identities = [identity(document) for document in batch]
    found = np.zeros(len(batch), PIECE)
    found["sampling_key"] = [one.digest for one in identities]
    found["held_out_key"] = [one.held_out_key for one in identities]
    found["source"] = work_shard.source
    around = len(job.boundary.before) + len(job.boundary.after)
    most = np.array([job.encoder.most_tokens(one.size) + around for one in identities])
    chosen = np.flatnonzero(
        reservoir.may_need(found["sampling_key"], found["held_out_key"], most, work_shard.source)
    )
    batch = [batch[number] for number in chosen.tolist()]
    tokens = encode(job, batch)
    found = found[chosen]
    special = iter(job.encoder.holds_special)
    found["special"] = [document.tokens is None and next(special) for document in batch]
    found["length"] = [len(ids) for ids in tokens]
    found["start"] = token_file.append(tokens)
    return found


def _take_in(job: Job, reading: Reading, number: int) -> None:
    """Add the pieces and the report of a finished work shard to `reading`."""
    found = job.work_shard_file(number).read()
    assert found is not None, f"the file of work shard {number} went while the data was prepared"
    pieces, size, report = found
    work_shard = job.work_shards[number]
    pieces["work_shard"], pieces["source"] = number, work_shard.source
    reading.reservoir.add(pieces)
    reading.sizes[number] = size
    reading.reports[work_shard.source].add(report)
    reading.num_work_shards += 1


def _compact(job: Job, reading: Reading) -> None:
    """Rewrite the files of work shards of which more than half of the tokens are no longer needed."""
    reservoir = reading.reservoir
    needed = np.bincount(
        reservoir.pieces["work_shard"], weights=own_tokens(reservoir.pieces), minlength=len(job.work_shards)
    )
    wasted = [number for number, size in reading.sizes.items() if size > 2 * needed[number]]
    if not wasted:
        return
    order = np.lexsort((reservoir.pieces["start"], reservoir.pieces["copy"], reservoir.pieces["work_shard"]))
    work_shards = reservoir.pieces["work_shard"][order]
    for number in wasted:
        own = order[slice(*np.searchsorted(work_shards, [number, number + 1]))]
        left = reservoir.pieces[own]
        file = job.work_shard_file(number)
        found = file.read()
        assert found is not None, f"the file of work shard {number} went while the data was prepared"
        file.write(left, file.take, found[2])
        reservoir.pieces["start"][own] = left["start"]
        reading.sizes[number] = int(needed[number])
