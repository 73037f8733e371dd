"""Fields of records: Dolma's layout, token ids and the bounds of their documents, rows of tables."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import read_all, texts_of

from pod.data.args import DataArgs


def test_dolma_layout(tmp_path):
    (tmp_path / "v1").mkdir()
    for number, origin in enumerate(["wiki", "cc"]):
        records = [
            {
                "id": f"{origin}-{i}",
                "text": f"{origin} text {i}",
                "source": origin,
                "added": "2023-04-11T09:57:03.044571+00:00",
                "created": "2020-01-17T12:48:45.000Z",
                "metadata": {"url": "https://example.org", "length": 3},
            }
            for i in range(3)
        ]
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        (tmp_path / "v1" / f"part-{number:04d}.json.gz").write_bytes(gzip.compress(content))
    documents, report = read_all(DataArgs(sources=[str(tmp_path)]))
    assert [(one.origin, one.text) for one in documents] == [
        (origin, f"{origin} text {i}") for origin in ("wiki", "cc") for i in range(3)
    ]
    assert report.origins == {"wiki": 3, "cc": 3} and report.files == 2
    words, _ = read_all(DataArgs(sources=[str(tmp_path)], text_field="source"))
    assert {(one.text, one.origin) for one in words} == {("wiki", ""), ("cc", "")}, (
        "a text is not its own origin"
    )


def write_ids(path, records):
    kind = path.suffix
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return
    columns = {name: [record[name] for record in records] for name in records[0]}
    table = pyarrow.table(columns)
    if kind == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_token_ids_are_taken_as_they_are(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    ids = [[5, 0, 2**32 - 1], [], list(range(100))]
    bounds = [[[0, 1], [1, 3]], [], [[0, 60], [60, 60], [60, 100]]]
    write_ids(path, [{"input_ids": a, "indices": b, "domain": "d"} for a, b in zip(ids, bounds, strict=True)])
    args = DataArgs(sources=[str(path)], token_field="input_ids")
    documents, report = read_all(args)
    assert [one.tokens.tolist() for one in documents] == [ids[0], ids[2]] and report.empty == 1
    assert all(one.tokens.dtype == np.uint32 and one.text == "" and one.origin == "d" for one in documents)
    documents, report = read_all(replace(args, token_bounds_field="indices"))
    assert [one.tokens.tolist() for one in documents] == [ids[0][:1], ids[0][1:], ids[2][:60], ids[2][60:]]
    assert [one.name for one in documents] == [f"{path}:0:0", f"{path}:0:1", f"{path}:2:0", f"{path}:2:2"]
    assert report.empty == 1, "an empty document between two others"
    with pytest.raises(
        ValueError,
        match=r"has no field 'ids' \(fields seen: domain, indices, input_ids\); set data.token_field",
    ):
        texts_of(replace(args, token_field="ids"))


@pytest.mark.parametrize(
    "ids, message",
    [
        ([-100, 3], "holds -100, which is no token id"),
        ([2**32], "holds 4294967296, which is no token id"),
        ([1.5], "holds float64 values, expected token ids"),
        (["a"], "expected token ids"),
        ([[1, 2]], "has 2 dimensions"),
        ([[1], [1, 2]], "is ragged"),
        ([2**70], "holds object values"),
        ([True], "holds bool values"),
        (7, "has 0 dimensions"),
        ("text", "expected token ids"),
        ({"a": 1}, "expected token ids"),
        ([1] * 20, "has 80 bytes, more than data.max_record_bytes = 79"),
    ],
)
def test_wrong_token_ids_are_bad_records(tmp_path, ids, message):
    path = tmp_path / "a.jsonl"
    write_ids(path, [{"ids": ids}, {"ids": [1, 2]}])
    args = DataArgs(sources=[str(path)], token_field="ids", unreadable="skip", max_record_bytes=79)
    documents, report = read_all(args)
    assert [one.tokens.tolist() for one in documents] == [[1, 2]] and report.records_skipped == 1
    assert message in report.skipped_files[0]


@pytest.mark.parametrize(
    "bounds, message, left",
    [
        ([[0, 2], [3, 5]], "has 1 token ids outside the documents of", [[0, 1], [3, 4]]),
        ([], "has 5 token ids outside the documents of", []),
        ([[0, 3], [2, 5]], "must ascend from 0 to 5 without overlap", []),
        ([[0, 6]], "must ascend from 0 to 5", []),
        ([[-1, 5]], "must ascend from 0 to 5", []),
        ([[3, 2]], "must ascend", []),
        ([0, 5], "has shape [2], expected [documents, 2]", []),
        ([[0, 2.5]], "holds float64 values, expected [start, stop) pairs", []),
        (None, "expected [start, stop) pairs", []),
    ],
)
def test_wrong_bounds_are_bad_records(tmp_path, bounds, message, left):
    path = tmp_path / "a.jsonl"
    write_ids(path, [{"ids": list(range(5)), "b": bounds}, {"ids": [7, 8], "b": [[0, 2]]}])
    args = DataArgs(sources=[str(path)], token_field="ids", token_bounds_field="b", unreadable="skip")
    documents, report = read_all(args)
    assert [one.tokens.tolist() for one in documents] == [*left, [7, 8]] and report.records_skipped == 1
    assert message in report.skipped_files[0]
    with pytest.raises(ValueError, match="a.jsonl"):
        texts_of(replace(args, unreadable="error"))


def test_text_files_hold_no_token_ids(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="a.txt is text, but data.token_field = 'ids' asks for token ids"):
        texts_of(DataArgs(sources=[str(tmp_path)], token_field="ids"))


def test_rows_are_numbered_over_batches_and_row_groups(tmp_path):
    table = pyarrow.table({"text": [f"row {number}" for number in range(150)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    documents, _ = read_all(DataArgs(sources=[str(tmp_path)]))
    names = [f"{tmp_path}/a.parquet:{number}" for number in range(150)]
    assert [one.text for one in documents] == table["text"].to_pylist()
    assert [one.name for one in documents] == names


def test_table_rows_above_the_limit_or_not_utf8_are_bad_records(tmp_path):
    texts = pyarrow.array([b"good", b"\xe9", b"x" * 50, b"end"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    documents, report = read_all(DataArgs(sources=[str(tmp_path)], unreadable="skip", max_record_bytes=49))
    assert [one.text for one in documents] == ["good", "end"] and report.records_skipped == 2
    assert len(texts_of(DataArgs(sources=[str(tmp_path)], unreadable="skip", max_record_bytes=50))) == 3
    assert "row 1: field 'text' is not UTF-8" in report.skipped_files[0]
    assert "row 2 has 50 bytes" in report.skipped_files[1]
