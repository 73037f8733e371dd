"""Bits in the budget: each layer holds what its heads keep in 16 or in 4 bits, and each head leads, follows or keeps its window.

Given the bits of every layer the plan of least cost is exact (``solve_table``). The bits are found by local search: at a price
per saved unit a plan's worth is a small dynamic program per head, layers are turned while that helps, and the price is
bisected until the saving is the wanted one; the best few choices are then solved exactly, and layers of the best one are turned
once more. Of few layers all choices are solved. A plan in which every *pair* had bits of its own bounds what any can cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, product
from typing import Any

import numpy as np

from pod.modeling.shipped.sharing import BITS, NATIVE_TOKENS, SharingPlan
from pod.training.plans.solve import Floats, Role, solve_table

PACKED = 4
PAIR_UNITS = 32
"""Units of a pair's bytes: savings of roles are rounded to a 32nd."""
_PRICES = 24  # steps of the bisection
_EXACT = 6  # choices of bits that are solved exactly
_FEW = 256  # choices of which all are solved exactly
Choice = tuple[bool, ...]
"""Per layer, whether it is packed."""


@dataclass(frozen=True)
class PackedCosts:
    """What roles cost, and what packing adds.

    Attributes:
        follow: ``[L, L, H]``, None = nobody follows; window: ``[L, H]``, None = no windows.
        lead4, follow4: ``[L, H]`` cost of 4 bits of a lead's keys and values, of a follower's values.
    """

    follow: Floats | None
    window: Floats | None
    lead4: Floats
    follow4: Floats

    def table(self, packed: Sequence[bool] | None, n: int, near: int) -> list[Role]:
        """The roles when these layers are packed; None = every pair as it likes. ``near``: tokens of a window."""
        far, width = max(0, n - near) / n, BITS[PACKED] / 16
        packs = (1 - min(1.0, NATIVE_TOKENS / n)) * (1 - width)
        barred = np.zeros((2, len(self.lead4), 1))
        if packed is not None:
            flags = np.asarray(packed)[:, None]
            barred[0], barred[1] = np.where(flags, np.inf, 0.0), np.where(flags, 0.0, np.inf)
        nothing = np.zeros_like(self.lead4)
        roles = [Role("lead", 0, nothing + barred[0]), Role("lead", _units(packs), self.lead4 + barred[1])]
        if self.follow is not None:
            roles.append(Role("follow", _units(far / 2), self.follow + barred[0]))
            roles.append(Role("follow", _units((far + packs) / 2), self.follow + self.follow4 + barred[1]))
        if self.window is not None:
            roles.append(Role("window", _units(far), self.window))
        return roles


def _units(share: float) -> int:
    return round(PAIR_UNITS * share)


