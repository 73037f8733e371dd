"""The solver against every table of roles."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from plan_costs_at_random import explore_args
from plan_sums import sum_of_costs, units_of

from pod.plan.exploration import units_of_target
from pod.plan.solve import Role, solve, solve_table
from pod.plan.together import Plans

inf = np.inf


def random_costs(layers, heads, seed):
    rng = np.random.default_rng(seed)
    return rng.random((layers, layers, heads)), rng.random((layers, heads))


def every_column(layers):
    """Every lead list of one head, from the rule in words: own layer, the lead that was last, or None."""
    for roles in itertools.product("lfw", repeat=layers):
        column, last = [], None
        for layer, role in enumerate(roles):
            last = layer if role == "l" else last
            column.append(None if role == "w" else last)
            if role == "f" and last is None:
                break
        else:
            yield roles, column


def cost_of_column(roles, column, lead, follow, window, head):
    costs = {"l": lambda at: lead[at, head], "w": lambda at: window[at, head]}
    costs["f"] = lambda at: follow[column[at], at, head]
    return sum(costs[role](at) for at, role in enumerate(roles))


def brute_force(lead, follow, window, units=(0, 1, 2)):
    """Least cost by saved units over all tables of roles: a dictionary."""
    layers, heads = lead.shape
    save = dict(zip("lfw", units, strict=True))
    best = {}
    for columns in itertools.product(list(every_column(layers)), repeat=heads):
        saved = sum(save[role] for roles, _ in columns for role in roles)
        cost = sum(cost_of_column(*column, lead, follow, window, head) for head, column in enumerate(columns))
        best[saved] = min(best.get(saved, inf), cost)
    return {saved: cost for saved, cost in best.items() if cost < inf}


def assert_same(frontier, expected):
    assert len(frontier.costs) == max(expected) + 1
    for saved, cost in enumerate(frontier.costs):
        assert cost == pytest.approx(expected.get(saved, inf), abs=1e-12), saved


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 1), (5, 1), (3, 2), (4, 2), (2, 3), (1, 4)])
@pytest.mark.parametrize("forbidden", ["none", "follow", "window"])
def test_the_frontier_is_the_best_of_all_tables_of_roles(layers, heads, forbidden):
    follow, window = random_costs(layers, heads, seed=layers * 10 + heads)
    if forbidden == "none":
        follow[:, layers // 2, 0] -= 2  # some that pay
    oracle = {"follow": follow * inf, "window": window}, {"follow": follow, "window": window * inf}
    shown = {"follow": oracle[0], "window": oracle[1]}.get(forbidden, {"follow": follow, "window": window})
    expected = brute_force(np.zeros((layers, heads)), **shown)
    given = {"follow": follow, "window": window} | ({} if forbidden == "none" else {forbidden: None})
    frontier = solve(**given)
    assert_same(frontier, expected)
    assert_same(solve(**shown), expected)  # inf = not allowed, the same as None
    for saved, cost in expected.items():
        plan = frontier.plan(saved, {"cost_name": "c"})
        assert plan.num_followers + 2 * plan.num_windows == saved == units_of(plan)
        assert sum_of_costs(plan, given["follow"], given["window"]) == pytest.approx(cost, abs=1e-12)
        assert plan.provenance["cost"] == pytest.approx(cost, abs=1e-12)
        assert plan.provenance["cost_name"] == "c"


def test_a_table_of_other_roles_and_units():
    """A table of other roles and units: what packing will need.

    Leads that cost, are forbidden here and there and save a little; a second kind of window.
    """
    rng = np.random.default_rng(5)
    follow, window = random_costs(3, 2, seed=6)
    lead = rng.random((3, 2))
    lead[1, 0] = inf
    follow[0, 2, 1] = inf
    table = [Role("lead", 3, lead), Role("follow", 5, follow), Role("window", 7, window)]
    frontier = solve_table(table, 8)
    assert_same(frontier, brute_force(lead, follow, window, units=(3, 5, 7)))
    cheap = rng.random((3, 2))
    both = solve_table([*table, Role("window", 7, cheap)], 8)
    assert_same(both, brute_force(lead, follow, np.minimum(window, cheap), units=(3, 5, 7)))


def test_windows_pass_a_lead_on_and_are_none():
    """Layer 2 follows layer 0 over the window between them; a window of its own in layer 1 opens nothing."""
    follow = np.full((3, 3, 1), inf)
    follow[0, 2, 0], follow[1, 2, 0] = 1.0, -100.0
    frontier = solve(follow, [[inf], [0.5], [inf]])
    assert frontier.plan(3).lead == ((0,), (None,), (0,))
    assert frontier.costs.tolist() == [0.0, -100.0, 0.5, 1.5]
    assert frontier.plan(1).lead == ((0,), (1,), (1,))


def test_equal_costs_take_the_first_role_the_lowest_lead_and_let_later_heads_save_less():
    frontier = solve(np.zeros((3, 3, 2)), np.zeros((3, 2)))
    assert frontier.plan(0).is_dense
    assert frontier.plan(1).lead == ((0, 0), (1, 1), (1, 2))
    assert frontier.plan(3).lead == ((0, 0), (None, 1), (0, 2))


def test_units_for_a_saving_at_a_length():
    follow, window = random_costs(4, 2, seed=1)
    frontier = solve(follow, window)
    # 16 units = 8 pairs; 192 of 256 tokens are distant
    assert frontier.units_for(0.375, 256, 16, 48) == 8
    assert frontier.units_for(0.376, 256, 16, 48) == 9, "never less than was asked for"
    assert frontier.units_for(0.40, 256, 16, 48) == 9
    assert frontier.units_for(0.43, 256, 16, 48) == 10
    assert frontier.units_for(0.75, 256, 16, 48) == 16
    assert frontier.units_for(0.0, 256, 16, 48) == 0
    # 15 units cannot be saved: a single follower needs a lead
    assert np.isinf(frontier.costs[15])
    assert frontier.units_for(14.2 / 16, 10**9, 16, 48) == 16
    even = solve(None, window)
    assert even.units_for(0.37, 256, 16, 48) == 8 and even.units_for(0.38, 256, 16, 48) == 10
    with pytest.raises(
        ValueError, match=r"0.8, but the allowed roles save 0.000 to 0.750 of the bytes at 256"
    ):
        frontier.units_for(0.8, 256, 16, 48)
    with pytest.raises(ValueError, match=r"save 0.000 to 0.281 of the bytes at 256"):
        solve(follow, None).units_for(0.375, 256, 16, 48)
    with pytest.raises(ValueError, match="save 0.000 to 0.000 of the bytes at 64"):
        frontier.units_for(0.1, 64, 16, 48)


def test_a_saving_that_vllm_cannot_reach_names_what_the_recipe_says():
    """Windows of 240 tokens count 4,336 with two batches of 2,048: half of 8,192 tokens cannot be saved."""
    explore = explore_args(target="vllm", target_saving=0.5, budget_length=8192, sequence_length=2048)
    frontier = solve(None, np.zeros((30, 1)))
    windows = {"num_sink_tokens": 0, "num_recent_tokens": 240}
    with pytest.raises(ValueError) as raised:
        units_of_target(frontier, explore, windows)
    assert str(raised.value).startswith(
        "explore.target_saving is 0.5, but at 8192 tokens windows in all layers save 0.471: vLLM holds 4336"
    )
    assert "a smaller explore.engine_batch_tokens" in str(raised.value)
    smaller = replace(explore, engine_batch_tokens=512)
    assert units_of_target(frontier, smaller, windows) == 18 * frontier.pair_units


def test_a_saving_is_reached_or_refused_with_both_numbers():
    """One pair of ten units that saves three as a lead, seven as a window; half of 20 tokens are distant."""
    frontier = solve_table([Role("lead", 3, np.zeros((1, 1))), Role("window", 7, np.ones((1, 1)))], 10)
    assert [frontier.units_for(x, 20, 4, 6) for x in (0.0, 0.15, 0.151, 0.35)] == [3, 3, 7, 7]
    for beyond in (0.351, 0.376):
        with pytest.raises(ValueError, match="save 0.150 to 0.350"):
            frontier.units_for(beyond, 20, 4, 6)
    assert [frontier.cheapest(x) for x in (0, 3, 4)] == [3, 3, 7]
    assert [Plans(frontier).cost_of(x, 5) for x in (0, 1, 2, 3, 4)] == [0.0, 0.0, 1.0, 1.0, None]


def test_costs_of_followers_are_read_above_their_leads_only():
    follow, window = random_costs(4, 2, seed=8)
    expected = solve(follow, window).costs
    follow[np.tril_indices(4)] = np.nan
    np.testing.assert_array_equal(solve(follow, window).costs, expected)


def test_units_and_plans_that_do_not_exist_are_refused():
    follow, window = random_costs(3, 2, seed=2)
    frontier = solve(follow, window)
    for units in (-1, 11, 13):
        with pytest.raises(ValueError, match=f"saves {units} units; up to 12 can be saved"):
            frontier.plan(units)
    with pytest.raises(ValueError, match="are both None"):
        solve(None, None)
    with pytest.raises(ValueError, match="allow no plan"):
        solve_table([Role("lead", 0, np.full((2, 1), inf))], 2)


def test_a_model_of_eight_billion_parameters():
    follow, window = random_costs(32, 8, seed=3)
    frontier = solve(follow, window)
    assert len(frontier.costs) == 2 * 32 * 8 + 1
    for units in (1, 200, 333, 512):
        plan = frontier.plan(units)
        assert plan.num_followers + 2 * plan.num_windows == units
        assert sum_of_costs(plan, follow, window) == pytest.approx(frontier.costs[units], rel=1e-12)
