"""What prepared data holds, as a dictionary (`report`) and as text for a terminal of 80 columns (`to_text`).

Totals, intervals before and after the draw, sources and origins, everything that was left out, how full the rows are, and a
few rows decoded. Older manifests lack some of it: what is not there is not shown.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pod.data.manifest import open_array
from pod.data.pictures import count_classes, short_number, source_shares
from pod.data.verify import DamagedData, read_index, total_bytes

WIDTH = 80
LISTED_ORIGINS = 12
LISTED_DOCUMENTS = 8
LISTED_IDS = 16
PADDING_EDGES = (0.0, 0.001, 0.01, 0.1, 0.5)
"""Upper ends of the classes of padding in a row; the first one holds the rows without any, the last one ends at 1."""
LEFT_OUT = (
    ("duplicates", "identical to an earlier document"),
    ("near_duplicates", "nearly like an earlier document"),
    ("other_split", "held out of training"),
    ("capped", "beyond max_documents"),
    ("skipped_long", "longer than the context"),
    ("dropped_short", "pieces that are too short"),
)


def report(folder: Path, manifest: dict[str, Any], rows: int = 0, tokenizer: Any = None) -> dict[str, Any]:
    """Everything about the data in `folder`, ready for JSON.

    `rows` sample rows spread evenly over the data, decoded when there is a `tokenizer`. Raises `DamagedData` when a file that
    it reads is not what the manifest says.
    """
    read = manifest.get("read") or {}
    return {
        "folder": str(folder),
        "schema_version": manifest["schema_version"],
        "context_length": manifest["context_length"],
        "num_rows": manifest["num_rows"],
        "num_tokens": manifest["num_tokens"],
        "num_documents": manifest["num_documents"],
        "num_shards": len(manifest["shards"]),
        "bytes": total_bytes(manifest),
        "vocab_size": manifest["vocab_size"],
        "tokenizer_sha256": manifest.get("tokenizer_sha256"),
        "tokenizer_source": manifest.get("tokenizer_source"),
        "boundary_tokens": manifest.get("boundary_tokens"),
        "seed": (manifest.get("request") or {}).get("seed"),
        "settings": (manifest.get("request") or {}).get("settings") or {},
        "intervals": manifest.get("intervals") or [],
        "balance": manifest.get("balance") or {},
        "weights": manifest.get("weights") or [],
        "sources": read.get("sources") or [],
        "read": {name: value for name, value in read.items() if name != "sources"},
        "cut_documents": (manifest.get("policies") or {}).get("cut_documents", 0),
        "left_out": left_out(manifest),
        "held_out": manifest.get("held_out"),
        "packing": packing(folder, manifest),
        "rows": [sample_row(folder, manifest, number, tokenizer) for number in _spread(manifest, rows)],
    }


def left_out(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """What the sources hold and the rows do not: {reason, documents, tokens or None}, in the order of preparation."""
    read, policies = manifest.get("read") or {}, manifest.get("policies") or {}
    sources = read.get("sources") or []
    found: dict[str, dict[str, Any]] = {}

    def add(reason: str, documents: int, tokens: int | None = None) -> None:
        if documents:
            found[reason] = {"reason": reason, "documents": documents, "tokens": tokens}

    add("empty", sum(source.get("empty", 0) for source in sources))
    add("unreadable records", sum(source.get("records_skipped", 0) for source in sources))
    add("unreadable files, or their rest", sum(source.get("skipped", 0) for source in sources))
    gates: dict[str, int] = {}
    for source in sources:
        for gate, count in (source.get("gates") or {}).items():
            gates[gate] = gates.get(gate, 0) + count
    for gate, count in gates.items():
        add(f"gate {gate}", count)
    held_out = (manifest.get("held_out") or {}).get("tokens")
    for name, reason in LEFT_OUT:
        place = next((place for place in (policies, read) if isinstance(place.get(name), int)), None)
        if place is not None:
            add(reason, place[name], held_out if name == "other_split" else place.get(f"{name}_tokens"))
    return list(found.values())


def packing(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """How full the rows are: documents per row, and rows by their share of padding. Memory: one shard's document lengths."""
    context = manifest["context_length"]
    documents_per_row = np.zeros(0, dtype=np.int64)
    classes = np.zeros((2, len(PADDING_EDGES) + 1), dtype=np.int64)
    longest = 0
    for shard in manifest["shards"]:
        index = read_index(folder, shard, manifest)
        documents_per_row = _add(documents_per_row, np.bincount(index.row_documents))
        padding = context - index.row_tokens
        which = np.searchsorted(PADDING_EDGES, padding / context, side="left")
        classes[0] += np.bincount(which, minlength=classes.shape[1])
        classes[1] += np.bincount(which, weights=padding, minlength=classes.shape[1]).astype(np.int64)
        longest = max(longest, int(index.lengths.max(initial=0)))
    counts = np.flatnonzero(documents_per_row)
    return {
        "documents_per_row": {int(count): int(documents_per_row[count]) for count in counts},
        "mean_documents_per_row": manifest["num_documents"] / max(manifest["num_rows"], 1),
        "padding_share": 1 - manifest["num_tokens"] / max(manifest["num_rows"] * context, 1),
        "padding_tokens": int(classes[1].sum()),
        "longest_document": longest,
        "padding_classes": [
            {"name": name, "rows": int(count), "padding_tokens": int(tokens)}
            for name, count, tokens in zip(_padding_names(), *classes, strict=True)
        ],
    }


