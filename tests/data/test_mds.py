"""MosaicML shards: the real writer's files, an independent writer here, nested folders, damage."""

import gzip
import json
import random
import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from pod.data.args import DataArgs
from pod.data.read.documents import SourceReport
from pod.data.read.mds import ARRAY_TYPES, mds_shards, read_index, read_shard
from pod.data.read.records import Fields
from pod.data.read.work_shards import plan_work_shards, read_work_shard

WRITTEN = Path(__file__).parent / "fixtures" / "mds"
"""Written by MDSWriter of mosaicml-streaming 0.13.0."""
TEXTS = ["first document", "zweites Dokument, 中文 😀", "third\nwith two lines"]
PRO_LONG = {"token_field": "input_ids", "token_bounds_field": "indices"}


def read_all(*sources, **settings):
    args = DataArgs(sources=list(map(str, sources)), **settings)
    report = SourceReport("all")
    return [
        one for work_shard in plan_work_shards(args) for one in read_work_shard(work_shard, args, report)
    ], report


def texts_of(*sources, **settings):
    return [document.text for document in read_all(*sources, **settings)[0]]


# The real writer's files


def test_text_of_the_real_writer():
    documents, report = read_all(WRITTEN / "text")
    assert [one.text for one in documents] == TEXTS and {one.origin for one in documents} == {"cc"}
    assert documents[1].name == f"{WRITTEN}/text/shard.00000.mds:1"
    assert (report.files, report.skipped) == (1, 0)
    assert texts_of(WRITTEN / "text" / "index.json") == TEXTS


def test_token_ids_of_the_real_writer():
    """ProLong's columns are read.

    They are `input_ids` packed to a fixed length, `indices` [documents, 2], `length`, and `domain`.
    """
    ids = np.arange(40) * 1000
    documents, _ = read_all(WRITTEN / "prolong", **PRO_LONG)
    expected = [ids[:10], ids[10:33], ids[33:], ids[::-1]]
    assert all(np.array_equal(one.tokens, wanted) for one, wanted in zip(documents, expected, strict=True))
    assert {one.tokens.dtype for one in documents} == {np.dtype(np.uint32)}
    assert {one.origin for one in documents} == {"book-40"} and not any(one.text for one in documents)
    whole, _ = read_all(WRITTEN / "prolong", token_field="input_ids")
    assert [len(one.tokens) for one in whole] == [40, 40]


VALUES = {
    "a_json": [[1, 2, {"x": "ü"}], None],
    "arr": [[[1, 2], [3, 4]], list(range(300))],
    "fix": [[5, 6, 7], [8, 9, 10]],
    "text": ["x", ""],
}


class RawFields(Fields):
    """Gives out the decoded values themselves."""

    def record(self, place, values, where):
        return values


@pytest.mark.parametrize("name", VALUES)
def test_every_encoding_of_texts_and_ids_of_the_real_writer(name):
    """str, json, ndarray with and without fixed type and shape."""
    (shard,) = mds_shards(WRITTEN / "all", read_index(WRITTEN / "all" / "index.json"))
    found = [values[name] for values in read_shard(shard, RawFields(text=name), pytest.fail)]
    plain = [value.tolist() if isinstance(value, np.ndarray) else value for value in found]
    assert plain == VALUES[name]
    if name == "arr":
        assert [value.dtype.name for value in found] == ["int16", "float32"]


@pytest.mark.parametrize(("name", "encoding"), [("p", "pkl"), ("si", "str_int"), ("b", "bytes")])
def test_other_columns_are_refused_by_name_and_passed_over(name, encoding):
    assert texts_of(WRITTEN / "all") == ["x"]
    with pytest.raises(ValueError, match=f"field '{name}' has encoding '{encoding}'; supported for"):
        texts_of(WRITTEN / "all", text_field=name)
    assert [one.tokens.tolist() for one in read_all(WRITTEN / "all", token_field="fix")[0]] == [
        [5, 6, 7],
        [8, 9, 10],
    ]


def test_types_of_arrays():
    """The first byte of an array says its type.

    8, 16, 32, 64 stand for its bits, one more for signed, two more for floating-point numbers.
    """
    expected = {
        bits + add: f"{kind}{bits}"
        for bits in (8, 16, 32, 64)
        for add, kind in enumerate(("uint", "int", "float"))
    }
    del expected[10]
    assert {code: np.dtype(one).name for code, one in ARRAY_TYPES.items()} == expected


# A writer of our own, from the description of the format


