"""read → tokenise → keep or drop.

One unit is read in any process, all of them in the order that the seed gives.
"""

from collections.abc import Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from pod.data.balance.kept import Kept, Limits
from pod.data.read.documents import Document, SourceReport
from pod.data.read.gates import imported_filter, passes
from pod.data.read.units import Unit, read_unit
from pod.data.run.job import Job
from pod.data.run.progress import Progress
from pod.data.run.workers import Count, in_order
from pod.data.tokens.store import PIECE, Spool, file_order, own_tokens
from pod.data.tokens.tokenizers import identity

BATCH_CHARACTERS = 1_000_000
BATCH_DOCUMENTS = 256
SETTLE_TOKENS = 1 << 22
"""A unit adds at least this many tokens before it looks for what it can drop."""
SETTLE_SHARE = 16
"""The draw of what is read is brought up to date when one more of so many units was read."""
LEAST_UNITS = 16
"""Units that are read at least, where there are so many. Fewer would be no fair sample of the sources."""


@dataclass
class Reading:
    """What was read, up to the unit where the draw had enough."""

    kept: Kept
    reports: list[SourceReport]
    """What each source gave."""
    num_units: int = 0
    """Units read; they are the first ones of `Job.order`."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Tokens in the file of each unit."""


def read_sources(job: Job) -> Reading:
    """Read units until every interval is full, or all of them.

    What an earlier run finished is not read again. The result depends on the order of the units alone.
    Neither the number of workers nor the moment of a kill shows.
    """
    order = job.order()
    kept = Kept(job.args, job.seed, job.held_out_tokens)
    reading = Reading(kept, [SourceReport(spec) for spec in job.args.sources])
    progress = Progress(sum(unit.text_bytes for unit in job.units))
    calls = ((number, deepcopy(kept.limits)) for number in order)
    with closing(progress), closing(in_order(_Task(job), calls, job.workers, progress.read)) as units:
        next_settle = 1
        for position, number in enumerate(units, start=1):
            _take_in(job, reading, number)
            if position < min(next_settle, len(order)):
                continue
            next_settle = settle_after(position)
            kept.settle()
            _compact(job, reading)
            progress.show(kept)
            if kept.is_full and position >= LEAST_UNITS:
                break
    unread = {job.units[number].source for number in order[reading.num_units :]}
    for source in set(range(len(job.args.sources))) - unread:
        reading.reports[source].check_any()
    return reading


def settle_after(position: int) -> int:
    """After how many units the draw is next brought up to date, when it last was after `position` units."""
    return position + max(1, position // SETTLE_SHARE)


def read_one(job: Job, number: int, limits: Limits, count: Count) -> None:
    """Read unit `number` into its file, unless it is there.

    Only those of its documents are tokenised that the draw may need.

    Args:
        count: is told the bytes of text of the unit.

    Raises:
        ValueError: for what cannot be read, as the settings say.
    """
    unit, file = job.units[number], job.unit_file(number)
    found = file.read(verify=True)
    if found is not None and not (found[2].skips and job.args.unreadable == "error" and not unit.tolerate):
        count(unit.text_bytes)
        return
    report = SourceReport(unit.spec)
    kept = Kept(job.args, job.seed, job.held_out_tokens, limits)
    counted = 0
    with closing(Spool(job.work_dir, job.dtype)) as spool:
        for batch in batches(documents_of(job, unit, report)):
            documents = _tokenised(job, unit, batch, kept, spool)
            kept.add(kept.cut(documents))
            if kept.num_added > max(SETTLE_TOKENS, spool.size // 2):
                kept.settle()
                kept.pieces = file_order(kept.pieces)
                if spool.size > 2 * own_tokens(kept.pieces).sum():
                    spool.keep(kept.pieces)
            # the bytes of hub shards are not known
            size = min(sum(len(one.text) for one in batch), max(0, unit.text_bytes - counted))
            counted += size
            count(size)
        kept.settle()
        file.write(file_order(kept.pieces), spool.take, report)
    count(unit.text_bytes - counted)


def documents_of(job: Job, unit: Unit, report: SourceReport) -> Iterator[Document]:
    """The documents of a unit that `document_filter` lets through; fills in `report`."""
    name = job.args.document_filter
    own_filter = imported_filter(name) if name else None
    for document in read_unit(unit, job.args, report):
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


def _tokenised(job: Job, unit: Unit, batch: list[Document], kept: Kept, spool: Spool) -> np.ndarray:
    """The documents of a batch that may be kept, tokenised into the spool.

    They are PIECE records with digests in place of lots.
    """
    identities = [identity(document) for document in batch]
    found = np.zeros(len(batch), PIECE)
    found["lot"] = [one.digest for one in identities]
    found["place"] = [one.place for one in identities]
    found["source"] = unit.source
    around = len(job.boundary.before) + len(job.boundary.after)
    most = np.array([job.encoder.most_tokens(one.size) + around for one in identities])
    chosen = np.flatnonzero(kept.may_need(found["lot"], found["place"], most, unit.source))
    batch = [batch[number] for number in chosen.tolist()]
    tokens, found = encode(job, batch), found[chosen]
    special = iter(job.encoder.holds_special)
    found["special"] = [document.tokens is None and next(special) for document in batch]
    found["length"] = [len(ids) for ids in tokens]
    found["start"] = spool.append(tokens)
    return found


def _take_in(job: Job, reading: Reading, number: int) -> None:
    """Add the pieces of a finished unit to what is kept."""
    found = job.unit_file(number).read()
    assert found is not None, f"the file of unit {number} went while the data was prepared"
    pieces, size, report = found
    unit = job.units[number]
    pieces["unit"], pieces["source"] = number, unit.source
    reading.kept.add(pieces)
    reading.sizes[number] = size
    reading.reports[unit.source].add(report)
    reading.num_units += 1


def _compact(job: Job, reading: Reading) -> None:
    """Write those files anew that hold more dead tokens than tokens that are still needed."""
    kept = reading.kept
    needed = np.bincount(kept.pieces["unit"], weights=own_tokens(kept.pieces), minlength=len(job.units))
    wasted = [number for number, size in reading.sizes.items() if size > 2 * needed[number]]
    if not wasted:
        return
    order = np.lexsort((kept.pieces["start"], kept.pieces["copy"], kept.pieces["unit"]))
    units = kept.pieces["unit"][order]
    for number in wasted:
        own = order[slice(*np.searchsorted(units, [number, number + 1]))]
        left, file = kept.pieces[own], job.unit_file(number)
        found = file.read()
        assert found is not None, f"the file of unit {number} went while the data was prepared"
        file.write(left, file.take, found[2])
        kept.pieces["start"][own] = left["start"]
        reading.sizes[number] = int(needed[number])
