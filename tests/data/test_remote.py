"""Sources by URL: read from a server of HTTP in this process, through fsspec, as s3:// and others are."""

import gzip
import json
import random
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import gettempdir
from threading import Thread

import pyarrow
import pyarrow.parquet
import pytest
from data_helpers import content, read_all, texts_of

from pod import remote
from pod.data import DataArgs, prepare
from pod.data.read import work_shards
from pod.data.read.work_shards import plan_work_shards

pytestmark = pytest.mark.usefixtures("no_pictures")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    """(folder, its URL with a slash at the end)."""
    folder = tmp_path / "site"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def copies() -> list[Path]:
    return list(Path(gettempdir()).glob("pod-copy-*"))


def test_files_patterns_and_folders(site):
    folder, url = site
    (folder / "sub").mkdir()
    (folder / "a.jsonl").write_bytes(lines("one", "two"))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines("three")))
    (folder / ".hidden.jsonl").write_bytes(lines("hidden"))
    (folder / "README.md").write_text("notes beside records")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["four"]}), folder / "sub" / "c.parquet")
    assert texts_of(DataArgs(sources=[url + "a.jsonl"])) == ["one", "two"]
    assert texts_of(DataArgs(sources=[url + "*.gz"])) == ["three"]
    documents, report = read_all(DataArgs(sources=[url], unreadable="error"))
    assert [one.text for one in documents] == ["one", "two", "three", "four"]
    assert [one.name for one in documents][::3] == [f"{url}a.jsonl:0", f"{url}sub/c.parquet:0"]
    assert report.files == 3 and "README.md is next to records" in report.skipped_files[0]
    assert not copies()


def test_messages_name_the_url_and_its_advice(site):
    folder, url = site
    (folder / "a.jsonl").write_bytes(lines("one") + b"{\n" + lines("two"))
    args = DataArgs(sources=[url + "a.jsonl"])
    with pytest.raises(ValueError, match=rf"^{url}a.jsonl line 2 is not JSON .*data.unreadable=skip"):
        texts_of(args)
    documents, report = read_all(DataArgs(sources=[url + "a.jsonl"], unreadable="skip"))
    assert [one.text for one in documents] == ["one", "two"] and report.records_skipped == 1
    assert report.skipped_files[0].startswith(f"{url}a.jsonl line 2")
    (folder / "b.tsv").write_bytes(b"x\n")
    with pytest.raises(ValueError, match=rf"^{url}b.tsv has an unknown file type"):
        plan_work_shards(DataArgs(sources=[url + "b.tsv"]))
    for missing in ("c.jsonl", "sub/*.jsonl"):
        with pytest.raises(ValueError, match=r"names no file that can be seen from here"):
            plan_work_shards(DataArgs(sources=[url + missing]))
    assert not copies()


@pytest.mark.parametrize(
    ("url", "said"), [("s3://bucket/a.jsonl", "s3"), ("nonsense://a/b.jsonl", "Protocol not known")]
)
def test_a_place_that_cannot_be_asked_is_one_line(monkeypatch, url, said):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ValueError, match=rf"{url} cannot be read \(.*{said}.*check the address") as info:
        plan_work_shards(DataArgs(sources=[url]))
    assert "\n" not in str(info.value)


def test_a_file_that_changes_is_noticed(site):
    folder, url = site
    (folder / "a.txt").write_text("one")
    args = DataArgs(sources=[url + "a.txt"])
    planned, before = plan_work_shards(args), remote.remote_state(url + "a.txt")
    assert before[0] == 3 and remote.remote_state(url + "a.txt") == before
    (folder / "a.txt").write_text("another")
    with pytest.raises(ValueError, match="a.txt was changed while the data was prepared"):
        list(work_shards.read_work_shard(planned[0], args, work_shards.SourceReport("x")))
    (folder / "a.txt").unlink()
    assert remote.remote_state(url + "a.txt") == (-1, 0)


@pytest.mark.multiprocess
def test_rows_are_those_of_the_same_files_here(site, tokenizer, make_text, tmp_path, monkeypatch):
    folder, url = site
    draw = random.Random(0)
    for number in range(6):
        texts = [make_text(draw.randrange(5, 300), 100 * number + one) for one in range(60)]
        (folder / f"{number}.jsonl").write_bytes(lines(*texts))
    monkeypatch.setattr(work_shards, "SMALLEST_GROUP_BYTES", 1)
    monkeypatch.setattr(work_shards, "GROUP_BYTES", 1)
    rows = {}
    for name, place, workers in (("here", f"{folder}/", 1), ("one", url, 1), ("two", url, 2)):
        args = DataArgs(
            sources=[place], context_length=128, shortest_interval=32, target_tokens=3_000, workers=workers
        )
        data = prepare(args, tokenizer, tmp_path / name)
        rows[name] = {file: held for file, held in content(data.path).items() if file.startswith("shard")}
    assert len(rows["here"]) == 3 and rows["here"] == rows["one"] == rows["two"]
    assert not copies()
