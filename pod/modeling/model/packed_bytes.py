"""How many bytes keys and values take where older tokens are packed to 8 or 4 bits.

``packed.py`` has the format. Plans count bytes with these numbers, and quantizers pack with them.
"""

import math
from functools import lru_cache

GROUP_SIZE = 32
"""How many numbers share a scale, unless a method is told otherwise."""
RESIDUAL = 128
"""How many of the newest tokens stay native, unless a plan or a method is told otherwise."""
_GROUP_BITS = 32  # the fp16 zero and the fp16 scale of a group


def native_tokens(residual: int) -> float:
    """How many of many tokens are native, on average, since tokens are packed a group at a time.

    Example: of 128 tokens that stay native at least, and groups of 32, there are 128 to 159, or 143.5.
    """
    return residual + (GROUP_SIZE - 1) / 2


def mean_size(bits: float, residual: int, n: float) -> float:
    """How large a key's or a value's number is, on average over ``n`` tokens, as a share of a native one.

    Example: 0.36 at 2,048 tokens, with 5 bits and a residual of 128, since 143.5 of the tokens are native.

    Args:
        bits: of a packed number, see ``bits_per_number``. 16 = nothing is packed.
        residual: how many of the newest tokens stay native at least.
        n: tokens, at least 1; infinity = all are packed.
    """
    if bits == 16:
        return 1.0
    native = min(1.0, native_tokens(residual) / n)
    return native + (1 - native) * bits / 16


def is_packed_window(num_recent_tokens: int, residual: int, group_size: int = GROUP_SIZE) -> bool:
    """Whether older tokens of a window are packed. Windows that fit into their native slots are not."""
    return num_recent_tokens > residual + group_size


@lru_cache(maxsize=256)
def channel_group(head_dim: int, group_size: int = GROUP_SIZE) -> int:
    """How many channels of a token share a zero and a scale: the divisor of ``head_dim`` nearest to the size.

    Nearest is meant by ratio; of two that are equally near, it is the smaller. 64, 96 and 128 channels make
    groups of 32, 80 make groups of 40, 112 make groups of 28, and a head of 16 channels is one group.
    """
    divisors = [size for size in range(1, head_dim + 1) if head_dim % size == 0]
    return min(divisors, key=lambda size: abs(math.log(size / group_size)))


def bits_per_number(bits: int, head_dim: int | None = None) -> tuple[float, float]:
    """Bits that one number takes, its share of the fp16 zero and scale included: in keys, and in values.

    A group of keys is ``GROUP_SIZE`` tokens of one channel. A group of values is ``channel_group`` channels
    of one token. So 4 bits take 5.0 in keys, and 4.8 in values of a head of 80 channels.

    Args:
        bits: 16, 8 or 4. 16 bits have no groups.
        head_dim: channels of a head. None = a number that ``GROUP_SIZE`` divides.
    """
    if bits == 16:
        return 16.0, 16.0
    channels = GROUP_SIZE if head_dim is None else channel_group(head_dim)
    return bits + _GROUP_BITS / GROUP_SIZE, bits + _GROUP_BITS / channels


def packed_slots(num_recent_tokens: int, residual: int, group_size: int = GROUP_SIZE) -> int:
    """Packed slots of a window that has some: whole groups, for all tokens but the newest ``residual``."""
    return -(-(num_recent_tokens - residual) // group_size) * group_size


def window_size(held: int, num_sink_tokens: int, residual: int, bits: float) -> float:
    """How many native tokens take as many bytes as the keys, or the values, of a full window.

    First tokens are native. A window of recent tokens has ``residual + GROUP_SIZE`` native slots. If it is
    longer, it also has packed slots (``packed_slots``).

    Example: 128 recent tokens, of which 32 stay native, take 64 native slots and 96 packed ones. In 4 bits,
    or 5.0 with scales, they are as large as 94 native tokens.

    Args:
        held: tokens of the window, first ones included.
        bits: of a packed number, see ``bits_per_number``. 16 = nothing is packed.
    """
    recent = held - num_sink_tokens
    if bits == 16 or not is_packed_window(recent, residual):
        return held
    return num_sink_tokens + residual + GROUP_SIZE + packed_slots(recent, residual) * bits / 16


def check_bits(bits: int, head_dim: int, name: str) -> None:
    """Raise ``ValueError`` unless ``head_dim`` codes of so many bits fill whole bytes.

    No other rule limits the bits in which a model's keys and values can be held.

    Args:
        bits: 2, 4 or 8 per code.
        head_dim: channels of a head.
        name: the method or setting that asks for these bits. The message begins with it.
    """
    if head_dim * bits % 8:
        raise ValueError(
            f"{name}: {bits} bits of head_dim = {head_dim} channels do not fill whole bytes; head_dim must "
            f"be a multiple of {8 // math.gcd(8, bits)}: use 8 bits (int8)"
        )
