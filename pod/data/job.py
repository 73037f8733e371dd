"""The steps of data preparation as methods that any executor can call: tokenise units, plan rows, write shards, publish.

Each step reads what the step before left on disk, publishes its own result in one atomic step and does nothing when that is
there already. So a step can run anywhere, be killed at any moment and be called again.

    <output_dir>.work/tokens-<key>/part-<unit>/    pass 1, one folder per unit of the sources
    <output_dir>.work/rows-<key>/                  pass 2: chosen pieces, packed rows, entries of finished shards
    <output_dir>.rows-<key>/                       the shards themselves, renamed to <output_dir> at the end
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.args import DataArgs
from pod.data.documents import Document, SourceReport
from pod.data.folders import has_other_users
from pod.data.gates import imported_filter, passes
from pod.data.loader import PackedDataset
from pod.data.manifest import token_dtype
from pod.data.row_plan import RowPlan, plan_rows
from pod.data.selection import Selection, select
from pod.data.shards import DEFAULT_SHARD_BYTES, Row, rows_per_shard, write_shard
from pod.data.token_store import Part, PartWriter, is_complete
from pod.data.tokenizers import (
    BoundaryTokens,
    Encoder,
    identity,
    load_tokenizer,
    tokenizer_sha256,
    vocabulary_size,
)
from pod.data.units import Unit, plan_units, read_unit
from pod.files import atomic_dir, explain_disk_full, read_json, write_json

BATCH_CHARACTERS = 1_000_000
BATCH_DOCUMENTS = 256

NOT_DECIDING = {"workers", "work_dir", "keep_tokens"}
"""Settings that say how the data is made, not what it is."""
OF_READING = (
    "text_field",
    "token_field",
    "token_bounds_field",
    "unreadable",
    "max_record_bytes",
    "max_documents",
    "document_filter",
)
"""Settings that decide the tokens of a unit."""
OF_SPLIT = ("sources", "include", "deduplicate", "held_out_fraction")
"""Those that decide, with them, which documents are held out."""


class Job:
    """One preparation of `args` into `output_dir`.

    Args:
        tokenizer: a tokenizer, or its folder, file or hub id (then the job can be pickled). `args.tokenizer` wins.
        seed: of the draw and of the order of rows.
    """

    def __init__(self, args: DataArgs, tokenizer: Any, output_dir: str | Path, seed: int = 0):
        self.args, self.seed, self.output_dir = args, seed, Path(output_dir)
        if self.output_dir.is_symlink():  # to a larger disk, say: the link stays
            self.output_dir = self.output_dir.resolve()
        self._source_of_tokenizer = args.tokenizer or tokenizer
        self._cache: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    # What is asked for

    @property
    def tokenizer(self) -> Any:
        """Loaded once per process."""
        return self._once("tokenizer", lambda: load_tokenizer(self._source_of_tokenizer))

    @property
    def boundary(self) -> BoundaryTokens:
        """Ids before and after each document."""
        return self._once(
            "boundary", lambda: BoundaryTokens.from_policy(self.args.boundary_tokens, self.tokenizer)
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return self._once("vocab_size", lambda: vocabulary_size(self.tokenizer))

    @property
    def pad_token_id(self) -> int:
        """Id for positions without a token."""
        return pad_token_id(self.tokenizer)

    @property
    def tokenizer_source(self) -> str | None:
        """Folder, file or hub id of the tokenizer; None when it came as an object."""
        source = self._source_of_tokenizer
        if not isinstance(source, (str, Path)):
            source = getattr(source, "name_or_path", None)
        return str(source) if source else None

    @property
    def encoder(self) -> Encoder:
        """Texts → ids."""
        return self._once("encoder", lambda: Encoder(self.tokenizer))

    def warm_up(self) -> None:
        """Make here what forked workers would else make once each."""
        _ = self.units(), self.request, self.boundary, self.vocab_size, self.encoder

    def units(self) -> list[Unit]:
        """The units of all sources, in reading order."""
        return self._once("units", lambda: plan_units(self.args))

    @property
    def request(self) -> dict[str, Any]:
        """All that decides the bytes of the result: settings, seed, tokenizer and the state of the source files."""
        return self._once("request", self._request)

    # Where it lies

    @property
    def work_dir(self) -> Path:
        """Folder of everything that is removed in the end."""
        return Path(self.args.work_dir) if self.args.work_dir else self._beside("work")

    @property
    def tokens_dir(self) -> Path:
        """Folder of the parts."""
        settings = {
            name: value for name, value in self.request["reading"]["tokens"].items() if name != "unreadable"
        }
        return self.work_dir / f"tokens-{_key(settings)}"

    @property
    def rows_dir(self) -> Path:
        """Folder of the plan of this very request for this output (others may share the work folder)."""
        return self.work_dir / f"rows-{_key([self.request, os.path.abspath(self.output_dir)])}"

    @property
    def staging_dir(self) -> Path:
        """Folder of the shards until they are complete."""
        return self._beside(f"rows-{_key(self.request)}")

    @property
    def lock_file(self) -> Path:
        """Held by the run that works on this output."""
        return self._beside("lock")

    # Pass 1

    def part_dir(self, number: int) -> Path:
        """Where the part of unit `number` lies."""
        return self.tokens_dir / f"part-{self.units()[number].fingerprint()[:16]}"

    def needed_units(self) -> Iterator[tuple[int, Part | None]]:
        """Units in reading order with their parts, as far as `max_documents` needs them; None = not tokenised yet.

        A unit is needed unless parts before it hold all documents that its source may give, whatever else lies on disk.
        """
        found, limit = dict.fromkeys(range(len(self.args.sources)), 0), self.args.max_documents
        for number, unit in enumerate(self.units()):
            if limit is not None and found[unit.source] >= limit:
                continue
            part = self._part(number)
            yield number, part
            found[unit.source] += part.num_documents if part else 0

    def missing_units(self) -> list[int]:
        """Numbers of the units that pass 1 still has to tokenise."""
        return [number for number, part in self.needed_units() if part is None]

    def tokenise(self, number: int, count: Callable[[int], None] = lambda size: None) -> None:
        """Read, judge, tokenise and store unit `number`; `count` is told of its bytes of text (`Unit.text_bytes`)."""
        if self._part(number) is not None or self._is_beyond_limit(number):
            return
        unit, args = self.units()[number], self.args
        report = SourceReport(args.sources[unit.source])
        target = self.part_dir(number)
        with (
            # One that appears meanwhile is another run's (or the same file's, named twice) with the same bytes: it stays.
            atomic_dir(target, replace=target.exists()) as folder,
            PartWriter(folder, token_dtype(self.vocab_size)) as part,
        ):
            counted = 0
            for batch in batches(self.documents_of(unit, report)):
                tokens = self.encode(batch, report)
                places, digests = zip(*map(identity, batch), strict=True)
                part.add(tokens, list(places), list(digests))
                size = sum(len(one.text) for one in batch)
                if unit.text_bytes:  # of hub shards they are not known
                    size = min(size, unit.text_bytes - counted)
                counted += size
                count(size)
            part.finish(unit.name, report)
            count(max(0, unit.text_bytes - counted))

    # Pass 2

    def parts(self) -> list[Part]:
        """All parts in reading order, up to `max_documents` of each source; `ValueError` when one is missing."""
        units = list(self.needed_units())
        missing = [number for number, part in units if part is None]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(units)} units are not tokenised yet (first: {self.units()[missing[0]].name}): "
                "run pass 1 to its end"
            )
        parts = [part for _, part in units if part is not None]
        self.check_reports(self.reports(parts))
        return parts

    def plan(self) -> RowPlan:
        """Choose, draw and pack; reads only what lengths and digests say."""
        parts = self.parts()
        self.rows_dir.mkdir(parents=True, exist_ok=True)
        selection = self.selection(parts)
        return plan_rows(selection, self.args, self.seed, self.rows_dir)

    def num_shards(self) -> int:
        """Shards that the planned rows fill."""
        return -(-self.row_plan.num_rows // self._rows_per_shard)

    def write_shard(self, number: int, count: Callable[[int], None] = lambda rows: None) -> None:
        """Write shard `number`; `count` is told of every row."""
        if self.is_written(number):
            return
        self.staging_dir.mkdir(parents=True, exist_ok=True)
        start = number * self._rows_per_shard
        stop = min(start + self._rows_per_shard, self.row_plan.num_rows)
        with explain_disk_full(self.output_dir, written=self.staging_dir):
            found = write_shard(
                self.staging_dir,
                number,
                self._rows(start, stop, count),
                context_length=self.args.context_length,
                vocab_size=self.vocab_size,
                pad_token_id=self.pad_token_id,
            )
        write_json(self._entry_file(number), found)

    def is_written(self, number: int) -> bool:
        """Whether shard `number` is complete on disk."""
        if not self._entry_file(number).is_file():
            return False
        entries = [entry for entry in read_json(self._entry_file(number)).values() if isinstance(entry, dict)]
        places = [self.staging_dir / entry["file"] for entry in entries]
        return all(
            place.is_file() and place.stat().st_size == entry["bytes"]
            for place, entry in zip(places, entries, strict=True)
        )

    def publish(self) -> PackedDataset:
        """Write manifest, held-out tokens and picture, and rename the folder to `output_dir`; then remove the work."""
        from pod.data.publish import publish

        if not self.is_current():
            publish(self)
        self.clean()
        return PackedDataset(self.output_dir)

    def is_current(self) -> bool:
        """Whether `output_dir` holds complete data of exactly this request."""
        try:
            return PackedDataset(self.output_dir).manifest.get("request") == self.request
        except ValueError:
            return False

    def clean(self) -> None:
        """Remove plans and staging of this output, and the tokens unless `keep_tokens` or another run works with them."""
        shutil.rmtree(self.rows_dir, ignore_errors=True)
        for left in self.output_dir.parent.iterdir():
            if re.fullmatch(re.escape(self.output_dir.name) + r"\.rows-[0-9a-f]{12}", left.name):
                shutil.rmtree(left, ignore_errors=True)
        if self.args.keep_tokens or has_other_users(self.tokens_dir, self.output_dir):
            return
        shutil.rmtree(self.tokens_dir, ignore_errors=True)
        if self.args.work_dir is None:
            shutil.rmtree(self.work_dir, ignore_errors=True)

    # Parts of the above

    @property
    def row_plan(self) -> RowPlan:
        """The finished plan, opened."""
        return self._once("row_plan", self.plan)

    def shard_entries(self) -> list[dict[str, Any]]:
        """Manifest entries of all shards; `ValueError` when one is not written."""
        entries = []
        for number in range(self.num_shards()):
            if not self.is_written(number):
                raise ValueError(
                    f"shard {number} of {self.num_shards()} is not written yet: run the writing step to its end"
                )
            entries.append(read_json(self._entry_file(number)))
        return entries

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._cache:
            self._cache[name] = make()
        return self._cache[name]

    def _beside(self, ending: str) -> Path:
        return self.output_dir.parent / f"{self.output_dir.name}.{ending}"

    def _request(self) -> dict[str, Any]:
        settings = {name: value for name, value in asdict(self.args).items() if name not in NOT_DECIDING}
        reading = reading_request(self.args, self.tokenizer, self.units())
        return {
            "settings": settings,
            "seed": self.seed,
            "tokenizer_sha256": reading["tokens"]["tokenizer_sha256"],
            "reading": reading,
        }

    def _part(self, number: int) -> Part | None:
        """The part of unit `number`; a complete one never changes and is opened once."""
        known = self._once("parts by unit", dict)
        if number not in known:
            folder = self.part_dir(number)
            if not is_complete(folder):
                return None
            unit = self.units()[number]
            part = Part(folder, unit.source)
            if part.report.skips and self.args.unreadable == "error" and not unit.tolerate:
                return None  # made under another policy; reading it again says what is wrong
            known[number] = part
        return known[number]

    def _is_beyond_limit(self, number: int) -> bool:
        """Whether the units before it hold already all documents that `max_documents` lets this source give."""
        if self.args.max_documents is None:
            return False
        return all(needed != number for needed, _ in self.needed_units())

    def documents_of(self, unit: Unit, report: SourceReport) -> Iterator[Document]:
        """The documents of a unit that `document_filter` lets through, at most `max_documents`; fills in `report`."""
        name, limit = self.args.document_filter, self.args.max_documents
        own_filter = imported_filter(name) if name else None
        for document in read_unit(unit, self.args, report):
            if name and own_filter and not passes(own_filter, name, document):
                report.filtered += 1
                continue
            report.documents += 1
            report.characters += len(document.text)
            report.count_origin(document.origin)
            yield document
            if report.documents == limit:
                return

    def encode(self, batch: list[Document], report: SourceReport | None = None) -> list[np.ndarray]:
        """Ids of each document, boundary tokens included; given ids are checked and taken as they are."""
        encoder = self.encoder
        special_before = encoder.special_documents
        before, after = (
            np.array(ids, dtype=np.uint32) for ids in (self.boundary.before, self.boundary.after)
        )
        encoded = iter(encoder([document.text for document in batch if document.tokens is None]))
        if report is not None:
            report.special_documents += encoder.special_documents - special_before
        tokens = []
        for document in batch:
            if document.tokens is None:
                tokens.append(np.concatenate([before, next(encoded), after]))
                continue
            if len(document.tokens) and int(document.tokens.max()) >= self.vocab_size:
                raise ValueError(
                    f"{document.name} holds token id {document.tokens.max()}, the tokenizer has {self.vocab_size}: set "
                    "data.tokenizer to the one that made the ids"
                )
            tokens.append(document.tokens)
        return tokens

    def check_reports(self, reports: list[SourceReport]) -> None:
        """A source without any document is a mistake of its name or of the filter."""
        for number, report in enumerate(reports):
            if report.documents:
                continue
            detail = f" ({report.skipped_files[0]})" if report.skipped_files else ""
            raise ValueError(
                f"source {self.args.sources[number]!r} holds no text: {report.files} files read, {report.empty} empty "
                f"documents, {report.filtered} filtered out, {report.skipped + report.records_skipped} unreadable{detail}; "
                "remove it from data.sources or correct it"
            )

    def reports(self, parts: list[Part]) -> list[SourceReport]:
        """What each source gave, in the order of `args.sources`."""
        totals = [SourceReport(source) for source in self.args.sources]
        for part in parts:
            totals[part.source].add(part.report)
        return totals

    def selection(self, parts: list[Part]) -> Selection:
        """Which documents of `parts` train and which are held out; kept on disk."""
        return select(parts, self.args, self.rows_dir)

    @property
    def _rows_per_shard(self) -> int:
        return rows_per_shard(self.args.context_length, self.vocab_size, DEFAULT_SHARD_BYTES)

    def _entry_file(self, number: int) -> Path:
        return self.rows_dir / f"shard-{number:05d}.json"

    def _rows(self, start: int, stop: int, count: Callable[[int], None]) -> Iterator[Row]:
        parts = self._once("parts", self.parts)
        for pieces in self.row_plan.rows(start, stop):
            yield [
                parts[int(piece["part"])].tokens(
                    int(piece["start"]), int(piece["start"]) + int(piece["length"])
                )
                for piece in pieces
            ]
            count(1)


def reading_request(args: DataArgs, tokenizer: Any, units: list[Unit] | None = None) -> dict[str, Any]:
    """What decides the documents and their tokens: `tokens` for each unit, `split` for training against held-out text."""
    units = plan_units(args) if units is None else units
    boundary = BoundaryTokens.from_policy(args.boundary_tokens, tokenizer)
    tokens = {name: getattr(args, name) for name in OF_READING}
    tokens["tokenizer_sha256"] = tokenizer_sha256(tokenizer)
    tokens["boundary_tokens"] = [list(boundary.before), list(boundary.after)]
    tokens["split_special_tokens"] = bool(getattr(tokenizer, "split_special_tokens", False))
    if args.document_filter:
        tokens["document_filter_sha256"] = _source_sha256(imported_filter(args.document_filter))
    split = {name: getattr(args, name) for name in OF_SPLIT}
    return {"tokens": tokens, "split": split, "sources": source_states(args, units)}


def source_states(args: DataArgs, units: list[Unit] | None = None) -> list[list[str]]:
    """[spec, SHA-256 over names, sizes and change times of its files] for each source: tells which one changed."""
    states = [hashlib.sha256() for _ in args.sources]
    for unit in plan_units(args) if units is None else units:
        states[unit.source].update(unit.fingerprint().encode())
    return [[spec, state.hexdigest()] for spec, state in zip(args.sources, states, strict=True)]


def pad_token_id(tokenizer: Any) -> int:
    """Id for positions without a token: the tokenizer's padding, else its end of text, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    return 0


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


def _key(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _source_sha256(function: Callable[..., Any]) -> str:
    """Identity of a user's filter: its source text, else its name."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = repr(getattr(function, "__qualname__", function))
    return hashlib.sha256(text.encode()).hexdigest()
