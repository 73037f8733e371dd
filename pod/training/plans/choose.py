"""From measurements to a plan: heads aligned, roles and bits chosen at the target saving, and the plan's own loss measured."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from pod.modeling.shipped.sharing import SharingPlan
from pod.training.plans.align import align
from pod.training.plans.bits import PackedFrontier, solve_packed
from pod.training.plans.costs import total_costs
from pod.training.plans.exploration import Exploration, allowed, packed_costs, target_units
from pod.training.plans.explore_args import ExploreArgs
from pod.training.plans.measure import Measured, find_costs, find_similarity, repeated_sequences
from pod.training.plans.plan_loss import plan_loss
from pod.training.plans.reuse import from_first_rank, is_first_rank, quiet
from pod.training.plans.similarity import dissimilarity, greedy_plan
from pod.training.plans.solve import Floats, Frontier, solve

Order = tuple[tuple[int, ...], ...]


class Solved(NamedTuple):
    """The least cost of every saving under some roles, and which saving is asked for.

    Attributes:
        frontier: in an order of heads; units: of the saving, the number that costs least among so many and more.
        kv_order: ``[L][H]``, the KV head at each place; None = where they were.
    """

    frontier: Frontier | PackedFrontier
    units: int
    kv_order: Order | None = None


@dataclass(frozen=True)
class Choice:
    """A plan, and what else there was to choose from.

    Attributes:
        solved: all allowed roles and bits, in the plan's order of heads; None for a greedy plan.
        without: ``follow``, ``window`` or ``4_bits`` → the same when it is forbidden, heads aligned for it alone.
        similarity: ``[L, L, Hq]``, measured for cost=similarity, else None.
    """

    plan: SharingPlan
    solved: Solved | None = None
    without: dict[str, Frontier | PackedFrontier] = field(default_factory=dict)
    similarity: Tensor | None = None


def find_plan(exploration: Exploration, say: Callable[[str], None] = print) -> Choice:
    """The plan of the settings, the same on every rank. What was measured before serves again.

    Raises: ValueError for texts, models, windows and files that do not fit.
    """
    explore, say = exploration.explore, say if is_first_rank() else quiet
    if explore.cost == "similarity":
        return choose_by_similarity(find_similarity(exploration, say), explore, exploration.windows)
    choice = choose(find_costs(exploration, say), explore, exploration.windows)
    if not explore.loss_sequences:
        return choice
    losses = from_first_rank(lambda: _losses(exploration, choice.plan))
    plan = replace(choice.plan, provenance=choice.plan.provenance | {"losses": losses})
    return replace(choice, plan=plan)


def choose_by_similarity(measured: Measured, explore: ExploreArgs, windows: dict[str, int]) -> Choice:
    """The paper's plan: greedy, or the followers of least ``Σ (1 - similarity with the lead)``."""
    similarity, provenance = measured.tensors["similarity"], measured.provenance
    heads, solved = provenance["num_key_value_heads"], None
    if explore.algorithm == "greedy":
        plan = greedy_plan(similarity, heads, explore.threshold, provenance)
    else:
        frontier = solve(dissimilarity(similarity, heads), None)
        solved = Solved(frontier, target_units(frontier, explore, windows))
        plan = frontier.plan(solved.units, _provenance(explore, provenance, solved))
    return Choice(plan, solved, similarity=similarity)


def choose(costs: Measured, explore: ExploreArgs, windows: dict[str, int]) -> Choice:
    """The plan of least cost at the target saving, heads aligned for it, and what forbidding each role, or packing, costs."""
    total = total_costs(costs.tensors, explore.retrieval_weight)
    best = _solve(total, explore, windows)
    frontier, units = best.frontier, best.units
    provenance = costs.provenance | windows | {"retrieval_weight": explore.retrieval_weight}
    provenance = _provenance(explore, provenance, best)
    if isinstance(frontier, PackedFrontier):
        provenance |= {"bits": list(explore.bits), "plan_cost_bound": float(frontier.bound[units:].min())}
    without = {}
    for name, rest in _forbidding(explore).items():
        without[name] = _solve(total, rest, windows, units / frontier.pair_units).frontier
        provenance[f"plan_cost_without_{name}"] = without[name].cost_of(units, frontier.pair_units)
    plan = frontier.plan(units, provenance)
    if best.kv_order is not None:
        plan = replace(plan, head_order=head_order(plan, best.kv_order, costs.tensors["order"]))
    return Choice(plan, best, without)


