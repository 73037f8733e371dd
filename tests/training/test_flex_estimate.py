"""What runs the attention of a training step, known before there is a GPU; what `flex` and `triton` keep."""

import importlib.util
from dataclasses import replace

import flex_eager
import pytest
import torch

from pod.modeling.model.attend import SharedQK, Tokens, Visibility, attend
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict.attention_backend import attention_backend
from pod.training.predict.layout_search import Machine, choose_layout
from pod.training.predict.memory_estimate import TrainingJob, World, moments, training_bytes
from pod.training.predict.shapes import Shapes
from pod.training.predict.step_time import CPU_CORE, DEVICES

SHAPES = Shapes(
    hidden=64, layers=4, query_heads=8, kv_heads=4, head_dim=32, intermediate=96, vocab=100, tied=True
)
LEAD = ((0,) * 4, (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 3))
TOKENS = 256


def job(attention, **settings):
    args = TrainArgs(max_steps=1, dtype="float32", **settings)
    return TrainingJob(SHAPES, LEAD, args, TOKENS, World(1, 1), attention)


@pytest.mark.parametrize(
    ("asked", "dtype", "head_dim", "has_gpu", "runs"),
    [
        ("auto", "bfloat16", 128, True, "flash"),
        ("auto", "float32", 128, True, "flex"),
        ("auto", "bfloat16", 20, True, "flex"),
        ("auto", "float32", 8, True, "reference"),
        ("auto", "bfloat16", 264, True, "reference"),
        ("flex", "bfloat16", 128, True, "flex"),
        ("triton", "bfloat16", 128, True, "triton"),
        ("triton", "float32", 80, True, "triton"),
        ("reference", "float32", 128, True, "reference"),
        ("auto", "float32", 128, False, "flash"),
        ("flash", "float32", 8, False, "flash"),
    ],
)
def test_what_will_run(asked, dtype, head_dim, has_gpu, runs):
    shapes = replace(SHAPES, attention_backend=asked, head_dim=head_dim)
    assert attention_backend(shapes, dtype, has_gpu) == runs
    device = DEVICES["h100"] if has_gpu else replace(CPU_CORE, memory_gib=64.0)
    recipe = TrainRecipe(max_steps=1, dtype=dtype)
    assert (
        choose_layout(recipe, shapes, LEAD, TOKENS, Machine(World(1, 1), device, 64.0)).job.attention == runs
    )


@pytest.mark.parametrize(
    ("asked", "dtype", "has_gpu", "says"),
    [
        ("flash", "float32", True, "=flash cannot train this: dtype torch.float32 on CUDA"),
        (
            "flex",
            "float32",
            False,
            "model.attention_backend=flex cannot train this: it runs on GPUs only; set",
        ),
        (
            "triton",
            "float32",
            False,
            "model.attention_backend=triton cannot train this: it runs on GPUs only; set",
        ),
        ("triton", "float32", True, "=triton cannot train this: head_dim 8 .16 to 256.; set"),
        ("grouped", "float32", True, "=grouped cannot train this: it takes one query per row; set"),
        (
            "tritn",
            "float32",
            True,
            "attention_backend = 'tritn' is not available here; choose one of auto, flash, flex, grouped, "
            "reference, triton",
        ),
    ],
)
def test_a_named_backend_that_cannot_train_is_refused(asked, dtype, has_gpu, says):
    with pytest.raises(ValueError, match=says):
        attention_backend(replace(SHAPES, attention_backend=asked, head_dim=8), dtype, has_gpu)


def kept_bytes(backend, inputs, see):
    """Of the tensors of queries or keys that one call keeps for its backward."""
    storages = {}

    def keep(x):
        if x.is_floating_point() and x.numel() >= TOKENS * SHAPES.head_dim:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        q, k, v, *lead = inputs
        out, _ = attend(q, Tokens(k, v), SharedQK(*lead), see, backend=backend)
    return sum(storages.values()), out


def test_kept_activations_grow_by_what_flex_keeps(monkeypatch):
    """One output more for every follower: what a call keeps, measured, and what the estimate says of all."""
    flex_eager.install(monkeypatch)
    followers, groups = 3, SHAPES.query_heads // SHAPES.kv_heads
    sizes = [heads * followers for heads in (groups, 1, 1, groups, 1)]
    inputs = [torch.randn(1, heads, TOKENS, SHAPES.head_dim, requires_grad=True) for heads in sizes]
    (flex, _), (flash, _) = (kept_bytes(name, inputs, Visibility(4, 20)) for name in ("flex", "flash"))
    group = groups * TOKENS * SHAPES.head_dim * 4
    assert flex - flash == followers * group

    pairs = zip(
        *(moments(job(name, gradient_checkpointing="none")) for name in ("flex", "flash")), strict=True
    )
    at_loss = next(more["activations"] - less["activations"] for more, less in pairs)
    follow = sum(leader != layer for layer, row in enumerate(LEAD) for leader in row)
    assert at_loss == follow * group


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_fused_kernel_keeps_what_flash_keeps(monkeypatch):
    """To the byte; the estimate says the same of both. Launches are left out, as only what is kept counts."""
    from pod.kernels import triton_launch

    launched = []
    monkeypatch.setattr(triton_launch, "run", lambda kernel, *rest, **options: launched.append(kernel))
    monkeypatch.setattr(triton_launch, "unsupported", lambda x: None)
    followers, groups = 3, SHAPES.query_heads // SHAPES.kv_heads
    sizes = [heads * followers for heads in (groups, 1, 1, groups, 1)]
    inputs = [torch.randn(1, heads, TOKENS, SHAPES.head_dim, requires_grad=True) for heads in sizes]
    (fused, out), (flash, _) = (kept_bytes(name, inputs, Visibility(4, 20)) for name in ("triton", "flash"))
    torch.autograd.grad(out.sum(), inputs)
    assert [kernel.fn.__name__ for kernel in launched] == ["forward_kernel", "queries_kernel", "keys_kernel"]
    assert fused == flash == followers * (3 * groups + 3) * TOKENS * SHAPES.head_dim * 4

    found, expected = (
        list(moments(job(name, gradient_checkpointing="none"))) for name in ("triton", "flash")
    )
    assert found == expected


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_step_needs_more_but_not_much_more(checkpointing):
    flex, flash = (
        sum(training_bytes(job(name, gradient_checkpointing=checkpointing)).values())
        for name in ("flex", "flash")
    )
    assert flash < flex < 1.5 * flash
