"""Windows that are chosen together, against all choices."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pod.modeling.model.sharing import SharingPlan
from pod.plan.solve import solve
from pod.plan.together import (
    Plans,
    changeable,
    cost_of_leads,
    exchanged,
    has_windows,
    in_order,
    rechosen,
)


def costs_of_windows(layers, heads, seed, rank=4):
    """A quadratic form in which heads add up and cancel, ``[L, H, L, H]``."""
    changes = np.random.default_rng(seed).standard_normal((layers * heads, rank))
    return (changes @ changes.T / 2).reshape(layers, heads, layers, heads)


def cost(windows, plan, lead4=None):
    """The sum over all pairs of windows, and the costs of leads in packed layers."""
    pairs = [
        (layer, head) for layer, row in enumerate(plan.lead) for head, lead in enumerate(row) if lead is None
    ]
    total = sum(windows[a + b] for a in pairs for b in pairs)
    for layer, bits in enumerate(plan.bits or ()):
        if bits == 4 and lead4 is not None:
            total += sum(lead4[layer, head] for head, lead in enumerate(plan.lead[layer]) if lead == layer)
    return total


def plan_of(chosen, layers, heads, **changes):
    lead = [
        [None if layer * heads + head in chosen else layer for head in range(heads)]
        for layer in range(layers)
    ]
    return SharingPlan(lead=lead, **changes)


def best_of(windows, count, layers=4, heads=3):
    """The least cost of all choices of ``count`` windows."""
    choices = itertools.combinations(range(layers * heads), count)
    return min(cost(windows, plan_of(chosen, layers, heads)) for chosen in choices)


@pytest.mark.parametrize("count", [1, 4, 7, 10, 12])
def test_as_many_windows_are_chosen_and_no_exchange_makes_them_cheaper(count):
    exact = 0
    for seed in range(12):
        windows = costs_of_windows(4, 3, seed)
        start = plan_of(range(count), 4, 3)
        alone = sum(windows[divmod(one, 3) * 2] for one in range(count))
        found, least = rechosen(start, float(alone), windows)
        assert found.num_windows == count
        assert least == pytest.approx(cost(windows, found), abs=1e-12)
        kept = {
            3 * layer + head for layer, row in enumerate(found.lead) for head in range(3) if row[head] is None
        }
        for leaves, comes in itertools.product(kept, set(range(12)) - kept):
            assert cost(windows, plan_of(kept - {leaves} | {comes}, 4, 3)) >= least - 1e-12
        exact += least == pytest.approx(best_of(windows, count), abs=1e-12)
    assert exact >= 8, "mostly it is the best of all choices"


def test_followers_their_leads_and_bits_keep_their_roles():
    windows = costs_of_windows(4, 2, 3)
    lead4 = np.random.default_rng(1).random((4, 2))
    plan = SharingPlan(
        lead=[[0, None], [0, None], [2, 2], [None, 3]],
        bits=(16, 16, 4, 4),
    )
    alone = sum(windows[pair * 2] for pair in ((0, 1), (1, 1), (3, 0)))
    before = float(alone + lead4[2].sum() + lead4[3, 1] + 0.5)  # 0.5: the follower
    found, least = rechosen(plan, before, windows, lead4)
    assert found.lead[0][0] == 0 and found.lead[1][0] == 0, "a lead and its follower"
    assert found.bits == plan.bits and found.num_windows == 3
    in_packed = sum(lead is None for row in found.lead[2:] for lead in row)
    assert in_packed == 1, "a window is exchanged within layers of as many bits"
    assert least == pytest.approx(cost(windows, found, lead4) + 0.5)
    choices = [
        SharingPlan(lead=[[0, None], [0, None], *rest], bits=plan.bits)
        for rest in (
            [[None, 2], [3, 3]],
            [[2, None], [3, 3]],
            [[2, 2], [None, 3]],
            [[2, 2], [3, None]],
        )
    ]
    assert least == pytest.approx(min(cost(windows, one, lead4) for one in choices) + 0.5)


@pytest.mark.parametrize("seed", range(8))
def test_windows_between_a_lead_and_its_follower_stay(seed):
    windows = costs_of_windows(5, 2, seed)
    plan = SharingPlan(lead=[[0, 0], [None, None], [0, 2], [3, None], [None, 4]])
    held = [(1, 0), (1, 1), (3, 1), (4, 0)]
    before = sum(windows[a + b] for a in held for b in held if a == b) + 0.25  # 0.25: the follower
    found, least = rechosen(plan, float(before), windows)
    assert [row[0] for row in found.lead[:3]] == [0, None, 0] and found.num_windows == 4
    free = [(0, 1), (1, 1), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)]
    costs = []
    for chosen in itertools.combinations(free, 3):
        lead = [
            [None if (layer, head) in {*chosen, (1, 0)} else layer for head in range(2)] for layer in range(5)
        ]
        lead[2][0] = 0
        costs.append(cost(windows, SharingPlan(lead=lead)) + 0.25)
    assert least == pytest.approx(cost(windows, found) + 0.25)
    assert min(costs) - 1e-12 <= least <= sorted(costs)[1] + 1e-12, "the best of all choices, or the next one"


def test_where_costs_add_up_the_plans_are_those_of_the_curve():
    alone = np.random.default_rng(2).random((5, 3))
    windows = np.diag(alone.ravel()).reshape(5, 3, 5, 3)
    curve = solve(None, alone)
    plans = Plans(curve, windows)
    for units in range(0, 31, 2):
        plan, least = plans.at(units)
        assert least == pytest.approx(curve.costs[units]) and plan.lead == curve.plan(units).lead
    assert plans.cost_of(3, 2) == pytest.approx(curve.costs[4])
    assert Plans(replace(curve, costs=curve.costs[:5])).cost_of(10, 2) is None


def test_heads_in_another_order_keep_their_costs():
    windows = costs_of_windows(2, 3, 0)
    order = [[2, 0, 1], [1, 0, 2]]
    found = in_order(windows, order)
    for a, b in itertools.product(itertools.product(range(2), range(3)), repeat=2):
        assert found[a + b] == windows[a[0], order[a[0]][a[1]], b[0], order[b[0]][b[1]]]
    assert in_order(windows, None) is windows


def test_exchanges_are_the_best_ones_and_no_more_than_asked_for():
    windows = costs_of_windows(4, 3, 1)
    start = plan_of(range(5), 4, 3)

    def after_one(plan):
        kept = set(np.flatnonzero(has_windows(plan)).tolist())
        others = itertools.product(kept, set(range(12)) - kept)
        return min(cost(windows, plan_of(kept - {leaves} | {comes}, 4, 3)) for leaves, comes in others)

    plan = start
    for most in range(1, 4):
        expected = min(after_one(plan), cost(windows, plan))
        plan = exchanged(start, windows, most)
        assert cost(windows, plan) == pytest.approx(expected) and plan.num_windows == 5
        moved = has_windows(plan) & ~has_windows(start)
        assert moved.sum() <= most
    final = exchanged(start, windows, 100)
    assert after_one(final) >= cost(windows, final) - 1e-12
    assert exchanged(final, windows, 100) == final


def test_blocks_of_followers_are_no_windows_and_leads_to_exchange():
    plan = SharingPlan(lead=[[0, None], [None, 1], [0, 2], [3, None]], bits=(16, 4, 4, 4))
    assert changeable(plan) == (2, 3), "the first head of three layers stands in a block"
    lead4 = np.arange(8.0).reshape(4, 2)
    assert cost_of_leads(plan, lead4) == 3 + 5 + 6
    assert cost_of_leads(plan, None) == 0 and cost_of_leads(replace(plan, bits=None), lead4) == 0
