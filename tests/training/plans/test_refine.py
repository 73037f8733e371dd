"""Local search over plans: the moves, the losses it measures, what it finds, and that it continues where it was."""

import itertools
import json

import numpy as np
import pytest
import torch

import pod
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.plans.refine import (
    FOLLOW,
    LEAD,
    WINDOW,
    LossLog,
    PlanLoss,
    Refinement,
    is_plan,
    lead_of_roles,
    plan_key,
    possible_moves,
    roles_of_plan,
)
from pod.training.plans.solve import solve, sum_of_costs, units_of

START = SharingPlan(lead=[[0, 0], [0, 1], [2, None], [2, 1], [4, 1]])


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


def every_table(shape):
    """All tables of roles that are plans."""
    for roles in itertools.product((LEAD, FOLLOW, WINDOW), repeat=shape[0] * shape[1]):
        table = np.array(roles, dtype=np.int8).reshape(shape)
        if is_plan(table):
            yield table


def random_plans(count, seed=0, shape=(5, 2)):
    rng = np.random.default_rng(seed)
    while count:
        roles = rng.integers(0, 3, shape).astype(np.int8)
        if is_plan(roles):
            count -= 1
            yield SharingPlan(lead=lead_of_roles(roles))


def additive_loss(seed, shape=(4, 2)):
    """A loss with terms of pairs and terms between heads, and the costs of the pairs alone."""
    rng = np.random.default_rng(seed)
    costs = rng.random((shape[0], *shape)), rng.random(shape) * 1.5
    cross = rng.random((3, 3, shape[0], shape[0])) * 0.7

    def loss(plan):
        roles, layers = roles_of_plan(plan), range(shape[0] - 1)
        between = sum(cross[roles[x, 0], roles[x + 1, 1], x, x + 1] for x in layers)
        return float(sum_of_costs(plan, *costs) + between)

    return costs, loss


def start_of(costs, units=5):
    return solve(*costs).plan(units)


def refine_plan(*arguments, **settings):
    return Refinement(*arguments, **{"say": lambda line: None} | settings).run()


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
    loss(SharingPlan(lead=[[0, 0], [0, 1], [2, None], [None, 3], [4, 3]]))
    for handle in handles:
        handle.remove()
    assert calls == [3, 4]


def test_tables_of_roles_and_plans_are_the_same_thing():
    for plan in random_plans(20):
        assert lead_of_roles(roles_of_plan(plan)) == plan.lead
    assert not is_plan(np.array([[WINDOW], [FOLLOW]], dtype=np.int8))


def test_moves_are_all_single_changes_that_leave_a_plan():
    moves = possible_moves(roles_of_plan(START))
    names = {LEAD: "lead", FOLLOW: "follow", WINDOW: "window"}
    found = {kind: {(*x[:2], names[x[2]]) for m in group for x in m} for kind, group in moves.items()}
    assert found["splits"] == {(1, 0, "lead"), (3, 0, "lead"), (3, 1, "lead"), (4, 1, "lead")}
    assert found["merges"] == {(2, 0, "follow"), (4, 0, "follow"), (1, 1, "follow")}
    assert found["opens"] == {(2, 1, "lead")}
    assert found["closes"] == {(2, 0, "window"), (4, 0, "window"), (1, 1, "window"), (0, 1, "window")}
    shifts = {frozenset(x[:2] for x in move) for move in moves["shifts"]}
    expected = [{(1, 0), (2, 0)}, {(2, 0), (3, 0)}, {(3, 0), (4, 0)}, {(1, 1), (3, 1)}]
    assert shifts == set(map(frozenset, expected))
    alone = possible_moves(roles_of_plan(START), has_followers=False, has_windows=False)
    assert not alone["merges"] and not alone["closes"] and alone["splits"] == moves["splits"]


def test_search_keeps_the_saving_and_never_ends_above_its_start():
    lower = 0
    for seed in range(12):
        costs, loss = additive_loss(seed, (5, 2))
        start = start_of(costs, 7)
        found = refine_plan(start, *costs, loss, 200)
        assert units_of(found) == units_of(start) == 7
        refined = found.provenance["refined"]
        assert refined["loss_before"] == loss(start) and refined["loss_after"] == loss(found)
        assert loss(found) <= loss(start)
        lower += loss(found) < loss(start)
    assert lower >= 4


def test_search_finds_nearly_the_best_of_all_plans():
    """Against every plan of the same saving: the search closes most of the gap that additive costs leave."""
    tables = [SharingPlan(lead=lead_of_roles(roles)) for roles in every_table((4, 2))]
    gaps, turned = [], 0
    for seed in range(6):
        costs, loss = additive_loss(seed)
        start = start_of(costs)
        best = min(loss(plan) for plan in tables if units_of(plan) == units_of(start))
        result = refine_plan(start, *costs, loss, 300)
        gaps.append(((loss(result) - best), (loss(start) - best)))
        turned += bool(((roles_of_plan(result) == WINDOW) != (roles_of_plan(start) == WINDOW)).any())
    after, before = (sum(column) for column in zip(*gaps, strict=True))
    assert after < 0.6 * before and after >= -1e-12
    assert turned > 0


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
def test_budget_counts_measured_plans(budget):
    costs, loss = additive_loss(1)
    calls = []
    start = start_of(costs)
    found = refine_plan(start, *costs, lambda plan: calls.append(plan) or loss(plan), budget)
    assert len(calls) == budget == found.provenance["refined"]["evaluations"]
    assert loss(found) <= loss(start)


def test_the_order_of_heads_stays_and_names_the_losses():
    costs, loss = additive_loss(3)
    start = start_of(costs)
    ordered = SharingPlan(lead=start.lead, head_order=[[1, 0]] * 4)
    assert plan_key(start) != plan_key(ordered) and plan_key(start) == str(json.dumps(start.lead))
    log = LossLog(None, {})
    found = refine_plan(ordered, *costs, loss, 20, log=log)
    assert found.head_order == ordered.head_order and plan_key(found) in log.losses
    assert plan_key(start) not in log.losses


def test_an_interrupted_search_measures_nothing_twice(tmp_path):
    costs, loss = additive_loss(4, (6, 2))
    start = start_of(costs)
    whole = refine_plan(start, *costs, loss, 100)
    calls = []

    def interrupted(plan):
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(plan.lead)
        return loss(plan)

    path, fingerprint = tmp_path / "refine.jsonl", {"model": "m"}
    with pytest.raises(KeyboardInterrupt):
        refine_plan(start, *costs, interrupted, 100, log=LossLog(path, fingerprint))
    with path.open("a") as file:
        file.write('{"plan": "[[0')  # the line that was being written
    again = []
    found = refine_plan(
        start,
        *costs,
        lambda plan: again.append(plan.lead) or loss(plan),
        100,
        log=LossLog(path, fingerprint),
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
    """The real thing, small: least cost, then refined on the sequences; the result is measured from scratch."""
    from pod.training.plans.costs import measure_costs

    order = torch.arange(2).expand(5, 5, 2, 2, 2)
    found = [measure_costs(model, x[None], 8, order) for x in sequences]
    costs = [sum(x[name] for x in found).numpy() for name in ("in_place", "window")]
    start = solve(*costs).plan(7)
    assert start.num_windows and start.num_followers
    result = refine_plan(start, *costs, PlanLoss(model, sequences), 60)
    before, after = whole_loss(model, start, sequences), whole_loss(model, result, sequences)
    assert result.provenance["refined"]["loss_after"] == pytest.approx(after, rel=1e-12)
    assert after <= before + 1e-12
