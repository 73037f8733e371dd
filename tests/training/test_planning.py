"""Greedy plans against Algorithm 1 worked by hand, optimal plans against every partition."""

import itertools

import numpy as np
import pytest

from pod.modeling.shipped.sharing import SharingPlan
from pod.training.planning import (
    describe_plan,
    dp_plan,
    greedy_plan,
    least_cost_plan,
    num_non_lead_for,
    plan_cost,
    sum_of_costs,
)


def random_similarity(num_layers, num_query_heads, seed):
    values = np.random.default_rng(seed).random((num_layers, num_layers, num_query_heads))
    values = (values + values.transpose(1, 0, 2)) / 2
    values[np.arange(num_layers), np.arange(num_layers)] = 1.0
    return values


def all_partitions(num_layers):
    """Every lead list of one head: a layer opens a block or continues the one before."""
    for opens in itertools.product((False, True), repeat=num_layers - 1):
        lead = [0]
        for layer, is_open in enumerate(opens, start=1):
            lead.append(layer if is_open else lead[-1])
        yield lead


def brute_force_cost(similarity, num_key_value_heads, num_non_lead):
    """Least cost over every plan with that many non-lead pairs."""
    num_layers = similarity.shape[0]
    best = np.inf
    for columns in itertools.product(all_partitions(num_layers), repeat=num_key_value_heads):
        plan = SharingPlan(lead=np.array(columns).T.tolist())
        if plan.num_followers == num_non_lead:
            best = min(best, plan_cost(similarity, plan))
    return best


@pytest.mark.parametrize(
    ("num_layers", "num_key_value_heads", "group"), [(1, 1, 1), (5, 1, 3), (4, 2, 2), (5, 2, 1), (3, 3, 4)]
)
def test_dp_is_the_cheapest_of_all_plans_at_every_reachable_saving(num_layers, num_key_value_heads, group):
    similarity = random_similarity(num_layers, num_key_value_heads * group, seed=num_layers)
    pairs = num_layers * num_key_value_heads
    for num_non_lead in range(pairs - num_key_value_heads + 1):
        plan = dp_plan(similarity, num_key_value_heads, target_saving=num_non_lead / pairs / 2)
        assert plan.num_followers == num_non_lead
        expected = brute_force_cost(similarity, num_key_value_heads, num_non_lead)
        assert plan_cost(similarity, plan) == pytest.approx(expected, abs=1e-12)


def test_least_cost_plan_is_the_cheapest_for_costs_without_symmetry():
    """Costs that no similarity has: not symmetric, above 1, negative."""
    rng = np.random.default_rng(8)
    for total in range(7):
        costs = rng.normal(size=(4, 4, 2)) * 10
        found = least_cost_plan(costs, total / 16, {"cost": "c"})
        every = [
            SharingPlan(lead=np.array(columns).T.tolist())
            for columns in itertools.product(all_partitions(4), repeat=2)
        ]
        expected = min(sum_of_costs(costs, plan) for plan in every if plan.num_followers == total)
        assert found.num_followers == total
        assert sum_of_costs(costs, found) == pytest.approx(expected, abs=1e-12)
        assert found.provenance == {"algorithm": "dp", "target_saving": total / 16, "cost": "c"}


def test_dp_reaches_plans_between_the_corners_of_the_price_curve():
    """Least costs 0, 0.9, 0.9 for 0, 1, 2 non-lead layers: no price per block prefers 1, the target still gets it."""
    similarity = np.zeros((3, 3, 1))
    similarity[0, 1], similarity[0, 2], similarity[1, 2] = 0.1, 1.0, 0.0
    plan = dp_plan(similarity, 1, target_saving=1 / 6)
    assert plan.lead == ((0,), (0,), (2,))
    assert plan_cost(similarity, plan) == pytest.approx(0.9)
    assert plan_cost(similarity, dp_plan(similarity, 1, target_saving=1 / 3)) == pytest.approx(0.9)


