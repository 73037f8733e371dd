"""Every source format against a golden file: documents, reports, intervals, rows and labels.

`fixtures/formats/make.py` writes the sources. `POD_WRITE_GOLDEN=1` writes the golden file anew.
"""

import hashlib
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from pod.data import DataArgs, held_out_documents, load_documents, prepare
from pod.data.read import work_shards
from pod.data.run import writing

FORMATS = Path(__file__).parent / "fixtures" / "formats"
GOLDEN = FORMATS / "golden.json"
KILL_MARK = "POD_TEST_KILL_MARK"
DOCUMENTS_BEFORE_KILL = 60

SOURCES = {
    "json lines with bad ones": (["bad.jsonl"], {}),
    "gzip": (["lines.jsonl.gz"], {}),
    "zstd of two frames": (["lines.jsonl.zst"], {}),
    "bzip2 of lines named json": (["dolma.json.bz2"], {}),
    "xz": (["lines.ndjson.xz"], {}),
    "json array": (["array.json"], {}),
    "parquet": (["table.parquet"], {}),
    "parquet, other field": (["table.parquet"], {"text_field": "source"}),
    "arrow stream": (["stream.arrow"], {}),
    "arrow file": (["random_access.arrow"], {}),
    "token ids": (["ids.parquet"], {"token_field": "ids", "token_bounds_field": "bounds"}),
    "csv": (["rows.csv"], {}),
    "csv with quotes and bad rows": (["quoted.csv.gz"], {}),
    "csv with an open quote": (["open_quote.csv"], {}),
    "unknown suffix as text": (["rows.log"], {"include": ["*.log"]}),
    "cut gzip": (["cut.jsonl.gz"], {}),
    "folder of texts": (["texts"], {}),
    "pattern": (["*.jsonl*", "texts/**/*.txt"], {}),
    "chapters": (["dolma.json.bz2#chapters=100"], {}),
    "all": (["*.jsonl*", "*.json.bz2", "*.ndjson.xz", "array.json", "table.parquet", "*.arrow", "texts"], {}),
}
REFUSED = {
    "bad.jsonl": ({}, ["bad.jsonl line at byte 502", "data.unreadable=skip"]),
    "cut.jsonl.gz": ({}, ["cut.jsonl.gz", "data.unreadable=skip"]),
    "ids.parquet": ({}, ["ids.parquet row 0", "bounds, ids", "data.text_field"]),
    "table.parquet": ({"text_field": "body"}, ["'body'", "id, meta, source, text", "data.text_field"]),
    "stream.arrow": ({"text_field": "id"}, ["stream.arrow row 0", "'id'", "data.unreadable=skip"]),
    "rows.log": ({}, ["rows.log", "jsonl, json, csv, parquet, arrow", "data.include"]),
    "rows.csv": ({"text_field": "body"}, ["rows.csv", "'body'", "id, text", "data.text_field"]),
    "quoted.csv.gz": ({}, ["quoted.csv.gz row 2", "2 fields", "names 3", "data.unreadable=skip"]),
    "open_quote.csv": ({}, ["open_quote.csv", "behind row 0", "data.unreadable=skip"]),
    "empty.jsonl": ({}, ["empty.jsonl", "data.sources"]),
    "texts": ({}, ["binary.txt", "data.unreadable=skip"]),
    "missing.jsonl": ({}, ["missing.jsonl", "hub:", "stdlib:", "package:"]),
    "*.rs": ({}, ["*.rs", "data.sources"]),
}
"""Sources that are refused with these settings, and what the message names."""


@pytest.fixture
def formats(monkeypatch):
    """Work in the folder of sources, cut into many work shards."""
    monkeypatch.chdir(FORMATS)
    monkeypatch.setattr(work_shards, "RANGE_BYTES", 1_000)
    monkeypatch.setattr(work_shards, "GROUP_BYTES", 2_000)
    monkeypatch.setattr(work_shards, "SMALLEST_GROUP_BYTES", 2_000)
    monkeypatch.setattr(writing, "DEFAULT_SHARD_BYTES", 2_000)


def short(value):
    """The beginning of a SHA-256."""
    return hashlib.sha256(value).hexdigest()[:12]


def expected(part, name):
    return json.loads(GOLDEN.read_text())[part][name]


def check(part, name, found):
    """Compare with the golden file, or write it."""
    found = json.loads(json.dumps(found))
    if os.environ.get("POD_WRITE_GOLDEN"):
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        golden.setdefault(part, {})[name] = found
        GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    assert found == expected(part, name)


@pytest.mark.parametrize("name", SOURCES)
def test_documents_come_in_their_order(formats, name):
    sources, options = SOURCES[name]
    found = []
    for document in load_documents(sources, unreadable="skip", **options):
        content = document.text.encode() if document.tokens is None else document.tokens.tobytes()
        found.append(f"{document.name} {document.origin} {short(content)}")
    check("documents", name, {"count": len(found), "first": found[:4], "sha256": short(repr(found).encode())})


@pytest.mark.parametrize("source", REFUSED)
def test_what_cannot_be_read_is_one_line(formats, source):
    options, named = REFUSED[source]
    with pytest.raises(ValueError) as info:
        list(load_documents([source], **options))
    message = str(info.value)
    assert "\n" not in message
    assert [one for one in named if one not in message] == []


def prepared(tokenizer, folder, workers=1, **changes):
    args = DataArgs(
        sources=SOURCES["all"][0],
        unreadable="skip",
        context_length=64,
        shortest_interval=16,
        target_tokens=4_000,
        held_out_tokens=200,
        workers=workers,
        **changes,
    )
    return prepare(args, tokenizer, folder)


def told_of(data):
    """What is fixed of prepared rows."""
    rows = data.rows(range(len(data)))
    held_out = np.concatenate(list(held_out_documents(data.path)))
    return {
        "intervals": [
            [one["name"], one["tokens_before"], one["tokens_after"]] for one in data.manifest["intervals"]
        ],
        "sources": [
            {name: count for name, count in source.items() if name != "skipped_files"}
            for source in data.manifest["read"]["sources"]
        ],
        "documents": data.manifest["read"]["documents"],
        "duplicates": data.manifest["policies"]["duplicates"],
        "rows": len(data),
        "sums": {name: short(value.numpy().astype("<i8").tobytes()) for name, value in rows.items()},
        "held_out": short(held_out.astype("<i8").tobytes()),
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_rows_are_the_same_with_any_number_of_workers(formats, tokenizer, no_pictures, tmp_path, workers):
    check("rows", "all", told_of(prepared(tokenizer, tmp_path / "data", workers)))


def dies_once(document):
    """A `data.document_filter` that kills the process after some documents, if a file says so."""
    mark = Path(os.environ[KILL_MARK])
    if mark.exists():
        left = int(mark.read_text()) - 1
        mark.write_text(str(left))
        if left == 0:
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return True


def test_rows_are_the_same_after_a_kill(formats, tokenizer, no_pictures, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    mark.write_text(str(DOCUMENTS_BEFORE_KILL))
    monkeypatch.setenv(KILL_MARK, str(mark))
    changes = {"document_filter": f"{__name__}:dies_once"}
    run = multiprocessing.get_context("fork").Process(
        target=prepared, args=(tokenizer, tmp_path / "data"), kwargs=changes
    )
    run.start()
    run.join()
    assert run.exitcode == -signal.SIGKILL and not (tmp_path / "data").exists()
    finished = list((tmp_path / "data.work").glob("unit-*"))
    assert finished, "the kill came after some work was done"
    check("rows", "all", told_of(prepared(tokenizer, tmp_path / "data", **changes)))
