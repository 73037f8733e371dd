"""Greedy plans against Algorithm 1 worked by hand; similarity as a cost; what is said about a plan."""

import numpy as np
import pytest
from plan_sums import sum_of_costs

from pod.modeling.model.sharing import SharingPlan
from pod.plan.plan_report import describe_plan
from pod.plan.similarity import dissimilarity, greedy_plan
from pod.plan.solve import solve


def random_similarity(num_layers, num_query_heads, seed):
    values = np.random.default_rng(seed).random((num_layers, num_layers, num_query_heads))
    values = (values + values.transpose(1, 0, 2)) / 2
    values[np.arange(num_layers), np.arange(num_layers)] = 1.0
    return values


def test_the_cost_of_a_pair_is_the_mean_over_its_query_heads():
    similarity = random_similarity(4, 6, seed=0)
    costs = dissimilarity(similarity, 2)
    assert costs.shape == (4, 4, 2)
    assert costs[1, 3, 1] == pytest.approx(1 - similarity[1, 3, 3:].mean(), abs=1e-15)


def test_dp_costs_no_more_than_greedy_at_equal_saving():
    rng = np.random.default_rng(3)
    differ = 0
    for seed in range(10):
        similarity = random_similarity(12, 4, seed) ** rng.uniform(0.3, 1.0)
        greedy, costs = greedy_plan(similarity, 2, threshold=0.5), dissimilarity(similarity, 2)
        optimal = solve(costs, None).plan(greedy.num_followers)
        assert optimal.num_followers == greedy.num_followers
        assert sum_of_costs(optimal, costs, None) <= sum_of_costs(greedy, costs, None) + 1e-12
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
    assert solve(dissimilarity(similarity, 2), None).plan(1).lead == ((0, 0), (1, 0))


def test_provenance_travels_with_the_plan():
    similarity = random_similarity(4, 2, seed=0)
    assert greedy_plan(similarity, 2, 0.3, {"model": "m"}).provenance == {
        "algorithm": "greedy",
        "threshold": 0.3,
        "model": "m",
    }


def test_description_counts_roles_and_blocks():
    text = describe_plan(SharingPlan(lead=[[0, 0], [0, None], [None, None], [0, None]]))
    assert (
        "62.5%" in text and "roles of 8 (layer, KV head) pairs: 2 lead, 2 follow, 4 keep their window" in text
    )
    assert "100.0%" in describe_plan(SharingPlan.windows(4, 2))
