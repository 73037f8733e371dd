"""One layer of the decoder: attention and feed-forward, with their norms.

Attention projects to q, k, v. With a cache it hands them, not rotated, to the cache's layer. Without a cache
it rotates them and attends itself.

Without a cache, the queries and keys of a lead are passed from layer to layer as ``shared_qk``. It is a flat
tuple of ``2·H`` entries, ``(q_0, k_0, q_1, k_1, …)``, each a tensor or None. It is passed after
``hidden_states`` by position, never as module state or keyword. So it stays exact under activation
checkpointing and ZeRO-3. With cross-layer attention, its first two entries are the lead's keys and values of
all heads, and the others are None.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from .attend import CAUSAL, IMPLEMENTATIONS, Segments, SharedQK, Tokens, Visibility, attend, compute_dtype
from .config import NORMS, PodConfig
from .decode import DECODERS
from .experts import PodExperts
from .flash import FLASH
from .grouped import ATTEND_GROUPED, DECODE_GROUPED
from .reference import ATTEND_REFERENCE
from .rope import Rope, ropes_on
from .sharing import Lead, is_followed, roles_of
from .sinks import Sink, SinkReader

IMPLEMENTATIONS |= {"grouped": ATTEND_GROUPED, "flash": FLASH, "reference": ATTEND_REFERENCE}
DECODERS["grouped"] = DECODE_GROUPED

_PARTS, _LARGE, _IN_PARTS = 64, 1 << 18, (torch.float32, torch.float64)
"""For ``Linear``: the largest number of parts, the fewest numbers of a weight to divide, and its dtypes."""


class Linear(nn.Linear):
    """``nn.Linear`` that is faster on CPUs for one row and a large weight, as when a token is decoded.

    In this case, it multiplies parts of the weight in one batch. The batch is twice as fast on one core, and
    is divided among all cores. MKL would compute the product with a single row on one core.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight, parts = self.weight, math.gcd(self.out_features, _PARTS)
        is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype in _IN_PARTS
        if not is_plain or x.numel() != x.shape[-1] or weight.numel() < _LARGE or torch.is_grad_enabled():
            return super().forward(x)
        # columns must be transposed rows: if they were columns in memory, the product would be a slow one
        columns = x.reshape(1, 1, -1).expand(parts, -1, -1).transpose(1, 2)
        out = torch.bmm(weight.unflatten(0, (parts, -1)), columns).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, computed in fp32 (fp64 for fp64)."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with the weights ``weight + offset``.

    Attributes:
        norm: the function that computes it. Training replaces it by a compiled one.
    """

    norm: Callable[[Tensor, Tensor, float], Tensor] = staticmethod(rms_norm)

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    @classmethod
    def of(cls, config: PodConfig, size: int) -> "RMSNorm":
        """A norm over ``size`` channels with a model's epsilon and offset."""
        return cls(size, config.rms_norm_eps, config.norm_offset)

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            return self.norm(x, self.weight, self.eps)
        wide = compute_dtype(x.dtype)  # 16 bits would round the sum of a small weight and 1
        return self.norm(x.to(wide), self.weight.to(wide) + self.offset, self.eps).to(x.dtype)


# -- attention ---------------------------------------------------------------------------------------------

SharedQKTensors = tuple[Tensor | None, ...]


class SequenceParallel(Protocol):
    """Ulysses as the model uses it: exchange a shard of the sequence for a shard of the heads, and back.

    Attributes:
        lead: the plan ``[L][h]`` of the ``h`` KV heads that this rank computes.
    """

    lead: Lead

    def to_heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads for all tokens, from those of all heads here."""
        ...

    def to_sequence(self, layer: int, out: Tensor) -> Tensor:
        """Outputs of all heads for this rank's tokens, from those of this rank's heads for all tokens."""
        ...

    def own_sink(self, layer: int, q: Tensor, sink: Sink) -> tuple[Tensor, Sink]:
        """``q`` with the same values, and the sink of this rank's heads, so that all ranks take gradients."""
        ...


