"""How far a head with linear biases (ALiBi) can see, and a cache that holds no more (RazorAttention §3.1).

With ``S[m, n] = q_m·k_n / √d - l (m - n)`` and bounded queries and keys the bias wins at some distance, the head's
*scope*: what lies beyond gets no noticeable attention and need not be held. The decoder of this package is made for
rotary positions; what is here serves ALiBi models by their weights and their queries, keys and values.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from pod.modeling.shipped.blocked import Source, blocked_attention
from pod.modeling.shipped.stores import NATIVE, Codec, Store

Bound = Literal["paper", "strict"]


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes ``l_h`` ``[Hq]`` fp64 (Press et al., 2022): ``2^(-8h/Hq)``; between powers of two, of the next larger one too."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(slopes, dtype=torch.float64)


def alibi_scopes(
    q_weight: Tensor,
    k_weight: Tensor,
    gain: Tensor,
    slopes: Tensor,
    *,
    head_dim: int,
    bias: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    epsilon: float = 1e-3,
    bound: Bound = "paper",
) -> Tensor:
    """Tokens that each KV head of one layer has to hold: the largest scope of its query heads.

    ``paper``: ``L_h = (2 ‖W_QᵀW_K‖₂ (‖γ‖² + ‖b‖²) / √d - log ε) / l_h`` (Theorem 1 with the ``1/√d`` that it omits). It is an
    estimate: its proof takes ``|γ x̂|² <= ‖γ‖²``, which needs equal gains, ``q_m·k_m >= 0``, and projections without
    biases. ``strict`` holds always, and for the sum over all tokens beyond: ``(2B - log ε - log(1 - e^-l)) / l`` with
    ``B = ‖W_QᵀW_K‖₂ |x|² / √d``, biases as one more column of W, and ``|x| <= √D max|γ| + ‖b‖``.

    Args:
        q_weight: ``[Hq · d, D]``; k_weight: ``[H · d, D]``; q_bias, k_bias: of the projections.
        gain: γ ``[D]`` of the norm before attention; bias: its b, None for RMSNorm.
        slopes: ``[Hq]``, positive.
        epsilon: attention that may be lost, in (0, 1).

    Returns:
        ``[H]`` whole tokens, the current one included.

    Raises:
        ValueError: shapes that do not fit, slopes or epsilon out of range.
    """
    heads, kv_heads = len(slopes), k_weight.shape[0] // head_dim
    if q_weight.shape[0] != heads * head_dim or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q_weight {list(q_weight.shape)}, k_weight {list(k_weight.shape)} and {heads} slopes are no heads of {head_dim}: "
            "need [Hq·d, D], [H·d, D] and Hq slopes with H a divisor of Hq"
        )
    if not 0 < epsilon < 1 or not bool((slopes > 0).all()) or bound not in ("paper", "strict"):
        raise ValueError(
            f"epsilon = {epsilon}, bound = {bound!r}: need 0 < epsilon < 1, positive slopes, and paper or strict"
        )
    strict = bound == "strict"
    gain, slopes = gain.double(), slopes.double()
    offset = torch.zeros(()) if bias is None else bias.double().norm()
    if strict:
        square = (math.sqrt(len(gain)) * gain.abs().max() + offset) ** 2
        if q_bias is not None or k_bias is not None:
            square = square + 1
            q_weight, k_weight = _with_bias(q_weight, q_bias), _with_bias(k_weight, k_bias)
    else:
        square = gain.norm() ** 2 + offset**2
    reach = 2 * _bilinear_norms(q_weight, k_weight, heads, kv_heads) * square / math.sqrt(head_dim)
    room = -torch.log1p(-torch.exp(-slopes)) if strict else torch.zeros_like(slopes)
    scopes = (reach - math.log(epsilon) + room) / slopes
    return scopes.ceil().long().view(kv_heads, -1).amax(1)


def bloom_scopes(model: Any, epsilon: float = 1e-3, bound: Bound = "paper") -> list[Tensor]:
    """``alibi_scopes`` of every layer of a BLOOM model of transformers."""
    scopes = []
    for block in model.transformer.h:
        attention, norm = block.self_attention, block.input_layernorm
        head_dim, hidden = attention.head_dim, attention.hidden_size
        weight = attention.query_key_value.weight.detach().view(-1, 3, head_dim, hidden)
        bias = attention.query_key_value.bias.detach().view(-1, 3, head_dim)
        q_weight, k_weight = (weight[:, part].flatten(0, 1) for part in (0, 1))
        q_bias, k_bias = (bias[:, part].flatten() for part in (0, 1))
        scopes.append(
            alibi_scopes(
                q_weight,
                k_weight,
                norm.weight.detach(),
                alibi_slopes(attention.num_heads),
                head_dim=head_dim,
                bias=norm.bias.detach(),
                q_bias=q_bias,
                k_bias=k_bias,
                epsilon=epsilon,
                bound=bound,
            )
        )
    return scopes


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    column = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return torch.cat((weight, column[:, None]), dim=1)


def _bilinear_norms(q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int) -> Tensor:
    """``‖W_QᵀW_K‖₂`` per query head, ``[Hq]`` fp64: of ``R_Q R_Kᵀ`` from QR decompositions, d x d instead of D x D."""
    q = torch.linalg.qr(q_weight.double().unflatten(0, (heads, -1)).transpose(1, 2), mode="r")[1]
    k = torch.linalg.qr(k_weight.double().unflatten(0, (kv_heads, -1)).transpose(1, 2), mode="r")[1]
    return torch.linalg.matrix_norm(q @ k.repeat_interleave(heads // kv_heads, 0).transpose(1, 2), ord=2)


class AlibiWindows:
    """Keys and values of one ALiBi layer of which each KV head holds its last ``scopes[h]`` tokens: no sinks, no mean.

    While tokens are fed several at a time they attend to those held before and to each other; what falls out of a
    head's scope is dropped after each call.

    Args:
        scopes: tokens per KV head, from ``alibi_scopes``.
        slopes: ``[Hq]``.
        scale: of the logits, ``1/√d`` when None.
    """

    def __init__(self, scopes: list[int], slopes: Tensor, scale: float | None = None, codec: Codec = NATIVE):
        self.slopes, self.scale, self.seen = slopes.unflatten(0, (len(scopes), -1)), scale, 0
        self.stores: list[tuple[Store, Store]] = [
            (codec.window("keys", 0, scope), codec.window("values", 0, scope)) for scope in scopes
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally and hold: ``[B, Hq, m, d]`` for queries of this shape and keys and values ``[B, H, m, d]``."""
        groups = self.slopes.shape[1]
        new = torch.arange(self.seen, self.seen + q.shape[2], device=q.device)
        parts = []
        for head, stores in enumerate(self.stores):
            queries = q[:, head * groups : (head + 1) * groups]
            tokens = k[:, head : head + 1], v[:, head : head + 1]
            parts.append(self._attend_head(queries, tokens, stores, new, self.slopes[head]))
            for store, x in zip(stores, tokens, strict=True):
                store.append(x, self.seen)
                store.settle(self.seen + q.shape[2])
        self.seen += q.shape[2]
        return torch.cat(parts, dim=1)

    def _attend_head(
        self, q: Tensor, new: tuple[Tensor, ...], stores, positions: Tensor, slopes: Tensor
    ) -> Tensor:
        batch, groups = q.shape[:2]
        tokens, places = list(new), positions
        if self.seen:
            before = stores[0].slot_positions(torch.tensor([self.seen], device=q.device))[0]
            tokens = [torch.cat((store.read(self.seen), x), 2) for store, x in zip(stores, new, strict=True)]
            places = torch.cat((before, positions))
        # The bias is l·n up to a number that all keys of a query share; counted from the newest, to stay small.
        bias = slopes.to(q)[:, None] * (places - places.max()).to(q.dtype)

        def visible(query: Tensor) -> Tensor:
            return places <= query[..., None]

        source = Source(
            q[:, :, None],
            *(x.expand(-1, groups, -1, -1) for x in tokens),
            visible=visible,
            bias=bias.expand(batch, -1, -1),
        )
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return blocked_attention([source], positions.expand(batch, -1), scale)

    def tensors(self) -> Iterator[Tensor]:
        """Everything held."""
        for stores in self.stores:
            for store in stores:
                yield from store.tensors()

    def predicted_nbytes(self) -> int:
        """Bytes by the rule, without growth slack."""
        return sum(store.predicted_nbytes(self.seen) for stores in self.stores for store in stores)
