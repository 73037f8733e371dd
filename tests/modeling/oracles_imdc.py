"""Oracles of fm, im and imdc: the schedule in exact fractions (eqs. 1–9) and the chunked decoder. fp64.

Settled here, schedule (paper §3; all arithmetic exact: ``fractions.Fraction``, ``math.isqrt``;
never floats):

* ``m_max = budget``, ``c = chunk_size`` (largest mean chunk), prompt of ``P`` tokens, ``h`` tokens held
  before it (0 for a first prompt; where layers differ: the floor of their mean). ``h + P <= m_max``: one
  chunk, nothing compressed, ever.
* Otherwise ``n = ceil(P / c)`` chunks of mean ``c̄ = P / n`` (so eq. 5 gives exactly P). ``m_0 = max(m_max /
  n, min(h, m_max))``: the paper's m_max / n for a first prompt; a later prompt starts from the memory it
  finds (full memory: m_i = m_max throughout).
* Real-valued m_i from eq. 1 (linear), 8 (square), 9 (sqrt); n = 1: m_0 := m_max. fm: m_i = m_max for all i.
  Each m_i is rounded to the nearest integer, halves up: ``floor(m_i + 1/2)``, at least 1. From here on m_i is
  the rounded one. square-sqrt: square in layers ``l < L // 2``, sqrt in the others. ``m_{n-1} = m_max``
  always.
* fm and im: every chunk is c̄. imdc: ``c_0 = c̄``, ``c_i = c̄ + m̂ - m_{i-1}``, m̂ = mean(m_0 … m_{n-2}),
  with the *rounded* m (layer mean, a Fraction, where layers differ). Any real c_i < 1: ``ValueError`` before
  anything of this prompt is fed. Chunk i ends at token ``floor(c_0 + … + c_i + 1/2)``; the last one at P.
* The schedule depends on P, h, c, m_max, L alone, never on how forward passes cut the prompt. It needs P: an
  announced prompt (``begin_prompt``) or a pass of several tokens, which is a prompt of its own.

Settled here, steps:

* Step i attends causally to memory + chunk i, in every layer and head. Then memory + chunk is compressed to
  ``min(m_i, what is there)`` in each layer (``clamp to what exists``: an early memory may be smaller than the
  schedule says; chunks still follow the schedule). The last chunk is compressed too, to m_{n-1} = m_max.
  Decoded tokens are appended; nothing is compressed until the next prompt.
* Positions: in each layer its own slots 0 … (memory in order of age, then the chunk, then decoded tokens):
  keys and query are rotated at their slot, so layers with different memories use different positions. Keys
  are stored before RoPE. Uncompressed: natural.
* Pruner snapkv (window, kernel, pool; capacity m = min(m_i, there); the rule of snapkv in oracles_ranked.py
  with budget m and the chunk as the prompt): o = min(window, tokens of the chunk). The attention (softmax
  over memory + chunk, causal, rotated as above) of the last o queries, summed over queries, averaged over the
  group's query heads, pooled over the slots before the last o only (zero padding, avg divides by kernel).
  Kept: the best m - o of these (ties: lower slot) and the last o; if m <= o: the last m. m = there:
  everything.
* Pruner streamingllm (num_sink_tokens = 4): the first min(num_sink_tokens, m) slots of memory + chunk and the
  last m - that.
* update = False (appendix B.4, Incremental Fixed Memory): what was memory before a step stays, whatever m_i
  is; of the chunk alone the pruner keeps m_i - memory slots (all if there are no more, none if the memory has
  m_i or more): snapkv ranks the chunk's slots by the same pooled scores, and takes the chunk's last slots if
  no more than o fit; streamingllm takes the chunk's first num_sink_tokens and its last.
* fm ignores the growth function. adaptive (im and imdc; per row): chunks are those of linear, as is m_i for i
  = 0 and 1, and whenever all ratios are 0. For i >= 2 a layer's ratio is ``p = kept slots of step i-1 that
  were memory before that step / kept slots``, counts summed over its KV heads (eq. 2 for step i-1). Total ``T
  = L·m_i`` (linear, rounded). Real sizes ``x_l = clip(λ·p_l, lo_l, a_l)`` with the λ that makes them sum to
  T, ``a_l`` = tokens there, ``lo_l = min(m_0, a_l)``; if they cannot reach T (ratios of 0 stay at lo) every
  layer with p > 0 gets a_l and the rest of T is unused; if ``T >= Σ a_l`` all stay. Integers: floor, then + 1
  to the largest fractions (lower layer first) until the sum is floor(Σ x).
"""

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

import torch
from oracle_tools import NaiveDecoder


@dataclass
class Schedule:
    """``widths[i]`` tokens in chunk i; ``sizes[i][l]`` tokens of memory that layer l should have after it."""

    widths: list[int]
    sizes: list[list[int]]


