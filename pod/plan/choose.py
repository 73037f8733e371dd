"""From measurements to a plan: align heads, choose roles and bits at the target saving, measure the loss.

The cost of a plan is the sum of the costs of its roles, with its windows taken together (``costs.py``). In a
model, however, the errors of one layer change what the next layers see. So the loss of the model under the
plan is measured too.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pod.modeling.loading import load_model
from pod.modeling.methods import make_cache
from pod.modeling.model.llama import PodForCausalLM
from pod.modeling.model.packed_bytes import GROUP_SIZE, RESIDUAL
from pod.modeling.model.sharing import SharingPlan
from pod.modeling.model.sink_constants import SinkConstants
from pod.modeling.token_scores import rows_in, token_scores, wide_logits
from pod.plan.align_heads import align
from pod.plan.args import ExploreArgs
from pod.plan.calibration import with_constants
from pod.plan.costs import total_costs
from pod.plan.exploration import (
    Exploration,
    allowed,
    at_granularity,
    fewest_units,
    for_target,
    packed_costs,
    pairs_saved,
    residual_of,
    saves_enough,
    units_of_target,
)
from pod.plan.gradients import LOGIT_BYTES
from pod.plan.layer_constants import measured_constants
from pod.plan.measured_costs import (
    MeasuredCosts,
    find_costs,
    find_similarity,
    measure_mean,
    needle_prompts_of,
)
from pod.plan.needles import Prompt
from pod.plan.rounds import LIGHTER, improve
from pod.plan.similarity import dissimilarity, greedy_plan
from pod.plan.solve import Floats, Frontier, PackedFrontier, solve, solve_packed
from pod.plan.together import Plans, in_order
from pod.training.checkpoint.run_identity import sha256_of

HeadOrder = tuple[tuple[int, ...], ...]
"""For each layer, the original head at each position."""


@dataclass(frozen=True)
class Choice:
    """A plan, and what else there was to choose from.

    Attributes:
        plan: a plan of the measured layers only; `in_all_layers` turns it into one of the whole model.
        plans: the plans of every saving with all allowed roles and bits, in the plan's order of heads; None
            for a greedy plan.
        units: number of units that the plan saves.
        without: the plans when something is forbidden, by its name: ``follow``, ``window`` or ``4_bits``.
            Each curve has an order of heads of its own.
        kv_order: ``[L][H]``, the model's KV head at each position of the plan; None = all stay in place.
        similarity: ``[L, L, Hq]``, measured for cost=similarity, else None.
    """

    plan: SharingPlan
    plans: Plans | None = None
    units: int = 0
    without: dict[str, Plans] = field(default_factory=dict)
    kv_order: HeadOrder | None = None
    similarity: Tensor | None = None

    def plan_at(self, units: int) -> SharingPlan:
        """The plan of the curve that saves this many units; ValueError where no plan does."""
        assert self.plans is not None, "a greedy plan has no curve"
        plan = of_all_heads(self.plans.at(units)[0], self.plan.num_key_value_heads)
        return replace(plan, residual=self.plan.residual, head_dim=self.plan.head_dim)


def find_plan(exploration: Exploration) -> Choice:
    """Measure and find the plan that the settings ask for. It is the same on every rank.

    Measurements that lie in the folder and fit the settings are used again.

    Raises:
        ValueError: texts, models, windows or files do not fit the settings.
    """
    explore = exploration.explore
    if explore.cost == "similarity":
        return choose_by_similarity(find_similarity(exploration), explore, exploration.windows)
    costs = find_costs(exploration)
    return improved(exploration, costs, choose(costs, explore, exploration.windows))


def improved(exploration: Exploration, costs: MeasuredCosts, choice: Choice) -> Choice:
    """The choice with windows exchanged for leads, as `rounds.improve` finds them.

    The curve stays as it is: its plans are not measured. All ranks call this together.
    """
    assert choice.plans is not None, "plans by costs have a curve"
    plan, _ = choice.plans.at(choice.units)
    found = improve(exploration, costs, plan, choice.kv_order, choice.plans.lead4)
    if not found.rounds:
        return choice
    provenance = choice.plan.provenance | {"rounds": found.rounds, "lighter_costs_on_prompts": list(LIGHTER)}
    plan = replace(found.plan, provenance=provenance)
    plan = _finished(plan, costs, choice.plan.residual, exploration.windows, choice.kv_order)
    return replace(choice, plan=plan)


def with_losses(exploration: Exploration, choice: Choice) -> Choice:
    """The choice with the measured losses of the dense model and of the plan in the plan's provenance.

    Where explore.loss_sequences is 0, or the cost is the similarity, no loss is measured and the choice stays
    as it is. All ranks call this together. What was measured before an interruption is kept.
    """
    if exploration.explore.cost == "similarity" or not exploration.explore.loss_sequences:
        return choice
    losses = _losses(exploration, choice.plan)
    plan = replace(choice.plan, provenance=choice.plan.provenance | {"losses": losses})
    return replace(choice, plan=plan)


def choose_by_similarity(measured: MeasuredCosts, explore: ExploreArgs, windows: dict[str, int]) -> Choice:
    """Choose the paper's plan: greedy, or the followers of least ``Σ (1 - similarity with the lead)``."""
    similarity, provenance = measured.tensors["similarity"], measured.provenance
    heads = provenance["num_key_value_heads"]
    if explore.algorithm == "greedy":
        plan = greedy_plan(similarity, heads, explore.threshold, provenance)
        return Choice(_made_for(plan, windows), similarity=similarity)
    costs = at_granularity(explore, {"in_place": dissimilarity(similarity, heads)})
    frontier = solve(costs["in_place"], None)
    units = frontier.units_for(explore.least_saving, explore.budget_tokens, **windows)
    plans = Plans(frontier)
    plan = _with(plans, units, provenance | _settings(explore, plans, units))
    plan = _made_for(of_all_heads(plan, heads), windows)
    return Choice(plan, plans, units, similarity=similarity)