def encode(encoding, value):
    if encoding == "str":
        return value if isinstance(value, bytes) else value.encode()
    if encoding == "int":
        return struct.pack("<q", value)
    kind, _, dtype = encoding.partition(":")
    assert kind == "ndarray"
    array = np.asarray(value, dtype=dtype or None)
    head = b"" if dtype else bytes([{"uint32": 32, "int64": 65, "uint16": 16}[array.dtype.name]])
    width = next(n for n in range(4) if max(array.shape) < 256 ** (2**n))
    shape = np.array(array.shape, dtype=f"<u{2**width}").tobytes()
    return (
        head
        + bytes([array.ndim << 2 | width])
        + shape
        + array.astype(array.dtype.newbyteorder("<")).tobytes()
    )


def shard_bytes(columns, samples):
    names = sorted(columns)
    encoded = []
    for sample in samples:
        data = [encode(columns[name], sample[name]) for name in names]
        sizes = [len(one) for one, name in zip(data, names, strict=True) if columns[name] != "int"]
        encoded.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data))
    header = b'{"any": "header"}'
    start = 4 * (len(samples) + 2) + len(header)
    offsets = np.cumsum([start, *map(len, encoded)]).astype("<u4").tobytes()
    return struct.pack("<I", len(samples)) + offsets + header + b"".join(encoded)


PACK = {"zstd": zstandard.compress, "gz": gzip.compress}


def entry_of(columns, data, num_samples, name="shard.00000.mds", compression=None, **change):
    names = sorted(columns)
    entry = {
        "column_encodings": [columns[one] for one in names],
        "column_names": names,
        "column_sizes": [8 if columns[one] == "int" else None for one in names],
        "compression": compression,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
        "samples": num_samples,
        "size_limit": 67108864,
        "version": 2,
        "zip_data": None,
    }
    if compression:
        kind = compression.partition(":")[0]
        packed = PACK[kind](data)
        entry["zip_data"] = {"basename": f"{name}.{kind}", "bytes": len(packed), "hashes": {}}
    return entry | change


def write_mds(folder, columns, shards, compression=None, **options):
    """An MDS data set of the samples in `shards`; returns the entries of its index."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, samples in enumerate(shards):
        data = shard_bytes(columns, samples)
        entry = entry_of(columns, data, len(samples), f"shard.{number:05d}.mds", compression, **options)
        stored = PACK[compression.partition(":")[0]](data) if compression else data
        (folder / (entry["zip_data"] or entry["raw_data"])["basename"]).write_bytes(stored)
        entries.append(entry)
    write_index(folder, entries)
    return entries


def write_index(folder, entries, **change):
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2} | change))


def text_samples(*texts):
    return [{"text": text, "n": number} for number, text in enumerate(texts)]


COLUMNS = {"text": "str", "n": "int"}


def test_a_glob_of_indexes_reads_their_shards():
    """As the 128K recipe names ProLong's folders."""
    assert texts_of(WRITTEN / "t*" / "index.json") == TEXTS
    documents, _ = read_all(WRITTEN / "pro*" / "index.json", **PRO_LONG)
    assert len(documents) == len(read_all(WRITTEN / "prolong", **PRO_LONG)[0]) > 0


def test_own_writer_writes_as_the_real_one(tmp_path):
    """Byte for byte but the JSON header, which no reader needs."""
    columns = {"domain": "str", "indices": "ndarray:uint32", "input_ids": "ndarray:uint32", "length": "int"}
    ids = np.arange(40) * 1000
    samples = [
        {"input_ids": ids, "indices": [[0, 10], [10, 33], [33, 40]], "length": 40, "domain": "book-40"},
        {"input_ids": ids[::-1], "indices": [[0, 40]], "length": 40, "domain": "book-40"},
    ]
    ours = shard_bytes(columns, samples)
    theirs = zstandard.decompress(
        (WRITTEN / "prolong" / "shard.00000.mds.zstd").read_bytes(), max_output_size=9999
    )
    body = [data[struct.unpack_from("<I", data, 4)[0] :] for data in (ours, theirs)]
    assert body[0] == body[1] and len(body[0]) > 300


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7", "gz:3"])
def test_shards_are_work_shards_in_order(tmp_path, compression):
    shards = [text_samples(*TEXTS), text_samples("four"), [], text_samples("", "five", "six")]
    write_mds(tmp_path, COLUMNS, shards, compression)
    args = DataArgs(sources=[str(tmp_path)])
    planned = plan_work_shards(args)
    assert len(planned) == 4 and len({work_shard.fingerprint() for work_shard in planned}) == 4
    raw = [len(shard_bytes(COLUMNS, samples)) for samples in shards]
    assert [work_shard.text_bytes for work_shard in planned] == raw
    documents, report = read_all(tmp_path)
    assert [one.text for one in documents] == [*TEXTS, "four", "five", "six"]
    assert (report.files, report.empty, report.skipped) == (4, 1, 0)


