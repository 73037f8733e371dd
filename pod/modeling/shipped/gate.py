"""Gate skip (paper appendix B.4): heads whose gate is near 1 leave their distant tokens out when decoding."""

from collections.abc import Sequence

import torch
from torch import Tensor


def skip_distant(
    weights: Tensor,
    followers: Sequence[int],
    lengths: Tensor,
    num_sink_tokens: int,
    num_recent_tokens: int,
    tau: float,
) -> None:
    """Where the gate of a follower's query head is at least ``tau``, attend to the proximal tokens alone; in place.

    The gate ``sigmoid(lse_P - lse_D)`` is the share of the weights that proximal tokens have, so it is read off them.

    Args:
        weights: ``[B, H, G, n]``, attention of the newest token of each row; zero beyond the row's length.
        followers: KV heads that follow a lead; the others stay as they are.
        lengths: ``[B]`` tokens per row, the newest included.
    """
    columns = torch.arange(weights.shape[-1], device=weights.device)
    proximal = (columns < num_sink_tokens) | (columns >= lengths[:, None] - num_recent_tokens)
    proximal = proximal[:, None, None]
    for head in followers:
        own = weights[:, head : head + 1]
        near = own * proximal
        gate = near.sum(-1, keepdim=True)
        own.copy_(torch.where(gate >= tau, near / gate, own))


def check_tau(tau: object) -> float | None:
    """``tau`` of a cache: None, or a number of 0 to 1."""
    if tau is None:
        return None
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 <= tau <= 1:
        raise ValueError(
            f"tau = {tau!r} must be a number from 0 (always skip) to 1, or None: the exact attention"
        )
    return float(tau)