def of_all_heads(plan: SharingPlan, num_key_value_heads: int) -> SharingPlan:
    """Turn a plan of whole layers, with one role per row, into a plan of a model with H KV heads.

    A plan that has H KV heads already stays as it is. Example: the rows (0,), (None,) become (0, 0),
    (None, None) for H = 2.
    """
    if plan.num_key_value_heads == num_key_value_heads:
        return plan
    return replace(plan, lead=tuple(row * num_key_value_heads for row in plan.lead))


def _made_for(plan: SharingPlan, windows: dict[str, int], residual: int = RESIDUAL) -> SharingPlan:
    """The plan, which now records the windows, the residual and the head_dim that it was made for."""
    return replace(plan, **windows, residual=residual, head_dim=plan.provenance.get("head_dim"))


def choose(costs: MeasuredCosts, explore: ExploreArgs, windows: dict[str, int]) -> Choice:
    """Choose the plan of least cost at the target saving, with heads aligned for it.

    The choice also holds the frontiers with each role, or packing, forbidden.
    """
    total = total_costs(costs.tensors, explore.retrieval_weight)
    head_dim = costs.provenance.get("head_dim")
    plans, units, kv_order = _solve(total, explore, windows, head_dim)
    provenance = costs.provenance | windows | {"retrieval_weight": explore.retrieval_weight}
    provenance |= _settings(explore, plans, units)
    curve = plans.curve
    if isinstance(curve, PackedFrontier):
        provenance["bits"] = list(explore.bits)
    residual = residual_of(explore, windows)
    chosen = replace(plans.at(units)[0], residual=residual, head_dim=head_dim)
    pairs = units / curve.pair_units
    without = {}
    for name, rest in _forbidding(explore).items():
        saved = pairs_without(name, chosen, pairs, explore, windows)
        without[name], *_ = _solve(total, rest, windows, head_dim, saved)
        provenance[f"plan_cost_without_{name}"] = without[name].cost_of(saved, 1)
    plan = _finished(_with(plans, units, provenance), costs, residual, windows, kv_order)
    return Choice(plan, plans, units, without, kv_order)


