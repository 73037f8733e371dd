"""Shards: what lies on disk, byte for byte, and what a killed writer leaves."""

import errno
import json
import os
import signal

import numpy as np
import pytest
from data_helpers import check_whole, content

from pod.data import PackedDataset
from pod.data.rows import shards
from pod.data.rows.shards import rows_per_shard, write_manifest, write_shard

SIZES = {"context_length": 8, "vocab_size": 70_000, "pad_token_id": 5}
ROWS = [
    [np.array([7, 69_999], dtype=np.uint32), np.array([1, 2, 3])],
    [np.arange(8, dtype=np.uint32)],
    [np.array([4], dtype=np.int32)],
]


def test_three_plain_arrays_and_their_entry(tmp_path):
    entry = write_shard(tmp_path, 12, ROWS, **SIZES)
    read = {name: np.load(tmp_path / f"shard-00012.{name}.npy") for name in ("tokens", "lengths", "starts")}
    assert read["tokens"].dtype == np.uint32 and read["tokens"].tolist() == [
        [7, 69_999, 1, 2, 3, 5, 5, 5],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [4, 5, 5, 5, 5, 5, 5, 5],
    ]
    assert read["lengths"].dtype == np.int32 and read["lengths"].tolist() == [2, 3, 8, 1]
    assert read["starts"].dtype == np.int64 and read["starts"].tolist() == [0, 2, 3, 4]
    assert (entry["rows"], entry["documents"], entry["num_tokens"]) == (3, 4, 14)
    assert entry["tokens"] == {
        "file": "shard-00012.tokens.npy",
        "bytes": 128 + 3 * 8 * 4,
        # Pinned, like the order of rows: the same settings give the same bytes in every release.
        "sha256": "5293a180eba055db376933f65cd667cca67185965767be38984d61954b2479ae",
    }
    assert len(content(tmp_path)) == 3 and json.loads(json.dumps(entry)) == entry


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_two_bytes_a_token_while_the_vocabulary_fits(tmp_path, vocab_size, dtype):
    last = [np.array([vocab_size - 1])]
    entry = write_shard(tmp_path, 0, [last], context_length=2, vocab_size=vocab_size)
    write_manifest(tmp_path, [entry], context_length=2, vocab_size=vocab_size, tokenizer_sha256="ab")
    check_whole(tmp_path)
    data = PackedDataset(tmp_path)
    assert data.manifest["token_dtype"] == dtype == data.documents(0)[0].dtype.name
    assert data[0]["input_ids"].tolist() == [vocab_size - 1, 0]
    assert rows_per_shard(4, vocab_size, 64) == {"uint16": 8, "uint32": 4}[dtype]
    assert rows_per_shard(100, vocab_size, 64) == 1


def test_manifest_counts_and_keeps_details(tmp_path):
    entries = [write_shard(tmp_path, number, rows, **SIZES) for number, rows in enumerate((ROWS, ROWS[:1]))]
    (tmp_path / "more.bin").write_bytes(b"abc")
    more = {
        "file": "more.bin",
        "bytes": 3,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    details = {"held_out": {"files": [more]}, "by_length": {2: (1, 2)}}
    manifest = write_manifest(tmp_path, entries, **SIZES, tokenizer_sha256="ab", details=details)
    data = PackedDataset(tmp_path)
    assert data.manifest == manifest and list(manifest)[-1] == "manifest_sha256"
    assert (manifest["num_rows"], manifest["num_documents"], manifest["num_tokens"]) == (4, 6, 19)
    assert manifest["padding_share"] == 1 - 19 / 32 and manifest["by_length"] == {"2": [1, 2]}
    (tmp_path / "more.bin").write_bytes(b"abd")
    assert len(PackedDataset(tmp_path)) == 4
    with pytest.raises(ValueError, match="more.bin does not match its checksum"):
        check_whole(tmp_path)
    (tmp_path / "more.bin").unlink()
    with pytest.raises(ValueError, match="more.bin is missing"):
        PackedDataset(tmp_path)


@pytest.mark.parametrize(
    "rows, changes, message",
    [
        ([], {}, "there is nothing to write"),
        (
            [[np.array([70_000])]],
            {},
            r"token ids 70000..70000 do not fit a vocabulary of 70000: wrong tokenizer",
        ),
        ([[np.array([1]), np.array([-1])]], {}, r"token ids -1..1 do not fit a vocabulary"),
        (ROWS, {"pad_token_id": 70_000}, "pad_token_id 70000 is not in a vocabulary of 70000"),
    ],
)
def test_what_cannot_be_a_shard_leaves_nothing(tmp_path, rows, changes, message):
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path, 0, rows, **(SIZES | changes))
    with pytest.raises(ValueError, match="there is nothing to write"):
        write_manifest(tmp_path, [], **SIZES, tokenizer_sha256="ab")
    assert content(tmp_path) == {}


def test_rows_that_the_packer_must_not_make(tmp_path):
    for row in ([], [np.array([], dtype=np.uint32)], [np.arange(5), np.arange(4)]):
        with pytest.raises(AssertionError, match="packed row"):
            write_shard(tmp_path, 0, [row], **SIZES)


def test_full_disk_keeps_the_older_shard(tmp_path, monkeypatch):
    write_shard(tmp_path, 0, ROWS, **SIZES)
    before = content(tmp_path)

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards.os, "fsync", no_space)
    with pytest.raises(OSError) as info:
        write_shard(tmp_path, 0, ROWS[:1], **SIZES)
    assert info.value.errno == errno.ENOSPC and content(tmp_path) == before


def test_killed_at_any_moment_and_called_again_gives_the_same_bytes(tmp_path):
    """A writer that was killed at any moment and called again gives the same bytes.

    There is one forked writer per moment. It dies at its n-th row, fsync, checksum or rename; the next one
    writes again.
    """
    rows = [[np.arange(1 + (row * 7 + part) % 3) + row for part in range(1 + row % 2)] for row in range(20)]
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), folder.mkdir()
    entry = write_shard(whole, 3, rows, context_length=8, vocab_size=100)
    died, moment = 0, 0
    while True:
        child = os.fork()
        if child == 0:
            _die_at(moment, folder, rows)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == -signal.SIGKILL
        died, moment = died + 1, moment + 1
        for name, found in content(folder).items():
            assert name.startswith(".") or found == content(whole)[name], "half a file under its own name"
        assert len([name for name in content(folder) if name.startswith(".")]) <= 3, "kills pile up files"
    assert died == 20 + 3 + 3 + 3
    assert content(folder) == content(whole)
    assert write_shard(folder, 3, rows, context_length=8, vocab_size=100) == entry
    assert content(folder) == content(whole)


def _die_at(moment, folder, rows):
    """In a forked child: write the shard, SIGKILL at call number `moment` of anything that matters."""
    calls = 0

    def counted(function):
        def call(*arguments):
            nonlocal calls
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return function(*arguments)

        return call

    try:
        step = counted(lambda row: row)
        os.fsync, os.replace = counted(os.fsync), counted(os.replace)
        shards.sha256_file = counted(shards.sha256_file)
        write_shard(folder, 3, map(step, rows), context_length=8, vocab_size=100)
        os._exit(0)
    finally:
        os._exit(1)
