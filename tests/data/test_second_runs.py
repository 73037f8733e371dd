"""What a later, a second or an unlucky run does to work that is there.

Nothing is lost that somebody still needs.
"""

import errno
import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import content

from pod.commands import data
from pod.data import DataArgs, prepare
from pod.data.run import read_sources
from pod.data.run.job import Job
from pod.data.run.workers import in_order
from pod.data.tokens import token_file

pytestmark = pytest.mark.usefixtures("no_pictures", "small_steps")


@pytest.fixture
def args(corpus):
    source = corpus(random.Random(0).choices(range(2, 300), k=1000))
    return DataArgs(
        sources=[str(source)], context_length=128, shortest_interval=32, target_tokens=3_000, workers=1
    )


def stopped(monkeypatch, *arguments, **options):
    """A preparation that ends with an error behind its reading."""

    def stop(*_):
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(sys.modules["pod.data.run.prepare"], "draw", stop)
        prepare(*arguments, **options)


def fail_if_read(*_):
    raise AssertionError("a work shard is read")


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def change_a_source(args, tmp_path):
    """Another text in a file of the sources, and a time of change behind that of the rows."""
    file = next(path for path in Path(args.sources[0]).rglob("*") if path.is_file())
    file.write_text(json.dumps({"text": "a changed text " * 400}) + "\n", encoding="utf-8")
    later = (tmp_path / "data/manifest.json").stat().st_mtime + 10
    os.utime(file, (later, later))
    return file


def test_a_source_that_was_changed_is_told_and_overwrite_reads_it(args, tokenizer, tmp_path, capsys):
    prepare(args, tokenizer, tmp_path / "data")
    before = content(tmp_path / "data")
    prepare(args, tokenizer, tmp_path / "data")
    assert "warning" not in capsys.readouterr().out
    file = change_a_source(args, tmp_path)
    prepare(args, tokenizer, tmp_path / "data")
    assert f"warning: {file} was changed after {tmp_path / 'data'} was made" in capsys.readouterr().out
    assert content(tmp_path / "data") == before
    prepare(args, tokenizer, tmp_path / "data", overwrite=True)
    assert content(tmp_path / "data") != before
    prepare(args, tokenizer, tmp_path / "data")  # made later than the change
    made = content(tmp_path / "data")
    with pytest.raises(ValueError, match="cannot be overwritten: the checkpoints in"):
        prepare(args, tokenizer, tmp_path / "data", overwrite=True, used_by=tmp_path / "train")
    assert content(tmp_path / "data") == made


def test_rows_that_a_training_goes_on_with_are_not_replaced(args, tokenizer, tmp_path):
    """Nor is more held-out text a reason; what is there may be asked for again, and less of it too."""
    train = tmp_path / "train"
    prepare(replace(args, held_out_tokens=300), tokenizer, tmp_path / "data", used_by=train)
    before = content(tmp_path / "data")
    prepare(replace(args, held_out_tokens=200), tokenizer, tmp_path / "data", used_by=train)
    for other in (replace(args, target_tokens=2_000), replace(args, held_out_tokens=400)):
        with pytest.raises(ValueError, match=f"checkpoints in {train} need its rows: set another output_dir"):
            prepare(other, tokenizer, tmp_path / "data", used_by=train)
    assert content(tmp_path / "data") == before


def test_damaged_rows_are_made_again_whoever_goes_on_with_them(args, tokenizer, tmp_path):
    """The same request gives the same bytes."""
    prepare(args, tokenizer, tmp_path / "data")
    before = content(tmp_path / "data")
    shard = next((tmp_path / "data").glob("shard-*.tokens.npy"))
    for damage in (lambda: shard.write_bytes(shard.read_bytes()[:-10]), shard.unlink):
        damage()
        prepare(args, tokenizer, tmp_path / "data", used_by=tmp_path / "train")
        assert content(tmp_path / "data") == before


