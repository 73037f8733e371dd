"""What a run refuses before it starts.

Each case is one line that says what came, what is allowed and what to do.
"""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pod
from pod.data import write_packed_rows
from pod.recipe import load_recipe
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict import layout_search, preflight
from pod.training.predict.memory_estimate import checkpoint_disk_bytes
from pod.training.predict.preflight import check, kept_checkpoints

GIB = 2**30


def config(**changes):
    sizes = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "lead": [[0, 0], [0, 1], [2, 1], [2, 3]],
    }  # fmt: skip
    return pod.PodConfig(**sizes | changes)


MANIFEST = {"context_length": 64, "num_rows": 12}


def run(folder, world_size=1, settings=None, model=None, manifest=None):
    """`check` of a run of one step that is fine but for what is given."""
    return check(
        config(**model or {}),
        TrainRecipe(**{"max_steps": 1} | (settings or {})),
        MANIFEST | (manifest or {}),
        folder,
        layout_search.this_machine(world_size, world_size),
    )


def refused(*arguments, **options) -> str:
    with pytest.raises(ValueError) as caught:
        run(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_run_that_is_fine_is_not_refused(tmp_path):
    run(tmp_path / "train", 4, {"sequence_parallel_size": 2, "tokens_per_step": 128})
    assert not (tmp_path / "train").exists(), "a check leaves nothing behind"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"manifest": {"context_length": 65}}, "rows of 65 tokens, but the model reads at most 64"),
        ({"settings": {"sequence_parallel_size": 8}, "world_size": 8}, "every rank needs a query head"),
        ({"settings": {"sequence_parallel_size": 2}, "world_size": 3}, "3 ranks cannot form groups"),
        ({"settings": {"tokens_per_step": 16 * 64}},
         "a step takes 16 rows of 64 tokens, but the data has 12"),
        ({"settings": {"max_steps": 13}},
         "13 steps of 1 rows read the data's 12 rows 1.08 times: prepare more data"),
        ({"settings": {"tokens_per_step": 65}},
         "a multiple of the row length, 64 tokens: the nearest are 64, 128"),
        ({"settings": {"method": "lora", "distill": 1.0}, "model": {"lead": None}},
         "every head leads, so the model would be its own teacher"),
        ({"world_size": 4, "manifest": {"context_length": 3}},
         "1 rows of 3 tokens per step cannot be split over 4 ranks"),
    ],
)  # fmt: skip
def test_wrong_things_are_refused_by_name(tmp_path, changes, says):
    assert says in refused(tmp_path, **changes)


def test_limits_themselves_are_allowed(tmp_path):
    run(tmp_path, 2, {"tokens_per_step": 12 * 64})  # 12 rows of 12
    run(tmp_path, settings={"max_steps": 13, "allow_repeats": True})
    run(tmp_path, 4, {"sequence_parallel_size": 4})


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"max_steps": 1000}, 3),
        ({"max_steps": 1000, "save_every_steps": 0}, 1),
        ({"max_steps": 1000, "save_every_steps": None, "keep_every_steps": 500}, 5),
        ({"max_steps": 1000, "keep_last": 1}, 2),
        ({"max_steps": 1000, "save_every_steps": None}, 3),  # by the clock
        ({"max_steps": 1000, "keep_every_steps": 100, "keep_last": 4}, 15),
    ],
)
def test_checkpoints_that_lie_on_disk_at_a_time(settings, most):
    assert kept_checkpoints(TrainArgs(**{"save_every_steps": 100, **settings})) == most


def test_disk_too_small_for_the_checkpoints_that_will_be_kept(tmp_path, monkeypatch):
    shapes = preflight.Shapes.from_config(config())
    needed = 3 * checkpoint_disk_bytes(shapes.parameters)
    free = [needed]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    settings = {"max_steps": 1000, "allow_repeats": True, "zero_stage": 3}
    run(tmp_path / "train", settings=settings)
    free[0] = needed - 1
    assert "3 checkpoints of 0.0 GiB each (2 by keep_last, one being written)" in refused(
        tmp_path / "train", settings=settings
    )
    run(tmp_path / "train", settings=settings | {"keep_last": 1})
    old = tmp_path / "train" / "step-00000100" / "zero"  # what rotates counts as free
    old.mkdir(parents=True)
    (old / "state.pt").write_bytes(b"0" * 10)
    run(tmp_path / "train", settings=settings)


def test_memory_of_the_machine_is_positive_and_bounded_by_its_pages():
    assert 2**20 < layout_search.host_memory_bytes() <= 2**50


def test_gpus_and_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: h100)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(preflight.toolchain, "obstacle", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run(tmp_path, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "4 ranks on this machine, but 2 GPUs are visible" in refused(tmp_path, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert "no bfloat16 (it needs compute capability 8.0 or newer)" in refused(tmp_path)


def test_float32_on_a_gpu_is_admitted_where_flex_runs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(layout_search.Machine, "has_gpu", True)
    single = {"dtype": "float32"}
    assert run(tmp_path, settings=single, model={"head_dim": 16}).job.attention == "flex"
    assert run(tmp_path, settings={"dtype": "bfloat16"}).job.attention == "flash"
    message = refused(tmp_path, settings=single)  # heads of 8
    assert "no fused attention runs here (flash: dtype torch.float32 on CUDA (needs float16" in message
    assert "flex: head_dim 8 (16 to 256)); without it, all n x n logits stay in memory" in message
    assert "set train.dtype=bfloat16, or model.attention_backend=reference to accept this" in message
    wide = refused(tmp_path, model={"head_dim": 264})
    assert "head_dim 264 on CUDA" in wide and "pass: set model.attention_backend=reference" in wide
    run(tmp_path, settings=single, model={"attention_backend": "reference"})
    named = refused(tmp_path, settings=single, model={"attention_backend": "flash"})
    assert "model.attention_backend=flash cannot train this: dtype torch.float32 on CUDA" in named


def test_an_output_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a folder; set another output_dir" in refused(tmp_path / "file" / "train")


def test_a_dry_run_says_what_training_will_refuse(tmp_path):
    from pod.training.run.start import estimate

    row = [np.arange(64, dtype=np.int32)]
    write_packed_rows(tmp_path / "data", [row] * 8, context_length=64, vocab_size=256, tokenizer_sha256="x")
    settings = {"tokens_per_step": 128, "max_steps": 4}

    def said(length=64, **changes) -> str:
        train = [f"train.{name}={value}" for name, value in (settings | changes).items()]
        model = ["model.path=package:tiny", "model.layout=dense", f"output_dir={tmp_path}"]
        recipe = load_recipe(
            None, [*model, f"data.context_length={length}", "data.shortest_interval=32", *train]
        )
        return estimate(recipe, layout_search.this_machine(1, 1))

    assert "training will refuse" not in said()
    assert "note: training will refuse this: data.context_length is 128, but the rows in" in said(128)
    assert "refuse this: 10 steps of 2 rows read the data's 8 rows 2.50 times" in said(max_steps=10)
    assert "training will refuse" not in said(max_steps=10, allow_repeats="true")
    assert "refuse this: a step takes 16 rows of 64 tokens" in said(tokens_per_step=1024, max_steps=1)
