"""Near duplicates by MinHash, with datatrove's blocks: signatures, buckets, clusters; the first of each cluster is kept.

Two documents are compared by the sets A, B of their 5-grams of words; their similarity is s = |A ∩ B| / |A ∪ B| (Jaccard).
A signature has 14 buckets of 8 hashes; documents with one equal bucket are joined, and what is joined forms a cluster. A pair is
found with probability 1 − (1 − s⁸)¹⁴ (Broder 1997; Leskovec, Rajaraman, Ullman 2014, section 3.4; parameters of FineWeb, 2024):

    s    0.3     0.4    0.5    0.6    0.7    0.75   0.8    0.85   0.9    0.95
    P    0.0009  0.009  0.053  0.211  0.565  0.771  0.924  0.988  0.9996 1.0000

Changing a share p of the words, one by one, leaves (1 − p)⁵ of the 5-grams: s = q / (2 − q) with q = (1 − p)⁵, so that p = 1 %
is s = 0.91 and found with P = 0.9997, 2 % 0.83 and 0.97, 3 % 0.75 and 0.78, 5 % 0.63 and 0.30.

Words: datatrove's `simplify_text` (lower case, numbers → 0, no punctuation or diacritics), then split at white space; characters
of scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are words of their own. Nothing is downloaded, and
identifiers of code are words like others. What has fewer than five words is never a near duplicate. Documents of token ids are
compared by their ids. Hashes are SHA-1 and a fixed permutation family (seed 1); the letter tables are the running Python's, so
that another Python version can see characters that are new in Unicode differently.

Disk: 952 bytes per document until the lists are written. Memory: about 30 times the longest document and 68 bytes for each of the
documents of a group (a 400th of all) in `sign`; about 250 bytes for each document that has a near duplicate in `cluster`. Time on
one core (2026, x86): 2.6 MB/s of English and 4.1 MB/s of Python in `sign`, 14 × 3 µs per document in `match`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from pod.data.documents import Document, SourceReport
from pod.data.folders import locked
from pod.data.token_store import Part
from pod.data.tokenizers import identity
from pod.data.workers import Count, cores, run_tasks
from pod.files import read_json, write_json

if TYPE_CHECKING:
    from pod.data.job import Job

NGRAM_WORDS = 5
NUM_BUCKETS = 14
HASHES_PER_BUCKET = 8
SEED = 1
MAX_GROUPS = 400
"""Signature files of a bucket, all open at once when it is searched."""
SHINGLES_AT_A_TIME = 1024
LISTED_REMOVALS = 20
REPORT = "near.json"
PARAMETERS = {
    "ngram_words": NGRAM_WORDS,
    "buckets": NUM_BUCKETS,
    "hashes_per_bucket": HASHES_PER_BUCKET,
    "seed": SEED,
    "hash": "sha1",
    "version": 1,
}

_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_SPACELESS}]|[^\s{_SPACELESS}]+")
_AS_LETTERS = str.maketrans("0123456789", "abcdefghij")


def near_dir(job: Job) -> Path:
    """Folder of the near duplicates of what `job` reads."""
    asked = json.dumps([job.request["reading"], PARAMETERS], sort_keys=True)
    return job.work_dir / f"near-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"


def removed_documents(job: Job, parts: Sequence[Part]) -> Sequence[np.ndarray]:
    """For each of `parts` the sorted record numbers (uint32) of documents that an earlier one is nearly alike; finds them first.

    Read from disk at each access. Raises `ValueError` when datatrove is missing or a source has changed since pass 1.
    """
    near = NearDuplicates(job)
    if len(near.parts) != len(parts):
        raise ValueError(f"near duplicates are of {len(near.parts)} parts, asked for {len(parts)}: run again")
    if not near.is_found():
        # Runs that share a work folder share this one too: one finds, the others wait for it.
        lock = near.folder.with_name(f"{near.folder.name}.lock")
        with locked(lock, -1, f"another process works in {near.folder}"):
            near.find(job.args.workers or cores())
    return Removed(near.folder)


class Removed(Sequence[np.ndarray]):
    """Lists of record numbers on disk, one per part."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.report: dict[str, Any] = read_json(folder / REPORT)
        """Counts and the first documents left out, for the manifest."""
        self._starts = folder / "starts.bin"

    def __len__(self) -> int:
        return self._starts.stat().st_size // 8 - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(index)
        start, stop = np.fromfile(self._starts, dtype="<i8", count=2, offset=8 * number)
        return np.fromfile(
            self.folder / "removed.bin", dtype="<u4", count=int(stop - start), offset=4 * int(start)
        )