@pytest.mark.parametrize("manifest", [None, "", "{", '{"format": "pod-packed-rows", "schema_version": 2}'])
def test_rows_without_a_readable_manifest_are_kept_unless_overwriting_is_asked_for(
    args, tokenizer, tmp_path, manifest
):
    whole = content(prepare(args, tokenizer, tmp_path / "data").path)
    file = tmp_path / "data" / "manifest.json"
    if manifest is None:
        file.unlink()
    else:
        file.write_text(manifest)
    before = content(tmp_path / "data")
    for used_by in (None, tmp_path / "train"):
        with pytest.raises(ValueError, match="has rows of unknown settings .*--overwrite") as raised:
            prepare(args, tokenizer, tmp_path / "data", used_by=used_by)
        assert "\n" not in str(raised.value)
    assert content(tmp_path / "data") == before
    prepare(args, tokenizer, tmp_path / "data", overwrite=True)
    assert content(tmp_path / "data") == whole


def test_rows_of_other_settings_are_kept_unless_overwriting_is_asked_for(args, tokenizer, tmp_path):
    before = content(prepare(args, tokenizer, tmp_path / "data").path)
    for other, seed, says in (
        (replace(args, min_tokens=5, target_tokens=2_000), 0, "(data.min_tokens, data.target_tokens)"),
        (args, 1, "with other settings (seed)"),
        (replace(args, held_out_tokens=300), 0, "with 0 held-out tokens, but 300 are needed"),
    ):
        with pytest.raises(ValueError, match="has finished rows .* or set another output_dir") as raised:
            prepare(other, tokenizer, tmp_path / "data", seed=seed)
        assert says in str(raised.value) and "\n" not in str(raised.value)
        assert content(tmp_path / "data") == before and not (tmp_path / "data.work").exists()
    assert prepare(replace(args, min_tokens=5), tokenizer, tmp_path / "data", overwrite=True)
    assert content(tmp_path / "data") != before


def test_rows_of_another_tokenizer_are_kept(args, tokenizer, byte_tokenizer, tmp_path):
    before = content(prepare(args, tokenizer, tmp_path / "data").path)
    with pytest.raises(ValueError, match=r"with other settings \(tokenizer\)"):
        prepare(args, byte_tokenizer, tmp_path / "data")
    assert content(tmp_path / "data") == before


def test_the_command_asks_before_it_replaces_rows(tmp_path, capsys, monkeypatch):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"text {number} " * 30)
    argv = ["pod data", str(texts)]
    for setting in (
        f"output_dir={tmp_path}",
        "model.path=package:tiny",
        "data.target_tokens=4096",
        "data.workers=1",
    ):
        argv += ["--set", setting]
    argv += ["--set", "data.context_length=256", "--set", "data.shortest_interval=64"]
    monkeypatch.setattr(sys, "argv", argv)
    data.start()
    before = content(tmp_path / "data")
    monkeypatch.setattr(sys, "argv", [*argv, "--set", "seed=1"])
    with pytest.raises(SystemExit):
        data.start()
    assert "error: " in (told := capsys.readouterr().err) and "(seed): run again with --overwrite" in told
    assert content(tmp_path / "data") == before
    monkeypatch.setattr(sys, "argv", [*argv, "--set", "seed=1", "--overwrite"])
    data.start()
    assert content(tmp_path / "data") != before


def test_settings_that_rows_were_prepared_with_otherwise_are_named(args, tokenizer, tmp_path):
    manifest = prepare(args, tokenizer, tmp_path / "data", seed=3).manifest
    assert replace(args, workers=2, held_out_tokens=5).other_than(manifest, 3) == []
    other = replace(args, sources=["stdlib:"], deduplicate=False)
    assert other.other_than(manifest, 4) == ["data.sources", "data.deduplicate", "seed"]
    assert args.other_than({}, 4) == []


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_a_broken_file_that_is_not_needed_is_no_error_for_any_number_of_workers(
    args, tokenizer, tmp_path, monkeypatch
):
    """Workers read ahead; what they meet behind the end of reading must not show."""
    num_read = prepare(args, tokenizer, tmp_path / "one").manifest["read"]["units"]
    broken = Job(args, tokenizer, "x").order()[num_read:]
    paths = {Job(args, tokenizer, "x").work_shards[number].files for number in broken}
    read = read_sources.read_work_shard

    def breaks(work_shard, *rest):
        if work_shard.files in paths:
            raise ValueError(f"{work_shard.files[0].path} is broken")
        time.sleep(0.05)  # the broken one is met first
        return read(work_shard, *rest)

    monkeypatch.setattr(read_sources, "read_work_shard", breaks)
    for workers in (1, 3):
        prepare(replace(args, workers=workers), tokenizer, tmp_path / f"out-{workers}")
        assert content(tmp_path / f"out-{workers}") == content(tmp_path / "one")


