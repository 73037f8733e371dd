"""Preparation end to end.

Tokens come exactly once, intervals are equal, the same seed gives the same bytes, and nothing is
half-written.
"""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import check_whole, content

from pod.data import DataArgs, prepare, tokenizer_sha256
from pod.data.rows import shards
from pod.data.rows.overview import overview
from pod.data.run.prepare import estimate

CONTEXT = 128
SCRIPT = Path(__file__).parents[2] / "launch" / "prepare_data.py"


def log_normal(number=400, seed=0):
    return np.exp(np.random.default_rng(seed).normal(3.6, 0.9, number)).astype(int).clip(2, 300)


def settings(folder, **changes):
    options = {"context_length": CONTEXT, "shortest_interval": 32, "target_tokens": 10**6} | changes
    return DataArgs(sources=[str(folder)], **options)


def documents_of(data):
    """Token tuples of all documents of all rows."""
    found = []
    for index in range(len(data)):
        row = data[index]
        for doc in range(int(row["doc_ids"].max()) + 1):
            found.append(tuple(row["input_ids"][row["doc_ids"] == doc].tolist()))
    return found


@pytest.fixture(scope="module")
def stdlib_sample(byte_tokenizer, tmp_path_factory):
    args = DataArgs(
        sources=["stdlib:asyncio", "stdlib:email"],
        context_length=2048,
        shortest_interval=256,
        target_tokens=200_000,
    )
    return prepare(args, byte_tokenizer, tmp_path_factory.mktemp("stdlib") / "data")


@pytest.mark.parametrize("packing", ["best_fit", "one_per_row"])
def test_every_token_is_there_exactly_once(corpus, tokenizer, make_text, tmp_path, packing):
    sizes = log_normal()
    data = prepare(settings(corpus(sizes), packing=packing), tokenizer, tmp_path / "data")
    expected = []
    for seed, size in enumerate(sizes):
        tokens = tokenizer(make_text(int(size), seed))["input_ids"]
        expected += [tuple(tokens[start : start + CONTEXT]) for start in range(0, size, CONTEXT)]
    expected = [document for document in expected if len(document) > 1]
    assert sorted(documents_of(data)) == sorted(expected)
    assert data.manifest["num_tokens"] == sum(map(len, expected))
    assert data.manifest["num_documents"] == len(expected)
    assert data.manifest["tokenizer_sha256"] == tokenizer_sha256(tokenizer)
    if packing == "one_per_row":
        assert len(data) == len(expected)
    else:
        assert data.manifest["padding_share"] < 0.02


def test_labels_never_cross_documents(corpus, tokenizer, tmp_path):
    data = prepare(settings(corpus(log_normal(100))), tokenizer, tmp_path / "data")
    crossings = 0
    for index in range(len(data)):
        row = data[index]
        tokens, docs, labels = (row[name].tolist() for name in ("input_ids", "doc_ids", "labels"))
        for at in range(CONTEXT):
            inside = at + 1 < CONTEXT and docs[at] == docs[at + 1] != -1
            assert labels[at] == (tokens[at + 1] if inside else -100)
            crossings += at + 1 < CONTEXT and -1 not in docs[at : at + 2] and not inside
    assert crossings > 20


def test_intervals_are_equal_within_half_a_percent(corpus, tokenizer, tmp_path):
    data = prepare(settings(corpus(log_normal(1500)), target_tokens=18_000), tokenizer, tmp_path / "data")
    sizes = np.array([len(document) for document in documents_of(data)])
    tokens = [
        int(sizes[(sizes >= low) & (sizes < high)].sum()) for low, high in ((2, 32), (32, 64), (64, 129))
    ]
    assert all(0.995 * 6000 <= count <= 6000 for count in tokens)
    assert [interval["tokens_after"] for interval in data.manifest["intervals"]] == tokens
    assert data.manifest["balance"]["largest_deviation"] <= 0.005 and not data.manifest["balance"]["notes"]


def test_dry_interval_is_reported(corpus, tokenizer, tmp_path):
    args = settings(corpus([100] * 60 + [40] * 10), target_tokens=3000, deduplicate=False)
    data = prepare(args, tokenizer, tmp_path / "data")
    notes = data.manifest["balance"]["notes"]
    assert notes[1] == (
        "interval 32–64 ran dry: it has 400 tokens, but its share is 1,000; the missing tokens come from "
        "the other intervals"
    )
    assert len(notes) == 2 and notes[1] in overview(data)


