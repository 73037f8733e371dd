"""MiniCache (Liu et al., 2024): neighbouring deep layers share directions of keys and values, not norms.

From the middle of the model on, layers are paired. When a prompt ends, and whenever ``block`` tokens have
been decoded, the native tokens of a pair are merged. Each token then has one direction for both layers
(spherical interpolation, eq. 3 of the paper) and one norm for each layer. Tokens whose two directions differ
most are *kept apart*: both native vectors stay. The shallower layer's vector takes the slot of the shared
direction, with a norm of one. The deeper layer's vector is stored in a buffer of its own. Nothing is stored
twice.

A codec packs merged tokens, and all tokens of layers without a partner. With a codec, the shallower layer's
vectors of tokens kept apart are also stored as direction and norm. Otherwise vectors of other lengths would
widen the range of the numbers in a group, and directions would become less exact.
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.ranking import best_slots
from pod.modeling.model.attend import Tokens, attend, compute_dtype, takes_gradients
from pod.modeling.model.config import PodConfig
from pod.modeling.model.grouped import attend_slots
from pod.modeling.model.kv_buffer import KVBuffer
from pod.modeling.model.kv_quantizer import NATIVE, KVQuantizer
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.step import Step

_PARALLEL = 1e-4  # below this sine, two directions count as parallel or opposite: interpolate on a line
_PARTS = ("keys", "values")


class Merged:
    """Merged keys or values of one layer of a pair.

    Attributes:
        directions: ``[B, H, T, d]`` of the ``T`` merged tokens. Both layers read those of the shallower
            layer; the deeper layer's buffer stays empty.
        norms: ``[B, H, T, 1]``, this layer's norms.
        apart: in the deeper layer, its vectors ``[B, H, C, d]`` of the ``C`` tokens kept apart.
        positions: the indices of these tokens among the ``T``, ``[B, H, C, 1]``.
    """

    def __init__(self, quantizer: KVQuantizer, part: str):
        self.directions = quantizer.tokens(part)
        self.apart = quantizer.tokens(part)
        self.norms = KVBuffer()
        self.positions = KVBuffer()

    def read(self, shared: KVBuffer, count: int, num_apart: int) -> Tensor:
        """The merged tokens as this layer attends to them, ``[B, H, count, d]``.

        Args:
            shared: the directions.
            count: number of merged tokens.
            num_apart: how many of them are kept apart.
        """
        restored = shared.read(count) * self.norms.read(count)
        if not self.apart.is_empty:
            native = self.apart.read(num_apart)
            index = self.positions.read(num_apart).long().expand_as(native)
            restored.scatter_(2, index, native)
        return restored


class PairLayer(PodCacheLayer):
    """A layer of a pair, for rows of equal length.

    The first tokens are merged, and in buffers that the request's quantizer makes. Later ones are native, and
    in the buffers of a dense layer.

    Attributes:
        merged: merged keys and merged values, by these names.
        merged_tokens: how many tokens were merged so far.
        num_apart: how many of these are kept apart in each KV head.
        is_deeper: whether the layer is the deeper one of its pair.
        packs: whether a codec packs merged tokens.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request, is_deeper: bool):
        self.params, self.is_deeper, self.packing = request.params, is_deeper, request.quantizer
        self.packs = request.quantizer is not NATIVE
        super().__init__(config, layer_idx)

    def clear(self) -> None:
        super().clear()
        self.merged_tokens = self.num_apart = 0
        self.merged = {name: Merged(self.packing, name) for name in _PARTS}

    def kv_buffers(self) -> dict[str, KVBuffer]:
        merged = {f"{part}_{name}": x for part in _PARTS for name, x in vars(self.merged[part]).items()}
        return super().kv_buffers() | merged

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        (q, k), past = step.ropes[self.layer_idx].pair(q, k), step.uniform_past
        assert past is not None
        if not self.merged_tokens:
            return self.attend_rotated(q, k, v, step)
        native = past - self.merged_tokens
        tokens = []
        buffers = self.lead_keys, self.all_values
        for merged, buffer, x in zip(self.restored(step.layers), buffers, (k, v), strict=True):
            buffer.append(x, native)
            tokens.append(torch.cat((merged, buffer.read(native + step.num_new)), dim=2))
        keys, values = tokens
        if step.num_new == 1 and not takes_gradients(q, k, v):
            return attend_slots(q, keys, values, self.scale)[0]
        return attend(q, Tokens(keys, values), backend=step.chunk_backend)[0]

    def flush(self, step: Step) -> None:
        """Nothing is flushed here: native tokens stay native until they are merged, see ``merge_pair``."""

    def restored(self, layers: list) -> tuple[Tensor, Tensor]:
        """Merged keys and values as this layer attends to them.

        Args:
            layers: all layers of the cache.
        """
        shallower = layers[self.layer_idx - 1] if self.is_deeper else self
        found = {
            name: self.merged[name].read(
                shallower.merged[name].directions, self.merged_tokens, self.num_apart
            )
            for name in _PARTS
        }
        return found["keys"], found["values"]

    def take_native(self, count: int) -> dict[str, Tensor]:
        """Remove the ``count`` native keys and values from this layer: ``[B, H, count, d]`` each."""
        native = {"keys": self.lead_keys.read(count), "values": self.all_values.read(count)}
        PodCacheLayer.clear(self)
        return native


