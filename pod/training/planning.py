"""From attention similarity to a sharing plan: the paper's greedy Algorithm 1 and exact optimal plans.

Similarity tensors are ``[L, L, Hq]`` for L layers and Hq query heads. The H KV heads own G = Hq / H consecutive query
heads each. Exact plans exist for any cost of pairs ``[L, L, H]``; similarity gives one of them, ``plan_costs.py`` measures
others. NumPy only: planning takes milliseconds and needs no device.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pod.modeling.shipped.sharing import SharingPlan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def greedy_plan(
    similarity: ArrayLike,
    num_key_value_heads: int,
    threshold: float = 0.5,
    provenance: dict[str, Any] | None = None,
) -> SharingPlan:
    """Algorithm 1 (paper §2.1): a layer joins the current block iff it is similar to every layer of the block.

    Two layers are similar for a KV head when a strict majority of its G query heads have similarity >= ``threshold``
    (paper B.2). The lead of a block is its lowest layer.

    Raises: ValueError for a tensor that is no similarity, or a threshold outside 0 to 1.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}, allowed are 0 to 1")
    grouped = group_query_heads(similarity, num_key_value_heads)
    similar = is_similar(grouped, threshold)
    num_layers = grouped.shape[0]
    lead = np.zeros((num_layers, num_key_value_heads), dtype=np.int64)
    for head in range(num_key_value_heads):
        first = 0  # lowest layer of the current block
        for layer in range(num_layers):
            if not similar[layer, first:layer, head].all():
                first = layer
            lead[layer, head] = first
    found = {"algorithm": "greedy", "threshold": threshold, **(provenance or {})}
    return SharingPlan(lead=tuple(map(tuple, lead.tolist())), provenance=found)


def dp_plan(
    similarity: ArrayLike,
    num_key_value_heads: int,
    target_saving: float = 0.35,
    provenance: dict[str, Any] | None = None,
) -> SharingPlan:
    """The plan of least ``Σ (1 - sim(lead, layer))`` among all plans with the target saving (METHODS.md §1).

    ``sim`` is the mean over the G query heads of a KV head. The number of non-lead (layer, KV head) pairs is the
    integer nearest to ``2 * target_saving * L * H``, so the saving differs from the target by at most a quarter of a pair's share.

    METHODS.md prices blocks and bisects on the price. A price reaches only the plans on the lower convex hull of
    (non-lead pairs, cost) and needs a repair between them; tabulating each head's best cost for every number of
    blocks and adding the tables head by head (a min-plus convolution) is as fast and exact for every target.

    Raises: ValueError for a tensor that is no similarity, or a target that L layers cannot reach.
    """
    grouped = group_query_heads(similarity, num_key_value_heads)
    return least_cost_plan(
        1.0 - grouped.mean(axis=-1), target_saving, {"cost": "similarity", **(provenance or {})}
    )


def least_cost_plan(
    costs: ArrayLike, target_saving: float = 0.35, provenance: dict[str, Any] | None = None
) -> SharingPlan:
    """The plan of least ``Σ costs[lead, layer, head]`` over its followers among all plans with the target saving.

    Args:
        costs: ``[L, L, H]``, read where lead < layer.
        provenance: what the costs are and were measured on; stored with the plan.

    Raises: ValueError for a tensor that is no cost of pairs, or a target that L layers cannot reach.
    """
    values = check_costs(costs)
    num_layers, _, num_heads = values.shape
    total = num_non_lead_for(target_saving, num_layers, num_heads)
    tables = [best_by_non_lead(cumulative_cost(values[:, :, head])) for head in range(num_heads)]
    shares = divide_non_lead([least for least, _ in tables], total)
    lead = np.zeros((num_layers, num_heads), dtype=np.int64)
    for head, (share, (_, starts)) in enumerate(zip(shares, tables, strict=True)):
        lead[:, head] = lead_of_head(starts, num_layers - share)
    found = {"algorithm": "dp", "target_saving": target_saving, **(provenance or {})}
    return SharingPlan(lead=tuple(map(tuple, lead.tolist())), provenance=found)


def plan_cost(similarity: ArrayLike, plan: SharingPlan) -> float:
    """``Σ (1 - sim(lead, layer))`` over all (layer, KV head) pairs, the quantity that `dp_plan` minimises."""
    grouped = group_query_heads(similarity, plan.num_key_value_heads)
    return sum_of_costs(1.0 - grouped.mean(axis=-1), plan)


def sum_of_costs(costs: ArrayLike, plan: SharingPlan) -> float:
    """``Σ costs[lead, layer, head]`` over all followers, the quantity that `least_cost_plan` minimises."""
    values = check_costs(costs)
    plan.check_fits(values.shape[0], values.shape[2])
    return float(
        sum(
            values[lead, layer, head]
            for layer, row in enumerate(plan.lead)
            for head, lead in enumerate(row)
            if lead != layer
        )
    )


def check_costs(costs: ArrayLike) -> Floats:
    """Costs of pairs as fp64 ``[L, L, H]``; ValueError unless they are a finite square tensor."""
    values = np.asarray(costs, dtype=np.float64)
    if values.ndim != 3 or values.shape[0] != values.shape[1] or 0 in values.shape:
        raise ValueError(f"costs must be [layers, layers, KV heads], got shape {list(values.shape)}")
    if not np.isfinite(values).all():
        raise ValueError("costs hold NaN or infinity: delete the file of costs and measure again")
    return values


