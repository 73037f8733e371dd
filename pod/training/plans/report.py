"""A plan and chosen heads in words, and the whole curve: what every saving costs at least, and which roles the plans along it have."""

import math
from typing import Any

from pod.modeling.retrieval_heads import RetrievalHeads
from pod.modeling.shipped.sharing import SharingPlan
from pod.training.plans.choose import Choice
from pod.training.plans.explore_args import ExploreArgs

SCHEMA_VERSION = 1
FORBIDDEN = {
    "follow": "when no head may follow",
    "window": "when no head may keep its window",
    "4_bits": "when every layer keeps 16 bits",
}


def pareto(choice: Choice, explore: ExploreArgs, windows: dict[str, int]) -> dict[str, Any]:
    """Savings that the allowed roles and bits reach and no larger one undercuts: least cost, that of as much or more with a role or
    packing forbidden, and the plan's roles. One for each half of a pair's bytes, and the chosen one.

    Heads stand in one order on the whole curve, that which was found for the chosen plan; a curve with a role forbidden has its
    own. ``saving`` is meant at ``budget_length`` tokens.
    """
    assert choice.frontier is not None, "a greedy plan has no curve"
    frontier, chosen = choice.frontier, choice.units
    pair = frontier.pair_units
    every = {frontier.cheapest(units) for units in range(0, len(frontier.costs), pair // 2)} | {chosen}
    points = []
    for units in sorted(every):
        plan = frontier.plan(units)
        point = {
            "units": units,
            "saving": plan.saving(explore.budget_tokens, **windows),
            "cost": float(frontier.costs[units]),
            "cost_without": {name: other.cost_of(units, pair) for name, other in choice.without.items()},
            "leads": plan.num_leads,
            "followers": plan.num_followers,
            "windows": plan.num_windows,
            "packed_layers": [layer for layer, bits in enumerate(plan.bits or ()) if bits < 16],
        }
        points.append(point)
    about = {name: getattr(explore, name) for name in ("budget_length", "cost", "retrieval_weight")}
    about |= {"schema": SCHEMA_VERSION, "num_layers": choice.plan.num_layers, **windows}
    saving = choice.plan.saving(explore.budget_tokens, **windows)
    return {**about, "chosen": {"units": chosen, "saving": saving}, "points": points}


def about_plan(plan: SharingPlan, explore: ExploreArgs) -> str:
    """How the plan was made, of what model, on which text: a line."""
    found, length = plan.provenance, explore.budget_length
    how = f"greedy at threshold {explore.threshold:g}"
    if explore.algorithm == "dp":
        where = f"at {length:,} tokens" if length else "in the limit"
        how = f"dp by {explore.cost}, target {explore.target_saving:.1%} {where}"
    name = found["model"].rstrip("/").split("/")[-1].removeprefix("package:")
    text = f"{found['num_sequences']} x {found['sequence_length']:,} tokens, {found['num_queries']} queries"
    return f"{name}, {text}; {how}"


def summary(plan: SharingPlan, explore: ExploreArgs, windows: dict[str, int]) -> str:
    """What the plan is, what it costs, what other roles would cost, and its measured loss."""
    found, n = plan.provenance, plan.provenance["sequence_length"]
    sinks, recent = windows.values()
    lines = [
        f"plan: {about_plan(plan, explore)}",
        describe_plan(plan),
        f"KV saving at {n:,} tokens with {sinks} sink and {recent} recent tokens: {plan.saving(n, sinks, recent):.1%}",
    ]
    if "layers" in found:
        taking = f"{len(found['layers'])} of {found['num_layers']} layers take part"
        others = "the others keep the windows that they were trained with"
        lines.insert(2, f"{taking}, and savings are shares of their bytes; {others}")
    if plan.head_order is not None:
        moved = sum(row != tuple(range(len(row))) for row in plan.head_order)
        lines.append(
            f"heads are re-ordered in {moved} of {plan.num_layers} layers; the model computes the same"
        )
    if "plan_cost" in found:
        costs = [f"least cost at this saving: {found['plan_cost']:.4g}"]
        for name, what in FORBIDDEN.items():
            cost = found.get(f"plan_cost_without_{name}", math.nan)
            if cost is None or not math.isnan(cost):
                costs.append(f"{'not reachable' if cost is None else f'{cost:.4g}'} {what}")
        lines.append("; ".join(costs))
    losses = found.get("losses", {})
    for kind, dense in losses.get("dense", {}).items():
        own, what = losses["plan"][kind], "text" if kind == "text" else "repeated random tokens"
        change = f"perplexity x {math.exp(own - dense):.3f}"
        lines.append(f"measured loss on {what}: dense {dense:.4f}, plan {own:.4f} nats per token ({change})")
    return "\n".join(lines)


def describe_plan(plan: SharingPlan) -> str:
    """KV saving, and what heads do, in two lines."""
    text = (
        f"KV saving (long sequences): {plan.asymptotic_saving:.1%}\nroles of {plan.num_pairs} (layer, KV head) pairs: "
        f"{plan.num_leads} lead, {plan.num_followers} follow, {plan.num_windows} keep their window"
    )
    bits = plan.bits or ()
    return f"{text}; {bits.count(4)} of {len(bits)} layers in 4 bits" if 4 in bits else text


def describe_heads(heads: RetrievalHeads, ratio: float = 5) -> str:
    """What was chosen and what it really saves when each other head holds 1/ratio of a long text, in two lines."""
    chosen, queries = sum(map(len, heads.query_heads)), sum(map(len, heads.echo))
    kept, pairs = sum(map(len, heads.key_value_heads)), len(heads.echo) * heads.num_key_value_heads
    share = kept / pairs
    smaller = 1 / (share + (1 - share) / ratio)
    return (
        f"retrieval heads: {chosen} of {queries} query heads ({chosen / queries:.1%}; induction {heads.induction_share:g}, "
        f"echo {heads.echo_share:g}) protect {kept} of {pairs} KV heads ({share:.1%})\n"
        f"KV cache of a long prompt: {smaller:.2f}x smaller with 1/{ratio:g} of it in the other heads"
    )
