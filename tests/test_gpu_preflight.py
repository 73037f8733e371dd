"""A GPU machine without Triton, a C compiler or `Python.h`.

It is told in one line before a long run starts, not by a run that silently computes with the reference. The
GPU is a stand-in; nothing is computed.
"""

import pytest
import torch

from pod import toolchain
from pod.commands import bench, evaluate, explore
from pod.kernels import gpu_support
from pod.recipe import load_recipe
from pod.training.args import TrainRecipe
from pod.training.predict import preflight
from pod.training.predict.layout_search import Machine
from pod.training.predict.memory_estimate import World
from pod.training.predict.shapes import Shapes
from pod.training.predict.step_time import DEVICES

LACKS = "no C compiler: Triton compiles what starts its kernels with it (install gcc or set CC)"
SHAPES = Shapes(
    hidden=64, layers=2, query_heads=4, kv_heads=2, head_dim=32, intermediate=96, vocab=100, tied=True
)
HERE = Machine(World(1, 1), DEVICES["h100"], 64.0)
WORK = {
    "explore": (explore, "pod.plan.exploration.process_group"),
    "eval": (evaluate, "pod.eval.runner.evaluate"),
    "bench": (bench, "pod.bench.run.run_bench"),
}


@pytest.fixture
def machine(monkeypatch):
    """One GPU of capability 9.0, and no C compiler."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(toolchain, "obstacle", lambda: LACKS)
    return monkeypatch


def started(monkeypatch, command, *settings):
    """Whether the command came to its work."""
    module, work = WORK[command]

    def stand_in(*arguments):
        raise InterruptedError

    monkeypatch.setattr(work, stand_in)
    recipe = load_recipe(None, ["model.path=package:tiny", *settings])
    with pytest.raises(InterruptedError):
        module.main(recipe)
    return True


@pytest.mark.parametrize("command", ["explore", "eval"])
def test_float32_is_refused_before_the_work(machine, command):
    with pytest.raises(ValueError) as caught:
        started(machine, command)
    assert str(caught.value) == (
        "no fused attention runs on this GPU (flash: dtype torch.float32 on CUDA "
        "(needs float16 or bfloat16); flex: "
        f"{LACKS}); without it, all n x n logits of a prompt are in memory: mend this, "
        "or set model.dtype=bfloat16, or "
        "model.attention_backend=reference to accept it"
    )


@pytest.mark.parametrize("command", list(WORK))
def test_what_flash_computes_starts_with_a_line_on_decoding(machine, command, capsys):
    assert started(machine, command, "model.dtype=bfloat16")
    out, err = capsys.readouterr()
    assert out == "attention on GPUs: FlashAttention 2 (fa2)\n"
    warning = (
        f"warning: tokens are decoded without Triton's kernels and CUDA graphs, which is slower: {LACKS}\n"
    )
    assert err == ("" if command == "explore" else warning)


@pytest.mark.parametrize("command", list(WORK))
def test_the_reference_runs_where_it_is_asked_for(machine, command):
    assert started(machine, command, "model.attention_backend=reference")


def test_nothing_is_asked_of_a_machine_or_a_run_without_gpus(machine, capsys):
    assert started(machine, "bench", "bench.device=cpu") and started(machine, "eval", "eval.device=cpu")
    machine.setattr(torch.cuda, "is_available", lambda: False)
    machine.setattr("pod.training.run.start_model.source_config", lambda model: pytest.fail("read"))
    assert all(started(machine, command) for command in WORK)
    assert capsys.readouterr() == ("", "")


def test_a_benchmark_of_decoding_reads_no_text(machine, capsys):
    """Its caches are filled, so what reads prompts does not matter."""
    assert started(machine, "bench", "bench.shapes=tiny")
    assert LACKS in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "head_dim", "backend", "capability", "says"),
    [
        (torch.float32, 64, "flex", (9, 0), f"model.attention_backend=flex cannot run here: {LACKS}; set"),
        (
            torch.bfloat16,
            64,
            "triton",
            (9, 0),
            f"model.attention_backend=triton cannot run here: {LACKS}; set",
        ),
        (
            torch.float32,
            64,
            "flash",
            (9, 0),
            "model.attention_backend=flash cannot run here: dtype torch.float32",
        ),
        (
            torch.bfloat16,
            64,
            "auto",
            (7, 5),
            "flash: this GPU (needs compute capability 8.0); flex: this GPU",
        ),
        (torch.float64, 64, "auto", (9, 0), "set model.dtype=bfloat16, or model.attention_backend=reference"),
        (
            torch.bfloat16,
            264,
            "auto",
            (9, 0),
            "mend this, or set model.attention_backend=reference to accept it",
        ),
        (torch.bfloat16, 64, "auto", (9, 0), None),
        (torch.bfloat16, 64, "flash", (9, 0), None),
        (torch.float32, 64, "reference", (9, 0), None),
    ],
)
def test_what_reads_prompts(machine, dtype, head_dim, backend, capability, says):
    machine.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    if says is None:
        gpu_support.check_prompts(dtype, head_dim, backend)
        return
    with pytest.raises(ValueError) as caught:
        gpu_support.check_prompts(dtype, head_dim, backend)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_training_is_refused_for_its_fused_layers_and_for_float32(machine):
    with pytest.raises(ValueError) as caught:
        preflight.check_gpus(TrainRecipe())
    assert str(caught.value) == (
        f"train.fused_layers=auto compiles kernels by Triton: {LACKS}; or set train.fused_layers=none"
    )
    plain = TrainRecipe(fused_layers="none")
    preflight.check_gpus(plain)
    preflight.check_attention(SHAPES, plain, HERE)
    with pytest.raises(
        ValueError, match=r"no fused attention runs here \(flash: dtype .*; flex: no C compiler"
    ):
        preflight.check_attention(SHAPES, TrainRecipe(fused_layers="none", dtype="float32"), HERE)
    machine.setattr(toolchain, "obstacle", lambda: None)
    preflight.check_gpus(TrainRecipe())
    preflight.check_attention(SHAPES, TrainRecipe(dtype="float32"), HERE)


def test_a_missing_triton_is_an_obstacle(monkeypatch):
    monkeypatch.setattr(toolchain, "missing", lambda: None)
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert toolchain.obstacle() == (
        "Triton is not installed: it comes with CUDA builds of PyTorch (pip install triton)"
    )
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: name)
    assert toolchain.obstacle() is None
    monkeypatch.setattr(toolchain, "missing", lambda: LACKS)
    assert toolchain.obstacle() == LACKS