def test_decompressed_shards_go_first(tmp_path):
    """The library leaves `.mds` beside `.mds.zstd` when it has read a shard."""
    write_mds(tmp_path, COLUMNS, [text_samples("a", "b")], "zstd")
    packed = tmp_path / "shard.00000.mds.zstd"
    (tmp_path / "shard.00000.mds").write_bytes(
        zstandard.decompress(packed.read_bytes(), max_output_size=9999)
    )
    assert texts_of(tmp_path) == ["a", "b"]
    packed.unlink()
    documents, report = read_all(tmp_path)
    assert documents[0].name.endswith(".mds:0") and report.skipped == 0


def test_nested_folders_are_read_once(tmp_path):
    """Nested folders are read once.

    ProLong has a folder for each domain. Merged data sets have an index above that names the shards below,
    too.
    """
    entries = []
    for name in ("arxiv-64", "book-64"):
        columns = {"input_ids": "ndarray", "indices": "ndarray:uint32", "domain": "str"}
        ids = np.arange(6, dtype=np.uint32) + ord(name[0])
        samples = [{"input_ids": ids, "indices": [[0, 2], [2, 6]], "domain": name}]
        for entry in write_mds(tmp_path / name, columns, [samples, samples], "zstd"):
            for key in ("raw_data", "zip_data"):
                entry[key] = entry[key] | {"basename": f"{name}/{entry[key]['basename']}"}
            entries.append(entry)
    expected = [ord(name[0]) + at for name in ("arxiv", "book") for at in (0, 2, 0, 2)]
    documents, report = read_all(tmp_path, **PRO_LONG)
    assert [int(one.tokens[0]) for one in documents] == expected and report.files == 4
    write_index(tmp_path, entries)
    documents, report = read_all(tmp_path, **PRO_LONG)
    assert [int(one.tokens[0]) for one in documents] == expected and (report.files, report.skipped) == (4, 0)
    assert [one.origin for one in documents] == ["arxiv-64"] * 4 + ["book-64"] * 4


def test_files_beside_shards_are_named_not_read(tmp_path):
    write_mds(tmp_path / "en", COLUMNS, [text_samples("a")])
    write_mds(tmp_path / "de", COLUMNS, [text_samples("b")])
    (tmp_path / "README.md").write_text("not a document")
    (tmp_path / "de" / "shard.00009.mds").write_bytes(b"not in the index")
    documents, report = read_all(tmp_path)
    assert [one.text for one in documents] == ["b", "a"] and report.skipped == 2
    assert [
        "README.md" in report.skipped_files[0],
        "shard.00009.mds is next to" in report.skipped_files[1],
    ] == [True, True]
    assert texts_of(tmp_path, include=["*.mds", "*.md"], unreadable="skip") == ["not a document", "b", "a"]
    before = plan_work_shards(DataArgs(sources=[str(tmp_path)]))[0].fingerprint()
    (tmp_path / "NEWS").write_text("")
    assert plan_work_shards(DataArgs(sources=[str(tmp_path)]))[0].fingerprint() != before


