"""pod/files.py: a reader sees the old content or the whole new one, never a part."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys

import pytest

from pod import files


def leftovers(folder):
    return [entry.name for entry in folder.iterdir() if ".tmp-" in entry.name]


def test_text_replaces_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "new" / "a.txt"
    files.atomic_write_text(path, "one")
    files.atomic_write_text(path, "zwei ü")
    assert path.read_bytes() == "zwei ü".encode()
    assert os.listdir(path.parent) == ["a.txt"]


def test_failed_rename_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.atomic_write_text(path, "old")

    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="broken"):
        files.atomic_write_text(path, "new")
    assert path.read_text() == "old" and leftovers(tmp_path) == []


def test_stream_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "rows"
    with files.atomic_stream(target) as stream:
        stream.write(b"1")
        assert not target.exists()
    with pytest.raises(KeyError), files.atomic_stream(target) as stream:
        stream.write(b"2")
        raise KeyError
    assert target.read_bytes() == b"1" and os.listdir(tmp_path) == ["rows"]


def test_directory_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "checkpoint"
    with files.atomic_dir(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    with pytest.raises(KeyError), files.atomic_dir(target) as folder:
        (folder / "a").write_text("2")
        raise KeyError
    assert (target / "a").read_text() == "1" and leftovers(tmp_path) == []


def test_directory_replaces_or_keeps_an_old_one(tmp_path):
    target = tmp_path / "cache"
    for name, replace in [("a", True), ("b", True), ("c", False)]:
        with files.atomic_dir(target, replace=replace) as folder:
            (folder / name).write_text("x")
    assert os.listdir(target) == ["b"] and os.listdir(tmp_path) == ["cache"]


def test_abandoned_folder_of_a_dead_process_is_removed_and_of_a_living_one_kept(tmp_path):
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    host = files.socket.gethostname()
    dead = tmp_path / f".out.tmp-{host}-{finished.pid}-abc"
    alive = tmp_path / f".out.tmp-{host}-{os.getpid()}-abc"
    elsewhere = tmp_path / f".out.tmp-other-{host}-{finished.pid}-abc"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    (file := tmp_path / f".rows.tmp-{host}-{finished.pid}-abc").write_text("half")
    with files.atomic_dir(tmp_path / "out"), files.atomic_stream(tmp_path / "rows"):
        pass
    assert not file.exists() and not dead.exists() and alive.exists() and elsewhere.exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_one_line_with_the_size_to_free(tmp_path, error):
    target = tmp_path / "step-1"
    with pytest.raises(
        OSError, match="disk full while writing .*step-1: free at least 4 MB or set another output_dir"
    ):
        with files.atomic_dir(target) as folder:
            (folder / "weights").write_bytes(bytes(3_500_000))
            raise error
    assert os.listdir(tmp_path) == []


def test_hidden_full_disk_is_recognised_by_the_free_space(tmp_path, monkeypatch):
    """NumPy raises an OSError without errno when a write falls short."""
    hidden = OSError("1000 requested and 10 written")
    with pytest.raises(OSError, match="requested and 10 written"), files.explain_disk_full(tmp_path / "x"):
        raise hidden
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))
    with pytest.raises(OSError, match="disk full.*free at least 3 MB"):
        with files.explain_disk_full(tmp_path / "x", needed_bytes=2_000_001):
            raise hidden
    with pytest.raises(FileNotFoundError), files.explain_disk_full(tmp_path / "x"):
        (tmp_path / "missing").read_bytes()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_real_enospc_from_the_kernel(tmp_path):
    with pytest.raises(OSError, match="disk full"), files.explain_disk_full(tmp_path / "x", needed_bytes=1):
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")


def test_json_round_trip_and_its_errors(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": [1, 2.5, None]})
    assert files.read_json(path) == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="a.json: cannot be written as JSON"):
        files.write_json(path, {"loss": float("nan")})
    assert files.read_json(path) == {"a": [1, 2.5, None]}
    path.write_text('{"a": ')
    for bad, message in [(path, "a.json: not valid JSON"), (tmp_path / "b.json", "b.json: no such file")]:
        with pytest.raises(ValueError, match=message) as caught:
            files.read_json(bad)
        assert "\n" not in str(caught.value)


def test_sha256(tmp_path):
    data = os.urandom(100_000)
    (tmp_path / "f").write_bytes(data)
    assert files.sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_folder_that_cannot_be_written_is_named_with_its_setting(tmp_path):
    (tmp_path / "file").write_text("kept")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            ValueError, match=r"^output_dir = .*: .*file is not a folder; set another output_dir"
        ):
            files.check_can_write(folder, "output_dir")
    files.check_can_write(tmp_path / "a" / "b", "output_dir")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folder_without_permission_is_named_with_its_setting(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)  # root may write everywhere
    with pytest.raises(
        ValueError, match=r"^output_dir = .*/new: .* is not writable \(Permission denied\); set another"
    ):
        files.check_can_write(tmp_path / "new", "output_dir")
