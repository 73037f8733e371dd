"""Validation and dispatch of attention. An explicit backend that cannot run raises; ``auto`` takes the first that can."""

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pod.kernels import dispatch, flash, flash_ops


class Entry(NamedTuple):
    """A backend: its operations, and why it cannot run on given queries (None = it can).

    ``mixed_attention`` is None where it is made of the other two; the arguments of each are those of the functions below.
    """

    causal_attention: Callable[..., Tensor]
    pod_attention: Callable[..., Tensor]
    window_attention: Callable[..., Tensor]
    unsupported: Callable[[Tensor], str | None]
    mixed_attention: Callable[..., Tensor] | None = None


def _lazy(module: str, needs: str, mixed: bool = False) -> Entry:
    """The backend in ``pod.kernels.<module>``, imported when first asked for; ``needs`` names what may not be installed."""

    def operation(name: str) -> Callable[..., Tensor]:
        return lambda *arguments, **options: getattr(load(), name)(*arguments, **options)

    def load():
        return importlib.import_module(f"pod.kernels.{module}")

    def unsupported(q: Tensor) -> str | None:
        try:
            return load().unsupported(q)
        except ImportError as error:
            return f"{needs} cannot be imported ({error})"

    return Entry(
        operation("causal_attention"),
        operation("pod_attention"),
        operation("window_attention"),
        unsupported,
        operation("mixed_attention") if mixed else None,
    )


BACKENDS: dict[str, Entry] = {
    "flash": Entry(
        flash.causal_attention, flash.pod_attention, flash.window_attention, flash_ops.unsupported
    ),
    "flex": _lazy("flex", "FlexAttention"),
    "triton": _lazy("triton_prefill", "Triton", mixed=True),
}
"""What can be asked for by name:

* ``flash``: PyTorch's flash op, on CPU and CUDA; there with an installed FlashAttention 3 or 4 after
  ``torch.nn.attention.activate_flash_attention_impl``.
* ``flex``: CUDA; two compiled FlexAttention calls, also in fp32. On the CPU without gradients, unfused.
* ``triton``: CUDA; one fused kernel of our own.
* ``reference``: anywhere, once ``pod`` has registered it; quadratic memory with gradients.
"""
AUTO_ORDER = ["flash", "reference"]
"""What ``auto`` tries, in this order. Not in it, and so run only when asked for: ``flex`` and ``triton``, until a GPU
has measured them."""


def register(name: str, entry: Entry) -> None:
    """Add a backend; ``auto`` uses it only where ``AUTO_ORDER`` names it."""
    BACKENDS[name] = entry


def choose(q: Tensor, backend: str = "auto") -> Entry:
    """The backend that will run; ``ValueError`` when the asked one cannot."""
    return dispatch.choose("attention", BACKENDS, AUTO_ORDER, q, backend)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Dense causal attention, ``[B, Hq, n, d]``; see ``flash.pod_attention`` for shapes and documents."""
    _check(q, k, v, doc_ids)
    return choose(q, backend).causal_attention(q, k, v, doc_ids=doc_ids, scale=scale)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention to the ``num_recent_tokens`` newest tokens, ``[B, Hq, n, d]``; see ``flash.window_attention``."""
    _check(q, k, v, doc_ids)
    if num_recent_tokens < 1:
        raise ValueError(f"need n_r >= 1, got {num_recent_tokens}")
    return choose(q, backend).window_attention(q, k, v, num_recent_tokens, doc_ids=doc_ids, scale=scale)


