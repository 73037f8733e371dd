"""Plans on the way to the final one: refinements of it, of least cost, at the right steps; and models that take them."""

import itertools

import numpy as np
import pytest
import torch

import pod
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.args import TrainArgs
from pod.training.engine import save_activations
from pod.training.planning import dp_plan, plan_cost
from pod.training.progressive import PlanSchedule, apply_plan, growing_plans, refine
from pod.training.similarity import Similarity

LAYERS, HEADS, GROUPS = 8, 2, 3


def similarity(seed: int = 0) -> np.ndarray:
    """A random symmetric [L, L, Hq] with ones on the diagonal."""
    values = np.random.default_rng(seed).random((LAYERS, LAYERS, HEADS * GROUPS))
    values = (values + values.transpose(1, 0, 2)) / 2
    values[np.arange(LAYERS), np.arange(LAYERS)] = 1
    return values


def all_partitions(layers: int):
    """lead [layers] of every cut into consecutive blocks."""
    for cuts in itertools.product((False, True), repeat=layers - 1):
        lead = [0]
        for layer, cut in enumerate(cuts, start=1):
            lead.append(layer if cut else lead[-1])
        yield lead


def is_refinement(fine: SharingPlan, coarse: SharingPlan) -> bool:
    """Whether every block of `fine` lies inside one block of `coarse`."""
    blocks = [set(block) for block in coarse.blocks(0)], [set(block) for block in coarse.blocks(1)]
    return all(
        any(set(block) <= whole for whole in blocks[head])
        for head in range(HEADS)
        for block in fine.blocks(head)
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_refinement_has_the_least_cost_of_all_with_as_many_followers(seed):
    values = similarity(seed)
    plan = dp_plan(values, HEADS, 0.3)
    candidates = [
        SharingPlan(lead=list(zip(*heads, strict=True)))
        for heads in itertools.product(all_partitions(LAYERS), repeat=HEADS)
    ]
    inside = [candidate for candidate in candidates if is_refinement(candidate, plan)]
    for count in range(plan.num_followers + 1):
        best = min(plan_cost(values, c) for c in inside if c.num_followers == count)
        found = refine(values, plan, count)
        assert found.num_followers == count
        assert is_refinement(found, plan)
        assert plan_cost(values, found) == pytest.approx(best, abs=1e-12)
    assert refine(values, plan, plan.num_followers).lead == plan.lead
    assert refine(values, plan, 0).is_dense


def test_stages_grow_evenly_and_a_follower_stays_one():
    values = similarity()
    plan = dp_plan(values, HEADS, 0.375)  # 12 of 16 pairs follow
    plans = growing_plans(values, plan, 4)
    assert [p.num_followers for p in plans] == [3, 6, 9, 12]
    assert plans[-1] is plan
    for fine, coarse in itertools.pairwise(plans):
        assert is_refinement(fine, coarse)
    few = SharingPlan(lead=[[0, 0], [0, 1], *[[layer, layer] for layer in range(2, LAYERS)]])
    assert growing_plans(values, few, 4) == [few]


def write(folder, plan, values=None):
    plan.save(folder / "plan.json")
    Similarity(
        values=torch.tensor(similarity() if values is None else values), num_key_value_heads=HEADS
    ).save(folder / "similarity.safetensors")
    return folder / "plan.json"


def test_the_schedule_ends_with_the_plan_at_progressive_steps(tmp_path):
    plan = dp_plan(similarity(), HEADS, 0.375)
    args = TrainArgs(max_steps=50, progressive_steps=30, progressive_stages=4)
    schedule = PlanSchedule.from_args(args, plan, write(tmp_path, plan))
    counts = [schedule.plan_at(step).num_followers for step in range(50)]
    assert counts == [3] * 10 + [6] * 10 + [9] * 10 + [12] * 20
    assert schedule.plan_at(30) is plan and schedule.plan_at(49) is plan
    assert [step for step in range(50) if schedule.switches_at(step)] == [10, 20, 30]
    short = TrainArgs(progressive_steps=2, progressive_stages=4)
    counts = [
        PlanSchedule.from_args(short, plan, tmp_path / "plan.json").plan_at(s).num_followers for s in range(4)
    ]
    assert counts == [6, 9, 12, 12]  # four stages begin in two steps: the larger one of a step holds
    assert PlanSchedule.from_args(TrainArgs(), plan, None).stages == [(0, plan)]


def test_what_cannot_grow_is_refused(tmp_path):
    plan = dp_plan(similarity(), HEADS, 0.375)
    args = TrainArgs(progressive_steps=10)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="needs .*similarity.safetensors: run launch/explore.py"):
        PlanSchedule.from_args(args, plan, tmp_path / "plan.json")
    with pytest.raises(ValueError, match="progressive_steps is 10, but nothing is shared"):
        PlanSchedule.from_args(args, SharingPlan.dense(LAYERS, HEADS), tmp_path / "plan.json")
    with pytest.raises(ValueError, match="progressive_stages is 1"):
        PlanSchedule.from_args(
            TrainArgs(progressive_steps=10, progressive_stages=1), plan, tmp_path / "plan.json"
        )
    write(tmp_path, plan, similarity()[:5, :5])
    with pytest.raises(ValueError, match="is of 5 layers x 2 KV heads, the plan of 8 x 2"):
        PlanSchedule.from_args(args, plan, tmp_path / "plan.json")


def tiny_model(lead=None, layout="pod"):
    torch.manual_seed(0)
    config = pod.PodConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=32, initializer_range=0.2, num_sink_tokens=1, num_recent_tokens=3, lead=lead, layout=layout,
    )  # fmt: skip
    return pod.PodForCausalLM(config).train()


@pytest.mark.parametrize("carry", ["keep", "offload", "recompute"])
def test_a_model_under_an_applied_plan_is_the_model_of_that_plan(carry):
    early, late = [[0, 0], [1, 0], [2, 2], [3, 2]], [[0, 0], [1, 0], [2, 0], [2, 0]]
    ids = torch.arange(40).reshape(2, 20) % 31
    args = TrainArgs(carry=carry)
    model = tiny_model(late)
    save_activations(model, args, 20)
    for lead in (early, late):
        apply_plan(model, None, SharingPlan(lead=lead), args)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        expected = tiny_model(lead)
        expected(input_ids=ids, labels=ids).loss.backward()
        for (name, got), (_, want) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
            assert torch.allclose(got.grad, want.grad, atol=1e-6), (lead, name)
    assert model.config.lead == late


def test_plans_that_do_not_fit_are_refused():
    args = TrainArgs()
    with pytest.raises(ValueError, match="sharing plan is for 8 layers"):
        apply_plan(tiny_model(), None, SharingPlan.dense(8, 2), args)
    with pytest.raises(ValueError, match="layout = 'cla' shares by its weights"):
        apply_plan(tiny_model(layout="cla"), None, SharingPlan.dense(4, 2), args)
