"""Reading, drawing and writing.

The bytes are the same however the work is split. Nothing is done twice, and nothing is taken from the wrong
work.
"""

import json
import os
import random
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
from data_helpers import check_whole, content

from pod.data import DataArgs, held_out_documents, prepare
from pod.data.run import read_sources
from pod.data.run.folders import locked
from pod.data.run.job import Job

CONTEXT = 128
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def texts(corpus):
    """Fifty documents of 2 to 300 words."""
    return corpus(random.Random(0).choices(range(2, 300), k=50))


def settings(*sources, **changes):
    options = {"context_length": CONTEXT, "shortest_interval": 32, "workers": 1, "target_tokens": 10**5}
    return DataArgs(sources=[str(source) for source in sources], **{**options, **changes})


def work_shards_read(monkeypatch):
    """First files of the work shards that are really read from now on."""
    read, seen = read_sources.read_work_shard, []

    def watched(work_shard, args, report):
        seen.append(work_shard.files[0].path)
        yield from read(work_shard, args, report)

    monkeypatch.setattr(read_sources, "read_work_shard", watched)
    return seen


def stop_before(monkeypatch, name):
    """Preparing ends with an error before it calls `name`; returns what takes that back."""
    module = sys.modules["pod.data.run.prepare"]
    original = getattr(module, name)

    def fail(*_):
        raise RuntimeError("stopped")

    monkeypatch.setattr(module, name, fail)
    return lambda: monkeypatch.setattr(module, name, original)


def trained(data):
    """The ids of all documents of the rows."""
    return [document.tolist() for row in range(len(data)) for document in data.documents(row)]


@pytest.mark.parametrize("target", [2_000, 10**5])
def test_any_number_of_workers_gives_the_same_bytes(texts, tokenizer, tmp_path, small_steps, target):
    expected = None
    for workers in (1, 2, 4):
        args = settings(texts, workers=workers, target_tokens=target, held_out_tokens=200)
        prepare(args, tokenizer, tmp_path / f"out-{workers}/data")
        found = content(tmp_path / f"out-{workers}/data")
        expected = expected or found
        assert found == expected and len(found) > 9
        assert [path.name for path in (tmp_path / f"out-{workers}").iterdir()] == ["data"]


def test_nothing_is_done_twice(texts, tokenizer, tmp_path, small_steps, monkeypatch):
    prepare(settings(texts), tokenizer, tmp_path / "whole/data")
    go_on = stop_before(monkeypatch, "publish")
    with pytest.raises(RuntimeError, match="stopped"):
        prepare(settings(texts), tokenizer, tmp_path / "out/data")
    go_on()
    seen = work_shards_read(monkeypatch)
    written = (tmp_path / "out/data.work/rows/shard-00001.tokens.npy").stat().st_mtime_ns
    monkeypatch.setattr(os, "replace", spied := Spy(os.replace))
    prepare(settings(texts), tokenizer, tmp_path / "out/data")
    assert not seen and not [call for call in spied.calls if "shard-00001.tokens" in str(call)]
    assert (tmp_path / "out/data/shard-00001.tokens.npy").stat().st_mtime_ns == written
    assert content(tmp_path / "out/data") == content(tmp_path / "whole/data")


class Spy:
    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.function(*arguments)


def test_interrupted_reading_goes_on(texts, tokenizer, tmp_path, small_steps, monkeypatch):
    """Also when a broken file is to be skipped from then on: finished work shards stay."""
    (texts / "00020.txt").write_bytes(b"\xff\xfe broken \xff")
    seen = work_shards_read(monkeypatch)
    with pytest.raises(ValueError, match=r"00020.txt"):
        prepare(settings(texts), tokenizer, tmp_path / "out/data")
    before = len(seen)
    assert before > 2 and not (tmp_path / "out/data").exists()
    seen.clear()
    data = prepare(settings(texts, unreadable="skip"), tokenizer, tmp_path / "out/data")
    assert len(seen) == len(Job(settings(texts), tokenizer, "x").work_shards) - (before - 1), (
        "work shards are read again"
    )
    assert data.manifest["read"]["sources"][0]["skipped"] == 1
    prepare(settings(texts, unreadable="skip"), tokenizer, tmp_path / "fresh")
    assert content(tmp_path / "out/data") == content(tmp_path / "fresh")
    with pytest.raises(ValueError, match=r"with other settings \(data.unreadable\)"):
        prepare(settings(texts), tokenizer, tmp_path / "out/data")
    with pytest.raises(ValueError, match=r"00020.txt"):
        prepare(settings(texts), tokenizer, tmp_path / "out/data", overwrite=True)


