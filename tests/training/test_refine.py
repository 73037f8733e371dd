"""Local search over plans: the moves, the losses it measures, what it finds, and that it continues where it was."""

import itertools
import json

import numpy as np
import pytest
import torch

import pod
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.planning import least_cost_plan
from pod.training.refine import LossLog, PlanLoss, lead_flags, plan_of, possible_moves, refine_plan

START = SharingPlan(lead=[[0, 0], [0, 1], [2, 1], [2, 1], [4, 1]])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    config = pod.PodConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        num_sink_tokens=2,
        num_recent_tokens=5,
    )
    return pod.PodForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 61, (length,), generator=generator) for length in (40, 33, 40)]


def whole_loss(model, plan, sequences):
    """Mean loss per token from ordinary forward passes of a model with this plan."""
    config = pod.PodConfig(**(model.config.to_dict() | {"lead": [list(row) for row in plan.lead]}))
    shared = pod.PodForCausalLM(config).double().eval()
    shared.load_state_dict(model.state_dict())
    with torch.no_grad():
        losses = [shared(x[None], labels=x[None]).loss * (len(x) - 1) for x in sequences]
    return float(sum(losses)) / sum(len(x) - 1 for x in sequences)


def random_plans(count, seed=0, shape=(5, 2)):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        flags = rng.random(shape) < 0.5
        flags[0] = True
        yield plan_of(flags)


def additive_loss(seed, shape=(5, 2)):
    """A loss with terms of pairs and terms between heads, and the costs of the pairs alone."""
    rng = np.random.default_rng(seed)
    costs = rng.random((shape[0], *shape))
    cross = rng.random((shape[0], shape[0])) * 0.7

    def loss(plan):
        leads = np.asarray(plan.lead)
        own = sum(costs[leads[i, h], i, h] for i, h in np.ndindex(*shape) if leads[i, h] != i)
        return float(own + sum(cross[a, b] for a, b in leads))

    return costs, loss


def test_losses_are_those_of_models_with_the_plan(model, sequences):
    """Whatever plan was kept before, and wherever the next one first differs from it."""
    loss = PlanLoss(model, sequences)
    assert loss(START) == pytest.approx(whole_loss(model, START, sequences), rel=1e-12)
    kept = None
    for step, plan in enumerate(random_plans(24)):
        expected = whole_loss(model, plan, sequences)
        assert loss(plan) == pytest.approx(expected, rel=1e-12), (kept, plan.lead)
        if step % 3 == 0:
            loss.keep(plan)
            kept = plan.lead
            assert loss(plan) == pytest.approx(expected, rel=1e-12)


def test_layers_below_the_first_change_are_not_computed_again(model, sequences):
    calls = []
    handles = [
        layer.register_forward_hook(lambda *_, index=index: calls.append(index))
        for index, layer in enumerate(model.model.layers)
    ]
    loss = PlanLoss(model, sequences[:1])
    loss.keep(START)
    calls.clear()
    loss(SharingPlan(lead=[[0, 0], [0, 1], [2, 1], [2, 3], [4, 3]]))
    for handle in handles:
        handle.remove()
    assert calls == [3, 4]


def test_flags_and_plans_are_the_same_thing():
    for plan in random_plans(20):
        assert plan_of(lead_flags(plan)).lead == plan.lead


def test_moves_are_all_roles_but_those_of_layer_zero():
    splits, merges, shifts = possible_moves(lead_flags(START))
    assert {next(iter(x)) for x in merges} == {(2, 0), (4, 0), (1, 1)}
    assert {next(iter(x)) for x in splits} == {(1, 0), (3, 0), (2, 1), (3, 1), (4, 1)}
    expected = [{(1, 0), (2, 0)}, {(2, 0), (3, 0)}, {(3, 0), (4, 0)}, {(1, 1), (2, 1)}]
    assert sorted(map(sorted, shifts)) == sorted(map(sorted, expected))


