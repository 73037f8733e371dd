"""From measurements to a plan: costs, heads aligned, roles chosen at the target saving, and the plan's own loss measured."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from pod.modeling.loading import load_tokenizer
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.plans.align import align
from pod.training.plans.bits import PackedCosts, plan_with_bits
from pod.training.plans.costs import (
    COSTS_NAME,
    RETRIEVAL,
    PlanCosts,
    cost_shapes,
    match_query_heads,
    measure_costs,
    measure_query_head_errors,
    sample_queries,
)
from pod.training.plans.exploration import (
    MATCHING_SEQUENCES,
    Exploration,
    advance,
    find_similarity,
    frontier_of,
    keep_old,
    quiet,
    reusable,
    target_units,
    weights_stamp,
)
from pod.training.plans.explore_args import ExploreArgs
from pod.training.plans.greedy import dissimilarity, greedy_plan
from pod.training.plans.heads import fitting_tokens, ordinary_vocabulary, repeated_tokens
from pod.training.plans.refine import LossLog, PlanLoss, Refinement, plan_key
from pod.training.plans.similarity import (
    Similarity,
    from_first_rank,
    measure_mean,
    model_fingerprint,
    sequence_fingerprint,
)
from pod.training.plans.solve import Floats, Frontier

REPEATS = 4  # copies of the random tokens of a retrieval sequence
PARTIAL_NAME = "plan_costs.partial"
LOSS_NAME = "plan_losses.jsonl"


@dataclass(frozen=True)
class Choice:
    """A plan, and what else there was to choose from.

    Attributes:
        follow, window: costs by place, ``[L, L, H]`` and ``[L, H]``, None = not priced.
        frontier: of all allowed roles, in the plan's order of heads; None for a greedy plan.
        without: role → the frontier when it is forbidden, heads aligned for it alone.
        similarity: what was measured for cost=similarity, else None.
    """

    plan: SharingPlan
    follow: Floats | None
    window: Floats | None
    frontier: Frontier | None = None
    without: dict[str, Frontier] | None = None
    similarity: Similarity | None = None


def check_windows(explore: ExploreArgs, windows: dict[str, int]) -> None:
    """Refuse, before anything is measured, sequences that the windows cover whole.

    Raises: ValueError when a cost, or refinement, would find no distant token.
    """
    if explore.cost == "projected" or explore.refine_evaluations:
        queries = explore.num_queries if explore.cost == "projected" else 1
        sample_queries(explore.sequence_length, queries, **windows)


def find_plan(exploration: Exploration, say: Callable[[str], None] = print) -> Choice:
    """The plan of the settings, the same on every rank. What was measured before serves again.

    Raises: ValueError for texts, models, windows and files that do not fit.
    """
    explore = exploration.explore
    say = say if not dist.is_initialized() or dist.get_rank() == 0 else quiet
    if explore.cost == "similarity":
        choice = choose_by_similarity(find_similarity(exploration, say), explore, exploration.windows)
    else:
        choice = choose(find_costs(exploration, say), explore, exploration.windows)
    if explore.refine_evaluations or (explore.cost == "projected" and explore.loss_sequences):
        choice = replace(choice, plan=_with_losses(exploration, choice, say))
    return choice


def choose_by_similarity(similarity: Similarity, explore: ExploreArgs, windows: dict[str, int]) -> Choice:
    """The paper's plan: greedy, or the followers of least ``Σ (1 - similarity with the lead)``."""
    heads = similarity.num_key_value_heads
    follow = dissimilarity(similarity.values, heads)
    if explore.algorithm == "greedy":
        plan = greedy_plan(similarity.values, heads, explore.threshold, similarity.provenance)
        return Choice(plan, follow, None, similarity=similarity)
    frontier = frontier_of(explore, follow, None)
    units = target_units(frontier, explore, windows)
    plan = frontier.plan(units, _provenance(explore, similarity.provenance, frontier, units))
    return Choice(plan, follow, None, frontier, similarity=similarity)


