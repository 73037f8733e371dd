"""`pod explore` with measured costs: what decides, what is measured again, ranks, interruptions."""

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plan_costs_at_random import WINDOWS, explore_args, random_costs
from plan_sums import sum_of_costs, units_of

from pod.commands import explore
from pod.modeling.model.config import PodConfig
from pod.modeling.model.sharing import SharingPlan
from pod.models import resolve_model
from pod.plan import measured_costs as measure_module
from pod.plan.choose import choose, head_order, plan_loss
from pod.plan.costs import cost_shapes, total_costs
from pod.plan.exploration import Exploration, window_alone
from pod.plan.measured_costs import MeasuredCosts
from pod.plan.plan_report import pareto
from pod.plan.solve import solve
from pod.plan.together import Plans
from pod.recipe import load_recipe, run

WRITTEN = {
    "plan.json", "plan_costs.safetensors", "pareto.json", "summary.txt",
    "blocks.png", "pareto.png", "rounds",
}  # fmt: skip


@pytest.fixture
def overrides(explore_overrides):
    windows = ["model.num_sink_tokens=2", "model.num_recent_tokens=5"]
    return [*explore_overrides, *windows, "explore.target_saving=0.4", "explore.loss_sequences=2"]


def plan_and_costs(tmp_path):
    folder = tmp_path / "run" / "plan"
    return SharingPlan.load(folder / "plan.json"), MeasuredCosts.load(folder / "plan_costs.safetensors")


def refuse(*args, **kwargs):
    raise AssertionError("measured again")


@pytest.mark.parametrize("roles", ["follow,window", "follow", "window"])
def test_without_alignment_the_plan_is_the_solvers(roles):
    costs = random_costs()
    explore = explore_args(
        roles=roles, target_saving=0.3, budget_length=28, align_heads=False, retrieval_weight=0.5
    )
    choice = choose(costs, explore, WINDOWS)
    total = {
        name: (costs.tensors[name] + 0.5 * costs.tensors[f"{name}_retrieval"]).numpy()
        for name in cost_shapes(1, 1)
    }
    follow = total["in_place"] if "follow" in roles else None
    window = window_alone(total["windows"]) if "window" in roles else None
    units = 12  # 0.3 of 28 tokens of which 21 are distant, of 5 x 3 pairs
    expected = solve(follow, window)
    assert choice.plan.lead == expected.plan(units).lead and choice.plan.head_order is None
    assert choice.plan.saving(28, **WINDOWS) == pytest.approx(0.3)
    found = choice.plan.provenance
    assert (
        found["plan_cost"]
        == pytest.approx(expected.costs[units])
        == sum_of_costs(choice.plan, follow, window)
    )
    assert (found["retrieval_weight"], found["target_saving"], found["budget_length"]) == (0.5, 0.3, 28)
    if roles == "follow,window":
        assert found["plan_cost_without_follow"] == pytest.approx(solve(None, window).costs[units])
        assert found["plan_cost_without_window"] == pytest.approx(solve(follow, None).costs[units])
    else:
        assert not choice.without


def test_an_aligned_plan_costs_what_its_pairs_cost_and_stands_in_their_order():
    """The plan's cost again, from the original tensors and the order that it names."""
    costs = random_costs()
    explore = explore_args(target_saving=0.35, budget_length=0)
    choice = choose(costs, explore, WINDOWS)
    plan = choice.plan
    assert plan.head_order is not None and plan.num_followers > 1
    query = np.array(plan.head_order)
    head = query[:, ::2] // 2
    total = total_costs(costs.tensors, 1.0)
    expected, turned = 0.0, 0
    for layer, row in enumerate(plan.lead):
        for place, lead in enumerate(row):
            inside = (query[layer, 2 * place : 2 * place + 2] % 2).tolist()
            if lead is None:
                expected += window_alone(total["windows"])[layer, head[layer, place]]
            elif lead != layer:
                pair = lead, layer, head[lead, place], head[layer, place]
                expected += total["follow"][pair]
                assert inside == costs.tensors["order"][pair].tolist()
                turned += inside == [1, 0]
            else:
                assert inside == [0, 1]
    assert turned
    assert plan.provenance["plan_cost"] == pytest.approx(expected, rel=1e-12)
    straight = choose(costs, explore_args(target_saving=0.35, budget_length=0, align_heads=False), WINDOWS)
    assert expected < straight.plan.provenance["plan_cost"]
    for role in ("follow", "window"):
        assert plan.provenance[f"plan_cost_without_{role}"] >= expected