def _forbidding(explore: ExploreArgs) -> dict[str, ExploreArgs]:
    """The settings without each of what they allow."""
    changes: dict[str, dict[str, Any]] = {}
    if len(explore.roles) > 1:
        changes = {role: {"roles": [x for x in explore.roles if x != role]} for role in explore.roles}
    if 4 in explore.bits:
        changes["4_bits"] = {"bits": [16]}
    return {name: replace(explore, target_saving=0.0, **change) for name, change in changes.items()}


def _solve(
    total: dict[str, Floats], explore: ExploreArgs, windows: dict[str, int], pairs: float | None = None
) -> Solved:
    """For the target saving, or for so many pairs' bytes if that is given, or as many as can be saved.

    Heads stay where they are where layers may be packed: with packed leads at hand hardly any head follows.
    """

    def units_of(frontier: Frontier | PackedFrontier) -> int:
        if pairs is None:
            return target_units(frontier, explore, windows)
        units = math.ceil(pairs * frontier.pair_units - 1e-9)
        return frontier.cheapest(min(units, len(frontier.costs) - 1))

    kv_order = None
    if 4 in explore.bits:
        packed = solve_packed(packed_costs(explore, total, windows))
        units = units_of(packed)
        frontier = packed.improved(units)
    else:
        frontier = solve(*allowed(explore, total["in_place"], total["window"]))
        units = units_of(frontier)
        if explore.align_heads and "follow" in explore.roles and units:
            found = align(*allowed(explore, total["follow"], total["window"]), units)
            frontier, kv_order = solve(found.follow, found.window), found.kv_order
    return Solved(frontier, frontier.cheapest(units), kv_order)


def head_order(plan: SharingPlan, kv_order: Order, order: Tensor) -> Order | None:
    """Which query head of the original weights stands at each place, ``[L][Hq]``; None when all stand where they were.

    Args:
        kv_order: ``[L][H]``, the KV head at each place.
        order: of query heads inside the groups of pairs, see `match_query_heads`; a follower's group stands as its lead's does.
    """
    groups = order.shape[-1]
    rows = []
    for layer, heads in enumerate(kv_order):
        row: list[int] = []
        for place, head in enumerate(heads):
            lead = plan.lead[layer][place]
            inside = list(range(groups))
            if lead is not None and lead != layer:
                inside = order[lead, layer, kv_order[lead][place], head].tolist()
            row += [head * groups + query for query in inside]
        rows.append(tuple(row))
    return None if all(row == tuple(range(len(row))) for row in rows) else tuple(rows)


def _provenance(explore: ExploreArgs, measured: dict[str, Any], solved: Solved) -> dict[str, Any]:
    return measured | {
        "cost": explore.cost,
        "roles": list(explore.roles),
        "target_saving": explore.target_saving,
        "budget_length": explore.budget_length,
        "plan_cost": float(solved.frontier.costs[solved.units]),
    }


def _losses(exploration: Exploration, plan: SharingPlan) -> dict[str, Any]:
    """Of the dense model and of the plan, on text and on repeated tokens, and on how many sequences."""
    dense = replace(SharingPlan.dense(plan.num_layers, plan.num_key_value_heads), head_order=plan.head_order)
    model = exploration.load_model(dense)
    text = exploration.read(quiet)[0][: exploration.explore.loss_sequences]
    texts = {"text": text, "repeated": repeated_sequences(exploration, model.config)}
    losses = {
        name: {kind: plan_loss(model, one, sequences) for kind, sequences in texts.items() if sequences}
        for name, one in (("dense", dense), ("plan", plan))
    }
    return losses | {"sequences": len(text), "repeated_sequences": len(texts["repeated"])}
