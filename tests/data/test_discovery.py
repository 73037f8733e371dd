"""Folders as sources: links are followed, and no part of a folder is left out without a word."""

import os

import pytest

from pod.data.args import DataArgs
from pod.data.read.discovery import files_of
from pod.data.read.documents import SourceReport
from pod.data.read.work_shards import plan_work_shards, read_work_shard


def names(folder):
    return [os.path.relpath(one.path, folder) for one in files_of(str(folder)).found]


def make(folder, *files):
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"w1 w2 {name}")


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder with a part that may not be listed (tests may run as root, to whom no folder is closed)."""
    make(tmp_path / "texts", "a.txt", "closed/b.txt", "z/c.txt")
    scandir = os.scandir

    def judged(place):
        if str(place).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", judged)
    return tmp_path / "texts"


def test_order_of_a_folder(tmp_path):
    make(
        tmp_path,
        "b/2.txt",
        "b/1.txt",
        "a.txt",
        "c.txt",
        "a/x/y.txt",
        ".hidden/a.txt",
        "b/.hidden",
        "__pycache__/a",
    )
    assert names(tmp_path) == ["a.txt", "c.txt", "a/x/y.txt", "b/1.txt", "b/2.txt"]


def test_links_to_folders_are_read(tmp_path):
    make(tmp_path, "elsewhere/deep/1.txt", "texts/2.txt")
    (tmp_path / "texts/part").symlink_to(tmp_path / "elsewhere")
    assert names(tmp_path / "texts") == ["2.txt", "part/deep/1.txt"]


def test_links_in_a_circle_end(tmp_path):
    make(tmp_path, "texts/a/1.txt", "texts/b/2.txt")
    (tmp_path / "texts/self").symlink_to(tmp_path / "texts")
    (tmp_path / "texts/a/other").symlink_to(tmp_path / "texts/b")
    (tmp_path / "texts/b/other").symlink_to(tmp_path / "texts/a")
    assert names(tmp_path / "texts") == ["a/1.txt", "a/other/2.txt", "b/2.txt", "b/other/1.txt"]


def test_a_closed_folder_is_an_error(closed):
    with pytest.raises(
        ValueError, match=r"folder .*closed cannot be listed \(Permission denied\) .1 in total.: correct it"
    ):
        plan_work_shards(DataArgs(sources=[str(closed)]))


def test_a_closed_folder_is_skipped_and_named(closed):
    spec = str(closed)
    args = DataArgs(sources=[spec], unreadable="skip")
    report = SourceReport(spec)
    texts = [
        document.text
        for work_shard in plan_work_shards(args)
        for document in read_work_shard(work_shard, args, report)
    ]
    assert texts == ["w1 w2 a.txt", "w1 w2 z/c.txt"]
    assert report.skipped == 1 and report.skipped_files[0].endswith(
        "closed cannot be listed (Permission denied)"
    )


def test_a_source_that_is_closed_as_a_whole(closed):
    with pytest.raises(ValueError, match=r"has no file that can be read \(folder .* cannot be listed"):
        plan_work_shards(DataArgs(sources=[str(closed / "closed")], unreadable="skip"))
