"""Bits in the budget: against every plan and every choice of bits of small models."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pod.modeling.model.sharing import SharingPlan
from pod.plan.solve import PackedCosts, solve_packed

WINDOWS = 4, 28
N = 1024


def random_costs(layers, heads, seed, follow=True, window=True):
    draw = np.random.default_rng(seed)
    lead4 = draw.uniform(0.01, 0.1, (layers, heads))
    return PackedCosts(
        follow=draw.uniform(0.05, 2, (layers, layers, heads)) if follow else None,
        window=draw.uniform(0.01, 1, (layers, heads)) if window else None,
        lead4=lead4,
        follow4=lead4 * 0.6,
        n=N,
        near=sum(WINDOWS),
    )


def plan_for(costs, saving):
    """The cheapest plan found, its cost and its bound."""
    frontier = solve_packed(costs)
    units = frontier.units_for(saving, N, *WINDOWS)
    frontier = frontier.improved(units)
    units = frontier.cheapest(units)
    return frontier.plan(units), frontier.costs[units], frontier.bound[units:].min()


def cost_of(plan, costs):
    total = 0.0
    for layer, row in enumerate(plan.lead):
        packed = plan.bits is not None and plan.bits[layer] == 4
        for head, lead in enumerate(row):
            if lead is None:
                total += costs.window[layer, head]
            elif lead == layer:
                total += costs.lead4[layer, head] if packed else 0.0
            else:
                total += costs.follow[lead, layer, head] + (costs.follow4[layer, head] if packed else 0.0)
    return total


def every_plan(layers, heads, follow, window):
    rows = []
    for choices in itertools.product(*[[*range(layer + 1), None] for layer in range(layers)]):
        try:
            plan = SharingPlan([[lead] for lead in choices])
        except ValueError:
            continue
        if (follow or not plan.num_followers) and (window or not plan.num_windows):
            rows.append(choices)
    for columns in itertools.product(rows, repeat=heads):
        yield SharingPlan(list(zip(*columns, strict=True)))


@pytest.mark.parametrize(
    ("layers", "heads", "follow", "window"), [(4, 1, True, True), (3, 2, True, True), (4, 2, False, True)]
)
@pytest.mark.parametrize("saving", [0.3, 0.6, 0.8])
def test_the_plan_is_the_cheapest_of_all(layers, heads, follow, window, saving):
    for seed in range(3):
        costs = random_costs(layers, heads, seed, follow, window)
        found, cost, bound = plan_for(costs, saving)
        assert found.saving(N, *WINDOWS) >= saving - 1e-6
        assert cost_of(found, costs) == pytest.approx(cost)
        best = min(
            cost_of(plan, costs)
            for lead in every_plan(layers, heads, follow, window)
            for bits in itertools.product((16, 4), repeat=layers)
            for plan in [SharingPlan(lead.lead, bits=bits)]
            if plan.saving(N, *WINDOWS) >= saving + 0.02  # savings are rounded
        )
        assert bound - 1e-12 <= cost <= best + 1e-12


@pytest.mark.nightly
@pytest.mark.slow
def test_a_choice_of_bits_stays_near_its_bound_where_the_heads_of_a_layer_have_nothing_in_common():
    costs = random_costs(24, 4, 0)
    frontier, gained = solve_packed(costs), []
    for saving in (0.3, 0.5, 0.85):
        units = frontier.units_for(saving, N, *WINDOWS)
        near = frontier.improved(units)
        gained.append(frontier.costs[units:].min() - near.costs[units:].min())
        plan = near.plan(near.cheapest(units))
        assert cost_of(plan, costs) == pytest.approx(near.costs[units:].min())
        assert near.costs[units:].min() <= 1.33 * near.bound[units:].min()
        assert plan.saving(N, *WINDOWS) == pytest.approx(saving, abs=0.02)
        assert (near.costs <= frontier.costs + 1e-12).all()
    assert min(gained) >= 0 and max(gained) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_curve_is_at_its_bound_where_a_layer_has_one_head(seed):
    """The whole curve is at its bound where a layer has one head.

    There are more layers than are tried in all ways, and a bound that is reached. Bits of every pair are
    those of its layer.
    """
    frontier = solve_packed(random_costs(12, 1, seed))
    assert 15 < len(frontier.solved) < 100
    least, bound = (np.minimum.accumulate(x[::-1])[::-1] for x in (frontier.costs, frontier.bound))
    assert len(least) == len(bound)
    assert (least <= 1.03 * bound + 1e-12).all() and least.sum() <= 1.001 * bound.sum()


@pytest.mark.parametrize("near", [32, 256, 4096])
@pytest.mark.parametrize("n", [512, 2048, 8192, 10**12])
def test_units_of_packed_pairs_are_what_the_plan_saves_rounded_down(n, near):
    """Units of packed pairs are what the plan saves, rounded down.

    Long windows are packed too. Units leave that out, so a plan saves as much as was asked for, or more.
    """
    if n < near:
        near = 500
    costs = PackedCosts(None, None, np.zeros((3, 1)), np.zeros((3, 1)), n, near)
    pair, lead4, follow4 = costs.units
    assert pair % 2 == 0
    windows = [[None], [None], [None]]
    native_windows = SharingPlan(windows).saving(n, 0, near)
    packed_windows = SharingPlan(windows, bits=(4, 4, 4)).saving(n, 0, near)
    packed_near = (packed_windows - native_windows) / 2  # of a follower, whose window has keys alone
    followed = SharingPlan([[0], [0], [0]]).saving(n, 0, near)
    saved = SharingPlan([[0], [0], [0]], bits=(4, 4, 4)).saving(n, 0, near)
    far = 1 - near / n
    alone = SharingPlan([[0], [1], [2]], bits=(4, 4, 4)).saving(n, 0, near)
    assert 0 <= alone - lead4 / pair * far + 1e-9 <= 0.02
    assert 0 <= (3 * saved - alone) / 2 - packed_near - follow4 / pair * far + 1e-9 <= 0.02
    assert followed == pytest.approx(far / 3)


def test_savings_beyond_reach_are_refused():
    costs = random_costs(4, 2, 0, window=False)
    with pytest.raises(
        ValueError, match=r"target_saving is 0.97, but the allowed roles save 0.000 to 0\.\d+"
    ):
        plan_for(costs, 0.97)
    assert plan_for(costs, 0.0)[0].is_dense
    with pytest.raises(ValueError, match="save 0.000 to 0.000 of the bytes at 32 tokens"):
        solve_packed(replace(costs, n=32)).units_for(0.1, 32, *WINDOWS)


def test_the_table_of_free_pairs_is_the_union_of_both():
    costs = random_costs(3, 2, 1)
    free = costs.solve(None)
    for packed in itertools.product((False, True), repeat=3):
        own = costs.solve(packed)
        assert (free.costs[: len(own.costs)] <= own.costs + 1e-12).all()


def test_every_saving_on_the_curve_has_its_plan():
    costs = random_costs(3, 2, 2)
    frontier = solve_packed(costs)
    reached = np.flatnonzero(np.isfinite(frontier.costs))
    assert len(reached) > 40
    for units in map(int, reached):
        plan = frontier.plan(units)
        assert cost_of(plan, costs) == pytest.approx(frontier.costs[units])
        waste = plan.saving(N, *WINDOWS) - units / frontier.pair_units / 6 * (N - sum(WINDOWS)) / N
        assert -1e-9 <= waste <= 0.01  # units of packed pairs are rounded down
