"""Which checkpoint is the newest complete one.

Nothing is removed which a run did not write itself.
"""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from pod import SharingPlan
from pod.files import write_json
from pod.training.checkpoint.checkpoint_files import put_aside, write_pieces
from pod.training.checkpoint.newest import (
    WEIGHT_FILES,
    checkpoint_to_export,
    checkpoint_to_resume,
    latest_checkpoint,
    step_folders,
    why_incomplete,
)
from pod.training.checkpoint.run_identity import TrainState
from pod.training.deepspeed_bridge import MASTER, MOMENTS, Piece


def make_checkpoint(folder, step, ranks=2, monkeypatch=None):
    """A checkpoint of a weight of six numbers and one of two.

    The second lies on the last rank, in a file of its own.
    """
    checkpoint = folder / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    for rank in range(ranks):
        size = 6 // ranks
        kinds = (MASTER, *MOMENTS)
        pieces = [Piece("w", (2, 3), rank * size, {kind: torch.zeros(size) for kind in kinds})]
        if rank == ranks - 1:
            pieces.append(Piece("v", (2,), 0, {kind: torch.zeros(2) for kind in kinds}))
        count = write_pieces(checkpoint, rank, pieces, lambda: None)
        random = checkpoint / f"random-{rank:05d}.safetensors"
        save_file({"cpu": torch.zeros(1)}, random, metadata={WEIGHT_FILES: str(count)})
    SharingPlan([[0, 0], [0, 1]]).save(checkpoint / "plan.json")
    write_json(checkpoint / "config.json", {"model_type": "pod"})
    TrainState(step=step, world_size=ranks).save(checkpoint)
    return checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Checkpoints of steps 8, 9 and 10; a file of weights ends after a piece."""
    monkeypatch.setattr("pod.training.checkpoint.checkpoint_files.FILE_BYTES", 1)
    for step in (8, 9, 10):
        make_checkpoint(tmp_path / "train", step)
    (tmp_path / "train" / ".step-00000011.tmp").mkdir()
    (tmp_path / "train" / "step-notes").mkdir()
    return tmp_path / "train"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is missing"),
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"step", "is damaged"),
        (b"\xff\xfe", "read"),
    ],
)
def test_without_the_file_latest_the_folders_are_searched(folder, capsys, content, problem):
    if content is not None:
        (folder / "latest").write_bytes(content)
    assert latest_checkpoint(folder) == folder / "step-00000010"
    told = capsys.readouterr().out
    assert problem in told and "newest complete checkpoint is step-00000010" in told and told.count("\n") == 1
    assert checkpoint_to_export(folder, None) == folder / "step-00000010"


def test_the_file_latest_wins(folder, capsys):
    (folder / "latest").write_text("step-00000009\n")
    assert latest_checkpoint(folder) == folder / "step-00000009"
    assert capsys.readouterr().out == ""


def test_a_step_that_latest_names_and_that_is_gone_is_refused(folder):
    (folder / "latest").write_text("step-00000012\n")
    with pytest.raises(ValueError, match="to continue from step-00000010, write this name into"):
        latest_checkpoint(folder)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = {
    "state": (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json is missing or damaged"),
    "plan": (lambda path: (path / "plan.json").write_text(""), "plan.json is missing or damaged"),
    "config": (lambda path: (path / "config.json").unlink(), "config.json is missing or damaged"),
    "rank": (
        lambda path: (path / "weights-00000-000.safetensors").unlink(),
        "weights-00000-000.safetensors is missing",
    ),
    "last file": (
        lambda path: (path / "weights-00001-001.safetensors").unlink(),
        "weights-00001-001.safetensors is missing",
    ),
    "random": (
        lambda path: (path / "random-00001.safetensors").unlink(),
        "random-00001.safetensors is missing",
    ),
    "cut": (
        lambda path: cut(path / "weights-00001-000.safetensors"),
        "weights-00001-000.safetensors is damaged",
    ),
    "zero bytes": (
        lambda path: (path / "weights-00001-000.safetensors").write_bytes(b""),
        "weights-00001-000.safetensors is damaged",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_passed_over_and_named(folder, capsys, damage):
    spoil, reason = DAMAGES[damage]
    assert why_incomplete(folder / "step-00000010") is None
    spoil(folder / "step-00000010")
    assert reason in (why_incomplete(folder / "step-00000010") or "")
    assert latest_checkpoint(folder) == folder / "step-00000009"
    assert f"incomplete: step-00000010 ({reason}" in capsys.readouterr().out


def test_a_piece_that_no_rank_wrote_is_missed(tmp_path):
    checkpoint = make_checkpoint(tmp_path, 1, ranks=2)
    shutil.copy(checkpoint / "weights-00001-000.safetensors", tmp_path / "kept")
    kinds = (MASTER, *MOMENTS)
    write_pieces(
        checkpoint, 0, [Piece("w", (2, 3), 0, {kind: torch.zeros(2) for kind in kinds})], lambda: None
    )
    assert why_incomplete(checkpoint) == "3 of its values are missing"


def test_where_no_checkpoint_is_complete_the_run_is_refused_and_nothing_goes(folder):
    for checkpoint in step_folders(folder):
        (checkpoint / "plan.json").unlink()
    for call in (
        lambda: checkpoint_to_resume(folder, "auto", {}),
        lambda: checkpoint_to_export(folder, None),
    ):
        with pytest.raises(ValueError, match="no checkpoint in .* is complete") as raised:
            call()
        assert "step-00000008 (plan.json is missing" in str(raised.value) and "\n" not in str(raised.value)
        assert "remove that folder" not in str(raised.value)
    assert len(step_folders(folder)) == 3


def test_resume_never_refuses_folders_without_the_file_latest(folder, tmp_path):
    with pytest.raises(ValueError, match="already has checkpoints"):
        checkpoint_to_resume(folder, "never", {})
    assert checkpoint_to_resume(tmp_path / "none", "never", {}) is None
    assert latest_checkpoint(tmp_path / "none") is None


def test_a_checkpoint_that_stands_in_the_way_is_kept(tmp_path, capsys):
    for number in (1, 2):
        make_checkpoint(tmp_path, 4, ranks=1)
        put_aside(tmp_path / "step-00000004")
        assert why_incomplete(tmp_path / f"kept-{number}-step-00000004") is None
    assert step_folders(tmp_path) == [] and "renamed to kept-1-step-00000004" in capsys.readouterr().out


# Whole trainings


@pytest.mark.slow
@pytest.mark.parametrize(("name", "began", "latest"), [("missing", 4, 8), ("empty", 4, 4), ("cut", 2, 6)])
def test_a_training_goes_on_from_the_newest_complete_checkpoint(newest_results, name, began, latest):
    result = newest_results["newest"][name]
    assert result["began"] == began
    assert result["latest"] == f"step-{latest:08d}"
    assert result["steps"] == list(range(1, latest + 1))


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_finished_checkpoint_stays_byte_for_byte(newest_results, name):
    results = newest_results["newest"]
    assert results[name]["hash"] == results["hash"]
    assert {"step-00000002", "step-00000004"} <= {*results["empty"]["folders"]}


def test_a_damaged_checkpoint_of_the_same_step_is_kept_aside(newest_results):
    cut = newest_results["newest"]["cut"]
    assert "kept-1-step-00000004" in cut["folders"] and "step-00000004" in cut["folders"]
    assert cut["kept_bytes"] == cut["cut_bytes"]


def test_rotation_removes_only_what_the_run_wrote(newest_results):
    """Of `keep_last=1`: step 4 is the run's own, step 2 another run's."""
    assert newest_results["newest"]["foreign"]["folders"] == ["step-00000002", "step-00000008"]


def test_the_metrics_of_an_earlier_training_are_kept(newest_results):
    moved = newest_results["newest"]["moved"]
    assert moved["earlier_steps"] == [1, 2, 3, 4] and moved["steps"] == [1, 2]


def test_a_training_beside_damaged_checkpoints_is_refused(newest_results):
    nothing = newest_results["newest"]["nothing"]
    assert "no checkpoint in" in nothing["error"] and "\n" not in nothing["error"]
    assert nothing["folders"] == ["step-00000002", "step-00000004"]
