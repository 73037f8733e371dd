"""Bytes that a decode step must read, and bytes that a cache holds, before anything is allocated. Standard library only.

**The model of a step** at ``n`` tokens per row, the new one included, with ``n_s`` sinks, ``n_r`` recent tokens, ``G`` query heads
per KV head, ``D = max(0, n - n_s - n_r)`` distant tokens, ``w = min(n, n_s + n_r)`` and ``k``, ``v`` bytes per key and value:

    dense pair (layer, KV head)        n·k + n·v
    lead                               n·k + n·v, and 4·G·D for the fp32 logits that it writes when a layer follows it
    follower                           w·k + n·v + 4·G·D (logits read)
    follower that skips (tau)          w·k + w·v
    window                             w·k + w·v

Keys of followers in a window, and windows, are native, also under a codec. Weights are read once per step, whatever the batch: all but the embedding,
of which a step reads one row per token (with tied weights the head is the embedding, and is read). Not counted: activations,
the new token's own key and value, partial results of split-KV. The *ceiling* of a method's speed over dense is the ratio of
the two sums, weights included.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pod.bench.args import BenchMethod
from pod.modeling.shipped.sharing import GROUP_SIZE, RESIDUAL

_LOGIT = 4
_CODEC_BITS = {"kivi": 2, "int4": 4, "int8": 8}


@dataclass(frozen=True)
class Sizes:
    """What bytes depend on in a model.

    Attributes:
        lead: ``[L][H]``, the sharing plan; leads follow themselves, None keeps its window.
        groups: query heads per KV head.
        element: bytes per number of weights, keys and values.
        weights: bytes of all parameters; read: those that a step reads.
        head_dim, num_sink_tokens, num_recent_tokens: of the model.
    """

    lead: tuple[tuple[int | None, ...], ...]
    groups: int
    head_dim: int
    element: int
    weights: int
    read: int
    num_sink_tokens: int
    num_recent_tokens: int

    @classmethod
    def of(
        cls, config: Any, lead: Sequence[Sequence[int | None]], windows: tuple[int, int], element: int
    ) -> "Sizes":
        """Of anything with the fields of `PodConfig`; lead, windows (sink, recent tokens): the plan's."""
        held, read = weight_bytes(config, element)
        groups = config.num_attention_heads // config.num_key_value_heads
        return cls(tuple(map(tuple, lead)), groups, config.head_dim, element, held, read, *windows)

    @property
    def pairs(self) -> int:
        """(layer, KV head) pairs."""
        return len(self.lead) * len(self.lead[0])

    @property
    def followers(self) -> int:
        """Pairs that follow another layer."""
        return sum(lead not in (layer, None) for layer, row in enumerate(self.lead) for lead in row)

    @property
    def windows(self) -> int:
        """Pairs that keep their window only."""
        return sum(lead is None for row in self.lead for lead in row)

    @property
    def followed(self) -> int:
        """Leads that a later layer follows."""
        pairs = ((layer, h, lead) for layer, row in enumerate(self.lead) for h, lead in enumerate(row))
        return len({(lead, h) for layer, h, lead in pairs if lead not in (layer, None)})

    def counts(self, method: BenchMethod) -> tuple[int, int, int]:
        """Pairs that lead, follow and keep their window under a method; all lead without the plan."""
        followers, windows = (self.followers, self.windows) if method.uses_plan else (0, 0)
        return self.pairs - followers - windows, followers, windows


def weight_bytes(config: Any, element: int) -> tuple[int, int]:
    """Bytes of all parameters of a decoder, and of those that a step reads; norms and biases left out.

    config: anything with the fields of `PodConfig`.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    attention = hidden * head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * hidden * config.intermediate_size
    table = config.vocab_size * hidden
    read = config.num_hidden_layers * layer + table
    held = read + (0 if config.tie_word_embeddings else table)
    return held * element, read * element


def spread_plan(
    num_layers: int, kv_heads: int, share_followers: float, share_windows: float = 0.0
) -> list[list[int | None]]:
    """A plan ``[L][H]`` in which these shares of the pairs follow and keep their window, rounded to whole pairs; a head with
    pairs that keep more has a lead.

    Every KV head gets the same number of windows and of blocks (some one more), at layers of its own, so that layers mix roles
    as plans of real models do. The same arguments give the same plan.
    """
    pairs, draw = num_layers * kv_heads, random.Random(0)
    windows = round(share_windows * pairs)
    leads = max(min(kv_heads, pairs - windows), pairs - windows - round(share_followers * pairs))
    plan: list[list[int | None]] = [[None] * kv_heads for _ in range(num_layers)]
    for head in range(kv_heads):
        blocks = leads // kv_heads + (head < leads % kv_heads)
        short = windows // kv_heads + (kv_heads - head <= windows % kv_heads)
        held = sorted(draw.sample(range(num_layers), num_layers - short)) if short else range(num_layers)
        cuts = {0, *draw.sample(range(1, len(held)), blocks - 1)} if held else set()
        lead = None
        for place, layer in enumerate(held):
            plan[layer][head] = lead = layer if place in cuts else lead
    return plan


def codec_of(method: BenchMethod) -> str | None:
    """The codec in the method's spec."""
    return next((part for part in method.parts if part in _CODEC_BITS), None)