@dataclass
class ForwardContext:
    """What all layers of one forward pass share.

    Attributes:
        ropes: each layer's rotation at the positions of this pass. Layers with the same RoPE share one.
        lead: the plan ``[L][H]`` of the KV heads that are computed here.
        backend: name of the implementation of attention, see ``attend``.
        segments: documents of the rows. None = every row is one.
        step: the ``Step`` of the cache. None without a cache.
        sequence_parallel: exchanges heads between ranks. None = the sequence is not divided.
        everything: whether the inputs of all layers are part of the result.
        copies: copies of this context for other devices, by device, and this one itself. Empty while all
            layers are on one device.
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
        """The copy of this context for a layer on ``device``. It is this context if there is one device only.

        Tensors that leads left in ``step`` for their followers move there too.

        Args:
            device: the device of the layer.
            layer_idx: index of the layer.
            followed: KV heads whose lead is below this layer, with followers in it or above it.
        """
        if device == self.ropes[layer_idx].device and not self.copies:
            return self
        self.copies.setdefault(self.ropes[layer_idx].device, self)
        if device not in self.copies:
            segments = None
            if self.segments is not None:
                segments = Segments(self.segments.all, self.segments.columns)
            self.copies[device] = replace(self, ropes=ropes_on(self.ropes, device), segments=segments)
        found = self.copies[device]
        if self.step is not None:
            found.step = self.step.on(device, followed)
            found.step.ropes = found.ropes
        return found


class PodAttention(nn.Module):
    """Grouped-query attention of one layer.

    According to ``config.layout`` it is PoD's (paper §2.2), cross-layer, or windowed.

    Attributes:
        source_layer: the layer whose keys and values are attended to. It is this layer, or a lower one for
            followers of a ``cla`` layout, which have no projections for keys and values.
        sinks, sink_values: ``[Hq]`` and ``[H, d]``, the parameters of a layer with constant sinks
            (``PodConfig.sinks``). Else None.
        sink_keys: ``[H, d]``, the keys of these sinks (``PodConfig.sink_keys``). Else None.
        are_windows: for each KV head of the plan, whether it keeps its window, so that the sink's key is
            subtracted from its keys. The teacher of distillation, in which all heads lead, sets it to False.
        followed_here: KV heads whose lead is below this layer, with followers in it or above it. With a
            cache, these leads' tensors must be moved to this layer's device.
        query_factor: factor on queries, so that logits have ``attention_multiplier`` as their scale.
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
        self.sink_keys = None
        self.are_windows = [one is None for one in lead[layer_idx]]
        if config.has_sink_keys(layer_idx):
            self.sink_keys = nn.Parameter(torch.zeros(config.num_key_value_heads, config.head_dim))
        self.norm_across_heads = config.qk_norm_across_heads
        # attention divides by sqrt(head_dim) wherever it runs
        multiplier = config.attention_multiplier
        self.query_factor = 1.0 if multiplier is None else multiplier * config.head_dim**0.5

    def constants(self) -> tuple[Sink | None, Tensor | None]:
        """The constant sink of this layer, and its keys ``[H, d]``, for this pass; None = there are none.

        The keys are zero in heads that do not keep their window.
        """
        if self.sinks is None or self.sink_values is None:
            return None, None
        if self.sink_keys is None:
            return Sink(*self.read_sinks(self.sinks, self.sink_values)), None
        logits, values, keys = self.read_sinks(self.sinks, self.sink_values, self.sink_keys)
        if not all(self.are_windows):
            own = zip(keys, self.are_windows, strict=True)
            keys = torch.stack([key if is_window else torch.zeros_like(key) for key, is_window in own])
        return Sink(logits, values), keys

    def forward(
        self, hidden_states: Tensor, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> tuple[Tensor, SharedQKTensors]:
        """The output ``[B, n, hidden]`` for hidden states ``[B, n, hidden]``, and the next ``shared_qk``."""
        sink, sink_keys = self.constants()
        q, k, v = self._project(hidden_states, sink_keys)
        parallel = context.sequence_parallel
        if context.step is not None:
            context.step.sink = sink
            out = context.step.layers[self.layer_idx].attend(q, k, v, context.step)
        else:
            if parallel is not None:
                q, k, v = parallel.to_heads(self.layer_idx, q, k, v)
                if sink is not None:
                    q, sink = parallel.own_sink(self.layer_idx, q, sink)
            out, shared_qk = self._attend_without_cache(q, k, v, sink, context, shared_qk)
            if parallel is not None:
                out = parallel.to_sequence(self.layer_idx, out)
        out = self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1))
        return out, shared_qk

    def _project(
        self, hidden_states: Tensor, sink_keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[B, Hq, n, d]``, and keys and values ``[B, H, n, d]`` each.

        H = 0 in a layer that reads the keys and values of another layer.

        Args:
            hidden_states: ``[B, n, hidden]``.
            sink_keys: ``[H, d]``, subtracted from the keys; None = nothing is.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self._normed(self.q_norm, self.q_proj(hidden_states), shape)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        if self.k_proj is None or self.v_proj is None:
            nothing = q.new_empty(q.shape[0], 0, *q.shape[1::2])
            return q.transpose(1, 2), nothing, nothing
        k = self._normed(self.k_norm, self.k_proj(hidden_states), shape)
        if sink_keys is not None:
            k = k - sink_keys.to(k.dtype)
        v = self.v_proj(hidden_states).view(shape)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _normed(self, norm: RMSNorm | None, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Apply a norm of heads, if there is one, to ``x`` ``[B, n, h·d]``: ``[B, n, h, d]`` in its dtype."""
        if norm is None:
            return x.view(shape)
        normed = norm(x if self.norm_across_heads else x.view(shape))
        # a norm with fp32 weights, as under autocast, gives fp32
        return normed.view(shape).to(x.dtype)

    def _attend_without_cache(
        self, q, k, v, sink: Sink | None, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> tuple[Tensor, SharedQKTensors]:
        rope = context.ropes[self.layer_idx]
        q = rope(q)
        k = rope(k)
        if self.layout == "cla":
            return self._attend_across(q, k, v, context, shared_qk)
        lead, roles = None, roles_of(context.lead, self.layer_idx)
        if roles.followers:
            pairs = [shared_qk[2 * head : 2 * head + 2] for head in roles.followers]
            queries, keys = zip(*pairs, strict=True)
            lead = SharedQK(torch.cat(queries, dim=1), torch.cat(keys, dim=1))  # type: ignore[arg-type]
        see = Visibility(*self.windows)
        options = {"backend": context.backend, "roles": roles, "sink": sink}
        out, _ = attend(q, Tokens(k, v), lead, see, context.segments, **options)
        return out, next_shared_qk(q, k, context.lead, self.layer_idx, shared_qk)

    def _attend_across(
        self, q, k, v, context: ForwardContext, shared_qk: SharedQKTensors
    ) -> tuple[Tensor, SharedQKTensors]:
        """Cross-layer attention: followers use their lead's keys and values (Brandon et al., 2024, §2)."""
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

    If a KV head leads in this layer and has followers, its queries and keys are cloned into ``shared_qk``.
    They stay there until the last follower. They are clones, because a view of one head would keep the whole
    layer's queries and keys in memory.

    Args:
        q: ``[B, Hq, n, d]``, rotated.
        k: ``[B, H, n, d]``, rotated.
        lead: the plan, ``[L][H]``.
        layer_idx: this layer.
        shared_qk: that of this layer.
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


# -- feed-forward ------------------------------------------------------------------------------------------

_MLP_TILE = 4096  # tokens


class Tiled(nn.Module):
    """A module that computes each token by itself, and so can compute long inputs in tiles.

    Attributes:
        train_tiles: into how many parts the tokens are divided in training. Parts are computed one after the
            other, and recomputed in the backward pass. It is a count and not a size, because under ZeRO-3
            every part gathers the weights, so that ranks with slices of unequal length must have equally many
            parts. None = tokens are not divided if gradients are taken, and otherwise come in tiles of a
            fixed size.
    """

    train_tiles: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[B, n, hidden]`` to the same shape, in tiles if the input is long.

        A tile needs memory for ``[tile, intermediate_size]`` three times.
        """
        with_gradients = torch.is_grad_enabled()
        if self.train_tiles is not None:
            parts = x.tensor_split(self.train_tiles, dim=1)
        else:
            parts = [x] if with_gradients else x.split(_MLP_TILE, dim=1)
        if len(parts) == 1:
            return self.whole(x)
        run = partial(checkpoint, self.whole, use_reentrant=False) if with_gradients else self.whole
        return torch.cat([run(part) for part in parts], dim=1)

    def whole(self, x: Tensor) -> Tensor:
        """Compute ``[B, n, hidden]`` to the same shape without tiles."""
        raise NotImplementedError


class PodMLP(Tiled):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: PodConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def whole(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate(self.gate_proj(x), self.up_proj(x)))

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of ``gate``, times ``up``."""
        return self.act_fn(gate) * up


class PodMoE(Tiled):
    """A mixture of experts: a router sends each token to ``num_experts_per_tok`` of the experts."""

    def __init__(self, config: PodConfig):
        super().__init__()
        self.count, self.normalizes = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = PodExperts(config)

    def whole(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = self.gate(tokens).to(compute_dtype(x.dtype)).softmax(-1).topk(self.count)
        if self.normalizes:
            shares = shares / shares.sum(-1, keepdim=True)
        return self.experts(tokens, chosen, shares, is_step=x.shape[1] == 1).view(x.shape)


# -- one layer ---------------------------------------------------------------------------------------------


class PodDecoderLayer(nn.Module):
    """Attention and feed-forward with residuals. See the top of this file for ``shared_qk``."""

    def __init__(self, config: PodConfig, layer_idx: int):
        super().__init__()
        self.self_attn = PodAttention(config, layer_idx)
        self.mlp = PodMoE(config) if config.has_experts(layer_idx) else PodMLP(config)
        self.residual_multiplier = config.residual_multiplier
        self.norms = NORMS[config.norm_placement]
        for name in filter(None, self.norms):
            self.register_module(f"{name}_layernorm", RMSNorm.of(config, config.hidden_size))

    def forward(self, hidden_states: Tensor, context: ForwardContext, *shared_qk: Tensor | None) -> tuple:
        """Compute the next layer's ``(hidden_states, *shared_qk)`` from this layer's ``[B, n, hidden]``."""
        attention = self.self_attn
        context = context.on(hidden_states.device, attention.layer_idx, attention.followed_here)
        attended, shared_qk = self.self_attn(self.attention_input(hidden_states), context, shared_qk)
        multiplier = self.residual_multiplier
        hidden_states = torch.add(hidden_states, self._normed(1, attended), alpha=multiplier)
        fed = self._normed(3, self.mlp(self._normed(2, hidden_states)))
        return torch.add(hidden_states, fed, alpha=multiplier), *shared_qk

    def attention_input(self, hidden_states: Tensor) -> Tensor:
        """The input of attention's projections: the hidden states, normed if a norm comes before."""
        return self._normed(0, hidden_states)

    def _normed(self, place: int, x: Tensor) -> Tensor:
        """Apply the norm at index ``place`` of ``NORMS``, if there is one."""
        name = self.norms[place]
        return x if name is None else getattr(self, f"{name}_layernorm")(x)
