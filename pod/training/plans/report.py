"""A plan in words, and the whole curve: what every saving costs at least, and which roles the plans along it have."""

from typing import Any

import numpy as np

from pod.modeling.shipped.sharing import SharingPlan, roles_of
from pod.training.plans.choose import Choice, cost_at
from pod.training.plans.explore_args import ExploreArgs
from pod.training.plans.solve import units_of

PARETO_NAME = "pareto.json"
SCHEMA_VERSION = 1


def pareto(choice: Choice, explore: ExploreArgs, windows: dict[str, int]) -> dict[str, Any]:
    """Every saving that the allowed roles reach and no larger one undercuts: its least cost, that of as much or more with a role
    forbidden, and its plan's roles.

    Heads stand in one order on the whole curve, that which was found for the chosen plan; a curve with a role forbidden has its
    own. ``saving`` is meant at ``budget_length`` tokens.
    """
    frontier = choice.frontier
    assert frontier is not None, "a greedy plan has no curve"
    points = []
    least = np.minimum.accumulate(frontier.costs[::-1])[::-1]  # of as much or more
    for units in map(int, np.flatnonzero(np.isfinite(least) & (frontier.costs == least))):
        plan = frontier.plan(units)
        points.append(
            {
                "units": units,
                "saving": plan.saving(explore.budget_tokens, **windows),
                "cost": float(frontier.costs[units]),
                "cost_without": {
                    role: cost_at(other, units) for role, other in (choice.without or {}).items()
                },
                "leads": plan.num_leads,
                "followers": plan.num_followers,
                "windows": plan.num_windows,
                "per_layer": roles_per_layer(plan),
            }
        )
    plan = choice.plan
    return {
        "schema": SCHEMA_VERSION,
        "budget_length": explore.budget_length,
        **windows,
        "cost": explore.cost,
        "retrieval_weight": explore.retrieval_weight,
        "chosen": {"units": units_of(plan), "saving": plan.saving(explore.budget_tokens, **windows)},
        "points": points,
    }


def roles_per_layer(plan: SharingPlan) -> dict[str, list[int]]:
    """How many KV heads of each layer lead, follow and keep their window."""
    roles = [roles_of(plan.lead, layer) for layer in range(plan.num_layers)]
    return {name: [len(getattr(x, name)) for x in roles] for name in ("leads", "followers", "windows")}


def describe_plan(plan: SharingPlan) -> str:
    """A few lines about a plan: KV saving, what heads do, number of blocks, longest block, followers per KV head."""
    blocks = [(head, block) for head in range(plan.num_key_value_heads) for block in plan.blocks(head)]
    lines = [
        f"KV saving (long sequences): {plan.asymptotic_saving:.1%}",
        f"roles of {plan.num_pairs} (layer, KV head) pairs: {plan.num_leads} lead, {plan.num_followers} follow, "
        f"{plan.num_windows} keep their window"
        + (
            f"; {plan.bits.count(4)} of {plan.num_layers} layers in 4 bits"
            if plan.bits and plan.packs
            else ""
        ),
        f"blocks: {len(blocks)} in {plan.num_key_value_heads} KV heads of {plan.num_layers} layers",
    ]
    if blocks:
        head, longest = max(blocks, key=lambda item: len(item[1]))
        layers = ", ".join(map(str, longest))
        lines.append(
            f"longest block: {len(longest)} {'layer' if len(longest) == 1 else 'layers'} (KV head {head}: {layers})"
        )
    return "\n".join(lines)
