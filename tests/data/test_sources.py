"""Every source format, made on the spot; damaged input is named or counted."""

import bz2
import gzip
import json
import lzma
import sys
import sysconfig

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from data_helpers import read_all

from pod.data import DataArgs, load_documents
from pod.data.read.books import split_chapters, split_essays
from pod.data.read.discovery import hub_spec

TEXTS = ["first document", "zweites Dokument, 中文 😀", "third\nwith two lines"]
LINES = "".join(
    json.dumps({"id": i, "text": text, "source": "x"}) + "\n" for i, text in enumerate(TEXTS)
).encode()
PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: (
        zstandard.compress(data[:50]) + zstandard.compress(data[50:])
    ),  # two frames, as pzstd writes
}


def texts_of(*sources, **options):
    return [document.text for document in load_documents(map(str, sources), **options)]


def write_table(path, columns, kind):
    table = pyarrow.table(columns)
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "dolma-0001.json"])
def test_json_lines(tmp_path, name, packed):
    (tmp_path / (name + packed)).write_bytes(PACK[packed](LINES))
    assert texts_of(tmp_path / (name + packed)) == TEXTS


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "no_suffix", "a.cpp"])
def test_plain_text(tmp_path, name, packed):
    path = tmp_path / (name + packed)
    path.write_bytes(PACK[packed](b"\xef\xbb\xbf" + TEXTS[1].encode() + b"\nend"))
    assert texts_of(path) == [TEXTS[1] + "\nend"]