@pytest.mark.multiprocess
def test_waiting_for_a_slow_task_costs_nothing():
    """Others are done long before: their being done must not wake the caller again and again."""
    asked = []
    slow_first = in_order(lambda count, seconds: time.sleep(seconds), [(1.0,), (0,), (0,)], 2, asked.append)
    assert len(list(slow_first)) == 3 and len(asked) < 20


def test_who_waited_for_another_run_takes_its_result(args, tokenizer, tmp_path, monkeypatch):
    module = sys.modules["pod.data.run.prepare"]
    check = module.check_can_write

    def another_run_is_faster(*arguments):
        monkeypatch.setattr(module, "check_can_write", check)
        prepare(args, tokenizer, tmp_path / "data")
        monkeypatch.setattr(read_sources, "read_work_shard", fail_if_read)
        return check(*arguments)

    monkeypatch.setattr(module, "check_can_write", another_run_is_faster)
    assert len(prepare(args, tokenizer, tmp_path / "data"))


def test_data_that_is_up_to_date_leaves_other_unfinished_work_alone(args, tokenizer, tmp_path, monkeypatch):
    prepare(args, tokenizer, tmp_path / "data")
    stopped(monkeypatch, args, tokenizer, tmp_path / "data", seed=1, overwrite=True)
    work = content_of_work(tmp_path)
    prepare(args, tokenizer, tmp_path / "data")
    assert work and content_of_work(tmp_path) == work
    with monkeypatch.context() as patch:
        patch.setattr(read_sources, "read_work_shard", fail_if_read)
        prepare(args, tokenizer, tmp_path / "data", seed=1, overwrite=True)
    assert not (tmp_path / "data.work").exists()


def content_of_work(folder):
    return {file.name: file.read_bytes() for file in (folder / "data.work").glob("*") if file.is_file()}


def test_own_work_of_finished_data_goes(args, tokenizer, tmp_path, monkeypatch):
    """A run was killed between its last two steps."""
    with monkeypatch.context() as patch:
        patch.setattr(Job, "clean", lambda job: None)
        prepare(args, tokenizer, tmp_path / "data")
    assert (tmp_path / "data.work").is_dir()
    prepare(args, tokenizer, tmp_path / "data")
    assert not (tmp_path / "data.work").exists()


def test_what_a_kill_left_of_removing_the_work_goes(args, tokenizer, tmp_path):
    prepare(args, tokenizer, tmp_path / "data")
    (tmp_path / "data.work/rows").mkdir(parents=True)
    prepare(args, tokenizer, tmp_path / "data")
    assert not (tmp_path / "data.work").exists()
    (tmp_path / "data.work").mkdir()
    (tmp_path / "data.work/thesis.tex").write_text("mine")
    prepare(args, tokenizer, tmp_path / "data")
    assert (tmp_path / "data.work/thesis.tex").read_text() == "mine"


def test_a_folder_that_only_has_the_name_of_the_work_is_kept(args, tokenizer, tmp_path):
    (tmp_path / "data.work").mkdir()
    (tmp_path / "data.work/thesis.tex").write_text("mine")
    with pytest.raises(
        ValueError, match=r"data.work has files.*'thesis.tex'.*move them, or set another output_dir"
    ):
        prepare(args, tokenizer, tmp_path / "data")
    assert (tmp_path / "data.work/thesis.tex").read_text() == "mine"


def test_an_output_inside_a_source_is_refused(args, tokenizer, tmp_path):
    """Its files would be read by the next run."""
    source = args.sources[0]
    with pytest.raises(
        ValueError,
        match=r"output_dir .*data is inside the source .*another output_dir, or .*data.include",
    ):
        prepare(args, tokenizer, f"{source}/run/data")
    assert not os.path.exists(f"{source}/run")
    with pytest.raises(ValueError, match="is inside the source"):
        prepare(replace(args, sources=[f"{source}/**/*"]), tokenizer, f"{source}/run/data")
    prepare(replace(args, include=["*.txt"]), tokenizer, f"{source}/run/data")
    prepare(replace(args, sources=[f"{source}/**/*.txt"]), tokenizer, f"{source}/other/data")


