"""The paper's plan: attention similarity between layers, and the greedy Algorithm 1 on it (§2.1).

The similarity is measured per query head, from the rows of the last q queries of long sequences. Exact plans
can use it too: 1 - similarity is then the cost of a follower (`dissimilarity`).

``sim_h(a, b) = 1 - mean JSD₂(S_a, S_b)`` over N sequences and q rows, with logarithms to base 2:
1 = identical, 0 = disjoint. (The paper's equation 2 prints the mean divergence itself, but reads it as
0 = dissimilar, 1 = identical.)
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pod.modeling.model.sharing import SharingPlan
from pod.plan.checks import check_array, check_similarity, check_threshold
from pod.plan.solve import Floats


def jensen_shannon_similarity(rows: Tensor, tile_elements: int | None = None) -> Tensor:
    """Similarity of every pair of layers on one sequence, ``1 - JSD₂`` averaged over the q rows, in fp64.

    With ``f(x) = x log₂ x`` the similarity of two distributions is ``½ Σ f(p + q) - f(p) - f(q)``.

    Args:
        rows: attention probabilities ``[L, Hq, q, n]``; each row is normalised in fp64 first.
        tile_elements: number of the q·n positions that are compared at a time. They take about
            ``24 · L · tile_elements`` bytes, beside the rows of one head in fp64.

    Returns:
        ``[L, L, Hq]``, fp64 on the CPU, symmetric, with diagonal 1.

    Raises:
        ValueError: rows have another shape, or the sum of a row differs from 1 by 0.01 or more.
    """
    check_array("rows", rows, "L Hq q n")
    # the usual tile stays in cache on a CPU, and takes about 256 MB on a GPU
    tile = tile_elements or (1 << 20 if rows.is_cuda else 1 << 14)
    heads = [_head_similarity(rows[:, head], tile) for head in range(rows.shape[1])]
    return torch.stack(heads, dim=-1).cpu()


def _head_similarity(rows: Tensor, tile: int) -> Tensor:
    """The similarity of all pairs of layers for one query head: rows ``[L, q, n]`` → ``[L, L]``."""
    rows = rows.double()
    total = rows.sum(dim=-1, keepdim=True)
    if not bool(((total - 1).abs() < 1e-2).all()):
        raise ValueError(
            f"attention rows sum to {total.min().item():.4g}..{total.max().item():.4g} instead of 1: "
            "the model gives NaN or infinite values on this text; try model.dtype=float32"
        )
    num_layers, num_queries = rows.shape[:2]
    joint = rows.new_zeros(num_layers, num_layers)
    own = rows.new_zeros(num_layers)
    for part in (rows / total).flatten(1).split(tile, dim=1):
        own += _x_log2_x(part).sum(dim=1)
        for layer in range(num_layers - 1):
            joint[layer, layer + 1 :] += _x_log2_x(part[layer] + part[layer + 1 :]).sum(dim=1)
    similarity = ((joint - own[:, None] - own[None, :]) / (2 * num_queries)).clamp_(0, 1).triu_(1)
    return similarity + similarity.T + torch.eye(num_layers, dtype=rows.dtype, device=rows.device)


def _x_log2_x(x: Tensor) -> Tensor:
    """``x log₂ x``, which is 0 at 0."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).log2_().mul_(x)


def greedy_plan(
    similarity: ArrayLike,
    num_key_value_heads: int,
    threshold: float = 0.5,
    provenance: dict[str, Any] | None = None,
) -> SharingPlan:
    """Algorithm 1 (paper §2.1): a layer joins the current block iff it is similar to all layers of the block.

    Two layers are similar for a KV head when a strict majority of its G query heads have
    similarity >= ``threshold`` (paper B.2). The lead of a block is its lowest layer.

    Args:
        similarity: ``[L, L, Hq]``, from 0 to 1, the same both ways.
        num_key_value_heads: H, of which Hq is a multiple.
        threshold: from 0 to 1.
        provenance: what the plan records about where it comes from.

    Raises:
        ValueError: for what `check_similarity` refuses, or a threshold outside [0, 1].
    """
    check_threshold(threshold)
    votes = group_query_heads(similarity, num_key_value_heads) >= threshold
    similar = 2 * votes.sum(axis=-1) > votes.shape[-1]  # [L, L, H]
    num_layers = len(similar)
    lead = np.zeros((num_layers, num_key_value_heads), dtype=np.int64)
    for head in range(num_key_value_heads):
        first = 0  # lowest layer of the current block
        for layer in range(num_layers):
            if not similar[layer, first:layer, head].all():
                first = layer
            lead[layer, head] = first
    found = {"algorithm": "greedy", "threshold": threshold, **(provenance or {})}
    return SharingPlan(lead=tuple(map(tuple, lead.tolist())), provenance=found)


def dissimilarity(similarity: ArrayLike, num_key_value_heads: int) -> Floats:
    """1 - similarity with the lead, ``[L, L, H]``: the mean over the G query heads."""
    return 1.0 - group_query_heads(similarity, num_key_value_heads).mean(axis=-1)


def group_query_heads(similarity: ArrayLike, num_key_value_heads: int) -> Floats:
    """Group query heads by KV head: ``[L, L, Hq]`` → fp64 ``[L, L, H, G]``.

    Raises:
        ValueError: for what `check_similarity` refuses.
    """
    check_similarity(similarity, num_key_value_heads)
    values = np.asarray(similarity, dtype=np.float64)
    return values.reshape(*values.shape[:2], num_key_value_heads, -1)
