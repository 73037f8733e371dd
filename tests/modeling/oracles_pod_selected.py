"""Oracles of pod+snapkv, pod+pyramidkv and pod+expected_attention: the lead chooses for its block. fp64.

Settled here:

* Blocks are per KV head: (layer, head) follows ``lead = plan.lead[layer][head]`` of the same head. A lead's
  own lead is itself.
* The prompt runs as ``pod``: a query at i sees every j <= i; proximal (``j < n_s or i - j < n_r``) by own
  query and own key; distant ones in a follower by the lead's query and the lead's key, at natural positions;
  own values; one softmax over all.
* When a prompt ends, each lead selects exactly as snapkv (pyramidkv, expected_attention) alone would in that
  layer and head: its own queries of the prompt's last min(window, tokens of this prompt) tokens, its own
  keys, softmax over everything it holds. Followers hold the same set. Tokens are judged proximal or distant
  by their original positions, and the query's position is the number of tokens seen.
* Later queries see the selected tokens and every token after that prompt. In a follower: own query and own
  key while ``j < n_s or i - j < n_r``, lead's query and lead's key beyond; own values. A token never becomes
  proximal again.
* Decoded tokens are appended everywhere. A later prompt attends fully to what is held and to itself; at its
  end selection runs again over what is held (in slot order, as snapkv does), if that exceeds the budget.
* pod+pyramidkv: let ``B_l`` be pyramidkv's budget of layer l at n tokens seen (window w included;
  oracles_ranked.py). Head h of a block with lead l' holds at most ``min(n, w + floor(s·(B_l' - w)))`` with
  the largest s for which the total over the layers that lead or follow is at most their number times the
  budget. Heads of one layer may hold different numbers; each is compressed when it holds more than its own.
* A head that keeps its window (lead None) sees proximal tokens only, always, and takes no part in the choice.
* num_sink_tokens and num_recent_tokens are the model's (its plan's windows). pod+snapkv with budget >=
  length: equal to ``pod`` exactly.
"""

import math
from fractions import Fraction

import torch
from oracle_tools import NaiveDecoder
from oracles_imdc import snap
from oracles_ranked import expected_slots, pyramid


def block_budgets(lead, budget, window, beta, seen):
    """``[L][H]`` budgets of pod+pyramidkv after ``seen`` tokens; ``lead[layer][head]``."""
    layers = len(lead)
    if seen <= budget:
        return [[budget] * len(lead[0]) for _ in lead]
    alone = pyramid(layers, budget, window, beta, seen)
    out = [[0] * len(lead[0]) for _ in lead]
    for head in range(len(lead[0])):
        held = [layer for layer in range(layers) if lead[layer][head] is not None]
        shares = [alone[lead[layer][head]] - window for layer in held]
        scale = largest_scale(shares, seen - window, len(held) * (budget - window)) if held else 0
        for layer, share in zip(held, shares, strict=True):
            out[layer][head] = window + math.floor(min(seen - window, scale * share))
    return out


def largest_scale(shares, most, total):
    """The s with sum(min(most, s * share)) == total.

    It is found by the pieces of this rising line, which bends where s * share == most.
    """
    bends = sorted(Fraction(most, share) for share in shares)
    for bend in bends:
        if sum(min(most, bend * share) for share in shares) >= total:
            rest = [share for share in shares if Fraction(most, share) >= bend]
            return Fraction(total - most * (len(shares) - len(rest)), sum(rest))
    raise AssertionError("the total does not exceed what all can hold")


class PodSelected(NaiveDecoder):
    """PoD attention over what the leads chose. Leads of one KV head and their followers hold the same tokens.

    Args:
        selection: "snapkv", "pyramidkv", "expected_attention", or None (every token: plain PoD).
        expected: expected_attention's own parameters.
    """

    def setup(
        self, selection, budget=None, window=32, kernel=5, pool="avg", beta=20, expected=(4, 512, 0.01)
    ):
        config = self.model.config
        self.lead = [list(row) for row in config.sharing_plan.lead]
        self.sinks, self.recent = config.num_sink_tokens, config.num_recent_tokens
        self.window, self.kernel, self.pool = window, kernel, pool
        self.expected = expected if selection == "expected_attention" else None
        self.rule = (budget, window, beta) if selection == "pyramidkv" else None
        self.budgets = [[budget if selection else math.inf] * self.num_heads] * self.num_layers
        self.chosen = {}

    def weights(self, layer, head, q, entries):
        lead = self.lead[layer][head]
        if lead is None:
            return self.near_weights(q, entries)
        lead_q = self.queries[lead][head * self.groups : (head + 1) * self.groups]
        lead_entries = self.entries[lead][head]
        positions = self.query_positions()
        own = self.turn(q, positions) @ torch.stack([entry.k for entry in entries]).T
        theirs = self.turn(lead_q, positions) @ torch.stack([entry.k for entry in lead_entries]).T
        held = [entry.position for entry in entries]
        assert held == [entry.position for entry in lead_entries]
        distant = torch.tensor([[self.sinks <= j <= i - self.recent for j in held] for i in positions])
        own = torch.where(distant, theirs, own)
        logits = own / math.sqrt(self.head_dim)
        return logits.masked_fill(~self.causal(len(held)), -math.inf).softmax(-1)

    def near_weights(self, q, entries):
        positions = self.query_positions()
        logits = (
            self.turn(q, positions) @ torch.stack([entry.k for entry in entries]).T / math.sqrt(self.head_dim)
        )
        held = [entry.position for entry in entries]
        near = torch.tensor([[j < self.sinks or i - j < self.recent for j in held] for i in positions])
        return logits.masked_fill(~(near & self.causal(len(held))), -math.inf).softmax(-1)

    def after_prompt(self, layer, head, weights):
        """A lead chooses; everybody still holds everything, because the followers have yet to attend."""
        if self.rule:
            self.budgets = block_budgets(self.lead, *self.rule, self.seen + self.num_new)
        if self.lead[layer][head] == layer:
            budget, held = self.budgets[layer][head], weights.shape[2]
            slots = list(range(held))
            if self.expected:
                slots = expected_slots(self, layer, head, budget, *self.expected)
            elif held > budget:
                slots = snap(weights, budget, min(self.window, self.num_new), self.kernel, self.pool)
            self.chosen[layer, head] = slots

    def after_layers(self):
        if self.is_decode:
            return
        for layer in range(self.num_layers):
            for head in range(self.num_heads):
                if self.lead[layer][head] is None:
                    continue
                slots = self.chosen[self.lead[layer][head], head]
                self.entries[layer][head] = [self.entries[layer][head][slot] for slot in slots]
