"""Data of benchmarks: every format, archives, and one line that says what is missing."""

import gzip
import json
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pod.eval.suites import task_data
from pod.eval.suites.task_data import read_dataset

ROWS = [{"question": "who\u2028now?", "answers": ["Bo", "Bea"]}, {"question": "where?", "answers": ["Ulm"]}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "suite"
    place.mkdir()
    (place / "a.jsonl").write_text(LINES, encoding="utf-8")
    (place / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (place / "a.json").write_text(json.dumps(ROWS))
    (place / "wrapped.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (place / "bom.jsonl").write_text("\ufeff" + LINES, encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), place / "a.parquet")
    with zipfile.ZipFile(place / "data.zip", "w") as archive:
        archive.writestr("data/zipped.jsonl", LINES)
    return tmp_path


@pytest.mark.parametrize(
    "file", ["a.jsonl", "a.jsonl.gz", "a.json", "wrapped.json", "bom.jsonl", "a.parquet"]
)
def test_every_format_gives_the_same_rows(folder, file):
    with task_data.use(folder):
        assert task_data.load_rows("suite", file) == ROWS


def test_csv_and_tsv(folder):
    (folder / "suite" / "a.csv").write_text('id,text\n1,"x, y"\n')
    (folder / "suite" / "a.tsv").write_text("id\ttext\n1\tx, y\n")
    with task_data.use(folder):
        assert (
            task_data.load_rows("suite", "a.csv")
            == task_data.load_rows("suite", "a.tsv")
            == [{"id": "1", "text": "x, y"}]
        )


def test_member_of_a_local_archive(folder):
    with task_data.use(folder):
        assert task_data.load_rows("suite", "zipped.jsonl", "some/set", "data.zip/data/zipped.jsonl") == ROWS
        with pytest.raises(ValueError, match=r"data\.zip does not have data/none\.jsonl"):
            task_data.load_rows("suite", "none.jsonl", "some/set", "data.zip/data/none.jsonl")


def test_an_archive_may_be_unpacked(tmp_path):
    place = tmp_path / "suite" / "data"
    place.mkdir(parents=True)
    (place / "b.jsonl").write_text(LINES, encoding="utf-8")
    with task_data.use(tmp_path):
        assert task_data.load_rows("suite", "b.jsonl", "some/set", "data.zip/data/b.jsonl") == ROWS


def test_environment_names_the_folder_and_the_recipe_wins(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(task_data.ENVIRONMENT, str(folder))
    assert task_data.load_rows("suite", "a.jsonl") == ROWS
    other = tmp_path / "other"
    other.mkdir()
    with task_data.use(other), pytest.raises(ValueError, match="a.jsonl is missing"):
        task_data.load_rows("suite", "a.jsonl")
    monkeypatch.setenv(task_data.ENVIRONMENT, "/nowhere")
    with pytest.raises(ValueError, match="POD_EVAL_DATA = /nowhere is not a folder"):
        task_data.load_rows("suite", "a.jsonl")


def test_a_missing_file_is_one_line_with_both_ways(folder):
    with task_data.use(folder), pytest.raises(ValueError) as caught:
        task_data.load_rows("longbench", "qasper.jsonl", "THUDM/LongBench", "data.zip/data/qasper.jsonl")
    assert str(caught.value) == (
        f"data of longbench: qasper.jsonl is missing ({folder}/longbench/qasper.jsonl is not there): "
        "put it there under a folder set "
        "by eval.data_dir (or POD_EVAL_DATA) as longbench/qasper.jsonl, or leave both unset and connect to "
        "the hub, where it is "
        "data/qasper.jsonl in data.zip of the data set THUDM/LongBench"
    )


def test_a_hub_that_cannot_be_reached_is_the_same_line(monkeypatch):
    monkeypatch.delenv(task_data.ENVIRONMENT, raising=False)
    asked = []

    def refuse(**arguments):
        asked.append(arguments)
        raise ConnectionError("no route\nto host. More words")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(
        ValueError, match=r"leval/Exam/a.jsonl.*a\.jsonl of the data set L4NLP/LEval"
    ) as caught:
        task_data.load_rows("leval", "Exam/a.jsonl", "L4NLP/LEval", "LEval/Exam/a.jsonl")
    assert "(the hub gave ConnectionError: no route to host)" in str(caught.value) and "\n" not in str(
        caught.value
    )
    assert asked == [{"repo_id": "L4NLP/LEval", "filename": "LEval/Exam/a.jsonl", "repo_type": "dataset"}]


def test_hub_files_and_members_are_read(folder, monkeypatch):
    monkeypatch.delenv(task_data.ENVIRONMENT, raising=False)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda **a: str(folder / "suite" / a["filename"]))
    assert task_data.load_rows("suite", "a.parquet", "some/set") == ROWS
    assert task_data.load_rows("suite", "zipped.jsonl", "some/set", "data.zip/data/zipped.jsonl") == ROWS


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: no JSON"),
        ("a.jsonl", b"[1]\n", r"line 1: a JSON object is expected, found list"),
        ("a.jsonl", b"\n", "has no rows"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8 text"),
        ("a.json", b'{"rows_of": []}', "a list of objects is expected, alone or under 'data' or"),
        ("a.parquet", b"PAR1", "not a complete parquet file"),
        ("a.jsonl.gz", b"no", "not a complete gzip file"),
        ("data.zip", b"PK", "not a complete zip archive"),
        ("a.txt", b"x", r"the ending must be one of \.jsonl"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, file, content, message):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / file).write_bytes(content)
    with task_data.use(tmp_path), pytest.raises(ValueError, match=message) as caught:
        if file == "data.zip":
            task_data.load_rows("suite", "a.jsonl", "some/set", "data.zip/a.jsonl")
        task_data.load_rows("suite", file)
    assert "\n" not in str(caught.value)


def test_datasets_fill_missing_keys():
    made = task_data.dataset([{"a": 1}, {"a": 2, "b": "x"}], split="validation")
    assert made["validation"].to_list() == [{"a": 1, "b": None}, {"a": 2, "b": "x"}]
    with pytest.raises(ValueError, match="no row"):
        task_data.dataset([])


def test_tokenizer_of_the_run_or_of_the_model_arguments():
    marker = object()
    with task_data.use(None, marker):
        assert task_data.load_tokenizer({"pretrained": "elsewhere"}) is marker
    with pytest.raises(ValueError, match="give the model's tokenizer"):
        task_data.load_tokenizer({})


def test_local_copies_of_hub_data_sets_keep_subsets_apart():
    fixtures = Path(__file__).parent / "data"
    with task_data.use(fixtures):
        anatomy = read_dataset("mmlu_anatomy", "cais/mmlu", "anatomy")
        assert {name: len(rows) for name, rows in anatomy.items()} == {"test": 2, "dev": 1}
        assert {row["subject"] for rows in anatomy.values() for row in rows} == {"anatomy"}
        easy, hard = (read_dataset("arc", "allenai/ai2_arc", f"ARC-{name}") for name in ("Easy", "Challenge"))
        assert easy["test"][0]["question"] != hard["test"][0]["question"]
        with pytest.raises(ValueError, match=r"no file of the split 'train' in .*all \(found: dev, test\)"):
            anatomy["train"]
        with pytest.raises(ValueError, match=r"data of arc: no file in .*ai2_arc/ARC-Medium: put a copy"):
            read_dataset("arc", "allenai/ai2_arc", "ARC-Medium")