def test_an_index_of_something_else_is_a_document(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"text": "just text", "shards": "many"}))
    assert texts_of(tmp_path) == ["just text"]
    (tmp_path / "x.mds").write_bytes(b"\0")
    with pytest.raises(
        ValueError, match="x.mds is an MDS shard: name the folder with its index.json instead"
    ):
        texts_of(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 1}, "index.json has version 1, expected 2"),
        ({"format": "jsonl"}, "names a shard of format 'jsonl', expected 'mds'"),
        ({"raw_data": {"basename": "../x.mds", "bytes": 3}}, "names a shard outside its folder"),
        ({"samples": None}, "is not a complete MDS index"),
        ({"column_sizes": [8]}, "zip"),
    ],
)
def test_wrong_indexes_are_refused(tmp_path, change, message):
    (entry,) = write_mds(tmp_path, COLUMNS, [text_samples("a")])
    write_index(tmp_path, [entry | change], **({"version": 1} if "version" in change else {}))
    with pytest.raises(ValueError, match=message) as info:
        plan_work_shards(DataArgs(sources=[str(tmp_path)]))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"samples": 4}, "has 3 samples, but index.json says 4"),
        ({"column_sizes": [8, 8]}, "its columns do not add up"),
        (
            {"raw": "x.mds.br"},
            "x.mds.br has compression '.br', which is not supported; supported are .gz, .bz2, .xz, .zst",
        ),
        ({"column_encodings": ["int", "ndarray:U9"]}, "encoding 'ndarray:U9', which is not a numeric array"),
        ({"column_encodings": ["int", "jpeg"]}, "has encoding 'jpeg'; supported for text and token ids are"),
        ({"raw": "gone.mds"}, "gone.mds is missing or not a regular file"),
        ({"bytes": 7}, "has 136 bytes, but index.json says 7"),
    ],
)
def test_shards_unlike_their_index_are_unreadable(tmp_path, change, message):
    (entry,) = write_mds(tmp_path / "a", COLUMNS, [text_samples(*TEXTS)])
    raw, change = entry["raw_data"], dict(change)
    raw |= {"bytes": change.pop("bytes", raw["bytes"]), "basename": change.pop("raw", raw["basename"])}
    write_index(tmp_path / "a", [entry | change])
    if raw["basename"] != "shard.00000.mds":
        (tmp_path / "a" / "shard.00000.mds").unlink()
    if raw["basename"] == "x.mds.br":
        (tmp_path / "a" / "x.mds.br").write_bytes(bytes(raw["bytes"]))
    write_mds(tmp_path / "b", COLUMNS, [text_samples("good")])
    with pytest.raises(ValueError, match=message) as info:
        texts_of(tmp_path)
    assert "\n" not in str(info.value) and "data.unreadable=skip" in str(info.value)
    documents, report = read_all(tmp_path, unreadable="skip")
    assert [one.text for one in documents] == ["good"] and (report.skipped, report.records_skipped) == (1, 0)


def test_damage_never_crashes(tmp_path):
    """Whatever byte is wrong: another text, or one line that names the shard."""
    columns = {"text": "str", "input_ids": "ndarray", "indices": "ndarray:uint32", "n": "int"}
    samples = [{"text": "some", "input_ids": np.arange(3), "indices": [[0, 3]], "n": 0}] * 3
    write_mds(tmp_path, columns, [samples])
    path = tmp_path / "shard.00000.mds"
    data = path.read_bytes()
    rng = random.Random(1)
    wrong = 0
    for _ in range(400):
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :])
        for settings in ({}, PRO_LONG):
            _, report = read_all(tmp_path, unreadable="skip", **settings)
            wrong += report.skipped + report.records_skipped
            assert all("shard.00000.mds" in one and "\n" not in one for one in report.skipped_files)
    assert wrong > 200


def test_content_of_another_length_than_the_index_says(tmp_path):
    (entry,) = write_mds(tmp_path, COLUMNS, [text_samples("a")], "zstd")
    entry["raw_data"]["bytes"] += 1
    write_index(tmp_path, [entry])
    with pytest.raises(ValueError, match=r"is damaged: its offsets do not add up to \d+ bytes"):
        texts_of(tmp_path)


def test_bad_samples_are_skipped_one_by_one(tmp_path):
    texts = ["first", b"\xff\xfe", "x" * 3_000_000, "y" * 300, "last"]
    write_mds(tmp_path, COLUMNS, [text_samples(*texts)], "zstd")
    tracemalloc.start()
    documents, report = read_all(tmp_path, unreadable="skip", max_record_bytes=299)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.text for one in documents] == ["first", "last"] and peak < 2.9 * 2**20
    assert (report.records_skipped, report.skipped) == (3, 0)
    assert "sample 1: field 'text' is not str" in report.skipped_files[0]
    assert "sample 2: field 'text' has 3,000,000 bytes" in report.skipped_files[1]
    assert "sample 3 has 300 bytes" in report.skipped_files[2]
    with pytest.raises(ValueError, match="shard.00000.mds.zstd sample 1: field 'text' is not str"):
        texts_of(tmp_path)
    with pytest.raises(
        ValueError, match=r"sample 0 has no text field 'body' \(fields seen: n, text\); set data.text_field"
    ):
        texts_of(tmp_path, text_field="body")


def test_changed_shards_are_named(tmp_path):
    write_mds(tmp_path, COLUMNS, [text_samples("a"), text_samples("b")])
    args = DataArgs(sources=[str(tmp_path)], unreadable="skip")
    planned = plan_work_shards(args)
    shutil.copyfile(tmp_path / "shard.00000.mds", tmp_path / "shard.00001.mds")
    assert [one.text for one in read_work_shard(planned[0], args, SourceReport(""))] == ["a"]
    with pytest.raises(ValueError, match="shard.00001.mds was changed while the data was prepared"):
        list(read_work_shard(planned[1], args, SourceReport("")))