@pytest.mark.parametrize("origin", ["known", "unknown"])
def test_work_of_other_settings_is_kept_unless_overwriting_is_asked_for(
    args, tokenizer, tmp_path, monkeypatch, capsys, origin
):
    stopped(monkeypatch, args, tokenizer, tmp_path / "data")
    seed = 1
    if origin == "unknown":
        (tmp_path / "data.work" / "work.json").unlink()
        seed = 0
    work = content_of_work(tmp_path)
    with pytest.raises(ValueError, match="has unfinished work with other settings.*: .*--overwrite"):
        prepare(args, tokenizer, tmp_path / "data", seed=seed)
    assert any(name.startswith("unit-") for name in work) and content_of_work(tmp_path) == work
    prepare(args, tokenizer, tmp_path / "data", seed=seed, overwrite=True)
    assert (
        "removed unfinished work with other settings, seed, tokenizer or sources" in capsys.readouterr().out
    )
    prepare(args, tokenizer, tmp_path / "fresh", seed=seed)
    assert content(tmp_path / "data") == content(tmp_path / "fresh")
    assert ": removed " not in capsys.readouterr().out


@pytest.mark.parametrize("where", ["token file", "work shard file"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_while_reading_is_told_and_leaves_no_rest(
    args, tokenizer, tmp_path, monkeypatch, where, workers
):
    args = replace(args, workers=workers)
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"disk full while writing .*: free at least \d+ MB"),
    ):
        if where == "token file":
            patch.setattr(token_file.TokenFile, "append", no_space)
        else:
            patch.setattr(token_file, "_copy", no_space)
        prepare(args, tokenizer, tmp_path / "out/data")
    assert not list(tmp_path.glob("out/data.work/.*"))
    prepare(args, tokenizer, tmp_path / "out/data")
    prepare(args, tokenizer, tmp_path / "fresh")
    assert content(tmp_path / "out/data") == content(tmp_path / "fresh")


def test_what_a_killed_run_left_half_written_goes(args, tokenizer, tmp_path, monkeypatch):
    stopped(monkeypatch, args, tokenizer, tmp_path / "data")
    half = tmp_path / "data.work/.unit-3-0123456789abcdef.bin.12345"
    half.write_bytes(b"half")
    stopped(monkeypatch, args, tokenizer, tmp_path / "data")
    assert not half.exists()


@pytest.mark.parametrize("policy", ["cut", "skip"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("target", [128, 10**9])
@pytest.mark.parametrize("held_out", [0, 10**9])
@pytest.mark.parametrize("deduplicate", [True, False])
def test_extremes_agree(corpus, tokenizer, tmp_path, policy, workers, target, held_out, deduplicate):
    """Data is whole and tokens are counted once at all extremes.

    One row or more rows than there are, no held-out text or all of it, copies, and long documents.
    """
    folder = corpus([1, 5, 20, 20, 40, 64, 127, 128, 129, 300, 1000] * 5)
    for number in range(9):
        (folder / f"copy-{number}.txt").write_text((folder / "00009.txt").read_text())
    args = DataArgs(
        sources=[str(folder)],
        context_length=128,
        shortest_interval=32,
        target_tokens=target,
        long_documents=policy,
        deduplicate=deduplicate,
        held_out_tokens=held_out,
        workers=workers,
    )
    manifest = prepare(args, tokenizer, tmp_path / "data").manifest
    told, held = manifest["read"], manifest["held_out"]
    assert manifest["num_tokens"] <= target
    assert bool(held["documents"]) == bool(held_out) and held["documents"] <= 0.5 * told["documents"]
    if target == 10**9:
        lengths = [1, 5, 20, 20, 40, 64, 127, 128, 129, 300, 1000]
        total = 5 * sum(lengths) + (0 if deduplicate else 9 * 300)
        assert told["tokens"] == total