def _finished(
    plan: SharingPlan,
    costs: MeasuredCosts,
    residual: int,
    windows: dict[str, int],
    kv_order: HeadOrder | None,
) -> SharingPlan:
    """A plan of all heads of the measured layers, with its windows, order of heads and constant sinks.

    Args:
        plan: at explore.granularity; a plan of whole layers has one role per row.
    """
    plan = _made_for(of_all_heads(plan, costs.tensors["lead4"].shape[-1]), windows, residual)
    if kv_order is not None:
        plan = replace(plan, head_order=head_order(plan, kv_order, costs.tensors["order"]))
    sinks = measured_constants(costs.tensors)
    return plan if sinks is None else with_constants(plan, sinks)


def _forbidding(explore: ExploreArgs) -> dict[str, ExploreArgs]:
    """Settings with one thing forbidden, by its name: each role where there are several, and 4 bits.

    Their target saving is set to 0 and not used: `_solve` is told the saving by its argument `pairs`.
    """
    changes: dict[str, dict[str, Any]] = {}
    roles = explore.roles or []
    if len(roles) > 1:
        changes = {role: {"roles": [other for other in roles if other != role]} for role in roles}
    if 4 in explore.bits:
        changes["4_bits"] = {"bits": [16]}
    return {name: replace(explore, target_saving=0.0, **change) for name, change in changes.items()}


def pairs_without(
    name: str, plan: SharingPlan, pairs: float, explore: ExploreArgs, windows: dict[str, int]
) -> float:
    """How many pairs' distant bytes a plan without something must save to be compared with a plan.

    Plans that pack are compared by units, which count windows as 16-bit numbers. A plan in 16 bits must save
    the bytes of packed windows too.

    Args:
        name: what is forbidden, see `Choice.without`.
        pairs: what the plan saves by its units.
    """
    return pairs_saved(plan, explore, windows) if name == "4_bits" else pairs


def _solve(
    total: dict[str, Floats],
    explore: ExploreArgs,
    windows: dict[str, int],
    head_dim: int | None,
    pairs: float | None = None,
) -> tuple[Plans, int, HeadOrder | None]:
    """Find the plans of every saving, with heads aligned for the target saving.

    Args:
        total: costs by name.
        explore: the settings.
        windows: `num_sink_tokens` and `num_recent_tokens` of the plan.
        head_dim: of the model.
        pairs: instead of the target saving, save the distant bytes of this many pairs, or as many as can be
            saved.

    Returns:
        The plans; the number of units that is saved; and the order of heads ``[L][H]``, which is the KV
        head at each position. The order is None where heads stay where they are. They do where layers may be
        packed, since hardly any head follows then.
    """

    def units_of(frontier: Frontier | PackedFrontier) -> int:
        if pairs is not None:
            units = math.ceil(pairs * frontier.pair_units - 1e-9)
            return frontier.cheapest(min(units, len(frontier.costs) - 1))
        if isinstance(frontier, PackedFrontier):
            return fewest_units(frontier, explore, windows, head_dim)
        return units_of_target(frontier, explore, windows)

    total = at_granularity(explore, total)
    roles = explore.roles or []
    aligns = explore.align_heads and "follow" in roles and "follow" in total
    kv_order = None
    lead4 = None
    frontier: Frontier | PackedFrontier
    if 4 in explore.bits:
        packed = solve_packed(packed_costs(explore, total, windows, head_dim))
        lead4 = total["lead4"]
        frontier = packed.improved(units_of(packed))
        units = units_of(frontier)
    else:
        frontier = for_target(solve(*allowed(explore, total)), explore)
        units = units_of(frontier)
        if aligns and units:
            follow, window = allowed(explore, total, "follow")
            assert follow is not None, "heads are aligned for followers"
            found = align(follow, window, units)
            frontier, kv_order = solve(found.follow, found.window), found.kv_order
    together = in_order(total["windows"], kv_order) if "window" in roles else None
    plans = Plans(frontier, together, lead4)
    if pairs is not None:
        return plans, plans.cheapest(units), kv_order
    return plans, _that_saves_enough(plans, units, explore, windows, head_dim), kv_order


