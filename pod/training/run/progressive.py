"""A plan that grows during training: plans on the way to the final one, and the step from which each of them holds.

A plan on the way saves less: of the final plan's windows some still lead, and its blocks are cut into smaller ones, so that a
(layer, KV head) pair that follows or keeps its window does so for the rest of the run. Among all such plans with a given saving the
one of least cost is taken: by the costs that the plan was made from.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pod.modeling.shipped.sharing import SharingPlan
from pod.training.args import TrainArgs
from pod.training.plans.align import placed_costs
from pod.training.plans.costs import COSTS_NAME, PlanCosts
from pod.training.plans.greedy import dissimilarity
from pod.training.plans.similarity import SIMILARITY_NAME, Similarity
from pod.training.plans.solve import Floats, solve, units_of
from pod.training.run.carry import set_carry


class PlanSchedule:
    """Which plan holds at which step.

    Args:
        stages: (first step, plan), steps rising from 0.
    """

    def __init__(self, stages: list[tuple[int, SharingPlan]]):
        self.stages = stages

    def plan_at(self, step: int) -> SharingPlan:
        """The plan of step `step`, counted from 0."""
        return [plan for first, plan in self.stages if first <= step][-1]

    def switches_at(self, step: int) -> bool:
        """Whether step `step` is the first one of another plan than that of the step before."""
        return step > 0 and any(first == step for first, _ in self.stages)

    @classmethod
    def from_args(cls, args: TrainArgs, plan: SharingPlan, plan_file: Path | None) -> "PlanSchedule":
        """The schedule of `progressive_steps` and `progressive_stages`; only `plan` when the first is 0.

        Stage k of K saves k / K of what the plan saves, from step (k - 1) / (K - 1) of progressive_steps on.

        Args:
            plan: of the recipe; the last stage is this object.
            plan_file: where it was read from; what it was made from lies beside it.

        Raises:
            ValueError: a dense plan, one stage, no costs, or those of another model.
        """
        if not args.progressive_steps:
            return cls([(0, plan)])
        if plan.is_dense or plan_file is None:
            raise ValueError(
                f"train.progressive_steps is {args.progressive_steps}, but every head leads: set model.plan, or "
                "progressive_steps=0"
            )
        if args.progressive_stages < 2:
            raise ValueError(
                "train.progressive_stages is 1, the whole plan from the first step: use 2 and more, or "
                "progressive_steps=0"
            )
        costs = read_costs(Path(plan_file), plan)
        plans = growing_plans(*costs, plan, args.progressive_stages)
        starts = [k * args.progressive_steps // max(1, len(plans) - 1) for k in range(len(plans))]
        # Stages that share a first step (fewer steps than stages): the last of them holds.
        return cls(list(dict(zip(starts, plans, strict=True)).items()))


def read_costs(plan_file: Path, plan: SharingPlan) -> tuple[Floats, Floats | None]:
    """Costs of followers ``[L, L, H]`` and windows ``[L, H]`` by place, from the file beside a plan that it was made from.

    Raises:
        ValueError: it is missing, unreadable or of another size than the plan; or a plan with windows has a similarity only.
    """
    projected = plan.provenance.get("cost") == "projected"
    path = plan_file.parent / (COSTS_NAME if projected else SIMILARITY_NAME)
    if not path.is_file():
        raise ValueError(
            f"train.progressive_steps needs {path}: run launch/explore.py with this recipe, copy the file that lies "
            "beside the plan's original, or set progressive_steps=0"
        )
    if not projected and plan.num_windows:
        raise ValueError(
            f"train.progressive_steps: {plan_file} has windows, which no similarity prices: make it with launch/explore.py and "
            "explore.cost=projected, or set progressive_steps=0"
        )
    if projected:
        total = PlanCosts.load(path).total(plan.provenance.get("retrieval_weight", 1.0))
        sizes = total["window"].shape
    else:
        found = Similarity.load(path)
        sizes = (found.values.shape[0], found.num_key_value_heads)
    if sizes != (plan.num_layers, plan.num_key_value_heads):
        raise ValueError(
            f"{path} is of {sizes[0]} layers x {sizes[1]} KV heads, the plan of {plan.num_layers} x "
            f"{plan.num_key_value_heads}: measure this model with launch/explore.py"
        )
    if not projected:
        return dissimilarity(found.values.numpy(), plan.num_key_value_heads), None
    if plan.head_order is None:
        return total["in_place"], total["window"]
    groups = len(plan.head_order[0]) // plan.num_key_value_heads
    order = np.array(plan.head_order)[:, ::groups] // groups
    return placed_costs(total["follow"], total["window"], order)


def growing_plans(
    follow: ArrayLike, window: ArrayLike | None, plan: SharingPlan, stages: int
) -> list[SharingPlan]:
    """`stages` plans from little to all of what `plan` saves, each a part of the next; the last is `plan` itself.

    Fewer when the plan saves fewer units than there are stages.
    """
    plans = [plan]
    for stage in range(stages - 1, 0, -1):
        part = part_of(follow, window, plans[0], round(units_of(plan) * stage / stages))
        if 0 < units_of(part) < units_of(plans[0]):
            plans.insert(0, part)
    return plans


def part_of(follow: ArrayLike, window: ArrayLike | None, plan: SharingPlan, units: int) -> SharingPlan:
    """The plan of least cost that saves `units`, or one less where windows alone are left, whose windows are windows of `plan` and
    whose blocks are parts of its blocks.

    Args:
        follow, window: costs as `solve` takes them; window may be None when the plan has none.
        units: from 0 to the plan's own number.

    Raises:
        ValueError: costs of another shape, or a number out of range.
    """
    if not 0 <= units <= units_of(plan):
        raise ValueError(f"units is {units}, this plan's parts save 0 to {units_of(plan)}")
    lead = np.array([[-1 if x is None else x for x in row] for row in plan.lead])
    layer = np.arange(plan.num_layers)
    may_follow = (lead[:, None] == lead[None]) & (lead[None] != layer[None, :, None])  # [lead, layer, head]
    follow = np.where(may_follow & (lead >= 0)[None], np.asarray(follow, dtype=np.float64), np.inf)
    if window is not None:
        window = np.where(lead < 0, np.asarray(window, dtype=np.float64), np.inf)
    frontier = solve(follow, window)
    units -= not np.isfinite(frontier.costs[units])
    provenance: dict[str, Any] = {"of": plan.provenance.get("of", plan.provenance)}
    found = frontier.plan(units, {"algorithm": "part", **provenance})
    return replace(plan, lead=found.lead, provenance=found.provenance)


def apply_plan(model: Any, ulysses: Any, plan: SharingPlan, args: TrainArgs) -> None:
    """Let a PodForCausalLM share as `plan` says from its next forward pass on. Its configuration keeps the final plan.

    Call it between steps, on all ranks: a backward pass that is still to come belongs to the plan of its forward pass.

    Args:
        model: without a `peft` wrapper.
        ulysses: the model's `Ulysses`, or None.

    Raises:
        ValueError: a plan of another size, or a layout that has no plan to change.
    """
    plan.check_fits(model.config.num_hidden_layers, model.config.num_key_value_heads)
    if model.config.layout != "pod":
        raise ValueError(
            f"layout = {model.config.layout!r} shares by its weights, not by a plan that can grow: set "
            "train.progressive_steps=0"
        )
    model.model.lead = plan.lead
    if ulysses is not None:
        ulysses.use_plan(plan.lead)
    set_carry(model, args.carry, args.offload_checkpoints)
