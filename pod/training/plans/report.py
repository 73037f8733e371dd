"""A plan and chosen heads in words, and the whole curve: what every saving costs at least, and which roles the plans along it have."""

from typing import Any

from pod.modeling.retrieval_heads import RetrievalHeads
from pod.modeling.shipped.sharing import SharingPlan, roles_of
from pod.training.plans.choose import Choice
from pod.training.plans.explore_args import ExploreArgs

PARETO_NAME = "pareto.json"
SCHEMA_VERSION = 1


def pareto(choice: Choice, explore: ExploreArgs, windows: dict[str, int]) -> dict[str, Any]:
    """Savings that the allowed roles and bits reach and no larger one undercuts: least cost, that of as much or more with a role or
    packing forbidden, and the plan's roles. One for each half of a pair's bytes, and the chosen one.

    Heads stand in one order on the whole curve, that which was found for the chosen plan; a curve with a role forbidden has its
    own. ``saving`` is meant at ``budget_length`` tokens.
    """
    assert choice.solved is not None, "a greedy plan has no curve"
    frontier, points = choice.solved.frontier, []
    pair = frontier.pair_units
    for units in sorted(
        {frontier.cheapest(x) for x in range(0, len(frontier.costs), pair // 2)} | {choice.solved.units}
    ):
        plan = frontier.plan(units)
        points.append(
            {
                "units": units,
                "saving": plan.saving(explore.budget_tokens, **windows),
                "cost": float(frontier.costs[units]),
                "cost_without": {name: other.cost_of(units, pair) for name, other in choice.without.items()},
                "leads": plan.num_leads,
                "followers": plan.num_followers,
                "windows": plan.num_windows,
                "per_layer": roles_per_layer(plan),
                "packed_layers": [layer for layer, bits in enumerate(plan.bits or ()) if bits < 16],
            }
        )
    return {
        "schema": SCHEMA_VERSION,
        "budget_length": explore.budget_length,
        **windows,
        "cost": explore.cost,
        "retrieval_weight": explore.retrieval_weight,
        "chosen": {
            "units": choice.solved.units,
            "saving": choice.plan.saving(explore.budget_tokens, **windows),
        },
        "points": points,
    }


def roles_per_layer(plan: SharingPlan) -> dict[str, list[int]]:
    """How many KV heads of each layer lead, follow and keep their window."""
    roles = [roles_of(plan.lead, layer) for layer in range(plan.num_layers)]
    return {name: [len(getattr(x, name)) for x in roles] for name in ("leads", "followers", "windows")}


def describe_plan(plan: SharingPlan) -> str:
    """A few lines about a plan: KV saving, what heads do, number of blocks, longest block, followers per KV head."""
    blocks = [(head, block) for head in range(plan.num_key_value_heads) for block in plan.blocks(head)]
    lines = [
        f"KV saving (long sequences): {plan.asymptotic_saving:.1%}",
        f"roles of {plan.num_pairs} (layer, KV head) pairs: {plan.num_leads} lead, {plan.num_followers} follow, "
        f"{plan.num_windows} keep their window"
        + (
            f"; {plan.bits.count(4)} of {plan.num_layers} layers in 4 bits"
            if plan.bits and plan.packs
            else ""
        ),
        f"blocks: {len(blocks)} in {plan.num_key_value_heads} KV heads of {plan.num_layers} layers",
    ]
    if blocks:
        head, longest = max(blocks, key=lambda item: len(item[1]))
        layers = ", ".join(map(str, longest))
        lines.append(
            f"longest block: {len(longest)} {'layer' if len(longest) == 1 else 'layers'} (KV head {head}: {layers})"
        )
    return "\n".join(lines)


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