def test_what_was_skipped_is_an_error_again(texts, tokenizer, tmp_path, small_steps, monkeypatch):
    (texts / "00020.txt").write_bytes(b"\xff\xfe broken \xff")
    stop_before(monkeypatch, "draw")
    with pytest.raises(RuntimeError, match="stopped"):
        prepare(settings(texts, unreadable="skip"), tokenizer, tmp_path / "data")
    with pytest.raises(ValueError, match=r"00020.txt"):
        prepare(settings(texts), tokenizer, tmp_path / "data")


@pytest.mark.parametrize("change", ["text", "added", "removed", "setting"])
def test_work_for_other_sources_or_settings_is_not_used(texts, tokenizer, tmp_path, monkeypatch, change):
    go_on = stop_before(monkeypatch, "draw")
    with pytest.raises(RuntimeError, match="stopped"):
        prepare(settings(texts), tokenizer, tmp_path / "data")
    go_on()
    args = settings(texts)
    if change == "text":
        (texts / "00003.txt").write_text("w4 w5 w6 w7")
    elif change == "added":
        (texts / "zz.txt").write_text("w4 w5 w6 w7")
    elif change == "removed":
        (texts / "00003.txt").unlink()
    else:
        args.boundary_tokens = "eos"
    prepare(args, tokenizer, tmp_path / "data", overwrite=change == "setting")
    prepare(args, tokenizer, tmp_path / "fresh")
    assert content(tmp_path / "data") == content(tmp_path / "fresh")


def test_source_changed_while_it_is_read(texts, tokenizer, tmp_path):
    one = Job(settings(texts), tokenizer, tmp_path / "data")
    one.open_work()
    (texts / "00003.txt").write_text("other text")
    with pytest.raises(ValueError, match="00003.txt was changed while the data was prepared"):
        read_sources.read_sources(one)


def test_reading_stops_when_every_interval_and_the_held_out_text_are_full(
    corpus, tokenizer, tmp_path, small_steps, monkeypatch
):
    """The rest of the files is never opened; the rows are those of the files that were."""
    folder = corpus(random.Random(0).choices(range(2, 300), k=1000))
    seen = work_shards_read(monkeypatch)
    data = prepare(settings(folder, target_tokens=3_000, held_out_tokens=300), tokenizer, tmp_path / "data")
    told = data.manifest["read"]
    assert len(seen) == told["units"] < told["units_of_all"] / 2
    assert all(interval["quota"] == 1_000 for interval in data.manifest["intervals"])
    assert data.manifest["held_out"]["tokens"] >= 300
    files = [name.rsplit("/", 1)[-1][:9] for name in seen]
    seen.clear()
    more = prepare(
        settings(folder, target_tokens=3_000, held_out_tokens=20_000), tokenizer, tmp_path / "more"
    )
    assert len(seen) == more.manifest["read"]["units_of_all"], "the held-out text was not full"
    assert [name.rsplit("/", 1)[-1][:9] for name in seen[: len(files)]] == files


def test_a_dry_interval_lets_the_corpus_be_read_to_its_end_but_not_tokenised(
    corpus, tokenizer, tmp_path, small_steps
):
    """Short documents cannot reach the interval that is not full."""
    folder = corpus([20] * 400 + [1000] * 5)
    job = Job(
        settings(folder, target_tokens=1_024, context_length=1024, intervals=[512]),
        tokenizer,
        tmp_path / "data",
    )
    job.open_work()
    encoded = []
    job.warm_up()
    encode = job.encoder._encode
    job.encoder._encode = lambda texts: encoded.extend(texts) or encode(texts)
    read = read_sources.read_sources(job)
    assert read.num_work_shards == len(job.work_shards) and read.reports[0].documents == 405
    assert 50 < len(encoded) < 300 and sum(len(text.split()) == 1000 for text in encoded) == 5


def test_weights_and_origins_reach_the_manifest(corpus, tokenizer, tmp_path):
    sizes = [60] * 40
    one, two = corpus(sizes, "one"), tmp_path / "two.jsonl"
    two.write_text(
        "".join(
            json.dumps({"text": " ".join(f"w{n + 7 * k}" for k in range(60)), "source": "books"}) + "\n"
            for n in range(40)
        )
    )
    args = settings(one, two, weights=[1, 3], target_tokens=1200, short_documents="drop")
    manifest = prepare(args, tokenizer, tmp_path / "data").manifest
    drawn = [source["tokens_after"] for source in manifest["read"]["sources"]]
    assert abs(drawn[1] - 3 * drawn[0]) <= 2 * 60 and sum(drawn) == manifest["num_tokens"]
    assert manifest["read"]["sources"][1]["origins"] == {"books": 40}


def test_token_ids_outside_the_vocabulary_are_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 2, 999_999]}) + "\n")
    with pytest.raises(ValueError, match=r"a.jsonl.* has token id 999999, but the tokenizer has only 5003"):
        prepare(settings(tmp_path / "a.jsonl", token_field="input_ids"), tokenizer, tmp_path / "data")


