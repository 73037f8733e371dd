"""Oracle of packed keys and values: a quantizer of Python loops over a sorted list of all fp16 numbers.

It computes in fp64.

Settled here (after KIVI, Liu et al. 2024):

* A group of numbers is clamped to ±65504; zero = the largest fp16 number <= its minimum; scale = the smallest
  fp16 number >= (maximum - zero) / (2^bits - 1); code = round half even((x - zero) / scale), at most 2^bits -
  1; read as zero + code·scale.
* Of n tokens held, the first P(n) = floor((n - residual) / g)·g rest packed. Packing happens when a prompt
  ends and after every decoded token; in between, new tokens are as they came. What is packed is never packed
  again.
* Values: groups of g channels of one token (of all channels when there are fewer). Keys: the same where
  tokens are evicted; otherwise groups of g tokens of one channel, tokens 0..g-1, g..2g-1, …
* A window never packs its sinks: it packs n_s + P(n - n_s) tokens less the sinks, in groups counted from the
  last sink on. With n_r <= residual + g it packs nothing.
"""

import bisect
import math
import struct
from typing import ClassVar

import torch
from oracle_tools import NaiveDecoder
from oracles_pod_selected import PodSelected
from oracles_ranked import H2O, SnapKV
from oracles_windows import StreamingLLM

HALVES = sorted(
    x for bits in range(1 << 16) if math.isfinite(x := struct.unpack("<e", struct.pack("<H", bits))[0])
)


def naive_group(numbers, bits):
    """What a group of floats reads as once packed, and its scale."""
    numbers = [min(max(x, -65504.0), 65504.0) for x in numbers]
    levels = (1 << bits) - 1
    zero = HALVES[bisect.bisect_right(HALVES, min(numbers)) - 1]
    scale = HALVES[bisect.bisect_left(HALVES, (max(numbers) - zero) / levels)]
    codes = [min(levels, round((x - zero) / scale)) if scale else 0 for x in numbers]
    return [zero + code * scale for code in codes], scale


def naive_token(x, bits, group_size):
    """``[d]`` packed per token."""
    numbers = x.double().tolist()
    divisors = [size for size in range(1, len(numbers) + 1) if len(numbers) % size == 0]
    size = min(divisors, key=lambda size: max(size / group_size, group_size / size))
    groups = [naive_group(numbers[i : i + size], bits)[0] for i in range(0, len(numbers), size)]
    return torch.tensor([x for group in groups for x in group], dtype=torch.float64)


def naive_channels(block, bits):
    """``[g, d]`` tokens packed per channel."""
    columns = [naive_group(block[:, c].double().tolist(), bits)[0] for c in range(block.shape[1])]
    return torch.tensor(columns, dtype=torch.float64).T


class NaiveBuffer:
    """One row and head: a list of [vector, packed?]; ``per_channel``: whole blocks at a time."""

    def __init__(self, bits, group_size, residual, per_channel):
        self.bits, self.size, self.residual, self.per_channel = bits, group_size, residual, per_channel
        self.tokens = []

    def flush(self):
        stop = max(0, (len(self.tokens) - self.residual) // self.size * self.size)
        for start in range(0, stop, self.size):
            block = self.tokens[start : start + self.size]
            if self.per_channel and not block[0][1]:
                values = naive_channels(torch.stack([token for token, _ in block]), self.bits)
                self.tokens[start : start + self.size] = [[value, True] for value in values]
        for slot in range(0 if self.per_channel else stop):
            self.pack(slot)

    def pack(self, slot):
        token, is_packed = self.tokens[slot]
        if not is_packed:
            self.tokens[slot] = [naive_token(token, self.bits, self.size), True]

    def write(self, slot, x):
        is_packed = self.tokens[slot][1]
        self.tokens[slot] = [x, False]
        if is_packed:
            self.pack(slot)

    def read(self):
        return torch.stack([token for token, _ in self.tokens])


class Packed:
    """Mix-in for an oracle: what rests between passes is packed.

    Attributes:
        evicts: keys per token, since single tokens leave.
        windows: ``(n_s, n_r)`` when everything is held in windows (keys before RoPE).
    """

    bits, size, residual = 4, 4, 6
    evicts: ClassVar[bool] = False
    windows: ClassVar[tuple[int, int] | None] = None

    def after_layers(self):
        super().after_layers()
        for layer, heads in enumerate(self.entries):
            for head, entries in enumerate(heads):
                self.pack_keys(layer, head, entries)
                for entry in self.resting(entries, self.windows_of(layer, head)):
                    self.once(entry, "v")

    def windows_of(self, layer, head):
        """``(n_s, n_r)`` where values are held in a window."""
        return self.windows

    def resting(self, entries, windows):
        """Entries that rest packed, in a buffer of all tokens or a window."""
        sinks, recent = windows or (0, math.inf)
        if recent <= self.residual + self.size:
            return []
        count = (len(entries) - sinks - self.residual) // self.size * self.size
        return entries[sinks : sinks + max(0, count)]

    def once(self, entry, *names):
        for name in names:
            if not entry.stats.get(f"{name} packed"):
                setattr(entry, name, naive_token(getattr(entry, name), self.bits, self.size))
                entry.stats[f"{name} packed"] = True

    def pack_keys(self, layer, head, entries):
        resting = self.resting(entries, self.windows)
        if not self.evicts:
            self.pack_blocks(resting)
            return
        for entry in resting:
            self.once(entry, "k", "k_raw")

    def pack_blocks(self, resting):
        """Pack keys a block of tokens at a time, before and after RoPE."""
        for start in range(0, len(resting), self.size):
            block = resting[start : start + self.size]
            if block[0].stats.get("k packed"):
                continue
            for name in ("k", "k_raw"):
                keys = torch.stack([getattr(entry, name) for entry in block])
                for entry, key in zip(block, naive_channels(keys, self.bits), strict=True):
                    setattr(entry, name, key)
            for entry in block:
                entry.stats["k packed"] = True


class PackedFull(Packed, NaiveDecoder):
    """Every token held."""


class PackedPod(Packed, PodSelected):
    """PoD: a lead's keys are its block's distant keys.

    The others hold their own in a window, without a lead values too.
    """

    def pack_keys(self, layer, head, entries):
        if self.lead[layer][head] == layer:
            super().pack_keys(layer, head, entries)
        else:
            self.pack_blocks(self.resting(entries, (self.sinks, self.recent)))

    def windows_of(self, layer, head):
        return (self.sinks, self.recent) if self.lead[layer][head] is None else None


class PackedSnapKV(Packed, SnapKV):
    evicts = True


class PackedH2O(Packed, H2O):
    evicts = True


class PackedStreamingLLM(Packed, StreamingLLM):
    def setup(self, budget, num_sink_tokens):
        super().setup(budget, num_sink_tokens)
        self.windows = num_sink_tokens, budget - num_sink_tokens
