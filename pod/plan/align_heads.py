"""Align heads across layers: order the KV heads of each layer so that the best plan costs least.

The KV heads of a layer may be permuted together with their query heads without changing the model. The
position of a head in this order is its *place*. A head can follow only the head in the same place of a lower
layer. The places are found by local search on the cost that ``solve`` minimises.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from pod.modeling.model.sharing import SharingPlan, is_followed
from pod.plan.checks import check_costs
from pod.plan.plan_progress import steps
from pod.plan.solve import PAIR_UNITS, Floats, Ints, solve

OrderArray = NDArray[np.intp]  # [L, H]: the original KV head at each place

_MOST_SWAPS = 6  # random swaps at the beginning of a restart


class Alignment(NamedTuple):
    """Places of KV heads, and the costs in them.

    Attributes:
        kv_order: ``[L][H]``, the original KV head at each place.
        follow: costs of followers by place, as ``solve`` takes them.
        window: costs of windows by place, as ``solve`` takes them.
        cost: the cost of the best plan that saves the units that were asked for.
    """

    kv_order: tuple[tuple[int, ...], ...]
    follow: Floats
    window: Floats | None
    cost: float


def align(follow: Floats, window: Floats | None, units: int, restarts: int = 200, seed: int = 0) -> Alignment:
    """Find places in which the plan that saves ``units`` costs little, never more than in the original order.

    The search sets a price per saved unit, near the slope of the cost curve at ``units``. When the price and
    all other layers are fixed, the best permutation of one layer is an assignment problem. So is the best
    common permutation of all layers above a *cut*, which is the border between two layers. Both are solved
    exactly. Sweeps over the layers repeat both until nothing improves. Each restart makes one to six random
    swaps in the best order so far and sweeps again.

    Args:
        follow: ``[L, L, H, H]`` = [lead, layer, KV head of the lead, KV head of the layer], read where
            lead < layer.
        window: ``[L, H]``, see ``solve``.
        units: number of units that the plan saves.
        restarts: number of searches that begin with random swaps.
        seed: of these swaps; the same seed gives the same order.

    Raises:
        ValueError: costs have another shape or are NaN, or no plan in the original order saves ``units``.
    """
    sizes = check_costs("follow", follow, "L L H H")
    if window is not None:
        check_costs("window", window, "L H", sizes)
    order = np.tile(np.arange(follow.shape[-1]), (len(follow), 1))
    frontier = solve(*placed_costs(follow, window, order))
    frontier.plan(units)  # raises where no plan saves so many units
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
        # A saving off the lower hull of the curve is best at no price, so the start is tried too.
        for found in (start, _Search(follow, window, price, start).run()):
            costs = solve(*placed_costs(follow, window, found)).costs
            if costs[units] < best - 1e-12 * abs(best):
                order, best = found, float(costs[units])
                low, high = _slopes(costs, units)
    order = _neighbours(order, solve(*placed_costs(follow, window, order)).plan(units))
    placed = placed_costs(follow, window, order)
    return Alignment(tuple(map(tuple, order.tolist())), *placed, float(solve(*placed).costs[units]))


def placed_costs(follow: Floats, window: Floats | None, order: OrderArray) -> tuple[Floats, Floats | None]:
    """The costs of followers and windows by place, as ``solve`` takes them.

    Args:
        follow, window: as in ``align``.
        order: ``[L, H]``, the original KV head at each place.
    """
    layer = np.arange(len(order))
    placed = follow[layer[:, None, None], layer[None, :, None], order[:, None], order[None]]
    return placed, None if window is None else np.take_along_axis(window, order, axis=1)


def _slopes(costs: Floats, units: int) -> tuple[float, float]:
    """What a saved unit costs just below and just above ``units``: the lower and the higher slope.

    The slopes are those of the lower hull of the cost curve on each side.
    """
    reachable = np.flatnonzero(np.isfinite(costs))
    slopes = (costs[reachable] - costs[units]) / np.where(reachable == units, np.nan, reachable - units)
    sides = (np.max, slopes[reachable < units]), (np.min, slopes[reachable > units])
    ends = [steepest(side) for steepest, side in sides if len(side)]
    return (float(min(ends)), float(max(ends))) if ends else (0.0, 0.0)


def _swap(order: OrderArray, rng: np.random.Generator) -> None:
    """Swap two random places in a random layer, or in that layer and all layers above it; in place."""
    layers, heads = order.shape
    first = int(rng.integers(layers))
    last = layers if rng.integers(2) else first + 1
    a, b = rng.integers(heads, size=2)
    order[first:last, [a, b]] = order[first:last, [b, a]]


class _Search:
    """Local search for an order of heads at a price per saved unit.

    The cost of a plan is reduced by the price of its units. A *state* is the lead that is open in a place: 0
    for none, else ``1 + layer * H + KV head``.

    * ``stay[l][state, head]`` is the cost of KV head ``head`` of layer l when it follows that lead or keeps
      its window, whichever is cheaper.
    * ``above[l][state, place]`` is the least cost of the layers from l on, in a place.
    * ``below[state, place]`` is the least cost of the layers below the current one, in a place.
    """

    def __init__(self, follow: Floats, window: Floats | None, price: float, order: OrderArray):
        layers, heads = order.shape
        self.order, self.heads = order.copy(), heads
        stay = np.full((layers, 1 + layers * heads, heads), np.inf)
        for layer in range(1, layers):
            stay[layer, 1 : 1 + layer * heads] = follow[:layer, layer].reshape(-1, heads) - price
        if window is not None:
            stay = np.minimum(stay, window[:, None] - PAIR_UNITS * price)
        self.stay = stay

    def run(self) -> OrderArray:
        """Search until no layer and no cut can be improved, and return the order ``[L, H]``."""
        while self._sweep():
            pass
        return self.order

    def _opens(self, layer: int) -> slice:
        """The states in which a head of this layer is the open lead."""
        return slice(1 + layer * self.heads, 1 + (layer + 1) * self.heads)

    def _above(self) -> Floats:
        """``above`` for the present order, ``[L + 1, states, H]``."""
        layers, states, heads = self.stay.shape
        above = np.zeros((layers + 1, states, heads))
        for layer in reversed(range(layers)):
            own = self.order[layer]
            place = np.arange(heads)
            leads = above[layer + 1, self._opens(layer)][own, place]
            above[layer] = np.minimum(self.stay[layer][:, own] + above[layer + 1], leads)
        return above

    def _sweep(self) -> bool:
        """Improve every cut and every layer once, from the lowest one up; return whether there was a gain."""
        layers, states, heads = self.stay.shape
        above = self._above()
        place = np.arange(heads)
        gained = False
        below = np.full((states, heads), np.inf)
        below[0] = 0.0
        for layer in range(layers):
            opens = self._opens(layer)
            used = slice(opens.start)  # states that layers below can leave open
            to = _assign(_least(below[used], above[layer, used]), place)
            gained |= bool((to != place).any())
            above[layer:], self.order[layer:] = above[layer:, :, to], self.order[layer:, to]
            lead = below[used].min(axis=0)
            after = above[layer + 1]
            stay = self.stay[layer]
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


def _assign(costs: Floats, now: Ints) -> Ints:
    """Assign a column to each row at least total cost; ``now`` is kept unless another one is cheaper."""
    rows, columns = linear_sum_assignment(costs)
    old = costs[rows, now].sum()
    new = costs[rows, columns].sum()
    return columns if new < old - 1e-12 * max(1.0, abs(old)) else now


def _neighbours(order: OrderArray, plan: SharingPlan) -> OrderArray:
    """Sort places so that heads with few windows stand first, and neighbouring heads hold the same tokens.

    The cost of the plan stays the same: only layers between two cuts that no block crosses are sorted
    together.
    """
    layers, heads = order.shape
    crossed = [[is_followed(plan.lead, layer - 1, head) for head in range(heads)] for layer in range(layers)]
    windows = np.array([[lead is None for lead in row] for row in plan.lead])
    order = order.copy()
    for first, last in pairwise([*np.flatnonzero(~np.any(crossed, axis=1)), layers]):
        places = np.lexsort((order[first], windows[first:last].sum(axis=0)))
        order[first:last] = order[first:last, places]
    return order
