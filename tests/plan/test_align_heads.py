"""Aligned heads: places against every permutation, moves against every move, and orders that were planted."""

import itertools

import numpy as np
import pytest
from plan_sums import sum_of_costs

from pod.plan.align_heads import _Search, _slopes, align
from pod.plan.solve import solve

inf = np.inf


def random_costs(layers, heads, seed):
    rng = np.random.default_rng(seed)
    return rng.random((layers, layers, heads, heads)), rng.random((layers, heads))


def by_place(follow, window, order):
    """The costs of a permuted model, entry by entry."""
    layers, heads = len(order), len(order[0])
    placed = np.full((layers, layers, heads), inf)
    for lead, layer, head in itertools.product(range(layers), range(layers), range(heads)):
        placed[lead, layer, head] = follow[lead, layer, order[lead][head], order[layer][head]]
    if window is None:
        return placed, None
    return placed, np.array([[window[layer, old] for old in row] for layer, row in enumerate(order)])


def least_cost(follow, window, order, units):
    return solve(*by_place(follow, window, order)).costs[units]


def every_order(layers, heads):
    """All that differ: layer 0 may stay."""
    rows = list(itertools.permutations(range(heads)))
    return ((rows[0], *rest) for rest in itertools.product(rows, repeat=layers - 1))


@pytest.mark.parametrize(("layers", "heads"), [(4, 2), (5, 2), (3, 3), (1, 3)])
@pytest.mark.parametrize("windows", [True, False])
def test_no_order_of_a_small_model_costs_less(layers, heads, windows):
    for seed in range(2):
        follow, window = random_costs(layers, heads, seed)
        window = window if windows else None
        curves = np.array([solve(*by_place(follow, window, o)).costs for o in every_order(layers, heads)])
        best = curves.min(axis=0)
        for units in np.flatnonzero(np.isfinite(best)):
            found = align(follow, window, int(units), restarts=40)
            assert found.cost == pytest.approx(best[units], abs=1e-12), (seed, units)


def priced(follow, window, order, price):
    """Least cost when every saved unit earns its price."""
    costs = solve(*by_place(follow, window, order)).costs
    return (costs - price * np.arange(len(costs))).min()


@pytest.mark.parametrize("seed", range(9))
def test_the_search_ends_where_no_layer_and_no_cut_can_be_permuted_for_less(seed):
    layers, heads, price = 5, 3, 0.15 + 0.1 * (seed // 3)
    follow, window = random_costs(layers, heads, seed)
    window = (None, window, window + 0.5)[seed % 3]
    start = np.tile(np.arange(heads), (layers, 1))
    order = _Search(follow, window, price, start).run()
    least = priced(follow, window, order, price)
    assert least < priced(follow, window, start, price) - 1e-9
    for layer, row in itertools.product(range(layers), itertools.permutations(range(heads))):
        other = order.copy()
        other[layer] = order[layer, list(row)]
        assert priced(follow, window, other, price) > least - 1e-12
        other[layer:] = order[layer:, list(row)]
        assert priced(follow, window, other, price) > least - 1e-12


def planted(layers, heads, seed):
    """Costs of a model whose heads of one kind lie in other places of each layer: [layer, kind] -> place."""
    rng = np.random.default_rng(seed)
    place = np.stack([rng.permutation(heads) for _ in range(layers)])
    follow = 1 + 0.3 * rng.random((layers, layers, heads, heads))
    for lead, layer, kind in itertools.product(range(layers), range(layers), range(heads)):
        follow[lead, layer, place[lead, kind], place[layer, kind]] = 0.1 * rng.random() * abs(lead - layer)
    return follow, place


@pytest.mark.parametrize(("layers", "heads", "units"), [(6, 3, 9), (12, 4, 30), (16, 8, 90), (7, 1, 4)])
def test_a_planted_order_is_found_again(layers, heads, units):
    follow, place = planted(layers, heads, seed=layers)
    found = align(follow, None, units, restarts=20)
    assert found.cost == pytest.approx(least_cost(follow, None, place.tolist(), units), abs=1e-12)
    if heads > 1:
        assert found.cost < 0.3 * solve(*by_place(follow, None, [range(heads)] * layers)).costs[units]


def test_an_alignment_says_the_costs_by_place_and_permutes_every_layer():
    follow, window = random_costs(6, 4, seed=9)
    found = align(follow, window, 21, restarts=5)
    assert all(sorted(row) == [0, 1, 2, 3] for row in found.kv_order)
    placed, own = by_place(follow, window, found.kv_order)
    above = np.triu_indices(6, k=1)
    np.testing.assert_array_equal(found.follow[above], placed[above])
    np.testing.assert_array_equal(found.window, own)
    plan = solve(found.follow, found.window).plan(21)
    assert sum_of_costs(plan, found.follow, found.window) == pytest.approx(found.cost, abs=1e-12)
    again = align(follow, window, 21, restarts=5)
    assert again.kv_order == found.kv_order
    assert align(follow, window, 21, restarts=0).cost >= found.cost


def test_leads_come_before_windows_where_no_head_follows():
    follow, window = random_costs(5, 4, seed=3)
    found = align(follow + 100, window, 14, restarts=3)
    plan = solve(found.follow, found.window).plan(14)
    before = least_cost(follow + 100, window, [range(4)] * 5, 14)
    assert plan.num_windows == 7 and found.cost == pytest.approx(before)
    for row, old in zip(plan.lead, found.kv_order, strict=True):
        windows = [lead is None for lead in row]
        assert windows == sorted(windows)
        leads = windows.count(False)
        assert list(old) == sorted(old[:leads]) + sorted(old[leads:])


def test_the_price_lies_between_the_slopes_of_the_curve():
    assert _slopes(np.array([0.0, 1.0, 4.0, 9.0]), 1) == (1.0, 3.0)
    assert _slopes(np.array([0.0, inf, 4.0, inf, 10.0]), 2) == (2.0, 3.0)
    assert _slopes(np.array([0.0, 3.0, 4.0]), 1) == (1.0, 3.0)
    assert _slopes(np.array([0.0, 1.0, 4.0]), 2) == (3.0, 3.0)
    assert _slopes(np.array([0.0, 1.0, 4.0]), 0) == (1.0, 1.0)
    assert _slopes(np.array([0.0]), 0) == (0.0, 0.0)


def test_units_that_cannot_be_are_refused():
    follow, window = random_costs(3, 2, seed=1)
    with pytest.raises(ValueError, match="saves 11 units"):
        align(follow, window, 11)
