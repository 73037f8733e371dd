"""Settings of data preparation: the `data` section of a recipe."""

import json
from dataclasses import asdict, field
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from pod.schema import AtLeast2, section

NOT_DECIDING = {"workers", "held_out_tokens"}
"""Settings that say how the data is made, not what it is, and one that is compared by itself."""
ESSAYS = "package:long_context_eval/data/synthetic/json/PaulGrahamEssays.json#essays"


@section
class DataArgs:
    """Which documents, how many tokens of each length interval, and how they are packed into rows."""

    sources: list[str] = field(default_factory=lambda: ["stdlib:", ESSAYS])
    """Where the documents are: files, folders or globs (jsonl, json, parquet, arrow, and texts: txt, md, code …; also .gz .zst .bz2
    .xz) of this machine or by URL (s3://, gs://, https://), MosaicML shards (a folder with index.json),
    `hub:<id>[:<config>][@<split>]`, `stdlib:[<folder>]` (the running Python's standard library), `package:<import name>/<file>`
    (a file of an installed package). `#essays` or `#chapters=<characters>` at the end splits each text."""
    weights: list[float] = field(default_factory=list)
    """Share of each source in the tokens of every length interval, in the order of `sources`; scaled to sum 1. Empty = all
    sources are one heap. A source that runs dry in an interval leaves its rest to the others, and the report says so."""
    text_field: str = "text"
    """Name of the field with the document's text in jsonl, json, parquet, MDS and hub records."""
    token_field: str | None = None
    """Name of a field that holds token ids: its records are taken as they are, without text, tokenizer or boundary tokens
    (ProLong: `input_ids`). They must come from the tokenizer of the model."""
    token_bounds_field: str | None = None
    """Name of a field with [start, stop) pairs that cut a record's token ids into documents (ProLong: `indices`)."""
    tokenizer: str | None = None
    """Folder, hub id or tokenizer.json; null = the model's."""
    include: list[str] = field(default_factory=list)
    """File name patterns (`*.log`) of what is read, whatever its kind; empty = files of known kinds, others are an error."""
    unreadable: Literal["error", "skip"] = "error"
    """What cannot be read: `error` stops and names it; `skip` leaves out a bad record (not JSON, not UTF-8, without the field,
    too long) or the rest of a damaged file, counts it and lists the first ones in the manifest. The few deliberately broken
    files of `stdlib:` are always skipped."""
    max_record_bytes: PositiveInt = 16 * 2**20
    """Longest record (line, text file) in bytes of UTF-8; longer ones are unreadable. Tokenising needs about a hundred times
    this in memory for each worker."""
    deduplicate: bool = True
    """Keep only one of documents with identical text; with `weights` that of the first source."""
    min_tokens: PositiveInt = 2
    """Pieces with fewer tokens are left out; a single token has no next one to predict."""
    document_filter: str | None = None
    """`module:function` of your own: called with each `pod.data.Document`, keeps those for which it returns True."""

    context_length: AtLeast2 = 2048
    """Tokens per row, and the longest document."""
    target_tokens: PositiveInt | None = None
    """Training tokens to draw, divided equally over the length intervals; preparing needs it. Reading stops when every interval
    has its share, so a large corpus is not read to its end."""
    shortest_interval: AtLeast2 = 1024
    """Tokens at which the first length interval starts; the next ones start at 2x, 4x, … up to the context."""
    intervals: list[int] = field(default_factory=list)
    """Tokens at which the length intervals start, ascending, instead of powers of two; empty = by `shortest_interval`."""
    short_documents: Literal["keep", "drop"] = "keep"
    """Documents below `shortest_interval`: `keep` makes them one more interval, `drop` leaves them out."""
    long_documents: Literal["cut", "skip"] = "cut"
    """Documents above the context: `cut` into pieces of the context's size (the rest stays a document of its own), or `skip`."""
    exhausted: Literal["stop", "repeat", "redistribute"] = "redistribute"
    """When an interval has fewer tokens than its share: `stop` gives every interval only as much as the scarcest one (stays
    equal), `repeat` uses its documents again, `redistribute` takes the missing tokens from the other intervals."""
    boundary_tokens: Literal["tokenizer", "none", "bos", "eos", "bos+eos"] = "tokenizer"
    """Special tokens around each document: what the tokenizer itself adds to a text, none, or the named ones."""

    packing: Literal["best_fit", "one_per_row"] = "best_fit"
    """`best_fit`: whole documents packed by best-fit decreasing; `one_per_row`: one document per row, padded."""
    packing_window: AtLeast2 = 4096
    """Documents that best-fit packing sees at a time. Larger = less padding, rows less random."""
    held_out_tokens: NonNegativeInt | None = None
    """Tokens of whole documents that never enter training rows and serve similarity search, training's and eval's perplexity; null =
    as many as explore, train and eval ask for. At most a fifth of the documents are held out."""

    workers: PositiveInt | None = None
    """Processes that read, tokenise and write; null = one per core. The result does not depend on it."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "sources is empty: name at least one file, folder, hub id, stdlib: or package: source"
            )
        if self.shortest_interval > self.context_length:
            raise ValueError(
                f"shortest_interval {self.shortest_interval} is longer than context_length {self.context_length}: "
                "set it to the context or below"
            )
        if self.target_tokens is not None and self.target_tokens < self.context_length:
            raise ValueError(
                f"target_tokens {self.target_tokens} is less than one row of {self.context_length} tokens"
            )
        self._check_lists()
        if self.token_bounds_field is not None and self.token_field is None:
            raise ValueError(
                "token_bounds_field cuts token ids, but token_field is not set: name the field of ids"
            )

    def other_than(self, manifest: dict[str, Any], seed: int) -> list[str]:
        """Dotted names of what the rows of a manifest were prepared with otherwise; empty where it does not say."""
        request = manifest.get("request") or {}
        before = {f"data.{name}": value for name, value in (request.get("settings") or {}).items()}
        now = {f"data.{name}": value for name, value in json.loads(json.dumps(asdict(self))).items()}
        # boundary tokens stand there as the tokenizer's ids
        told = [
            name for name in now if name in before and name not in ("data.boundary_tokens", "data.unreadable")
        ]
        changed = [name for name in told if now[name] != before[name]]
        return changed + ["seed"] * (request.get("seed", seed) != seed)

    def _check_lists(self) -> None:
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                f"weights has {len(self.weights)} numbers for {len(self.sources)} sources: give one per source or none"
            )
        if self.weights and not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"weights must be above 0, got {self.weights}: remove a source to leave it out")
        if sorted(set(self.intervals)) != self.intervals or any(start < 2 for start in self.intervals):
            raise ValueError(f"intervals must ascend and start at 2 tokens or more, got {self.intervals}")
        if self.intervals and self.intervals[-1] >= self.context_length:
            raise ValueError(
                f"the last of intervals starts at {self.intervals[-1]}, the context ends at {self.context_length}: "
                "let it start below"
            )
