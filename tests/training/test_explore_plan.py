"""launch/explore.py with measured costs and refinement: what decides, what is measured again, ranks, interruptions."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.sharing import SharingPlan
from pod.models import resolve_model
from pod.recipe import load_recipe, run
from pod.training import explore_plan
from pod.training.plan_costs import PlanCosts, combined_cost
from pod.training.planning import least_cost_plan
from pod.training.refine import PlanLoss

LAUNCHER = Path(__file__).parents[2] / "launch" / "explore.py"
REFINED = ["explore.refine_evaluations=14", "explore.refine_sequences=2", "explore.refine_proposals=2"]


@pytest.fixture
def overrides(explore_overrides):
    windows = ["model.num_sink_tokens=2", "model.num_recent_tokens=5"]
    return [*explore_overrides, *windows, "explore.target_saving=0.25", "explore.cost=projected"]


def plan_and_costs(tmp_path):
    folder = tmp_path / "run" / "plan"
    return SharingPlan.load(folder / "plan.json"), PlanCosts.load(folder / "plan_costs.safetensors")


def refuse(*args, **kwargs):
    raise AssertionError("measured again")


def test_the_cost_decides_and_serves_again(explore_launcher, overrides, tmp_path, monkeypatch, capsys):
    explore_launcher.main(load_recipe(None, overrides))
    plan, costs = plan_and_costs(tmp_path)
    assert set(costs.values) == {"distant", "output", "projected"}
    assert all(value.shape == (4, 4, 2) and value.max() > 0 for value in costs.values.values())
    assert plan.lead == least_cost_plan(costs.values["projected"], 0.25).lead
    assert plan.provenance["cost"] == "projected" and plan.provenance["num_recent_tokens"] == 5
    assert plan.provenance["model"] == "package:tiny" and len(plan.provenance["tokens_sha256"]) == 64
    assert "dp at target saving 25.0% by cost projected" in capsys.readouterr().out
    assert (tmp_path / "run" / "plan" / "costs.png").stat().st_size > 10_000
    monkeypatch.setattr(explore_plan, "measure_pair_costs", refuse)
    explore_launcher.main(
        load_recipe(None, [*overrides, "explore.cost=distant", "explore.target_saving=0.125"])
    )
    assert plan_and_costs(tmp_path)[0].lead == least_cost_plan(costs.values["distant"], 0.125).lead


@pytest.mark.parametrize(
    "change", ["explore.cost=loss", "model.num_recent_tokens=9", "explore.num_queries=4"]
)
def test_other_windows_and_missing_costs_are_measured_again(
    explore_launcher, overrides, tmp_path, change, capsys
):
    explore_launcher.main(load_recipe(None, overrides))
    old = plan_and_costs(tmp_path)[1]
    explore_launcher.main(load_recipe(None, [*overrides, change]))
    assert "plan costs: " in capsys.readouterr().out
    new = plan_and_costs(tmp_path)[1]
    assert ("loss" in new.values) == (change == "explore.cost=loss")
    same = bool((old.values["output"] == new.values["output"]).all())
    assert same == (change == "explore.cost=loss")
    assert len(list((tmp_path / "run" / "plan").glob("plan_costs-*.safetensors"))) == 1


def test_retrieval_is_measured_beside_the_text_and_weighs_the_same(
    explore_launcher, overrides, tmp_path, capsys
):
    explore_launcher.main(load_recipe(None, overrides))
    alone = plan_and_costs(tmp_path)[1].values
    explore_launcher.main(load_recipe(None, [*overrides, "explore.retrieval_sequences=2"]))
    assert "differs in retrieval_sequences" in capsys.readouterr().out
    plan, costs = plan_and_costs(tmp_path)
    values = costs.values
    assert set(values) == {
        name + end for name in ("distant", "output", "projected") for end in ("", "_retrieval")
    }
    assert all((values[name] == alone[name]).all() for name in alone)
    text, retrieval = values["projected"], values["projected_retrieval"]
    assert not (text == retrieval).all()
    both = combined_cost(values, "projected")
    assert ((both - text).sum() / text.sum()).item() == pytest.approx(1, rel=1e-12)
    assert (both - text - retrieval * (text.sum() / retrieval.sum())).abs().max() <= 1e-15
    assert plan.lead == least_cost_plan(both, 0.25).lead


def test_retrieval_sequences_repeat_ordinary_tokens(overrides):
    recipe = load_recipe(None, [*overrides, "explore.retrieval_sequences=2", "explore.sequence_length=50"])
    exploration = explore_plan.Exploration(
        Path("unused"),
        {"gguf_file": None, "seed": 5},
        resolve_model("package:tiny"),
        {},
        recipe.explore,
        recipe.data,
    )
    config = PodConfig(vocab_size=300, max_position_embeddings=64)
    first, second = exploration.repeated(config)
    assert first.shape == (48,) and not (first == second).all()  # 12 tokens, four times
    assert (first.view(4, 12) == first[:12]).all() and len(set(first.tolist())) == 12
    assert exploration.repeated(config)[0].tolist() == first.tolist()


def test_an_interrupted_measurement_continues(explore_launcher, overrides, tmp_path, monkeypatch):
    measure, calls = explore_plan.measure_pair_costs, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(explore_plan, "measure_pair_costs", interrupted)
    recipe = load_recipe(None, [*overrides, "explore.save_every=1"])
    with pytest.raises(KeyboardInterrupt):
        explore_launcher.main(recipe)
    explore_launcher.main(recipe)
    assert len(calls) == 4  # the third sequence only
    cut = plan_and_costs(tmp_path)
    explore_launcher.main(load_recipe(None, [*overrides, f"output_dir={tmp_path / 'whole' / 'run'}"]))
    whole = plan_and_costs(tmp_path / "whole")
    assert cut[0] == whole[0]
    assert all((cut[1].values[name] == whole[1].values[name]).all() for name in whole[1].values)


def test_refinement_continues_where_it_was(explore_launcher, overrides, tmp_path, monkeypatch, capsys):
    explore_launcher.main(load_recipe(None, overrides))
    start = plan_and_costs(tmp_path)[0]
    measured, losses = [], PlanLoss.losses

    def interrupted(self, plan):
        if len(measured) == 6:
            raise KeyboardInterrupt
        measured.append(plan.lead)
        return losses(self, plan)

    monkeypatch.setattr(PlanLoss, "losses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        explore_launcher.main(load_recipe(None, [*overrides, *REFINED]))
    again = []
    monkeypatch.setattr(PlanLoss, "losses", lambda self, plan: again.append(plan.lead) or losses(self, plan))
    explore_launcher.main(load_recipe(None, [*overrides, *REFINED]))
    assert len(measured) == 6 and not set(measured) & set(again)
    plan = plan_and_costs(tmp_path)[0]
    refined = plan.provenance["refined"]
    assert plan.num_followers == start.num_followers and plan.provenance["refine_sequences"] == 2
    assert refined["loss_after"] <= refined["loss_before"] and refined["evaluations"] <= 14
    assert f"{refined['loss_before']:.4f} -> {refined['loss_after']:.4f}" in capsys.readouterr().out


def test_two_ranks_make_the_plan_of_one(explore_launcher, overrides, tmp_path):
    explore_launcher.main(load_recipe(None, [*overrides, *REFINED]))
    alone = (tmp_path / "run" / "plan" / "plan.json").read_text()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [*overrides, *REFINED, f"output_dir={tmp_path / 'ranks'}"]
    command = [sys.executable, str(LAUNCHER), *(part for item in ranks for part in ("--set", item))]
    outer = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=os.environ | outer | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    together = json.loads((tmp_path / "ranks" / "plan" / "plan.json").read_text())
    alone = json.loads(alone)
    assert together["lead"] == alone["lead"]
    for key in ("evaluations", "loss_before", "loss_after"):
        assert together["provenance"]["refined"][key] == alone["provenance"]["refined"][key]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["model.num_recent_tokens=46"], "a sequence of 48 tokens has 0 behind 2 sink and 46 recent tokens"),
        (["explore.algorithm=greedy"], "cost is 'projected', but algorithm=greedy"),
        (
            ["explore.cost=similarity", "explore.retrieval_sequences=2"],
            "with cost=similarity, which is measured on text",
        ),
        (["explore.retrieval_sequences=-1"], "retrieval_sequences is -1"),
        (["explore.refine_evaluations=-1"], "refine_evaluations is -1"),
        (["explore.cost=outputs"], "output"),
    ],
)
def test_bad_settings_are_one_line(explore_launcher, overrides, tmp_path, change, words, capsys):
    argv = [part for override in [*overrides, *change] for part in ("--set", override)]
    with pytest.raises(SystemExit) as ended:
        run(explore_launcher.main, sections=("model", "explore"), argv=argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and words in error
    assert not (tmp_path / "run" / "plan").exists()


def test_dry_run_names_the_cost_and_the_refinement(explore_launcher, overrides, capsys):
    argv = [part for override in [*overrides, *REFINED] for part in ("--set", override)]
    run(
        explore_launcher.main,
        sections=("model", "explore"),
        estimate=explore_launcher.estimate,
        extra_arguments=explore_launcher.shorthands,
        argv=[*argv, "--cost", "loss", "--dry-run"],
    )
    printed = capsys.readouterr().out
    assert "one more forward pass and one backward pass" in printed
    assert "up to 14 forward passes over 2 x 48 tokens" in printed
