"""launch/demo.py: a step is skipped only when nothing that decides its output has changed."""

import dataclasses
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


def make_step(demo, folder: Path, code: str, **settings):
    """A step whose command is a line of Python that writes `out` in its folder."""
    return demo.Step(
        name="work",
        title="work",
        command=[sys.executable, "-c", code],
        sections=("model", "train"),
        code=("pod/files.py",),
        outputs=(folder / "work" / "out",),
        folder=folder / "work",
        **settings,
    )


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


def test_a_fingerprint_follows_the_sections_that_a_step_reads(demo, tmp_path, monkeypatch):
    step = make_step(demo, tmp_path, "")
    base = demo.fingerprint(step, Recipe(), "")
    assert demo.fingerprint(step, load_recipe(None, ["train.max_steps=3"]), "") != base
    assert demo.fingerprint(step, load_recipe(None, ["seed=3"]), "") != base
    assert demo.fingerprint(step, load_recipe(None, ["explore.num_sequences=3"]), "") == base
    assert demo.fingerprint(dataclasses.replace(step, code=("pod/schema.py",)), Recipe(), "") != base
    monkeypatch.setattr(demo.importlib.metadata, "version", lambda name: "0")
    assert demo.fingerprint(step, Recipe(), "") != base


def test_a_failed_step_is_recorded_and_named(demo, tmp_path):
    step, state = make_step(demo, tmp_path, "raise SystemExit(3)"), {}
    with pytest.raises(RuntimeError, match="step work ended with code 3; finished steps are kept"):
        demo.run_step(step, state, "inputs", tmp_path)
    assert read_json(tmp_path / "demo.json")["work"]["status"] == "started"
    silent = make_step(demo, tmp_path, "pass")
    with pytest.raises(RuntimeError, match=r"step work is not complete: .*out is missing"):
        demo.run_step(silent, state, "inputs", tmp_path)
    stopped = make_step(demo, tmp_path, write_code(tmp_path), complete=lambda: False)
    with pytest.raises(RuntimeError, match="step work is not complete: it was stopped before its end"):
        demo.run_step(stopped, state, "inputs", tmp_path)


def test_unfinished_work_is_kept_for_the_same_inputs_and_removed_for_others(demo, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "checkpoint").write_text("half way")
    state = {"work": {"status": "started", "fingerprint": "same"}}
    step = make_step(demo, tmp_path, write_code(tmp_path))
    demo.run_step(step, state, "same", tmp_path)
    assert (tmp_path / "work" / "checkpoint").exists()
    demo.run_step(step, state, "other", tmp_path)
    assert not (tmp_path / "work" / "checkpoint").exists()


def test_peak_memory_counts_child_processes(demo):
    child = "import time; x = bytearray(300_000_000); time.sleep(3)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    exit_code, peak = demo.run_command([sys.executable, "-c", code], {"POD_TEST": "1"})
    assert exit_code == 0
    assert 300e6 < peak < 500e6


def test_training_runs_through_the_real_launcher_on_two_ranks(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_gpus", lambda: 0)
    recipe = load_recipe(ROOT / "configs" / "demo_tiny.yaml")
    step = next(step for step in demo.steps_of(recipe, tmp_path / "recipe.yaml") if step.name == "train")
    assert Path(step.command[0]).name == "deepspeed"
    assert step.command[1:3] == ["--num_gpus", "2"]
    assert "--master_port" in step.command
    assert ("DS_ACCELERATOR", "cpu") in step.environment
    monkeypatch.setattr(demo, "_gpus", lambda: 1)
    assert demo.fitted(recipe).train.sequence_parallel_size == 1, "one GPU holds one rank"
    assert recipe.train.sequence_parallel_size == 2


def test_every_step_names_code_that_exists(demo, tmp_path):
    for step in demo.steps_of(load_recipe(ROOT / "configs" / "demo_tiny.yaml"), tmp_path / "recipe.yaml"):
        missing = [name for name in step.code if not (ROOT / name).exists()]
        assert not missing, step.name
