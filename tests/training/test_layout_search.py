"""The layout search: what it derives, keeps and refuses, on GPUs and on a CPU; nothing is allocated."""

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pod.commands.train import add_arguments
from pod.models import KNOWN_SIZES
from pod.training.args import TrainArgs, TrainRecipe
from pod.training.predict import layout_search
from pod.training.predict.layout_search import (
    DERIVED,
    FIT,
    NEAR,
    Machine,
    ParallelLayout,
    check_fits,
    choose_layout,
    details,
    layout_line,
    table,
    this_machine,
)
from pod.training.predict.memory_estimate import TrainingJob, World, start_bytes, training_bytes
from pod.training.predict.reserve import reserve
from pod.training.predict.shapes import Shapes
from pod.training.predict.step_time import get_device, step_time
from pod.training.run.optimization import learning_rate

LLAMA3_8B = Shapes.from_config(SimpleNamespace(**KNOWN_SIZES["meta-llama/Meta-Llama-3-8B"]))
SMALL = Shapes(
    hidden=576, layers=3, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=4096, tied=True
)
SHARED = tuple((layer - layer % 4,) * 8 for layer in range(32))
PAPER = {"total_tokens": 5_000_000_000, "tokens_per_step": 4 * 2**20, "warmup_ratio": 0.01}
CONTEXT = 32_768


def machine(ranks: int, device: str = "h100", host_gib: float | None = None) -> Machine:
    found = this_machine(ranks, min(ranks, 8), get_device(device))
    return found if host_gib is None else replace(found, host_gib=host_gib)


def large(ranks: int, device: str = "h100", host_gib: float | None = None, **settings) -> ParallelLayout:
    return choose_layout(
        TrainRecipe(**PAPER | settings), LLAMA3_8B, SHARED, CONTEXT, machine(ranks, device, host_gib)
    )


def small(ranks: int = 1, rows: int = 1, device: str = "h100", **settings) -> ParallelLayout:
    recipe = TrainRecipe(tokens_per_step=rows * 512, **settings)
    return choose_layout(
        recipe, SMALL, tuple((layer,) * 3 for layer in range(3)), 512, machine(ranks, device)
    )


def refused(call, *arguments, **settings) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def layouts() -> dict[int, ParallelLayout]:
    """The paper's run on 2 to 32 GPUs."""
    return {ranks: large(ranks) for ranks in (2, 4, 8, 16, 32)}


def test_the_same_recipe_trains_the_same_on_any_ranks(layouts):
    assert {layout.job.rows_per_step for layout in layouts.values()} == {128}
    assert {layout.job.args.max_steps for layout in layouts.values()} == {1192}
    rates = [[learning_rate(step, layout.job.args) for step in range(1192)] for layout in layouts.values()]
    assert all(one == rates[0] for one in rates)
    assert rates[0].index(max(rates[0])) == 11 and rates[0][-1] == pytest.approx(1e-6)


def test_the_same_rows_in_the_same_order_on_1_to_32_ranks():
    from pod.data.rows.order import RowCursor

    def steps(ranks: int, size: int | None) -> list[list[int]]:
        layout = small(ranks, rows=32, sequence_parallel_size=size)
        groups = ranks // layout.job.args.sequence_parallel_size
        cursor, seen = RowCursor(200, seed=3), []
        for _ in range(3):
            dealt = [cursor.peek(layout.job.rows_per_step, rank, groups) for rank in range(groups)]
            seen.append(sorted(int(row) for rows in dealt for row in rows))
            cursor.take(layout.job.rows_per_step)
        return seen

    expected = steps(1, None)
    assert all(len(set(rows)) == 32 for rows in expected)
    for ranks in (2, 4, 8, 16, 32):
        assert steps(ranks, None) == steps(ranks, 2) == expected


