"""Plans of whole layers: all heads of a layer have one role, at the least sum of their costs."""

from itertools import product

import pytest
from plan_costs_at_random import WINDOWS, explore_args, random_costs

from pod.commands import explore
from pod.modeling.model.sharing import SharingPlan
from pod.plan.choose import choose, of_all_heads
from pod.plan.costs import total_costs
from pod.plan.exploration import window_alone
from pod.plan.plan_report import pareto
from pod.recipe import load_recipe

LAYERS, HEADS = 5, 3


def all_layer_plans(layers: int) -> list[list[int | None]]:
    """Every way to give each layer a role: its own number, the lead that is open, or None for a window."""
    plans: list[list[int | None]] = []
    for roles in product(("lead", "follow", "window"), repeat=layers):
        lead: list[int | None] = []
        open_lead = None
        for layer, role in enumerate(roles):
            if role == "lead":
                open_lead = layer
            if role == "follow" and open_lead is None:
                break
            lead.append(None if role == "window" else open_lead)
        else:
            plans.append(lead)
    return plans


def cost_of(lead: list[int | None], total) -> float:
    """What a plan of whole layers costs, head by head."""
    cost = 0.0
    for layer, one in enumerate(lead):
        for head in range(HEADS):
            if one is None:
                cost += window_alone(total["windows"])[layer, head]
            elif one != layer:
                cost += total["in_place"][one, layer, head]
    return cost


@pytest.mark.parametrize("target", [0.0, 0.15, 0.3, 0.5, 0.7])
def test_the_plan_is_the_cheapest_of_all_plans_of_whole_layers(target):
    costs = random_costs(LAYERS, HEADS)
    settings = explore_args(granularity="layer", target_saving=target, budget_length=28)
    plan = choose(costs, settings, WINDOWS).plan
    total = total_costs(costs.tensors, 1.0)
    enough = []
    for lead in all_layer_plans(LAYERS):
        one = SharingPlan(lead=[[layer] * HEADS for layer in lead])
        if one.saving(28, **WINDOWS) >= target - 1e-9:
            enough.append(cost_of(lead, total))
    assert all(len(set(row)) == 1 and len(row) == HEADS for row in plan.lead)
    assert plan.saving(28, **WINDOWS) >= target - 1e-9
    assert plan.head_order is None
    assert plan.provenance["granularity"] == "layer"
    assert plan.provenance["plan_cost"] == pytest.approx(min(enough))
    assert cost_of([row[0] for row in plan.lead], total) == pytest.approx(min(enough))


@pytest.mark.slow
def test_heads_are_never_dearer_than_layers_at_the_same_saving():
    costs = random_costs(LAYERS, HEADS)
    for target in (0.2, 0.4, 0.6):
        of_heads = choose(costs, explore_args(target_saving=target, budget_length=28), WINDOWS).plan
        by_layer = explore_args(granularity="layer", target_saving=target, budget_length=28)
        of_layers = choose(costs, by_layer, WINDOWS).plan
        assert of_heads.provenance["plan_cost"] <= of_layers.provenance["plan_cost"] + 1e-12


def test_bits_are_chosen_beside_roles_of_layers_and_the_curve_counts_all_heads():
    costs = random_costs(LAYERS, HEADS)
    for name in ("lead4", "follow4"):
        costs.tensors[name] *= 0.01
    settings = explore_args(granularity="layer", bits="16,4", target_saving=0.8, budget_length=100_000)
    choice = choose(costs, settings, WINDOWS)
    assert choice.plan.bits is not None and 4 in choice.plan.bits
    assert choice.plan.saving(100_000, **WINDOWS) >= 0.8
    points = pareto(choice, settings, WINDOWS)["points"]
    for point in points:
        assert point["leads"] + point["followers"] + point["windows"] == LAYERS * HEADS
        assert point["windows"] % HEADS == 0


def test_rows_of_one_role_become_rows_of_all_heads():
    plan = SharingPlan(lead=[[0], [0], [None]])
    assert of_all_heads(plan, 2).lead == ((0, 0), (0, 0), (None, None))
    assert of_all_heads(plan, 1) is plan


def test_greedy_groups_heads_and_is_refused():
    with pytest.raises(ValueError, match="granularity is 'layer', but algorithm=greedy"):
        explore_args(granularity="layer", algorithm="greedy", cost="similarity", roles="follow")


@pytest.mark.parametrize("cost", ["nats", "similarity"])
def test_explore_writes_a_plan_of_whole_layers(explore_overrides, tmp_path, capsys, cost):
    settings = [
        "model.num_sink_tokens=2",
        "model.num_recent_tokens=5",
        "explore.granularity=layer",
        "explore.target_saving=0.3",
        "explore.loss_sequences=0",
        f"explore.cost={cost}",
    ]
    if cost == "similarity":
        settings.append("explore.roles=follow")
    explore.main(load_recipe(None, [*explore_overrides, *settings]))
    plan = SharingPlan.load(tmp_path / "run" / "plan" / "plan.json")
    assert (plan.num_layers, plan.num_key_value_heads) == (4, 2)
    assert all(len(set(row)) == 1 for row in plan.lead)
    assert plan.saving(48) >= 0.3 - 1e-6
    assert "whole layers" in capsys.readouterr().out
