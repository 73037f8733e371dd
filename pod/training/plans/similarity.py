"""Attention similarity between layers, per query head, from the rows of the last q queries of long sequences (paper §2.1).

``sim_h(a, b) = 1 - mean JSD₂(S_a, S_b)`` over N sequences and q rows, with logarithms to base 2: 1 = identical, 0 = disjoint.
(The paper's equation 2 prints the mean divergence itself but reads it as 0 = dissimilar, 1 = identical.)
"""

import torch
from torch import Tensor

TILE_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 20}
"""Positions compared at a time: in cache on a CPU, about 256 MB on a GPU."""


def jensen_shannon_similarity(rows: Tensor, tile_elements: int | None = None) -> Tensor:
    """Similarity of every pair of layers on one sequence, ``1 - JSD₂`` averaged over the q rows, in fp64.

    With ``f(x) = x log₂ x`` the similarity of two distributions is ``½ Σ f(p + q) - f(p) - f(q)``.

    Args:
        rows: attention probabilities ``[L, Hq, q, n]``; each row is normalised in fp64 first.
        tile_elements: of the q·n positions, how many are compared at a time; extra memory is about
            ``24 · L · tile_elements`` bytes plus one head's rows in fp64.
    Returns: ``[L, L, Hq]`` fp64 on the CPU, symmetric, diagonal 1.
    Raises: ValueError when a row is no distribution.
    """
    if rows.ndim != 4:
        raise ValueError(
            f"attention rows must be [layers, query heads, queries, tokens], got {list(rows.shape)}"
        )
    tile = tile_elements or TILE_ELEMENTS.get(rows.device.type, 1 << 14)
    heads = [_head_similarity(rows[:, head], tile) for head in range(rows.shape[1])]
    return torch.stack(heads, dim=-1).cpu()


def _head_similarity(rows: Tensor, tile: int) -> Tensor:
    """``[L, q, n]`` → ``[L, L]``."""
    rows = rows.double()
    total = rows.sum(dim=-1, keepdim=True)
    if not bool(((total - 1).abs() < 1e-2).all()):
        raise ValueError(
            f"attention rows sum to {total.min().item():.4g}..{total.max().item():.4g} instead of 1: "
            "the model gives NaN or infinite values on this text; try model.dtype=float32"
        )
    num_layers, num_queries = rows.shape[:2]
    joint, own = rows.new_zeros(num_layers, num_layers), rows.new_zeros(num_layers)
    for part in (rows / total).flatten(1).split(tile, dim=1):
        own += _x_log2_x(part).sum(dim=1)
        for layer in range(num_layers - 1):
            joint[layer, layer + 1 :] += _x_log2_x(part[layer] + part[layer + 1 :]).sum(dim=1)
    similarity = (joint - own[:, None] - own[None, :]) / (2 * num_queries)
    similarity = similarity.clamp_(0, 1).triu_(1)
    return similarity + similarity.T + torch.eye(num_layers, dtype=rows.dtype, device=rows.device)


def _x_log2_x(x: Tensor) -> Tensor:
    return x.clamp_min(torch.finfo(x.dtype).tiny).log2_().mul_(x)
