"""Ranks that would not train the same thing: refused with one line, or brought to one layout."""

import os
from dataclasses import replace

import pytest
import torch
from test_layout_search import CONTEXT, LLAMA3_8B, PAPER, SHARED, machine

from pod.training.args import TrainRecipe
from pod.training.predict.layout_search import choose_layout
from pod.training.run import config_sync
from pod.training.run.config_sync import agree, agree_on_layout, least_machine, note_neighbours
from pod.training.run.mesh import join_ranks


@pytest.fixture(scope="module")
def alone():
    """One rank; what others say is put in by the tests."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


RECIPE = {"seed": 0, "train": {"max_steps": 3}, "model": {"path": "a"}}


def test_one_rank_agrees_with_itself_and_leaves_no_file(alone, tmp_path):
    agree(RECIPE, tmp_path / "train", {"the data": "x"})
    assert list((tmp_path / "train").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"the version of torch": "1.0"}, "rank 2 and rank 0 disagree on the version of torch"),
        ({"the recipe's train": "0" * 64}, "rank 2 and rank 0 disagree on the recipe's train:"),
        ({"the data": "y"}, "disagree on the data (x on rank 0, y on rank 2)"),
        ({"output_dir": "not seen"}, "rank 2 cannot see files of rank 0"),
    ],
)
def test_ranks_that_disagree_are_named(alone, tmp_path, monkeypatch, change, says):
    original = config_sync._gather

    def three(value):
        (mine,) = original(value)
        return [mine, mine, mine | change if isinstance(mine, dict) else mine]

    monkeypatch.setattr(config_sync, "_gather", three)
    with pytest.raises(ValueError, match="use the same|file system") as caught:
        agree(RECIPE, tmp_path, {"the data": "x"})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_that_share_a_machine_unknowingly_are_told(alone, monkeypatch, capsys):
    original = config_sync._gather
    monkeypatch.setattr(config_sync, "_gather", lambda mine: original(mine) * 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    note_neighbours()
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    note_neighbours()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "note: 2 ranks run on the machine of rank 0, but its launcher set LOCAL_WORLD_SIZE=1"
    )


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_are_no_world_of_one_each(monkeypatch, name):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        ValueError, match="mpirun started 2 processes .* deepspeed, torchrun or launch/slurm/"
    ):
        join_ranks()
    assert "RANK" not in os.environ


@pytest.mark.multiprocess
def test_two_processes_that_disagree_get_the_same_error(estimate_results):
    """Real ranks: facts of different lengths, a recipe that differs."""
    messages = {estimate_results[f"disagree_{rank}"]["error"] for rank in range(2)}
    assert len(messages) == 1
    assert "rank 1 and rank 0 disagree on the recipe's train: use the same recipe" in messages.pop()


def planned(machine):
    return choose_layout(TrainRecipe(**PAPER), LLAMA3_8B, SHARED, CONTEXT, machine)


@pytest.mark.slow
@pytest.mark.nightly
def test_unequal_machines_come_to_one_layout(monkeypatch):
    """Unequal machines come to one layout.

    Machines of 80 and 40 GB, and hosts that differ the other way round: each rank plans for 40 GB and the
    smaller host.
    """
    large = replace(machine(8), host_gib=1000)
    small = replace(machine(8, "a100-40gb"), host_gib=2000)
    assert planned(large).job != planned(small).job
    least = least_machine([large, small])
    assert (least.device.name, least.host_gib) == ("h100", 1000)
    assert least.device.memory_gib == small.device.memory_gib
    monkeypatch.setattr(config_sync, "_gather", lambda value: [large, small])
    agreed = [agree_on_layout(planned(one), TrainRecipe(**PAPER)) for one in (large, small)]
    assert agreed[0] == agreed[1] and agreed[0].fits and agreed[0].machine == least
    poor = replace(large, device=replace(large.device, memory_gib=1))
    monkeypatch.setattr(config_sync, "_gather", lambda value: [large, poor])
    with pytest.raises(config_sync.SameOnAllRanks, match="no layout fits"):
        agree_on_layout(planned(large), TrainRecipe(**PAPER))


def test_equal_machines_keep_what_was_planned(monkeypatch):
    layout = planned(machine(8))
    monkeypatch.setattr(config_sync, "_gather", lambda value: [value, value])
    assert agree_on_layout(layout, TrainRecipe(**PAPER)) is layout


@pytest.mark.multiprocess
def test_two_processes_of_unequal_machines_agree(estimate_results):
    """Real ranks: the second has a quarter of the memory, and alone would train in another layout."""
    results = [estimate_results[f"layout_{rank}"] for rank in range(2)]
    assert results[0]["alone"] != results[1]["alone"]
    assert results[0]["agreed"] == results[1]["agreed"]
