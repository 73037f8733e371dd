"""Settings of data preparation: the `data` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ESSAYS = "package:long_context_eval/data/synthetic/json/PaulGrahamEssays.json"


@dataclass(kw_only=True)
class DataArgs:
    """Which documents, how many tokens of each length interval, and how they are packed into rows."""

    sources: list[str] = field(default_factory=lambda: ["stdlib:", ESSAYS])
    """Where the documents are: files, folders or globs (txt, md, code, jsonl, json, parquet, arrow; also .gz .zst .bz2 .xz),
    `hub:<id>[:<config>][@<split>]` or a bare hub id `owner/name`, `stdlib:[<folder>]` (the running Python's standard
    library), `package:<import name>/<file>` (a file of an installed package). A json file that is one long text may end in
    `#essays`, `#chapters=<characters>` or `#whole` to say how it is split."""
    text_field: str = "text"
    """Name of the field with the document's text in jsonl, json, parquet and hub records."""
    include: list[str] = field(default_factory=list)
    """File name patterns (`*.py`) that are read inside folders; empty = every file that is not hidden."""
    unreadable: Literal["error", "skip"] = "error"
    """A file that is corrupt, not UTF-8 or without the text field: `error` stops and names it; `skip` leaves (the rest of) it
    out, counts it and lists it in the manifest. The few deliberately broken files of `stdlib:` are always skipped."""
    max_documents: int | None = None
    """Documents to read from each source, in its own order; null = all. Hub data sets can be larger than the disk: set it
    there, training and held-out text both come from what is read."""
    deduplicate: bool = True
    """Keep only the first of documents with identical text."""

    context_length: int = 2048
    """Tokens per row, and the longest document."""
    target_tokens: int | None = None
    """Training tokens to draw, divided equally over the length intervals. None = all that `exhausted` allows."""
    shortest_interval: int = 1024
    """Tokens at which the first length interval starts; the next ones start at 2x, 4x, … up to the context."""
    short_documents: Literal["keep", "drop"] = "keep"
    """Documents below `shortest_interval`: `keep` makes them one more interval, `drop` leaves them out."""
    long_documents: Literal["cut", "skip", "error"] = "cut"
    """Documents above the context: `cut` into pieces of the context's size (the rest stays a document of its own), `skip`
    or `error`."""
    exhausted: Literal["stop", "repeat", "redistribute"] = "redistribute"
    """When an interval has fewer tokens than its share: `stop` gives every interval only as much as the scarcest one (stays
    equal), `repeat` uses its documents again, `redistribute` takes the missing tokens from the other intervals."""
    boundary_tokens: Literal["tokenizer", "none", "bos", "eos", "bos+eos"] = "tokenizer"
    """Special tokens around each document: what the tokenizer itself adds to a text, none, or the named ones."""

    packing: Literal["best_fit", "one_per_row"] = "best_fit"
    """`best_fit`: whole documents packed by best-fit decreasing; `one_per_row`: one document per row, padded."""
    packing_window: int = 4096
    """Documents that best-fit packing sees at a time. Larger = less padding, rows less random."""
    held_out_fraction: float = 0.05
    """Share of the documents (chosen by a hash of their opening words, independent of the seed) that never enters training
    rows and serves similarity search and perplexity."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError(
                "sources is empty: name at least one file, folder, hub id, stdlib: or package: source"
            )
        for name in ("context_length", "shortest_interval", "packing_window"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")
        if self.shortest_interval > self.context_length:
            raise ValueError(
                f"shortest_interval {self.shortest_interval} is longer than context_length {self.context_length}: "
                "set it to the context or below"
            )
        if self.target_tokens is not None and self.target_tokens < self.context_length:
            raise ValueError(
                f"target_tokens {self.target_tokens} is less than one row of {self.context_length} tokens"
            )
        if self.target_tokens is None and self.exhausted == "repeat":
            raise ValueError("exhausted='repeat' never ends without target_tokens: set target_tokens")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"max_documents must be at least 1 or null (all), got {self.max_documents}")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must be in [0, 1), got {self.held_out_fraction}")