class NearDuplicates:
    """The steps `sign` (one item per group of units), `match` (one per bucket) and `cluster` (one), each idempotent.

    All parts of `job` must be there: the documents are read again and compared with them, so that their numbers fit.
    """

    def __init__(self, job: Job):
        if importlib.util.find_spec("datatrove") is None:
            raise ValueError(
                "data.near_duplicates needs the package datatrove: pip install 'pod-kv[datatrove]', or set it to false"
            )
        self.job, self.folder = job, near_dir(job).absolute()
        # Pass 1 must be complete: parts() says so in one line.
        self.parts = job.parts()
        self._units = [number for number, _ in job.needed_units()]

    @functools.cached_property
    def groups(self) -> list[range]:
        """Consecutive numbers of parts; their documents are numbered through, in one signature file per bucket."""
        size = max(1, -(-len(self.parts) // MAX_GROUPS))
        return [range(start, min(start + size, len(self.parts))) for start in range(0, len(self.parts), size)]

    def is_found(self) -> bool:
        """Whether all steps are done."""
        return all(
            self.is_done(step, number)
            for step in ("cluster", "sign", "match")
            for number in range(self.items(step))
        )

    def find(self, workers: int) -> None:
        """Run all steps in processes of this machine, as far as they are not done."""
        for step, unit in (("sign", "groups"), ("match", "buckets"), ("cluster", "")):
            numbers = [number for number in range(self.items(step)) if not self.is_done(step, number)]
            if numbers:
                task = functools.partial(_run_counted, self, step)
                run_tasks(
                    task,
                    numbers,
                    workers,
                    description=f"near duplicates: {step}",
                    unit=unit,
                    total=len(numbers),
                )

    def items(self, step: str) -> int:
        """Number of items of a step."""
        return {"sign": len(self.groups), "match": NUM_BUCKETS, "cluster": 1}[step]

    def is_done(self, step: str, number: int) -> bool:
        """Whether the result of an item is on disk."""
        return (self.folder / REPORT).is_file() or self._mark(step, number).is_file()

    def run(self, step: str, number: int) -> None:
        """Do an item, if it is not done. The items of `match` need those of `sign`, `cluster` those of `match`."""
        if self.is_done(step, number):
            return
        before = {"sign": None, "match": "sign", "cluster": "match"}[step]
        if before is not None and not all(self.is_done(before, one) for one in range(self.items(before))):
            raise ValueError(
                f"near duplicates: step {before} is not complete; run it to its end, then {step}"
            )
        with _quiet():
            {"sign": self._sign, "match": self._match, "cluster": self._cluster}[step](number)

    def _mark(self, step: str, number: int) -> Path:
        """Written last: an item whose mark is missing is done anew."""
        return self.folder / (REPORT if step == "cluster" else f"{step}-{number:05d}.json")

    def _sign(self, group: int) -> None:
        block = signature_block(self.folder / "signatures")
        counts: list[int] = []
        block.run(self._texts(group, counts), rank=group)
        write_json(self._mark("sign", group), {"documents": counts})

    def _texts(self, group: int, counts: list[int]) -> Iterator[Any]:
        """datatrove documents of a group, one per record of its parts; `counts` gets how many each part has."""
        from datatrove.data import Document as Text

        for number in self.groups[group]:
            part, limit = self.parts[number], self._limits[number]
            index, found = part.index(0, limit), 0
            documents = self._documents(number)
            if limit < part.num_documents:
                documents = islice(documents, limit)
            for document in documents:
                if found >= len(index) or identity(document)[1] != tuple(index["digest"][found].tolist()):
                    raise ValueError(
                        f"{document.name} has changed since it was tokenised: run again from pass 1"
                    )
                found += 1
                yield Text(text=words_of(document), id=document.name)
            if found != len(index):
                raise ValueError(
                    f"{part.name} has {found} documents, {len(index)} when it was tokenised: run again from pass 1"
                )
            counts.append(found)

    def _documents(self, number: int) -> Iterator[Document]:
        """What pass 1 took from the unit of part `number`: the same documents in the same order."""
        unit = self.job.units()[self._units[number]]
        return self.job.documents_of(unit, SourceReport(self.job.args.sources[unit.source]))

    @functools.cached_property
    def _limits(self) -> list[int]:
        """Documents of each part that `max_documents` allows its source; the others are no candidates."""
        limit, used, limits = self.job.args.max_documents, {}, []
        for part in self.parts:
            allowed = part.num_documents
            if limit is not None:
                allowed = max(0, min(allowed, limit - used.get(part.source, 0)))
            limits.append(allowed)
            used[part.source] = used.get(part.source, 0) + allowed
        return limits

    def _match(self, bucket: int) -> None:
        from datatrove.pipeline.dedup import MinhashDedupBuckets

        _allow_open_files(2 * MAX_GROUPS + 200)
        block = MinhashDedupBuckets(
            str(self.folder / "signatures"),
            str(self.folder / "matches"),
            config=_config(),
            lines_to_buffer=1000,
        )
        block.run(None, rank=bucket, world_size=NUM_BUCKETS)
        write_json(self._mark("match", bucket), {})

    def _cluster(self, _number: int) -> None:
        from datatrove.pipeline.dedup import MinhashDedupCluster

        _allow_open_files(2 * MAX_GROUPS + 200)
        clusters = self.folder / "clusters"
        shutil.rmtree(clusters, ignore_errors=True)
        clusters.mkdir(parents=True)
        block = MinhashDedupCluster(
            str(self.folder / "matches"),
            str(clusters),
            config=_config(),
            save_cluster_id=True,
            lines_to_buffer=1000,
        )
        block.run(None, 0, 1)
        report = self._write_lists(clusters)
        write_json(self.folder / REPORT, report)
        for name in ("signatures", "matches", "clusters"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for mark in [*self.folder.glob("sign-*.json"), *self.folder.glob("match-*.json")]:
            mark.unlink()

    def _write_lists(self, clusters: Path) -> dict[str, Any]:
        """Write removed.bin (uint32) and starts.bin (int64 [parts + 1]) from datatrove's (document, cluster) pairs.

        datatrove numbers the clusters in the order in which they are first met, and our order is the reading order: a document
        is the first of its cluster when its number is new. (Its own .remove files keep the document with most links.)
        """
        total, last, first = 0, -1, []
        num_documents = 0
        with (
            open(self.folder / "removed.bin", "wb") as removed,
            open(self.folder / "starts.bin", "wb") as starts,
        ):
            starts.write(np.int64(0).astype("<i8").tobytes())
            for group, numbers in enumerate(self.groups):
                counts = read_json(self._mark("sign", group))["documents"]
                file = clusters / f"{group:06d}.clusters"
                pairs = (
                    np.fromfile(file, dtype="<u4").reshape(-1, 2)
                    if file.is_file()
                    else np.empty((0, 2), "<u4")
                )
                ids = pairs[:, 1].astype(np.int64)
                highest_before = np.maximum.accumulate(np.concatenate([[last], ids]))
                out = pairs[ids <= highest_before[:-1], 0]
                last = int(highest_before[-1])
                begin = 0
                for number, count in zip(numbers, counts, strict=True):
                    mine = out[(out >= begin) & (out < begin + count)] - np.uint32(begin)
                    removed.write(mine.astype("<u4").tobytes())
                    total, begin = total + len(mine), begin + count
                    starts.write(np.int64(total).astype("<i8").tobytes())
                    room = LISTED_REMOVALS - len(first)
                    first += [f"{self.parts[number].name}: document {one}" for one in mine[:room]]
                num_documents += begin
        return {
            "parameters": PARAMETERS,
            "documents": num_documents,
            "clusters": last + 1,
            "removed": total,
            "first_removed": first,
        }


def words_of(document: Document) -> str:
    """What is compared: the text, or the token ids written in letters (numbers in texts are made equal)."""
    if document.tokens is None:
        return document.text
    return " ".join(map(str, document.tokens.tolist())).translate(_AS_LETTERS)


def signature_block(folder: Path) -> Any:
    """datatrove's `MinhashDedupSignature` with our words, in bounded memory: 5-grams × hashes are made in chunks."""
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.utils.word_tokenizers import WordTokenizer

    WordTokenizer.register(_Words)

    class Signature(MinhashDedupSignature):
        def get_signature(self, shingles: np.ndarray) -> list[list[int]]:
            whole = super().get_signature
            chunks = [
                whole(shingles[start : start + SHINGLES_AT_A_TIME])
                for start in range(0, len(shingles), SHINGLES_AT_A_TIME)
            ]
            return np.min(np.array(chunks, dtype=np.uint64), axis=0).tolist()

        def get_shingles(self, text: str) -> np.ndarray:
            return super().get_shingles(
                text.encode("utf-8", "replace").decode()
            )  # lone surrogates have no UTF-8

    return Signature(str(folder), config=_config(), language=_Words())  # type: ignore[arg-type]


class _Words:
    """A word tokenizer for datatrove (only words are asked for)."""

    def word_tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text)


def _config() -> Any:
    from datatrove.pipeline.dedup import MinhashConfig
    from datatrove.utils.hashing import HashConfig

    return MinhashConfig(
        n_grams=NGRAM_WORDS,
        num_buckets=NUM_BUCKETS,
        hashes_per_bucket=HASHES_PER_BUCKET,
        seed=SEED,
        # datatrove's xxhash functions do not work with xxhash 4; SHA-1 is in the standard library.
        hash_config=HashConfig(precision=64, hash_fc="sha1"),
    )


def _run_counted(near: NearDuplicates, step: str, number: int, count: Count) -> None:
    near.run(step, number)
    count(1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """datatrove's blocks log and draw bars on the console."""
    from datatrove.utils.logging import logger

    logger.disable("datatrove")
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logger.enable("datatrove")


def _allow_open_files(wanted: int) -> None:
    """Raise the soft limit of open files (256 on macOS, 1024 on Linux) where the hard one allows."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (
        soft != resource.RLIM_INFINITY
        and soft < wanted
        and (hard == resource.RLIM_INFINITY or hard >= wanted)
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
