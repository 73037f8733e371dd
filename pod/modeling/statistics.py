"""Attention statistics that methods rank tokens by; the operations are filled in by the package (``pod.kernels``)."""

from collections.abc import Callable

from torch import Tensor

OPERATIONS: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]] = {}
"""``attention_column_sums`` and ``attention_rows``; see ``pod.kernels.statistics``."""


def attention_column_sums(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Attention that each key gets, ``[B, Hq, n]``, from queries ``[B, Hq, m, d]`` at the last ``m`` of ``n`` positions.

    Causal, at least fp32, in O(n) memory. ``k`` is ``[B, H, n, d]``.
    """
    sums = OPERATIONS["attention_column_sums"](q, k, scale=scale)
    assert isinstance(sums, Tensor)
    return sums


def attention_column_moments(q: Tensor, k: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """As ``attention_column_sums``, together with the sums of the squares."""
    sums, squares = OPERATIONS["attention_column_sums"](q, k, scale=scale, squares=True)
    return sums, squares


def attention_rows(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Attention weights ``[B, Hq, w, n]`` of queries ``[B, Hq, w, d]`` at the last ``w`` of ``n`` positions."""
    rows = OPERATIONS["attention_rows"](q, k, scale=scale)
    assert isinstance(rows, Tensor)
    return rows
