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

from pod.kernels import dispatch
from pod.modeling.shipped.attend import Call, Segments, span, takes_gradients

_BLOCK = 128


class Visible(NamedTuple):
    """Which keys of its own document a query sees, all causal: sinks and window, or with ``distant`` all others."""

    distant: bool
    num_sink: int
    num_recent: int


class Documents(NamedTuple):
    """Per token ``[B, n]``, int32: where its document starts, -1 for padding, and its position inside it."""

    number: Tensor
    position: Tensor


def unsupported(call: Call) -> str | None:
    """Why FlexAttention cannot run a call; None when it can."""
    q = call.q
    if not torch._dynamo.is_dynamo_supported():  # pyright: ignore[reportPrivateImportUsage]
        return "torch.compile does not support this Python or platform"
    reason = dispatch.not_whole_sequences(call)
    if reason is not None:
        return reason
    if q.device.type == "cpu":
        lead = () if call.lead is None else call.lead[:2]
        if takes_gradients(q, *call.tokens, *lead):
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


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """See ``attend.attend``; all heads play one role."""
    (batch, _, n, _), lead = call.q.shape, call.lead
    n_s, n_r = (min(x, n) for x in call.windows)
    inputs = [call.q, *(span(x, 0, n) for x in call.tokens)]
    if lead is not None:
        inputs += [lead.queries, span(lead.keys, 0, n)]
    if not takes_gradients(*inputs):
        # On the CPU PyTorch refuses tensors that require gradients, even where none is recorded.
        inputs = [x.detach() for x in inputs]
    kinds = (False, True) if lead is not None and n_s + n_r < n else (False,)
    masks = [block_mask(Visible(kind, n_s, n_r), call.segments, (batch, n), call.q.device) for kind in kinds]
    out, lse = _compiled(call.q.device.type)(inputs, masks, call.scale)
    if lead is not None and len(masks) == 1:  # sums over no tokens: zero gradients, as other backends give
        out = out + sum(x.narrow(2, 0, 0).sum() for x in inputs[3:])
    return out, lse


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """``[B, Hq, n, d]`` and its log-sum-exp ``[B, Hq, n]``; 0 and -inf for a query that sees nothing."""
    options = {"block_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return out, aux.lse


def _calls(inputs: list[Tensor], masks: list[BlockMask], scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, *lead = inputs
    near, lse = _flex(q, k, v, masks[0], scale)
    if len(masks) == 1:
        return near, lse.detach()
    far, lse_far = _flex(lead[0], lead[1], v, masks[1], scale)
    # Padding sees nothing in either call, and -inf less -inf has no value.
    gate = torch.sigmoid(lse.masked_fill(lse == float("-inf"), 0.0) - lse_far)[..., None]
    out = (gate * near + (1 - gate) * far).to(q.dtype)
    return out, torch.logaddexp(lse.detach(), lse_far.detach())


@cache
def _compiled(device_type: str):
    """``_calls``, compiled on CUDA."""
    # Layers differ in how many heads lead: each number compiles anew, and past the limit PyTorch would run the unfused code.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(_calls) if device_type == "cuda" else _calls


def block_mask(
    visible: Visible, segments: Segments, shape: tuple[int, int], device: torch.device
) -> BlockMask:
    """The mask of one call over ``[B, n]`` tokens, made once for all layers."""
    batch, n = shape if segments.doc_ids is not None else (1, shape[1])

    def make() -> BlockMask:
        documents = None
        if segments.doc_ids is not None:
            documents = _documents(segments.doc_ids.expand(batch, n))
        partial, full = _block_visibility(visible, n, documents, device)
        return BlockMask.from_kv_blocks(
            *_as_lists(partial),
            *_as_lists(full),
            BLOCK_SIZE=_BLOCK,
            mask_mod=_mask_function(visible, documents),
            seq_lengths=(n, n),
        )

    return segments.derived(("flex", visible, batch, n, device), make)


def _documents(doc_ids: Tensor) -> Documents:
    start = dispatch.document_bounds(doc_ids)[0]
    position = torch.arange(doc_ids.shape[1], device=doc_ids.device) - start
    return Documents(start.masked_fill(doc_ids < 0, -1), position.int())


def _mask_function(visible: Visible, documents: Documents | None):
    """``mask_mod`` of FlexAttention: may query ``i`` see key ``j``?"""
    is_distant, num_sink, num_recent = visible

    def of_kind(distance, position):
        if is_distant:
            return (distance >= num_recent) & (position >= num_sink)
        return (distance >= 0) & ((distance < num_recent) | (position < num_sink))

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
    is_distant, num_sink, num_recent = visible
    first = torch.arange(0, n, _BLOCK, device=device)
    last = (first + _BLOCK - 1).clamp(max=n - 1)
    nearest, farthest = first[:, None] - last, last[:, None] - first
    low, high = (first, last) if documents is None else _bounds(documents.position)
    low, high = low[..., None, :], high[..., None, :]
    if is_distant:
        some = (farthest >= num_recent) & (high >= num_sink)
        every = (nearest >= num_recent) & (low >= num_sink)
    else:
        some = (farthest >= 0) & ((nearest < num_recent) | (low < num_sink))
        every = (nearest >= 0) & ((farthest < num_recent) | (high < num_sink))
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