def test_heads_that_stay_give_no_order_and_forbidden_roles_may_not_reach():
    order = torch.arange(2).expand(3, 3, 2, 2, 2)
    plan = SharingPlan(lead=[[0, 0], [0, 1], [0, None]])
    straight = ((0, 1, 2, 3),) * 3
    assert head_order(plan, ((0, 1),) * 3, order) == straight and replace(plan, head_order=straight) == plan
    assert head_order(plan, ((0, 1), (1, 0), (0, 1)), order) == ((0, 1, 2, 3), (2, 3, 0, 1), (0, 1, 2, 3))
    plans = Plans(solve(None, np.array([[0.5], [0.25]])))
    assert [plans.cost_of(units, 2) for units in range(6)] == [0, 0.25, 0.25, 0.75, 0.75, None]


def cost_of_plan(plan, total):
    """The cost of a plan's roles and bits; `total` is from `total_costs`."""
    bits = plan.bits or [16] * len(plan.lead)
    cost = 0.0
    for layer, row in enumerate(plan.lead):
        for head, lead in enumerate(row):
            cost += cost_of_pair(total, lead, layer, head, bits[layer])
    return cost


def cost_of_pair(total, lead, layer, head, bits):
    if lead is None:
        return window_alone(total["windows"])[layer, head]
    if lead == layer:
        return total["lead4"][layer, head] if bits == 4 else 0.0
    cost = total["in_place"][lead, layer, head]
    if bits == 4:
        cost += total["follow4"][layer, head]
    return cost


def test_bits_are_chosen_with_the_roles():
    """Bits are chosen with the roles.

    Many tokens, so that 4 bits save as much as they do in the limit. Packing costs little here and is taken
    first.
    """
    costs = random_costs()
    for name in ("lead4", "follow4"):
        costs.tensors[name] *= 0.01
    windows = {"num_sink_tokens": 4, "num_recent_tokens": 12}
    explore = explore_args(bits="16,4", target_saving=0.75, budget_length=100_000, retrieval_weight=0.5)
    plan = choose(costs, explore, windows).plan
    assert plan.bits is not None and plan.bits.count(4) >= 4 and plan.num_windows
    assert plan.saving(100_000, **windows) >= 0.75 - 0.01
    found = plan.provenance
    assert found["plan_cost"] < found["plan_cost_without_4_bits"]
    assert cost_of_plan(plan, total_costs(costs.tensors, 0.5)) == pytest.approx(found["plan_cost"])
    beyond = explore_args(bits="16,4", roles="follow", target_saving=0.45, budget_length=100_000)
    assert (
        choose(costs, replace(beyond, target_saving=0.7), windows).plan.provenance["plan_cost_without_4_bits"]
        is None
    )


def test_what_16_bits_cannot_save_exactly_costs_what_the_next_saving_costs():
    """What 16 bits cannot save exactly costs what the next saving costs.

    The plan saves between 28 and 29 halves of 15 pairs. In 16 bits 28 and 30 can be saved, and 29 cannot.
    """
    costs = random_costs()
    for name in ("lead4", "follow4"):
        costs.tensors[name] *= 0.01
    explore = explore_args(bits="16,4", target_saving=0.957, budget_length=100_000, retrieval_weight=0.0)
    choice = choose(costs, explore, {"num_sink_tokens": 4, "num_recent_tokens": 12})
    assert 28 < choice.units * 2 / choice.plans.curve.pair_units <= 29
    found = choice.plan.provenance["plan_cost_without_4_bits"]
    assert found == pytest.approx(costs.tensors["windows"].sum().item())