def test_layouts_fit_and_are_resolved(layouts):
    for layout in layouts.values():
        assert layout.fits and 0.3 < layout.share <= FIT
        assert all(getattr(layout.job.args, name) is not None for name in DERIVED)
        check_fits(layout)


@pytest.mark.parametrize("gib", [80, 40, 24])
@pytest.mark.slow
def test_no_layout_that_fits_is_clearly_faster(gib):
    recipe, layout = TrainRecipe(**PAPER), large(8, f"h100,memory_gib={gib}")
    for split in layout_search.row_splits(recipe, LLAMA3_8B, CONTEXT, 8):
        for settings in layout_search.memory_settings(recipe, SHARED, layout.machine):
            args = TrainArgs(**PAPER | split | settings | {"max_steps": 1192})
            job = TrainingJob(LLAMA3_8B, SHARED, args, CONTEXT, World(8, 8))
            if step_time(job, layout.machine.device).expected * NEAR < layout.time.expected:
                kept = sum(reserve(args, job.world, has_gpu=True).values())
                assert sum(training_bytes(job).values()) + kept > FIT * gib * 2**30


def test_a_start_that_does_not_fit_is_told_by_its_own_size(layouts, monkeypatch):
    """A start that does not fit is told by its own size.

    Where the start needs more than a step, the refusal names what it needs and not the step's peak, which
    would fit.
    """
    layout = layouts[8]
    monkeypatch.setattr(layout_search, "start_bytes", lambda job: 100 * 2**30)
    with pytest.raises(ValueError, match=r"needs 100\.0 of \d+\.\d usable GiB per rank"):
        check_fits(layout)
    assert "memory  100.00 + " in table(layout, None)


def test_the_same_layout_every_time(layouts):
    assert large(8).job == layouts[8].job


@pytest.mark.slow
def test_less_memory_costs_time_and_never_more_than_there_is():
    times = []
    for gib in (141, 80, 48, 40):
        layout = large(8, f"h100,memory_gib={gib}")
        assert layout.fits and sum((layout.memory | layout.reserve).values()) <= FIT * gib * 2**30
        times.append(layout.time.expected)
    assert times == sorted(times) and times[0] < times[-1]


def test_the_bound_of_memory_is_kept_to_the_byte():
    """The bound of memory is kept to the byte.

    A device that holds the layout and the reserve to 95 % takes it; one of a megabyte less takes another.
    """
    whole = small(device="h100")
    needed = sum((whole.memory | whole.reserve).values()) / 2**30 / FIT
    layouts, less = (small(device=f"h100,memory_gib={needed + change:.6f}") for change in (1e-3, -1e-3))
    assert layouts.job == whole.job and whole.job.args.gradient_checkpointing == "none"
    assert less.job != whole.job and less.fits


def test_the_start_counts_too(monkeypatch):
    """The start counts too: a start that does not fit is no layout.

    It is one weight beside a rank's share, and below stage 3 a flat copy.
    """
    three, one = large(8, zero_stage=3, offload_optimizer="cpu").job, large(8, zero_stage=1).job
    head, whole = 2 * LLAMA3_8B.embedding_parameters, 2 * LLAMA3_8B.parameters
    assert start_bytes(three) == pytest.approx(whole / 8 + head, rel=0.01), "the output projection comes last"
    tied = replace(three, shapes=replace(LLAMA3_8B, tied=True))
    many = replace(tied, world=World(1024, 8))
    assert start_bytes(many) == head, "an embedding comes first, beside nothing"
    # weights and sums of gradients whole, master weights, moments and the update's gradients divided
    assert start_bytes(one) == pytest.approx((2 + 4 + 16 / 8) * LLAMA3_8B.parameters, rel=0.01)
    layout = large(8)
    needed = (100 + sum(layout.reserve.values()) / 2**30) / FIT
    monkeypatch.setattr(layout_search, "start_bytes", lambda job: 100 * 2**30)
    bounds = [
        replace(layout, machine=machine(8, f"h100,memory_gib={needed + more:.4f}")) for more in (0.01, -0.01)
    ]
    assert [one.fits for one in bounds] == [True, False]


