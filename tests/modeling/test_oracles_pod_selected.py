"""pod+snapkv, pod+pyramidkv and pod+expected_attention against their oracle."""

import pytest
import torch
from oracle_checks import MODELS, assert_agrees
from oracle_tools import TURNS, NaiveDecoder, run_cache
from oracles_pod_selected import PodSelected, block_budgets
from oracles_ranked import SnapKV, pyramid

import pod

OPTIONS = {"budget": 16, "window": 4, "kernel": 3, "pool": "avg"}
LATER = [("prompt", 24), ("decode", 14), ("prompt", 3), ("decode", 9)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("selection", ["snapkv", "pyramidkv"])
def test_equals_the_oracle(tools, selection, name):
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, **changes), tools.random_ids(1, 50)[0]
    alone = PodSelected(model, selection=None).run(ids, TURNS)
    oracle = PodSelected(model, selection=selection, **OPTIONS)
    assert_agrees(
        model, oracle, lambda: pod.make_cache(model, f"pod+{selection}", **OPTIONS), ids, TURNS, full=alone
    )
    assert (alone - NaiveDecoder(model).run(ids, TURNS)).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_expected_attention_equals_the_oracle(tools, name):
    family, changes = MODELS[name]
    model, ids = tools.make_pod(family, **changes), tools.random_ids(1, 50)[0]
    alone = PodSelected(model, selection=None).run(ids, TURNS)
    oracle = PodSelected(model, selection="expected_attention", budget=16, expected=(2, 20, 0.1))
    options = {"budget": 16, "num_sink_tokens": 2, "num_future_positions": 20, "epsilon": 0.1}
    make = lambda: pod.make_cache(model, "pod+expected_attention", **options)  # noqa: E731
    assert_agrees(model, oracle, make, ids, TURNS, full=alone)


@pytest.mark.parametrize("selection", ["snapkv", "pyramidkv"])
@pytest.mark.parametrize("windows", [(0, 1), (2, 5), (4, 40)], ids=str)
@pytest.mark.parametrize("turns", [TURNS, LATER], ids=["usual", "later"])
def test_proximal_windows(tools, selection, windows, turns):
    """Nearly everything distant; kept tokens that age while decoding; nothing distant before the end."""
    model, ids = tools.make_pod("llama", windows=windows), tools.random_ids(1, 50)[0]
    alone = PodSelected(model, selection=None).run(ids, turns)
    options = OPTIONS | {"pool": "max", "kernel": 1, "budget": 9}
    oracle = PodSelected(model, selection=selection, **options)
    make = lambda: pod.make_cache(model, f"pod+{selection}", **options)  # noqa: E731
    assert_agrees(model, oracle, make, ids, turns, ((), (5,)), full=alone)


@torch.no_grad()
def test_room_for_everything_is_pod(tools):
    model, ids = tools.make_pod("llama"), tools.random_ids(1, 50)[0]
    plain = PodSelected(model, selection=None).run(ids, TURNS)
    assert (run_cache(model, pod.make_cache(model, "pod"), ids[None], TURNS)[0] - plain).abs().max() <= 1e-9
    cache = pod.make_cache(model, "pod+snapkv", **(OPTIONS | {"budget": 50}))
    assert (run_cache(model, cache, ids[None], TURNS)[0] - plain).abs().max() <= 1e-9


@torch.no_grad()
def test_leads_hold_what_they_would_hold_alone(tools):
    """A lead is a dense head: in layer 0, which no other changes, it holds what snapkv alone holds."""
    shared, dense = tools.make_pod("llama"), tools.make_pod("llama", plan=False)
    ids = tools.random_ids(1, 30)[0]
    a, b = PodSelected(shared, selection="snapkv", **OPTIONS), SnapKV(dense, **OPTIONS)
    for oracle in (a, b):
        oracle.run(ids, [("prompt", 30)])
    positions = [[entry.position for entry in oracle.entries[0][0]] for oracle in (a, b)]
    assert positions[0] == positions[1] and len(positions[0]) == 16


@pytest.mark.parametrize("seen", [41, 50, 60, 75, 1000])
def test_block_budgets_add_up_to_the_total(seen):
    lead = [[0, 0], [0, 1], [0, 1], [3, 1], [3, 4]]
    budgets = block_budgets(lead, 40, 8, 20, seen)
    for head in range(2):
        column = [row[head] for row in budgets]
        assert 5 * 40 - 5 < sum(column) <= 5 * 40 and min(column) >= 8 and max(column) <= seen
        assert all(column[layer] == column[lead[layer][head]] for layer in range(5))
    own = [[layer] for layer in range(5)]
    assert block_budgets(own, 40, 8, 20, seen) == [[b] for b in pyramid(5, 40, 8, 20, seen)]