def _that_saves_enough(
    plans: Plans, units: int, explore: ExploreArgs, windows: dict[str, int], head_dim: int | None
) -> int:
    """Units of a plan of low cost that saves explore.target_saving: ``units``, or more if need be.

    Plans near each other may pack other layers, and so fewer windows.

    Raises:
        ValueError: no plan saves enough, since packed windows are larger than native ones.
    """
    step = max(1, plans.curve.pair_units // 2)
    for least in range(units, len(plans.curve.costs), step):
        chosen = plans.cheapest(least)
        if saves_enough(plans.at(chosen)[0], explore, windows, head_dim):
            return chosen
    raise ValueError(
        f"explore.target_saving is {explore.target_saving}, but with explore.residual = "
        f"{residual_of(explore, windows)} packed windows of {windows['num_recent_tokens']} tokens are larger "
        "than windows in 16 bits: leave explore.residual out, or choose a smaller saving"
    )


def head_order(plan: SharingPlan, kv_order: HeadOrder, order: Tensor) -> HeadOrder:
    """The query head of the original weights at each position, ``[L][Hq]``, when KV heads are reordered.

    The query heads of a follower stand in the order in which the query heads of its lead serve them.

    Args:
        plan: with KV heads in their new order.
        kv_order: ``[L][H]``, the original KV head at each position.
        order: ``[L, L, H, H, G]``, of query heads inside their group, see `match_query_heads`.
    """
    groups, rows = order.shape[-1], []
    for layer, heads in enumerate(kv_order):
        row: list[int] = []
        for place, head in enumerate(heads):
            lead = plan.lead[layer][place]
            inside = list(range(groups))
            if lead not in (None, layer):
                inside = order[lead, layer, kv_order[lead][place], head].tolist()
            row += [head * groups + query for query in inside]
        rows.append(tuple(row))
    return tuple(rows)


def in_all_layers(plan: SharingPlan) -> SharingPlan:
    """Turn a plan of the measured layers into a plan of the whole model.

    Layers that were not measured keep the windows that they were trained with. They are packed if the plan
    packs others.
    """
    layers = plan.provenance.get("layers")
    if layers is None:
        return plan

    def spread(rows: Sequence[Any], other: Any) -> tuple[Any, ...]:
        """A row for every layer of the model; `other` for layers that were not measured."""
        own = dict(zip(layers, rows, strict=True))
        return tuple(own.get(layer, other) for layer in range(plan.provenance["num_layers"]))

    lead = [[None if one is None else layers[one] for one in row] for row in plan.lead]
    bits = spread(plan.bits, min(plan.bits)) if plan.bits else plan.bits
    order = plan.head_order
    if order:
        order = spread(order, range(len(order[0])))
    constants = plan.sink_constants
    if constants is not None:
        keys = None if constants.keys is None else spread(constants.keys, None)
        constants = SinkConstants(spread(constants.logits, None), spread(constants.values, None), keys)
    lead = spread(lead, [None] * plan.num_key_value_heads)
    return replace(plan, lead=lead, bits=bits, head_order=order, sink_constants=constants)


def _settings(explore: ExploreArgs, plans: Plans, units: int) -> dict[str, Any]:
    """The settings and the cost of a plan, for its provenance."""
    names = "cost", "roles", "granularity", "target", "target_saving", "budget_length"
    return {name: getattr(explore, name) for name in names} | {"plan_cost": plans.at(units)[1]}


def _with(plans: Plans, units: int, provenance: dict[str, Any]) -> SharingPlan:
    """The plan that saves ``units``, with more provenance."""
    plan, _ = plans.at(units)
    return replace(plan, provenance=plan.provenance | provenance)


def _losses(exploration: Exploration, plan: SharingPlan) -> dict[str, Any]:
    """Mean losses of the dense model and of the plan, on text and on answers, in nats per token.

    The answers are those of prompts on which nothing else is measured. The numbers of texts and prompts are
    added.
    """
    dense = SharingPlan.dense(plan.num_layers, plan.num_key_value_heads)
    dense = in_all_layers(replace(dense, head_order=plan.head_order, provenance=plan.provenance))
    made = sha256_of([plan.lead, plan.head_order, plan.bits, plan.residual, plan.provenance])
    partial = exploration.folder / f"losses.partial-{made[:8]}"
    model = exploration.load_model(dense)
    plan = in_all_layers(plan)
    sequences = exploration.read()
    count = exploration.explore.loss_sequences
    text = sequences[-count:]  # rounds measure the first ones
    prompts = needle_prompts_of(exploration, model.config, sequences, held_out=True)
    texts: dict[str, Sequence[Tensor | Prompt]] = {"text": text, "retrieval": prompts}
    losses: dict[str, Any] = {"dense": {}, "plan": {}}
    for name, one in (("dense", dense), ("plan", plan)):
        under = _under(model, one)
        for kind, found in texts.items():
            if found:
                folder = partial / f"loss, {name}, {kind}"
                losses[name][kind] = measure_mean(mean_loss(under), (), found, folder).item()
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    return losses | {"sequences": len(text), "prompts": len(prompts)}


@torch.no_grad()
def plan_loss(model: PodForCausalLM, plan: SharingPlan, sequences: Sequence[Tensor]) -> float:
    """Mean next-token loss on N sequences ``[n]`` under a plan, in nats per token.

    Packed layers are read as the cache holds them, as in decoding.

    Args:
        model: dense weights, with the windows that the plan is for.
    """
    shared = _under(model, plan)
    total = sum(_losses_of(shared, row).sum().item() for row in sequences)
    return total / sum(len(row) - 1 for row in sequences)


def _under(model: PodForCausalLM, plan: SharingPlan) -> PodForCausalLM:
    """The same weights under a plan."""
    return load_model(model, plan=plan, attention_backend=model.config.attention_backend)


def mean_loss(model: PodForCausalLM) -> Callable[[Tensor | Prompt], Tensor]:
    """A function for `measure_mean`: the mean loss of a text ``[n]``, or of a prompt's answers, in nats."""

    @torch.no_grad()
    def measure(text: Tensor | Prompt) -> Tensor:
        if isinstance(text, Prompt):
            return _losses_of(model, text.input_ids)[text.answers].mean()
        return _losses_of(model, text).mean()

    return measure


def _losses_of(model: PodForCausalLM, input_ids: Tensor) -> Tensor:
    """The next-token losses ``[n - 1]`` of tokens ``[n]``, in nats; fp64 on the CPU.

    Where layers are packed, every token reads what the model's own cache holds when that token comes. So the
    tokens between two lengths at which something is packed are read together.
    """
    tokens = input_ids[None].to(model.device)
    packs = model.config.sharing_plan.packs
    cache: Any = make_cache(model) if packs else None
    parts = [
        model.model(input_ids=part, past_key_values=cache, use_cache=packs).last_hidden_state
        for part in tokens.split(_parts(model.config.sharing_plan, tokens.shape[1]), dim=1)
    ]
    hidden = torch.cat(parts, dim=1)[:, :-1]
    weight = model.lm_head.weight  # whose device need not be that of the tokens
    found = token_scores(
        partial(wide_logits, weight=weight),
        hidden.to(weight.device),
        tokens[:, 1:].to(weight.device),
        rows_in(LOGIT_BYTES, len(weight)),
    )
    return -found.logprobs[0].double().cpu()


def _parts(plan: SharingPlan, length: int) -> list[int]:
    """Numbers of tokens that are read together; a cache packs tokens between two parts only.

    Tokens are packed when ``residual`` tokens and a multiple of the group size are held. In windows, first
    tokens do not count (``packed.py``, ``QuantizedWindow``).
    """
    if not plan.packs:
        return [length]
    starts = {0, length}
    for native in (plan.residual, plan.residual + (plan.num_sink_tokens or 0)):
        starts.update(range(native % GROUP_SIZE, length, GROUP_SIZE))
    places = sorted(starts)
    return [stop - start for start, stop in pairwise(places)]
