"""PoD attention as two FlexAttention calls, merged by the gate of eq. 4: proximal tokens with the layer's own queries and keys,
distant ones with the lead's.

On CUDA both calls and the merge are compiled together, once per kind of mask, dtype and number of heads; the gradient goes
through the log-sum-exps. On the CPU PyTorch has no backward, and its forward with a log-sum-exp is unfused (``n x n`` scores).
The block masks are made from the bounds of each block, never from an ``n x n`` mask, and kept for the layers that follow.
"""

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from pod.kernels.documents import DocumentCache

_BLOCK = 128
_MASKS = DocumentCache(size=16)


class Visible(NamedTuple):
    """Which keys of its own document a query sees, all causal.

    Attributes:
        kind: ``window`` (the ``num_recent`` newest), ``proximal`` (those and ``num_sink`` sinks) or ``distant`` (all others).
    """

    kind: str
    num_sink: int
    num_recent: int


class Documents(NamedTuple):
    """Per token ``[B, n]``, int32: the running number of its document, -1 for padding, and its position inside it."""

    number: Tensor
    position: Tensor


def unsupported(q: Tensor) -> str | None:
    """Why FlexAttention cannot run on such queries; None when it can."""
    if not torch._dynamo.is_dynamo_supported():  # pyright: ignore[reportPrivateImportUsage]
        return "torch.compile does not support this Python or platform"
    if q.device.type == "cpu":
        if q.requires_grad and torch.is_grad_enabled():
            return "it has no backward on the CPU"
        return None if q.dtype.is_floating_point else f"dtype {q.dtype} is not floating point"
    if q.device.type != "cuda":
        return f"device {q.device.type} (needs cuda or cpu)"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"dtype {q.dtype} on CUDA (needs float16, bfloat16 or float32)"
    if q.shape[-1] < 16:
        return f"head_dim {q.shape[-1]} on CUDA (at least 16)"
    major, minor = torch.cuda.get_device_capability(q.device)
    return None if major >= 8 else f"compute capability {major}.{minor} (needs 8.0)"


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Dense causal attention; shapes and documents as in ``flash.pod_attention``."""
    return window_attention(q, k, v, q.shape[2], doc_ids, scale)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_recent_tokens: int,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention to the ``num_recent_tokens`` newest tokens; shapes and documents as in ``flash.pod_attention``."""
    q, k, v = _without_gradients_on_cpu(q, k, v)
    mask = block_mask(Visible("window", 0, min(num_recent_tokens, q.shape[2])), q, doc_ids)
    return _compiled(_one_call, q.device.type)(q, k, v, mask, scale)


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
) -> Tensor:
    """Attention of heads that follow a lead; shapes and documents as in ``flash.pod_attention``."""
    n = q.shape[2]
    if num_sink_tokens + num_recent_tokens >= n:
        # The sums over no tokens give the lead zero gradients, as other backends do.
        nothing = q_lead.narrow(2, 0, 0).sum() + k_lead.narrow(2, 0, 0).sum()
        return causal_attention(q, k, v, doc_ids, scale) + nothing
    inputs = _without_gradients_on_cpu(q, k, v, q_lead, k_lead)
    proximal, distant = (
        block_mask(Visible(kind, num_sink_tokens, num_recent_tokens), q, doc_ids)
        for kind in ("proximal", "distant")
    )
    return _compiled(_two_calls, q.device.type)(*inputs, proximal, distant, scale)


def _without_gradients_on_cpu(*tensors: Tensor) -> tuple[Tensor, ...]:
    """PyTorch refuses CPU tensors that require gradients, even where none is recorded; ``unsupported`` saw the queries only."""
    if tensors[0].device.type != "cpu":
        return tensors
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("attention backend 'flex' cannot run: it has no backward on the CPU; choose flash")
    return tuple(x.detach() for x in tensors)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> tuple[Tensor, Tensor]:
    """``[B, Hq, n, d]`` and its log-sum-exp ``[B, Hq, n]``; 0 and -inf for a query that sees nothing."""
    options = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return out, aux.lse