def _padding_names() -> list[str]:
    percent = [f"{100 * edge:g} %" for edge in PADDING_EDGES]
    return ["none", *(f"up to {edge}" for edge in percent[1:]), f"above {percent[-1]}"]


def _add(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    total = np.zeros(max(len(one), len(other)), dtype=np.int64)
    total[: len(one)] += one
    total[: len(other)] += other
    return total


def _spread(manifest: dict[str, Any], count: int) -> list[int]:
    """Row numbers spread evenly over the data, the first one included."""
    rows = manifest["num_rows"]
    count = min(count, rows)
    return [number * rows // count for number in range(count)]


def sample_row(folder: Path, manifest: dict[str, Any], number: int, tokenizer: Any = None) -> dict[str, Any]:
    """Row `number`: its documents with their lengths, first and last token ids, and their text when there is a tokenizer."""
    context, first = manifest["context_length"], 0
    for shard in manifest["shards"]:
        if number < first + shard["rows"]:
            break
        first += shard["rows"]
    else:
        raise DamagedData(f"{folder} has no row {number}: the shards hold {first}, run pod-data verify")
    index, at = read_index(folder, shard, manifest), number - first
    try:
        tokens = np.array(open_array(folder, manifest, shard, "tokens")[at])
    except ValueError as error:
        raise DamagedData(" ".join(str(error).split())) from None
    documents, start = [], 0
    for length in index.lengths[index.starts[at] : index.starts[at + 1]].tolist():
        ids = tokens[start : start + length]
        shown = {"first_ids": ids[:LISTED_IDS].tolist(), "last_ids": ids[-LISTED_IDS:].tolist()}
        documents.append({"tokens": length, **shown, "text": _decode(tokenizer, ids)})
        start += length
    return {"row": number, "tokens": start, "padding": context - start, "documents": documents}


def _decode(tokenizer: Any, ids: np.ndarray) -> str | None:
    if tokenizer is None:
        return None
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


# Text


def to_text(content: dict[str, Any]) -> str:
    """`report` as lines of at most 80 columns."""
    parts = [_totals(content), _intervals(content), _sources(content), _mixture(content)]
    parts += [_left_out(content), _packing(content)]
    parts += [_row(row) for row in content["rows"]]
    return "\n\n".join("\n".join(line.rstrip() for line in lines) for lines in parts if lines)


def _totals(content: dict[str, Any]) -> list[str]:
    size = content["bytes"] / max(content["num_tokens"], 1)
    lines = [
        shorten(content["folder"], WIDTH),
        f"  tokens      {content['num_tokens']:,} of {content['num_documents']:,} documents",
        f"  rows        {content['num_rows']:,} of {content['context_length']:,} tokens, "
        f"padding {100 * content['packing']['padding_share']:.2f} %",
        f"  on disk     {short_number(content['bytes'])}B in {content['num_shards']:,} shard{'' if content['num_shards'] == 1 else 's'}, {size:.2f} bytes a token",
        f"  vocabulary  {content['vocab_size']:,}, tokenizer {str(content['tokenizer_sha256'])[:12]}",
    ]
    boundary = content["boundary_tokens"]
    if boundary:
        lines.append(
            f"  boundaries  ids {boundary['before']} before and {boundary['after']} after each document"
        )
    if content["seed"] is not None:
        lines.append(f"  seed        {content['seed']}")
    if content["cut_documents"]:
        lines.append(
            f"  cut         {content['cut_documents']:,} documents, into pieces of {content['context_length']:,} and a rest"
        )
    special = content["read"].get("special_documents")
    if special:
        lines.append(f"  special     {special:,} documents spell a special token of the tokenizer")
    held_out = content["held_out"]
    if isinstance(held_out, dict) and isinstance(held_out.get("tokens"), int):
        lines.append(
            f"  held out    {held_out['tokens']:,} tokens of {held_out.get('documents', 0):,} documents"
        )
    return lines


def _intervals(content: dict[str, Any]) -> list[str]:
    if not content["intervals"]:
        return []
    share = content["balance"].get("equal_share_tokens")
    lines = [
        f"{'Length':<14}{'in the sources':>24}{'drawn':>20}",
        f"{'[tokens]':<14}{'documents':>14}{'tokens':>10}{'documents':>14}{'tokens':>10}{'of share':>10}{'passes':>8}",
    ]
    for interval in content["intervals"]:
        part = f"{100 * interval['tokens_after'] / share:.1f} %" if share else "–"
        lines.append(
            f"{interval['name']:<14}{interval['documents_before']:>14,}{short_number(interval['tokens_before']):>10}"
            f"{interval['documents_after']:>14,}{short_number(interval['tokens_after']):>10}{part:>10}"
            f"{interval.get('passes', 0):>8.2f}"
        )
    if share:
        deviation = 100 * content["balance"].get("largest_deviation", 0)
        lines.append(f"equal share {share:,} tokens, largest deviation {deviation:.2f} %")
    for note in content["balance"].get("notes", []):
        lines += wrapped(f"! {note}", "  ")
    return lines


def _mixture(content: dict[str, Any]) -> list[str]:
    """Shares of the sources in each interval, of its tokens."""
    lines = []
    for interval in source_shares(content["sources"], content["weights"]):
        lines = lines or [f"{'Mixture':<46}{'in the sources':>14}{'wanted':>10}{'drawn':>10}"]
        lines.append(f"{interval['name']} tokens" if interval["name"] != "all" else "all lengths")
        before, after = (
            max(sum(source[when] for source in interval["sources"].values()), 1)
            for when in ("before", "after")
        )
        for spec, source in interval["sources"].items():
            wanted = "" if source["wanted"] is None else f"{100 * source['wanted']:.1f} %"
            lines.append(
                f"  {pad(shorten(clean(spec), 43), 44)}{100 * source['before'] / before:>12.1f} %{wanted:>10}"
                f"{100 * source['after'] / after:>8.1f} %"
            )
    return lines


def _sources(content: dict[str, Any]) -> list[str]:
    if not content["sources"]:
        return []
    lines = [f"{'Source':<38}{'documents':>12}{'characters':>11}{'tokens':>9}{'drawn':>9}"]
    for source in content["sources"]:
        tokens = [
            short_number(source[name]) if name in source else "" for name in ("train_tokens", "tokens_after")
        ]
        lines.append(
            f"{pad(shorten(clean(source['source']), 37), 38)}{source.get('documents', 0):>12,}"
            f"{short_number(source.get('characters', 0)):>11}{tokens[0]:>9}{tokens[1]:>9}"
        )
        origins = sorted((source.get("origins") or {}).items(), key=lambda item: (-item[1], item[0]))
        for origin, count in origins[:LISTED_ORIGINS]:
            lines.append(f"{pad(shorten('  from ' + clean(origin), 37), 38)}{count:>12,}")
        if len(origins) > LISTED_ORIGINS:
            rest = sum(count for _, count in origins[LISTED_ORIGINS:])
            lines.append(f"{f'  from {len(origins) - LISTED_ORIGINS} more':<38}{rest:>12,}")
    return lines


def _left_out(content: dict[str, Any]) -> list[str]:
    lines = []
    if content["left_out"]:
        lines.append(f"{'Left out':<44}{'documents':>23}{'tokens':>12}")
    for entry in content["left_out"]:
        tokens = "" if entry["tokens"] is None else short_number(entry["tokens"])
        lines.append(f"  {shorten(entry['reason'], 50):<51}{entry['documents']:>14,}{tokens:>12}")
    for source in content["sources"]:
        total = source.get("skipped", 0) + source.get("records_skipped", 0)
        lines += _named(
            f"unreadable in {clean(source['source'])!r}", source.get("skipped_files") or [], total
        )
    near = content["read"].get("near") or {}
    lines += _named("near duplicates", near.get("first_removed") or [], near.get("removed", 0))
    return lines


def _named(what: str, names: list[str], total: int) -> Iterator[str]:
    """The names of what was left out; says so when there are more."""
    if names:
        some = f" (the first {len(names)} of {total:,})" if total > len(names) else ""
        yield from wrapped(f"{what}{some}:", "  ")
    for name in names:
        yield from wrapped(clean(name), "    ")


def _packing(content: dict[str, Any]) -> list[str]:
    found, rows = content["packing"], max(content["num_rows"], 1)
    settings = content["settings"]
    how = f" ({settings['packing']})" if "packing" in settings else ""
    lines = [f"{f'Packing{how}':<38}{'rows':>14}  share"]
    lines.append(f"documents in a row: {found['mean_documents_per_row']:.2f} on average")
    for name, count in count_classes(found["documents_per_row"]):
        lines.append(f"  {name:<36}{count:>14,}{100 * count / rows:>7.2f} %  {bar(count / rows)}")
    lines.append(f"padding in a row: {100 * found['padding_share']:.2f} % on average")
    for entry in found["padding_classes"]:
        if entry["rows"]:
            share = entry["rows"] / rows
            lines.append(f"  {entry['name']:<36}{entry['rows']:>14,}{100 * share:>7.2f} %  {bar(share)}")
    return lines


def bar(share: float, width: int = 16) -> str:
    """A bar of `width` columns for the share 1; anything above 0 shows at least a line."""
    eighths = max(round(share * width * 8), 1) if share > 0 else 0
    return "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]


def _row(row: dict[str, Any]) -> list[str]:
    documents = row["documents"]
    lines = [
        f"Row {row['row']:,}: {len(documents):,} document{'' if len(documents) == 1 else 's'}, {row['tokens']:,} tokens, {row['padding']:,} padding"
    ]
    for number, document in enumerate(documents[:LISTED_DOCUMENTS]):
        head, tail = _ends(document)
        lines.append(f"{number:>3} {document['tokens']:>9,}  {shorten(head, WIDTH - 15, 'end')}")
        if tail:
            lines.append(" " * 15 + shorten(tail, WIDTH - 15, "start"))
    if len(documents) > LISTED_DOCUMENTS:
        rest = documents[LISTED_DOCUMENTS:]
        tokens = sum(document["tokens"] for document in rest)
        lines.append(f"    {len(rest):,} more documents with {tokens:,} tokens")
    return lines


def _ends(document: dict[str, Any]) -> tuple[str, str]:
    """Beginning and end of a document for two lines; no end when the first line holds it all."""
    text = document["text"]
    if text is None:
        head, tail = (" ".join(map(str, document[f"{end}_ids"])) for end in ("first", "last"))
        return head, "…" + tail if document["tokens"] > LISTED_IDS else ""
    head, tail = clean(text[: 2 * WIDTH]), clean(text[-2 * WIDTH :])
    return head, "" if len(text) <= 2 * WIDTH and columns(head) <= WIDTH - 15 else "…" + tail


def clean(text: str) -> str:
    """Text on one line, with everything that a terminal would act upon (line breaks, escapes, direction marks) spelled out."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def columns(text: str) -> int:
    """Columns that text takes on a terminal: 2 for wide characters, 0 for combining marks."""
    return sum(_columns(character) for character in text)


def pad(text: str, width: int) -> str:
    """Text with spaces behind it, `width` columns in all."""
    return text + " " * (width - columns(text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shorten(text: str, width: int, where: str = "middle") -> str:
    """Text in at most `width` columns; `…` stands for what was taken away at the `start`, in the `middle` or at the `end`."""
    if columns(text) <= width:
        return text
    head = {"start": 0, "middle": (width - 1) // 2, "end": width - 1}[where]
    return _fit(text, head) + "…" + _fit(reversed(text), width - 1 - head)[::-1]


def _fit(text: Iterable[str], width: int) -> str:
    kept = []
    for character in text:
        width -= _columns(character)
        if width < 0:
            break
        kept.append(character)
    return "".join(kept)


def wrapped(text: str, indent: str) -> Iterator[str]:
    """Lines of at most 80 columns, all but the first two columns further to the right. Long words are broken."""
    line = indent
    for word in text.split():
        if line.strip() and columns(line) + columns(word) > WIDTH:
            yield line.rstrip()
            line = indent + "  "
        while columns(line) + columns(word) > WIDTH:
            head = _fit(word, WIDTH - columns(line))
            yield line + head
            line, word = indent + "  ", word[len(head) :]
        line += word + " "
    yield line.rstrip()