def half_up(x):
    return math.floor(x + Fraction(1, 2))


def grown(growth, i, n, start, end):
    """Memory after step i of n, rounded: eqs. 1, 8, 9 with ``m_0 = start`` and ``m_max = end``."""
    if n == 1:
        return half_up(end)
    if growth == "linear":
        return half_up((end - start) * i / Fraction(n - 1) + start)
    if growth == "square":
        return half_up((end - start) * i**2 / Fraction((n - 1) ** 2) + start)
    assert growth == "sqrt"
    root = math.isqrt(i * (n - 1))
    if root * root == i * (n - 1):  # sqrt(i) / sqrt(n - 1) = sqrt(i (n - 1)) / (n - 1) is rational
        return half_up((end - start) * Fraction(root, n - 1) + start)
    with localcontext() as context:
        context.prec = 80
        share = Decimal(i).sqrt() / Decimal(n - 1).sqrt()
        slope, first = (Decimal(x.numerator) / Decimal(x.denominator) for x in (end - start, start))
        return math.floor(slope * share + first + Decimal("0.5"))


def memory_sizes(mode, growth, n, budget, num_layers, held=0):
    """``[n][L]`` memory after every step, for the nominal schedule (adaptive: its linear base)."""
    start, end = max(Fraction(budget, n), Fraction(min(held, budget))), Fraction(budget)
    rows = []
    for i in range(n):
        row = []
        for layer in range(num_layers):
            kind = "linear" if growth == "adaptive" else growth
            if kind == "square-sqrt":
                kind = "square" if layer < num_layers // 2 else "sqrt"
            row.append(budget if mode == "fm" else max(1, grown(kind, i, n, start, end)))
        rows.append(row)
    return rows


def real_chunks(mode, prompt, n, sizes):
    """c_0 … c_{n-1} as fractions: eq. 7 for imdc."""
    mean = Fraction(prompt, n)
    if mode != "imdc" or n == 1:
        return [mean] * n
    memory = [Fraction(sum(row), len(row)) for row in sizes]
    average = sum(memory[: n - 1]) / (n - 1)
    return [mean] + [mean + average - memory[i - 1] for i in range(1, n)]


def make_schedule(mode, growth, prompt, chunk_size, budget, num_layers, held=0):
    """The schedule of one prompt, None if nothing is compressed.

    ValueError if a chunk would have less than a token.
    """
    if held + prompt <= budget:
        return None
    n = math.ceil(Fraction(prompt, chunk_size))
    sizes = memory_sizes(mode, growth, n, budget, num_layers, held)
    chunks = real_chunks(mode, prompt, n, sizes)
    if min(chunks) < 1:
        raise ValueError("a chunk has less than one token")
    ends, total = [], Fraction(0)
    for chunk in chunks:
        total += chunk
        ends.append(half_up(total))
    return Schedule([b - a for a, b in zip([0, *ends], ends, strict=False)], sizes)


def adaptive_sizes(total, lowest, ratios, there):
    """Sizes of the layers: ``clip(λ p_l, min(lowest, a_l), a_l)``, as integers.

    They add up to ``total`` tokens.

    Args:
        total, lowest: L·m_i and m_0 (tokens).
        ratios: p_l as fractions.
        there: a_l, tokens that each layer has.
    """
    if total >= sum(there):
        return list(there)
    low = [min(lowest, a) for a in there]

    def at(scale):
        pairs = zip(low, ratios, there, strict=True)
        return [min(Fraction(a), max(Fraction(b), scale * p)) for b, p, a in pairs]

    steps = {Fraction(x) / p for p, b, a in zip(ratios, low, there, strict=True) if p > 0 for x in (b, a)}
    below, sizes = Fraction(0), None
    for step in sorted(steps):
        if sum(at(step)) >= total:
            f0, f1 = sum(at(below)), sum(at(step))  # linear in between
            scale = step if f1 == f0 else below + (step - below) * (total - f0) / (f1 - f0)
            sizes = at(scale)
            break
        below = step
    if sizes is None:
        sizes = at(below)
    whole = [math.floor(x) for x in sizes]
    order = sorted(range(len(sizes)), key=lambda j: (-(sizes[j] - whole[j]), j))
    for j in order[: math.floor(sum(sizes)) - sum(whole)]:
        whole[j] += 1
    return whole


