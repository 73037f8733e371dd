"""The packed-row format: written, validated, read in a reproducible order."""

import json
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from data_helpers import check_whole

from pod.data import PackedDataset, RowCursor, write_packed_rows
from pod.data.rows import loader
from pod.data.rows.order import epoch_order

CONTEXT = 16


def make_rows(num_rows=10):
    """Rows of two documents with unique token ids and two tokens of padding."""
    ids = iter(range(10**6))
    return [
        [np.array([next(ids) for _ in range(size)], dtype=np.int32) for size in (9, 5)]
        for _ in range(num_rows)
    ]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    write_packed_rows(
        path,
        make_rows(),
        context_length=CONTEXT,
        vocab_size=1000,
        tokenizer_sha256="ab" * 32,
        shard_bytes=3 * 2 * CONTEXT,
    )
    return path


def edit_manifest(folder, **changes):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.update(changes)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_rows_come_back_with_labels_inside_documents(folder):
    check_whole(folder)
    data = PackedDataset(folder)
    assert len(data) == 10 and data.context_length == CONTEXT and len(data.manifest["shards"]) == 4
    for index, documents in enumerate(make_rows()):
        row = data[index]
        labels = np.full(CONTEXT, -100)
        labels[:8], labels[9:13] = documents[0][1:], documents[1][1:]
        assert row["input_ids"].tolist() == [*documents[0], *documents[1], 0, 0]
        assert row["doc_ids"].tolist() == [0] * 9 + [1] * 5 + [-1] * 2
        assert row["labels"].tolist() == labels.tolist()
        assert [part.tolist() for part in data.documents(index)] == [part.tolist() for part in documents]
    batch = data.rows([7, 2])
    assert batch["input_ids"].shape == (2, CONTEXT)
    assert batch["labels"][1].equal(data[2]["labels"])


def test_rows_of_many_documents_and_of_one(tmp_path):
    lengths = [[16], [1] * 16, [3, 2, 4, 6], [1]]
    rows = [[np.full(length, 7) for length in row] for row in lengths]
    write_packed_rows(tmp_path / "data", rows, context_length=CONTEXT, vocab_size=8, tokenizer_sha256="ab")
    batch = PackedDataset(tmp_path / "data").rows(range(4))
    for row, docs, labels in zip(lengths, batch["doc_ids"].tolist(), batch["labels"].tolist(), strict=True):
        expected = [number for number, length in enumerate(row) for _ in range(length)]
        assert docs == expected + [-1] * (CONTEXT - sum(row))
        assert labels.count(7) == sum(length - 1 for length in row)


def test_order_is_a_permutation_of_seed_and_epoch(folder):
    data = PackedDataset(folder)
    first = epoch_order(len(data), 3, 0)
    assert sorted(first) == list(range(10))
    assert first.tolist() == epoch_order(len(data), 3, 0).tolist()
    assert first.tolist() != epoch_order(len(data), 3, 1).tolist()
    assert first.tolist() != epoch_order(len(data), 4, 0).tolist()
    # Pinned: a resumed run must find the order of the release that started it.
    assert first.tolist() == [0, 4, 9, 7, 1, 5, 6, 3, 8, 2]


def test_cursor_resumes_on_other_rank_counts(folder):
    data = PackedDataset(folder)
    seen, state = [], None
    for ranks, steps in ((2, 2), (1, 1), (3, 2)):
        cursors = [data.cursor(seed=5) for _ in range(ranks)]
        for cursor in cursors:
            if state is not None:
                cursor.load_state_dict(state)
        for _ in range(steps):
            for rank, cursor in enumerate(cursors):
                seen.extend(cursor.take(2 * ranks, rank, ranks))
        state = cursors[-1].state_dict()
        assert all(cursor.position == state["position"] for cursor in cursors)
    assert state["position"] == 22 == len(seen)
    assert sorted(seen[:10]) == sorted(seen[10:20]) == list(range(10))


def test_cursor_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="6 rows per step cannot be split over 4 data-parallel ranks"):
        RowCursor(10).peek(6, 0, 4)
    with pytest.raises(ValueError, match="rank 2 is not in 0..1"):
        RowCursor(10).peek(2, 2, 2)
    with pytest.raises(ValueError, match="data with 11 rows, this data has 10"):
        RowCursor(10).load_state_dict({"num_rows": 11, "position": 0, "seed": 0})
    with pytest.raises(ValueError, match="0 rows"):
        RowCursor(0)


def test_data_for_something_else_is_refused(folder):
    with pytest.raises(ValueError, match="another tokenizer"):
        PackedDataset(folder, tokenizer_sha256="cd" * 32)
    with pytest.raises(ValueError, match="up to 999, but the model's vocabulary has only 500"):
        PackedDataset(folder, vocab_size=500)
    assert len(PackedDataset(folder, tokenizer_sha256="ab" * 32, vocab_size=1024)) == 10


