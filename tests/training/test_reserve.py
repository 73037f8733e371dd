"""What a training leaves free on a GPU beside its tensors, and how the allocator holds them."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict import layout_search
from pod.training.predict.layout_search import (
    FIT,
    ParallelLayout,
    check_fits,
    choose_layout,
    table,
    this_machine,
)
from pod.training.predict.memory_estimate import World
from pod.training.predict.reserve import COMMUNICATOR, CONTEXT, WORKSPACES, communicators, reserve
from pod.training.predict.shapes import Shapes
from pod.training.predict.step_time import CPU_CORE, get_device

GIB = 2**30
SMALL = Shapes(
    hidden=576, layers=3, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=4096, tied=True
)


def small(device: str = "h100", ranks: int = 1, **settings) -> ParallelLayout:
    machine = this_machine(ranks, ranks, get_device(device))
    recipe = TrainRecipe(tokens_per_step=8 * 512, **settings)
    return choose_layout(recipe, SMALL, tuple((layer,) * 3 for layer in range(3)), 512, machine)


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel_size", "groups"),
    [(1, 1, 0), (2, 1, 2), (2, 2, 3), (8, 8, 3), (8, 4, 4), (32, 1, 2)],
)
def test_every_group_that_talks_is_reserved_for(ranks, sequence_parallel_size, groups):
    args, world = TrainArgs(sequence_parallel_size=sequence_parallel_size), World(ranks, min(ranks, 8))
    assert communicators(args, world) == groups
    parts = reserve(args, world, has_gpu=True)
    assert sum(parts.values()) == CONTEXT + WORKSPACES + groups * COMMUNICATOR
    assert reserve(args, world, has_gpu=False) == {}
    assert sum(reserve(replace(args, memory_reserve_gib=2.5), world, has_gpu=True).values()) == 2.5 * GIB


def test_the_help_states_what_is_reserved():
    from pod.schema import field_docs

    said = field_docs(TrainRecipe)["memory_reserve_gib"]
    assert (CONTEXT + WORKSPACES) / GIB == 1.25 and COMMUNICATOR / GIB == 1.5
    assert "null = 1.25, and 1.5 more for every group" in " ".join(said.split())


@pytest.mark.parametrize("settings", [{}, {"memory_reserve_gib": 3.0}])
def test_the_bound_counts_the_reserve_to_the_byte(settings):
    """A device that holds the layout and the reserve takes it; one of a megabyte less takes another."""
    whole = small(**settings)
    kept = 3.0 if settings else 1.25
    needed = (whole.needed_bytes / GIB + kept) / FIT
    layouts, less = (small(f"h100,memory_gib={needed + change:.6f}", **settings) for change in (1e-3, -1e-3))
    assert layouts.job == whole.job and layouts.share == pytest.approx(FIT, rel=1e-3)
    assert less.job != whole.job and less.fits


def test_more_ranks_leave_less(monkeypatch):
    shares = {ranks: small(ranks=ranks, sequence_parallel_size=1, zero_stage=1) for ranks in (1, 2)}
    kept = {ranks: sum(layout.reserve.values()) / GIB for ranks, layout in shares.items()}
    assert kept == {1: 1.25, 2: 4.25}


def test_a_cpu_reserves_nothing():
    machine = this_machine(1, 1, replace(CPU_CORE, memory_gib=32.0))
    layout = choose_layout(TrainRecipe(dtype="float32"), SMALL, ((0,) * 3, (1,) * 3, (2,) * 3), 512, machine)
    assert layout.reserve == {} and layout.share == layout.needed_bytes / GIB / 32
    assert "reserve" not in table(layout, None)


def test_the_table_and_the_refusal_tell_it(monkeypatch):
    layout = small(ranks=2, sequence_parallel_size=1)
    said = table(layout, None)
    assert f"memory  {layout.needed_bytes / GIB:.2f} + 4.25 reserved of 74.5 GiB per rank" in said
    parts = "context 1.00, 2 communicators 3.00, workspaces 0.25"
    assert f"reserve {parts} GiB per rank, stated (train.memory_reserve_gib)\n" in said
    monkeypatch.setattr(layout_search, "start_bytes", lambda job: 100 * GIB)
    usable = FIT * layout.machine.device.memory_gib - 4.25
    with pytest.raises(ValueError) as caught:
        check_fits(layout)
    rule = f"{FIT:.0%} of h100, less a reserve of 4.2"
    assert f"needs 100.0 of {usable:.1f} usable GiB per rank ({rule})" in str(caught.value)


# -- allocator ------------------------------------------------------------------------------

CASES = [
    ({}, "expandable_segments:True", "expandable_segments:True (set PYTORCH_ALLOC_CONF to change it)"),
    (
        {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
        "expandable_segments:False",
        "PYTORCH_ALLOC_CONF=expandable_segments:False, as the environment says",
    ),
    (
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
        None,
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64, as the environment says",
    ),
    (
        {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"},
        None,
        "PyTorch's default, as TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK is set",
    ),
    (
        {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0"},
        "expandable_segments:True",
        "expandable_segments:True (set PYTORCH_ALLOC_CONF to change it)",
    ),
]
SCRIPT = """
import json, os, sys, types
from pod.commands import train
from pod.training.run import allocator

seen = []
def training(recipe, passkeys):
    seen.append([os.environ.get("PYTORCH_ALLOC_CONF"), allocator.describe(), "torch" in sys.modules])
    return False

sys.modules["pod.training.run.start"] = types.ModuleType("start")
sys.modules["pod.training.run.start"].train = training
train.note_on_data = lambda recipe: None
train.make_passkeys = lambda recipe: []
train.check_export = lambda recipe: None
for case in json.loads(sys.argv[1]):
    allocator._said = ""
    before = dict(os.environ)
    os.environ.update(case)
    train.main(None)
    train.main(None)
    os.environ.clear()
    os.environ.update(before)
allocator._said = ""
sys.modules["torch"] = None
train.main(None)
print(json.dumps(seen))
"""


def test_a_training_sets_the_allocator_before_torch_is_imported(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    cases = json.dumps([case for case, *_ in CASES])
    done = subprocess.run([sys.executable, "-c", SCRIPT, cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    expected = [[value, said, False] for _, value, said in CASES for _ in range(2)]
    assert seen[:-1] == expected
    assert seen[-1][0] is None and seen[-1][1].startswith("PyTorch's default: torch was imported before")
