"""Bytes that a decode step must read, and bytes that a cache holds: computed from sizes, without torch.

**The model of a step.** A row has ``n`` tokens, the new one included. There are ``n_s`` sinks, ``n_r`` recent
tokens, ``G`` query heads per KV head, ``D = max(0, n - n_s - n_r)`` distant tokens and
``w = min(n, n_s + n_r)`` near ones. A key has ``k`` bytes, a value ``v``:

    dense pair (layer, KV head)        n·k + n·v
    lead                               n·k + n·v, and 4·G·D when a layer follows it (fp32 logits written)
    follower                           w·k + n·v + 4·G·D (logits read)
    follower that skips (tau)          w·k + w·v
    window                             w·k + w·v

Keys that followers keep in a window are *native* (as the model computes them), also under a codec. So are
keys and values of windows.

Weights are read once per step, whatever the batch. All are read except the embedding, of which a step reads
one row per token. (With tied weights the head is the embedding, and is read.) Of a mixture of experts, a step
reads the experts that one token sees.

Not counted are activations, the new token's own key and value, and partial results of split-KV. The *ceiling*
of a method's speed over dense is the ratio of the two sums, weights included.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pod.bench.args import FULL, POD, STOCK
from pod.eval.answer.methods import EvaluatedMethod
from pod.modeling.model.packed_bytes import GROUP_SIZE, RESIDUAL, channel_group
from pod.modeling.model.sharing import Roles, SharingPlan, roles_of
from pod.registry import METHODS

_LOGIT = 4  # bytes
_CODEC_BITS = {name: method.bits for name, method in METHODS.items() if method.bits is not None}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and of its plan on which the bytes depend.

    Attributes:
        plan: the sharing plan.
        dense: the plan of the dense model: every pair leads, but layers that were trained with windows keep
            them.
        windows: for each layer, how many first and how many last tokens a pair with a window sees.
        groups: query heads per KV head.
        head_dim: numbers in a key or value of one head.
        element: bytes per number of weights, keys and values.
        weights: bytes of all parameters. Norms and biases are left out.
        read: bytes of the parameters that a step reads.
    """

    plan: SharingPlan
    dense: SharingPlan
    windows: tuple[tuple[int, int], ...]
    groups: int
    head_dim: int
    element: int
    weights: int
    read: int

    @classmethod
    def of(cls, config: Any, plan: SharingPlan, windows: tuple[int, int], element: int) -> "Sizes":
        """The sizes of a model under a plan.

        Args:
            config: an object with the sizes of a Llama, under the names that they have in `PodConfig`.
            windows: the plan's numbers of sink and of recent tokens.
            element: bytes per number.
        """
        own = getattr(config, "layer_windows", None) or [None] * config.num_hidden_layers
        heads, hidden, inner = config.num_key_value_heads, config.hidden_size, config.intermediate_size
        linear = 2 * hidden * config.head_dim * (config.num_attention_heads + heads)
        held_inner, read_inner = inner, inner
        if num_experts := getattr(config, "num_experts", 0):
            held_inner = num_experts * config.moe_intermediate_size
            read_inner = config.num_experts_per_tok * config.moe_intermediate_size
        table, layers = config.vocab_size * hidden, config.num_hidden_layers
        held = layers * (linear + 3 * hidden * held_inner) + table
        read = layers * (linear + 3 * hidden * read_inner) + table
        return cls(
            plan=plan,
            dense=spread_plan(own, heads, 0.0),
            windows=tuple(windows if window is None else (0, window) for window in own),
            groups=config.num_attention_heads // heads,
            head_dim=config.head_dim,
            element=element,
            weights=(held + (0 if config.tie_word_embeddings else table)) * element,
            read=read * element,
        )

    @property
    def native(self) -> int:
        """Bytes of a key or value as the model computes it."""
        return self.head_dim * self.element

    def layers(self, method: EvaluatedMethod, tokens: int) -> Iterator[tuple[Roles, int, float, float]]:
        """For every layer under a method: its roles, the tokens of a window, bytes of a key and of a value.

        The bytes are those of `token_bytes`, with `tokens` stored tokens.
        """
        plan = self.plan if uses_plan(method) else self.dense
        for layer, window in enumerate(self.windows):
            bits = codec_bits(method)
            if bits is None:
                bits = 16 if plan.bits is None else plan.bits[layer]
            yield roles_of(plan.lead, layer), sum(window), *self.token_bytes(method, bits, tokens)

    def token_bytes(self, method: EvaluatedMethod, bits: int, tokens: int) -> tuple[float, float]:
        """Mean bytes of one key and of one value among `tokens` stored tokens of one head.

        The mean is over packed tokens and the newest tokens, which stay native. A group of keys is
        `group_size` tokens of a channel. A group of values is `channel_group` channels of a token. Each group
        has a zero and a scale of 2 bytes each.
        """
        if bits == 16:
            return self.native, self.native
        group = method.options.get("group_size", GROUP_SIZE)
        of_plan = codec_bits(method) is None
        residual = method.options.get("residual", self.plan.residual if of_plan else RESIDUAL)
        tail = residual + (group - 1) / 2  # `residual` to `residual + group_size - 1` tokens are native
        share = min(1.0, tail / tokens)
        codes = self.head_dim * bits / 8
        key = codes + 4 * self.head_dim / group
        value = codes + 4 * self.head_dim / channel_group(self.head_dim, group)
        return share * self.native + (1 - share) * key, share * self.native + (1 - share) * value


