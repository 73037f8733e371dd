"""What a checkpoint belongs to, and what a resumed recipe may say otherwise."""

from dataclasses import replace

import pytest

from pod import SharingPlan
from pod.commands.explore import keep_other_plan, note_on_training
from pod.modeling.model.sink_constants import SinkConstants
from pod.recipe import load_recipe
from pod.training.checkpoint.newest import latest_checkpoint
from pod.training.checkpoint.run_identity import (
    TrainState,
    changed_settings,
    check_identity,
    identity_of,
    read_state,
)

MANIFEST = {"context_length": 8, "tokenizer_sha256": "t", "shards": ["s"]}


class Config:
    layout, num_sink_tokens, num_recent_tokens, sinks = "pod", 2, 4, "tokens"
    rope_parameters, max_position_embeddings = {"rope_type": "default"}, 32


def identity(samples="a", plan=((0, 0), (0, 1)), order=None, rows=(0, 4)):
    plan = SharingPlan(plan, head_order=order)
    return identity_of(Config(), {"w": samples}, plan, MANIFEST, {"method": "full"}, "float32", rows)


def test_a_plan_that_moves_heads_is_another_plan_and_not_another_model():
    """Weights are sampled in the plan's order of heads, so both differ: the reason is the plan."""
    moved = identity(samples="b", order=((1, 0), (0, 1)))
    with pytest.raises(ValueError, match="another sharing plan"):
        check_identity(TrainState(identity=identity()), moved, "belongs to {what}: use {needed}")


def test_other_sinks_are_other_windows(monkeypatch):
    """None and constant ones have no first tokens either of them."""
    monkeypatch.setattr(Config, "num_sink_tokens", 0)
    kinds = {}
    for kind in ("none", "constant"):
        monkeypatch.setattr(Config, "sinks", kind)
        kinds[kind] = identity()
    check_identity(TrainState(identity=kinds["constant"]), kinds["constant"], "{what}{needed}")
    with pytest.raises(ValueError, match=r"other windows: use the same .* and model\.sinks"):
        check_identity(TrainState(identity=kinds["none"]), kinds["constant"], "{what}: use {needed}")


@pytest.mark.parametrize("rows", [(1, 4), (0, 5)])
def test_another_seed_or_more_rows_per_step_are_refused(rows):
    with pytest.raises(ValueError, match="another seed or train.tokens_per_step"):
        check_identity(
            TrainState(identity=identity()), identity(rows=rows), "belongs to {what}: use {needed}"
        )


def test_checkpoints_that_know_no_rows_go_on():
    known = identity()
    del known["rows"]
    check_identity(TrainState(identity=known), identity(), "{what}{needed}")
    del known["dtype"]
    with pytest.raises(ValueError, match="dtype"):
        check_identity(TrainState(identity=known), identity(), "{what}{needed}")


def test_what_a_resumed_recipe_changes_is_told():
    before = {"train": {"learning_rate": 0.1, "dtype": "float32"}, "seed": 0}
    now = {"train": {"learning_rate": 0.2, "dtype": "float32", "new_field": 1}, "seed": 0}
    assert changed_settings(before, now) == ["train.learning_rate 0.1 -> 0.2"]
    assert changed_settings({}, now) == [] == changed_settings(now, now)
    # an earlier version had no such setting
    began = {"train": {**now["train"], "distill_attention": 10.0}}
    assert changed_settings(now, began) == ["train.distill_attention 0.0 -> 10.0"]


def test_a_damaged_checkpoint_names_the_one_to_go_back_to(tmp_path):
    for step in ("step-00000001", "step-00000002", "step-00000004"):
        (tmp_path / step).mkdir()
        TrainState(step=1).save(tmp_path / step)
    damaged = tmp_path / "step-00000004" / "checkpoint.json"
    damaged.write_text(damaged.read_text()[:20])
    (tmp_path / "latest").write_text("step-00000004\n")
    says = f"to continue from step-00000002, write this name into {tmp_path / 'latest'}"
    with pytest.raises(ValueError, match=says):
        read_state(tmp_path / "step-00000004")
    damaged.unlink()
    with pytest.raises(ValueError, match=says):
        latest_checkpoint(tmp_path)
    for step in ("step-00000001", "step-00000002"):
        (tmp_path / step / "checkpoint.json").unlink()
    with pytest.raises(ValueError, match="there is no other checkpoint"):
        latest_checkpoint(tmp_path)
    damaged.write_text('{"schema": 2}')
    with pytest.raises(
        ValueError, match="has checkpoint version 2, but this program can continue only version 3"
    ):
        read_state(tmp_path / "step-00000004")


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (SharingPlan([[0, 0], [0, None]]), True),
        (SharingPlan([[0, 0], [0, 1]], bits=(16, 4)), False),
        (SharingPlan([[0, 0], [0, 1]], {"cost": 1.0}), False),
    ],
)
def test_exploring_says_where_a_training_has_another_plan(tmp_path, capsys, now, told):
    """Bits are no part of what is trained, so that a checkpoint goes on with other ones."""
    recipe = load_recipe(None, [f"output_dir={tmp_path}"])
    checkpoint = recipe.train_dir / "step-00000002"
    for folder in (checkpoint, recipe.plan_dir):
        folder.mkdir(parents=True)
    TrainState().save(checkpoint)
    (recipe.train_dir / "latest").write_text("step-00000002")
    SharingPlan([[0, 0], [0, 1]]).save(checkpoint / "plan.json")
    now.save(recipe.plan_dir / "plan.json")
    note_on_training(recipe)
    assert ("was trained with another plan" in capsys.readouterr().err) is told
    (recipe.train_dir / "latest").write_text("gone")
    note_on_training(recipe)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, False),
        ({"provenance": {"cost": 1.0}}, False),
        ({"lead": [[0, 0], [0, 0]]}, True),
        ({"bits": (16, 4)}, True),
        ({"num_sink_tokens": 4, "num_recent_tokens": 28}, True),
        (None, True),
    ],
)
def test_another_plan_is_kept_when_a_new_one_is_written(tmp_path, capsys, change, is_kept):
    path, old = tmp_path / "plan.json", SharingPlan([[0, 0], [0, 1]])
    old.save(path)
    if change is None:
        path.write_text("{")
    before = path.read_bytes()
    keep_other_plan(path, SharingPlan(**({"lead": [[0, 0], [0, 1]]} | (change or {}))))
    kept = list(tmp_path.glob("plan-????????.json"))
    assert len(kept) == is_kept and path.exists() == (not is_kept)
    assert all(file.read_bytes() == before for file in kept)
    assert ("is kept as" in capsys.readouterr().out) == is_kept
    keep_other_plan(tmp_path / "none.json", old)


def test_a_plan_with_other_constants_is_kept(tmp_path):
    """A plan with other constants is kept.

    Constants take minutes to measure, and `pod.calibrate_sinks` writes them into the plan that is there.
    """
    plan = SharingPlan(((0,), (None,)), num_sink_tokens=0, num_recent_tokens=4, sinks="constant")
    plan = replace(plan, sink_constants=SinkConstants((None, (0.5,)), (None, ((1.0, 2.0),))))
    plan.save(tmp_path / "plan.json")
    keep_other_plan(tmp_path / "plan.json", plan)
    assert (tmp_path / "plan.json").exists()
    keep_other_plan(tmp_path / "plan.json", replace(plan, sinks="none", sink_constants=None))
    (kept,) = tmp_path.glob("plan-????????.json")
    assert SharingPlan.load(kept).sink_constants == plan.sink_constants
