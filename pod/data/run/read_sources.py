"""read → tokenise → keep or drop.

One work shard is read in any process, all of them in the order that the seed gives.
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
BATCH_DOCUMENTS = 256
PRUNE_TOKENS = 1 << 22
"""A work shard adds at least this many tokens before it looks for what it can drop."""
PRUNE_SHARE = 16
"""The draw of what is read is brought up to date when one more of so many work shards was read."""
LEAST_WORK_SHARDS = 16
"""Fewest work shards to read, where there are so many. Fewer would be no fair sample of the sources."""


@dataclass
class Reading:
    """What was read, up to the work shard where the draw had enough."""

    reservoir: Reservoir
    reports: list[SourceReport]
    """What each source gave."""
    num_work_shards: int = 0
    """Work shards read; they are the first ones of `Job.order`."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Tokens in the file of each work shard."""


def read_sources(job: Job) -> Reading:
    """Read work shards until every interval is full, or all of them.

    What an earlier run finished is not read again. The result depends on the order of the work shards alone.
    Neither the number of workers nor the moment of a kill shows.
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
    """After how many work shards the draw is brought up to date next; it last was after `position`."""
    return position + max(1, position // PRUNE_SHARE)


def read_one(job: Job, number: int, limits: Limits, count: Count) -> None:
    """Read work shard `number` into its file, unless it is there.

    Only those of its documents are tokenised that the draw may need.

    Args:
        count: is told the bytes of text of the work shard.

    Raises:
        ValueError: for what cannot be read, as the settings say.
    """
    work_shard, file = job.work_shards[number], job.work_shard_file(number)
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
            # the bytes of hub shards are not known
            size = min(sum(len(one.text) for one in batch), max(0, work_shard.text_bytes - counted))
            counted += size
            count(size)
        reservoir.prune()
        file.write(file_order(reservoir.pieces), token_file.take, report)
    count(work_shard.text_bytes - counted)


def documents_of(job: Job, work_shard: WorkShard, report: SourceReport) -> Iterator[Document]:
    """The documents of a work shard that `document_filter` lets through; fills in `report`."""
    name = job.args.document_filter
    own_filter = imported_filter(name) if name else None
    for document in read_work_shard(work_shard, job.args, report):
        if name and own_filter and not passes(own_filter, name, document):
            report.filtered += 1
            continue
        report.add_document(document)
        yield document


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in the groups that are tokenised together."""
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
    """Ids of each document, boundary tokens included. Given ids are checked and taken as they are."""
    before, after = (np.array(ids, dtype=np.uint32) for ids in (job.boundary.before, job.boundary.after))
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
    """The documents of a batch that may be kept, tokenised into the token file.

    They are PIECE records with digests in place of sampling keys.
    """
    identities = [identity(document) for document in batch]
    found = np.zeros(len(batch), PIECE)
    found["sampling_key"] = [one.digest for one in identities]
    found["place"] = [one.place for one in identities]
    found["source"] = work_shard.source
    around = len(job.boundary.before) + len(job.boundary.after)
    most = np.array([job.encoder.most_tokens(one.size) + around for one in identities])
    chosen = np.flatnonzero(
        reservoir.may_need(found["sampling_key"], found["place"], most, work_shard.source)
    )
    batch = [batch[number] for number in chosen.tolist()]
    tokens, found = encode(job, batch), found[chosen]
    special = iter(job.encoder.holds_special)
    found["special"] = [document.tokens is None and next(special) for document in batch]
    found["length"] = [len(ids) for ids in tokens]
    found["start"] = token_file.append(tokens)
    return found


def _take_in(job: Job, reading: Reading, number: int) -> None:
    """Add the pieces of a finished work shard to what is kept."""
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
    """Write those files anew that hold more dead tokens than tokens that are still needed."""
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
        left, file = reservoir.pieces[own], job.work_shard_file(number)
        found = file.read()
        assert found is not None, f"the file of work shard {number} went while the data was prepared"
        file.write(left, file.take, found[2])
        reservoir.pieces["start"][own] = left["start"]
        reading.sizes[number] = int(needed[number])