def test_the_curve_with_bits_says_what_its_plans_cost_and_what_forbidding_costs():
    costs = random_costs()
    explore = explore_args(
        bits="16,4", target_saving=0.6, budget_length=2048, retrieval_weight=0.0, align_heads=False
    )
    choice = choose(costs, explore, WINDOWS)
    curve = pareto(choice, explore, WINDOWS)
    total, points = total_costs(costs.tensors, 0.0), curve["points"]
    assert [x["cost"] for x in points] == sorted({x["cost"] for x in points}) and len(points) > 20
    for point in points:
        plan = choice.plan_at(point["units"])
        packed = [bits == 4 for bits in plan.bits or [16] * 5]
        assert point["packed_layers"] == [layer for layer in range(5) if packed[layer]]
        assert point["saving"] == plan.saving(2048, **WINDOWS)
        own = cost_of_plan(plan, total)
        assert point["cost"] == pytest.approx(own)
        assert set(point["cost_without"]) == {"follow", "window", "4_bits"}
        assert all(
            cost is None or cost >= own - 1e-12
            for name, cost in point["cost_without"].items()
            if name != "4_bits"
        )
    chosen = next(x for x in points if x["units"] == curve["chosen"]["units"])
    found = choice.plan.provenance
    assert chosen["cost"] == found["plan_cost"] and chosen["saving"] == choice.plan.saving(2048, **WINDOWS)
    for name, cost in chosen["cost_without"].items():
        assert cost == found[f"plan_cost_without_{name}"]
        if name == "4_bits":
            distant = 1 - sum(WINDOWS.values()) / 2048
            halves = math.ceil(2 * 15 * chosen["saving"] / distant)  # as many bytes in 16 bits
            assert cost == solve(total["in_place"], window_alone(total["windows"])).costs[halves:].min()
    assert points[-1]["saving"] > 0.95 and points[-1]["cost_without"]["window"] is None


@pytest.mark.parametrize("bits", ["[4]", "16,8", "16,4,4"])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"allowed are \[16\], or \[16, 4\]"):
        explore_args(bits=bits)


def test_explore_measures_chooses_and_writes(overrides, tmp_path, monkeypatch, capsys):
    explore.main(load_recipe(None, overrides))
    plan, costs = plan_and_costs(tmp_path)
    assert {path.name for path in (tmp_path / "run" / "plan").iterdir()} == WRITTEN
    shapes = cost_shapes(4, 2)
    assert {name: x.shape for name, x in costs.tensors.items() if name != "order"} == {
        n + e: shapes[n] for n in shapes for e in ("", "_retrieval")
    }
    assert all(costs.tensors[name].max() > 0 for name in ("windows", "follow", "in_place"))
    assert costs.tensors["lead4"].max() < 1e-9  # 48 tokens are too few to be packed
    assert units_of(plan) >= 7  # 0.4 of 48 tokens of which 41 are distant, of 4 x 2 pairs: 7.5
    found = plan.provenance
    assert found["cost"] == "nats" and found["num_recent_tokens"] == 5 and found["model"] == "package:tiny"
    assert len(found["tokens_sha256"]) == 64 and found["losses"]["sequences"] == 2
    printed = capsys.readouterr().out
    assert "dp by nats, target 40.0% at 48 tokens" in printed
    assert "without followers" in printed and "without windows" in printed
    assert (
        f"dense {found['losses']['dense']['text']:.4f}, plan {found['losses']['plan']['text']:.4f}" in printed
    )
    curve = json.loads((tmp_path / "run" / "plan" / "pareto.json").read_text())
    assert curve["chosen"]["units"] == units_of(plan) and curve["points"][0]["cost"] == 0
    point = next(x for x in curve["points"] if x["units"] == units_of(plan))
    assert point["cost"] == min(x["cost"] for x in curve["points"] if 8 <= x["units"] <= 12)
    assert point["cost"] == found["plan_cost"] and point["windows"] == plan.num_windows
    assert point["cost_without"]["follow"] == found["plan_cost_without_follow"]
    for name in ("measure_costs", "measure_query_head_errors"):
        monkeypatch.setattr(measure_module, name, refuse)
    changes = ["explore.target_saving=0.2", "explore.retrieval_weight=3", "explore.align_heads=false"]
    explore.main(load_recipe(None, [*overrides, *changes]))
    total = total_costs(costs.tensors, 3.0)
    frontier = solve(total["in_place"], window_alone(total["windows"]))
    plans = Plans(frontier, total["windows"])
    assert plan_and_costs(tmp_path)[0].lead == plans.at(plans.cheapest(4))[0].lead


