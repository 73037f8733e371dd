"""pod demo: the commands of the chain in their order.

What an older recipe trained is not taken for this one's.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pod
from pod.commands import demo
from pod.data import prepare
from pod.export import export
from pod.models import byte_tokenizer
from pod.recipe import load_recipe
from pod.training.predict import step_time

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """`chain("b", "explore.threshold=0.4")`: a demo of the steps a, b, c of which b fails.

    Returns the steps that ran.
    """
    monkeypatch.setattr(demo, "summary", lambda recipe: "")
    monkeypatch.setattr(demo, "how_to_serve", lambda recipe, config: "")

    def start(fails: str | None = None, *settings: str) -> list[str]:
        ran = []
        steps = [demo.DemoStep(name, name, [name]) for name in "abc"]
        monkeypatch.setattr(demo, "steps_of", lambda *_: steps)
        monkeypatch.setattr(
            demo, "run_command", lambda command, _: ran.append(command[0]) or int(command[0] == fails)
        )
        try:
            demo.main(load_recipe(None, [f"output_dir={tmp_path}", *settings]))
        except RuntimeError as error:
            assert str(error).startswith(
                f"step {fails} failed with exit code 1; its message is above. To continue"
            )
        return ran

    return start


def test_steps_run_in_their_order_until_one_fails(chain):
    assert [chain(), chain("b"), chain()] == [list("abc"), list("ab"), list("abc")]


def test_a_training_is_kept_for_the_same_recipe_and_put_away_for_another(chain, tmp_path):
    checkpoint = tmp_path / "train" / "latest"

    def is_kept(*settings: str) -> bool:
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.write_text("step-1")
        chain(None, *settings)
        return checkpoint.exists()

    assert not is_kept()
    assert is_kept() and is_kept("eval.limit=3"), "what is evaluated changes no weight"
    for change in ("train.learning_rate=1e-3", "seed=3", "explore.threshold=0.4"):
        assert not is_kept(change) and is_kept(change)
    assert [(tmp_path / f"train-{number}" / "latest").is_file() for number in range(1, 6)] == [True] * 4 + [
        False
    ]


def test_a_recipe_that_lies_in_the_output_folder_stays_as_it_is(chain, tmp_path):
    own = tmp_path / "recipe.yaml"
    own.write_text("# mine\nseed: 3\n")
    chain()
    assert own.read_text() == "# mine\nseed: 3\n"


def test_rows_of_other_settings_are_put_away(chain, tmp_path, byte_rows):
    rows = lambda name: (tmp_path / name / "manifest.json").is_file()  # noqa: E731
    settings = byte_rows("data.context_length=64")
    chain(None, *settings)
    chain(None, *settings, "eval.limit=3")
    assert rows("data") and not rows("data-1")
    chain(None, *settings, "data.min_tokens=3")
    assert rows("data-1") and not (tmp_path / "data").exists()
    chain(None, *settings)
    byte_rows("data.context_length=64")
    chain(None, *settings, "seed=3")
    assert rows("data-1") and rows("data-2") and not (tmp_path / "data").exists()


@pytest.fixture
def byte_rows(tmp_path):
    """Prepares rows in `tmp_path/data`; returns the settings of a recipe that has them made."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"{number} " * 100)

    def make(*more: str) -> list[str]:
        settings = [f"data.sources=[{texts}]", "data.shortest_interval=16", "data.target_tokens=4096", *more]
        recipe = load_recipe(None, [f"output_dir={tmp_path}", "model.path=package:tiny", *settings])
        args = replace(recipe.data, held_out_tokens=recipe.held_out_tokens, workers=1)
        prepare(args, byte_tokenizer(), recipe.data_dir)
        return settings

    return make


def test_a_cpu_without_bfloat16_trains_in_float32(chain, tmp_path, monkeypatch):
    for speed, settings, expected in (
        (0.1, (), "float32"),
        (3.0, (), "bfloat16"),
        (3.0, ("train.dtype=float32",), "float32"),
    ):
        monkeypatch.setattr(step_time, "bfloat16_speed", lambda speed=speed: speed)
        chain(None, *settings)
        assert load_recipe(tmp_path / demo.RESOLVED).train.dtype == expected


def test_other_work_on_the_machine_does_not_change_how_fast_bfloat16_is(monkeypatch):
    """Other work on the machine does not change how fast bfloat16 is.

    One thread's own time counts: products on all cores wait for cores that are busy, for seconds or not at
    all.
    """
    threads = []

    def thread_time():
        """Products of the first type take 1 s, those of the second 10 s."""
        threads.append(torch.get_num_threads())
        finished, is_end = divmod(len(threads) - 1, 2)
        return sum(1.0 if number < 4 else 10.0 for number in range(finished + is_end))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    step_time.bfloat16_speed.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(step_time.time, "thread_time", thread_time)
            patch.setattr(step_time.time, "perf_counter", lambda: pytest.fail("the clock on the wall"))
            assert step_time.bfloat16_speed() == pytest.approx(0.1)
        assert set(threads) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        step_time.bfloat16_speed.cache_clear()


