"""Attention of one layer: project, then hand un-rotated q, k, v to the cache, or attend.

The queries and keys of a lead travel to the layers that use them as ``shared_qk``. It is a flat tuple
of ``2·H`` entries, ``(q_0, k_0, q_1, k_1, …)``, each a tensor or None. It is passed after ``hidden_states``
by position, never as module state or keyword: so it stays exact under activation checkpointing and ZeRO-3.
Under cross-layer attention it starts with the lead's keys and values of all heads, and holds nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attend import CAUSAL, Linear, Segments, SharedQK, Tokens, Visibility, attend, compute_dtype, rms_norm
from .config import PodConfig
from .rope import Rope, ropes_on
from .sharing import Lead, is_followed, roles_of
from .sinks import Sink, SinkReader

SharedQKTensors = tuple[Tensor | None, ...]


class RMSNorm(nn.Module):
    """Root-mean-square norm.

    Attributes:
        norm: the function that computes it. Training puts a compiled one in its place.
    """

    norm: Callable[[Tensor, Tensor, float], Tensor] = staticmethod(rms_norm)

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    @classmethod
    def of(cls, config: PodConfig, size: int) -> "RMSNorm":
        return cls(size, config.rms_norm_eps, config.norm_offset)

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            return self.norm(x, self.weight, self.eps)
        wide = compute_dtype(x.dtype)  # a sum of small weights and 1 needs it
        return self.norm(x.to(wide), self.weight.to(wide) + self.offset, self.eps).to(x.dtype)


class SequenceParallel(Protocol):
    """Ulysses as the model sees it: swap a shard of the sequence for a shard of the heads, and back."""

    lead: Lead

    def to_heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def to_sequence(self, layer: int, out: Tensor) -> Tensor: ...

    def own_sink(self, layer: int, q: Tensor, sink: Sink) -> tuple[Tensor, Sink]: ...


@dataclass
class ForwardContext:
    """What all layers of one forward pass share.

    Attributes:
        ropes: each layer's rotation at the positions of this pass. Layers of a kind share one.
        lead: plan of the KV heads computed here, ``[L][H]``.
        backend: implementation of attention, see ``attend``.
        segments: documents of the rows. None = every row is one.
        step: the cache's view of this pass. None without a cache.
        sequence_parallel: how heads are exchanged between ranks, or None.
        everything: whether the input of every layer is part of the result.
        copies: this context for layers on other devices, by device. Empty while all lie on one.
    """

    ropes: Sequence[Rope]
    lead: Lead
    backend: str = "auto"
    segments: Segments | None = None
    step: Any = None
    sequence_parallel: SequenceParallel | None = None
    everything: bool = False
    copies: dict[torch.device, "ForwardContext"] = field(init=False, default_factory=dict, repr=False)

    def on(self, device: torch.device, layer_idx: int, followed: Sequence[int]) -> "ForwardContext":
        """This context for a layer on a device.

        What leads left in ``step`` for their followers moves there too.

        Args:
            followed: KV heads whose leads are below this layer and have followers from it on.
        """
        if device == self.ropes[layer_idx].device and not self.copies:
            return self
        self.copies.setdefault(self.ropes[layer_idx].device, self)
        if device not in self.copies:
            segments = self.segments and Segments(self.segments.all, self.segments.columns)
            self.copies[device] = replace(self, ropes=ropes_on(self.ropes, device), segments=segments)
        found = self.copies[device]
        if self.step is not None:
            found.step = self.step.on(device, followed)
            found.step.ropes = found.ropes
        return found


class PodAttention(nn.Module):
    """Grouped-query attention of one layer.

    By ``config.layout`` it is PoD's (paper §2.2), cross-layer, or windowed.

    Attributes:
        source_layer: the layer whose keys and values are attended to. It is a lower one for the followers of
            a ``cla`` layout, which have no projections of their own; else it is this layer.
        sinks, sink_values: ``[Hq]`` and ``[H, d]``, the parameters of a layer with constant sinks
            (``PodConfig.sinks``). Else None.
        followed_here: KV heads whose leads are below this layer and have followers from this layer on, in a
            cache of this plan.
    """

    def __init__(self, config: PodConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.layout = config.layout
        lead = config.sharing_plan.lead
        self.source_layer = lead[layer_idx][0] if config.layout == "cla" else layer_idx
        is_border = config.layout == "pod" and layer_idx > 0
        heads = range(config.num_key_value_heads) if is_border else ()
        self.followed_here = tuple(head for head in heads if is_followed(lead, layer_idx - 1, head))
        self.head_dim = config.head_dim
        self.windows = config.windows_of(layer_idx)
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, bias=config.attention_qkv_bias)
        self.k_proj = self.v_proj = None
        if self.source_layer == layer_idx:
            self.k_proj = Linear(config.hidden_size, key_value_size, bias=config.attention_qkv_bias)
            self.v_proj = Linear(config.hidden_size, key_value_size, bias=config.attention_qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.attention_out_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            across = config.qk_norm_across_heads
            self.q_norm = RMSNorm.of(config, query_size if across else config.head_dim)
            if self.k_proj is not None:
                self.k_norm = RMSNorm.of(config, key_value_size if across else config.head_dim)
        self.sinks = self.sink_values = None
        if config.has_constant_sinks(layer_idx):
            self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
            self.sink_values = nn.Parameter(torch.zeros(config.num_key_value_heads, config.head_dim))
            self.read_sinks = SinkReader()
        self.norm_across_heads = config.qk_norm_across_heads
        # attention divides by sqrt(head_dim) wherever it runs
        multiplier = config.attention_multiplier
        self.query_factor = 1.0 if multiplier is None else multiplier * config.head_dim**0.5

    @property
    def sink(self) -> Sink | None:
        """What stands for the first tokens in heads that keep their windows. None = nothing does."""
        if self.sinks is None or self.sink_values is None:
            return None
        return Sink(*self.read_sinks(self.sinks, self.sink_values))

    def forward(
        self, hidden_states: Tensor, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> tuple[Tensor, SharedQKTensors]:
        """Map hidden states ``[B, n, hidden]`` and ``shared_qk`` to an output and the next ``shared_qk``."""
        q, k, v = self._project(hidden_states)
        parallel = context.sequence_parallel
        if context.step is not None:
            context.step.sink = self.sink
            out = context.step.layers[self.layer_idx].attend(q, k, v, context.step)
        else:
            sink = self.sink
            if parallel is not None:
                q, k, v = parallel.to_heads(self.layer_idx, q, k, v)
                if sink is not None:
                    q, sink = parallel.own_sink(self.layer_idx, q, sink)
            out, shared_qk = self._attend_without_cache(q, k, v, sink, context, shared_qk)
            if parallel is not None:
                out = parallel.to_sequence(self.layer_idx, out)
        out = self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return out, shared_qk

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, Hq, n, d]``, and keys and values ``[B, H, n, d]`` each.

        H = 0 in a layer that reads the keys and values of another layer.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self._normed(self.q_norm, self.q_proj(hidden_states), shape)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        if self.k_proj is None or self.v_proj is None:
            nothing = q.new_empty(q.shape[0], 0, *q.shape[1::2])
            return q.transpose(1, 2), nothing, nothing
        k = self._normed(self.k_norm, self.k_proj(hidden_states), shape)
        v = self.v_proj(hidden_states).view(shape)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _normed(self, norm: RMSNorm | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Norm ``x`` ``[B, n, h·d]`` to ``[B, n, h, d]``, in its own dtype, which the values have too."""
        if norm is None:
            return x.view(shape)
        normed = norm(x if self.norm_across_heads else x.view(shape))
        # a norm with fp32 weights, as under autocast, gives fp32
        return normed.view(shape).to(x.dtype)

    def _attend_without_cache(
        self, q, k, v, sink: Sink | None, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> tuple[Tensor, SharedQKTensors]:
        rope = context.ropes[self.layer_idx]
        q, k = rope(q), rope(k)
        if self.layout == "cla":
            return self._attend_across(q, k, v, context, shared_qk)
        lead, roles = None, roles_of(context.lead, self.layer_idx)
        if roles.followers:
            carried = [shared_qk[2 * head : 2 * head + 2] for head in roles.followers]
            lead = SharedQK(*(torch.cat(x, dim=1) for x in zip(*carried, strict=True)))  # type: ignore[arg-type]
        see = Visibility(*self.windows)
        options = {"backend": context.backend, "roles": roles, "sink": sink}
        out, _ = attend(q, Tokens(k, v), lead, see, context.segments, **options)
        return out, next_shared_qk(q, k, context.lead, self.layer_idx, shared_qk)

    def _attend_across(
        self, q, k, v, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> tuple[Tensor, SharedQKTensors]:
        """Followers take the keys and values of their lead (Brandon et al., 2024, §2)."""
        if roles_of(context.lead, self.layer_idx).followers:
            k, v = shared_qk[:2]
            assert k is not None and v is not None, "the lead left no keys and values in ``shared_qk``"
        out, _ = attend(q, Tokens(k, v), None, CAUSAL, context.segments, backend=context.backend)
        nothing = (None,) * len(shared_qk)
        followed = is_followed(context.lead, self.layer_idx, 0)
        return out, (k, v, *nothing[2:]) if followed else nothing


def next_shared_qk(
    q: Tensor, k: Tensor, lead: Lead, layer_idx: int, shared_qk: SharedQKTensors
) -> SharedQKTensors:
    """``shared_qk`` for the next layer.

    Where a lead with followers starts, its queries and keys are cloned into ``shared_qk``. They are kept
    while followers are to come, and dropped after. They are clones, because a view of one head would keep the
    whole layer's queries and keys alive.
    """
    groups = q.shape[1] // k.shape[1]
    following: list[Tensor | None] = []
    for head, own in enumerate(lead[layer_idx]):
        if not is_followed(lead, layer_idx, head):
            following += [None, None]
        elif own == layer_idx:
            following += [q[:, head * groups : (head + 1) * groups].clone(), k[:, head : head + 1].clone()]
        else:
            following += [shared_qk[2 * head], shared_qk[2 * head + 1]]
    return tuple(following)