@pytest.mark.parametrize("target", [0.0, 0.1, 0.2943, 0.35, 0.4, 0.483])
def test_dp_meets_the_target_to_half_a_pair(target):
    similarity = random_similarity(30, 9, seed=1)
    plan = dp_plan(similarity, 3, target)
    assert abs(plan.asymptotic_saving - target) <= 0.25 / (30 * 3) + 1e-12


def test_dp_costs_no_more_than_greedy_at_equal_saving():
    rng = np.random.default_rng(3)
    differ = 0
    for seed in range(10):
        similarity = random_similarity(12, 4, seed) ** rng.uniform(0.3, 1.0)
        greedy = greedy_plan(similarity, 2, threshold=0.5)
        optimal = dp_plan(similarity, 2, greedy.asymptotic_saving)
        assert optimal.num_followers == greedy.num_followers
        assert plan_cost(similarity, optimal) <= plan_cost(similarity, greedy) + 1e-12
        differ += optimal.lead != greedy.lead
    assert differ > 0


def test_greedy_compares_with_every_layer_of_the_block_not_only_its_lead():
    """Layer 2 is like layer 0 but not like layer 1, so it opens a block; layer 3 is like 2 only."""
    similarity = np.eye(4)[:, :, None].copy()
    for a, b in ((0, 1), (0, 2), (0, 3), (2, 3)):
        similarity[a, b] = similarity[b, a] = 0.5
    assert greedy_plan(similarity, 1, threshold=0.5).lead == ((0,), (0,), (2,), (2,))
    assert greedy_plan(similarity, 1, threshold=0.51).is_dense
    assert greedy_plan(similarity, 1, threshold=0.0).lead == ((0,),) * 4


@pytest.mark.parametrize(
    ("votes", "joins"),
    [("1", True), ("0", False), ("10", False), ("110", True), ("1100", False), ("1110", True)],
)
def test_a_kv_head_needs_a_strict_majority_of_its_query_heads(votes, joins):
    values = np.array([float(vote) for vote in votes])
    similarity = np.stack(
        [np.stack([np.ones_like(values), values]), np.stack([values, np.ones_like(values)])]
    )
    assert greedy_plan(similarity, 1).lead == ((0,), (0 if joins else 1,))


def test_query_heads_of_a_kv_head_are_consecutive():
    similarity = np.zeros((2, 2, 4))
    similarity[..., 2:] = 1.0  # the second KV head's group
    assert greedy_plan(similarity, 2).lead == ((0, 0), (1, 0))
    assert dp_plan(similarity, 2, target_saving=0.125).lead == ((0, 0), (1, 0))


def test_provenance_travels_with_the_plan():
    similarity = random_similarity(4, 2, seed=0)
    assert greedy_plan(similarity, 2, 0.3, {"model": "m"}).provenance == {
        "algorithm": "greedy",
        "threshold": 0.3,
        "model": "m",
    }
    assert dp_plan(similarity, 2, 0.25).provenance == {
        "algorithm": "dp",
        "target_saving": 0.25,
        "cost": "similarity",
    }


def test_description_counts_blocks_and_followers():
    text = describe_plan(SharingPlan(lead=[[0, 0], [0, 1], [0, 1], [3, 1]]))
    assert "25.0%" in text and "4 of 8" in text
    assert "blocks: 4 in 2 KV heads of 4 layers" in text
    assert "longest block: 3 layers (KV head 0, layers 0-2)" in text
    assert "per KV head: 2, 2" in text


def test_bad_input_is_one_line():
    good = random_similarity(4, 4, seed=0)
    broken = good.copy()
    broken[0, 1, 0] = np.nan
    for call, words in (
        (lambda: greedy_plan(good[:3], 2), "shape"),
        (lambda: greedy_plan(good, 3), "cannot be divided"),
        (lambda: dp_plan(broken, 2), "NaN"),
        (lambda: greedy_plan(good, 2, threshold=1.5), "0 to 1"),
        (lambda: dp_plan(good, 2, target_saving=0.45), "0.375"),
        (lambda: num_non_lead_for(-0.1, 4, 2), "-0.1"),
        (lambda: least_cost_plan(good[:, :3]), "shape"),
        (lambda: least_cost_plan(broken), "costs hold NaN"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
