"""What several tests of data preparation look at."""

from pathlib import Path

import numpy as np

from pod.data.balance.draw import draw
from pod.data.balance.reservoir import Reservoir
from pod.data.balance.sampling_keys import splitmix64
from pod.data.read.documents import SourceReport
from pod.data.read.work_shards import plan_work_shards, read_work_shard
from pod.data.rows.verify import open_manifest, verify
from pod.data.tokens.token_file import PIECE


def content(folder):
    """Bytes of each file of a folder."""
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def read_all(args):
    """(documents, report) of all work shards, one after the other."""
    report = SourceReport("all")
    documents = [
        document
        for work_shard in plan_work_shards(args)
        for document in read_work_shard(work_shard, args, report)
    ]
    for document in documents:
        report.add_document(document)
    return documents, report


def check_whole(folder):
    """Raise `ValueError` for data that is damaged."""
    for line in verify(folder, open_manifest(folder)):
        raise ValueError(line)


def texts_of(args):
    """Texts of all documents."""
    return [document.text for document in read_all(args)[0]]


def five_characters(document):
    """A `data.document_filter`."""
    return len(document.text) >= 5


def none(document):
    """One that keeps nothing."""
    return False


def documents_of(lengths, sources=None, digests=None, held_out_keys=None):
    """Documents as reading hands them to the draw; each is found again by its `work_shard`."""
    documents = np.zeros(len(lengths), PIECE)
    numbers = np.arange(len(lengths), dtype=np.uint64)
    documents["length"] = lengths
    documents["source"] = 0 if sources is None else sources
    documents["sampling_key"] = splitmix64(numbers) if digests is None else digests
    documents["held_out_key"] = 2**64 - 1 if held_out_keys is None else held_out_keys
    documents["work_shard"] = numbers
    return documents


def reservoir_of(documents, args, seed=0, held_out_tokens=0, at_once=10**9):
    """What is kept when `at_once` documents are added between two calls of `prune`.

    It keeps nothing that a fresh one would not.
    """
    reservoir = Reservoir(args, seed, held_out_tokens)
    for start in range(0, max(1, len(documents)), at_once):
        reservoir.add(reservoir.cut(documents[start : start + at_once]))
        reservoir.prune()
    return reservoir


def drawn_of(lengths, args, seed=0, sources=None):
    """(numbers of the drawn documents in the order of training, the draw).

    The documents are whole, and there is no held-out text.
    """
    drawn = draw(reservoir_of(documents_of(lengths, sources), args, seed), args, seed)
    return drawn.pieces["work_shard"].astype(np.int64), drawn
