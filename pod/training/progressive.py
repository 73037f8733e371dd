"""Sharing that grows during training: plans on the way to the final one, and the step from which each of them holds.

The plans on the way cut the blocks of the final plan into smaller ones, so that a (layer, KV head) pair that follows
another layer keeps following one for the rest of the run. Among all such cuts with a given number of followers the
one of least `Σ (1 - similarity with the lead)` is taken: similar layers share first. (The paper's threshold lowered
from 1 to its target does the same by greed, in steps whose sizes it cannot choose.)
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pod.modeling.shipped.sharing import SharingPlan
from pod.training.args import TrainArgs
from pod.training.carry import set_carry
from pod.training.planning import (
    best_by_non_lead,
    block_cost,
    divide_non_lead,
    group_query_heads,
    lead_of_head,
)

SIMILARITY_NAME = "similarity.safetensors"


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

        Stage k of K holds k / K of the plan's followers, from step (k - 1) / (K - 1) of progressive_steps on.

        Args:
            plan: of the recipe; the last stage is this object.
            plan_file: where it was read from; the similarity lies beside it.

        Raises:
            ValueError: nothing is shared, one stage, no similarity, or one of another model.
        """
        if not args.progressive_steps:
            return cls([(0, plan)])
        if plan.is_dense or plan_file is None:
            raise ValueError(
                f"train.progressive_steps is {args.progressive_steps}, but nothing is shared: set model.plan, or "
                "progressive_steps=0"
            )
        if args.progressive_stages < 2:
            raise ValueError(
                "train.progressive_stages is 1, the whole plan from the first step: use 2 and more, or "
                "progressive_steps=0"
            )
        similarity = read_similarity(Path(plan_file), plan)
        plans = growing_plans(similarity, plan, args.progressive_stages)
        starts = [k * args.progressive_steps // max(1, len(plans) - 1) for k in range(len(plans))]
        # Stages that share a first step (fewer steps than stages): the last of them holds.
        return cls(list(dict(zip(starts, plans, strict=True)).items()))


def read_similarity(plan_file: Path, plan: SharingPlan) -> NDArray[np.float64]:
    """The similarity `[L, L, Hq]` beside a plan.

    Raises:
        ValueError: it is missing, unreadable or of another size than the plan.
    """
    from pod.training.similarity import Similarity

    path = plan_file.parent / SIMILARITY_NAME
    if not path.is_file():
        raise ValueError(
            f"train.progressive_steps needs {path}: run launch/explore.py with this recipe, copy the file that lies "
            "beside the plan's original, or set progressive_steps=0"
        )
    found = Similarity.load(path)
    sizes = (found.values.shape[0], found.num_key_value_heads)
    if sizes != (plan.num_layers, plan.num_key_value_heads):
        raise ValueError(
            f"{path} is of {sizes[0]} layers x {sizes[1]} KV heads, the plan of {plan.num_layers} x "
            f"{plan.num_key_value_heads}: measure this model with launch/explore.py"
        )
    return found.values.double().numpy()


def growing_plans(similarity: ArrayLike, plan: SharingPlan, stages: int) -> list[SharingPlan]:
    """`stages` plans from little to all of `plan`'s sharing, each a refinement of the next; the last is `plan` itself.

    Fewer when the plan has fewer followers than stages.
    """
    plans = [plan]
    for stage in range(stages - 1, 0, -1):
        followers = round(plan.num_followers * stage / stages)
        if 0 < followers < plans[0].num_followers:
            plans.insert(0, refine(similarity, plans[0], followers))
    return plans


def refine(similarity: ArrayLike, plan: SharingPlan, num_non_lead: int) -> SharingPlan:
    """The least-cost plan with `num_non_lead` followers whose blocks are parts of `plan`'s blocks.

    Args:
        similarity: `[L, L, Hq]`; a KV head's is the mean over its query heads.
        num_non_lead: from 0 to the plan's own number.

    Raises:
        ValueError: a tensor that is no similarity, or a number out of range.
    """
    if not 0 <= num_non_lead <= plan.num_followers:
        raise ValueError(f"num_non_lead is {num_non_lead}, this plan's parts have 0 to {plan.num_followers}")
    grouped = group_query_heads(similarity, plan.num_key_value_heads).mean(axis=-1)
    blocks = [(head, block) for head in range(plan.num_key_value_heads) for block in plan.blocks(head)]
    tables = [
        best_by_non_lead(block_cost(grouped[block[0] : block[-1] + 1, block[0] : block[-1] + 1, head]))
        for head, block in blocks
    ]
    shares = divide_non_lead([costs for costs, _ in tables], num_non_lead)
    lead = np.zeros((plan.num_layers, plan.num_key_value_heads), dtype=np.int64)
    for (head, block), (_, starts), share in zip(blocks, tables, shares, strict=True):
        lead[block, head] = block[0] + lead_of_head(starts, len(block) - share)
    provenance: dict[str, Any] = {"algorithm": "refinement", "num_non_lead": num_non_lead}
    provenance["of"] = plan.provenance.get("of", plan.provenance)
    return SharingPlan(lead=tuple(map(tuple, lead.tolist())), provenance=provenance)


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
