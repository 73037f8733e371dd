"""Plans on the way to the final one: refinements of it, of least cost, at the right steps; and models that take them."""

import itertools

import numpy as np
import pytest
import torch

import pod
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.args import TrainArgs
from pod.training.plans.costs import PlanCosts
from pod.training.plans.similarity import Similarity
from pod.training.plans.solve import solve, sum_of_costs, units_of
from pod.training.run.engine import save_activations
from pod.training.run.progressive import PlanSchedule, apply_plan, growing_plans, part_of, read_costs

LAYERS, HEADS, GROUPS = 6, 2, 3


def similarity(seed: int = 0) -> np.ndarray:
    """A random symmetric [L, L, Hq] with ones on the diagonal."""
    values = np.random.default_rng(seed).random((LAYERS, LAYERS, HEADS * GROUPS))
    values = (values + values.transpose(1, 0, 2)) / 2
    values[np.arange(LAYERS), np.arange(LAYERS)] = 1
    return values


def costs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Of followers and of windows."""
    generator = np.random.default_rng(seed)
    return generator.random((LAYERS, LAYERS, HEADS)), generator.random((LAYERS, HEADS)) * 2.5


def all_columns(lead, whole):
    """What one head may do in parts of a plan, from the top of `lead` on; whole: what it does in the plan."""
    layer = len(lead)
    if layer == LAYERS:
        yield tuple(lead)
        return
    options = {layer}
    if whole[layer] is None:
        options.add(None)
    elif whole[layer] != layer:
        last = next((x for x in reversed(lead) if x is not None), None)
        options |= {last} if last is not None and whole[last] == whole[layer] else set()
    for option in options:
        yield from all_columns([*lead, option], whole)


def all_parts(plan):
    columns = [list(all_columns([], column)) for column in zip(*plan.lead, strict=True)]
    return [SharingPlan(lead=list(zip(*heads, strict=True))) for heads in itertools.product(*columns)]


def is_part(fine: SharingPlan, coarse: SharingPlan) -> bool:
    """Whether windows of `fine` are windows of `coarse`, and followers are followers of the same block."""
    return fine.lead in {plan.lead for plan in all_parts(coarse)}


@pytest.mark.parametrize("seed", range(4))
def test_a_part_has_the_least_cost_of_all_that_save_as_much(seed):
    given = costs(seed)
    plan = solve(*given).plan(12)
    assert plan.num_followers > 1 and plan.num_windows > 1
    parts = all_parts(plan)
    for units in range(units_of(plan) + 1):
        reached = [p for p in parts if units_of(p) == units]
        best = min(sum_of_costs(p, *given) for p in reached)
        found = part_of(*given, plan, units)
        assert units_of(found) == units
        assert is_part(found, plan)
        assert sum_of_costs(found, *given) == pytest.approx(best, abs=1e-12)
    assert part_of(*given, plan, units_of(plan)).lead == plan.lead
    assert part_of(*given, plan, 0).is_dense


def test_stages_grow_evenly_and_what_saves_goes_on_saving():
    given = costs()
    plan = solve(*given).plan(12)
    plans = growing_plans(*given, plan, 4)
    assert [units_of(p) for p in plans] == [3, 6, 9, 12]
    assert plans[-1] is plan
    for fine, coarse in itertools.pairwise(plans):
        assert is_part(fine, coarse)
    few = SharingPlan(lead=[[0, 0], [0, 1], *[[layer, layer] for layer in range(2, LAYERS)]])
    assert growing_plans(*given, few, 4) == [few]


def test_windows_alone_grow_by_whole_windows():
    window = costs()[1]
    plan = solve(None, window).plan(10)
    assert [p.num_windows for p in growing_plans(costs()[0], window, plan, 4)] == [1, 2, 4, 5]


def write(folder, plan):
    plan.save(folder / "plan.json")
    Similarity(values=torch.tensor(similarity()), num_key_value_heads=HEADS).save(
        folder / "similarity.safetensors"
    )
    return folder / "plan.json"


def shared_plan(units=8):
    """Of followers alone, by similarity."""
    return solve(1 - similarity().reshape(LAYERS, LAYERS, HEADS, GROUPS).mean(-1), None).plan(
        units, {"cost": "similarity"}
    )


def test_the_schedule_ends_with_the_plan_at_progressive_steps(tmp_path):
    plan = shared_plan()
    args = TrainArgs(max_steps=50, progressive_steps=30, progressive_stages=4)
    schedule = PlanSchedule.from_args(args, plan, write(tmp_path, plan))
    counts = [schedule.plan_at(step).num_followers for step in range(50)]
    assert counts == [2] * 10 + [4] * 10 + [6] * 10 + [8] * 20
    assert schedule.plan_at(30) is plan and schedule.plan_at(49) is plan
    assert [step for step in range(50) if schedule.switches_at(step)] == [10, 20, 30]
    short = TrainArgs(progressive_steps=2, progressive_stages=4)
    counts = [
        PlanSchedule.from_args(short, plan, tmp_path / "plan.json").plan_at(s).num_followers for s in range(4)
    ]
    assert counts == [4, 6, 8, 8]  # four stages begin in two steps: the larger one of a step holds
    assert PlanSchedule.from_args(TrainArgs(), plan, None).stages == [(0, plan)]


def test_costs_are_read_in_the_plans_order_of_heads(tmp_path):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "window": (LAYERS, HEADS),
        "follow": (LAYERS, LAYERS, HEADS, HEADS),
        "in_place": (LAYERS, LAYERS, HEADS),
    }
    values = {
        name: torch.rand(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    values |= {f"{name}_retrieval": value * 3 for name, value in values.items()}
    order = torch.arange(GROUPS).expand(*shapes["follow"], GROUPS).clone()
    PlanCosts(values=values, order=order).save(tmp_path / "plan_costs.safetensors")
    lead = solve(*costs()).plan(9).lead
    provenance = {"cost": "projected", "retrieval_weight": 0.5}
    follow, window = read_costs(tmp_path / "plan.json", SharingPlan(lead=lead, provenance=provenance))
    np.testing.assert_allclose(follow, values["in_place"] * 2.5)
    np.testing.assert_allclose(window, values["window"] * 2.5)
    moved = [[0, 2, 1, 3, 4, 5], [5, 4, 3, 0, 1, 2]] * 3  # KV heads change places in every other layer
    follow, window = read_costs(tmp_path / "plan.json", SharingPlan(lead, provenance, moved))
    text = values["follow"], values["window"]
    assert window[1, 0] / text[1][1, 1] == pytest.approx(2.5) == window[2, 0] / text[1][2, 0]
    assert follow[0, 3, 1] / text[0][0, 3, 1, 0] == pytest.approx(2.5)
    assert follow[1, 3, 0] / text[0][1, 3, 1, 1] == pytest.approx(2.5)


def test_what_cannot_grow_is_refused(tmp_path):
    plan = shared_plan()
    args = TrainArgs(progressive_steps=10)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="needs .*similarity.safetensors: run launch/explore.py"):
        PlanSchedule.from_args(args, plan, tmp_path / "plan.json")
    with pytest.raises(ValueError, match="progressive_steps is 10, but every head leads"):
        PlanSchedule.from_args(args, SharingPlan.dense(LAYERS, HEADS), tmp_path / "plan.json")
    with pytest.raises(ValueError, match="progressive_stages is 1"):
        PlanSchedule.from_args(
            TrainArgs(progressive_steps=10, progressive_stages=1), plan, tmp_path / "plan.json"
        )
    write(tmp_path, plan)
    with pytest.raises(ValueError, match="is of 6 layers x 2 KV heads, the plan of 5 x 2"):
        PlanSchedule.from_args(args, SharingPlan(lead=[[0, 0]] * 5), tmp_path / "plan.json")
    with pytest.raises(ValueError, match="has windows, which no similarity prices"):
        PlanSchedule.from_args(args, SharingPlan(lead=[[0, None]] * LAYERS), tmp_path / "plan.json")
    with pytest.raises(ValueError, match="units is 9, this plan's parts save 0 to 8"):
        part_of(*costs(), plan, 9)


def tiny_model(lead=None, layout="pod"):
    torch.manual_seed(0)
    config = pod.PodConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        intermediate_size=32, initializer_range=0.2, num_sink_tokens=1, num_recent_tokens=3, lead=lead, layout=layout,
    )  # fmt: skip
    return pod.PodForCausalLM(config).train()


@pytest.mark.parametrize("carry", ["keep", "offload", "recompute"])
def test_a_model_under_an_applied_plan_is_the_model_of_that_plan(carry):
    early, late = [[0, 0], [1, None], [2, 2], [3, 2]], [[0, 0], [1, None], [None, 0], [1, 0]]
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