def test_damaged_folders_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="has no manifest.json: run `pod data`"):
        PackedDataset(tmp_path / "nothing")
    shard = folder / "shard-00001.tokens.npy"
    original = shard.read_bytes()
    shard.write_bytes(original[:-4])
    with pytest.raises(ValueError, match="shard-00001.tokens.npy has 220 bytes, but the manifest says 224"):
        PackedDataset(folder)
    shard.write_bytes(original + b"\x00")
    with pytest.raises(ValueError, match="shard-00001.tokens.npy has 225 bytes, but the manifest says 224"):
        PackedDataset(folder)
    shard.write_bytes(b"\x00" * len(original))
    with pytest.raises(ValueError, match="not a readable .npy array"):
        PackedDataset(folder)
    shard.unlink()
    with pytest.raises(ValueError, match="shard-00001.tokens.npy is missing"):
        PackedDataset(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": "other"}, "not a manifest of packed rows"),
        ({"schema_version": 1}, "schema version 1, but this program reads 3: prepare the data again"),
        ({"context_length": None}, "lacks 'context_length'"),
        ({"context_length": 8}, "is uint16 .3, 16., expected uint16 .3, 8."),
        ({"vocab_size": 2**16 + 1}, "is uint16 .3, 16., expected uint32 .3, 16."),
        ({"num_rows": 11}, "have 10 rows, but the manifest says 11"),
        ({"num_documents": 21}, "have 20 documents, but the manifest says 21"),
        ({"shards": [{"rows": 1}]}, "incomplete shard entry"),
        ({"shards": [{"rows": 1, "documents": 1, "tokens": 1, "lengths": 1, "starts": 1}]}, "incomplete"),
        ({"shards": []}, "incomplete shard entry"),
    ],
)
def test_foreign_manifests_are_refused(folder, changes, message):
    edit_manifest(folder, **changes)
    with pytest.raises(ValueError, match=message):
        PackedDataset(folder)


def test_any_changed_byte_is_found(folder):
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [
        "manifest.json",
        *(f"shard-0000{n}.{name}.npy" for n in range(4) for name in ("lengths", "starts", "tokens")),
    ]
    for file in files:
        original = file.read_bytes()
        step = max(1, len(original) // 40) if file.name != "shard-00003.tokens.npy" else 1
        for at in [*range(0, len(original), step), len(original) - 1]:
            for flip in (1, 128):
                damaged = bytearray(original)
                damaged[at] ^= flip
                file.write_bytes(bytes(damaged))
                with pytest.raises(ValueError) as info:
                    check_whole(folder)
                assert file.name in str(info.value) or file.name == "manifest.json"
                assert "\n" not in str(info.value)
        file.write_bytes(original)
    check_whole(folder)
    edit_manifest(folder)  # the same content, spaced in another way
    with pytest.raises(ValueError, match="manifest.json does not match its checksum"):
        check_whole(folder)


@pytest.mark.parametrize(
    "name, at, value, row",
    [
        ("tokens", 2, 1000, 0),  # an id that the vocabulary does not have
        ("lengths", 0, 0, 0),
        ("lengths", 0, 12, 0),  # 12 + 5 tokens in a row of 16
        ("starts", 0, -1, 0),
        ("starts", 1, 0, 0),  # a row without documents
        ("starts", 3, 7, 2),  # more documents than there are
    ],
)
def test_damage_that_was_not_looked_for_stops_at_its_row(folder, name, at, value, row):
    array = np.load(folder / f"shard-00000.{name}.npy")
    array.ravel()[at] = value
    np.save(folder / f"shard-00000.{name}.npy", array)
    data = PackedDataset(folder)
    assert data[5]["doc_ids"].max() == 1
    with pytest.raises(ValueError, match=rf"row {row} of .*shard-00000.tokens.npy is damaged"):
        data.rows([5, row])


def test_shards_are_opened_again_when_few_may_stay_open(folder, monkeypatch):
    monkeypatch.setattr(loader, "OPEN_SHARDS", 1)
    data = PackedDataset(folder)
    whole = data.rows(range(10))["input_ids"]
    assert all(data[row]["input_ids"].equal(whole[row]) for row in (0, 9, 1, 5, 9))
    assert data._shard.cache_info().currsize == 1
    copy = ForkingPickler.loads(ForkingPickler.dumps(data))  # what a DataLoader's worker gets
    assert copy.rows(range(10))["input_ids"].equal(whole)
    assert len(ForkingPickler.dumps(data)) < 10_000


def test_shard_outside_the_folder_is_refused(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["tokens"]["file"] = "../elsewhere.npy"
    edit_manifest(folder, shards=manifest["shards"])
    with pytest.raises(ValueError, match="is outside the folder"):
        PackedDataset(folder)


def test_failed_writes_leave_the_old_folder(folder, tmp_path):
    def broken():
        yield make_rows(1)[0]
        raise RuntimeError("reader died")

    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(RuntimeError, match="reader died"):
        write_packed_rows(
            folder, broken(), context_length=CONTEXT, vocab_size=1000, tokenizer_sha256="ab" * 32
        )
    with pytest.raises(ValueError, match="there is nothing to write"):
        write_packed_rows(folder, [], context_length=CONTEXT, vocab_size=1000, tokenizer_sha256="ab" * 32)
    with pytest.raises(ValueError, match="do not fit a vocabulary of 10"):
        write_packed_rows(
            folder, make_rows(), context_length=CONTEXT, vocab_size=10, tokenizer_sha256="ab" * 32
        )
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