def test_measured_losses_are_those_of_a_model_with_the_plan(overrides, tmp_path):
    """MeasuredCosts losses are those of a model with the plan.

    The model is loaded from plan.json with its order of heads, by ordinary forward passes. The dense loss is
    by the original weights.
    """
    import pod

    recipe = load_recipe(None, [*overrides, "model.dtype=float64", "explore.target_saving=0.5"])
    explore.main(recipe)
    plan, _ = plan_and_costs(tmp_path)
    assert plan.num_windows
    exploration = Exploration(
        tmp_path,
        {"gguf_file": None, "seed": 0},
        resolve_model("package:tiny"),
        WINDOWS,
        recipe.explore,
        tmp_path / "no data",
    )
    for name, given in (("dense", None), ("plan", plan)):
        model = pod.load_model(resolve_model("package:tiny"), plan=given, dtype=torch.float64, **WINDOWS)
        text = exploration.read()
        prompts = measure_module.needle_prompts_of(exploration, model.config, text, held_out=True)
        measured = measure_module.needle_prompts_of(exploration, model.config, text)
        assert not {tuple(x.input_ids.tolist()) for x in prompts} & {
            tuple(x.input_ids.tolist()) for x in measured
        }
        assert torch.equal(prompts[0].input_ids[:2], text[-1][:2]), (
            "of the last texts, which rounds read last"
        )
        kinds = {
            "text": [model(row[None], labels=row[None]).loss.item() for row in text[-2:]],
            "retrieval": [loss_of_answers(model, prompt) for prompt in prompts],
        }
        for kind, losses in kinds.items():
            assert plan.provenance["losses"][name][kind] == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def loss_of_answers(model, prompt):
    """The mean loss of the answers of a prompt, in nats per token."""
    logits = model(prompt.input_ids[None]).logits[0, prompt.answers]
    return torch.nn.functional.cross_entropy(logits, prompt.input_ids[prompt.answers + 1]).item()


@pytest.mark.slow
@torch.no_grad()
def test_the_measured_loss_of_a_packed_plan_is_that_of_decoding_through_its_cache(
    overrides, tmp_path, capsys
):
    """Token by token, from plan.json; 224 tokens, of which the last ones see 96 packed ones."""
    import pod

    changes = ["model.dtype=float64", "explore.sequence_length=224", "explore.bits=[16,4]"]
    changes += ["explore.budget_length=100000", "explore.target_saving=0.7", "explore.retrieval_sequences=1"]
    recipe = load_recipe(None, [*overrides, *changes])
    explore.main(recipe)
    plan, _ = plan_and_costs(tmp_path)
    assert plan.bits.count(4) > 1
    model = pod.load_model(resolve_model("package:tiny"), plan=plan, dtype=torch.float64, **WINDOWS)
    settings = {"gguf_file": None, "seed": 0}
    exploration = Exploration(
        tmp_path, settings, resolve_model("package:tiny"), WINDOWS, recipe.explore, tmp_path / "no data"
    )
    losses = []
    for row in exploration.read()[-2:]:
        cache = pod.make_cache(model, "pod")
        steps = [model(row[None, i : i + 1], past_key_values=cache).logits[0, -1] for i in range(223)]
        losses.append(torch.nn.functional.cross_entropy(torch.stack(steps), row[1:]).item())
    found = plan.provenance["losses"]["plan"]["text"]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    alone = plan_loss(model, replace(plan, bits=None), exploration.read()[-2:])
    assert abs(found - alone) > 1e-7
    assert "with 16 bits in every layer" in capsys.readouterr().out
    curve = json.loads((tmp_path / "run" / "plan" / "pareto.json").read_text())
    chosen = next(x for x in curve["points"] if x["units"] == curve["chosen"]["units"])
    assert chosen["packed_layers"] == [layer for layer, bits in enumerate(plan.bits) if bits == 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["model.num_recent_tokens=9", "explore.num_queries=4", "explore.retrieval_sequences=1"]
)
def test_other_settings_of_measuring_measure_again_and_keep_the_file(overrides, tmp_path, change, capsys):
    explore.main(load_recipe(None, overrides))
    old = plan_and_costs(tmp_path)[1]
    explore.main(load_recipe(None, [*overrides, change]))
    assert f"differs in {change.split('.')[1].split('=')[0]}" in capsys.readouterr().out
    new = plan_and_costs(tmp_path)[1]
    name = "windows_retrieval" if "retrieval" in change else "follow" if "queries" in change else "windows"
    assert not torch.equal(old.tensors[name], new.tensors[name])
    (kept,) = (tmp_path / "run" / "plan").glob("plan_costs-*.safetensors")
    assert torch.equal(MeasuredCosts.load(kept).tensors[name], old.tensors[name])