def choose(costs: PlanCosts, explore: ExploreArgs, windows: dict[str, int]) -> Choice:
    """The plan of least cost at the target saving, heads aligned for it, and what forbidding each role costs."""
    total = costs.total(explore.retrieval_weight)
    if 4 in explore.bits:
        return _choose_with_bits(costs, total, explore, windows)
    units = target_units(frontier_of(explore, total["in_place"], total["window"]), explore, windows)
    follow, window, kv_order = _aligned(total, explore, units)
    frontier = frontier_of(explore, follow, window)
    units += int(frontier.costs[units:].argmin())  # what saves more and costs less is better
    provenance = costs.provenance | windows | {"retrieval_weight": explore.retrieval_weight}
    provenance = _provenance(explore, provenance, frontier, units)
    without = {}
    for role in explore.roles if len(explore.roles) > 1 else ():
        rest = replace(explore, roles=[x for x in explore.roles if x != role], target_saving=0.0)
        most = len(frontier_of(rest, total["in_place"], total["window"]).costs) - 1
        without[role] = frontier_of(rest, *_aligned(total, rest, min(units, most))[:2])
        provenance[f"plan_cost_without_{role}"] = cost_at(without[role], units)
    plan = frontier.plan(units, provenance)
    if kv_order is not None:
        plan = replace(plan, head_order=head_order(plan, kv_order, costs.order))
    return Choice(plan, follow, window, frontier, without)


def _choose_with_bits(
    costs: PlanCosts, total: dict[str, Floats], explore: ExploreArgs, windows: dict[str, int]
) -> Choice:
    """As ``choose`` where layers may be packed. Heads stay where they are: with packed leads at hand hardly any head follows."""
    priced = PackedCosts(
        follow=total["in_place"] if "follow" in explore.roles else None,
        window=total["window"] if "window" in explore.roles else None,
        lead4=total["lead4"],
        follow4=total["follow4"],
    )
    size = windows["num_sink_tokens"], windows["num_recent_tokens"]
    found = costs.provenance | windows | {"retrieval_weight": explore.retrieval_weight, "bits": explore.bits}
    found |= {"cost": explore.cost, "roles": list(explore.roles), "target_saving": explore.target_saving}
    found |= {"budget_length": explore.budget_tokens}
    plan = plan_with_bits(priced, explore.target_saving, explore.budget_tokens, size, found)
    most = _reachable(explore, total, windows)
    if explore.target_saving <= most:
        other = choose(costs, replace(explore, bits=[16]), windows).plan
        found = {"plan_cost_without_4_bits": other.provenance["plan_cost"]}
        plan = replace(plan, provenance=plan.provenance | found)
    return Choice(plan, total["in_place"], total["window"])


def _reachable(explore: ExploreArgs, total: dict[str, Floats], windows: dict[str, int]) -> float:
    """The largest share of bytes that the allowed roles save in 16 bits."""
    last = len(frontier_of(explore, total["in_place"], total["window"]).costs) - 1
    far = max(0, explore.budget_tokens - sum(windows.values())) / explore.budget_tokens
    return last / (2 * total["window"].size) * far


def cost_at(frontier: Frontier, units: int) -> float | None:
    """The least cost of saving so many units or more; None where no plan does."""
    least = frontier.costs[units:].min(initial=np.inf)
    return float(least) if np.isfinite(least) else None


def _aligned(
    total: dict[str, Floats], explore: ExploreArgs, units: int
) -> tuple[Floats, Floats, tuple[tuple[int, ...], ...] | None]:
    """Costs of followers and windows by place, and the KV head at each place (None = where they were)."""
    if not explore.align_heads or "follow" not in explore.roles or not units:
        return total["in_place"], total["window"], None
    window = total["window"] if "window" in explore.roles else None
    found = align(total["follow"], window, units)
    return found.follow, total["window"] if found.window is None else found.window, found.kv_order


