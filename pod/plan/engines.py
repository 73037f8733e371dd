"""The KV cache of a plan of whole layers in vLLM: its groups of layers, its blocks, how many requests fit.

Some layers hold all tokens, others hold a window. vLLM splits the layers of each kind into groups of one
size, and gives each group a table of blocks. A block is as large as a whole group needs, so a group that
lacks layers wastes memory. The rules are those of vLLM 0.32, `v1/core/kv_cache_utils.py` and
`v1/kv_cache_interface.py`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from pod.modeling.model.sharing import SharingPlan
from pod.units import GIB

BLOCK_TOKENS = 16
"""vLLM's usual block on GPUs; its CPU backend takes 128."""
NUMBER_BYTES = 2  # bytes of a stored number: 16 bits
BATCHES_IN_FLIGHT = 2
"""vLLM's asynchronous scheduling prepares a batch while the one before it runs. It is on by default, but not
on CPUs. Layers with windows keep room for the tokens of both batches."""
LENGTHS = (8192, 32_768, 131_072)
"""Tokens of a request for which a report says what the engine holds."""
_LAYERS_PER_PADDING = 15  # a plan may waste the memory of one layer for every 15 layers of the model
# vLLM's: when the numbers of layers of both kinds have a ratio below this, the larger one is the group size
_NEARLY_EQUAL = 1.5


class LayerGroups(NamedTuple):
    """Groups into which vLLM splits the layers of a model.

    Attributes:
        size: number of layers in a group.
        full: number of groups of layers that hold every token.
        windowed: number of groups of layers that hold a window.
        padding: number of layers by which the groups are not full; the memory of so many layers is wasted.
    """

    size: int
    full: int
    windowed: int
    padding: int