def test_costs_of_shorter_prompts_are_measured_again(overrides, tmp_path, capsys):
    recipe = load_recipe(None, overrides)
    explore.main(recipe)
    path = tmp_path / "run" / "plan" / "plan_costs.safetensors"
    costs = MeasuredCosts.load(path)
    del costs.provenance["prompts"]
    costs.save(path)
    explore.main(recipe)
    assert "differs in prompts from the recipe: it is measured again" in capsys.readouterr().out


def test_costs_of_an_old_schema_are_one_line(overrides, tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "run" / "plan").mkdir(parents=True)
    path = tmp_path / "run" / "plan" / "plan_costs.safetensors"
    save_file({"projected": torch.zeros(4, 4, 2)}, path, metadata={"schema": "1", "provenance": "{}"})
    with pytest.raises(ValueError, match="of schema 2 .*schema is 1.* delete it and measure again") as seen:
        explore.main(load_recipe(None, overrides))
    assert "\n" not in str(seen.value)


def test_retrieval_sequences_repeat_ordinary_tokens(overrides):
    recipe = load_recipe(None, [*overrides, "explore.sequence_length=50"])
    settings = {"gguf_file": None, "seed": 5}
    exploration = Exploration(
        Path("unused"), settings, resolve_model("package:tiny"), {}, recipe.explore, Path("unused")
    )
    config = PodConfig(vocab_size=300, max_position_embeddings=64)
    first, second = measure_module.repeated_sequences(exploration, config)
    assert first.shape == (48,) and not (first == second).all()  # 12 tokens, four times
    assert (first.view(4, 12) == first[:12]).all() and len(set(first.tolist())) == 12
    assert measure_module.repeated_sequences(exploration, config)[0].tolist() == first.tolist()


def test_a_plan_without_a_lead_is_told(overrides, tmp_path, capsys):
    """Windows of 7 of 60 tokens save 88.3 %: to save 88 %, no head may keep more."""
    explore.main(load_recipe(None, [*overrides, "explore.target_saving=0.88", "explore.budget_length=60"]))
    out = capsys.readouterr().out
    assert "roles of 8 (layer, KV head) pairs: 0 lead, 0 follow, 8 keep their window" in out
    assert (
        "note: no head keeps distant tokens: the target needs every window at 60 tokens; "
        "lower explore.target_saving or "
        "model.num_recent_tokens, or raise explore.sequence_length or explore.budget_length\n"
    ) in out
    explore.main(load_recipe(None, [*overrides, "explore.budget_length=60"]))
    assert "no head keeps distant tokens" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_measurement_continues(overrides, tmp_path, monkeypatch):
    measure, calls = measure_module.measure_costs, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(measure_module, "measure_costs", interrupted)
    recipe = load_recipe(None, [*overrides])
    with pytest.raises(KeyboardInterrupt):
        explore.main(recipe)
    explore.main(recipe)
    assert len(calls) == 6  # the third sequence of text, and two of repeated tokens
    cut = plan_and_costs(tmp_path)
    explore.main(load_recipe(None, [*overrides, f"output_dir={tmp_path / 'whole' / 'run'}"]))
    whole = plan_and_costs(tmp_path / "whole")
    assert cut[0] == whole[0]
    assert all((cut[1].tensors[name] == whole[1].tensors[name]).all() for name in whole[1].tensors)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_ranks_make_the_plan_of_one(overrides, tmp_path):
    explore.main(load_recipe(None, [*overrides, "explore.loss_sequences=2"]))
    alone = (tmp_path / "run" / "plan" / "plan.json").read_text()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [*overrides, "explore.loss_sequences=2", f"output_dir={tmp_path / 'ranks'}"]
    command = [sys.executable, "-m", "pod", "explore", *(part for item in ranks for part in ("--set", item))]
    outer = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=os.environ | outer | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=3600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    together = json.loads((tmp_path / "ranks" / "plan" / "plan.json").read_text())
    alone = json.loads(alone)
    assert together["lead"] == alone["lead"] and together.get("head_order") == alone.get("head_order")
    assert together["provenance"]["losses"] == alone["provenance"]["losses"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ["model.num_recent_tokens=46"],
            "only 0 positions of a sequence of 48 tokens have distant tokens, with windows of 2 sink and 46",
        ),
        (["explore.algorithm=greedy"], "cost is 'nats', but algorithm=greedy"),
        (
            ["explore.roles=follow", "explore.target_saving=0.6"],
            "0.6, but the allowed roles save 0.000 to 0.320 of the bytes",
        ),
        (
            ["explore.bits=[16,4]", "explore.target_saving=0.99"],
            "0.99, but the allowed roles save 0.000 to 0.854",
        ),
        (["explore.budget_length=7"], "the windows hold 2 + 5 of them"),
        (["explore.cost=output"], "cost is 'output': it should be 'nats' or 'similarity'"),
    ],
)
def test_bad_settings_are_one_line(explore_refused, overrides, change, words):
    explore_refused([*overrides, *change], words)