def describe_plan(plan: SharingPlan) -> str:
    """A few lines about a plan: KV saving, number of blocks, longest block, followers per KV head."""
    blocks = [plan.blocks(head) for head in range(plan.num_key_value_heads)]
    longest_head, longest = max(
        ((head, block) for head, own in enumerate(blocks) for block in own), key=lambda item: len(item[1])
    )
    per_head = [plan.num_layers - len(own) for own in blocks]
    span = f"layers {longest[0]}-{longest[-1]}" if len(longest) > 1 else f"layer {longest[0]}"
    return "\n".join(
        (
            f"KV saving (long sequences): {plan.asymptotic_saving:.1%} "
            f"({sum(per_head)} of {plan.num_layers * plan.num_key_value_heads} (layer, KV head) pairs keep no distant keys)",
            f"blocks: {sum(map(len, blocks))} in {plan.num_key_value_heads} KV heads of {plan.num_layers} layers",
            f"longest block: {len(longest)} {'layer' if len(longest) == 1 else 'layers'} (KV head {longest_head}, {span})",
            f"layers that follow, per KV head: {', '.join(map(str, per_head))}",
        )
    )


def group_query_heads(similarity: ArrayLike, num_key_value_heads: int) -> Floats:
    """``[L, L, Hq]`` → fp64 ``[L, L, H, G]``; ValueError unless it is a finite square tensor that H divides."""
    values = np.asarray(similarity, dtype=np.float64)
    if values.ndim != 3 or values.shape[0] != values.shape[1] or 0 in values.shape:
        raise ValueError(f"similarity must be [layers, layers, query heads], got shape {list(values.shape)}")
    if num_key_value_heads < 1 or values.shape[2] % num_key_value_heads:
        raise ValueError(
            f"{values.shape[2]} query heads cannot be divided among {num_key_value_heads} KV heads: "
            "give the number of KV heads of the model that was measured"
        )
    if not np.isfinite(values).all():
        raise ValueError("similarity holds NaN or infinity: delete the similarity file and measure again")
    return values.reshape(*values.shape[:2], num_key_value_heads, -1)


def is_similar(grouped: Floats, threshold: float) -> NDArray[np.bool_]:
    """``[L, L, H, G]`` → ``[L, L, H]``: whether more than half of the G query heads reach the threshold."""
    votes = (grouped >= threshold).sum(axis=-1)
    return 2 * votes > grouped.shape[-1]


def num_non_lead_for(target_saving: float, num_layers: int, num_key_value_heads: int) -> int:
    """The number of non-lead (layer, KV head) pairs whose saving is nearest to the target."""
    total = round(2 * target_saving * num_layers * num_key_value_heads)
    most = (num_layers - 1) * num_key_value_heads
    if not 0 <= total <= most:
        raise ValueError(
            f"target_saving is {target_saving}, {num_layers} layers can save 0 to {(num_layers - 1) / num_layers / 2:.3f} "
            "(layer 0 always leads, values are never shared)"
        )
    return total


def block_cost(similarity: Floats) -> Floats:
    """``[L, L]`` similarity of one KV head → ``cost[first, last] = Σ_{first < l <= last} (1 - sim(first, l))``."""
    return cumulative_cost(1.0 - similarity)


def cumulative_cost(costs: Floats) -> Floats:
    """``[L, L]`` costs of one KV head's pairs → cost of the block of layers first..last, ``Σ_{first < l <= last} costs[first, l]``."""
    return np.cumsum(np.triu(costs, k=1), axis=1)


def best_by_non_lead(cost: Floats) -> tuple[Floats, Ints]:
    """The best partition of one head's layers into every possible number of blocks.

    Returns the least cost by number of non-lead layers ``[L]`` (index 0 = every layer leads), and ``starts
    [blocks, end]``: the first layer of the last block when layers 0..end are cut into ``blocks + 1`` blocks.
    Ties take the lower layer.
    """
    num_layers = cost.shape[0]
    best = np.full((num_layers, num_layers), np.inf)
    starts = np.zeros((num_layers, num_layers), dtype=np.int64)
    best[0] = cost[0]
    for blocks in range(1, num_layers):
        for end in range(blocks, num_layers):
            options = best[blocks - 1, blocks - 1 : end] + cost[blocks : end + 1, end]
            choice = int(options.argmin())
            best[blocks, end] = options[choice]
            starts[blocks, end] = blocks + choice
    return best[::-1, -1].copy(), starts


def divide_non_lead(costs: list[Floats], total: int) -> list[int]:
    """Number of non-lead layers per head, summing to ``total``, of least total cost. Ties: earlier heads get fewer."""
    reached = np.zeros(1)  # least cost of the heads so far, by their number of non-lead layers
    choices: list[Ints] = []
    for own in costs:
        size = len(reached) + len(own) - 1
        options = np.full((len(own), size), np.inf)
        for count, cost in enumerate(own):
            options[count, count : count + len(reached)] = reached + cost
        # the last minimum: this head takes many, the heads before it few
        choice = len(own) - 1 - options[::-1].argmin(axis=0)
        choices.append(choice)
        reached = options[choice, np.arange(size)]
    counts: list[int] = []
    for choice in reversed(choices):
        counts.append(int(choice[total]))
        total -= counts[-1]
    return counts[::-1]


def lead_of_head(starts: Ints, num_blocks: int) -> Ints:
    """``[L]`` lead layers of one head from the table of `best_by_non_lead`, cut into ``num_blocks`` blocks."""
    lead = np.zeros(starts.shape[1], dtype=np.int64)
    end = starts.shape[1] - 1
    for blocks in range(num_blocks - 1, -1, -1):
        first = starts[blocks, end]
        lead[first : end + 1] = first
        end = first - 1
    return lead