def is_modelled(method: BenchMethod) -> bool:
    """Whether the bytes that a step reads are known here: full and pod, with or without a codec."""
    return all(part in ("full", "pod", *_CODEC_BITS) for part in method.parts)


def token_bytes(sizes: Sizes, method: BenchMethod, length: int) -> float:
    """Mean bytes of one key or value among `length` stored tokens of one head: packed ones, and the native residual."""
    native, codec = sizes.head_dim * sizes.element, codec_of(method)
    if codec is None:
        return native
    group = method.options.get("group_size", GROUP_SIZE)
    # `residual` to `residual + group_size - 1` tokens are native
    tail = method.options.get("residual", RESIDUAL) + (group - 1) / 2
    groups = max(1, sizes.head_dim / group)
    packed = sizes.head_dim * _CODEC_BITS[codec] / 8 + 4 * groups
    share = min(1.0, tail / length)
    return share * native + (1 - share) * packed


def read_per_row(sizes: Sizes, method: BenchMethod, length: int) -> float:
    """Bytes of keys, values and logits that a step moves for one row of `length` tokens."""
    stored, native = token_bytes(sizes, method, length), sizes.head_dim * sizes.element
    leads, followers, windows = sizes.counts(method)
    if not method.uses_plan:
        return leads * 2 * length * stored
    window = min(length, sizes.num_sink_tokens + sizes.num_recent_tokens)
    logits = _LOGIT * sizes.groups * (length - window)
    skips = method.skip_share * followers
    whole = window * native + length * stored + logits
    followed = (followers - skips) * whole + skips * window * (native + stored)
    return leads * 2 * length * stored + sizes.followed * logits + followed + windows * 2 * window * native


def read_per_step(sizes: Sizes, method: BenchMethod, length: int, batch: int) -> float:
    """Bytes that a step moves: weights, and the cache of every row."""
    return sizes.read + batch * read_per_row(sizes, method, length)


def ceiling(sizes: Sizes, method: BenchMethod, full: BenchMethod, length: int, batch: int) -> float | None:
    """Speed over the dense cache if bytes alone took time; None for methods whose bytes are not modelled."""
    if not is_modelled(method):
        return None
    return read_per_step(sizes, full, length, batch) / read_per_step(sizes, method, length, batch)


def held_per_row(sizes: Sizes, method: BenchMethod, capacity: int, on_cpu: bool = False) -> float:
    """Bytes of cache and decode buffers for one row with room for `capacity` tokens; for methods that are not modelled
    those of the dense cache, which is what they hold while they read a prompt."""
    if not is_modelled(method):
        return sizes.pairs * 2 * capacity * sizes.head_dim * sizes.element
    stored, native = token_bytes(sizes, method, capacity), sizes.head_dim * sizes.element
    leads, followers, windows = sizes.counts(method)
    tokens = (2 * leads + followers) * capacity * stored
    tokens += (followers + 2 * windows) * (sizes.num_sink_tokens + sizes.num_recent_tokens) * native
    logits = len(sizes.lead[0]) * sizes.groups * capacity * max(4, sizes.element) * (2 if on_cpu else 1)
    return tokens + (logits if leads else 0)


def room(length: int, duels: int, steps: int, repeats: int) -> int:
    """Tokens that a cache of `length` tokens has at the end of its duels."""
    return length + duels * (repeats + 1) * steps


def stock_per_row(sizes: Sizes, length: int) -> float:
    """Bytes of a transformers DynamicCache, and of the layer that it copies in order to append."""
    return (sizes.pairs + 2 * len(sizes.lead[0])) * 2 * length * sizes.head_dim * sizes.element
