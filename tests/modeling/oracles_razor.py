"""Oracle of RazorAttention for RoPE models, with the compensation token.

It is also computed with explicit copies of the mean token. fp64.

Settled here (paper §3.2, eqs. 4, 5, Algorithm 1; positions of a row's own real tokens, from
0):

* Heads: given per layer as KV heads that stay full. A full head is ordinary attention over every token,
  always.
* ``N`` = tokens seen when a prompt ends, earlier turns included; ``L_h = max(S_0, floor(N / C))`` (``S_0`` =
  num_recent_tokens, ``C`` = compression; a fractional one is the decimal number as written: 16 / 3.2 is 5),
  set at the end of every prompt and only there. N only grows, so L_h never shrinks. N_0 = sinks.
* The first prompt attends fully, however it is chunked. At its end a non-retrieval head keeps ``j < N_0`` and
  ``N - j <= L_h`` (the last L_h tokens; a union with the sinks); all other tokens are *dropped*.
* Decode, query at position i: the new token joins first, then every held token with ``i - j >= L_h`` and ``j
  >= N_0`` is dropped, then the query attends. So the window counts the current token and holds exactly L_h
  tokens; a token that leaves in this step is already part of the compensation that this query sees.
* Compensation: one extra key and value, the means of the post-RoPE keys and of the values of *all* tokens
  dropped so far in that (layer, KV head), logit ``q·k̂/sqrt(d) + log N_d`` (in the softmax with everything
  else). A leaving token updates ``k̂ += (k - k̂)/N_d`` with N_d counted after it. N_d = 0: no compensation
  token (no logit, not one with weight zero times something).
* A later prompt: nothing leaves while it runs. Each of its queries sees the sinks, the window as held when
  the prompt began, the compensation as it was then, and the prompt's own tokens up to itself. At its end L_h
  is set anew from the larger N and held tokens with ``N - j > L_h``, j >= N_0, are dropped into the
  compensation. Dropped tokens never come back, so the window may hold fewer than the new L_h tokens until
  decoding fills it (a token leaves by its position, not by a count).
* Sinks are absolute positions; a first prompt shorter than N_0 leaves the rest of the sinks to be filled by
  later tokens.
* No budget: memory grows with N / C by design. ``S_0 >= `` tokens seen: full attention, exactly.
"""

import copy
from fractions import Fraction
from math import floor, log

import torch
from oracle_tools import Entry, NaiveDecoder


class Razor(NaiveDecoder):
    """Keeps the list of dropped entries, so that the mean is always taken over all of them.

    Args:
        full: per layer the KV heads that keep every token.
        explicit: write the compensation as N_d copies of the mean token instead of one with log N_d on its
            logit.
    """

    def setup(self, full, num_sink_tokens=4, num_recent_tokens=4000, compression=5, explicit=False):
        self.full, self.sinks, self.shortest = full, num_sink_tokens, num_recent_tokens
        self.compression, self.explicit, self.recent = Fraction(str(compression)), explicit, 0
        self.dropped = [[[] for _ in range(self.num_heads)] for _ in range(self.num_layers)]

    def drop(self, layer, head, first_kept):
        """Move every entry with ``num_sink_tokens <= position < first_kept`` to the dropped ones."""
        held = self.entries[layer][head]
        leaving = [entry for entry in held if self.sinks <= entry.position < first_kept]
        self.entries[layer][head] = [entry for entry in held if entry not in leaving]
        self.dropped[layer][head] += leaving

    def compensation(self, layer, head):
        gone = self.dropped[layer][head]
        if not gone:
            return []
        k = torch.stack([entry.k for entry in gone]).mean(0)
        v = torch.stack([entry.v for entry in gone]).mean(0)
        if self.explicit:
            return [Entry(-1, k, k, v) for _ in gone]
        return [Entry(-1, k, k, v, log_weight=log(len(gone)))]

    def attend_head(self, layer, head, q, entries):
        if head in self.full[layer]:
            return super().attend_head(layer, head, q, entries)
        if self.is_decode:
            self.drop(layer, head, self.seen - self.recent + 1)
        entries = self.compensation(layer, head) + self.entries[layer][head]
        return super().attend_head(layer, head, q, entries)

    def after_prompt(self, layer, head, weights):
        total = self.seen + self.num_new
        self.recent = max(self.shortest, floor(total / self.compression))
        if head not in self.full[layer]:
            self.drop(layer, head, total - self.recent)


def snapshot(oracle):
    """Held positions and number of dropped tokens, per layer and KV head."""
    held = [[[entry.position for entry in head] for head in layer] for layer in oracle.entries]
    return held, copy.deepcopy([[len(head) for head in layer] for layer in oracle.dropped])
