"""The steps of preparation: the same bytes however they are split, nothing done twice, nothing taken from the wrong work."""

import json
import os
import random
import sys
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
from data_helpers import content

from pod.data import DataArgs, PackedDataset, job, prepare
from pod.data.job import Job
from pod.data.prepare import prepare_job

CONTEXT = 128
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def texts(corpus):
    """Fifty documents of 2 to 300 words."""
    return corpus(random.Random(0).choices(range(2, 300), k=50))


def settings(*sources, **changes):
    options = {"context_length": CONTEXT, "shortest_interval": 32, "workers": 1} | changes
    return DataArgs(sources=[str(source) for source in sources], **options)


def tokenised(monkeypatch):
    """Names of the units that are really read from now on."""
    read, seen = job.read_unit, []

    def watched(unit, args, report):
        seen.append(unit.name)
        yield from read(unit, args, report)

    monkeypatch.setattr(job, "read_unit", watched)
    return seen


def test_any_number_of_workers_gives_the_same_bytes(texts, tokenizer, tmp_path, small_steps):
    expected = None
    for workers in (1, 2, 3):
        args = settings(texts, workers=workers, target_tokens=2_000)
        prepare(args, tokenizer, tmp_path / f"out-{workers}/data")
        found = content(tmp_path / f"out-{workers}/data")
        expected = expected or found
        assert found == expected and len(found) > 9
        assert [path.name for path in (tmp_path / f"out-{workers}").iterdir()] == ["data"]


def test_steps_in_any_order_and_twice(texts, tokenizer, tmp_path, small_steps):
    prepare(settings(texts), tokenizer, tmp_path / "whole")
    one = Job(settings(texts), tokenizer, tmp_path / "steps")
    numbers = one.missing_units()
    assert len(numbers) > 3
    for number in [*reversed(numbers), *numbers]:
        one.tokenise(number)
    one.plan()
    shards = list(range(one.num_shards()))
    assert len(shards) > 3
    for number in [*reversed(shards), *shards]:
        one.write_shard(number)
    one.publish()
    assert content(tmp_path / "steps") == content(tmp_path / "whole")


def test_steps_refuse_to_run_too_early(texts, tokenizer, tmp_path, small_steps):
    one = Job(settings(texts), tokenizer, tmp_path / "data")
    with pytest.raises(ValueError, match=r"\d+ of \d+ units are not tokenised yet \(first: .*00000.txt"):
        one.plan()
    for number in one.missing_units():
        one.tokenise(number)
    one.plan()
    one.write_shard(0)
    with pytest.raises(ValueError, match=r"shard 1 of \d+ is not written yet"):
        one.publish()
    assert not one.output_dir.exists()


def test_interrupted_reading_goes_on(texts, tokenizer, tmp_path, small_steps, monkeypatch):
    prepare(settings(texts), tokenizer, tmp_path / "whole")
    (texts / "00020.txt").write_bytes(b"\xff\xfe broken \xff")
    seen = tokenised(monkeypatch)
    with pytest.raises(ValueError, match=r"00020.txt"):
        prepare(settings(texts), tokenizer, tmp_path / "out/data")
    before = len(seen)
    assert before > 2 and not (tmp_path / "out/data").exists()
    seen.clear()
    (texts / "00020.txt").write_text("w1 w2 w3")
    prepare(settings(texts), tokenizer, tmp_path / "out/data")
    everything = len(Job(settings(texts), tokenizer, tmp_path / "x").units())
    assert len(seen) == everything - (before - 1), "finished units are read again"


def test_kept_tokens_serve_another_context_and_seed(texts, tokenizer, tmp_path, monkeypatch):
    shared = {"work_dir": str(tmp_path / "work"), "keep_tokens": True}
    prepare(settings(texts, **shared), tokenizer, tmp_path / "a")
    seen = tokenised(monkeypatch)
    prepare(
        settings(texts, context_length=64, shortest_interval=16, **shared), tokenizer, tmp_path / "b", seed=3
    )
    assert not seen
    prepare(settings(texts, context_length=64, shortest_interval=16), tokenizer, tmp_path / "c", seed=3)
    assert seen
    assert {k: v for k, v in content(tmp_path / "b").items() if k != "manifest.json"} == {
        k: v for k, v in content(tmp_path / "c").items() if k != "manifest.json"
    }
    assert [path.name[:7] for path in (tmp_path / "work").iterdir()] == ["tokens-"]
    seen.clear()
    prepare(settings(texts, boundary_tokens="eos", **shared), tokenizer, tmp_path / "d")
    assert seen, "other boundary tokens are other tokens"


@pytest.mark.parametrize("change", ["text", "added", "removed"])
def test_changed_sources_are_read_again(texts, tokenizer, tmp_path, change):
    args = settings(texts, work_dir=str(tmp_path / "work"), keep_tokens=True)
    prepare(args, tokenizer, tmp_path / "data")
    if change == "text":
        (texts / "00003.txt").write_text("w4 w5 w6 w7")
    elif change == "added":
        (texts / "zz.txt").write_text("w4 w5 w6 w7")
    else:
        (texts / "00003.txt").unlink()
    prepare(args, tokenizer, tmp_path / "data")
    prepare(settings(texts), tokenizer, tmp_path / "fresh")
    assert content(tmp_path / "data") == content(tmp_path / "fresh")


def test_source_changed_while_it_is_read(texts, tokenizer, tmp_path):
    one = Job(settings(texts), tokenizer, tmp_path / "data")
    one.units()
    (texts / "00003.txt").write_text("other text")
    with pytest.raises(ValueError, match="00003.txt was changed while the data was prepared"):
        for number in one.missing_units():
            one.tokenise(number)


