"""IMDC (Zeng et al., "Memorize Step by Step"): read a prompt in chunks, and compress each into a memory.

A chunk attends to the memory and to itself. Then a pruner compresses both into the next memory, which has
``m_i`` tokens in each layer after chunk ``i`` of ``n``. So inputs may be unbounded. There are three variants:

- ``fm`` has ``m_i = budget`` throughout.
- ``im`` lets the memory grow up to the budget (eqs. 1, 8, 9).
- ``imdc`` also shrinks the chunks as the memory grows (eqs. 5 to 7). Then chunk ``i`` attends to
  ``c_i + m_{i-1}`` tokens, which is the same number for all chunks.

Without ``update``, no token leaves the memory, and the tokens of each chunk that the pruner keeps are
appended to it (the fixed memory of appendix B.4). Decoded tokens are appended. The next prompt starts with
all tokens held as its memory. Keys are stored before RoPE and rotated at their slots, so that in every pass
positions are counted anew over memory, chunk and decoded tokens.

Sizes are exact fractions until they are rounded (halves up), so that a schedule is the same on every machine.
The appendix says that SQRT starts slowly and SQUARE quickly. Its equations, which are computed here, and its
next sentence say the opposite (SQUARE <= LINEAR <= SQRT).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pod.modeling.methods.base import Builder, Request, round_half_up
from pod.modeling.methods.ranking import EndAttention, LastQueries, best_slots
from pod.modeling.methods.sliding import Pair
from pod.modeling.model.attend import Tokens, attend
from pod.modeling.model.cache import PodCache
from pod.modeling.model.config import PodConfig
from pod.modeling.model.rows import GroupedCache, Schedule
from pod.modeling.model.step import CacheLayer, Step

LARGEST_RATIO = {"linear": 2.0, "sqrt": 3.0, "square": 1.5, "square-sqrt": 2.0, "adaptive": 2.0}
"""For each ``function``, the ratio ``m_max / c`` above which the last chunks of a very long prompt would be
empty with the variant ``imdc``."""


@dataclass(frozen=True)
class Settings:
    """All that a schedule depends on, apart from the prompt.

    Attributes:
        variant: ``fm``, ``im`` or ``imdc``.
        function: how the memory grows, a key of ``LARGEST_RATIO``; it has no effect for ``fm``. ``adaptive``
            plans like ``linear``, then distributes the total among layers (eq. 3).
        m_max: largest memory, in tokens: the budget.
        chunk_size: largest mean size ``c`` of chunks, in tokens.
        num_layers: number of decoder layers.
    """

    variant: str
    function: str
    m_max: int
    chunk_size: int
    num_layers: int

    def start_prompt(self, length: int, past: int, layers: list) -> "Schedule":
        """See ``FixedChunks.start_prompt``. Here the schedule depends on the tokens that are held already."""
        return prompt_schedule(self, length, sum(layer.held for layer in layers) // len(layers))

    def check_prompt(self, length: int) -> None:
        """See ``FixedChunks.check_prompt``: a chunk of the schedule may have less than one token."""
        prompt_schedule(self, length)


@lru_cache(maxsize=64)
def prompt_schedule(settings: Settings, length: int, held: int = 0) -> Schedule:
    """The schedule of a prompt of ``length`` tokens when ``held`` tokens are held before it.

    There are ``n = ceil(length / chunk_size)`` chunks of mean size ``length / n``. After the first chunk, the
    memory has ``m_max / n`` tokens, or ``held`` tokens if these are more, but at most ``m_max``. A prompt
    that fits into ``m_max`` together with the tokens held is one chunk and stays uncompressed.

    Raises:
        ValueError: a decremental chunk would have less than one token.
    """
    if held + length <= settings.m_max:
        return Schedule((length,), None)
    num_chunks = -(-length // settings.chunk_size)
    mean_chunk = Fraction(length, num_chunks)
    first = max(Fraction(settings.m_max, num_chunks), Fraction(min(held, settings.m_max)))
    memory = tuple(
        memory_curve(growth_of_layer(settings, layer), settings.m_max, num_chunks, first)
        for layer in range(settings.num_layers)
    )
    chunks = [mean_chunk] * num_chunks
    if settings.variant == "imdc":
        layer_mean = [Fraction(sum(sizes), settings.num_layers) for sizes in zip(*memory, strict=True)]
        chunks = decremental_chunks(mean_chunk, layer_mean)
        _check_chunks(settings, chunks)
    boundaries = tuple(round_half_up(total) for total in accumulate(chunks))
    assert boundaries[-1] == length, "chunks add up to the prompt"
    return Schedule(boundaries, memory)


def growth_of_layer(settings: Settings, layer_idx: int) -> str:
    """The curve by which the memory of a layer grows.

    ``square-sqrt`` is ``square`` in the lower half of the layers and ``sqrt`` above. ``fm`` is ``fixed``.
    """
    if settings.variant == "fm":
        return "fixed"
    if settings.function == "square-sqrt":
        return "square" if layer_idx < settings.num_layers // 2 else "sqrt"
    return "linear" if settings.function == "adaptive" else settings.function


@lru_cache(maxsize=64)
def memory_curve(growth: str, m_max: int, num_chunks: int, first: Fraction | None = None) -> tuple[int, ...]:
    """The sizes of a memory after each chunk, ``m_0 … m_{n-1}``, in tokens and at least 1.

    The last size is ``m_max``, also with a single chunk.

    Args:
        growth: ``linear`` (eq. 1), ``square`` (eq. 8), ``sqrt`` (eq. 9) or ``fixed``.
        m_max: largest memory, in tokens.
        num_chunks: ``n``.
        first: ``m_0``; None = ``m_max / n``.
    """
    first = Fraction(m_max, num_chunks) if first is None else first
    if growth == "fixed" or num_chunks == 1:
        return (m_max,) * num_chunks
    sizes = []
    for i in range(num_chunks):
        share = Fraction(i, num_chunks - 1)
        if growth == "sqrt":
            size = _rounded_root((m_max - first) ** 2 * share, first)
        else:
            size = round_half_up((m_max - first) * (share if growth == "linear" else share**2) + first)
        sizes.append(max(size, 1))
    return tuple(sizes)


def decremental_chunks(chunk_size: int | Fraction, memory: Sequence[int | Fraction]) -> list[Fraction]:
    """The sizes of chunks that shrink, in tokens: ``c_0 = c`` and ``c_i = c + m̂ - m_{i-1}`` (eq. 7).

    ``m̂`` is the mean of ``m_0 … m_{n-2}``, the memories before each chunk but the first (eq. 4). The sizes
    add up to ``n·c`` (eq. 5).

    Args:
        chunk_size: ``c``.
        memory: ``m_0 … m_{n-1}``.
    """
    found = memory[:-1]
    mean = Fraction(sum(found), max(1, len(found)))
    return [Fraction(chunk_size), *(chunk_size + mean - m for m in found)]


def share_by_retention(
    total: int, ratios: Sequence[Fraction], there: Sequence[int], lowest: int
) -> tuple[int, ...]:
    """The memory of each layer in tokens, in proportion to its retention ratio (eq. 3), within bounds.

    The sizes are ``clip(λ·p_l, lo_l, a_l)``, with the ``λ`` at which they add up to ``total``. So if a layer
    has fewer tokens than its share, the others get the difference. Layers that retained nothing get ``lo_l``,
    even if then the sizes add up to less than ``total``.

    Args:
        total: tokens of all layers together.
        ratios: ``p_l``, not all 0.
        there: ``a_l``, the tokens of each layer before it is compressed.
        lowest: gives ``lo_l = min(lowest, a_l)``.
    """
    if total >= sum(there):
        return tuple(there)
    layers = [(p, Fraction(min(lowest, most)), Fraction(most)) for p, most in zip(ratios, there, strict=True)]

    def sizes(factor: Fraction) -> list[Fraction]:
        return [min(max(factor * p, low), most) for p, low, most in layers]

    # the sum of the sizes is a function of λ that is linear between its bends
    bends = sorted({Fraction(0), *(bound / p for p, *bounds in layers if p for bound in bounds)})
    fitting = sum(sum(sizes(bend)) <= total for bend in bends)
    level = bends[max(0, fitting - 1)]
    if 0 < fitting < len(bends):
        start = sum(sizes(level))
        stop = sum(sizes(bends[fitting]))
        level += (bends[fitting] - level) * (total - start) / (stop - start)
    return _whole(sizes(level))


def _whole(sizes: Sequence[Fraction]) -> tuple[int, ...]:
    """Round sizes to integers whose sum is the floor of the sum of ``sizes``.

    Each size is rounded down. Then those with the largest fractions get one more, in a tie the lower layer.
    """
    floors = [math.floor(size) for size in sizes]
    missing = math.floor(sum(sizes)) - sum(floors)
    order = sorted(range(len(sizes)), key=lambda layer: (floors[layer] - sizes[layer], layer))
    for layer in order[:missing]:
        floors[layer] += 1
    return tuple(floors)


def _rounded_root(square: Fraction, offset: Fraction) -> int:
    """``sqrt(square) + offset`` rounded to the nearest integer, halves up, without floating point."""
    shift = offset + Fraction(1, 2)
    root = math.isqrt(square.numerator * square.denominator * shift.denominator**2)
    return (root + shift.numerator * square.denominator) // (square.denominator * shift.denominator)


def _check_chunks(settings: Settings, chunks: Sequence[Fraction]) -> None:
    """Refuse a schedule in which a chunk has less than one token (``ValueError``)."""
    smallest = min(chunks)
    if smallest < 1:
        limits = ", ".join(f"{name} {ratio:g}" for name, ratio in LARGEST_RATIO.items())
        raise ValueError(
            f"imdc: with budget = {settings.m_max} and chunk_size = {settings.chunk_size}, "
            f"chunk {chunks.index(smallest) + 1} of {len(chunks)} would have {float(smallest):g} tokens; "
            f"for long prompts budget / chunk_size must stay below {limits}: "
            "raise chunk_size, lower budget, or use 'im', whose chunks do not shrink"
        )


class MemoryLayer(CacheLayer):
    """Memory, current chunk and decoded tokens of one layer, for rows of equal length.

    Keys are held before RoPE. Slots are in the order of positions, the oldest token first.

    Attributes:
        ranks: whether the pruner is SnapKV; else it is StreamingLLM.
        held: slots in use.
        memory: how many slots were in use before the current chunk. These are the first ones.
        retention: the share of the memory that was already memory before the last compression (eq. 2), over
            all KV heads.
        queries: the last queries of the current chunk, for the pruner.
        rotated: the rotated keys, from the end of a chunk to its compression; else None.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        super().__init__()
        params, ranks = request.params, request.inner == "snapkv"
        self.layer_idx, self.quantizer = layer_idx, request.quantizer
        self.adaptive = params.get("function") == "adaptive"
        self.updates = params.get("update", True)
        self.num_sink_tokens = params["num_sink_tokens"]
        self.observer = lambda: EndAttention(config, layer_idx, request) if ranks else LastQueries(1)
        self.ranks = ranks
        self.clear()

    def clear(self) -> None:
        self.tokens = Pair.of(self.quantizer, evicts=True)
        self.held = self.memory = 0
        self.retention = Fraction(0)
        self.queries = self.observer()  # of the running chunk
        self.rotated: Tensor | None = None  # rotated keys, from the end of a chunk to its compression

    def kv_buffers(self) -> dict[str, Any]:
        return self.tokens._asdict() | {"bookkeeping": self.queries}

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        before = self.held
        self.tokens.append(Tokens(k, v), before)
        self.held += step.num_new
        q = step.ropes[self.layer_idx].turn(q, range(before, self.held))
        keys, values = self.tokens.read(self.held)
        keys = step.ropes[self.layer_idx].turn(keys, range(self.held))
        if step.is_decode:
            self.memory = self.held
        else:
            self.queries.observe(q, step)
            self.rotated = keys if step.ends_prompt else None
        return attend(q, Tokens(keys, values), backend=step.chunk_backend)[0]

    @property
    def num_fixed(self) -> int:
        """How many of the first slots no compression drops: the memory without ``update``, else none."""
        return 0 if self.updates else self.memory

    # -- compression -----------------------------------------------------------------------------------------

    def flush(self, step: Step) -> None:
        keys, self.rotated = self.rotated, None
        if step.ends_prompt:
            if step.schedule.memory is not None and self.queries.observed is not None:
                size = max(self._next_size(step.schedule, step), self.num_fixed)
                if size < self.held:
                    assert keys is not None, "a chunk ends with a token"
                    self._keep(self.choose(keys, size, step))
                else:
                    self.retention = Fraction(self.memory, self.held)
            self.queries, self.memory = self.observer(), self.held
        if step.ends_prompt or step.is_decode:
            self.tokens.flush(self.held)

    def _next_size(self, schedule: Schedule, step: Step) -> int:
        """How many tokens to keep after this chunk: as planned, or its share (``adaptive``, eq. 3)."""
        assert schedule.memory is not None
        planned = schedule.memory[self.layer_idx][step.chunk_index]
        if not self.adaptive or step.chunk_index < 2:
            return planned
        if step.sizes is None:  # the first layer to get here decides for all, from their last retention
            ratios = [layer.retention for layer in step.layers]
            there = [layer.memory + self.held - self.memory for layer in step.layers]
            total = planned * len(there)
            lowest = schedule.memory[0][0]
            equal = [planned] * len(there)
            step.sizes = share_by_retention(total, ratios, there, lowest) if any(ratios) else equal
        return step.sizes[self.layer_idx]

    def _keep(self, index: Tensor) -> None:
        """Keep only the slots ``index`` ``[B, H, m]``, and compute the retention."""
        if self.adaptive:  # then each row has layers of its own
            self.retention = Fraction(int((index < self.memory).sum()), index.numel())
        self.tokens.keep(index, self.held)
        self.held = index.shape[2]

    def choose(self, keys: Tensor, size: int, step: Step) -> Tensor:
        """The slots ``[B, H, size]`` to keep, ascending: the first ``num_fixed``, then the pruner's choice.

        StreamingLLM keeps the first and the last of the other slots. SnapKV keeps those with the best scores,
        with the end of the chunk as observation window. If no more than that window fits, it keeps the last
        slots.

        Args:
            keys: all keys ``[B, H, held, d]``, each rotated at its slot.
            size: how many slots to keep.
            step: the pass that ends the chunk.
        """
        assert self.queries.observed is not None
        fixed, n = self.num_fixed, keys.shape[2]
        if self.ranks and size - fixed > self.queries.observed.shape[2]:
            scores = self.queries.scores(keys, keys, step)
            scores[..., :fixed] = torch.inf
            return best_slots(scores, size)
        slots = torch.arange(n, device=keys.device)
        first = fixed if self.ranks else min(fixed + self.num_sink_tokens, size)
        return torch.cat((slots[:first], slots[n - size + first :])).expand(*keys.shape[:2], -1)


def _build(variant: str, config: PodConfig, request: Request) -> PodCache:
    params = request.params
    MemoryLayer(config, 0, request)  # made only because this checks the request
    function = params.get("function", "linear")  # fm has no such parameter
    settings = Settings(variant, function, request.budget, params["chunk_size"], config.num_hidden_layers)
    make_layer = partial(MemoryLayer, request=request)
    rowwise = function == "adaptive"
    return GroupedCache(config, make_layer, request.spec, rowwise, chunks=settings)


BUILDERS = {variant: Builder(build=partial(_build, variant)) for variant in ("imdc", "im", "fm")}