def test_same_seed_same_bytes(corpus, tokenizer, tmp_path):
    args = settings(corpus(log_normal()), target_tokens=6000)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(args, tokenizer, tmp_path / name, seed=seed)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert (
        content(tmp_path / "a")["shard-00000.tokens.npy"] != content(tmp_path / "c")["shard-00000.tokens.npy"]
    )


def test_padding_on_real_text(stdlib_sample):
    data = stdlib_sample
    assert data.manifest["padding_share"] < 0.02
    assert 0.995 * 200_000 <= data.manifest["num_tokens"] <= 200_000
    check_whole(data.path)
    assert (data.path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_current_data_is_kept_and_old_data_replaced_when_asked(corpus, tokenizer, tmp_path):
    folder = corpus([50, 60, 70])
    stamp = lambda: (tmp_path / "data/manifest.json").stat().st_mtime_ns  # noqa: E731
    prepare(settings(folder), tokenizer, tmp_path / "data")
    first = stamp()
    (folder / "more.txt").write_text("w1 w2 w3")  # sources are not looked at
    prepare(settings(folder), tokenizer, tmp_path / "data")
    assert stamp() == first
    (folder / "more.txt").unlink()
    for change in (
        lambda: (settings(folder, boundary_tokens="eos"), 0),
        lambda: (settings(folder, boundary_tokens="eos"), 1),
        lambda: (
            (tmp_path / "data/shard-00000.lengths.npy").unlink(),
            (settings(folder, boundary_tokens="eos"), 1),
        )[1],
    ):
        before = stamp()
        args, seed = change()
        data = prepare(args, tokenizer, tmp_path / "data", seed=seed, overwrite=True)
        assert stamp() != before and len(data) >= 1
    assert sum(len(document) for document in documents_of(data)) == 50 + 60 + 70 + 3


def test_full_disk_keeps_the_work_and_no_data(corpus, tokenizer, tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    args = settings(corpus(log_normal(50)), workers=1)
    prepare(args, tokenizer, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", no_space)
        with pytest.raises(OSError, match=r"disk full while writing .*: free at least \d+ MB") as info:
            prepare(args, tokenizer, tmp_path / "out/data")
    assert "\n" not in str(info.value) and not (tmp_path / "out/data").exists()
    prepare(args, tokenizer, tmp_path / "out/data")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data"]
    assert content(tmp_path / "out/data") == content(tmp_path / "whole")


@pytest.mark.parametrize("source", ["broken.jsonl.gz", "empty.txt"])
def test_bad_sources_make_no_data(tmp_path, tokenizer, source):
    (tmp_path / source).write_bytes(b"\x1f\x8b\x08\x00cut" if source.endswith("gz") else b"")
    with pytest.raises(ValueError, match=source):
        prepare(settings(tmp_path / source), tokenizer, tmp_path / "out/data")
    assert not (tmp_path / "out/data").exists() and not list(tmp_path.glob("out/*/rows"))


def test_estimate_names_intervals_and_disk():
    text = estimate(DataArgs(context_length=8192, target_tokens=4_000_000))
    assert (
        "1–1K, 1K–2K, 2K–4K, 4K–8K" in text
        and "1,000,000 per interval" in text
        and "rows need 8MB" in text
        and "reading takes at most about" in text
    )


def launch(tmp_path, *overrides):
    command = [
        sys.executable,
        str(SCRIPT),
        "--set",
        f"output_dir={tmp_path / 'run'}",
        "--set",
        "model.path=package:tiny",
    ]
    for override in overrides:
        command += ["--set", override]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3600
    )


@pytest.mark.slow
def test_launcher(tmp_path):
    done = launch(
        tmp_path,
        "data.sources=stdlib:json",
        "data.context_length=512",
        "data.shortest_interval=128",
        "data.target_tokens=20000",
        "data.held_out_tokens=500",
    )
    assert done.returncode == 0, done.stderr
    assert "with a picture of the lengths in lengths.png" in done.stdout
    manifest = json.loads((tmp_path / "run/data/manifest.json").read_text())
    rows = re.search(r"rows +([\d,]+) of 512 tokens", done.stdout)
    assert rows is not None and int(rows[1].replace(",", "")) == manifest["num_rows"]


@pytest.mark.slow
def test_launcher_error_is_one_line(tmp_path):
    done = launch(tmp_path, "data.sources=[missing.txt]", "data.target_tokens=4096")
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: source 'missing.txt' does not exist") and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "run/data").exists()