def test_what_is_offloaded_fits_into_the_machine():
    """One GPU holds the optimizer of 8 billion weights only in host memory."""
    layout = large(1)
    assert layout.job.args.offload_optimizer == "cpu" and layout.fits
    assert 20 * LLAMA3_8B.parameters < layout.host["optimizer"] < 21 * LLAMA3_8B.parameters
    poor = large(1, host_gib=100)
    assert not poor.fits
    assert "GiB of host memory" in refused(check_fits, poor)


def test_nothing_is_moved_or_divided_without_need():
    args = small(4, rows=4).job.args
    assert (args.gradient_checkpointing, args.shared_qk, args.mlp_tile_tokens) == ("none", "keep", 0)
    assert (args.sequence_parallel_size, args.zero_stage, args.micro_batch_size) == (1, 1, 1)
    assert (args.offload_optimizer, args.offload_parameters, args.offload_checkpoints) == (
        "none",
        "none",
        False,
    )


def test_one_row_is_shared_by_all_ranks():
    assert small(2, rows=1).job.args.sequence_parallel_size == 2


PINS = {
    "sequence_parallel_size": 2,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "zero_stage": 2,
    "gradient_checkpointing": "full",
    "shared_qk": "recompute",
    "mlp_tile_tokens": 100,
    "offload_checkpoints": True,
    "offload_optimizer": "cpu",
    "offload_parameters": "cpu",
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_pinned_field_is_kept_and_marked(name):
    layout = small(4, rows=32, **{name: PINS[name]})
    assert getattr(layout.job.args, name) == PINS[name]
    assert layout.pinned == {name}
    assert layout_line(layout).count("*") == 1


def test_one_rank_is_one():
    assert "1 rank = 1 data parallel x 1 sequence parallel" in layout_search.table(small(1), None)
    assert "2 ranks = " in layout_search.table(small(2, rows=2), None)


def test_all_fields_can_be_pinned():
    """2 groups x 4 rows x 4 micro-batches = 32 rows."""
    pins = PINS | {"gradient_accumulation_steps": 4, "zero_stage": 3}
    args = small(4, rows=32, **pins).job.args
    assert {name: getattr(args, name) for name in DERIVED} == pins


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"micro_batch_size": 3},
         "train.micro_batch_size is 3, but 32 rows of 512 tokens per step on 4 ranks "
         "allow only 1, 2, 4, 8, 16, 32"),
        ({"sequence_parallel_size": 1, "gradient_accumulation_steps": 3},
         "gradient_accumulation_steps is 3, but 32 rows of 512 tokens per step on 4 ranks allow only 1, 2, "
         "4, 8: use one of these, or null"),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 8},
         "gradient_accumulation_steps is 8, but 32 rows"),
        ({"sequence_parallel_size": 3},
         "4 ranks cannot form groups of sequence_parallel_size 3: use 1, 2, 4"),
    ],
)  # fmt: skip
def test_a_pin_that_cannot_hold_is_refused_with_what_can(settings, says):
    assert says in refused(small, 4, rows=32, **settings)


def test_ranks_rows_and_heads_that_do_not_meet_are_refused():
    assert small(4, rows=3).job.args.sequence_parallel_size == 4
    assert "3 rows of 512 tokens per step cannot be split over 16 ranks" in refused(small, 16, rows=3)
    assert "1 rows of 512 tokens per step cannot be split over 16 ranks" in refused(small, 16, rows=1)
    assert "every rank needs a query head; use a size from 1 to 9" in refused(
        small, 16, 1, sequence_parallel_size=16
    )
    assert "a multiple of the row length, 512 tokens: the nearest are 512, 1,024" in refused(
        choose_layout, TrainRecipe(tokens_per_step=700), SMALL, ((0,) * 3,), 512, machine(1)
    )
    assert "one step takes 1,024 tokens" in refused(small, 1, rows=2, total_tokens=1000)