class Chunked(NaiveDecoder):
    """fm, im and imdc; entries are kept un-rotated and turned at their slot."""

    def setup(
        self,
        budget,
        chunk_size,
        mode="imdc",
        growth="linear",
        pruner="snapkv",
        window=32,
        kernel=5,
        pool="avg",
        num_sink_tokens=4,
        update=True,
    ):
        self.update = update
        self.budget, self.chunk_size, self.mode, self.growth = budget, chunk_size, mode, growth
        self.pruner, self.window, self.kernel, self.pool = pruner, window, kernel, pool
        self.sinks = num_sink_tokens
        self.schedule, self.step, self.capacity = None, 0, []
        self.peak = 0  # most memory + chunk tokens that any layer attended to
        self.log = []  # (chunk width, memory after it per layer)

    def chunks(self, length):
        there = [len(layer[0]) for layer in self.entries]
        self.schedule = make_schedule(
            self.mode,
            self.growth,
            length,
            self.chunk_size,
            self.budget,
            self.num_layers,
            sum(there) // len(there),
        )
        self.step, self.ratios = 0, [Fraction(0)] * self.num_layers
        return self.schedule.widths if self.schedule else [length]

    def feed(self, ids, is_decode):
        self.kept_old, self.kept = [0] * self.num_layers, [0] * self.num_layers
        if not is_decode and self.schedule:
            there = [len(layer[0]) + ids.shape[0] for layer in self.entries]
            self.peak = max(self.peak, *there)
            wanted = self.schedule.sizes[self.step]
            if self.growth == "adaptive" and self.mode != "fm" and self.step >= 2 and sum(self.ratios) > 0:
                wanted = adaptive_sizes(
                    self.num_layers * wanted[0], self.schedule.sizes[0][0], self.ratios, there
                )
            self.capacity = [min(w, a) for w, a in zip(wanted, there, strict=True)]
        return super().feed(ids, is_decode)

    def weights(self, layer, head, q, entries):
        slots = list(range(len(entries)))
        q = self.turn(q, slots[len(slots) - self.num_new :])
        keys = self.turn(torch.stack([entry.k_raw for entry in entries]), slots)
        logits = q @ keys.T / math.sqrt(self.head_dim)
        return logits.masked_fill(~self.causal(len(entries)), -math.inf).softmax(-1)

    def after_prompt(self, layer, head, weights):
        if not self.schedule:
            return
        entries, m = self.entries[layer][head], self.capacity[layer]
        old = len(entries) - self.num_new
        if not self.update:  # appendix B.4
            kept = self.of_chunk(weights, old, max(m - old, 0))
            self.kept[layer] += old + len(kept)
            self.kept_old[layer] += old
            self.entries[layer][head] = entries[:old] + [entries[old + slot] for slot in kept]
            return
        if m == len(entries):
            slots = list(range(m))
        elif self.pruner == "streamingllm":
            first = min(self.sinks, m)
            slots = list(range(first)) + list(range(len(entries) - (m - first), len(entries)))
        else:
            slots = snap(weights, m, min(self.window, self.num_new), self.kernel, self.pool)
        self.kept[layer] += len(slots)
        self.kept_old[layer] += sum(slot < old for slot in slots)
        self.entries[layer][head] = [entries[slot] for slot in slots]

    def of_chunk(self, weights, old, room):
        """Slots of the chunk to keep, counted from its first.

        Neighbours of its first in the memory are pooled with it.
        """
        length = weights.shape[2] - old
        if room >= length:
            return list(range(length))
        if self.pruner == "streamingllm":
            first = min(self.sinks, room)
            return [*range(first), *range(length - room + first, length)]
        window = min(self.window, self.num_new)
        if room <= window:
            return list(range(length - room, length))
        votes = weights[:, -window:].sum(1).mean(0)[: old + length - window].tolist()

        def pooled(j):
            around = votes[max(0, old + j - self.kernel // 2) : old + j + self.kernel // 2 + 1]
            return sum(around) / self.kernel if self.pool == "avg" else max(around)

        best = sorted(range(length - window), key=lambda j: (-pooled(j), j))[: room - window]
        return [*sorted(best), *range(length - window, length)]

    def after_layers(self):
        if not self.is_decode and self.schedule:
            self.ratios = [Fraction(a, b) for a, b in zip(self.kept_old, self.kept, strict=True)]
            self.log.append((self.num_new, [len(layer[0]) for layer in self.entries]))
            self.step += 1


def snap(weights, capacity, window, kernel, pool):
    """SnapKV's kept slots: ``weights`` ``[G, m, held]`` softmax rows; the last ``window`` queries vote."""
    held = weights.shape[2]
    if capacity <= window:
        return list(range(held - capacity, held))
    votes = weights[:, -window:].sum(1).mean(0)[: held - window].tolist()
    scores = []
    for j in range(len(votes)):
        around = votes[max(0, j - kernel // 2) : j + kernel // 2 + 1]
        scores.append(sum(around) / kernel if pool == "avg" else max(around))
    best = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: capacity - window]
    return sorted(best) + list(range(held - window, held))