def test_dry_run_names_the_cost(overrides, capsys):
    argv = [part for override in overrides for part in ("--set", override)]
    run(
        explore.main,
        sections=("model", "explore"),
        estimate=explore.estimate,
        add_arguments=explore.add_arguments,
        argv=[*argv, "--roles", "window", "--dry-run", "--print-config"],
    )
    printed = capsys.readouterr().out
    assert "roles: [window]" in printed
    assert (
        "nats: one forward and one backward pass over 3 x 48 = 144 tokens and 6 prompts with such texts ("
        in printed
    )
    assert "a round of one backward and two or more forward passes over 3 sequences and 6 prompts" in printed
    assert "up to three forward passes, then a round of one backward" in printed
    assert " MB of activations\n" in printed


@pytest.mark.slow
def test_costs_of_other_roles_and_bits_are_those_of_measuring_them_at_once(overrides, tmp_path, capsys):
    at_once, later = [*overrides, f"output_dir={tmp_path / 'at once' / 'run'}"], "is measured again"
    changes = ["explore.roles=[window,follow]", "explore.bits=[16,4]"]
    explore.main(load_recipe(None, [*at_once, *changes]))
    expected = plan_and_costs(tmp_path / "at once")[1].tensors
    explore.main(load_recipe(None, [*overrides, "explore.roles=[follow]", "explore.target_saving=0.3"]))
    assert "windows_retrieval" not in plan_and_costs(tmp_path)[1].tensors
    capsys.readouterr()
    explore.main(load_recipe(None, [*overrides, *changes]))
    assert later in capsys.readouterr().out
    found = plan_and_costs(tmp_path)[1].tensors
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    alone = [*overrides, f"output_dir={tmp_path / 'bits' / 'run'}", "explore.roles=[window]"]
    explore.main(load_recipe(None, alone))
    assert "lead4_retrieval" not in plan_and_costs(tmp_path / "bits")[1].tensors
    explore.main(load_recipe(None, [*alone, "explore.bits=[16,4]"]))
    found = plan_and_costs(tmp_path / "bits")[1].tensors
    assert torch.equal(found["lead4_retrieval"], expected["lead4_retrieval"])


@pytest.mark.slow
def test_explore_measures_followers_only_where_heads_may_follow(overrides, tmp_path, monkeypatch, capsys):
    """Windows alone need no costs of followers.

    A later plan with followers measures them, and then both serve.
    """
    measured = []
    measure = measure_module.measure_query_head_errors

    def count(*given):
        measured.append("query heads")
        return measure(*given)

    monkeypatch.setattr(measure_module, "measure_query_head_errors", count)
    windows = ["explore.roles=[window]", "explore.bits=[16,4]"]
    explore.main(load_recipe(None, [*overrides, *windows]))
    plan, costs = plan_and_costs(tmp_path)
    assert plan.num_windows and not plan.num_followers and not measured
    assert not {"order", "follow", "in_place", "follow4"} & set(costs.tensors)
    explore.main(load_recipe(None, overrides))
    assert measured and "it has no follow, in_place, follow4)" in capsys.readouterr().out
    everything = plan_and_costs(tmp_path)[1]
    assert torch.equal(everything.tensors["windows"], costs.tensors["windows"])
    measured.clear()
    explore.main(load_recipe(None, [*overrides, *windows]))
    assert not measured and "is used again" in capsys.readouterr().out
