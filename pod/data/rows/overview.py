"""What prepared data holds, as text.

It shows totals, intervals, sources, everything that was left out, and a few rows decoded. Whatever a manifest
lacks is not shown. Programs read `manifest.json` itself.
"""

from collections.abc import Iterator
from typing import Any

from pod.data.rows.length_pictures import short_number
from pod.data.rows.loader import PackedDataset
from pod.data.rows.manifest import pieces

LISTED_ORIGINS = 12
"""Origins that are shown of each source."""
LISTED_DOCUMENTS = 8
"""Documents that are shown of each sample row."""
LISTED_IDS = 12
"""Token ids that are shown of the beginning and of the end of a document."""
SHOWN_CHARACTERS = 60
"""Characters that are shown of the beginning and of the end of a document."""
LEFT_OUT = (
    ("duplicates", "identical to an earlier one"),
    ("skipped_long", "longer than the context"),
    ("dropped_short", "pieces that are too short"),
)
"""Names in the manifest's `policies`, and how the overview words them."""
_OF_SOURCES = (
    ("empty", "empty"),
    ("records_skipped", "unreadable records"),
    ("skipped", "files not read, or read in part"),
    ("filtered", "document_filter"),
)
"""Names in the manifest's report of each source, and how the overview words them."""


def overview(data: PackedDataset, rows: int = 0, tokenizer: Any = None) -> str:
    """What prepared data holds, as several lines of text.

    Args:
        rows: number of sample rows, spread evenly over the data.
        tokenizer: decodes the sample rows; without one their ids are shown.
    """
    manifest = data.manifest
    parts = [_totals(manifest), _intervals(manifest), _sources(manifest), _left_out(manifest)]
    count = min(rows, len(data))
    parts += [_row(data, number * len(data) // count, tokenizer) for number in range(count)]
    texts = ("\n".join(clean(line.rstrip()) for line in lines) for lines in parts)
    return "\n\n".join(text for text in texts if text)


def left_out(manifest: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """(reason, number) for all documents, records and files of the sources that are not in the rows."""
    read = manifest.get("read") or {}
    for name, reason in _OF_SOURCES:
        if count := sum(source.get(name, 0) for source in read.get("sources") or []):
            yield reason, count
    if held_out := (manifest.get("held_out") or {}).get("documents"):
        yield "held out of training", held_out
    for name, reason in LEFT_OUT:
        if count := (manifest.get("policies") or {}).get(name):
            yield reason, count


def clean(text: str) -> str:
    """Text on one line: characters that a terminal would act upon are shown as escapes, such as `\\n`.

    These are line breaks, escape sequences and direction marks.
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _totals(manifest: dict[str, Any]) -> Iterator[str]:
    yield f"tokens      {manifest['num_tokens']:,} of {manifest['num_documents']:,} {pieces(manifest)}"
    padding = 100 * manifest.get("padding_share", 0)
    rows = f"{manifest['num_rows']:,} of {manifest['context_length']:,} tokens"
    yield f"rows        {rows}, padding {padding:.2f} %"
    yield f"vocabulary  {manifest['vocab_size']:,}, tokenizer {manifest['tokenizer_sha256'][:12]}"
    if request := manifest.get("request"):
        yield f"seed        {request['seed']}"
    if held_out := manifest.get("held_out"):
        yield f"held out    {held_out['tokens']:,} tokens of {held_out['documents']:,} documents"
    if cut := (manifest.get("policies") or {}).get("cut_pieces"):
        yield f"cut         {cut:,} pieces of longer documents"
    if read := manifest.get("read"):
        work_shards = f"{read['units']:,} of {read['units_of_all']:,} work shards of the sources"
        yield f"read        {work_shards}, {read['documents']:,} documents"
    if special := (manifest.get("read") or {}).get("special_documents"):
        yield f"special     {special:,} pieces spell a special token of the tokenizer"


def _intervals(manifest: dict[str, Any]) -> Iterator[str]:
    intervals = manifest.get("intervals") or []
    balance = manifest.get("balance") or {}
    if not intervals:
        return
    share = balance.get("equal_share_tokens")
    yield f"{'Length [tokens]':<16}{'read':>16}{'drawn':>10}{'of share':>10}{'passes':>8}"
    for one in intervals:
        part = f"{100 * one['tokens_after'] / share:.1f} %" if share else ""
        before = short_number(one["tokens_before"])
        after = short_number(one["tokens_after"])
        yield f"{one['name']:<16}{before:>16}{after:>10}{part:>10}{one['passes']:>8.2f}"
    yield (
        "of share: drawn tokens over an equal share of all intervals; "
        "passes: how often each document was drawn"
    )
    yield from (f"! {note}" for note in balance.get("notes", []))


def _sources(manifest: dict[str, Any]) -> Iterator[str]:
    sources = (manifest.get("read") or {}).get("sources") or []
    if sources:
        yield f"{'Documents':>12}{'characters':>12}{'tokens':>10}{'drawn':>10}  source"
    for source in sources:
        numbers = [short_number(source.get(name, 0)) for name in ("characters", "tokens", "tokens_after")]
        characters, tokens, drawn = numbers
        yield f"{source['documents']:>12,}{characters:>12}{tokens:>10}{drawn:>10}  {source['source']}"
        origins = sorted((source.get("origins") or {}).items(), key=lambda item: (-item[1], item[0]))
        for origin, count in origins[:LISTED_ORIGINS]:
            yield f"{count:>12,}{'from':>32}  {origin}"
        if rest := sum(count for _, count in origins[LISTED_ORIGINS:]):
            yield f"{rest:>12,}{'from':>32}  {len(origins) - LISTED_ORIGINS} more"


def _left_out(manifest: dict[str, Any]) -> Iterator[str]:
    rows = list(left_out(manifest))
    if rows:
        yield f"{'Left out':>12}"
    yield from (f"{count:>12,}  {reason}" for reason, count in rows)
    for source in (manifest.get("read") or {}).get("sources") or []:
        yield from (f"  not read: {name}" for name in source.get("skipped_files") or [])


def _row(data: PackedDataset, number: int, tokenizer: Any) -> Iterator[str]:
    documents = data.documents(number)
    tokens = sum(map(len, documents))
    padding = data.context_length - tokens
    yield f"Row {number:,}: {len(documents):,} documents, {tokens:,} tokens, {padding:,} padding"
    for ids in documents[:LISTED_DOCUMENTS]:
        yield f"{len(ids):>12,}  {_ends(ids.tolist(), tokenizer)}"
    if rest := documents[LISTED_DOCUMENTS:]:
        yield f"{sum(map(len, rest)):>12,}  in {len(rest):,} more documents"


def _ends(ids: list[int], tokenizer: Any) -> str:
    """Beginning and end of a document."""
    if tokenizer is None:
        more = len(ids) > 2 * LISTED_IDS
        shown = [*ids[:LISTED_IDS], "…", *ids[-LISTED_IDS:]] if more else ids
        return " ".join(map(str, shown))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if len(text) <= 2 * SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]} … {text[-SHOWN_CHARACTERS:]}"
