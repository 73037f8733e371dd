"""The whole curve: what every saving costs at least, and which roles the plans along it have."""

from typing import Any

import numpy as np

from pod.modeling.shipped.sharing import SharingPlan, roles_of
from pod.training.explore_args import ExploreArgs
from pod.training.explore_plan import Choice, cost_at
from pod.training.planning import units_of

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
