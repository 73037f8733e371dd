"""launch/demo.py: a step is skipped only when nothing that decides its output has changed."""

import importlib.util
import sys
from pathlib import Path

import pytest

from pod.files import read_json
from pod.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("launch_demo", ROOT / "launch" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["launch_demo"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["launch_demo"]


def make_step(demo, folder: Path, code: str):
    """A step whose command is a line of Python that writes `out` in its folder."""
    command = [sys.executable, "-c", code]
    return demo.Step("work", "work", command, ("model", "train"), folder / "work" / "out", folder / "work")


def write_code(folder: Path) -> str:
    return f"import pathlib as p; f = p.Path({str(folder / 'work')!r}); f.mkdir(exist_ok=True); (f / 'out').write_text('x')"


def test_a_finished_step_is_kept_until_its_output_or_inputs_change(demo, tmp_path):
    step, state, recipe = make_step(demo, tmp_path, write_code(tmp_path)), {}, Recipe()
    wanted = demo.fingerprint(step, recipe, "")
    assert not demo.is_done(step, state, wanted)
    demo.run_step(step, state, wanted, tmp_path)
    assert demo.is_done(step, read_json(tmp_path / "demo.json"), wanted), "also after a restart"
    assert not demo.is_done(step, state, demo.fingerprint(step, recipe, "another step before"))
    (tmp_path / "work" / "out").write_text("changed by hand")
    assert not demo.is_done(step, state, wanted)
    (tmp_path / "work" / "out").unlink()
    assert not demo.is_done(step, state, wanted)


def test_a_fingerprint_follows_the_sections_that_a_step_reads(demo, tmp_path):
    step = make_step(demo, tmp_path, "")
    base = demo.fingerprint(step, Recipe(), "")
    assert demo.fingerprint(step, load_recipe(None, ["train.max_steps=3"]), "") != base
    assert demo.fingerprint(step, load_recipe(None, ["seed=3"]), "") != base
    assert demo.fingerprint(step, load_recipe(None, ["explore.num_sequences=3"]), "") == base
    assert demo.fingerprint(step, Recipe(), "other code, or another step before") != base


def test_other_code_or_versions_run_everything_again(demo, tmp_path, monkeypatch):
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "a.py").write_text("1")
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    before = demo.code_digest()
    assert demo.code_digest() == before
    (tmp_path / "pod" / "a.py").write_text("2")
    assert demo.code_digest() != before
    (tmp_path / "pod" / "a.py").write_text("1")
    monkeypatch.setattr(demo.importlib.metadata, "version", lambda name: "0")
    assert demo.code_digest() != before


def test_a_failed_step_is_recorded_and_named(demo, tmp_path):
    step, state = make_step(demo, tmp_path, "raise SystemExit(3)"), {}
    with pytest.raises(RuntimeError, match="step work ended with code 3; finished steps are kept"):
        demo.run_step(step, state, "inputs", tmp_path)
    assert "seconds" not in read_json(tmp_path / "demo.json")["work"]
    silent = make_step(demo, tmp_path, "pass")
    with pytest.raises(RuntimeError, match=r"step work is not complete: .*out is missing"):
        demo.run_step(silent, state, "inputs", tmp_path)


def test_unfinished_work_is_kept_for_the_same_inputs_and_removed_for_others(demo, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "checkpoint").write_text("half way")
    state = {"work": {"fingerprint": "same"}}
    step = make_step(demo, tmp_path, write_code(tmp_path))
    demo.run_step(step, state, "same", tmp_path)
    assert (tmp_path / "work" / "checkpoint").exists()
    demo.run_step(step, state, "other", tmp_path)
    assert not (tmp_path / "work" / "checkpoint").exists()


def test_training_runs_through_the_real_launcher_to_its_last_step(demo, tmp_path):
    recipe = load_recipe(ROOT / "configs" / "demo_tiny.yaml")
    step = next(step for step in demo.steps_of(recipe, tmp_path / "recipe.yaml") if step.name == "train")
    assert Path(step.command[0]).name == "deepspeed"
    assert step.command[1:3] == ["--num_gpus", "2"]
    assert "--master_port" in step.command
    assert step.output.parent.name == f"step-{recipe.train.steps(recipe.data.context_length):08d}"


def test_heads_are_searched_where_razor_is_asked(demo, tmp_path):
    names = [step.name for step in demo.steps_of(Recipe(), tmp_path)]
    with_razor = [
        step.name for step in demo.steps_of(load_recipe(None, ["eval.methods=full,razor"]), tmp_path)
    ]
    assert sorted({*with_razor} - {*names}) == ["heads"] and len(with_razor) == len(names) + 1
