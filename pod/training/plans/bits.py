"""Bits in the budget: each layer holds what its heads keep in 16 or in 4 bits, and each head leads, follows or keeps its window.

Given the bits of every layer the plans of least cost are exact (``solve_table``). Which layers are packed is found by local search:
layers are turned while that makes the best plan cheaper, at prices per saved unit all along the curve and at the saving that is asked
for; the curve is the least of what is found. Of few layers all choices are solved. A plan in which every *pair* had bits of its own
bounds what any can cost.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from pod.modeling.shipped.sharing import BITS, NATIVE_TOKENS, SharingPlan
from pod.training.plans.solve import Curve, Floats, Frontier, Ints, Role, solve_table

PACKED = 4
_PRICES = 24
_FEW = 256  # choices of which all are solved exactly
_HELD = 8  # choices whose plans are held at a time
Choice = tuple[bool, ...]
"""Per layer, whether it is packed."""


@dataclass(frozen=True)
class PackedCosts:
    """What roles cost, what packing adds, and at which length it saves.

    Attributes:
        follow: ``[L, L, H]``, None = nobody follows; window: ``[L, H]``, None = no windows.
        lead4, follow4: ``[L, H]`` cost of 4 bits of a lead's keys and values, of a follower's values.
        n, near: tokens, and those of them in a window.
    """

    follow: Floats | None
    window: Floats | None
    lead4: Floats
    follow4: Floats
    n: int
    near: int

    @cached_property
    def units(self) -> tuple[int, int, int]:
        """Units of a pair's distant bytes, and those that a packed lead and follower save: of such a number that rounding down
        loses least."""
        far = max(0, self.n - self.near) / self.n
        packs = (1 - min(1.0, NATIVE_TOKENS / self.n)) * (1 - BITS[PACKED] / 16)
        share = packs / far + 1e-6 if far else 0.0
        pair = min(range(40, 15, -2), key=lambda units: (units * share % 1 + units * share / 2 % 1) / units)
        return pair, int(pair * share), pair // 2 + int(pair * share / 2)

    def solve(self, packed: Sequence[bool] | None, price: float | None = None) -> Frontier:
        """The frontier when these layers are packed; None = every pair as it likes. With a price, what every plan costs less what
        it saves at that price per unit: the frontier has one point, the plan of most worth."""
        pair, lead4, follow4 = self.units
        barred = np.zeros((2, len(self.lead4), 1))
        if packed is not None:
            flags = np.asarray(packed)[:, None]
            barred[0], barred[1] = np.where(flags, np.inf, 0.0), np.where(flags, 0.0, np.inf)
        nothing = np.zeros_like(self.lead4)
        roles = [Role("lead", 0, nothing + barred[0]), Role("lead", lead4, self.lead4 + barred[1])]
        if self.follow is not None:
            roles.append(Role("follow", pair // 2, self.follow + barred[0]))
            roles.append(Role("follow", follow4, self.follow + self.follow4 + barred[1]))
        if self.window is not None:
            roles.append(Role("window", pair, self.window))
        if price is not None:
            roles = [Role(role.does, 0, role.costs - price * role.units) for role in roles]
        return solve_table(roles, pair)


@dataclass(frozen=True)
class PackedFrontier(Curve):
    """The least cost of every saving among the choices of bits that were solved, and the plans that have it.

    Attributes:
        bound: costs that no choice of bits beats.
        solved: the costs of each choice.
    """

    bound: Floats
    solved: dict[Choice, Floats]
    _solve: Callable[[Choice], Frontier]

    @property
    def targets(self) -> Ints:
        """All: where no plan saves just so much, one that saves a little more is near."""
        return np.arange(len(self.costs))

    def plan(self, units: int, provenance: dict[str, Any] | None = None) -> SharingPlan:
        """A plan that saves ``units`` at least cost; ValueError for units that no plan saves."""
        packed = min(self.solved, key=lambda choice: self._cost_of(choice, slice(units, units + 1)))
        plan = self._solve(packed).plan(units, provenance)
        return replace(plan, bits=tuple(PACKED if one else 16 for one in packed) if any(packed) else None)

    def improved(self, units: int) -> "PackedFrontier":
        """With the choices that are met when layers of the best one are turned while that lowers the cost of so many units or more."""
        wanted, solved = slice(units, None), dict(self.solved)
        if len(solved) == 2 ** self.sizes[0]:
            return self

        def cost_of(choice: Choice) -> float:
            solved[choice] = self._solve(choice).costs
            return float(solved[choice][wanted].min(initial=np.inf))

        _descend(min(solved, key=lambda choice: self._cost_of(choice, wanted)), cost_of)
        return _least_of(self, solved)

    def _cost_of(self, choice: Choice, units: slice) -> float:
        return float(self.solved[choice][units].min(initial=np.inf))


def solve_packed(costs: PackedCosts) -> PackedFrontier:
    """The frontier of all choices of bits where these are few, else of those that a search finds."""
    layers, free = len(costs.lead4), costs.solve(None)
    solve = lru_cache(maxsize=_HELD)(costs.solve)
    few = 2**layers <= _FEW
    choices: Iterable[Choice] = product((False, True), repeat=layers) if few else _found(costs, free.costs)
    empty = PackedFrontier(free.sizes, free.pair_units, free.costs, free.costs, {}, solve)
    return _least_of(empty, {choice: solve(choice).costs for choice in choices})


def _least_of(frontier: PackedFrontier, solved: dict[Choice, Floats]) -> PackedFrontier:
    costs = np.full(max(map(len, solved.values())), np.inf)
    for own in solved.values():
        costs[: len(own)] = np.minimum(costs[: len(own)], own)
    return replace(frontier, costs=costs, solved=solved)


def _found(costs: PackedCosts, bound: Floats) -> list[Choice]:
    """No layer packed, all, and on the way what local search finds at the prices of evenly spaced savings; from one to the next a
    layer at a time, those first whose packing costs least."""
    layers = len(costs.lead4)
    marks = np.linspace(0, len(bound) - 1, _PRICES + 1).astype(int)
    least = np.minimum.accumulate(bound[::-1])[::-1][marks]
    found = [(False,) * layers]
    cheapest = costs.lead4.sum(axis=1).argsort()
    for price in [*np.diff(least) / np.diff(marks), None]:
        packed = (True,) * layers
        if price is not None:
            packed = _descend(found[-1], lambda choice, at=price: float(costs.solve(choice, at).costs[0]))
        for layer in cheapest:
            if found[-1][layer] != packed[layer]:
                found.append(_turned(found[-1], int(layer)))
    return found


def _descend(packed: Choice, cost_of: Callable[[Choice], float]) -> Choice:
    """Turn layers, one by one, while that lowers the cost."""
    least, step, last = cost_of(packed), 0, 0
    while step - last <= len(packed):
        other = _turned(packed, step % len(packed))
        step += 1
        if (cost := cost_of(other)) < least - 1e-15:
            packed, least, last = other, cost, step
    return packed


def _turned(packed: Choice, layer: int) -> Choice:
    return (*packed[:layer], not packed[layer], *packed[layer + 1 :])