def test_search_keeps_the_saving_and_never_ends_above_its_start():
    lower = 0
    for seed in range(12):
        costs, loss = additive_loss(seed)
        start = least_cost_plan(costs, 0.3)
        found = refine_plan(start, costs, loss, 200, say=lambda line: None)
        assert found.num_followers == start.num_followers
        refined = found.provenance["refined"]
        assert refined["loss_before"] == loss(start) and refined["loss_after"] == loss(found)
        assert loss(found) <= loss(start)
        lower += loss(found) < loss(start)
    assert lower >= 4


def test_search_finds_nearly_the_best_of_all_plans():
    """Against every plan of the same saving: the search closes most of the gap that additive costs leave."""
    gaps = []
    for seed in range(6):
        costs, loss = additive_loss(seed)
        start = least_cost_plan(costs, 0.3)
        every = (
            plan_of(np.array([True, True, *bits]).reshape(5, 2))
            for bits in itertools.product((False, True), repeat=8)
        )
        best = min(loss(plan) for plan in every if plan.num_followers == start.num_followers)
        found = loss(refine_plan(start, costs, loss, 300, say=lambda line: None))
        gaps.append(((found - best), (loss(start) - best)))
    after, before = (sum(column) for column in zip(*gaps, strict=True))
    assert after < 0.4 * before and after >= 0


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
def test_budget_counts_measured_plans(budget):
    costs, loss = additive_loss(1)
    calls = []
    start = least_cost_plan(costs, 0.3)
    found = refine_plan(
        start, costs, lambda plan: calls.append(plan) or loss(plan), budget, say=lambda line: None
    )
    assert len(calls) == budget == found.provenance["refined"]["evaluations"]
    assert loss(found) <= loss(start)


def test_an_interrupted_search_measures_nothing_twice(tmp_path):
    costs, loss = additive_loss(4)
    start = least_cost_plan(costs, 0.3)
    whole = refine_plan(start, costs, loss, 100, say=lambda line: None)
    calls = []

    def interrupted(plan):
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(plan.lead)
        return loss(plan)

    path, fingerprint = tmp_path / "refine.jsonl", {"model": "m"}
    with pytest.raises(KeyboardInterrupt):
        refine_plan(start, costs, interrupted, 100, log=LossLog(path, fingerprint))
    with path.open("a") as file:
        file.write('{"plan": "[[0')  # the line that was being written
    again = []
    found = refine_plan(
        start,
        costs,
        lambda plan: again.append(plan.lead) or loss(plan),
        100,
        log=LossLog(path, fingerprint),
        say=lambda line: None,
    )
    assert found == whole and found.provenance == whole.provenance
    assert len(calls) == 7 and not set(calls) & set(again)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 7 + len(again)
    assert json.loads(lines[0])["fingerprint"] == fingerprint


def test_losses_of_another_model_are_not_used(tmp_path):
    path = tmp_path / "refine.jsonl"
    LossLog(path, {"model": "a"}).add("[[0]]", 1.5)
    assert LossLog(path, {"model": "a"}).losses == {"[[0]]": 1.5}
    assert LossLog(path, {"model": "b"}).losses == {}
    assert LossLog(path, {"model": "a"}).losses == {}


def test_search_on_a_model(model, sequences):
    """The real thing, small: least `loss` cost, then refined on the sequences; the result is measured from scratch."""
    from pod.training.plan_costs import measure_pair_costs

    costs = sum(measure_pair_costs(model, x[None], 8, ["loss"])[0] for x in sequences)
    start = least_cost_plan(costs, 0.2)
    found = refine_plan(start, costs, PlanLoss(model, sequences), 60, say=lambda line: None)
    before, after = whole_loss(model, start, sequences), whole_loss(model, found, sequences)
    assert found.provenance["refined"]["loss_after"] == pytest.approx(after, rel=1e-12)
    assert after <= before + 1e-12