@pytest.mark.parametrize("workers", [1, 3])
def test_document_limit_over_units(texts, tokenizer, tmp_path, small_steps, workers):
    limited = settings(texts, max_documents=7, held_out_fraction=0.0, workers=workers)
    data = prepare(limited, tokenizer, tmp_path / f"limited-{workers}")
    assert data.manifest["read"]["train_documents"] == 7
    first = sorted(texts.iterdir())[:7]
    sizes = [len(file.read_text().split()) for file in first]
    assert data.manifest["read"]["train_tokens"] == sum(sizes)
    assert data.manifest["read"]["sources"][0]["files"] < 20


def test_document_limit_does_not_depend_on_what_is_there(texts, tokenizer, tmp_path, small_steps):
    """Parts beyond the limit, which faster workers may leave, change nothing, not even the counts."""
    args = settings(texts, max_documents=7)
    prepare(args, tokenizer, tmp_path / "plain")
    one = Job(args, tokenizer, tmp_path / "more")
    for number in reversed(range(len(one.units()))):
        one.tokenise(number)
    prepare_job(one)
    assert content(tmp_path / "plain") == content(tmp_path / "more")


def test_weights_and_origins_reach_the_manifest(corpus, tokenizer, tmp_path):
    sizes = [60] * 40
    one, two = corpus(sizes, "one"), tmp_path / "two.jsonl"
    two.write_text(
        "".join(
            json.dumps({"text": " ".join(f"w{n + 7 * k}" for k in range(60)), "source": "books"}) + "\n"
            for n in range(40)
        )
    )
    args = settings(
        one, two, weights=[1, 3], target_tokens=1200, held_out_fraction=0.0, short_documents="drop"
    )
    manifest = prepare(args, tokenizer, tmp_path / "data").manifest
    drawn = [source["tokens_after"] for source in manifest["read"]["sources"]]
    assert abs(drawn[1] - 3 * drawn[0]) <= 2 * 60 and sum(drawn) == manifest["num_tokens"]
    assert manifest["read"]["sources"][1]["origins"] == {"books": 40}


def test_token_ids_outside_the_vocabulary_are_refused(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 2, 999_999]}) + "\n")
    with pytest.raises(ValueError, match=r"a.jsonl.* holds token id 999999, the tokenizer has 5003"):
        prepare(settings(tmp_path / "a.jsonl", token_field="input_ids"), tokenizer, tmp_path / "data")


def test_given_tokens_are_taken_as_they_are(tokenizer, tmp_path):
    rows = [[5 + n, *range(10, 10 + 40 + n)] for n in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    args = settings(
        tmp_path / "a.jsonl", token_field="input_ids", boundary_tokens="bos+eos", held_out_fraction=0.0
    )
    data = prepare(args, tokenizer, tmp_path / "data")
    found = [document.tolist() for row in range(len(data)) for document in data.documents(row)]
    assert sorted(found) == sorted(rows)


def test_damaged_parts_are_not_used(texts, tokenizer, tmp_path, small_steps):
    one = Job(settings(texts), tokenizer, tmp_path / "data")
    for number in one.missing_units():
        one.tokenise(number)
    tokens = one.part_dir(1) / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    again = Job(settings(texts), tokenizer, tmp_path / "data")
    assert again.missing_units() == [1]
    prepare_job(again)
    prepare(settings(texts), tokenizer, tmp_path / "fresh")
    assert content(tmp_path / "data") == content(tmp_path / "fresh")


def test_second_run_at_the_same_time_is_refused(texts, tokenizer, tmp_path, monkeypatch):
    module = sys.modules["pod.data.prepare"]
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.1)
    with module._alone(Job(settings(texts), tokenizer, tmp_path / "data")):
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
    def dies(unit, args, report):
        os.kill(os.getpid(), 9)
        yield

    monkeypatch.setattr(job, "read_unit", dies)
    with pytest.raises(ValueError, match="a worker process was killed, probably for lack of memory") as info:
        prepare(settings(texts, workers=2), tokenizer, tmp_path / "data")
    assert "\n" not in str(info.value)


def test_held_out_documents_lie_beside_the_rows(texts, tokenizer, tmp_path):
    data = prepare(settings(texts, held_out_fraction=0.3), tokenizer, tmp_path / "data")
    told = data.manifest["held_out"]
    lengths = np.load(data.path / "held_out.lengths.npy")
    tokens = np.fromfile(data.path / "held_out.tokens.bin", dtype=told["token_dtype"])
    assert told["documents"] == len(lengths) > 5 and told["tokens"] == len(tokens) == lengths.sum()
    ids = {tuple(tokenizer(file.read_text())["input_ids"]) for file in texts.iterdir()}
    held = {tuple(part.tolist()) for part in np.split(tokens, np.cumsum(lengths)[:-1])}
    assert held < ids
    trained = {tuple(document.tolist()) for row in range(len(data)) for document in data.documents(row)}
    assert not {document[:100] for document in held} & {document[:100] for document in trained}
    assert len(PackedDataset(data.path, verify=True)) == len(data)


def test_a_limit_that_units_meet_exactly_leaves_the_next_one_unread(tmp_path, tokenizer, monkeypatch):
    """Two files of one document each are read for max_documents = 2, the third is not opened."""
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"{name} " * 40}) + "\n")
    sources = [str(tmp_path / "*.jsonl")]
    monkeypatch.setattr("pod.data.units.GROUP_BYTES", 1)
    seen = tokenised(monkeypatch)
    args = settings(*sources, max_documents=2, held_out_fraction=0.0)
    prepare(args, tokenizer, tmp_path / "out")
    assert [name.rsplit("/", 1)[-1][0] for name in seen] == ["a", "b"]
