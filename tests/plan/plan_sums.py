"""What a plan costs and saves, counted pair by pair."""

import numpy as np


def sum_of_costs(plan, follow, window) -> float:
    """Costs of the followers ``[L, L, H]`` and windows ``[L, H]`` of any plan; None = not allowed."""
    total = 0.0
    for layer, row in enumerate(plan.lead):
        for head, lead in enumerate(row):
            if lead is None:
                total += np.inf if window is None else window[layer, head]
            elif lead != layer:
                total += np.inf if follow is None else follow[lead, layer, head]
    return float(total)


def units_of(plan) -> int:
    """One for a follower, two for a window."""
    return plan.num_followers + 2 * plan.num_windows