def test_how_fast_bfloat16_is_is_measured():
    assert 0.001 < step_time.bfloat16_speed() < 100


def test_a_command_gets_threads_of_its_own_without_a_gpu(monkeypatch, capfd):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    code = "import os; print(os.environ.get('DS_ACCELERATOR'), os.environ['PATH'].split(os.pathsep)[0])"
    for more, expected in (["--num_gpus"], "cpu"), ([], "None"):
        assert demo.run_command([sys.executable, "-c", code, *more], has_gpu=False) == 0
        assert capfd.readouterr().out.split() == [expected, str(demo.BIN)]
    assert demo.run_command([sys.executable, "-c", "raise SystemExit(3)"], has_gpu=False) == 3


@pytest.mark.slow
def test_a_stopped_demo_stops_its_step(tmp_path):
    """SIGTERM goes to the demo alone; what it waits for is to save and end as well."""
    step = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"""
import sys
from pod.commands import demo
demo.steps_of = lambda *_: [demo.DemoStep("a", "a", [sys.executable, "-c", {step!r}])]
sys.argv = ["pod demo", "--config", "demo_tiny", "--set", "output_dir={tmp_path}"]
demo.start()
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as started:
        wait_for(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
        started.terminate()
    pid = int((tmp_path / "pid").read_text())
    assert started.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.05)


def test_training_runs_through_the_real_launcher_with_two_ranks(tmp_path):
    recipe = load_recipe("demo_tiny")
    step = next(step for step in demo.steps_of(recipe, tmp_path / demo.RESOLVED) if step.name == "train")
    assert Path(step.command[0]).name == "deepspeed"
    assert step.command[1:3] == ["--num_gpus", "2"]
    assert "--master_port" in step.command


@pytest.mark.parametrize("lead", [[[0, 0], [None, 1]], [[0, 0], [None, None]]])
def test_the_last_line_says_how_to_serve_what_was_made(tmp_path, lead):
    """A plan by head: the demo that makes a plan of layers. A plan of layers: the commands of its folders."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 11, "num_attention_heads": 2}
    config = pod.PodConfig(**sizes, num_hidden_layers=2, lead=lead, num_sink_tokens=0, num_recent_tokens=4)
    recipe = load_recipe("demo_tiny", [f"output_dir={tmp_path}/run"])
    export(pod.PodForCausalLM(config), recipe.export_dir)
    said = demo.how_to_serve(recipe, "demo_tiny")
    if lead[1] == [None, None]:
        command = f"pod export --config {tmp_path}/run/demo_recipe.yaml --format vllm"
        serve = f"vllm serve {tmp_path}/run/export-vllm --max-num-batched-tokens 2048"
        assert said == f"serving: {command} && {serve}"
        return
    command = said.partition("pod demo --config ")[2].split(" --set ")
    again = load_recipe(command[0], command[1:])
    assert (again.explore.target, again.explore.granularity) == ("vllm", "layer")
    assert (again.model.sinks, again.output_dir) == ("constant", f"{tmp_path}/run-vllm")
    assert "This plan is not of that kind." in said and "\n" not in said


def test_a_model_that_no_plan_makes_ready_for_vllm_is_said_to_be_one(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 11, "num_attention_heads": 2}
    recipe = load_recipe("demo_tiny", [f"output_dir={tmp_path}/run"])
    for changes, why in (
        ({"layout": "cla", "lead": [[0, 0], [0, 0]]}, "layout = 'cla' shares keys and values"),
        ({"lead": [[0, 0], [None, 1]], "norm_placement": "behind"}, "different roles"),
    ):
        config = pod.PodConfig(**sizes, num_hidden_layers=2, num_recent_tokens=4, **changes)
        export(pod.PodForCausalLM(config), recipe.export_dir)
        said = demo.how_to_serve(recipe, "demo_tiny")
        assert said.startswith("serving: vLLM cannot run this model: ") and why in said and "\n" not in said


def test_the_summary_says_how_long_the_training_was_and_compares_no_losses(tmp_path):
    recipe = load_recipe(None, [f"output_dir={tmp_path}"])
    for folder in (recipe.train_dir, recipe.eval_dir):
        folder.mkdir(parents=True)
    rows = [
        {"step": 1, "loss": 1.25, "labels": 1000.0},
        {"eval": {}},
        {"step": 2, "loss": 2.5, "labels": 234.0},
    ]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (recipe.train_dir / "metrics.jsonl").write_text(lines, encoding="utf-8")
    (recipe.eval_dir / "report.md").write_text("# A title\n\nfirst\n* second\n", encoding="utf-8")
    (tmp_path / "export_check.json").write_text('{"relative_logit_error": 0.0}', encoding="utf-8")
    report, training, *_ = demo.summary(recipe).rsplit("\n", 3)
    assert report == "# A title\n\nfirst"
    assert training == "training: 2 steps on 1,234 tokens"
