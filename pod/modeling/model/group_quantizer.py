"""``GroupQuantizer``: makes buffers whose older tokens are packed to 2, 4 or 8 bits."""

from dataclasses import dataclass, replace

from .config import PodConfig
from .kv_buffer import KVBuffer
from .kv_quantizer import KVQuantizer
from .packed import Packing
from .packed_bytes import GROUP_SIZE, check_bits, is_packed_window
from .quantized import PackedTokens, QuantizedWindow
from .window_buffer import WindowBuffer


@dataclass(frozen=True)
class GroupQuantizer(KVQuantizer):
    """Makes buffers whose old tokens take ``bits`` bits per number. See the top of ``quantized.py``.

    Attributes:
        bits: 2, 4 or 8.
        group_size: how many tokens are packed at a time, and how many numbers share a scale. In groups over
            channels, the divisor of ``head_dim`` nearest to ``group_size`` is how many share a scale.
        residual: how many of the newest tokens stay native at least.
        capacity: number of tokens whose codes are allocated from the start, in buffers that keep their
            address. Windows keep their address anyway, and are native then. 0 = buffers grow.
    """

    bits: int
    group_size: int
    residual: int
    capacity: int = 0
    comes_to_rest = True

    @property
    def is_in_place(self) -> bool:
        return self.capacity > 0

    def in_place(self, capacity: int) -> KVQuantizer:
        if self.bits != 4:
            raise ValueError(
                "no decode engine here: it serves full and pod caches in the model's dtype or in 4 bits; "
                "leave capacity out"
            )
        return replace(self, capacity=capacity)

    def tokens(self, part: str, evicts: bool = False) -> KVBuffer:
        packing = Packing(self.bits, self.group_size, per_channel=part == "keys" and not evicts)
        return PackedTokens(packing, self.residual, self.capacity)

    def window(self, part: str, num_sink_tokens: int, num_recent_tokens: int) -> KVBuffer:
        """See ``KVQuantizer.window``. Native with a capacity, or if all of its tokens would stay native."""
        if self.capacity or not is_packed_window(num_recent_tokens, self.residual, self.group_size):
            return WindowBuffer(num_sink_tokens, num_recent_tokens)
        packing = Packing(self.bits, self.group_size, per_channel=part == "keys")
        return QuantizedWindow(packing, self.residual, num_sink_tokens, num_recent_tokens)


def make_quantizer(name: str, bits: int, config: PodConfig, group_size: int, residual: int) -> KVQuantizer:
    """The quantizer of a method such as ``int4``, for a model.

    The default ``group_size``, ``GROUP_SIZE``, serves every ``head_dim`` (see ``channel_group``). Any other
    one must divide ``head_dim``, unless it is at least ``head_dim``. ``name`` begins the messages of errors.

    Raises:
        ValueError: the codes of a head do not fill whole bytes, or ``group_size`` does not fit ``head_dim``.
    """
    head_dim = config.head_dim
    check_bits(bits, head_dim, name)
    if group_size != GROUP_SIZE and group_size < head_dim and head_dim % group_size:
        fitting = [size for size in range(2, head_dim + 1) if head_dim % size == 0]
        raise ValueError(
            f"{name}: group_size = {group_size} does not divide head_dim = {head_dim}; leave it out, or "
            f"choose one of {', '.join(map(str, fitting))}"
        )
    return GroupQuantizer(bits, group_size, residual)