def _one_call(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    return _attend(q, k, v, mask, scale)[0]


def _two_calls(
    q, k, v, q_lead, k_lead, proximal: BlockMask, distant: BlockMask, scale: float | None
) -> Tensor:
    near, lse_near = _attend(q, k, v, proximal, scale)
    far, lse_far = _attend(q_lead, k_lead, v, distant, scale)
    # Padding sees nothing in either call, and -inf less -inf has no value.
    lse_near = lse_near.masked_fill(lse_near == float("-inf"), 0.0)
    gate = torch.sigmoid(lse_near - lse_far)[..., None]
    return (gate * near + (1 - gate) * far).to(q.dtype)


@cache
def _compiled(function, device_type: str):
    """The function, compiled on CUDA."""
    # Layers differ in how many heads lead: each number compiles anew, and past the limit PyTorch would run the unfused code.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function) if device_type == "cuda" else function


def block_mask(visible: Visible, q: Tensor, doc_ids: Tensor | None) -> BlockMask:
    """The mask of one call over ``q``'s ``[B, n]`` tokens, made once per shape, windows, device and tensor of documents."""
    batch, n, device = q.shape[0], q.shape[2], q.device
    key = visible, batch if doc_ids is not None else 1, n, device

    def make() -> BlockMask:
        documents = None if doc_ids is None else _documents(doc_ids.expand(batch, n))
        partial, full = _block_visibility(visible, n, documents, device)
        return BlockMask.from_kv_blocks(
            *_as_lists(partial),
            *_as_lists(full),
            BLOCK_SIZE=_BLOCK,
            mask_mod=_mask_function(visible, documents),
            seq_lengths=(n, n),
        )

    return _MASKS.get(doc_ids, key, make)


def _documents(doc_ids: Tensor) -> Documents:
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    position = index - torch.where(starts, index, 0).cummax(dim=1).values
    number = starts.cumsum(1).masked_fill(doc_ids < 0, -1)
    return Documents(number.int(), position.int())


def _mask_function(visible: Visible, documents: Documents | None):
    """``mask_mod`` of FlexAttention: may query ``i`` see key ``j``?"""
    kind, num_sink, num_recent = visible

    def of_kind(distance, position):
        if kind == "window":
            return (distance >= 0) & (distance < num_recent)
        if kind == "proximal":
            return (distance >= 0) & ((distance < num_recent) | (position < num_sink))
        return (distance >= num_recent) & (position >= num_sink)

    if documents is None:
        return lambda b, h, i, j: of_kind(i - j, j)
    number, position = documents

    def in_document(b, h, i, j):
        same = (number[b, i] == number[b, j]) & (number[b, i] >= 0)
        return same & of_kind(i - j, position[b, j])

    return in_document


def _block_visibility(
    visible: Visible, n: int, documents: Documents | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Pairs of blocks ``[B or 1, 1, blocks, blocks]`` that need the mask, and pairs that are visible throughout.

    From the least and greatest distance, position and document number of each pair: a pair may be listed although nothing in
    it is visible (which costs its time), never the other way round.
    """
    kind, num_sink, num_recent = visible
    first = torch.arange(0, n, _BLOCK, device=device)
    last = (first + _BLOCK - 1).clamp(max=n - 1)
    nearest, farthest = first[:, None] - last, last[:, None] - first
    low, high = (first, last) if documents is None else _bounds(documents.position)
    low, high = low[..., None, :], high[..., None, :]
    if kind == "distant":
        some = (farthest >= num_recent) & (high >= num_sink)
        every = (nearest >= num_recent) & (low >= num_sink)
    else:
        some, every = nearest < num_recent, farthest < num_recent
        if kind == "proximal":
            some, every = some | (low < num_sink), every | (high < num_sink)
        some, every = some & (farthest >= 0), every & (nearest >= 0)
    whole = first + _BLOCK <= n
    every = every & whole & whole[:, None]
    if documents is not None:
        some, every = _within_documents(documents, some, every)
    some, every = (x.expand(*(1,) * (3 - x.dim()), *x.shape)[:, None] for x in (some, every))
    return some & ~every, every


def _within_documents(documents: Documents, some: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
    """Restrict pairs of blocks to tokens of the same document."""
    padding = documents.number < 0
    low, high = (
        _bounds(documents.number.masked_fill(padding, torch.iinfo(torch.int32).max))[0],
        _bounds(documents.number)[1],
    )
    overlap = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
    one = (low == high) & ~_bounds(padding.int())[1].bool()
    same = one[:, :, None] & one[:, None] & (low[:, :, None] == low[:, None])
    return some & overlap, every & same


def _bounds(per_token: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, n]`` to the least and the greatest of every block, ``[B, blocks]`` each."""
    missing = -per_token.shape[1] % _BLOCK
    blocks = torch.cat([per_token, per_token[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, _BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _as_lists(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """``[B, 1, rows, columns]`` to how many columns each row has and which, the listed ones first; int32."""
    columns = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32), columns.int()