def layer_groups(num_full: int, num_windows: int) -> LayerGroups:
    """How vLLM groups the layers of a model.

    Example: 20 full layers and 10 with windows make 2 + 1 groups of 10 layers, without padding.

    Args:
        num_full: number of layers that hold every token.
        num_windows: number of layers that hold a window; all windows are equal.

    Raises:
        ValueError: a number is negative, or both are 0.
    """
    if min(num_full, num_windows) < 0 or num_full + num_windows == 0:
        raise ValueError(f"need layers to group, got {num_full} full and {num_windows} with windows")
    kinds = [count for count in (num_full, num_windows) if count]
    size = min(kinds)
    if max(kinds) < _NEARLY_EQUAL * size:
        size = max(kinds)
    full = -(-num_full // size)
    windowed = -(-num_windows // size)
    padding = (full + windowed) * size - num_full - num_windows
    return LayerGroups(size, full, windowed, padding)


def window_counts(num_layers: int) -> list[int]:
    """The numbers of window layers that a plan for vLLM may have, in rising order.

    Plans with these numbers waste next to nothing: all groups of layers that hold every token are full, and
    the groups of window layers together lack at most one layer for every 15 layers of the model.

    With 30 layers these are 10, 15 and 20 among others, but not 12. With 31 layers, 15 windows lack one layer
    (groups of 16 and 15), and 20 windows lack two (groups of 11, 11 and 9).
    """
    return [windows for windows in range(num_layers + 1) if _wastes_little(num_layers - windows, windows)]


def _wastes_little(num_full: int, num_windows: int) -> bool:
    """Whether vLLM's groups waste next to nothing on these layers, see `window_counts`."""
    groups = layer_groups(num_full, num_windows)
    is_full = groups.full * groups.size == num_full
    return is_full and groups.padding * _LAYERS_PER_PADDING <= num_full + num_windows


@dataclass(frozen=True, kw_only=True)
class EngineCache:
    """The KV cache of one model in vLLM.

    Attributes:
        num_full: number of layers that hold every token.
        num_windows: number of layers that hold a window.
        num_key_value_heads: KV heads of a layer.
        head_dim: numbers in a key or value of one head.
        window: tokens of a window, the current one included.
        tokens_in_flight: tokens of prompts for which layers with windows keep room while a prompt is read:
            ``max_num_batched_tokens``, times `BATCHES_IN_FLIGHT` with asynchronous scheduling.
        block_tokens: tokens of a block.
        number_bytes: bytes of a stored number.
    """

    num_full: int
    num_windows: int
    num_key_value_heads: int
    head_dim: int
    window: int
    tokens_in_flight: int
    block_tokens: int = BLOCK_TOKENS
    number_bytes: int = NUMBER_BYTES

    @classmethod
    def of_plan(cls, plan: SharingPlan, batch_tokens: int) -> "EngineCache":
        """The cache of a plan whose layers lead or keep their window as a whole, on a GPU.

        Args:
            plan: it must record its windows and its head_dim.
            batch_tokens: vLLM's ``max_num_batched_tokens``.
        """
        assert plan.head_dim is not None and plan.num_recent_tokens is not None
        num_windows = sum(row[0] is None for row in plan.lead)
        return cls(
            num_full=plan.num_layers - num_windows,
            num_windows=num_windows,
            num_key_value_heads=plan.num_key_value_heads,
            head_dim=plan.head_dim,
            window=plan.num_recent_tokens,
            tokens_in_flight=BATCHES_IN_FLIGHT * batch_tokens,
        )

    @property
    def dense(self) -> "EngineCache":
        """The cache of the same model without windows."""
        return replace(self, num_full=self.num_full + self.num_windows, num_windows=0)

    @property
    def groups(self) -> LayerGroups:
        """How the layers are grouped."""
        return layer_groups(self.num_full, self.num_windows)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys and values of its tokens in all layers of a group."""
        numbers = 2 * self.num_key_value_heads * self.head_dim * self.block_tokens
        return self.groups.size * numbers * self.number_bytes

    def blocks(self, n: int, *, reading: bool) -> int:
        """Blocks that a request of n tokens holds.

        Args:
            n: tokens of the request, prompt and answer.
            reading: whether its prompt is being read; layers with windows then also hold the tokens in
                flight.
        """
        seen = self.window - 1 + (self.tokens_in_flight if reading else 1)
        whole = -(-n // self.block_tokens)
        # the first token of a window may be the last one of a block
        near = -(-min(n, seen) // self.block_tokens) + 1
        if not reading:
            near = min(near, whole)
        return self.groups.full * whole + self.groups.windowed * near

    def request_bytes(self, n: int, *, reading: bool) -> int:
        """Bytes that a request of n tokens holds, see `blocks`."""
        return self.blocks(n, reading=reading) * self.block_bytes

    def requests(self, memory_bytes: int, n: int) -> float:
        """How many requests of n tokens fit into `memory_bytes`.

        As in vLLM, every request counts as if its prompt were being read.
        """
        return memory_bytes // self.block_bytes / self.blocks(n, reading=True)


def describe_engine(plan: SharingPlan, batch_tokens: int) -> str:
    """What vLLM holds for a request at several lengths, under a plan and without it: a table in text.

    Args:
        batch_tokens: vLLM's ``max_num_batched_tokens``.
    """
    own = EngineCache.of_plan(plan, batch_tokens)
    dense, groups = own.dense, own.groups
    wasted = f", {groups.padding} layers of padding" if groups.padding else ", no padding"
    lines = [
        f"in vLLM: {groups.full} + {groups.windowed} groups of {groups.size} layers (all tokens + windows)"
        f"{wasted}; 16-bit numbers, blocks of {BLOCK_TOKENS} tokens, --max-num-batched-tokens {batch_tokens}",
        "     tokens | MiB per request: dense | plan, prompt read | plan, then | smaller | "
        "requests in 1 GiB: dense | plan",
    ]
    for n in LENGTHS:
        without = dense.request_bytes(n, reading=True)
        read = own.request_bytes(n, reading=True)
        then = own.request_bytes(n, reading=False)
        fit = [cache.requests(GIB, n) for cache in (dense, own)]
        sizes = f"{n:11,} | {without / 2**20:22,.1f} | {read / 2**20:17,.1f} | {then / 2**20:10,.1f}"
        lines.append(f"{sizes} | {without / read:6.2f}x | {fit[0]:24.1f} | {fit[1]:4.1f}")
    return "\n".join(lines)