@pytest.mark.parametrize(
    "content, expected",
    [
        ({"text": "one"}, ["one"]),
        ([{"text": "one"}, {"text": "two"}], ["one", "two"]),
        (["one", "two"], ["one", "two"]),
        ([{"text": "one"}, {"text": None}], ["one"]),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_objects_and_arrays(tmp_path, content, expected, indent):
    (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
    assert texts_of(tmp_path / "a.json") == expected


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    write_table(path, {"content": TEXTS, "n": [1, 2, 3]}, kind)
    assert texts_of(path, text_field="content") == TEXTS
    with pytest.raises(
        ValueError, match=r"a\.\w+ row 0 has no text field 'text' \(fields seen: content, n\); set data"
    ):
        texts_of(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"a\.{kind} is not a readable {kind} file"):
        texts_of(path, text_field="content")


def test_folders_and_globs_in_name_order(tmp_path):
    for name in ("b/2.txt", "a/1.py", ".git/config", "b/.hidden", "a/__pycache__/x.pyc", "c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    assert texts_of(tmp_path) == ["text of c.md", "text of a/1.py", "text of b/2.txt"]
    assert texts_of(tmp_path, include=["*.py", "*.md"]) == ["text of c.md", "text of a/1.py"]
    assert texts_of(f"{tmp_path}/*/*.txt") == ["text of b/2.txt"]
    with pytest.raises(
        ValueError, match=r"has no file matching \*\.rs: correct data.sources or data.include"
    ):
        texts_of(tmp_path, include=["*.rs"])
    with pytest.raises(ValueError, match="no file matches"):
        texts_of(f"{tmp_path}/*.rs")
    with pytest.raises(ValueError, match=r"missing.txt' does not exist here: give a file"):
        texts_of("missing.txt")


@pytest.mark.parametrize("packed", [".gz", ".zst", ".bz2", ".xz"])
def test_truncated_archives_are_named(tmp_path, packed):
    path = tmp_path / f"part-7.jsonl{packed}"
    path.write_bytes(PACK[packed](LINES * 2000)[:-10])
    with pytest.raises(
        ValueError, match=rf"part-7.jsonl\{packed} cannot be read to its end .*data.unreadable=skip"
    ) as info:
        texts_of(path)
    assert "\n" not in str(info.value)


DAMAGED = {
    "latin1.txt": ("schön".encode("latin-1"), "latin1.txt cannot be read to its end .*utf-8"),
    "picture.png": (b"\x89PNG\0\0", "picture.png"),
    "binary.txt": (b"abc\0def", "binary.txt is binary"),
    "broken.jsonl": (LINES + b'{"text": "cut', "broken.jsonl line 4 is not JSON"),
    "other.jsonl": (
        b'{"body": "x", "id": 1}\n',
        r"line 1 has no text field 'text' \(fields seen: body, id\)",
    ),
    "number.jsonl": (b'{"text": 3}\n', "line 1: field 'text' is a int, expected text"),
    "list.jsonl": (b"[1, 2]\n", "line 1 is a list, expected an object"),
    "broken.json": (b'{"text": \n"cut', "broken.json is not JSON"),
    "not.gz": (b"plain", "not.gz cannot be read"),
    "cookie.py": (b"# -*- coding: klingon -*-\n", "cookie.py cannot be read in its declared encoding"),
}


BAD_RECORDS = {"broken.jsonl", "other.jsonl", "number.jsonl", "list.jsonl"}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named_or_counted(tmp_path, name):
    content, message = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "zz.txt").write_text("good")
    with pytest.raises(ValueError, match=message) as info:
        texts_of(tmp_path)
    assert "\n" not in str(info.value)
    documents, report = read_all(DataArgs(sources=[str(tmp_path)], unreadable="skip"))
    assert [one.text for one in documents] == ([*TEXTS, "good"] if name == "broken.jsonl" else ["good"])
    of_record = name in BAD_RECORDS
    assert (report.skipped, report.records_skipped) == ((0, 1) if of_record else (1, 0))
    assert name in report.skipped_files[0]
    assert report.files == (1 if name == "picture.png" else 2)


def test_sources_of_bad_records_only_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": 1}\n{bad\n')
    with pytest.raises(
        ValueError,
        match="has no text: 1 files read, 0 empty documents, 0 filtered out, 2 unreadable .*line 1 has no",
    ):
        texts_of(tmp_path, unreadable="skip")


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.json", "blank.txt"])
def test_empty_sources_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text(" \n" if name == "blank.txt" else "")
    with pytest.raises(ValueError, match=rf"{name}' has no text: 1 files read"):
        texts_of(path)
    (tmp_path / "full.txt").write_text("text")
    assert texts_of(tmp_path) == ["text"]


def test_standard_library_parts():
    documents, report = read_all(DataArgs(sources=["stdlib:json"]))
    assert [document.name.rsplit("/", 1)[1] for document in documents] == [
        "__init__.py",
        "decoder.py",
        "encoder.py",
        "scanner.py",
        "tool.py",
    ]
    assert report.characters == sum(len(document.text) for document in documents)
    with pytest.raises(ValueError, match="has no file matching"):
        texts_of("stdlib:no_such_part")


def test_broken_files_of_the_standard_library_are_always_skipped(tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_bytes(b"# -*- coding: klingon -*-\n")
    (tmp_path / "good.py").write_text("x = 1")
    with pytest.raises(ValueError, match="bad.py cannot be read in its declared encoding"):
        texts_of(tmp_path)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    documents, report = read_all(DataArgs(sources=["stdlib:"]))
    assert [one.text for one in documents] == ["x = 1"]
    assert report.skipped == 1 and "bad.py" in report.skipped_files[0]


def test_hub_data_sets_that_break_off_are_named(monkeypatch):
    def breaking():
        yield {"text": "one"}
        raise ConnectionError("connection reset")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: breaking())
    with pytest.raises(
        ValueError, match="'some/set' split 'train' cannot be read at record 1 .connection reset"
    ):
        texts_of("hub:some/set")


def test_package_files_without_import(tmp_path, monkeypatch):
    package = tmp_path / "carrier_pkg"
    (package / "texts").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "texts/a.txt").write_text("carried")
    monkeypatch.syspath_prepend(tmp_path)
    assert texts_of("package:carrier_pkg/texts/a.txt") == texts_of("package:carrier_pkg/texts") == ["carried"]
    assert "carrier_pkg" not in sys.modules
    with pytest.raises(ValueError, match="source 'package:carrier_pkg/b.txt' does not exist here"):
        texts_of("package:carrier_pkg/b.txt")
    with pytest.raises(ValueError, match="package 'no_such_pkg' is not installed; install it with pip"):
        texts_of("package:no_such_pkg/b.txt")


def test_hub_specs():
    assert hub_spec("hub:imdb") == ("imdb", None, "train")
    assert hub_spec("hub:a/b:en@test[:5%]") == ("a/b", "en", "test[:5%]")
    for local in ("a/b", "a/c.txt", "./x", "/a/b", "*/b", "s3://a/b"):
        assert hub_spec(local) is None, local


def test_hub_data_sets_are_streamed(monkeypatch):
    asked = []

    def load_dataset(name, config, split, revision, streaming):
        asked.append((name, config, split, revision, streaming))
        if name == "gone/set":
            raise FileNotFoundError("Dataset 'gone/set' doesn't exist\non the hub")
        return iter([{"text": text} for text in TEXTS])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts_of("hub:some/set", "hub:other:en@test") == TEXTS * 2
    assert set(asked) == {
        ("some/set", None, "train", "0123abc", True),
        ("other", "en", "test", "0123abc", True),
    }
    with pytest.raises(
        ValueError, match="hub data set 'gone/set' split 'train' cannot be read at record 0 .*check the id"
    ) as info:
        texts_of("hub:gone/set")
    assert "\n" not in str(info.value)
    with pytest.raises(ValueError, match="record 0 has no text field 'body'"):
        texts_of("hub:some/set", text_field="body")


def essay_book(number=30):
    dated = [
        f"April {1990 + i}" + ("A man" if i % 2 else "  \n  \nWe") + f" wrote essay {i} in May 2001 at home."
        for i in range(number)
    ]
    return "".join(dated), dated


def test_books_are_split_without_loss(tmp_path):
    book, essays = essay_book()
    assert split_essays(book) == essays
    sentences = [f"Sentence {i} of a text without dates. " for i in range(3000)]
    sentences[::9] = [sentence + "\n\n" for sentence in sentences[::9]]
    prose = "".join(sentences)
    chapters = split_chapters(prose, 5000)
    assert "".join(chapters) == prose and max(map(len, chapters)) <= 5000
    assert all(chapter.endswith("\n\n") for chapter in chapters[:-1])
    assert split_chapters("x" * 12000, 5000) == ["x" * 5000, "x" * 5000, "x" * 2000]


def test_fragments_choose_the_split(tmp_path):
    book, essays = essay_book()
    long_book = book * 200
    path = tmp_path / "book.json"
    path.write_text(json.dumps({"text": long_book}))
    assert texts_of(path) == [long_book], "nothing is split unasked, however long"
    assert texts_of(f"{path}#essays") == essays * 200
    assert "".join(texts_of(f"{path}#chapters=300")) == long_book
    names = [document.name for document in load_documents([f"{path}#essays"])]
    assert len(set(names)) == 6000
    (tmp_path / "two.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in (book, "short"))
    )
    assert texts_of(f"{tmp_path / 'two.jsonl'}#essays") == [*essays, "short"], "each text of a file"