def test_what_fits_nowhere_says_what_would_help():
    pinned = large(8, zero_stage=1, offload_optimizer="none")
    message = refused(check_fits, pinned)
    assert (
        "of 65.0 usable GiB per rank (95% of h100, less a reserve of 5.8): use more ranks, shorter rows or "
        "train.method=lora" in message
    )
    assert "remove these settings from the recipe: offload_optimizer=none, zero_stage=1" in message
    assert "DOES NOT FIT" in table(pinned, None)
    assert "remove these settings" not in refused(check_fits, large(1, "rtx4090"))


def test_steps_come_from_one_place():
    assert TrainRecipe().steps(512) == 100
    assert TrainRecipe(total_tokens=10_000, tokens_per_step=1024).steps(512) == 9
    both = TrainRecipe(total_tokens=10_000, tokens_per_step=1024, max_steps=5, warmup_ratio=0.9)
    assert both.steps(512) == 5
    said = table(small(max_steps=5, total_tokens=10_000), 5 * 512)
    assert "5 steps (max_steps; total_tokens is not used)" in said
    assert "2,560 tokens of 2,560 = 1.00 epochs\n" in said
    assert "2,560 tokens of 1,280 = 2.00 epochs (data not prepared yet)" in table(
        small(max_steps=5), None, 1280
    )


def test_the_time_of_a_short_run_is_told_in_minutes():
    layout = small(device="h100,bf16_tflops=0.001", max_steps=8)
    least, most = (8 * seconds for seconds in (layout.time.overlapped, layout.time.sequential))
    assert 120 < most < 7200
    assert f"time    {least / 60:,.1f} to {most / 60:,.1f} minutes on h100" in table(layout, None)
    often = small(device="h100,bf16_tflops=0.01", max_steps=8, save_every_steps=2)
    assert 0.5 < 2 * often.time.expected < 120
    assert f"at most {2 * often.time.expected:,.0f} seconds of work" in table(often, None)
    assert layout_search.range_of_time(3600, 7200) == "1.0 to 2.0 hours"
    assert layout_search.range_of_time(0.5, 3) == "0.5 to 3.0 seconds"