def merge_pair(shallower: PairLayer, deeper: PairLayer, count: int, num_apart: int, t: float) -> None:
    """Merge the native tokens of a pair of layers.

    Args:
        count: number of native tokens.
        num_apart: how many of them are kept apart in each KV head.
        t: how far the shared direction lies from the shallower layer's to the deeper layer's, from 0 to 1.
    """
    past, past_apart = shallower.merged_tokens, shallower.num_apart
    native_a = shallower.take_native(count)
    native_b = deeper.take_native(count)
    for name in _PARTS:
        a = native_a[name]
        b = native_b[name]
        direction, norm_a, norm_b, angle = interpolate(a, b, t)
        apart = best_slots(angle, num_apart)[..., None]
        index = apart.expand(-1, -1, -1, a.shape[3])
        if shallower.packs:
            own = _unit(a.to(norm_a.dtype))[0].to(a.dtype)
        else:
            own, norm_a = a, norm_a.scatter(2, apart, 1.0)
        direction = direction.to(a.dtype).scatter(2, index, own.gather(2, index))
        shallower.merged[name].directions.append(direction, past)
        shallower.merged[name].norms.append(norm_a.to(a.dtype), past)
        deeper.merged[name].norms.append(norm_b.to(b.dtype), past)
        if num_apart:
            deeper.merged[name].apart.append(b.gather(2, index), past_apart)
            deeper.merged[name].positions.append((apart + past).int(), past_apart)
    for layer in (shallower, deeper):
        layer.merged_tokens = past + count
        layer.num_apart = past_apart + num_apart
        for merged in layer.merged.values():
            merged.directions.flush(layer.merged_tokens)
            merged.apart.flush(layer.num_apart)


def num_kept_apart(params: dict[str, Any], count: int, before: int) -> int:
    """How many of ``count`` tokens to merge are kept apart, if ``before`` earlier tokens already are."""
    if params["retained"] is not None:
        return min(count, max(0, params["retained"] - before))
    return ceil(params["share"] * count - 1e-9)  # 0.05 · 140 is a little more than 7 in floating point


def interpolate(a: Tensor, b: Tensor, t: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Spherical interpolation (MiniCache, eq. 3) between the directions of vectors ``[…, d]``.

    A zero vector has no direction and stays zero. Parallel or opposite directions are interpolated on a line
    and normalised.

    Args:
        t: how far to go from ``a`` to ``b``, from 0 to 1.

    Returns:
        The direction ``[…, d]``, the norms of a and of b ``[…, 1]``, and the angle between a and b ``[…]`` in
        radians; all in at least fp32.
    """
    wide = compute_dtype(a.dtype)
    unit_a, norm_a = _unit(a.to(wide))
    unit_b, norm_b = _unit(b.to(wide))
    angle = (unit_a * unit_b).sum(-1, keepdim=True).clamp(-1, 1).acos()
    sine = angle.sin()
    line, _ = _unit((1 - t) * unit_a + t * unit_b)
    arc = (((1 - t) * angle).sin() * unit_a + (t * angle).sin() * unit_b) / sine.clamp(min=_PARALLEL)
    return torch.where(sine < _PARALLEL, line, arc), norm_a, norm_b, angle[..., 0]


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Direction and norm of vectors ``[…, d]``; a zero vector has the direction zero."""
    norm = x.norm(dim=-1, keepdim=True)
    return x / norm.clamp(min=torch.finfo(norm.dtype).tiny), norm


def pairs_of(num_layers: int) -> list[tuple[int, ...]]:
    """The pairs of layers, from the middle of the model on. A last layer without a partner is dense."""
    return [(layer, layer + 1) for layer in range(num_layers // 2, num_layers - 1, 2)]


def _layer(config: PodConfig, layer_idx: int, request: Request) -> PodCacheLayer:
    for pair in pairs_of(config.num_hidden_layers):
        if layer_idx in pair:
            return PairLayer(config, layer_idx, request, is_deeper=layer_idx == pair[1])
    return PodCacheLayer(config, layer_idx, request.quantizer)


def merge_pairs(layers: list, step: Step, label: None) -> None:
    """Merge the native tokens of every pair, if a prompt has ended or ``block`` tokens were decoded."""
    pairs = [layer for layer in layers if isinstance(layer, PairLayer)]
    for shallower, deeper in zip(pairs[::2], pairs[1::2], strict=True):
        native, rule = step.max_length - shallower.merged_tokens, shallower.params
        if (step.ends_prompt and native) or (step.is_decode and native >= rule["block"]):
            num_apart = num_kept_apart(rule, native, shallower.num_apart)
            merge_pair(shallower, deeper, native, num_apart, rule["t"])


BUILDERS = {"minicache": Builder(build=cache_of(_layer, after_layers=merge_pairs), together=pairs_of)}