def plan_with_bits(
    costs: PackedCosts, target_saving: float, n: int, windows: tuple[int, int], provenance: dict[str, Any]
) -> SharingPlan:
    """The cheapest plan found that saves ``target_saving`` of the bytes at ``n`` tokens, or the next that saves more.

    ``windows``: sink and recent tokens. Its provenance gets ``plan_cost`` and ``plan_cost_bound``, which no choice of bits beats.

    Raises: ValueError for a saving that no plan reaches.
    """
    near, layers = sum(windows), len(costs.lead4)
    pairs = costs.lead4.size
    free = solve_table(costs.table(None, n, near), PAIR_UNITS)
    wanted = int(np.ceil(target_saving * PAIR_UNITS * pairs))
    found = None
    while found is None or found.saving(n, *windows) < target_saving - 0.5 / (PAIR_UNITS * pairs):
        if wanted >= len(free.costs):
            raise ValueError(
                f"target_saving is {target_saving}, but the allowed roles in 16 and {PACKED} bits save at most "
                f"{(len(free.costs) - 1) / (PAIR_UNITS * pairs):.3f} of the bytes at {n} tokens: lower it"
            )
        found = _best(costs, wanted, n, near, layers, provenance)
        wanted += max(1, pairs // 16)
    bound = float(free.costs[min(wanted, len(free.costs)) - max(1, pairs // 16) :].min())
    return replace(found, provenance=found.provenance | {"plan_cost_bound": bound})


def _best(
    costs: PackedCosts, wanted: int, n: int, near: int, layers: int, provenance: dict[str, Any]
) -> SharingPlan:
    """The cheapest of the promising choices of bits, each solved exactly for at least so many units, after turning layers one by
    one while that lowers the cost; of all choices where these are few."""

    @cache
    def cost_of(packed: Choice) -> float:
        frontier = solve_table(costs.table(packed, n, near), PAIR_UNITS)
        return float(frontier.costs[wanted:].min(initial=np.inf))

    if 2**layers <= _FEW:
        packed = min(product((False, True), repeat=layers), key=cost_of)
    else:
        packed = min(_choices(costs, wanted, n, near, layers), key=cost_of)
        least, last = cost_of(packed), 0
        for step in count():
            if step - last > layers:
                break
            flipped = list(packed)
            flipped[step % layers] = not flipped[step % layers]
            if (cost := cost_of(tuple(flipped))) < least:
                packed, least, last = tuple(flipped), cost, step
    frontier = solve_table(costs.table(packed, n, near), PAIR_UNITS)
    units = wanted + int(frontier.costs[wanted:].argmin())
    plan = frontier.plan(units, provenance | {"plan_cost": float(frontier.costs[units])})
    return replace(plan, bits=tuple(PACKED if one else 16 for one in packed) if any(packed) else None)


def _choices(costs: PackedCosts, wanted: int, n: int, near: int, layers: int) -> list[Choice]:
    """Choices of packed layers that local search finds at prices around the one that saves ``wanted`` units; nearest first."""
    found: dict[Choice, int] = {(False,) * layers: 0, (True,) * layers: 0}
    low, high = 0.0, 1e3
    packed = np.zeros(layers, dtype=bool)
    for step in range(_PRICES):
        price = np.sqrt(max(low, 1e-12) * high)
        packed, units = _descend(costs, packed, price, n, near)
        found[tuple(packed.tolist())] = step
        low, high = (price, high) if units < wanted else (low, price)
    nearest = sorted(found, key=lambda choice: -found[choice])[:_EXACT]
    return [*nearest, (False,) * layers, (True,) * layers]


def _descend(costs: PackedCosts, packed: Any, price: float, n: int, near: int) -> tuple[Any, int]:
    """Turn layers, one by one, while that makes the plan worth more at this price."""
    roles = [costs.table([flag] * len(packed), n, near) for flag in (False, True)]
    worth, units = _worth(roles, packed, price)
    turned = True
    while turned:
        turned = False
        for layer in range(len(packed)):
            other = packed.copy()
            other[layer] = not other[layer]
            found, saved = _worth(roles, other, price)
            if found < worth - 1e-15:
                packed, worth, units, turned = other, found, saved, True
    return packed, units


def _worth(roles: list[list[Role]], packed: Any, price: float) -> tuple[float, int]:
    """Least ``Σ cost - price · units`` over all plans with these layers packed, and the units of that plan."""
    layers, heads = roles[0][0].costs.shape
    best = np.full((heads, layers + 1), np.inf)  # by the open lead: 0 = none, 1 + l = layer l
    best[:, 0] = 0.0
    saved = np.zeros((heads, layers + 1), dtype=np.int64)
    for layer in range(layers):
        options, units = [], []
        for role in roles[int(packed[layer])]:
            option, count = np.full_like(best, np.inf), saved + role.units
            if role.does == "lead":
                opened = best.argmin(axis=1)
                rows = np.arange(heads)
                option[:, 1 + layer] = best[rows, opened] + role.costs[layer]
                count[:, 1 + layer] = saved[rows, opened] + role.units
            elif role.does == "follow":
                option[:, 1:] = best[:, 1:] + role.costs[:, layer].T
            else:
                option[:] = best + role.costs[layer][:, None]
            options.append(option - price * role.units)
            units.append(count)
        taken = np.argmin(options, axis=0)[None]
        best = np.take_along_axis(np.stack(options), taken, 0)[0]
        saved = np.take_along_axis(np.stack(units), taken, 0)[0]
    ends = best.argmin(axis=1)
    return float(best.min(axis=1).sum()), int(saved[np.arange(heads), ends].sum())
