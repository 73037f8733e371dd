"""Schedules of IMDC (Zeng et al., "Memorize Step by Step"): memory sizes, chunk sizes, and what they promise.

A prompt is read in ``n`` chunks. After chunk ``i`` each layer keeps ``m_i`` tokens, so that chunk ``i`` attends over
``c_i + m_{i-1}`` of them. FM keeps ``m_i = m_max``; IM lets the memory grow (eqs. 1, 8, 9); IMDC also lets the chunks
shrink (eqs. 5 to 7), which makes ``c_i + m_{i-1}`` constant. Sizes are tokens per KV head and layer, in exact fractions
until they are rounded (halves up), so that a schedule is the same everywhere.

The appendix says that SQRT starts slowly and SQUARE quickly; its equations and its next sentence say the opposite
(SQUARE <= LINEAR <= SQRT everywhere), and the equations are what is computed here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from pod.modeling.methods.base import round_half_up
from pod.modeling.shipped.rows import Schedule

FUNCTIONS = ("linear", "sqrt", "square", "square-sqrt", "adaptive")
"""How a memory may grow. ``adaptive`` plans as ``linear`` and then shares the total among the layers (eq. 3)."""

LARGEST_RATIO = {"linear": 2.0, "sqrt": 3.0, "square": 1.5, "square-sqrt": 2.0, "adaptive": 2.0}
"""``m_max / c`` above which the last decremental chunks of a prompt of very many chunks would be empty."""


@dataclass(frozen=True)
class Settings:
    """What a schedule depends on, the prompt apart.

    Attributes:
        variant: ``fm``, ``im`` or ``imdc``.
        function: one of ``FUNCTIONS``; without effect for ``fm``.
        m_max: largest memory (tokens); chunk_size: largest mean chunk ``c`` (tokens).
        num_layers: decoder layers.
    """

    variant: str
    function: str
    m_max: int
    chunk_size: int
    num_layers: int

    def start_prompt(self, length: int, past: int, layers: list) -> "Schedule":
        """The schedule of a prompt from what the layers hold when it starts, see ``Chunks``."""
        return prompt_schedule(self, length, sum(layer.held for layer in layers) // len(layers))


@lru_cache(maxsize=64)
def prompt_schedule(settings: Settings, length: int, held: int = 0) -> Schedule:
    """The schedule of a prompt of ``length`` tokens when ``held`` tokens are held before it.

    ``n = ceil(length / chunk_size)`` chunks of mean size ``length / n``. The memory starts at ``m_max / n``, or at what
    is held. What fits into ``m_max`` is one chunk and stays uncompressed.

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
    """The curve of a layer: ``square`` in the lower half and ``sqrt`` above for ``square-sqrt``; ``fixed`` for FM."""
    if settings.variant == "fm":
        return "fixed"
    if settings.function == "square-sqrt":
        return "square" if layer_idx < settings.num_layers // 2 else "sqrt"
    return "linear" if settings.function == "adaptive" else settings.function


@lru_cache(maxsize=64)
def memory_curve(growth: str, m_max: int, num_chunks: int, first: Fraction | None = None) -> tuple[int, ...]:
    """``m_0 … m_{n-1}`` in tokens, at least 1: ``linear`` (eq. 1), ``square`` (eq. 8), ``sqrt`` (eq. 9) or ``fixed``.

    ``first`` is ``m_0``, ``m_max / n`` when None; a single chunk goes to ``m_max`` at once.
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
    """``c_0 = c`` and ``c_i = c + m̂ - m_{i-1}`` (eq. 7) in tokens, with the mean ``m̂`` of ``m_0 … m_{n-2}``, the memory that chunks
    find (eq. 4); they add up to ``n·c`` (eq. 5)."""
    found = memory[:-1]
    return [
        Fraction(chunk_size),
        *(chunk_size + Fraction(sum(found), len(found)) - before for before in found),
    ]


def share_by_retention(
    total: int, ratios: Sequence[Fraction], there: Sequence[int], lowest: int
) -> tuple[int, ...]:
    """Memory of each layer in proportion to its retention ratio (eq. 3), within what the layer has.

    The sizes are ``clip(λ·p_l, lo_l, a_l)`` with the ``λ`` at which they add up to ``total``; a layer that cannot take
    its share leaves it to the others. Layers that retained nothing stay at ``lo_l``, even if that leaves tokens unused.

    Args:
        total: tokens of all layers together; ratios: ``p_l``, not all 0; there: ``a_l``, tokens of each layer before it
            is compressed; lowest: ``lo_l = min(lowest, a_l)``.
    """
    if total >= sum(there):
        return tuple(there)
    layers = [(p, Fraction(min(lowest, most)), Fraction(most)) for p, most in zip(ratios, there, strict=True)]

    def sizes(factor: Fraction) -> list[Fraction]:
        return [min(max(factor * p, low), most) for p, low, most in layers]

    # their sum is piecewise linear in λ between its bends
    bends = sorted({Fraction(0), *(bound / p for p, *bounds in layers if p for bound in bounds)})
    fitting = sum(sum(sizes(bend)) <= total for bend in bends)
    level = bends[max(0, fitting - 1)]
    if 0 < fitting < len(bends):
        start, stop = sum(sizes(level)), sum(sizes(bends[fitting]))
        level += (bends[fitting] - level) * (total - start) / (stop - start)
    return _whole(sizes(level))


def _whole(sizes: Sequence[Fraction]) -> tuple[int, ...]:
    """Integers with the floor of the sum: floors, then one more for the largest fractions, lower layers first."""
    floors = [math.floor(size) for size in sizes]
    missing = math.floor(sum(sizes)) - sum(floors)
    order = sorted(range(len(sizes)), key=lambda layer: (floors[layer] - sizes[layer], layer))
    for layer in order[:missing]:
        floors[layer] += 1
    return tuple(floors)


def _rounded_root(square: Fraction, offset: Fraction) -> int:
    """``sqrt(square) + offset`` to the nearest integer, halves up, without floating point."""
    shift = offset + Fraction(1, 2)
    root = math.isqrt(square.numerator * square.denominator * shift.denominator**2)
    return (root + shift.numerator * square.denominator) // (square.denominator * shift.denominator)


def _check_chunks(settings: Settings, chunks: Sequence[Fraction]) -> None:
    smallest = min(chunks)
    if smallest < 1:
        limits = ", ".join(f"{name} {ratio:g}" for name, ratio in LARGEST_RATIO.items())
        raise ValueError(
            f"imdc: with budget = {settings.m_max} and chunk_size = {settings.chunk_size}, chunk {chunks.index(smallest) + 1} "
            f"of {len(chunks)} would have {float(smallest):g} tokens; for long prompts budget / chunk_size must stay below "
            f"{limits}: raise chunk_size, lower budget, or use 'im', whose chunks do not shrink"
        )
