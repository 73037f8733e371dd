"""Oracles of the methods that mask the prompt too: streamingllm, lm_infinite, wa. Plain n×n, fp64.

Settled here (a query at position i, keys at j <= i, `budget` in tokens, the current one
counted):

* None of the three looks at where a prompt ends: turns, chunks and decoding are one sequence with one rule
  per query. So any chunking, any continuation and any number of prompts give the same logits.
* ``n_s = num_sink_tokens``, ``n_r = budget - n_s`` (both at least 1). streamingllm and lm_infinite see ``j <
  n_s or i - j < n_r`` (a union: nothing counts twice while the two overlap). wa sees ``i - j < budget`` and
  has no sinks.
* streamingllm: the visible tokens are numbered 0, 1, … in order of position; keys and query are rotated at
  these numbers (the query has the last one). Keys are stored before RoPE.
* lm_infinite: a logit is ``q·R(min(i - j, n_s + n_r))·k / sqrt(d)``: the natural distance up to ``budget =
  n_s + n_r``, that distance beyond it. Only sinks can be farther than n_r - 1, so only they are ever
  affected. Values as usual. Whether keys are stored before or after RoPE is an implementation matter.
* wa: natural positions, keys keep their rotation.
* ``budget`` >= tokens seen: full attention, exactly.
"""

import math

import torch
from oracle_tools import NaiveDecoder


class Windowed(NaiveDecoder):
    """Nothing is thrown away here: every query looks up what it may see."""

    def setup(self, budget, num_sink_tokens=4):
        self.budget, self.sinks = budget, num_sink_tokens

    def visible(self, i):
        """Positions that the query at position i sees, in order."""
        recent = self.budget - self.sinks
        return [j for j in range(i + 1) if j < self.sinks or i - j < recent]

    def logits(self, q, i, keys, kept):
        """Logits ``[G, w]`` of un-rotated queries ``q`` ``[G, d]`` at i.

        Keys are un-rotated, ``[w, d]``, at ``kept``.
        """
        raise NotImplementedError

    def weights(self, layer, head, q, entries):
        rows = torch.full((self.groups, self.num_new, len(entries)), -math.inf, dtype=torch.float64)
        assert [entry.position for entry in entries] == list(range(len(entries)))
        keys = torch.stack([entry.k_raw for entry in entries])
        for new, i in enumerate(self.query_positions()):
            kept = self.visible(i)
            rows[:, new, kept] = self.logits(q[:, new], i, keys[kept], kept)
        return (rows / math.sqrt(self.head_dim)).softmax(-1)

    def turned(self, q, position):
        return self.turn(q[:, None], [position])[:, 0]


class StreamingLLM(Windowed):
    def logits(self, q, i, keys, kept):
        return self.turned(q, len(kept) - 1) @ self.turn(keys, range(len(kept))).T


class LMInfinite(Windowed):
    def logits(self, q, i, keys, kept):
        """The query is turned once per distance instead of the keys."""
        keys = self.turn(keys, [0] * len(kept))
        pairs = zip(keys, kept, strict=True)
        return torch.stack([self.turned(q, min(i - j, self.budget)) @ key for key, j in pairs], dim=1)


class WindowAttention(Windowed):
    def setup(self, budget):
        self.budget = budget

    def visible(self, i):
        return [j for j in range(i + 1) if i - j < self.budget]

    def logits(self, q, i, keys, kept):
        return self.turned(q, i) @ self.turn(keys, kept).T
