"""Plans of least cost at every number of saved units, exactly: each (layer, KV head) leads, follows or keeps its window.

A role is a row of a small table: what it does about the open lead, what it saves and what it costs. NumPy only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pod.modeling.shipped.sharing import SharingPlan

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

PAIR_UNITS = 2
"""Units of one (layer, KV head) that holds no distant token: a unit is its keys or its values."""


@dataclass(frozen=True)
class Role:
    """Something that a (layer, KV head) may do about distant tokens.

    Attributes:
        does: ``lead`` opens a block, ``follow`` joins the one that is open, ``window`` leaves it open.
        units: what it saves of a pair's distant bytes, an integer >= 0.
        costs: ``[L, H]``; of ``follow`` ``[L, L, H]`` = [lead, layer, KV head], read where lead < layer. inf = not allowed.
    """

    does: Literal["lead", "follow", "window"]
    units: int
    costs: Floats


@dataclass(frozen=True)
class Curve:
    """The least cost of every saving.

    Attributes:
        sizes: layers and KV heads.
        pair_units: units that a pair would save that holds no distant token.
        costs: least cost by number of saved units; inf where no plan saves just so many. The last one is finite.
    """

    sizes: tuple[int, int]
    pair_units: int
    costs: Floats

    @property
    def targets(self) -> Ints:
        """The numbers of units that may be asked for."""
        return np.flatnonzero(np.isfinite(self.costs))

    def cheapest(self, units: int) -> int:
        """The number of units, so many or more, that costs least."""
        return units + int(self.costs[units:].argmin())

    def cost_of(self, units: int, pair_units: int) -> float | None:
        """The least cost of saving so many units, of which ``pair_units`` are a pair, or more; None where no plan does."""
        least = self.costs[-(-units * self.pair_units // pair_units) :].min(initial=np.inf)
        return float(least) if np.isfinite(least) else None

    def units_for(self, target_saving: float, n: int, num_sink_tokens: int, num_recent_tokens: int) -> int:
        """The reachable number of units whose saving is nearest to a share of the KV bytes at ``n`` tokens (ties: fewer).

        Raises: ValueError for a saving beyond what these roles reach at that length, by more than half a unit.
        """
        layers, heads = self.sizes
        unit = max(0, n - num_sink_tokens - num_recent_tokens) / n / (self.pair_units * layers * heads)
        reachable = self.targets
        least, most = reachable[0] * unit, reachable[-1] * unit
        if not least - unit / 2 <= target_saving <= most + unit / 2:
            raise ValueError(
                f"target_saving is {target_saving}, but the allowed roles save {least:.3f} to {most:.3f} of the bytes at {n} "
                f"tokens, of which {num_sink_tokens} + {num_recent_tokens} are in every window: choose a saving between, more "
                "tokens, or more roles (followers save half of their bytes at most)"
            )
        return int(reachable[np.abs(reachable * unit - target_saving).argmin()])


@dataclass(frozen=True)
class Frontier(Curve):
    """The least cost of every saving, and the plans that have it; table: the roles."""

    table: tuple[Role, ...]
    _heads: "_Heads"
    _shares: list[Ints]  # per head: units that it saves when it and the heads before it save u

    def plan(self, units: int, provenance: dict[str, Any] | None = None) -> SharingPlan:
        """A plan that saves ``units`` at least cost.

        Among equals, from the last layer down, the lowest open lead and then the role that stands first in the table is
        taken, and later heads save less.

        Raises: ValueError for units that no plan saves.
        """
        if not 0 <= units < len(self.costs) or not np.isfinite(self.costs[units]):
            raise ValueError(
                f"no plan of the allowed roles saves {units} units; up to {len(self.costs) - 1} can be saved, "
                "costs[units] says which: ask units_for"
            )
        found = {"algorithm": "dp", "units": units, "cost": float(self.costs[units]), **(provenance or {})}
        columns: list[list[int | None]] = []
        for head in reversed(range(len(self._shares))):
            share = int(self._shares[head][units])
            columns.append(self._heads.lead_of(head, share, self.table))
            units -= share
        return SharingPlan(lead=tuple(zip(*reversed(columns), strict=True)), provenance=found)


def solve(follow: ArrayLike | None, window: ArrayLike | None) -> Frontier:
    """The frontier of leads, followers and windows. A lead costs and saves nothing.

    Args:
        follow: cost of a follower ``[L, L, H]`` = [lead, layer, KV head], read where lead < layer; it saves 1 unit (keys).
            A head follows the lead that it had last; windows may stand between. None = nobody follows.
        window: cost of a window ``[L, H]``; it saves 2 units (keys and values). None = no windows.
            inf in either = not allowed there.

    Raises: ValueError for costs of another shape, NaN, or none at all.
    """
    table = [] if follow is None else [check_role(Role("follow", 1, np.asarray(follow)))]
    table += [] if window is None else [check_role(Role("window", PAIR_UNITS, np.asarray(window)))]
    if not table:
        raise ValueError("costs of followers and of windows are None: give one of them, or every head leads")
    table.insert(0, Role("lead", 0, np.zeros(table[0].costs.shape[-2:])))
    return solve_table(table, PAIR_UNITS)


def solve_table(table: Sequence[Role], pair_units: int) -> Frontier:
    """The frontier of any roles: an exact dynamic program per KV head, whose tables are then added head by head.

    Raises: ValueError for costs that do not fit each other, or roles that allow no plan.
    """
    table = tuple(map(check_role, table))
    sizes = table[0].costs.shape[-2:]
    if any(role.costs.shape[-2:] != sizes for role in table):
        shapes = [list(role.costs.shape) for role in table]
        raise ValueError(f"costs of roles must be of the same layers and KV heads, got shapes {shapes}")
    heads = _Heads.solve(table)
    shares, reached = _divide(heads.least)
    finite = np.flatnonzero(np.isfinite(reached))
    if not len(finite):
        raise ValueError("the costs allow no plan: some (layer, KV head) may do nothing")
    return Frontier(sizes, pair_units, reached[: finite[-1] + 1], table, heads, shares)


def check_role(role: Role) -> Role:
    """The role with a copy of its costs in fp64, inf where a follower would not lie above its lead.

    Raises: ValueError for another shape, NaN or -infinity.
    """
    costs = np.array(role.costs, dtype=np.float64)
    square = costs.ndim == 3 and costs.shape[0] == costs.shape[1]
    if not (square if role.does == "follow" else costs.ndim == 2) or 0 in costs.shape:
        shape = "[layers, layers, KV heads]" if role.does == "follow" else "[layers, KV heads]"
        raise ValueError(f"costs of {role.does!r} must be {shape}, got shape {list(costs.shape)}")
    if square:
        costs[np.tril_indices(len(costs))] = np.inf
    if np.isnan(costs).any() or np.isneginf(costs).any():
        raise ValueError(
            f"costs of {role.does!r} hold NaN or -infinity: delete the file of costs and measure again"
        )
    return Role(role.does, role.units, costs)


@dataclass(frozen=True)
class _Heads:
    """The dynamic program of each KV head over (layer, open lead, saved units); lead 0 is none, ``1 + l`` is layer l.

    Attributes:
        least: ``[H, units]`` least cost of all layers; ended ``[H, units]``: the lead that is open then.
        taken: per layer ``[H, L + 1, units]``: the role, by the lead that is open and the units that are saved after it.
        opened: per layer ``[H, units]``: the lead that was open before a new one, by the units that were saved before.
    """

    least: Floats
    ended: Ints
    taken: list[NDArray[np.int8]]
    opened: list[Ints]

    @classmethod
    def solve(cls, table: Sequence[Role]) -> "_Heads":
        layers, heads = table[0].costs.shape[-2:]
        width = layers * max(role.units for role in table) + 1
        best = np.full((heads, layers + 1, width), np.inf)
        best[:, 0, 0] = 0.0
        taken, opened = [], []
        for layer in range(layers):
            opened.append(best.argmin(axis=1))
            options = np.full((len(table), *best.shape), np.inf)
            for option, role in zip(options, table, strict=True):
                before, after = best[..., : width - role.units], option[..., role.units :]
                if role.does == "lead":
                    after[:, 1 + layer] = before.min(axis=1) + role.costs[layer][:, None]
                elif role.does == "follow":
                    after[:, 1:] = before[:, 1:] + role.costs[:, layer].T[:, :, None]
                else:
                    after[:] = before + role.costs[layer][:, None, None]
            taken.append(options.argmin(axis=0).astype(np.int8))
            best = options.min(axis=0)
        return cls(best.min(axis=1), best.argmin(axis=1), taken, opened)

    def lead_of(self, head: int, units: int, table: Sequence[Role]) -> list[int | None]:
        """What one head's layers follow when it saves so many units."""
        lead: list[int | None] = []
        now = int(self.ended[head, units])
        for layer in reversed(range(len(self.taken))):
            role = table[self.taken[layer][head, now, units]]
            lead.append(None if role.does == "window" else now - 1)
            units -= role.units
            if role.does == "lead":
                now = int(self.opened[layer][head, units])
        return lead[::-1]


def _divide(least: Floats) -> tuple[list[Ints], Floats]:
    """The least cost of all heads together by their units (a min-plus convolution), and each head's share of them."""
    reached, shares = np.zeros(1), []
    for own in least:
        options = np.full((len(own), len(reached) + len(own) - 1), np.inf)
        for units, cost in enumerate(own):
            options[units, units : units + len(reached)] = reached + cost
        shares.append(options.argmin(axis=0))
        reached = options.min(axis=0)
    return shares, reached
