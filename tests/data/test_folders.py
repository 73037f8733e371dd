"""What preparation may replace and remove.

It touches nothing that others put there, and nothing that another run works with.
"""

import random
import sys
from dataclasses import replace

import pytest
from data_helpers import content

from pod.data import DataArgs, PackedDataset, prepare
from pod.data.read import work_shards
from pod.data.run import publish
from pod.data.run.folders import check_replaceable, locked
from pod.data.run.job import Job


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(publish, "draw_lengths", lambda *_: None)
    monkeypatch.setattr(work_shards, "GROUP_BYTES", 4_000)


@pytest.fixture
def args(corpus):
    sources = [str(corpus(random.Random(0).choices(range(2, 300), k=50)))]
    return DataArgs(
        sources=sources, context_length=128, shortest_interval=32, workers=1, target_tokens=10_000
    )


def test_a_folder_with_other_files_is_never_replaced(args, tokenizer, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "corpus.jsonl").write_text('{"text": "w1 w2 w3"}\n')
    with pytest.raises(
        ValueError, match=r"data has files that `pod data` did not write.*'corpus.jsonl'.*output_dir"
    ) as info:
        prepare(replace(args, sources=[str(folder / "corpus.jsonl")]), tokenizer, folder)
    assert "\n" not in str(info.value)
    assert (folder / "corpus.jsonl").read_text() == '{"text": "w1 w2 w3"}\n'
    assert [file.name for file in tmp_path.glob("data*")] == ["data"]


def test_files_that_come_while_preparing_are_not_lost(args, tokenizer, tmp_path, monkeypatch):
    written = publish.write_manifest

    def slow(*arguments, **details):
        (tmp_path / "data").mkdir()
        (tmp_path / "data/notes.txt").write_text("mine")
        return written(*arguments, **details)

    monkeypatch.setattr(publish, "write_manifest", slow)
    with pytest.raises(ValueError, match=r"for example 'notes.txt' .1 in total"):
        prepare(args, tokenizer, tmp_path / "data")
    assert (tmp_path / "data/notes.txt").read_text() == "mine"


def test_a_file_in_place_of_the_folder(args, tokenizer, tmp_path):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(ValueError, match="data is a file, but prepared data needs a folder"):
        prepare(args, tokenizer, tmp_path / "data")
    assert (tmp_path / "data").read_text() == "mine"


def test_prepared_data_is_replaced_whatever_its_version(args, tokenizer, tmp_path):
    prepare(args, tokenizer, tmp_path / "data")
    for name in ("shard-00007.doc_ids.npy", "packing.png", "sources.png", ".lengths.png.tmp-host-1-2"):
        (tmp_path / "data" / name).touch()
    check_replaceable(tmp_path / "data")
    (tmp_path / "data/manifest.json").write_text("{}")
    data = prepare(args, tokenizer, tmp_path / "data", overwrite=True)
    assert "shard-00007.doc_ids.npy" not in content(data.path)


def test_a_link_to_another_disk_stays_a_link(args, tokenizer, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "large")
    prepare(args, tokenizer, tmp_path / "data")
    prepare(replace(args, context_length=64), tokenizer, tmp_path / "data", overwrite=True)
    assert (tmp_path / "data").is_symlink()
    assert PackedDataset(tmp_path / "large").manifest["context_length"] == 64
    assert sorted(file.name for file in tmp_path.iterdir() if file.name != "texts") == ["data", "large"]


def test_other_settings_for_the_same_output_wait(args, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["pod.data.run.prepare"], "LOCK_SECONDS", 0.1)
    job = Job(args, tokenizer, tmp_path / "data")
    with locked(job.lock_file, 0, "first"), pytest.raises(ValueError, match="another process is preparing"):
        prepare(replace(args, context_length=64), tokenizer, tmp_path / "data")
    prepare(args, tokenizer, tmp_path / "data")
    (tmp_path / "data.work/rows").mkdir(parents=True)
    with locked(job.lock_file, 0, "first"):
        prepare(args, tokenizer, tmp_path / "data")  # up to date: nothing to do, and nothing is cleaned
        assert (tmp_path / "data.work").is_dir()


def test_a_lock_is_free_afterwards(tmp_path):
    with locked(tmp_path / "a.lock", 0, "mine"), pytest.raises(ValueError, match="taken"):
        with locked(tmp_path / "a.lock", 0, "taken"):
            pass
    assert not (tmp_path / "a.lock").exists()
    with locked(tmp_path / "a.lock", 0, "mine"):
        pass


def test_folders_that_cannot_be_written(args, tokenizer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output_dir = .*file: .*file is not a folder; set another"):
        prepare(args, tokenizer, tmp_path / "file/data")
