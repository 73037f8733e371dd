"""What eviction methods read from attention, without the ``n x n`` matrix: validation and dispatch.

An explicit backend that cannot run raises; ``auto`` takes the first of its device that can. Results carry no gradient.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from pod.kernels import statistics_blocked, statistics_reference
from pod.modeling.shipped import attend


class Entry(NamedTuple):
    """A backend: its two operations, and why it cannot run on given queries (None = it can)."""

    attention_column_sums: Callable[..., Tensor]
    attention_rows: Callable[..., Tensor]
    unsupported: Callable[[Tensor], str | None]


def _triton():
    """The Triton kernels; imported when first asked for, because a CPU installation has no Triton."""
    return importlib.import_module("pod.kernels.triton_statistics")


def _triton_unsupported(q: Tensor) -> str | None:
    try:
        return _triton().unsupported(q)
    except ImportError as error:
        return f"Triton cannot be imported ({error})"


BACKENDS: dict[str, Entry] = {
    "triton": Entry(
        lambda *arguments: _triton().attention_column_sums(*arguments),
        lambda *arguments: _triton().attention_rows(*arguments),
        _triton_unsupported,
    )
} | {
    name: Entry(module.attention_column_sums, module.attention_rows, lambda q: None)
    for name, module in (("blocked", statistics_blocked), ("reference", statistics_reference))
}
AUTO_ORDER: dict[str, list[str]] = {"cuda": ["blocked"]}
"""What ``auto`` tries on a device type, fastest first; devices not named use ``blocked``. ``triton`` gets its place with a
measurement on a GPU; until then it runs when asked for."""


def choose(q: Tensor, backend: str = "auto") -> Entry:
    """The backend that will run; ``ValueError`` when the asked one cannot."""
    order = AUTO_ORDER.get(q.device.type, ["blocked"])
    return attend.choose("statistics", BACKENDS, order, q, backend)


def attention_column_sums(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None = None,
    scale: float | None = None,
    squares: bool = False,
    backend: str = "auto",
) -> Tensor:
    """How much attention every key received: ``Σ_i A_ij``, the accumulated score of H2O (Zhang et al., 2023, section 4).

    D2O sums it over the prompt in the same way; RoCo (Ren and Zhu, 2024) also needs ``Σ_i A_ij²`` for the standard deviation.

    Args:
        q: ``[B, Hq, m, d]``, rotated: the queries of the last ``m`` of ``n`` positions; each sees the keys up to its own.
        k: ``[B, H, n, d]``, rotated, with ``Hq = G·H``.
        lse: ``[B, Hq, m]``, natural logarithm of the sum of ``exp`` of the scaled logits, as flash attention returns it; computed
            when None. Weights are ``exp(logit - lse)``, so it may include keys that are not in ``k``.
        scale: factor on logits, ``1/sqrt(d)`` when None.
        squares: also return the sums of squared weights.

    Returns:
        ``[B, Hq, n]``, with ``squares`` ``[2, B, Hq, n]``, in fp32 (fp64 for fp64 inputs); per query head, not averaged over G.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run.
    """
    _check(q, k, lse)
    run = choose(q, backend).attention_column_sums
    return run(q, k, lse, q.shape[-1] ** -0.5 if scale is None else scale, squares)


def attention_rows(q: Tensor, k: Tensor, scale: float | None = None, backend: str = "auto") -> Tensor:
    """Softmax rows of the last queries, such as the observation window of SnapKV (Li et al., 2024, section 4.1).

    Args:
        q: ``[B, Hq, w, d]``, rotated: the queries of the last ``w`` of ``n`` positions; each sees the keys up to its own.
        k: ``[B, H, n, d]``, rotated, with ``Hq = G·H``.
        scale: factor on logits, ``1/sqrt(d)`` when None.

    Returns:
        ``[B, Hq, w, n]`` in fp32 (fp64 for fp64 inputs); every row sums to one, and is 0 after its own position.

    Raises:
        ValueError: shapes that do not fit, or a backend that cannot run.
    """
    _check(q, k, None)
    return choose(q, backend).attention_rows(q, k, q.shape[-1] ** -0.5 if scale is None else scale)


def _check(q: Tensor, k: Tensor, lse: Tensor | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q and k are {list(q.shape)} and {list(k.shape)}; give [B, Hq, m, d] and [B, H, n, d] with equal B and d"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads do not divide evenly among {k.shape[1]} KV heads")
    if q.shape[2] > k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} queries are more than {k.shape[2]} keys; k must hold the queries' own positions too"
        )
    if q.dtype != k.dtype or q.device != k.device or not q.dtype.is_floating_point:
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k is {k.dtype} on {k.device}; give both in one float dtype on one device"
        )
    if lse is not None and (lse.shape != q.shape[:3] or lse.device != q.device):
        raise ValueError(
            f"lse is {list(lse.shape)} on {lse.device}, expected {list(q.shape[:3])} on {q.device}"
        )
