"""Attention of one layer: project, then hand un-rotated q, k, v to the cache or to a registered backend.

The queries and keys of a lead travel to the layers that use them as an explicit *carry*: a flat tuple of
``2·H`` entries, ``(q_0, k_0, q_1, k_1, …)``, each a tensor or None. It is passed after ``hidden_states`` by
position, never as module state or keyword, which keeps it exact under activation checkpointing and ZeRO-3.
Under cross-layer attention it starts with the lead's keys and values of all heads, and holds nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .config import PodConfig
from .norm import RMSNorm
from .reference import causal_attention, pod_attention, window_attention
from .rope import Rope
from .sharing import is_followed

Carry = tuple[Tensor | None, ...]


class Backend(NamedTuple):
    """The operations that an attention backend offers; signatures as in ``reference``.

    ``mixed_attention(q, k, v, q_lead, k_lead, followers, n_s, n_r, doc_ids=…)`` takes leading and following KV heads in
    one call; where it is None the layer makes two.
    """

    causal_attention: Callable[..., Tensor]
    pod_attention: Callable[..., Tensor]
    window_attention: Callable[..., Tensor]
    mixed_attention: Callable[..., Tensor] | None = None


BACKENDS: dict[str, Backend] = {"reference": Backend(causal_attention, pod_attention, window_attention)}
"""Registered backends by name. ``auto`` means the entry of that name when a package filled it, else ``reference``."""


def register_backend(name: str, backend: Backend) -> None:
    """Make an attention backend available to ``PodConfig.attention_backend``."""
    BACKENDS[name] = backend


def get_backend(name: str) -> Backend:
    """The backend of this name; an explicit name never falls back to another one."""
    if name == "auto":
        return BACKENDS.get("auto", BACKENDS["reference"])
    if name not in BACKENDS:
        known = ", ".join(sorted({*BACKENDS, "auto"}))
        raise ValueError(f"attention_backend = {name!r} is not available here; choose one of {known}")
    return BACKENDS[name]


class SequenceParallel(Protocol):
    """Ulysses as the model sees it: swap a shard of the sequence for a shard of the heads, and back."""

    lead: tuple[tuple[int, ...], ...]

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def to_sequence(self, out: Tensor) -> Tensor: ...


@dataclass
class ForwardContext:
    """What all layers of one forward pass share.

    Attributes:
        rope: rotation at the positions of this pass.
        lead: plan of the KV heads computed here, ``[L][H]``.
        doc_ids: ``[B, n]`` or None, see ``reference.pod_attention``.
        backend: operations for attention without a cache.
        step: the cache's view of this pass, None without a cache.
        sequence_parallel: None, or how heads are exchanged between ranks.
        on_attention: called with every layer's index and attention output ``[B, n, hidden]`` (after ``o_proj``), again
            when a checkpointed layer is recomputed; for training objectives on it.
    """

    rope: Rope
    lead: tuple[tuple[int, ...], ...]
    backend: Backend
    doc_ids: Any = None
    step: Any = None
    sequence_parallel: SequenceParallel | None = None
    on_attention: Callable[[int, Tensor], None] | None = None


class PodAttention(nn.Module):
    """Grouped-query attention of one layer: PoD's (paper §2.2), cross-layer, or windowed, by ``config.layout``.

    Attributes:
        source_layer: the layer whose keys and values are attended to: a lower one for the followers of a ``cla``
            layout, which have no projections for their own; else this one.
    """

    def __init__(self, config: PodConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.layout = config.layout
        self.source_layer = config.sharing_plan.lead[layer_idx][0] if config.layout == "cla" else layer_idx
        self.head_dim = config.head_dim
        self.num_sink_tokens = config.num_sink_tokens
        self.num_recent_tokens = config.num_recent_tokens
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_qkv_bias)
        self.k_proj = self.v_proj = None
        if self.source_layer == layer_idx:
            self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_qkv_bias)
            self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=config.attention_qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            if self.k_proj is not None:
                self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, context: ForwardContext, carry: Carry) -> tuple[Tensor, Carry]:
        """``[B, n, hidden]`` and the carry to the same."""
        q, k, v = self._project(hidden_states)
        parallel = context.sequence_parallel
        if context.step is not None:
            out = context.step.layers[self.layer_idx].attend(q, k, v, context.step)
        else:
            if parallel is not None:
                q, k, v = parallel.to_heads(q, k, v)
            out, carry = self._attend_without_cache(q, k, v, context, carry)
            if parallel is not None:
                out = parallel.to_sequence(out)
        out = self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        if context.on_attention is not None:
            context.on_attention(self.layer_idx, out)
        return out, carry

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, Hq, n, d]`` and twice ``[B, H, n, d]``, with H = 0 in a layer that reads another one's."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_proj is None or self.v_proj is None:
            nothing = q.new_empty(q.shape[0], 0, *q.shape[1::2])
            return q.transpose(1, 2), nothing, nothing
        k = self.k_proj(hidden_states).view(shape)
        v = self.v_proj(hidden_states).view(shape)
        if self.k_norm is not None:
            k = self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _attend_without_cache(self, q, k, v, context: ForwardContext, carry: Carry) -> tuple[Tensor, Carry]:
        q, k = context.rope(q), context.rope(k)
        if self.layout == "window":
            window, doc_ids = self.num_recent_tokens, context.doc_ids
            return context.backend.window_attention(q, k, v, window, doc_ids=doc_ids), carry
        if self.layout == "cla":
            return self._attend_across_layers(q, k, v, context, carry)
        heads = split_heads(context.lead[self.layer_idx], self.layer_idx)

        def from_carry() -> tuple[Tensor, Tensor]:
            return _carried(carry, heads[1], 0), _carried(carry, heads[1], 1)

        windows = self.num_sink_tokens, self.num_recent_tokens
        out = attend_by_role(q, k, v, heads, from_carry, windows, context.backend, context.doc_ids)
        return out, next_carry(q, k, context.lead, self.layer_idx, carry)

    def _attend_across_layers(self, q, k, v, context: ForwardContext, carry: Carry) -> tuple[Tensor, Carry]:
        """Own queries on the keys and values of the block's lead (Brandon et al., 2024, §2)."""
        if self.source_layer != self.layer_idx:
            k, v = carry[:2]
            assert k is not None and v is not None, "the lead left no keys and values in the carry"
        out = context.backend.causal_attention(q, k, v, doc_ids=context.doc_ids)
        nothing = (None,) * len(carry)
        followed = is_followed(context.lead, self.layer_idx, 0)
        return out, (k, v, *nothing[2:]) if followed else nothing


