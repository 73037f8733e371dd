"""Sources cut into work shards.

Every record comes exactly once whatever the cut. Also limits and policies for records, and changed files.
"""

import gzip
import itertools
import json
import os
import random
import tracemalloc
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import read_all, texts_of

from pod.data.args import DataArgs
from pod.data.read import readers
from pod.data.read import work_shards as work_shards_module
from pod.data.read.discovery import Files, FoundFile
from pod.data.read.documents import SourceReport
from pod.data.read.sources import load_documents
from pod.data.read.work_shards import plan_work_shards, read_work_shard


def lines(*texts, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in texts).encode()


def cut_small(monkeypatch, group=200, part=300):
    monkeypatch.setattr(work_shards_module, "GROUP_BYTES", group)
    monkeypatch.setattr(work_shards_module, "RANGE_BYTES", part)


@pytest.fixture
def mixture(tmp_path):
    """Three sources of several formats and sizes."""
    folder = tmp_path / "mixed"
    (folder / "deep").mkdir(parents=True)
    for number in range(7):
        (folder / f"{number}.txt").write_text(f"text {number} " * (number * 5 + 1))
    (folder / "big.jsonl").write_bytes(
        lines(*(f"record {number} {'x' * (number % 50)}" for number in range(90)))
    )
    (folder / "deep" / "a.json.gz").write_bytes(gzip.compress(lines("packed one", "packed two")))
    table = pyarrow.table({"text": ["row one", "row two", ""], "source": ["p", "q", "p"]})
    pyarrow.parquet.write_table(table, folder / "deep" / "b.parquet")
    (tmp_path / "single.ndjson").write_bytes(lines("alone"))
    return DataArgs(sources=[str(folder), str(tmp_path / "single.ndjson"), f"{folder}/*.txt"])


def test_documents_are_the_work_shards_one_after_the_other(mixture, monkeypatch):
    whole = texts_of(mixture)
    assert len(whole) == 7 + 90 + 2 + 2 + 1 + 7 and len(plan_work_shards(mixture)) == 3
    cut_small(monkeypatch)
    cut, report = read_all(mixture)
    loaded = list(load_documents(mixture.sources))
    assert [document.text for document in loaded] == whole
    assert [document.name for document in loaded] == [document.name for document in cut]
    names = [document.name for document in cut if document.source == mixture.sources[0]]
    assert len(set(names)) == len(names) == 101
    assert report.files == 10 + 1 + 7, "a file in many ranges is one file"
    assert report.documents == 101 + 1 + 7 and report.empty == 1
    assert report.origins == {"p": 1, "q": 1}


def test_the_cut_depends_on_the_files_alone(mixture, monkeypatch):
    cut_small(monkeypatch)
    planned = plan_work_shards(mixture)
    assert len(planned) > 12
    others = replace(mixture, workers=7, text_field="body", max_record_bytes=99)
    again = plan_work_shards(others)
    assert planned == again and [u.fingerprint() for u in planned] == [u.fingerprint() for u in again]
    first = [work_shard.fingerprint() for work_shard in planned if work_shard.source == 0]
    assert len(set(first)) == len(first) > 10
    assert all(len(work_shard.fingerprint()) == 64 for work_shard in planned)
    sent = ForkingPickler.loads(ForkingPickler.dumps(planned))
    assert sent == planned and sent[3].fingerprint() == planned[3].fingerprint()


def test_work_shards_say_how_much_text_they_hold(mixture, monkeypatch):
    cut_small(monkeypatch)
    planned = plan_work_shards(mixture)
    folder = Path(mixture.sources[0])
    plain = sum(path.stat().st_size for path in [*folder.glob("*.txt"), folder / "big.jsonl"])
    packed = sum(path.stat().st_size for path in (folder / "deep").iterdir())
    assert (
        sum(work_shard.text_bytes for work_shard in planned if work_shard.source == 0) == plain + 4 * packed
    )
    assert all(work_shard.text_bytes <= 300 for work_shard in planned if work_shard.files[0].stop is not None)


