"""Which heads keep windows, when their costs do not simply add up.

`solve.py` finds plans of least cost as if the costs of heads added up. What windows in several heads change
may also cancel, or add up to more: their cost together is ``Σ_ab M[a, b]`` over all pairs of these heads,
where ``M`` is the cost ``windows`` of `costs.py`. So the windows of a plan are chosen again, with that cost:

1. *Grow*: from no window on, add the window that costs least beside those that are there.
2. *Swap*: exchange a window for a lead while that lowers the cost, the best exchange first.

Both from the grown windows and from those that the plan had, swaps lead to windows that no exchange improves,
and the cheaper ones are taken. Roles of followers, of leads that are followed, of windows between the two,
and bits stay as they are. A window is exchanged for a lead of a layer with as many bits, so the plan saves
what it saved.

Example: on SmolLM2-135M, with 60 of 90 heads in windows, this finds the cheapest choice that 200 random
starts find.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pod.modeling.model.sharing import SharingPlan
from pod.plan.solve import Floats, Frontier, Ints, PackedFrontier

Bools = NDArray[np.bool_]
ENOUGH = 1e-12
"""The least gain, relative to the cost, for which windows are exchanged."""


BEYOND = 2
"""By how many pairs a plan may save more than it must, if it costs less then."""


@dataclass(frozen=True)
class Plans:
    """The plans of a curve, with their windows chosen together.

    Attributes:
        curve: the plans whose cost is least if the costs of heads add up.
        windows: ``[L, H, L, H]``, cost of windows in the curve's order of heads; None = costs add up.
        lead4: ``[L, H]``, cost of a lead in a layer of 4 bits; None = no layer has 4 bits.
    """

    curve: Frontier | PackedFrontier
    windows: Floats | None = None
    lead4: Floats | None = None

    @cached_property
    def _found(self) -> dict[int, tuple[SharingPlan, float]]:
        return {}

    def at(self, units: int) -> tuple[SharingPlan, float]:
        """The plan that saves ``units``, and its cost; ValueError where no plan does."""
        if units not in self._found:
            plan, cost = self.curve.plan(units), float(self.curve.costs[units])
            if self.windows is not None and plan.num_windows:
                plan, cost = rechosen(plan, cost, self.windows, self.lead4)
            self._found[units] = plan, cost
        return self._found[units]

    def cheapest(self, units: int) -> int:
        """The number of saved units whose plan costs least: from ``units`` to `BEYOND` pairs more."""
        if self.windows is None:
            return self.curve.cheapest(units)
        last = min(units + BEYOND * self.curve.pair_units, len(self.curve.costs) - 1)
        step = max(1, self.curve.pair_units // 2)
        near = {self.curve.cheapest(one) for one in range(units, last + 1, step)}
        return min(sorted(near), key=lambda one: self.at(one)[1])

    def cost_of(self, units: float, pair_units: int) -> float | None:
        """The cost of the plan that saves ``units`` of another curve or more; None where no plan does.

        Args:
            units: number of units of another curve, which may be a fraction.
            pair_units: units that a pair without distant tokens saves on that curve.
        """
        first = math.ceil(units * self.curve.pair_units / pair_units - 1e-9)  # in this curve's units
        if not np.isfinite(self.curve.costs[first:]).any():
            return None
        return self.at(self.curve.cheapest(first))[1]


def rechosen(
    plan: SharingPlan, cost: float, windows: Floats, lead4: Floats | None = None
) -> tuple[SharingPlan, float]:
    """The plan with other windows, as many as it has, and its cost.

    Args:
        plan: with at least one window.
        cost: of the plan, if the costs of heads add up.
        windows: ``[L, H, L, H]``.
        lead4: ``[L, H]``, cost of a lead in a packed layer; None = no layer is packed.
    """
    problem = _Exchange.of(plan, windows, lead4)
    has_window = has_windows(plan).ravel()
    starts = [has_window, problem.grown(has_window)]
    best = min((problem.swapped(start) for start in starts), key=problem.cost)
    leads = problem.leads(has_window)
    rest = cost - problem.matrix.diagonal()[has_window].sum() - problem.leading[leads].sum()
    return _with_windows(plan, best), float(rest + problem.cost(best))


def exchanged(plan: SharingPlan, windows: Floats, most: int, lead4: Floats | None = None) -> SharingPlan:
    """The plan after exchanges of a window for a lead, the best exchange first, while they lower the cost.

    Args:
        plan: with at least one window.
        windows: ``[L, H, L, H]``.
        most: the most exchanges.
        lead4: as in `rechosen`.
    """
    problem = _Exchange.of(plan, windows, lead4)
    return _with_windows(plan, problem.swapped(has_windows(plan).ravel(), most))


def changeable(plan: SharingPlan) -> tuple[int, int]:
    """How many windows and how many leads of a plan can be exchanged."""
    is_window, is_free = has_windows(plan), ~_in_blocks(plan)
    return int((is_window & is_free).sum()), int((~is_window & is_free).sum())


def cost_of_leads(plan: SharingPlan, lead4: Floats | None) -> float:
    """What leads in layers of 4 bits cost, those of blocks aside; arguments as in `rechosen`."""
    return float(_leading(plan, lead4)[~has_windows(plan) & ~_in_blocks(plan)].sum())


def _leading(plan: SharingPlan, lead4: Floats | None) -> Floats:
    """What each head ``[L, H]`` would cost as a lead: ``lead4`` in layers of 4 bits, nothing elsewhere."""
    found = np.zeros((plan.num_layers, plan.num_key_value_heads))
    if lead4 is not None and plan.bits:
        packed = np.array(plan.bits) == 4
        found[packed] = lead4[packed]
    return found


def has_windows(plan: SharingPlan) -> Bools:
    """Which heads of the plan keep windows, ``[L, H]``."""
    return np.array([[lead is None for lead in row] for row in plan.lead])


def _with_windows(plan: SharingPlan, windows: Bools) -> SharingPlan:
    """The plan with windows in these heads ``[P]`` and leads in the others; blocks of followers stay."""
    in_block = _in_blocks(plan)
    rows = []
    for layer, (row, chosen) in enumerate(zip(plan.lead, windows.reshape(in_block.shape), strict=True)):
        own = [
            lead if in_block[layer, head] else (None if chosen[head] else layer)
            for head, lead in enumerate(row)
        ]
        rows.append(tuple(own))
    return replace(plan, lead=tuple(rows))


def _in_blocks(plan: SharingPlan) -> Bools:
    """Which heads ``[L, H]`` stand between a lead and its followers, both included."""
    found = np.zeros((plan.num_layers, plan.num_key_value_heads), dtype=bool)
    for layer, row in enumerate(plan.lead):
        for head, lead in enumerate(row):
            if lead not in (None, layer):
                found[lead : layer + 1, head] = True
    return found


@dataclass(frozen=True)
class _Exchange:
    """Which of P heads keep windows.

    Attributes:
        matrix: ``[P, P]``, cost of windows.
        leading: ``[P]``, cost of a head that leads instead.
        classes: ``[P]``, a window is exchanged for a lead of the same class; heads of class -1 are not
            exchanged.
    """

    matrix: Floats
    leading: Floats
    classes: Ints

    @classmethod
    def of(cls, plan: SharingPlan, windows: Floats, lead4: Floats | None) -> "_Exchange":
        """The exchanges that leave the plan's blocks of followers and its bits; arguments as `rechosen`."""
        sizes = windows.shape[:2]
        packed = [bits == 4 for bits in plan.bits or (16,) * sizes[0]]
        classes = np.repeat(np.where(packed, 1, 0), sizes[1])
        classes[_in_blocks(plan).ravel()] = -1
        return cls(windows.reshape(sizes[0] * sizes[1], -1), _leading(plan, lead4).ravel(), classes)

    def leads(self, windows: Bools) -> Bools:
        """The heads ``[P]`` of a class that have no window."""
        return ~windows & (self.classes >= 0)

    def cost(self, windows: Bools) -> float:
        """The cost of windows in these heads, ``[P]`` of bool, and of leads in the others."""
        return float(self.matrix[windows][:, windows].sum() + self.leading[self.leads(windows)].sum())

    def grown(self, like: Bools) -> Bools:
        """Windows that are added one by one, as many of each class as there are in ``like``."""
        can_change = self.classes >= 0
        left = np.bincount(self.classes[like & can_change], minlength=2)
        windows = like & ~can_change
        added = self.matrix.diagonal() + 2 * self.matrix[:, windows].sum(1) - self.leading
        for _ in range(int(left.sum())):
            is_open = ~windows & can_change & (left[self.classes] > 0)
            chosen = int(np.where(is_open, added, np.inf).argmin())
            windows[chosen] = True
            left[self.classes[chosen]] -= 1
            added = added + 2 * self.matrix[chosen]
        return windows

    def swapped(self, windows: Bools, most: int | None = None) -> Bools:
        """These windows, exchanged for leads while that lowers the cost.

        Args:
            most: the most exchanges; None = as many as lower the cost.
        """
        windows = windows.copy()
        diagonal = self.matrix.diagonal()
        least = ENOUGH * abs(self.cost(windows))
        count = 0
        while most is None or count < most:
            beside = self.matrix[:, windows].sum(1)
            out = np.flatnonzero(windows & (self.classes >= 0))
            into = np.flatnonzero(self.leads(windows))
            if not len(out) or not len(into):
                return windows
            leaving = diagonal[out] - 2 * beside[out] + self.leading[out]
            coming = diagonal[into] + 2 * beside[into] - self.leading[into]
            change = leaving[:, None] + coming - 2 * self.matrix[np.ix_(out, into)]
            change[self.classes[out][:, None] != self.classes[into]] = np.inf
            place = int(change.argmin())
            if change.flat[place] >= -least:
                return windows
            windows[out[place // len(into)]] = False
            windows[into[place % len(into)]] = True
            count += 1
        return windows


def in_order(windows: Floats, kv_order: Sequence[Sequence[int]] | None) -> Floats:
    """The cost of windows ``[L, H, L, H]`` with the heads of every layer in another order.

    Args:
        kv_order: ``[L][H]``, the head that stands at each place; None = all stay where they are.
    """
    if kv_order is None:
        return windows
    layers = np.arange(len(kv_order))[:, None]
    heads = np.array(kv_order)
    return windows[layers, heads][:, :, layers, heads]
