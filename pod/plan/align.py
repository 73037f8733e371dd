"""Align heads across layers: choose which KV heads share a place, so that the best plan costs least.

The KV heads of a layer may be permuted together with their query heads without changing the model. A head
follows only the head in its own place of a lower layer. The places are found by local search on the cost that
``solve`` minimises.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from pod.modeling.model.sharing import SharingPlan, is_followed
from pod.plan.checks import check_costs
from pod.plan.plan_progress import steps
from pod.plan.solve import PAIR_UNITS, Floats, solve

Order = NDArray[np.intp]  # [L, H]: the original KV head at each place

_MOST_SWAPS = 6  # before a restart


class Alignment(NamedTuple):
    """Places of KV heads, and the costs in them.

    Attributes:
        kv_order: ``[L][H]``, the original KV head at each place.
        follow: costs of followers by place, as ``solve`` takes them.
        window: costs of windows by place, as ``solve`` takes them.
        cost: of the best plan that saves the units.
    """

    kv_order: tuple[tuple[int, ...], ...]
    follow: Floats
    window: Floats | None
    cost: float


def align(follow: Floats, window: Floats | None, units: int, restarts: int = 200, seed: int = 0) -> Alignment:
    """Find places in which the plan that saves ``units`` costs little, never more than in the original order.

    The search sets a price per unit, near the slope of the frontier at ``units``. With the price and all
    other layers given, the best permutation of one layer is an assignment problem. So is the best permutation
    of all layers above a cut together. Both are solved exactly. Sweeps over the layers repeat both until
    nothing improves. Each restart swaps one to six random heads of the best order so far and sweeps again.

    Args:
        follow: ``[L, L, H, H]`` = [lead, layer, KV head of the lead, KV head of the layer], read where
            lead < layer.
        window: ``[L, H]``, see ``solve``.
        units: that the plan saves.
        restarts: number of sweeps from a disturbed order.
        seed: of the disturbances; the same seed gives the same order.

    Raises:
        ValueError: costs of other shapes, NaN, and units that no plan in the original order saves.
    """
    sizes = check_costs("follow", follow, "L L H H")
    if window is not None:
        check_costs("window", window, "L H", sizes)
    order = np.tile(np.arange(follow.shape[-1]), (len(follow), 1))
    frontier = solve(*placed_costs(follow, window, order))
    frontier.plan(units)  # refuses what cannot be
    best = float(frontier.costs[units])
    rng = np.random.default_rng(seed)
    low, high = _slopes(frontier.costs, units)
    for restart in steps(range(restarts + 1), "order of heads"):
        start = order.copy()
        price = (low + high) / 2
        if restart:
            for _ in range(1 + restart % _MOST_SWAPS):
                _swap(start, rng)
            price += rng.uniform(low - high, high - low)
        for found in (start, _Search(follow, window, price, start).run()):  # no price leads to some savings
            costs = solve(*placed_costs(follow, window, found)).costs
            if costs[units] < best - 1e-12 * abs(best):
                order, best = found, float(costs[units])
                low, high = _slopes(costs, units)
    order = _neighbours(order, solve(*placed_costs(follow, window, order)).plan(units))
    placed = placed_costs(follow, window, order)
    return Alignment(tuple(map(tuple, order.tolist())), *placed, float(solve(*placed).costs[units]))


def placed_costs(follow: Floats, window: Floats | None, order: Order) -> tuple[Floats, Floats | None]:
    """The costs of ``align``, by place, as ``solve`` takes them, when ``order[L, H]`` stands there."""
    layer = np.arange(len(order))
    placed = follow[layer[:, None, None], layer[None, :, None], order[:, None], order[None]]
    return placed, None if window is None else np.take_along_axis(window, order, axis=1)


def _slopes(costs: Floats, units: int) -> tuple[float, float]:
    """What a unit costs just below and just above ``units``, on the lower hull of the curve on each side."""
    reachable = np.flatnonzero(np.isfinite(costs))
    slopes = (costs[reachable] - costs[units]) / np.where(reachable == units, np.nan, reachable - units)
    sides = (np.max, slopes[reachable < units]), (np.min, slopes[reachable > units])
    ends = [steepest(side) for steepest, side in sides if len(side)]
    return (float(min(ends)), float(max(ends))) if ends else (0.0, 0.0)


def _swap(order: Order, rng: np.random.Generator) -> None:
    """Swap two random heads in a random layer, or in all layers from there on."""
    layers, heads = order.shape
    first = int(rng.integers(layers))
    last = layers if rng.integers(2) else first + 1
    a, b = rng.integers(heads, size=2)
    order[first:last, [a, b]] = order[first:last, [b, a]]


class _Search:
    """Local search at a price per saved unit.

    A *state* is the lead that is open: 0 for none, else ``1 + layer * H + KV head``.

    * ``stay[l][state, head]`` is the cost of KV head ``head`` of layer l when it follows that lead or keeps
      its window, whichever is cheaper.
    * ``above[l][state, place]`` is the least cost of the layers from l on, in a place.
    * ``below[state, place]`` is the least cost of the layers before the one at hand, in a place.
    """

    def __init__(self, follow: Floats, window: Floats | None, price: float, order: Order):
        layers, heads = order.shape
        self.order, self.heads = order.copy(), heads
        stay = np.full((layers, 1 + layers * heads, heads), np.inf)
        for layer in range(1, layers):
            stay[layer, 1 : 1 + layer * heads] = follow[:layer, layer].reshape(-1, heads) - price
        if window is not None:
            stay = np.minimum(stay, window[:, None] - PAIR_UNITS * price)
        self.stay = stay

    def run(self) -> Order:
        """Search until no layer and no cut can be improved, and return the order."""
        while self._sweep():
            pass
        return self.order

    def _opens(self, layer: int) -> slice:
        """The states in which a head of this layer is the open lead."""
        return slice(1 + layer * self.heads, 1 + (layer + 1) * self.heads)

    def _above(self) -> Floats:
        layers, states, heads = self.stay.shape
        above = np.zeros((layers + 1, states, heads))
        for layer in reversed(range(layers)):
            own, place = self.order[layer], np.arange(heads)
            leads = above[layer + 1, self._opens(layer)][own, place]
            above[layer] = np.minimum(self.stay[layer][:, own] + above[layer + 1], leads)
        return above

    def _sweep(self) -> bool:
        """Improve every cut and every layer once, from below, and say whether anything was gained."""
        layers, states, heads = self.stay.shape
        above, place, gained = self._above(), np.arange(heads), False
        below = np.full((states, heads), np.inf)
        below[0] = 0.0
        for layer in range(layers):
            opens = self._opens(layer)
            used = slice(opens.start)  # states that layers below can leave open
            to = _assign(_least(below[used], above[layer, used]), place)
            gained |= bool((to != place).any())
            above[layer:], self.order[layer:] = above[layer:, :, to], self.order[layer:, to]
            lead = below[used].min(axis=0)
            after, stay = above[layer + 1], self.stay[layer]
            costs = np.minimum(_least(below[used] + after[used], stay[used]), lead[:, None] + after[opens].T)
            own = _assign(costs, self.order[layer])
            gained |= bool((own != self.order[layer]).any())
            self.order[layer] = own
            below += stay[:, own]
            below[opens.start + own, place] = lead
        return gained


def _least(left: Floats, right: Floats) -> Floats:
    """The least sum over the states: ``[S, A]`` and ``[S, B]`` → ``[A, B]``."""
    return np.stack([(column[:, None] + right).min(axis=0) for column in left.T])


def _assign(costs: Floats, now: Order) -> Order:
    """The column of each row, at least total cost; the columns of ``now`` unless others are cheaper."""
    rows, columns = linear_sum_assignment(costs)
    old, new = costs[rows, now].sum(), costs[rows, columns].sum()
    return columns if new < old - 1e-12 * max(1.0, abs(old)) else now


def _neighbours(order: Order, plan: SharingPlan) -> Order:
    """Put heads that lead more before heads that keep more windows, so that neighbours hold the same.

    The plan stays the same: places may be sorted between cuts that no block crosses.
    """
    layers, heads = order.shape
    crossed = [[is_followed(plan.lead, layer - 1, head) for head in range(heads)] for layer in range(layers)]
    windows = np.array([[lead is None for lead in row] for row in plan.lead])
    order = order.copy()
    for first, last in pairwise([*np.flatnonzero(~np.any(crossed, axis=1)), layers]):
        places = np.lexsort((order[first], windows[first:last].sum(axis=0)))
        order[first:last] = order[first:last, places]
    return order