def head_order(
    plan: SharingPlan, kv_order: tuple[tuple[int, ...], ...], order: Tensor
) -> tuple[tuple[int, ...], ...] | None:
    """Which query head of the original weights stands at each place, ``[L][Hq]``; None when all stand where they were.

    Args:
        kv_order: ``[L][H]``, the KV head at each place.
        order: of query heads inside the groups of pairs, see `PlanCosts`; a follower's group stands as its lead's does.
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


def _provenance(
    explore: ExploreArgs, measured: dict[str, Any], frontier: Frontier, units: int
) -> dict[str, Any]:
    return measured | {
        "cost": explore.cost,
        "roles": list(explore.roles),
        "target_saving": explore.target_saving,
        "budget_length": explore.budget_length,
        "plan_cost": float(frontier.costs[units]),
    }


def find_costs(exploration: Exploration, say: Callable[[str], None] = print) -> PlanCosts:
    """The costs of these settings: read from the folder when they are there, else measured (by all ranks) and written."""
    path = exploration.folder / COSTS_NAME
    wanted = exploration.settings | exploration.windows
    wanted |= {"weights": weights_stamp(exploration.model_folder)}
    wanted |= {"retrieval_sequences": exploration.explore.retrieval_sequences}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found = from_first_rank(reusable(path, PlanCosts, wanted, say) if is_first else None)
    if found is not None:
        return found
    found = _measure(exploration, wanted, say)
    if is_first:
        keep_old(path)
        found.save(path)
        shutil.rmtree(exploration.folder / PARTIAL_NAME, ignore_errors=True)
    return found


def _measure(exploration: Exploration, wanted: dict[str, Any], say: Callable[[str], None]) -> PlanCosts:
    """Query heads matched on a few sequences, then the cost of every role on all of them."""
    explore = exploration.explore
    model = exploration.load_model()
    sequences, split = exploration.read(say)
    repeated = repeated_sequences(exploration, model.config)
    fingerprint = wanted | {
        "weights_sha256": model_fingerprint(model),
        "tokens_sha256": sequence_fingerprint(sequences),
    }

    def mean(name: str, measure: Callable[..., Tensor], kind: list[Tensor]) -> Tensor:
        with tqdm(total=len(kind), desc=f"plan costs, {name}", unit="seq", disable=say is quiet) as bar:
            return measure_mean(
                lambda input_ids: measure(model, input_ids.to(model.device), explore.num_queries),
                kind,
                fingerprint=fingerprint,
                partial_dir=exploration.folder / PARTIAL_NAME / name,
                save_every=explore.save_every,
                progress=partial(advance, bar),
            )

    heads = model.config.num_key_value_heads
    few = [*sequences[:MATCHING_SEQUENCES], *repeated]
    order = match_query_heads(mean("query heads", measure_query_head_errors, few), heads)
    shapes = cost_shapes(model.config.num_hidden_layers, heads)

    def flat(model: Any, input_ids: Tensor, num_queries: int) -> Tensor:
        found = measure_costs(model, input_ids, num_queries, order)
        return torch.cat([found[name].flatten() for name in shapes])

    values: dict[str, Tensor] = {}
    for name, ending, kind in (("text", "", list(sequences)), ("repeated", RETRIEVAL, repeated)):
        if kind:
            parts = mean(name, flat, kind).split([int(np.prod(shape)) for shape in shapes.values()])
            values |= {
                key + ending: part.view(shape)
                for (key, shape), part in zip(shapes.items(), parts, strict=True)
            }
    return PlanCosts(values=values, order=order, provenance=fingerprint | {"split_used": split})


def repeated_sequences(exploration: Exploration, config: Any) -> list[Tensor]:
    """Sequences of random ordinary tokens, each repeated REPEATS times."""
    explore, settings = exploration.explore, exploration.settings
    if not explore.retrieval_sequences:
        return []
    tokenizer = load_tokenizer(exploration.model_folder, gguf_file=settings["gguf_file"])
    vocab, special = ordinary_vocabulary(tokenizer, config)
    length = explore.sequence_length // REPEATS
    num_tokens = fitting_tokens(config, length, REPEATS, vocab - len(special))
    seeds = range(settings["seed"], settings["seed"] + explore.retrieval_sequences)
    return [repeated_tokens(num_tokens, REPEATS, vocab, special, seed) for seed in seeds]


def _with_losses(exploration: Exploration, choice: Choice, say: Callable[[str], None]) -> SharingPlan:
    """The plan, refined when asked for, with its loss and that of the dense model in its provenance."""
    explore, plan = exploration.explore, choice.plan
    dense = SharingPlan.dense(plan.num_layers, plan.num_key_value_heads)
    model = exploration.load_model(replace(dense, head_order=plan.head_order))
    text = list(exploration.read(say)[0][: explore.loss_sequences])
    repeated = repeated_sequences(exploration, model.config) if explore.cost == "projected" else []
    fingerprint = {
        **exploration.windows,
        "dtype": exploration.settings["dtype"],
        "weights": weights_stamp(exploration.model_folder),
        "weights_sha256": plan.provenance["weights_sha256"],
        "tokens_sha256": sequence_fingerprint([*text, *repeated]),
    }
    log = LossLog(exploration.folder / LOSS_NAME, fingerprint)
    if explore.refine_evaluations:
        loss = PlanLoss(model, [*text, *repeated])
        search = Refinement(
            plan,
            choice.follow,
            choice.window,
            loss,
            explore.refine_evaluations,
            explore.refine_proposals,
            log,
            say,
        )
        plan = search.run()
    measured: dict[str, dict[str, float]] = {"dense": {}, "plan": {}}
    for kind, sequences in (("text", text), ("repeated", repeated)):
        for name, one in (("dense", dense), ("plan", plan)) if sequences else ():
            key = f"{kind} {plan_key(one)}"
            if key not in log.losses:
                log.add(key, PlanLoss(model, sequences)(one))
            measured[name][kind] = log.losses[key]
    counts = {"sequences": len(text), "repeated_sequences": len(repeated)}
    return replace(plan, provenance=plan.provenance | {"losses": measured | counts})
