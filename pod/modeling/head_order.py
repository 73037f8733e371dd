"""Heads in another order: the query heads of a layer, and the KV heads they belong to, permuted without changing the function."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .shipped.config import PodConfig

Order = Sequence[Sequence[int]]
"""``[L][Hq]``: which query head of the original weights stands at each place, as ``SharingPlan.head_order``."""


def reordered_weights(
    state: Mapping[str, Tensor], config: PodConfig, now: Order | None
) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of the projections that change when heads that stand in the order ``now`` move to ``config.head_order``.

    Query heads are rows of ``q_proj`` and columns of ``o_proj``, KV heads rows of ``k_proj`` and ``v_proj``; biases of q, k
    and v are rows too, norms of heads are shared by all. Layers whose order stays are left out. None = the original order.
    """
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    original = [list(range(heads))] * layers
    for layer, (old, new) in enumerate(zip(now or original, config.head_order or original, strict=True)):
        if list(old) == list(new):
            continue
        place = {head: at for at, head in enumerate(old)}
        query = torch.tensor([place[head] for head in new])
        key_value = query[:: config.num_key_value_groups] // config.num_key_value_groups
        prefix = f"model.layers.{layer}.self_attn."
        for name in ("q_proj", "k_proj", "v_proj"):
            for kind in ("weight", "bias"):
                if (weight := state.get(f"{prefix}{name}.{kind}")) is not None:
                    index = query if name == "q_proj" else key_value
                    yield f"{prefix}{name}.{kind}", _moved(weight, index, 0, config.head_dim)
        yield f"{prefix}o_proj.weight", _moved(state[f"{prefix}o_proj.weight"], query, 1, config.head_dim)


def _moved(weight: Tensor, index: Tensor, dim: int, head_dim: int) -> Tensor:
    """The weight with its heads, ``head_dim`` rows or columns each, taken in the order of ``index``."""
    index = index.to(weight.device)
    return weight.unflatten(dim, (-1, head_dim)).index_select(dim, index).flatten(dim, dim + 1)