@pytest.mark.parametrize("value", ["0", "-4", "two", "1.5"])
@pytest.mark.parametrize("option", ["--ranks", "--ranks-per-node"])
def test_ranks_of_a_dry_run_are_whole_numbers_from_one(option, value, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([option, "8"])
    with pytest.raises(SystemExit):
        parser.parse_args([f"{option}={value}"])
    assert f"{option}: {value!r} is not allowed: give a whole number of at least 1" in capsys.readouterr().err


def test_the_table_says_what_a_kill_can_lose():
    recipe = {"tokens_per_step": 2**22, "total_tokens": 2**32}
    assert "at most 30 minutes of work between two checkpoints\n" in table(large(8, **recipe), None) + "\n"
    layout = large(8, save_every_steps=100, **recipe)
    hours = 100 * layout.time.expected / 3600
    assert (
        f"at most {hours:,.1f} hours of work between two checkpoints; save_every_steps=null saves every 30"
        in table(layout, None)
    )
    slow = table(
        large(8, "h100,bf16_tflops=0.1", **recipe), None
    )  # a step of hours is saved, whatever is set
    assert "hours of work between two checkpoints" in slow and "save_every_steps=null" not in slow
    never = large(8, save_every_steps=0, **recipe)
    assert f"at most {1024 * never.time.expected / 3600:,.1f} hours" in table(never, None)


def test_on_a_cpu_ranks_share_the_machine_and_nothing_is_offloaded(monkeypatch):
    monkeypatch.setattr(layout_search, "host_memory_bytes", lambda: 8 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = this_machine(2, 2)
    assert (cpu.device.memory_gib, cpu.has_gpu) == (4, False)
    recipe = TrainRecipe(tokens_per_step=2048)
    layout = choose_layout(recipe, SMALL, ((0,) * 3,) * 3, 2048, cpu)
    assert layout.job.args.sequence_parallel_size == 2 and layout.host == {}
    tried = list(layout_search.memory_settings(recipe, ((0,) * 3,) * 3, cpu))
    assert {one["offload_optimizer"] for one in tried} == {"none"} and {
        one["shared_qk"] for one in tried
    } == {
        "keep",
        "recompute",
    }
    monkeypatch.setattr(layout_search, "host_memory_bytes", lambda: 2**20)
    assert "of 0.0 usable GiB per rank (92% of cpu)" in refused(
        check_fits, choose_layout(recipe, SMALL, ((0,) * 3,) * 3, 2048, this_machine(2, 2))
    )


def test_a_cpu_without_bfloat16_says_so_and_its_time_is_that(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said, seconds = [], []
    for speed, dtype in ((0.1, "bfloat16"), (0.1, "float32"), (3.0, "bfloat16")):
        monkeypatch.setattr(layout_search, "bfloat16_speed", lambda speed=speed: speed)
        layout = choose_layout(
            TrainRecipe(tokens_per_step=2048, dtype=dtype), SMALL, ((0,) * 3,) * 3, 2048, this_machine(1, 1)
        )
        said.append("train.dtype=float32" in table(layout, None))
        seconds.append(layout.time.parts["arithmetic"])
    assert said == [True, False, False]
    assert seconds[0] == pytest.approx(10 * seconds[1]) and seconds[2] < seconds[1]


def test_a_gpu_is_known_by_its_name_and_has_the_memory_it_says(monkeypatch):
    found = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=79 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    there = this_machine()
    assert (there.device.memory_gib, there.device.bf16_tflops, there.world) == (79, 312, World(4, 2))
    found.name = "NVIDIA Something"
    assert this_machine().device.memory_gib == 79


def test_dropout_of_adapters_is_never_drawn_anew():
    recipe = TrainRecipe(method="lora", lora_dropout=0.1)
    tried = layout_search.memory_settings(recipe, SHARED, machine(1))
    assert {one["shared_qk"] for one in tried} == {"keep", "offload"}


def test_the_table_says_what_a_plan_does_and_how_evenly():
    window = replace(LLAMA3_8B, query_heads=8)
    half = [(layer, None) * 4 for layer in range(32)]
    lead = ((0,) * 8, (0,) * 8, *half[2:])
    shares = {}
    for size in (1, 4, 8):
        recipe = TrainRecipe(tokens_per_step=8 * CONTEXT, sequence_parallel_size=size)
        text = details(choose_layout(recipe, window, lead, CONTEXT, machine(8)))
        assert "128 (layer, KV head) pairs lead, 8 follow, 120 keep their window" in text
        shares[size] = float(text.split("the busiest rank computes ")[1].split(" x ")[0])
    assert shares[1] == shares[4] == 1.0
    every, near = CONTEXT * (CONTEXT + 1) / 2, CONTEXT * (CONTEXT + 1) / 2 - 28_672 * 28_673 / 2
    assert shares[8] == pytest.approx(32 * 8 * every / (136 * every + 120 * near), abs=0.005)


def test_the_table_of_hundreds_of_gpus():
    layout = large(256, "h200", tokens_per_step=2**25, sequence_parallel_size=4)
    text = table(layout, 5 * 10**9) + details(layout)
    assert "256 ranks on 32 machines = 64 data parallel x 4 sequence parallel" in text
    for part in ("fits", "sequence_parallel_size 4*", "all-to-all of heads", "per checkpoint", "epochs"):
        assert part in text
    with pytest.raises(ValueError, match="12 ranks do not fill machines of 8"):
        this_machine(12, 8, get_device("h100"))