def spread_plan(
    own_windows: Sequence[int | None], kv_heads: int, share_followers: float, share_windows: float = 0.0
) -> SharingPlan:
    """A made-up plan in which given shares of the (layer, KV head) pairs follow or keep their window.

    The shares are rounded to whole pairs. Every KV head gets the same number of windows and of leads (some
    heads get one more), and at least one lead unless all its pairs keep their window. The layers differ from
    head to head, so that layers mix roles as plans of real models do. The same arguments give the same plan.

    Args:
        own_windows: for each layer, the window in tokens that it was trained with; None = it sees every
            token. Layers that were trained with a window keep it, and their pairs are not counted.
    """
    free = [layer for layer, window in enumerate(own_windows) if window is None]
    pairs = len(free) * kv_heads
    draw = random.Random(0)
    windows = round(share_windows * pairs)
    leads = max(min(kv_heads, pairs - windows), pairs - windows - round(share_followers * pairs))
    plan: list[list[int | None]] = [[None] * kv_heads for _ in own_windows]
    for head in range(kv_heads):
        # The remainder of the division goes to the first heads as blocks, and to the last heads as windows.
        blocks = leads // kv_heads + int(head < leads % kv_heads)
        short = windows // kv_heads + int(kv_heads - head <= windows % kv_heads)
        held = sorted(draw.sample(free, len(free) - short)) if short else free
        cuts = {0, *draw.sample(range(1, len(held)), blocks - 1)} if held else set()
        lead = None
        for place, layer in enumerate(held):
            if place in cuts:
                lead = layer
            plan[layer][head] = lead
    return SharingPlan(lead=tuple(map(tuple, plan)))


def uses_plan(method: EvaluatedMethod) -> bool:
    """Whether the method runs on the model with the sharing plan."""
    return method.model != "dense"


def codec_bits(method: EvaluatedMethod) -> int | None:
    """Bits per number of the codec in the method's spec; None without a codec."""
    return next((_CODEC_BITS[part] for part in str(method.spec).split("+") if part in _CODEC_BITS), None)


def is_modelled(method: EvaluatedMethod) -> bool:
    """Whether this file knows the bytes that a step of the method reads.

    It does for full and pod, with or without a codec.
    """
    return all(part in ("full", "pod", *_CODEC_BITS) for part in str(method.spec).split("+"))


def read_per_row(sizes: Sizes, method: EvaluatedMethod, length: int) -> float:
    """Bytes of keys, values and logits that a step moves for one row of `length` tokens."""
    total, native = 0.0, sizes.native
    for roles, window, key, value in sizes.layers(method, length):
        near = min(length, window)
        logits = _LOGIT * sizes.groups * (length - near)
        skips = method.options.get("skip_share", 0) * len(roles.followers)
        total += len(roles.leads) * length * (key + value) + len(roles.followed) * logits
        total += (len(roles.followers) - skips) * (near * native + length * value + logits)
        total += skips * near * (native + value) + len(roles.windows) * 2 * near * native
    return total


def read_per_step(sizes: Sizes, method: EvaluatedMethod, length: int, batch: int) -> float:
    """Bytes that a step moves: the weights, and the cache of every row."""
    return sizes.read + batch * read_per_row(sizes, method, length)


def budget_at(sizes: Sizes, method: EvaluatedMethod, length: int) -> int:
    """How many of `length` tokens a method keeps, per KV head and layer.

    It is the method's budget. Without a budget, it is as many tokens as fill the bytes that the plan's cache
    holds.
    """
    if method.budget is not None:
        return method.budget.of_prompt(length)
    held = stored_per_row(sizes, POD, length)
    return max(1, min(length, int(held / (2 * sizes.plan.num_pairs * sizes.native))))


def stored_per_row(sizes: Sizes, method: EvaluatedMethod, capacity: int) -> float:
    """Bytes of keys and values in one row of `capacity` tokens, for a method that `is_modelled`."""
    total = 0.0
    for roles, window, key, value in sizes.layers(method, capacity):
        total += (len(roles.leads) * (key + value) + len(roles.followers) * value) * capacity
        total += (len(roles.followers) + 2 * len(roles.windows)) * window * sizes.native
    return total


def held_per_row(sizes: Sizes, method: EvaluatedMethod, capacity: int, on_cpu: bool = False) -> float:
    """Bytes of cache and decode buffers for one row of `capacity` tokens.

    A method that is not modelled counts with the bytes of the dense cache, which it holds while it reads a
    prompt. For the stock model, the layer that its cache copies in order to append is counted too.
    """
    native, heads = sizes.native, sizes.plan.num_key_value_heads
    if not is_modelled(method):
        pairs = sizes.plan.num_pairs + (2 * heads if method is STOCK else 0)
        return pairs * 2 * capacity * native
    stored = stored_per_row(sizes, method, capacity)
    if not any(roles.leads for roles, *_ in sizes.layers(method, capacity)):
        return stored
    logits = heads * sizes.groups * capacity * max(_LOGIT, sizes.element) * (2 if on_cpu else 1)
    return stored + logits


def needed(sizes: Sizes, method: EvaluatedMethod, batch: int, capacity: int, on_cpu: bool) -> float:
    """Bytes that a race needs: of the weights, the dense cache and the method's cache.

    Args:
        batch: rows.
        capacity: tokens per row.
    """
    caches = (held_per_row(sizes, one, capacity, on_cpu) for one in (FULL, method))
    return sizes.weights + batch * sum(caches)
