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


def test_a_finished_step_is_kept_until_its_inputs_change_or_its_output_is_gone(demo, tmp_path, capsys):
    step, state = make_step(demo, tmp_path, write_code(tmp_path)), tmp_path / "demo.json"

    def is_kept(inputs: str) -> bool:
        demo.run_step(step, state, inputs)
        return "nothing changed" in capsys.readouterr().out

    assert [is_kept("a"), is_kept("a"), is_kept("b"), is_kept("b")] == [False, True, False, True]
    step.output.unlink()
    assert [is_kept("b"), is_kept("b")] == [False, True]


def test_a_fingerprint_follows_the_sections_that_a_step_reads(demo, tmp_path):
    step = make_step(demo, tmp_path, "")
    base = demo.fingerprint(step, Recipe(), "")
    assert demo.fingerprint(step, load_recipe(None, ["train.max_steps=3"]), "") != base
    assert demo.fingerprint(step, load_recipe(None, ["seed=3"]), "") != base
    assert demo.fingerprint(step, load_recipe(None, ["explore.num_sequences=3"]), "") == base
    assert demo.fingerprint(step, Recipe(), "other code, or another step before") != base


def test_other_code_or_versions_run_everything_again(demo, tmp_path, monkeypatch):
    (tmp_path / "pod").mkdir()
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    digests = []
    for code, versions in (("1", "a"), ("2", "a"), ("1", "b"), ("1", "a")):
        (tmp_path / "pod" / "a.py").write_text(code)
        (tmp_path / "requirements.txt").write_text(versions)
        digests.append(demo.code_digest())
    assert len(set(digests)) == 3 and digests[0] == digests[3]


def test_a_failed_step_is_named_and_done_again(demo, tmp_path):
    state = tmp_path / "demo.json"
    with pytest.raises(RuntimeError, match="step work ended with code 3; finished steps are kept"):
        demo.run_step(make_step(demo, tmp_path, "raise SystemExit(3)"), state, "inputs")
    with pytest.raises(RuntimeError, match=r"step work is not complete: .*out is missing"):
        demo.run_step(make_step(demo, tmp_path, "pass"), state, "inputs")
    assert not read_json(state)["work"]["done"]


def test_unfinished_work_is_kept_for_the_same_inputs_and_removed_for_others(demo, tmp_path):
    state, half = tmp_path / "demo.json", tmp_path / "work" / "checkpoint"
    with pytest.raises(RuntimeError):
        demo.run_step(make_step(demo, tmp_path, "raise SystemExit(3)"), state, "same")
    half.parent.mkdir()
    half.write_text("half way")
    step = make_step(demo, tmp_path, write_code(tmp_path))
    demo.run_step(step, state, "same")
    assert half.exists()
    demo.run_step(step, state, "other")
    assert not half.exists()


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