def pod_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lead: Tensor,
    k_lead: Tensor,
    num_sink_tokens: int,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of heads that follow a lead, ``[B, Hq, n, d]``; see ``flash.pod_attention``."""
    _check(q, k, v, doc_ids)
    _check_lead(q_lead, k_lead, (q.shape, k.shape), (num_sink_tokens, num_recent_tokens))
    run = choose(q, backend).pod_attention
    return run(q, k, v, q_lead, k_lead, num_sink_tokens, num_recent_tokens, doc_ids=doc_ids, scale=scale)


def mixed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lead: Tensor | None,
    k_lead: Tensor | None,
    followers: Sequence[int],
    num_sink_tokens: int,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """A layer of both kinds: ``pod_attention`` for the KV heads in ``followers``, ``causal_attention`` for the others.

    Args:
        q: ``[B, Hq, n, d]``, rotated; k, v: ``[B, H, n, d]`` with ``Hq = G·H``.
        q_lead: ``[B, F·G, n, d]`` and k_lead ``[B, F, n, d]``: head ``f`` is the lead's of KV head ``followers[f]``; None without
            followers.
        followers: ``F`` KV heads in rising order; may be none or all.
        num_sink_tokens, num_recent_tokens: ``n_s >= 0`` and ``n_r >= 1``, counted per document.
        doc_ids, scale: as in ``flash.pod_attention``.

    Returns:
        ``[B, Hq, n, d]``, with gradients for all five tensors.

    Raises:
        ValueError: shapes or followers that do not fit, or a backend that cannot run.
    """
    _check(q, k, v, doc_ids)
    followers = list(followers)
    num_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    if followers != sorted(set(followers)) or (
        followers and not 0 <= followers[0] <= followers[-1] < num_heads
    ):
        raise ValueError(
            f"followers = {followers}; give KV heads 0 … {num_heads - 1} in rising order, each once"
        )
    options = {"doc_ids": doc_ids, "scale": scale}
    entry = choose(q, backend)
    if q_lead is None or k_lead is None or not followers:
        if followers or q_lead is not None or k_lead is not None:
            raise ValueError("q_lead and k_lead are needed with followers, and must be None without")
        return entry.causal_attention(q, k, v, **options)
    rest = q.shape[2:]
    lead_shape = [q.shape[0], len(followers) * groups, *rest], [q.shape[0], len(followers), *rest]
    windows = num_sink_tokens, num_recent_tokens
    _check_lead(q_lead, k_lead, lead_shape, windows)
    if len(followers) == num_heads:
        return entry.pod_attention(q, k, v, q_lead, k_lead, *windows, **options)
    if entry.mixed_attention is not None:
        return entry.mixed_attention(q, k, v, q_lead, k_lead, followers, *windows, **options)
    leads = [head for head in range(num_heads) if head not in followers]
    dense = entry.causal_attention(*_take(q, k, v, leads, groups), **options)
    pod = entry.pod_attention(*_take(q, k, v, followers, groups), q_lead, k_lead, *windows, **options)
    return _interleave(((leads, dense), (followers, pod)), groups)


def _take(q: Tensor, k: Tensor, v: Tensor, heads: list[int], groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """These KV heads and their query heads: views where the heads are neighbours, else copies."""
    first, end = heads[0], heads[-1] + 1
    if end - first == len(heads):
        return q[:, first * groups : end * groups], k[:, first:end], v[:, first:end]
    index = torch.tensor(heads, device=q.device)
    query_index = (index[:, None] * groups + torch.arange(groups, device=q.device)).flatten()
    return q.index_select(1, query_index), k.index_select(1, index), v.index_select(1, index)


def _interleave(parts: Sequence[tuple[list[int], Tensor]], groups: int) -> Tensor:
    """Outputs of disjoint sets of KV heads, ``[B, h·G, n, d]`` each, to one tensor in the order of the heads."""
    pieces = {}
    for heads, tensor in parts:
        pieces.update(zip(heads, tensor.split(groups, dim=1), strict=True))
    return torch.cat([pieces[head] for head in sorted(pieces)], dim=1)


def _check_lead(
    q_lead: Tensor, k_lead: Tensor, shapes: tuple[Sequence[int], ...], windows: tuple[int, int]
) -> None:
    if (list(q_lead.shape), list(k_lead.shape)) != (list(shapes[0]), list(shapes[1])):
        raise ValueError(
            f"lead queries and keys are {list(q_lead.shape)} and {list(k_lead.shape)}, "
            f"expected {list(shapes[0])} and {list(shapes[1])}"
        )
    if windows[0] < 0 or windows[1] < 1:
        raise ValueError(f"need n_s >= 0 and n_r >= 1, got {windows[0]} and {windows[1]}")


def _check(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None) -> None:
    batch, heads, n, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[2:] != (n, head_dim) or heads % k.shape[1]:
        raise ValueError(
            f"q, k, v are {list(q.shape)}, {list(k.shape)}, {list(v.shape)}: k and v must be [B, H, n, d] with the "
            "B, n, d of q, and H must divide its heads"
        )
    if doc_ids is not None and (
        doc_ids.dim() != 2 or doc_ids.shape[0] not in (1, batch) or doc_ids.shape[1] != n
    ):
        raise ValueError(f"doc_ids is {list(doc_ids.shape)}, expected [{batch}, {n}]")