def test_small_sources_give_many_work_shards_too(tmp_path):
    """A 64th of the source each, from 1 MiB to 32 MiB of text in a run of files and to 64 MiB in a range."""
    mebi = 2**20
    for num_files in (16, 100, 640, 1300, 6400):
        files = Files([FoundFile(f"{number}.txt") for number in range(num_files)])
        lines_file = Files([FoundFile("big.jsonl")])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                work_shards_module,
                "_state",
                lambda path, n=num_files: (mebi * (n if path == "big.jsonl" else 1), 0),
            )
            runs = list(work_shards_module._groups(files, None, True))
            ranges = list(work_shards_module._groups(lines_file, None, True))
        largest = max(sum(one.text_bytes for one in run) for run in runs)
        assert largest == min(32, max(1, num_files // 64)) * mebi
        assert ranges[0][0].stop == min(64 * mebi, max(mebi, num_files * mebi // 64))
        assert ranges[-1][0].stop == num_files * mebi
        assert sum(len(run) for run in runs) == num_files


def test_work_shards_are_small_against_the_target(tmp_path, monkeypatch):
    """A quarter of a byte for each token that is asked for."""
    monkeypatch.setattr(work_shards_module, "SMALLEST_RANGE_BYTES", 10)
    (tmp_path / "a.jsonl").write_bytes(lines(*["some text"] * 10_000))
    for target, size in ((2048, 512), (8192, 2048), (None, (tmp_path / "a.jsonl").stat().st_size // 64)):
        planned = plan_work_shards(DataArgs(sources=[str(tmp_path)], target_tokens=target))
        assert planned[0].files[0].stop == size


def test_files_change_the_fingerprint(tmp_path):
    path = tmp_path / "book.json"
    path.write_text(json.dumps({"text": "one two three"}))
    args = DataArgs(sources=[str(path)])
    found = {plan_work_shards(args)[0].fingerprint()}
    found.add(plan_work_shards(DataArgs(sources=[f"{path}#essays"]))[0].fingerprint())
    found.add(plan_work_shards(DataArgs(sources=[f"{path}#chapters=9"]))[0].fingerprint())
    path.write_text(json.dumps({"text": "one two four!"}))
    os.utime(path, ns=(0, 10))
    found.add(plan_work_shards(args)[0].fingerprint())
    os.utime(path, ns=(0, 11))
    found.add(plan_work_shards(args)[0].fingerprint())
    (tmp_path / "same.json").write_bytes(path.read_bytes())
    os.utime(tmp_path / "same.json", ns=(0, 11))
    found.add(plan_work_shards(DataArgs(sources=[str(tmp_path / "same.json")]))[0].fingerprint())
    assert len(found) == 6
    work_shard = plan_work_shards(args)[0]
    parts = [
        work_shard.files[0]._replace(**change)
        for change in ({}, {"start": 3}, {"stop": 9}, {"start": 3, "stop": 9})
    ]
    assert len({replace(work_shard, files=(part,)).fingerprint() for part in parts}) == 4
    assert replace(work_shard, source=5).fingerprint() == work_shard.fingerprint(), (
        "the same file in several recipes"
    )


def test_small_files_share_a_work_shard_up_to_its_size(tmp_path, monkeypatch):
    cut_small(monkeypatch, group=100)
    sizes = {
        "a.txt": 60,
        "b.txt": 40,
        "c.txt": 1,
        "d.txt": 99,
        "e.txt": 500,
        "f.txt": 3,
        "g.txt.gz": 30,
        "h.txt": 1,
    }
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    groups = [
        [one.path[len(str(tmp_path)) + 1 :] for one in work_shard.files]
        for work_shard in plan_work_shards(DataArgs(sources=[str(tmp_path)]))
    ]
    assert groups == [["a.txt", "b.txt"], ["c.txt", "d.txt"], ["e.txt"], ["f.txt"], ["g.txt.gz"], ["h.txt"]]


def jsonl_variants():
    rng = random.Random(0)
    records = [
        json.dumps({"text": f"{number} {'ü' * rng.randrange(9)}"}, ensure_ascii=False) for number in range(12)
    ]
    yield "plain", "\n".join(records) + "\n"
    yield "no end", "\n".join(records)
    yield "crlf", "\r\n".join(records) + "\r\n"
    yield "crlf no end", "\r\n".join(records)
    yield "blank lines", "\n\n  \n" + "\n \r\n\n".join(records) + "\n\n\n"
    yield "mark", "\ufeff" + "\n".join(records) + "\n"
    yield (
        "bad lines",
        "\n".join(line + ("]" if number % 4 == 2 else "") for number, line in enumerate(records)),
    )
    long = list(records)
    long[1::3] = [line.removesuffix('"}') + "y" * 100 + '"}' for line in long[1::3]]
    yield "long lines", "\n".join(long)


@pytest.mark.parametrize("name, content", list(jsonl_variants()))
def test_every_range_size_gives_each_record_once(tmp_path, monkeypatch, name, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode())
    data = path.read_bytes()
    args = DataArgs(sources=[str(path)], unreadable="skip", max_record_bytes=80)
    expected, report = read_all(args)
    assert len(expected) == 12 - report.records_skipped
    assert report.records_skipped == {"bad lines": 3, "long lines": 4}.get(name, 0)
    for size in range(1, len(data) + 1):
        cut_small(monkeypatch, part=size)
        found, cut_report = read_all(args)
        assert [one.text for one in found] == [one.text for one in expected], size
        assert cut_report.records_skipped == report.records_skipped, size
        if size < len(data):
            assert len(plan_work_shards(args)) == -(-len(data) // size)
            starts = [int(one.name.rpartition(":byte ")[2]) for one in found]
            assert all(
                json.loads(data[at:].decode("utf-8-sig").splitlines()[0])["text"] == one.text
                for at, one in zip(starts, found, strict=True)
            )
        else:
            assert not any(":byte" in one.name for one in found)
        assert cut_report.files == 1


def test_packed_files_and_books_are_never_cut(tmp_path, monkeypatch):
    cut_small(monkeypatch, part=50)
    book = lines("one two three four " * 20)
    (tmp_path / "a.jsonl").write_bytes(book)
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(lines(*(str(random.Random(n).random()) for n in range(20))))
    )
    for source, expected in ((f"{tmp_path}/a.jsonl#chapters=100", 4), (f"{tmp_path}/b.jsonl.gz", 20)):
        args = DataArgs(sources=[source])
        assert len(plan_work_shards(args)) == 1 and len(texts_of(args)) == expected
    assert len(plan_work_shards(DataArgs(sources=[f"{tmp_path}/a.jsonl"]))) == -(-len(book) // 50)


def test_ranges_name_the_byte_of_a_bad_line(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    good = lines("good " * 20)
    path.write_bytes(good * 5 + b"{bad\n" + good)
    cut_small(monkeypatch, part=150)
    with pytest.raises(ValueError, match=f"a.jsonl line at byte {5 * len(good)} is not JSON") as info:
        texts_of(DataArgs(sources=[str(path)]))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("packed", [False, True])
def test_bad_records_are_skipped_one_by_one(tmp_path, packed):
    bad = [
        b'{"text": "caf\xe9"}',  # Latin-1
        b'{"text": "\xed\xa0\x80"}',  # half of a surrogate pair as bytes
        b'{"text": "cut',
        b'{"body": "no text"}',
        b'{"text": 7}',
        b"[1]",
        b'{"text": "' + b"x" * 300 + b'"}',
        b"[" * 5000,
        b'{"n": ' + b"9" * 100 + b"}",
    ]
    content = (
        lines("first")
        + b"\n".join(one[:400] if one[:1] == b"[" else one for one in bad)
        + b"\n"
        + lines("last")
    )
    path = tmp_path / ("a.json.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    args = DataArgs(sources=[str(path)], unreadable="skip", max_record_bytes=250)
    documents, report = read_all(args)
    assert [one.text for one in documents] == ["first", "last"]
    assert (report.records_skipped, report.skipped, report.files) == (len(bad), 0, 1)
    for number, reason in enumerate(report.skipped_files, start=2):
        assert f"{path} line {number}" in reason and "\n" not in reason
    with pytest.raises(ValueError, match="line 2 is not UTF-8.*set data.unreadable=skip"):
        texts_of(replace(args, unreadable="error"))


def test_lines_that_strain_the_parser_are_bad_records(tmp_path):
    path = tmp_path / "a.jsonl"
    cut = b'{"text": "a"}'  # as long as the limit, with more behind
    path.write_bytes(cut + b"\r\r and more\n" + lines("z"))
    documents, report = read_all(DataArgs(sources=[str(path)], unreadable="skip", max_record_bytes=len(cut)))
    assert [one.text for one in documents] == ["z"] and "line 1 has 25 bytes" in report.skipped_files[0]
    path.write_bytes(b"[" * 200_000 + b"\n" + b'{"text": ' + b"9" * 5000 + b"}\n" + lines("z"))
    documents, report = read_all(DataArgs(sources=[str(path)], unreadable="skip"))
    assert [one.text for one in documents] == ["z"] and report.records_skipped == 2


def test_the_limit_counts_the_bytes_of_a_line_without_its_end(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "é" * 20}, ensure_ascii=False).encode()
    for end in (b"", b"\n", b"\r\n"):
        path.write_bytes(line + end + (line + end if end else b""))
        times = 2 if end else 1
        assert texts_of(DataArgs(sources=[str(path)], max_record_bytes=len(line))) == ["é" * 20] * times
        with pytest.raises(
            ValueError, match=rf"line 1 has {len(line) + len(end)} bytes, more than data.max_record"
        ):
            texts_of(DataArgs(sources=[str(path)], max_record_bytes=len(line) - 1))


def peak_of(args):
    """(documents, report, peak of memory in MB while reading)"""
    tracemalloc.start()
    try:
        documents, report = read_all(args)
        return documents, report, tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


FIFTY_MB = 50 * 10**6


def test_a_line_of_fifty_megabytes_is_read_below_the_limit_and_never_held_above_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("before") + b'{"text": "' + b"x" * FIFTY_MB + b'"}\n' + lines("after"))
    args = DataArgs(sources=[str(path)], max_record_bytes=60 * 2**20)
    assert [len(text) for text in texts_of(args)] == [6, FIFTY_MB, 5]
    documents, report, peak = peak_of(replace(args, max_record_bytes=2**20, unreadable="skip"))
    assert [one.text for one in documents] == ["before", "after"] and report.records_skipped == 1
    assert "line at byte 19 has 50,000,013 bytes" in report.skipped_files[0] and peak < 8
    with pytest.raises(
        ValueError, match="line at byte 19 has 50,000,013 bytes, more than data.max_record_bytes = 16,777,216"
    ):
        texts_of(DataArgs(sources=[str(path)]))


def test_endless_content_never_enters_memory(tmp_path):
    """A few KB of gzip that unpack to 50 MB without a line end, as lines and as text."""
    zeros = b"0" * FIFTY_MB
    for name in ("a.jsonl.gz", "b.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(zeros, 1))
    (tmp_path / "c.txt").write_bytes(zeros)
    args = DataArgs(sources=[str(tmp_path)], max_record_bytes=2**20, unreadable="skip")
    documents, report, peak = peak_of(args)
    assert documents == [] and peak < 16
    assert report.records_skipped + report.skipped == 3 and report.files == 3
    assert all("max_record_bytes" in reason for reason in report.skipped_files)


def test_json_values(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    for content, expected in [
        ('[ "a\\u00e9\\n" ,{"text": "b", "n": [-1.5e3, true, null]} , "c" ] \n', ["aé\n", "b", "c"]),
        ('{\n "text": "one",\n "n": 12345\n}\n', ["one"]),
        ('[\n{"text": "alone"}\n]\n', ["alone"]),
        ('"single"', ["single"]),
        (" [\n] ", []),
    ]:
        path.write_text(content)
        (tmp_path / "z.txt").write_text("z")
        assert texts_of(DataArgs(sources=[str(tmp_path)])) == [*expected, "z"]
    for content in ('["a" "b"]', '["a",]', '["a"', '[\n"a"]3', '["a", tru]', '["a", {"text": "x"'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"a.json is not JSON \(.*\)"):
            texts_of(DataArgs(sources=[str(path)]))
    path.write_text('["a", 12345, true, "b"]')
    documents, report = read_all(DataArgs(sources=[str(path)], unreadable="skip"))
    assert [one.text for one in documents] == ["a", "b"] and report.records_skipped == 2
    path.write_text(json.dumps(["a", "x" * 60, "b"]))
    with pytest.raises(ValueError, match="record 1 has 60 bytes, more than data.max_record_bytes = 59"):
        texts_of(DataArgs(sources=[str(path)], max_record_bytes=59))
    assert len(texts_of(DataArgs(sources=[str(path)], max_record_bytes=60))) == 3
    path.write_text("12345")
    with pytest.raises(ValueError, match="record 0 is a int, expected an object with a field 'text'"):
        texts_of(DataArgs(sources=[str(path)]))
    monkeypatch.setattr(readers, "JSON_BYTES", 4)
    with pytest.raises(ValueError, match="one JSON value of more than 4 bytes: make it JSON lines"):
        texts_of(DataArgs(sources=[str(path)]))


@pytest.mark.parametrize("unreadable", ["error", "skip"])
def test_files_changed_after_planning_are_named(tmp_path, unreadable):
    for name in ("a.txt", "b.jsonl", "c.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(lines("x")) if name.endswith("gz") else lines("x"))
    args = DataArgs(sources=[str(tmp_path)], unreadable=unreadable)
    for name in ("a.txt", "b.jsonl", "c.jsonl.gz"):
        work_shards = plan_work_shards(args)
        path = tmp_path / name
        old = path.read_bytes()
        path.write_bytes(old + b"\n")
        with pytest.raises(ValueError, match=rf"{name} was changed while the data was prepared: start again"):
            list(read_work_shard(work_shards[0], args, SourceReport("")))
        path.unlink()
        with pytest.raises(ValueError, match=rf"{name} was changed"):
            list(read_work_shard(work_shards[0], args, SourceReport("")))
        path.write_bytes(old)


@pytest.mark.parametrize("unreadable", ["error", "skip"])
def test_files_changed_while_they_are_read_are_named(tmp_path, unreadable):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*["x" * 1000] * 3000))
    args = DataArgs(sources=[str(path)], unreadable=unreadable)
    reading = read_work_shard(plan_work_shards(args)[0], args, SourceReport(""))
    next(reading)
    path.write_bytes(lines("short"))
    with pytest.raises(ValueError, match="a.jsonl was changed while the data was prepared"):
        list(reading)


def test_damaged_files_lose_their_rest_only(tmp_path):
    whole = gzip.compress(b"".join(lines(f"record {random.Random(n).random()}") for n in range(5000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.txt").write_bytes("schön".encode("latin-1"))
    (tmp_path / "c.jsonl").write_bytes(lines("c"))
    (tmp_path / "d.txt").symlink_to(tmp_path / "nowhere")
    documents, report = read_all(DataArgs(sources=[str(tmp_path)], unreadable="skip"))
    assert 1000 < len(documents) < 4000 and documents[-1].text == "c"
    assert (report.skipped, report.records_skipped, report.files) == (3, 0, 4)
    assert [reason.split(" ")[0].rpartition("/")[2] for reason in report.skipped_files] == [
        "a.jsonl.gz",
        "b.txt",
        "d.txt",
    ]


def test_empty_files_are_counted_once(tmp_path):
    for name in ("a.txt", "b.jsonl", "c.json", "d.jsonl.gz", "e.txt"):
        (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    (tmp_path / "e.txt").write_text(" \n")
    (tmp_path / "f.json").write_text("[]")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "g.parquet"
    )
    (tmp_path / "h.jsonl").write_bytes(b"{bad\n" + lines(""))
    (tmp_path / "i.jsonl").write_bytes(b"{bad\n")
    (tmp_path / "z.txt").write_text("z")
    documents, report = read_all(DataArgs(sources=[str(tmp_path)], unreadable="skip"))
    assert [one.text for one in documents] == ["z"]
    assert (report.files, report.empty, report.records_skipped, report.skipped) == (10, 8, 2, 0)


def test_pipes_and_devices_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_text("b")
    documents, report = read_all(DataArgs(sources=[str(tmp_path)], unreadable="skip"))
    assert [one.text for one in documents] == ["b"] and report.skipped == 1
    with pytest.raises(ValueError, match="a.txt is missing or not a regular file"):
        texts_of(DataArgs(sources=[str(tmp_path)]))


# Hub data sets


def shard_records(shards):
    for shard in shards:
        for number in range(3):
            yield {"text": f"shard {shard} record {number}", "source": "s"}


def test_hub_shards_are_work_shards_in_the_order_of_the_stream(monkeypatch):
    stream = datasets.IterableDataset.from_generator(shard_records, gen_kwargs={"shards": list(range(4))})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    args = DataArgs(sources=["hub:some/set", "hub:other:en@test"])
    planned = plan_work_shards(args)
    assert [(work_shard.source, work_shard.hub.index, work_shard.hub.count) for work_shard in planned] == [
        (s, i, 4) for s in (0, 1) for i in range(4)
    ]
    assert planned[1].hub.where == "hub data set 'some/set' split 'train' shard 1"
    assert len({work_shard.fingerprint() for work_shard in planned}) == 8
    documents, report = read_all(args)
    assert [one.text for one in documents] == [record["text"] for record in stream] * 2
    assert report.files == 2 and {one.origin for one in documents} == {"s"}
    assert len({one.name for one in documents}) == 24 and documents[4].name == "hub:some/set:1:1"


def test_hub_reads_a_folder_of_parquet_through_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        table = pyarrow.table({"ids": [[number, 1], [number, 2]], "other": ["x", "y"]})
        pyarrow.parquet.write_table(table, folder / f"train-{number:05d}-of-00003.parquet")
    args = DataArgs(sources=[f"hub:{tmp_path}"], token_field="ids")
    assert len(plan_work_shards(args)) == 3
    assert [one.tokens.tolist() for one in read_all(args)[0]] == [[n, m] for n in range(3) for m in (1, 2)]
    with pytest.raises(ValueError, match="record 0 has no field 'input_ids' .fields seen: ids, other"):
        texts_of(replace(args, token_field="input_ids"))


def test_a_hub_data_set_is_read_at_the_commit_at_which_it_was_planned(monkeypatch, hub_revision):
    asked = []

    def load_dataset(*_, revision, **__):
        asked.append(revision)
        return [{"text": "one"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    args = DataArgs(sources=["hub:some/set"])
    (planned,) = plan_work_shards(args)
    hub_revision[0] = "456def"  # somebody pushes
    assert [one.text for one in read_work_shard(planned, args, SourceReport(""))] == ["one"]
    assert asked == ["0123abc", "0123abc"]
    assert plan_work_shards(args)[0].fingerprint() != planned.fingerprint()


def test_hub_records_follow_the_policy(monkeypatch):
    records = [{"text": "one"}, {"text": 3}, {"text": "ü" * 10}, {"text": "two"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter(records))
    args = DataArgs(sources=["hub:some/set"], unreadable="skip", max_record_bytes=19)
    documents, report = read_all(args)
    assert [one.text for one in documents] == ["one", "two"] and report.records_skipped == 2
    assert (
        "record 1: field 'text' is a int" in report.skipped_files[0]
        and "record 2 has 20 bytes" in report.skipped_files[1]
    )
    assert [one.name for one in documents] == ["hub:some/set:0", "hub:some/set:3"]
    with pytest.raises(
        ValueError, match="record 1: field 'text' is a int, expected text; repair or remove it"
    ):
        texts_of(replace(args, unreadable="error"))


def test_an_endless_hub_shard_is_read_as_far_as_asked(monkeypatch):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: ({"text": str(n)} for n in itertools.count())
    )
    args = DataArgs(sources=["hub:some/set"])
    reading = read_work_shard(plan_work_shards(args)[0], args, SourceReport(""))
    assert [one.text for one in itertools.islice(reading, 3)] == ["0", "1", "2"]
