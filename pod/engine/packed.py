"""Packed stores that stay in place: codes for the whole capacity, and a ring for the newest tokens.

The rule is that of ``pod.modeling.methods.quantized``: of ``n`` tokens the first ``P(n)`` are packed, in groups, once. What
differs is where tokens stand: room for all codes is reserved, and the newest tokens live in a ring instead of a tail
that is copied, so that a decoded token is written and read at fixed addresses. Windows are rings already and stay native.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pod.kernels.decode import Packed
from pod.modeling.methods.packing import Packing
from pod.modeling.methods.quantized import QuantizedCodec
from pod.modeling.shipped.cache_layer import Step
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.stores import Codec, Store, TokenStore


class StaticPackedStore:
    """Tokens of rows of one length, at slots 0, 1, …; see ``Store`` for the methods.

    While a prompt runs its tokens stand native in ``pending``, together with what the ring held; ``settle`` packs them.
    """

    has_window = False

    def __init__(self, packing: Packing, residual: int, capacity: int):
        self.packing, self.residual, self.capacity = packing, residual, capacity
        self.length = self.num_packed = 0
        self.packed: Packed | None = None
        self.pending: Tensor | None = None  # tokens [num_packed, length)

    @property
    def is_empty(self) -> bool:
        return self.packed is None

    @property
    def stored(self) -> Packed:
        """What the decode kernels read."""
        assert self.packed is not None and self.pending is None, "a prompt is running"
        return self.packed

    @property
    def target(self) -> Tensor:
        """``[B, h, R, d]``, to which a decoded token is written: position ``p`` to slot ``p mod R``."""
        return self.stored.tail

    @property
    def ring(self) -> int:
        """Slots for native tokens."""
        return self.residual + self.packing.group_size

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.packed is not None, "empty store"
        return self.packed.shape

    @property
    def dtype(self) -> torch.dtype:
        assert self.packed is not None, "empty store"
        return self.packed.dtype

    def reserve(self, slots: int) -> None:
        """Hold codes for ``slots`` tokens."""
        self.capacity = max(self.capacity, slots)
        if self.packed is not None and self.packed.shape[2] < self.capacity:
            old, self.packed = self.packed, self._allocate(self.packed.tail, self.capacity)
            for new, held in zip(self.packed[:3], old[:3], strict=True):
                new[:, :, : held.shape[2]] = held
            self.packed.tail.copy_(old.tail)
            self.packed.packed_lengths.copy_(old.packed_lengths)

    def _allocate(self, like: Tensor, capacity: int) -> Packed:
        """Zeros for whole groups of tokens; the tail like ``[B, h, …, d]``."""
        group, (batch, heads, _, head_dim) = self.packing.group_size, like.shape
        rows = -(-capacity // group) * group
        zeros = like.new_zeros
        shape = (
            (rows // group, head_dim)
            if self.packing.per_channel
            else (rows, head_dim // min(group, head_dim))
        )
        return Packed(
            codes=zeros(batch, heads, rows, head_dim // 2, dtype=torch.uint8),
            zero=zeros(batch, heads, *shape, dtype=torch.float16),
            scale=zeros(batch, heads, *shape, dtype=torch.float16),
            tail=zeros(batch, heads, self.ring, head_dim),
            packed_lengths=zeros(batch, dtype=torch.int32),
            group_size=group,
            per_channel=self.packing.per_channel,
        )

    def used_slots(self, length: int) -> int:
        return length

    def slot_positions(self, lengths: Tensor) -> Tensor:
        slots = torch.arange(int(lengths.max()), device=lengths.device)
        return slots.expand(lengths.shape[0], -1).masked_fill(slots >= lengths[:, None], -1)

    def append(self, x: Tensor, past: int) -> None:
        """``[B, h, m, d]`` behind ``past`` tokens per row."""
        assert past == self.length, "tokens are appended in order"
        if self.packed is None:
            self.packed = self._allocate(x, self.capacity)
        self.reserve(past + x.shape[2])
        if x.shape[2] == 1 and self.pending is None and past + 1 - self.num_packed <= self.ring:
            self.packed.tail[:, :, past % self.ring] = x[:, :, 0]
        else:
            self.pending = torch.cat((self._native(), x), dim=2)
        self.length = past + x.shape[2]

    def _native(self) -> Tensor:
        """``[B, h, length - num_packed, d]`` in the order of positions."""
        if self.pending is not None:
            return self.pending
        assert self.packed is not None
        positions = torch.arange(self.num_packed, self.length, device=self.packed.tail.device)
        return self.packed.tail[:, :, positions % self.ring]

    def append_ragged(self, x: Tensor, past: Tensor, counts: Tensor) -> None:
        raise ValueError(
            "a packed cache with capacity takes rows of one length: leave capacity out, or pad no row"
        )

    def read(self, length: int) -> Tensor:
        """``[B, h, length, d]``, a copy."""
        assert self.packed is not None
        native = self._native()
        out = native.new_empty(*native.shape[:2], self.length, native.shape[3])
        self.packing.unpack(self._codes(0, self.num_packed), out[:, :, : self.num_packed])
        out[:, :, self.num_packed :] = native
        return out[:, :, :length]

    def _codes(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        assert self.packed is not None
        per_entry = self.packing.group_size if self.packing.per_channel else 1
        codes, zero, scale = self.packed[:3]
        entries = slice(start // per_entry, stop // per_entry)
        return codes[:, :, start:stop], zero[:, :, entries], scale[:, :, entries]

    def settle(self, length: int) -> None:
        """Pack what left the residual window of ``length`` tokens; the rest goes to the ring."""
        self.length = length  # the engine writes to the ring itself
        group, first = self.packing.group_size, self.num_packed
        stop = max(0, (length - self.residual) // group) * group
        if self.packed is None or (self.pending is None and stop <= first):
            return
        native = self._native()
        block = self.packing.block_tokens(native)
        for start in range(first, stop, block):
            end = min(start + block, stop)
            new = self.packing.pack(native[:, :, start - first : end - first])
            for target, part in zip(self._codes(start, end), new, strict=True):
                target.copy_(part)
        if stop > first:
            self.num_packed = stop
            self.packed.packed_lengths.fill_(stop)
        rest = torch.arange(self.num_packed, length, device=native.device)
        self.packed.tail[:, :, rest % self.ring] = native[:, :, self.num_packed - first :]
        self.pending = None

    def keep(self, index: Tensor, length: int) -> None:
        raise NotImplementedError("capacity is for caches that drop no token")

    def write(self, slots: Tensor, x: Tensor) -> None:
        raise NotImplementedError("capacity is for caches that merge no token")

    def select_rows(self, index: Tensor) -> None:
        if self.packed is not None:
            index = index.to(self.packed.tail.device)
            names = "codes", "zero", "scale", "tail", "packed_lengths"
            rows = {name: getattr(self.packed, name).index_select(0, index) for name in names}
            self.packed = self.packed._replace(**rows)
        if self.pending is not None:
            self.pending = self.pending.index_select(0, index.to(self.pending.device))

    def tensors(self) -> list[Tensor]:
        held = [] if self.packed is None else list(self.packed[:5])
        return held if self.pending is None else [*held, self.pending]

    def predicted_nbytes(self, length: int) -> int:
        """Bytes of the codes reserved and of the ring."""
        return sum(tensor.nbytes for tensor in self.tensors())


@dataclass(frozen=True)
class StaticPackedCodec:
    """Packed tokens with room for ``capacity`` of them; native windows."""

    codec: QuantizedCodec
    capacity: int

    def tokens(self, part: str, evicts: bool = False) -> Store:
        codec = self.codec
        packing = Packing(
            bits=codec.bits, group_size=codec.group_size, per_channel=part == "keys" and not evicts
        )
        return StaticPackedStore(packing, codec.residual, self.capacity)

    def window(self, part: str, num_sink_tokens: int, num_recent_tokens: int) -> Store:
        return TokenStore(num_sink_tokens, num_recent_tokens)


class PackedLayer(PodCacheLayer):
    """A layer of packed stores, which packs as soon as it has attended."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        out = super().attend(q, k, v, step)
        self.settle(step)
        return out


def packed_layer(config: PodConfig, layer_idx: int, codec: Codec, capacity: int) -> PackedLayer:
    """A layer whose stores the decode kernels read, in place of one that ``codec`` makes.

    Raises:
        ValueError: a codec without such kernels, or a layout other than full or pod.
    """
    if not isinstance(codec, QuantizedCodec) or codec.bits != 4 or config.layout != "pod":
        raise ValueError(
            "no decode engine here: it serves full and pod caches in the model's dtype or in 4 bits; leave capacity out"
        )
    return PackedLayer(config, layer_idx, StaticPackedCodec(codec, capacity))
