"""The paper's plan: greedy Algorithm 1 on attention similarity, and similarity as a cost of pairs for exact plans.

Similarity tensors are ``[L, L, Hq]`` for L layers and Hq query heads. The H KV heads own G = Hq / H consecutive query
heads each. NumPy only: planning takes milliseconds and needs no device.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pod.modeling.shipped.sharing import SharingPlan
from pod.training.plans.solve import Floats


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


def dissimilarity(similarity: ArrayLike, num_key_value_heads: int) -> Floats:
    """``[L, L, H]``: 1 - similarity with the lead, the mean over the G query heads of a KV head (METHODS.md §1).

    Raises: ValueError for a tensor that is no similarity.
    """
    return 1.0 - group_query_heads(similarity, num_key_value_heads).mean(axis=-1)


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
