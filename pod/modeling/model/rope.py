"""Rotary position embedding (RoPE). Tables of cos and sin are computed for each pass, in at least fp32."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .attend import tile_elements
from .config import PodConfig


def inverse_frequencies(
    config: PodConfig, device: torch.device, parameters: dict[str, Any] | None
) -> tuple[Tensor, float]:
    """Inverse frequencies ``[head_dim / 2]`` in fp32, and the factor on cos and sin (YaRN; 1.0 otherwise).

    They are computed as in the stock models, so that angles are those with which a checkpoint was trained.

    Args:
        config: the model's configuration.
        device: device of the result.
        parameters: RoPE parameters as in transformers 5. None = all angles are 0, so that nothing is rotated.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    if parameters is None:
        return torch.zeros_like(exponents), 1.0
    rope_type = parameters.get("rope_type", "default")
    if rope_type != "default":
        return ROPE_INIT_FUNCTIONS[rope_type](config, device)
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0


Frequencies = tuple[list[tuple[Tensor, float]], list[int]]
"""The ``inverse_frequencies`` of every kind of layer, and the kind of each layer."""


def frequencies_of(config: PodConfig, device: torch.device) -> Frequencies:
    """The frequencies of all layers. They must be computed anew if the configuration changes."""
    each = [config.rope_of(layer) for layer in range(config.num_hidden_layers)]
    kinds = [one for layer, one in enumerate(each) if one not in each[:layer]]
    return [inverse_frequencies(config, device, one) for one in kinds], [kinds.index(one) for one in each]


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``[B, h, n, d]`` with the tables of its positions, from ``Rope.tables``.

    Long inputs are rotated in tiles, so that little memory is needed for fp32 copies.
    """
    if x.shape[2] == 1:
        return rotate_whole(x, *tables)
    tile = max(1, tile_elements(x.device) // max(1, x[:, :, :1].numel()))
    if x.shape[2] <= tile:
        return rotate_whole(x, *tables)
    cos = tables[0].expand(-1, -1, x.shape[2], -1, -1)
    sin = tables[1].expand(-1, -1, x.shape[2], -1, -1)
    parts = (
        rotate_whole(*(part[:, :, start : start + tile] for part in (x, cos, sin)))
        for start in range(0, x.shape[2], tile)
    )
    if torch.is_grad_enabled() and x.requires_grad:
        return torch.cat(list(parts), dim=2)
    out = torch.empty_like(x)
    for start, part in zip(range(0, x.shape[2], tile), parts, strict=True):
        out[:, :, start : start + tile] = part
    return out


def rotate_whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same as `rotate`, without tiles. ``cos`` and ``sin`` are from ``Rope.tables``."""
    halves = x.to(cos.dtype).unflatten(3, (2, -1))
    return torch.addcmul(halves * cos, halves.flip(3), sin).flatten(3).to(x.dtype)


class Rope:
    """Rotates queries and keys at the positions of one forward pass, or at others that a cache chooses.

    Args:
        frequencies: inverse frequencies ``[d / 2]``, fp32.
        attention_scaling: factor on cos and sin.
        position_ids: ``[B or 1, n]`` integers, the positions of the pass.
        dtype: dtype of the hidden states; angles and products use at least fp32.
        rotate: a function that computes the same as `rotate`; training passes a compiled one.
    """

    def __init__(
        self,
        frequencies: Tensor,
        attention_scaling: float,
        position_ids: Tensor,
        dtype: torch.dtype,
        rotate: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = rotate,
    ):
        self.rotate = rotate
        self.device = position_ids.device
        self.frequencies = frequencies
        self.attention_scaling = attention_scaling
        self.compute_dtype = torch.promote_types(dtype, torch.float32)
        self.own_tables = self.tables(position_ids)
        self._other_tables: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def tables(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The tables that ``rotate`` needs at ``position_ids`` ``[B or 1, n]``.

        Returns:
            cos ``[B or 1, 1, n, 1, d / 2]``, and ``[B or 1, 1, n, 2, d / 2]`` with -sin for the lower and sin
            for the upper half of the channels.
        """
        frequencies = self.frequencies.to(self.compute_dtype)
        angles = position_ids[:, None, :, None, None].to(self.compute_dtype) * frequencies
        cos = angles.cos()
        sin = angles.sin()
        if self.attention_scaling != 1.0:
            cos = cos * self.attention_scaling
            sin = sin * self.attention_scaling
        return cos, torch.cat((-sin, sin), dim=-2)

    def pair(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries ``[B, Hq, n, d]`` and keys ``[B, H, n, d]`` at the positions of this pass.

        Those of a decoded token are rotated together, which needs half the operations.
        """
        if q.shape[2] > 1:
            return self(q), self(k)
        heads = q.shape[1], k.shape[1]
        return self(torch.cat((q, k), dim=1)).split(heads, dim=1)  # type: ignore[return-value]

    def turn(self, x: Tensor, positions: range) -> Tensor:
        """Rotate ``[B, h, n, d]`` at the ``n`` positions ``positions``, in all rows.

        The tables are computed once in a pass, and serve all layers with these positions.
        """
        start, stop = positions.start, positions.stop
        return self.turn_at(x, positions, lambda: torch.arange(start, stop, device=x.device)[None])

    def turn_at(self, x: Tensor, name: Hashable, positions: Callable[[], Tensor]) -> Tensor:
        """Rotate ``[B, h, n, d]`` at other positions than those of the pass.

        Args:
            x: the tensor.
            name: a name for the positions. The tables are computed once in a pass for each name.
            positions: computes the positions ``[B or 1, n]``.
        """
        if name not in self._other_tables:
            self._other_tables[name] = self.tables(positions())
        return self.rotate(x, self._other_tables[name])

    def for_rows(self, rows: Tensor | None, num_new: int) -> "Rope":
        """The same rotation for some rows of the batch (None = all) and their first ``num_new`` columns.

        Tables for ``turn`` and ``turn_at`` are not shared with other rows, because the same name may mean
        other positions there: for example, rows with another budget.
        """
        part = copy(self)
        part._other_tables = {}
        part.own_tables = tuple(
            (table if rows is None or table.shape[0] == 1 else table[rows])[:, :, :num_new]
            for table in self.own_tables
        )
        return part

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate ``[B, h, n, d]`` at the positions of this pass."""
        return self.rotate(x, self.own_tables)

    def on(self, device: torch.device) -> "Rope":
        """The same rotation for layers on another device."""
        moved = copy(self)
        moved.device = device
        moved._other_tables = {}
        moved.frequencies = self.frequencies.to(device)
        moved.own_tables = tuple(table.to(device) for table in self.own_tables)
        return moved


def ropes_on(ropes: Sequence[Rope], device: torch.device) -> list[Rope]:
    """Each layer's rotation on another device. Layers that shared a ``Rope`` share its copy."""
    moved = {rope: rope.on(device) for rope in set(ropes)}
    return [moved[rope] for rope in ropes]
