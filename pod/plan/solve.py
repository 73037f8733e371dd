"""Plans of least cost at every number of saved units.

Each (layer, KV head) pair leads, follows or keeps its window. Each layer holds what its heads keep in 16 or
in 4 bits. Given the bits of every layer, the plans of least cost are exact (``solve_table``).

Which layers are packed is found by local search. It *turns* a layer, from 16 to 4 bits or back, while that
makes the best plan cheaper. The search runs at prices per saved unit all along the curve, and at the saving
that is asked for. Each choice of bits gives a curve of least costs, and the result is the lowest of these
curves. With few layers all choices are solved. If every *pair* had bits of its own, plans could cost less:
these costs are a lower bound.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pod.modeling.model.packed_bytes import RESIDUAL, bits_per_number, mean_size
from pod.modeling.model.sharing import SharingPlan
from pod.plan.checks import check_costs
from pod.plan.plan_progress import counter, steps

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

PAIR_UNITS = 2
"""Units that a (layer, KV head) pair saves when it holds no distant token: one for keys, one for values."""


@dataclass(frozen=True)
class Role:
    """Something that a (layer, KV head) pair may do about distant tokens.

    Attributes:
        does: ``lead`` opens a block of layers, ``follow`` joins the block that is open, and ``window`` takes
            no part in it and leaves it open.
        units: number of units that it saves of the bytes of a pair's distant tokens, >= 0.
        costs: ``[L, H]``. For ``follow`` ``[L, L, H]`` = [lead, layer, KV head], read where lead < layer.
            inf = not allowed.
    """

    does: Literal["lead", "follow", "window"]
    units: int
    costs: Floats


@dataclass(frozen=True)
class Curve:
    """The least cost of every saving.

    Attributes:
        sizes: numbers of layers and of KV heads.
        pair_units: units that a pair saves when it holds no distant token.
        costs: ``[units + 1]``, the least cost by number of saved units; inf where no plan saves exactly this
            many. The last one is finite.
    """

    sizes: tuple[int, int]
    pair_units: int
    costs: Floats

    @property
    def targets(self) -> Ints:
        """The numbers of saved units for which there is a plan, in rising order."""
        return np.flatnonzero(np.isfinite(self.costs))

    def cheapest(self, units: int) -> int:
        """The number of saved units that costs least, among ``units`` and all larger numbers."""
        return units + int(self.costs[units:].argmin())

    def savings_at(self, n: int, num_sink_tokens: int, num_recent_tokens: int) -> Floats:
        """The share of the KV bytes of ``n`` tokens that each of the ``targets`` saves, in rising order."""
        layers, heads = self.sizes
        unit = max(0, n - num_sink_tokens - num_recent_tokens) / n / (self.pair_units * layers * heads)
        return (self.targets * unit).astype(np.float64)

    def units_for(self, target_saving: float, n: int, num_sink_tokens: int, num_recent_tokens: int) -> int:
        """The least number of units that saves a share ``target_saving`` of the KV bytes, or more.

        Args:
            target_saving: from 0 to 1; it may be missed by 1e-6.
            n: tokens at which the bytes count.

        Raises:
            ValueError: a saving that these roles do not reach at that length.
        """
        savings = self.savings_at(n, num_sink_tokens, num_recent_tokens)
        least, most = savings[0], savings[-1]
        enough = self.targets[savings >= target_saving - 1e-6]
        if target_saving < 0 or not len(enough):
            raise ValueError(
                f"explore.target_saving is {target_saving}, but the allowed roles save {least:.3f} to "
                f"{most:.3f} of the bytes at {n} tokens (the windows hold {num_sink_tokens} + "
                f"{num_recent_tokens} of them): choose a saving in this range, a larger "
                "explore.budget_length, or more explore.roles; a follower saves half of its bytes at most"
            )
        return int(enough[0])


@dataclass(frozen=True)
class Frontier(Curve):
    """The least cost of every saving, and the plans that have it.

    Attributes:
        table: the roles that a pair may have.
    """

    table: tuple[Role, ...]
    _heads: "_Heads"
    _shares: list[Ints]  # for each head: the units that it saves, by the units of it and the heads before it

    def plan(self, units: int, provenance: dict[str, Any] | None = None) -> SharingPlan:
        """A plan that saves ``units`` at least cost.

        Plans of equal cost are decided layer by layer, from the last one down: by the lowest open lead, and
        then by the role that stands first in the table. Among heads, later ones save less.

        Raises:
            ValueError: units that no plan saves.
        """
        if not 0 <= units < len(self.costs) or not np.isfinite(self.costs[units]):
            most = len(self.costs) - 1
            raise ValueError(f"no plan of the allowed roles saves {units} units; up to {most} can be saved")
        found = {"algorithm": "dp", "units": units, "cost": float(self.costs[units]), **(provenance or {})}
        columns: list[list[int | None]] = []
        for head in reversed(range(len(self._shares))):
            share = int(self._shares[head][units])
            columns.append(self._heads.lead_of(head, share, self.table))
            units -= share
        return SharingPlan(lead=tuple(zip(*reversed(columns), strict=True)), provenance=found)


def solve(follow: ArrayLike | None, window: ArrayLike | None) -> Frontier:
    """Find the least cost of every saving with leads, followers and windows. A lead costs and saves nothing.

    Args:
        follow: cost of a follower, ``[L, L, H]`` = [lead, layer, KV head], read where lead < layer. A
            follower saves 1 unit (keys). A head follows the lead that it had last; windows may stand between.
            None = nobody follows. inf = not allowed there.
        window: cost of a window, ``[L, H]``. A window saves 2 units (keys and values). None = no windows.
            inf = not allowed there.

    Raises:
        ValueError: both costs are None, a shape does not fit, or a cost is NaN.
    """
    _check_roles(follow, window)
    table = [] if follow is None else [Role("follow", 1, np.asarray(follow, dtype=np.float64))]
    table += [] if window is None else [Role("window", PAIR_UNITS, np.asarray(window, dtype=np.float64))]
    if not table:
        raise ValueError("the costs of followers and of windows are both None: give at least one of them")
    return solve_table([Role("lead", 0, np.zeros(table[0].costs.shape[-2:])), *table], PAIR_UNITS)


def _check_roles(follow: ArrayLike | None, window: ArrayLike | None) -> dict[str, int]:
    """The sizes of the costs of followers and windows by axis, as `check_costs` returns them.

    Raises:
        ValueError: the shapes do not fit each other, or a cost is NaN.
    """
    sizes = {} if follow is None else check_costs("follow", follow, "L L H")
    return sizes if window is None else check_costs("window", window, "L H", sizes)


def solve_table(table: Sequence[Role], pair_units: int) -> Frontier:
    """Find the least cost of every saving with any roles.

    An exact dynamic program solves each KV head. The curves of the heads are then combined, head by head.

    Raises:
        ValueError: there is no plan, because every role of some pair costs inf.
    """
    heads = _solve_heads(table)
    shares, reached = _divide(heads.least)
    finite = np.flatnonzero(np.isfinite(reached))
    if not len(finite):
        raise ValueError("the costs allow no plan: every role of some (layer, KV head) pair costs inf")
    layers, width = table[0].costs.shape[-2:]
    return Frontier((layers, width), pair_units, reached[: finite[-1] + 1], tuple(table), heads, shares)


class _Heads(NamedTuple):
    """The dynamic program of each KV head over (layer, open lead, saved units).

    The open lead is 0 for none, and ``1 + l`` for layer l.

    Attributes:
        least: ``[H, units]``, the least cost of all layers by the units that they save.
        ended: ``[H, units]``, the lead that is open after the last layer.
        taken: for each layer ``[H, L + 1, units]``, the index of its role, by the lead that is open after the
            layer and the units that are saved up to it.
        opened: for each layer ``[H, units]``, the lead that was open before this layer became a lead, by the
            units that were saved before it.
    """

    least: Floats
    ended: Ints
    taken: list[NDArray[np.int8]]
    opened: list[Ints]

    def lead_of(self, head: int, units: int, table: Sequence[Role]) -> list[int | None]:
        """The plan of one head that saves ``units``: for each layer its lead, or None for a window."""
        lead: list[int | None] = []
        now = int(self.ended[head, units])
        for layer in reversed(range(len(self.taken))):
            role = table[self.taken[layer][head, now, units]]
            lead.append(None if role.does == "window" else now - 1)
            units -= role.units
            if role.does == "lead":
                now = int(self.opened[layer][head, units])
        return lead[::-1]


def _solve_heads(table: Sequence[Role]) -> _Heads:
    """Run the dynamic program for all KV heads at once, from the lowest layer up."""
    layers, heads = table[0].costs.shape[-2:]
    width = layers * max(role.units for role in table) + 1
    best = np.full((heads, layers + 1, width), np.inf)
    best[:, 0, 0] = 0.0
    taken, opened = [], []
    for layer in range(layers):
        opened.append(best.argmin(axis=1))
        options = np.full((len(table), *best.shape), np.inf)
        lower = slice(1, 1 + layer)  # the leads that may be open
        for option, role in zip(options, table, strict=True):
            before = best[..., : width - role.units]
            after = option[..., role.units :]
            if role.does == "lead":
                after[:, 1 + layer] = before.min(axis=1) + role.costs[layer][:, None]
            elif role.does == "follow":
                after[:, lower] = before[:, lower] + role.costs[:layer, layer].T[:, :, None]
            else:
                after[:] = before + role.costs[layer][:, None, None]
        taken.append(options.argmin(axis=0).astype(np.int8))
        best = options.min(axis=0)
    return _Heads(best.min(axis=1), best.argmin(axis=1), taken, opened)


def _divide(least: Floats) -> tuple[list[Ints], Floats]:
    """Combine the curves of all heads, by min-plus convolution.

    Args:
        least: ``[H, units]``, from `_Heads`.

    Returns:
        For each head, the units that it saves, by the units that it and the heads before it save together;
        and the least cost by the units of all heads.
    """
    reached, shares = np.zeros(1), []
    for own in least:
        options = np.full((len(own), len(reached) + len(own) - 1), np.inf)
        for units, cost in enumerate(own):
            options[units, units : units + len(reached)] = reached + cost
        shares.append(options.argmin(axis=0))
        reached = options.min(axis=0)
    return shares, reached


PACKED = 4  # bits of a packed layer
_PRICES = 24  # prices per saved unit at which the search runs
_FEW = 256  # choices of bits: up to this number, all of them are solved
_HELD = 8  # choices of bits whose plans are held at a time
PackedLayers = tuple[bool, ...]
"""Per layer, whether it is packed."""


@dataclass(frozen=True)
class PackedCosts:
    """The costs of roles, the costs that packing adds, and the length at which savings count.

    Attributes:
        follow: ``[L, L, H]``, cost of a follower; None = nobody follows.
        window: ``[L, H]``, cost of a window; None = no windows.
        lead4: ``[L, H]``, added cost of 4 bits for a lead's keys and values.
        follow4: ``[L, H]``, added cost of 4 bits for a follower's values; None where nobody follows.
        n: tokens at which savings count.
        near: number of these tokens that lie in a window.
        head_dim: of the model; the size of packed values depends on it. None = a multiple of ``GROUP_SIZE``.
        residual: how many of the newest tokens stay native at least in packed layers.
        packs_windows: whether windows are so long that packed layers pack their older tokens.
    """

    follow: Floats | None
    window: Floats | None
    lead4: Floats
    follow4: Floats | None
    n: int
    near: int
    head_dim: int | None = None
    residual: int = RESIDUAL
    packs_windows: bool = False

    def __post_init__(self) -> None:
        sizes = _check_roles(self.follow, self.window)
        for name in ("lead4", "follow4"):
            cost = getattr(self, name)
            if cost is not None or self.follow is not None:
                sizes = check_costs(name, cost, "L H", sizes)

    @cached_property
    def units(self) -> tuple[int, int, int]:
        """Units of a pair, and the units that a packed lead and a packed follower save.

        The units of a pair are the bytes of its distant tokens. Their number is chosen so that rounding the
        other two numbers down loses least. Windows count as 16-bit numbers. Those of packed layers may be
        packed too, so a plan may save more than its units say: see `fewest_units`.
        """
        key_bits, value_bits = bits_per_number(PACKED, self.head_dim)
        keys = self._saved_by_packing(key_bits)
        values = self._saved_by_packing(value_bits)
        lead, follower = keys + values, values
        pair = min(range(40, 15, -2), key=lambda units: (units * lead % 1 + units * follower % 1) / units)
        return pair, int(pair * lead), pair // 2 + int(pair * follower)

    def _saved_by_packing(self, bits: float) -> float:
        """The share of a pair's distant bytes that is saved when its keys, or its values, take these bits."""
        far = max(0, self.n - self.near) / self.n
        if not far:
            return 0.0
        return (1 - mean_size(bits, self.residual, self.n)) / far / 2 + 5e-7

    def solve(self, packed: Sequence[bool] | None, price: float | None = None) -> Frontier:
        """Find the least cost of every saving when these layers are packed.

        Args:
            packed: for each layer, whether it is packed. None = each pair has the bits that are best for it.
            price: of a saved unit. With a price, the cost of a plan is reduced by the price of its units. The
                frontier then has one point: the plan of least reduced cost.
        """
        pair, lead4, follow4 = self.units
        native = np.zeros_like(self.lead4)
        four = np.zeros_like(self.lead4)
        if packed is not None:
            native[np.asarray(packed)] = four[~np.asarray(packed)] = np.inf
        roles = [Role("lead", 0, native), Role("lead", lead4, self.lead4 + four)]
        if self.follow is not None and self.follow4 is not None:
            roles.append(Role("follow", pair // 2, self.follow + native))
            roles.append(Role("follow", follow4, self.follow + self.follow4 + four))
        if self.window is not None:
            roles.append(Role("window", pair, self.window))
        if price is not None:
            roles = [Role(role.does, 0, role.costs - price * role.units) for role in roles]
        return solve_table(roles, pair)


@dataclass(frozen=True)
class PackedFrontier(Curve):
    """The least cost of every saving among the choices of bits that were solved, and the plans that have it.

    Attributes:
        bound: a lower bound of the cost by number of saved units, whatever the choice of bits.
        solved: the costs of each choice of bits by number of saved units.
        packs_windows: see ``PackedCosts``.
    """

    bound: Floats
    solved: dict[PackedLayers, Floats]
    _solve: Callable[[PackedLayers], Frontier]
    packs_windows: bool = False

    @property
    def targets(self) -> Ints:
        """All numbers of saved units: where no plan saves one exactly, a plan saves a little more."""
        return np.arange(len(self.costs))

    def plan(self, units: int, provenance: dict[str, Any] | None = None) -> SharingPlan:
        """A plan that saves ``units`` at least cost; ValueError for units that no plan saves.

        A layer in which all heads keep windows is packed if that makes these windows smaller.
        """
        packed = min(self.solved, key=lambda choice: self._cost_of(choice, slice(units, units + 1)))
        plan = self._solve(packed).plan(units, provenance)
        if self.packs_windows:
            alone = (set(row) == {None} for row in plan.lead)
            packed = tuple(map(any, zip(packed, alone, strict=True)))
        if not any(packed):
            return replace(plan, bits=None)
        return replace(plan, bits=tuple(PACKED if is_packed else 16 for is_packed in packed))

    def improved(self, units: int) -> "PackedFrontier":
        """This frontier with more choices of bits solved: those that a search for ``units`` tries.

        The search begins at the best choice for ``units`` or more, and turns layers while that lowers the
        cost.
        """
        wanted = slice(units, None)
        solved = dict(self.solved)
        if len(solved) == 2 ** self.sizes[0]:
            return self

        with counter("bits at this saving") as bar:

            def cost_of(choice: PackedLayers) -> float:
                solved[choice] = self._solve(choice).costs
                bar.update()
                return float(solved[choice][wanted].min(initial=np.inf))

            _descend(min(solved, key=lambda choice: self._cost_of(choice, wanted)), cost_of)
        return _least_of(self, solved)

    def _cost_of(self, choice: PackedLayers, units: slice) -> float:
        """The least cost of a choice of bits in this range of saved units; inf where it has no plan."""
        return float(self.solved[choice][units].min(initial=np.inf))


def solve_packed(costs: PackedCosts) -> PackedFrontier:
    """Find the least cost of every saving: over all choices of bits where they are few, else by search."""
    layers = len(costs.lead4)
    free = costs.solve(None)
    solve = lru_cache(maxsize=_HELD)(costs.solve)
    choices: Iterable[PackedLayers]
    if 2**layers <= _FEW:
        choices = product((False, True), repeat=layers)
    else:
        choices = _found(costs, free.costs)
    empty = PackedFrontier(
        free.sizes, free.pair_units, free.costs, free.costs, {}, solve, costs.packs_windows
    )
    shown = steps(list(choices), "choices of bits")
    return _least_of(empty, {choice: solve(choice).costs for choice in shown})


def _least_of(frontier: PackedFrontier, solved: dict[PackedLayers, Floats]) -> PackedFrontier:
    """The frontier with the lowest cost of all solved choices at every number of saved units."""
    costs = np.full(max(map(len, solved.values())), np.inf)
    for own in solved.values():
        costs[: len(own)] = np.minimum(costs[: len(own)], own)
    return replace(frontier, costs=costs, solved=solved)


def _found(costs: PackedCosts, bound: Floats) -> list[PackedLayers]:
    """A path of choices of bits, from no packed layer to all layers packed, that turns one layer at a time.

    Between its ends, the path leads through the choices that local search finds at the prices of evenly
    spaced savings. From one such choice to the next, layers whose packing costs least are turned first.

    Args:
        costs: of roles and of packing.
        bound: lower bound of the cost by number of saved units, from which the prices are taken.
    """
    layers = len(costs.lead4)
    marks = np.linspace(0, len(bound) - 1, _PRICES + 1).astype(int)
    least = np.minimum.accumulate(bound[::-1])[::-1][marks]
    found = [(False,) * layers]
    cheapest = costs.lead4.sum(axis=1).argsort()
    for price in steps([*np.diff(least) / np.diff(marks), None], "bits at every saving"):
        packed = (True,) * layers
        if price is not None:
            packed = _descend(found[-1], lambda choice, at=price: float(costs.solve(choice, at).costs[0]))
        for layer in cheapest:
            if found[-1][layer] != packed[layer]:
                found.append(_turned(found[-1], int(layer)))
    return found


def _descend(packed: PackedLayers, cost_of: Callable[[PackedLayers], float]) -> PackedLayers:
    """Turn layers, one by one and round and round, until no single turn lowers the cost."""
    least = cost_of(packed)
    step = 0
    last = 0  # the step after the last gain
    while step - last <= len(packed):
        other = _turned(packed, step % len(packed))
        cost = cost_of(other)
        step += 1
        if cost < least - 1e-15:
            packed, least, last = other, cost, step
    return packed


def _turned(packed: PackedLayers, layer: int) -> PackedLayers:
    """The choice of bits with one layer turned: packed if it was not, and the other way round."""
    return (*packed[:layer], not packed[layer], *packed[layer + 1 :])
