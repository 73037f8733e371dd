"""The recipes in configs/.

Each passes --dry-run of its launchers without a network, and says what its comments say.
"""

import runpy
import socket
import sys
from pathlib import Path

import pytest

from pod.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(file.name for file in (ROOT / "configs").glob("*.yaml"))
TRAINED = [name for name in CONFIGS if not name.startswith(("bench_", "data_"))]
PIPELINE = ("explore.py", "prepare_data.py", "train_pod.py", "export_hf.py", "run_eval.py")
LARGE = [name for name in TRAINED if name.startswith("llama3")]
PAPERS = [name for name in LARGE if not name.startswith("llama31_8b_32k")]


def launchers_of(name: str) -> tuple[str, ...]:
    return {"bench": ("bench.py",), "data": ("prepare_data.py",)}.get(name.split("_")[0], PIPELINE)


def read(name: str) -> Recipe:
    return load_recipe(ROOT / "configs" / name)


@pytest.fixture
def dry_run(monkeypatch, capsys, tmp_path):
    """`dry_run(launcher, recipe)` in this process and an empty folder; returns the estimate.

    There is no network and no cached model.
    """
    reached = []

    def no_network(self, address, *rest):
        if self.family != socket.AF_UNIX:
            reached.append(address)
            raise OSError("no network here")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def start(launcher: str, name: str, *more: str) -> str:
        arguments = [launcher, "--config", str(ROOT / "configs" / name), *more, "--dry-run"]
        monkeypatch.setattr(sys, "argv", arguments)
        try:
            runpy.run_path(str(ROOT / "launch" / launcher), run_name="__main__")
        except SystemExit as stop:
            assert stop.code in (0, None), capsys.readouterr().err
        assert reached == []
        return capsys.readouterr().out

    return start


@pytest.mark.parametrize("name", CONFIGS)
def test_every_launcher_of_a_recipe_passes_a_dry_run_without_a_network(name, dry_run):
    for launcher in launchers_of(name):
        assert dry_run(launcher, name)


@pytest.mark.parametrize("name", TRAINED)
def test_training_is_estimated_for_every_recipe(name, dry_run):
    text = dry_run("train_pod.py", name)
    parameters = {
        "demo_tiny.yaml": "164,544",
        "demo_cla.yaml": "131,197,248",
        "llama3_8b_32k_cla.yaml": "7,896,043,520",
        "llama31_8b_128k_cla.yaml": "7,896,043,520",
    }
    expected = parameters.get(name, "8,030,261,248" if "8b" in name else "134,515,008")
    assert f"{expected} parameters" in text
    assert ("sizes come from a built-in table" in text) == ("8b" in name)
    assert ("no plan yet" in text) == (read(name).model.layout == "pod")
    assert "longer than the model's positions" not in text


def test_a_dry_run_names_rows_that_are_too_long(dry_run):
    text = dry_run("train_pod.py", "llama3_8b_32k_dense.yaml", "--set", "model.max_position_embeddings=16384")
    assert (
        "training will refuse this: the data has rows of 32768 tokens, but the model reads at most 16384"
        in text
    )


def test_a_dry_run_admits_float32_on_a_gpu_and_refuses_a_backend_that_cannot_train_it(dry_run):
    gpu = ("--device", "h100", "--set", "train.dtype=float32")
    assert "GiB per rank" in dry_run("train_pod.py", "demo.yaml", *gpu)
    with pytest.raises(
        AssertionError, match="attention_backend=flash cannot train this: dtype torch.float32"
    ):
        dry_run("train_pod.py", "demo.yaml", *gpu, "--set", "model.attention_backend=flash")


@pytest.mark.parametrize("name", LARGE)
def test_a_run_reads_its_data_once(name):
    recipe = read(name)
    args, context = recipe.train, recipe.data.context_length
    tokens = args.steps(context) * args.rows_per_step(context) * context
    assert 0.999 < tokens / recipe.data.target_tokens <= 1
    if name in PAPERS:
        assert (args.tokens_per_step, args.total_tokens) == (4 * 2**20, 5_000_000_000)
        assert args.learning_rate == 1e-5


@pytest.mark.parametrize("name", LARGE)
def test_recipes_leave_the_how_to_the_layout_search(name):
    from pod.training.predict.layout_search import DERIVED

    assert [field for field in DERIVED if getattr(read(name).train, field) is not None] == []


def test_the_papers_chain_starts_from_one_dense_model_on_the_same_tokens():
    dense = read("llama3_8b_32k_dense.yaml")
    assert (dense.model.layout, dense.model.rope_theta, dense.model.max_position_embeddings) == (
        "dense",
        16e6,
        32_768,
    )
    for layout in ("pod", "window", "cla"):
        recipe = read(f"llama3_8b_32k_{layout}.yaml")
        assert recipe.model.layout == layout
        assert recipe.model.path == str(dense.export_dir)
        assert recipe.data == dense.data
        budget = "total_tokens", "tokens_per_step", "learning_rate", "warmup_ratio", "min_lr_ratio"
        assert all(getattr(recipe.train, field) == getattr(dense.train, field) for field in budget)
    pod, window = read("llama3_8b_32k_pod.yaml").model, read("llama3_8b_32k_window.yaml").model
    assert pod.num_sink_tokens + pod.num_recent_tokens == window.num_recent_tokens == 4096
    assert read("llama3_8b_32k_cla.yaml").model.cla_factor == 2


def test_demo_variants_train_on_the_demos_tokens():
    demo = read("demo.yaml")
    for layout in ("dense", "window", "cla", "lora"):
        recipe = read(f"demo_{layout}.yaml")
        assert recipe.data == demo.data and recipe.seed == demo.seed
        assert recipe.train.total_tokens == demo.train.total_tokens == 12 * recipe.train.tokens_per_step
        assert recipe.model.layout == (layout if layout != "lora" else "pod")
    for name in ("demo_window", "demo_lora"):
        assert read(f"{name}.yaml").model.num_recent_tokens == demo.model.num_recent_tokens


@pytest.mark.parametrize("name", TRAINED)
def test_no_recipe_is_refused_before_its_data_is_there(name, tmp_path, monkeypatch):
    """No recipe is refused before its data is there.

    Preflight asks of model, plan, layout and rows, on 1, 8 and 32 GPUs; rows per step are the same on all of
    them.
    """
    from pod.training.predict import layout_search, preflight
    from pod.training.predict.shapes import Shapes
    from pod.training.predict.step_time import get_device
    from pod.training.run.start_model import model_config

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    recipe = read(name)
    config, plan = model_config(recipe.model, tmp_path, 0.35)
    context = recipe.data.context_length
    assert name not in LARGE or recipe.train.save_every_steps is None, "a kill loses half an hour at most"
    preflight.check_positions(config, context)
    for ranks in (1, 8, 32) if name in LARGE else (1, 2):
        machine = layout_search.this_machine(ranks, 8, get_device("h100"))
        layout = layout_search.choose_layout(
            recipe.train, Shapes.from_config(config), plan.lead, context, machine
        )
        assert layout.job.rows_per_step == recipe.train.rows_per_step(context)
        preflight.check_epochs(layout.job, recipe.data.target_tokens // context)
        if ranks > 1 or "lora" in name or name not in LARGE:
            layout_search.check_fits(layout)