def attend_by_role(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: tuple[list[int], list[int]],
    lead_queries_and_keys: Callable[[], tuple[Tensor, Tensor]],
    windows: tuple[int, int],
    backend: Backend,
    doc_ids: Tensor | None,
) -> Tensor:
    """Attention of whole rows: dense for the KV heads that lead, PoD for those that follow.

    Args:
        q: ``[B, Hq, n, d]``; k, v: ``[B, H, n, d]``, rotated.
        heads: KV heads that lead and that follow, from ``split_heads``.
        lead_queries_and_keys: called when there are followers; ``[B, h·G, n, d]`` and ``[B, h, n, d]`` for them.
        windows: ``(n_s, n_r)`` in tokens.

    Returns:
        ``[B, Hq, n, d]``.
    """
    leads, followers = heads
    groups = q.shape[1] // k.shape[1]
    if leads and followers and backend.mixed_attention is not None:
        return backend.mixed_attention(
            q, k, v, *lead_queries_and_keys(), followers, *windows, doc_ids=doc_ids
        )
    parts = []
    if leads:
        own = take_heads(q, leads, groups), take_heads(k, leads), take_heads(v, leads)
        parts.append((leads, backend.causal_attention(*own, doc_ids=doc_ids)))
    if followers:
        own = take_heads(q, followers, groups), take_heads(k, followers), take_heads(v, followers)
        out = backend.pod_attention(*own, *lead_queries_and_keys(), *windows, doc_ids=doc_ids)
        parts.append((followers, out))
    return merge_heads(parts, groups)


def _carried(carry: Carry, heads: Sequence[int], part: int) -> Tensor:
    """Lead queries (part 0) or keys (part 1) of these KV heads, ``[B, h, n, d]``."""
    tensors = []
    for head in heads:
        tensor = carry[2 * head + part]
        assert tensor is not None, f"KV head {head} follows a lead that left nothing in the carry"
        tensors.append(tensor)
    return torch.cat(tensors, dim=1)


def split_heads(lead_row: Sequence[int], layer_idx: int) -> tuple[list[int], list[int]]:
    """KV heads of a layer that lead, and those that follow a lower layer."""
    leads = [head for head, lead in enumerate(lead_row) if lead == layer_idx]
    return leads, [head for head, lead in enumerate(lead_row) if lead != layer_idx]


def take_heads(x: Tensor, heads: Sequence[int], groups: int = 1) -> Tensor:
    """Heads ``heads`` (each ``groups`` wide) of ``[B, h, …]``: a view when they are neighbours, else a copy."""
    if heads[-1] - heads[0] == len(heads) - 1:
        return x[:, heads[0] * groups : (heads[-1] + 1) * groups]
    index = [head * groups + g for head in heads for g in range(groups)]
    return x[:, index]


def merge_heads(parts: Sequence[tuple[Sequence[int], Tensor]], groups: int) -> Tensor:
    """Inverse of ``take_heads`` over disjoint head sets: ``[B, Hq, n, d]`` in the order of the heads."""
    if len(parts) == 1:
        return parts[0][1]
    pieces = {}
    for heads, tensor in parts:
        pieces.update(zip(heads, tensor.split(groups, dim=1), strict=True))
    return torch.cat([pieces[head] for head in sorted(pieces)], dim=1)


def next_carry(q: Tensor, k: Tensor, lead: Sequence[Sequence[int]], layer_idx: int, carry: Carry) -> Carry:
    """The carry for the next layer: cloned where a used lead starts, kept while users follow, dropped after.

    Clones, because a view of one head would keep the whole layer's queries and keys alive.
    """
    groups = q.shape[1] // k.shape[1]
    following: list[Tensor | None] = []
    for head, own in enumerate(lead[layer_idx]):
        if not is_followed(lead, layer_idx, head):
            following += [None, None]
        elif own == layer_idx:
            following += [q[:, head * groups : (head + 1) * groups].clone(), k[:, head : head + 1].clone()]
        else:
            following += [carry[2 * head], carry[2 * head + 1]]
    return tuple(following)
