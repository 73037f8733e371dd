"""Validation and dispatch of attention. An explicit backend that cannot run raises; ``auto`` takes the first that can."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from pod.kernels import flash, flash_ops


class Entry(NamedTuple):
    """A backend: its operations, and why it cannot run on given queries (None = it can)."""

    causal_attention: Callable[..., Tensor]
    pod_attention: Callable[..., Tensor]
    window_attention: Callable[..., Tensor]
    unsupported: Callable[[Tensor], str | None]


BACKENDS: dict[str, Entry] = {
    "flash": Entry(flash.causal_attention, flash.pod_attention, flash.window_attention, flash_ops.unsupported)
}
AUTO_ORDER = ["flash", "reference"]
"""What ``auto`` tries, fastest first."""


def register(name: str, entry: Entry) -> None:
    """Add a backend; ``auto`` uses it only where ``AUTO_ORDER`` names it."""
    BACKENDS[name] = entry


def choose(q: Tensor, backend: str = "auto") -> Entry:
    """The backend that will run; ``ValueError`` when the asked one cannot."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(
                f"attention backend {backend!r} is unknown; choose auto or one of {', '.join(BACKENDS)}"
            )
        reason = BACKENDS[backend].unsupported(q)
        if reason:
            raise ValueError(
                f"attention backend {backend!r} cannot run: {reason}; choose auto or another backend"
            )
        return BACKENDS[backend]
    for name in AUTO_ORDER:
        if name in BACKENDS and BACKENDS[name].unsupported(q) is None:
            return BACKENDS[name]
    raise ValueError(f"no attention backend runs on {q.dtype} on {q.device.type}")


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
    if q_lead.shape != q.shape or k_lead.shape != k.shape:
        raise ValueError(
            f"lead queries and keys are {list(q_lead.shape)} and {list(k_lead.shape)}, "
            f"expected {list(q.shape)} and {list(k.shape)}"
        )
    if num_sink_tokens < 0 or num_recent_tokens < 1:
        raise ValueError(f"need n_s >= 0 and n_r >= 1, got {num_sink_tokens} and {num_recent_tokens}")
    run = choose(q, backend).pod_attention
    return run(q, k, v, q_lead, k_lead, num_sink_tokens, num_recent_tokens, doc_ids=doc_ids, scale=scale)


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