def test_given_tokens_are_taken_as_they_are(tokenizer, tmp_path):
    rows = [[5 + n, *range(10, 10 + 40 + n)] for n in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    args = settings(tmp_path / "a.jsonl", token_field="input_ids", boundary_tokens="bos+eos")
    data = prepare(args, tokenizer, tmp_path / "data")
    found = [document.tolist() for row in range(len(data)) for document in data.documents(row)]
    assert sorted(found) == sorted(rows)


def test_damaged_work_shard_files_are_not_used(texts, tokenizer, tmp_path, small_steps, monkeypatch):
    go_on = stop_before(monkeypatch, "draw")
    with pytest.raises(RuntimeError, match="stopped"):
        prepare(settings(texts), tokenizer, tmp_path / "out/data")
    go_on()
    short, wrong, *_ = sorted((tmp_path / "out/data.work").glob("unit-*.bin"))
    short.write_bytes(short.read_bytes()[:-2])
    flipped = bytearray(wrong.read_bytes())
    flipped[0] ^= 1
    wrong.write_bytes(flipped)
    seen = work_shards_read(monkeypatch)
    prepare(settings(texts), tokenizer, tmp_path / "out/data")
    assert len(seen) == 2
    prepare(settings(texts), tokenizer, tmp_path / "fresh")
    assert content(tmp_path / "out/data") == content(tmp_path / "fresh")


def test_the_work_folder_stays_small(corpus, tokenizer, tmp_path, small_steps, monkeypatch):
    """Of 120,000 tokens 3,000 are drawn; one interval never fills, so all of them are read."""
    folder = corpus(random.Random(0).choices(range(128, 640, 128), k=400))  # no rests
    stop_before(monkeypatch, "draw")
    args = settings(folder, target_tokens=3_000, workers=2)
    with pytest.raises(RuntimeError, match="stopped"):
        prepare(args, tokenizer, tmp_path / "data")
    sizes = [file.stat().st_size for file in (tmp_path / "data.work").glob("unit-*.bin")]
    assert len(sizes) == len(Job(args, tokenizer, "x").work_shards)
    read = read_sources.read_sources(Job(args, tokenizer, tmp_path / "data"))
    live = read_sources.own_tokens(read.reservoir.pieces).sum()
    assert sum(read.sizes.values()) <= 2 * live < 40_000
    assert all(
        size < 2 * tokens for size, tokens in ((read.sizes[n], len_of(read, n)) for n in read.sizes) if size
    )


def len_of(read, number):
    """Tokens of work shard `number` that are needed, and one."""
    own = read.reservoir.pieces[read.reservoir.pieces["work_shard"] == number]
    return read_sources.own_tokens(own).sum() + 1


def test_second_run_at_the_same_time_is_refused(texts, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["pod.data.run.prepare"], "LOCK_SECONDS", 0.1)
    with locked(Job(settings(texts), tokenizer, tmp_path / "data").lock_file, 0, "first"):
        with pytest.raises(ValueError, match="another process is preparing .*data: wait for it"):
            prepare(settings(texts), tokenizer, tmp_path / "data")
    prepare(settings(texts), tokenizer, tmp_path / "data")


def test_jobs_can_be_sent_to_other_processes(texts, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    one = Job(settings(texts), tmp_path / "tokenizer", tmp_path / "data")
    one.tokenizer  # noqa: B018 - loaded, so that it would travel
    sent = ForkingPickler.dumps(one)
    assert len(sent) < 5_000
    assert ForkingPickler.loads(sent).request == one.request == Job(settings(texts), tokenizer, "x").request


def test_worker_that_is_killed_is_named(texts, tokenizer, tmp_path, small_steps, monkeypatch):
    def dies(work_shard, args, report):
        os.kill(os.getpid(), 9)
        yield

    monkeypatch.setattr(read_sources, "read_work_shard", dies)
    with pytest.raises(ValueError, match="a worker process was killed, probably for lack of memory") as info:
        prepare(settings(texts, workers=2), tokenizer, tmp_path / "data")
    assert "\n" not in str(info.value)


def test_without_a_target_the_setting_is_asked_for(texts, tokenizer, tmp_path):
    with pytest.raises(
        ValueError, match="data.target_tokens is not set: set it to the number of training tokens to prepare"
    ) as info:
        prepare(settings(texts, target_tokens=None), tokenizer, tmp_path / "data")
    assert "\n" not in str(info.value)


def test_the_id_is_that_of_the_content(texts, tokenizer, tmp_path):
    one = prepare(settings(texts), tokenizer, tmp_path / "one").manifest["id"]
    assert one == prepare(settings(texts), tokenizer, tmp_path / "two").manifest["id"] and len(one) == 16
    assert one != prepare(settings(texts), tokenizer, tmp_path / "three", seed=1).manifest["id"]
    held = prepare(settings(texts, held_out_tokens=100), tokenizer, tmp_path / "four")
    assert held.manifest["id"] != one and held_out_documents(held.path)
    check_whole(held.path)
