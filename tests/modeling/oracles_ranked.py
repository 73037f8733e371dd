"""Oracles of the methods that rank tokens by attention, written from the papers and the method sheets only.

Settled here, where paper and sheet leave a detail open
-------------------------------------------------------
Every method
    * One prompt: its tokens attend causally to everything held plus the prompt's earlier tokens; nothing is
      evicted before its last token. One decoded token: attends to everything held plus itself; then, in this
      order, statistics are updated with this step's attention, and the method evicts. So the query of a
      decode step sees one token more than the budget, and after the step at most the budget is held.
    * A statistic of a (row, layer, KV head, token) is the mean over the group's G query heads. Statistics of
      kept tokens survive evictions, decoding and later prompts; those of evicted tokens are forgotten. They
      start at 0 for a new token and include its own attention to itself. Nothing is reset between turns.
    * Nothing is evicted while at most the (layer) budget is held. "Top k" keeps the lower position in a tie,
      in prefill and at decode: of two equally low tokens the later one goes.
    * "Recent" and "sinks" are counted among the held tokens in position order (last R held, first T held; the
      sinks are never evicted, so these are positions 0..T-1). Streaming: every c tokens of a prompt are a
      prompt.
    * Rounding is half up in exact arithmetic, floor(x + 1/2), where a share becomes a count of tokens; a
      share is the decimal number that was written (0.3 of 5 tokens are 2), not its nearest binary fraction.
SnapKV (budget, window, kernel, pool)
    * Observation window o = min(window, tokens of this prompt). Score of a held token = sum over the last o
      queries of the attention, mean over G; only tokens in front of the last o are pooled (zero padding
      counted in the average, kernel//2 to each side, nothing from the window) and ranked. Kept: top (budget -
      o) and the last o.
    * Decoded tokens are appended and never evicted before the next prompt's end, which ranks them too.
PyramidKV (budget = mean over layers, window, kernel, pool, beta)
    * smallest = max(window + 1, round(budget / beta)) in the top layer, largest = 2*budget - smallest in
      layer 0, linear in between, cumulative sums rounded half up, so that the layer budgets add up to
      L*budget exactly. If largest exceeds n, the tokens seen when the prompt ends: largest = n, smallest =
      2*budget - n (n <= budget: all layers keep all). One layer: the budget. Otherwise SnapKV with the
      layer's budget.
Ada-KV (budget = mean over heads, window, kernel, pool, safeguard = 0.2)
    * Per layer, o and scores as SnapKV. Nothing is evicted while its H heads together hold at most H*budget.
      Otherwise f_h = tokens of head h among the top H*(budget - o) of all heads' tokens in front of the
      window (ties: the lower head, then the lower position); head h keeps its window and its top (1 -
      safeguard)*f_h + safeguard*(budget - o), cumulative sums over heads rounded half up, or all that it has
      if that is less (heads that hold unlike numbers).
Expected Attention (budget, num_sink_tokens s = 4, num_future_positions F = 512, epsilon = 0.01)
    * Queries before RoPE of this prompt's tokens at positions >= s: mean and covariance (divided by their
      number) per query head. R = mean of the rotations at positions n .. n+F-1, n = tokens seen. mu = R mean,
      Sigma = R cov R^T.
    * The first s entries are always kept and not scored. For the others w_j = exp(k.mu/sqrt(d) +
      k.Sigma.k/(2d)), divided by the sum over them; score = (mean of w over G + epsilon) * |v|. Kept: the top
      (budget - s).
KVzip (budget = mean over heads and layers, repeat_ids = (first, later, end), chunk_size c = 2048,
num_sink_tokens s = 4)
    * The first prompt behind which a head holds more than the budget is followed, out of the record, by
      passes over r_0, r_1, …, each behind the text only: r_0 = first + end + text[:c], r_i = later +
      text[ic-8:ic] + end + text[ic:ic+c], text = all ids so far (authors' code: self_task, 8 =
      prev_postfix_size). They attend to everything.
    * Score of a token of chunk i = max over the tokens of r_i and the G heads of its weight in a softmax over
      the first min(s, ic) tokens, the chunk and the tokens of r_i up to the query (authors' code: _get_score,
      sink = system prompt).
    * Of all (layer, head, token) the top L*H*budget stay; the first s tokens are above all others. Ties:
      lower layer, then head, then token. Nothing is evicted later.
H2O (budget, num_recent_tokens = budget // 2)
    * Score = sum of A over all queries so far. If more than the budget is held: keep the last
      num_recent_tokens and the top (budget - num_recent_tokens) of the others. The same rule at a prompt's
      end and at a decode step.
RoCo (budget, num_sink_tokens = 4, num_recent_tokens = 10, protect_prefill = 0.1, protect_decode = 0.3)
    * Per token: count = queries that could see it (itself included), mean = S1/count, variance = S2/count -
      mean^2, at least 0; S1, S2 = mean over G of sum A and of sum A^2 (square per query head, then the mean).
    * Candidates = held tokens that are neither sinks nor recents. P = round(share * budget), share by phase
      (prompt's end: protect_prefill, decode: protect_decode); the P candidates with the largest variance are
      protected (all if fewer; ties: lower position). Of the other candidates the top (budget - sinks -
      recents - P) by mean are kept. num_sink_tokens + num_recent_tokens + round(share * budget) must not
      exceed the budget, for either share.
D2O (budget, num_sink_tokens T = 4, alpha = 3.0, gate g = 100.0, normalize_gate = False, beta = 0.5)
    * F_l = population variance (divide by the number of keys) over all keys of the first prompt of that
      prompt's column sums, per query head, mean over all Hq heads. normalize_gate: F_l / n, n = keys (column
      sums have mean 1 and their variance grows like n). Weight w_l = 1 if F_l > g else alpha. The first
      prompt (in streaming its first chunk) decides the weights of a row for good: a short later prompt has a
      small variance everywhere.
    * Layer budgets are those of the sheet's rule with n = tokens seen so far, evaluated at every prompt's end
      and decode step: n <= budget: n. Otherwise the largest real S with sum_l min(n, w_l*S) <= L*budget, and
      b_l = min(n, floor(w_l*S)) in exact arithmetic (fractions.Fraction(alpha)). With a layers of weight
      alpha and o of weight 1: S = L*budget / (a*alpha + o); if alpha*S > n and o > 0: S = (L*budget - a*n) /
      o. So short prompts stay whole, the total never exceeds L*budget, and while n is below alpha*S the
      layers of weight 1 shrink a little as the others grow: one decode step may evict no token, one or
      several.
    * M = max(1, (b_l - T) // 4) recents, N = b_l - T - M by score; score as in H2O. Merging leaves scores
      alone.
    * Every evicted key i looks among all kept keys (sinks and recents too, as held: post-RoPE, already
      merged) for the largest cosine; ties: lower position. u_i = that maximum; m = mean of u_i over this
      eviction's tokens. First tau, then the decision: prompt's end tau = m; decode tau = beta*m + (1 -
      beta)*tau, or m if there was no tau. An eviction of nothing leaves tau alone. Token i is merged iff u_i
      >= tau, else dropped. Weights: eq. 11 with kept e/(D), evicted exp(u_i)/D, D = e + sum exp(u_i) of those
      merged into the same kept token; K and V alike.
    * Switches of section 5.5: recent_share r: M = max(1, floor(r (b_l - T))), N:M = 3:1 is r = 1/4 (Table 7);
      budget_rule "printed": b_l = min(n, floor(w_l * budget)), section 4.1; merge "average": kept and merged
      ones count the same (Table 6); similarity "values": cosines of values decide for K and V; "both": K by K
      and V by V, each with a tau of its own ("independent metrics", Table 5).
SimLayerKV (num_sink_tokens = 4, num_recent_tokens = w = 1024, threshold, detector, number of last queries)
    * Mass of query i = sum of A[i, j] over j < num_sink_tokens or i - j < w (positions), mean over all Hq
      heads. "prefill": mean over the last min(number, prompt) queries at a prompt's end. "decode": the first
      decode step after a prompt. Lazy iff mass > threshold. A lazy layer stays lazy; the others are judged
      again next turn. exempt_last_layer: the last layer is never lazy.
    * A lazy layer is trimmed to the sinks and the last w held at every prompt's end and after every decode
      step.
Local window (budget)
    * Keep the last budget tokens held, at a prompt's end and after every decode step.
"""

import math
from fractions import Fraction

import torch
from oracle_tools import Entry, NaiveDecoder, Streaming
from torch import Tensor


def half_up(x: Fraction | float) -> int:
    return math.floor(Fraction(x) + Fraction(1, 2))


def best(candidates: list[int], score, count: int) -> list[int]:
    """The ``count`` candidates with the largest score, the lower index first in a tie; ascending."""
    return sorted(sorted(candidates, key=lambda j: (-score(j), j))[: max(count, 0)])


class Full(NaiveDecoder):
    """Full attention."""


class LocalWindow(Streaming, NaiveDecoder):
    """Full prefill; then the most recent tokens."""

    def setup(self, budget: int, chunk_size: int = 0) -> None:
        self.budget, self.chunk_size = budget, chunk_size

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        self.entries[layer][head] = self.entries[layer][head][-self.budget :]

    after_decode = after_prompt


class SnapKV(Streaming, NaiveDecoder):
    """Pooled attention of the last queries of a prompt."""

    def setup(self, budget: int, window: int, kernel: int, pool: str = "avg", chunk_size: int = 0) -> None:
        self.window, self.kernel, self.pool, self.chunk_size = window, kernel, pool, chunk_size
        self.budgets = [budget] * self.num_layers

    def pooled(self, weights: Tensor) -> list[float]:
        """Scores of the tokens before the observation window."""
        n, window = weights.shape[2], min(self.window, self.num_new)
        score = weights[:, self.num_new - window :].mean(0).sum(0).tolist()[: n - window]
        half = self.kernel // 2
        pooled = []
        for j in range(len(score)):
            around = score[max(0, j - half) : j + half + 1]
            pooled.append(sum(around) / self.kernel if self.pool == "avg" else max(around))
        return pooled

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        entries, budget = self.entries[layer][head], self.budgets[layer]
        if len(entries) <= budget:
            return
        pooled = self.pooled(weights)
        before = len(pooled)
        kept = best(list(range(before)), pooled.__getitem__, budget - (len(entries) - before))
        self.entries[layer][head] = [entries[j] for j in kept] + entries[before:]


class PyramidKV(SnapKV):
    """SnapKV with budgets that fall linearly from layer to layer."""

    def setup(
        self, budget: int, window=8, kernel=7, pool="max", beta: float = 20, chunk_size: int = 0
    ) -> None:
        super().setup(budget, window, kernel, pool, chunk_size)
        self.rule = budget, window, beta

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        self.budgets = pyramid(self.num_layers, *self.rule, self.seen + self.num_new)
        super().after_prompt(layer, head, weights)


class AdaKV(SnapKV):
    """SnapKV's scores of all heads of a layer ranked together.

    Heads get tokens by how many of the best they have.
    """

    def setup(self, budget: int, window=32, kernel=7, pool="max", safeguard=0.2, chunk_size: int = 0) -> None:
        super().setup(budget, window, kernel, pool, chunk_size)
        self.budget, self.safeguard = budget, Fraction(str(safeguard))
        self.scored: dict[int, list[float]] = {}

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        self.scored[head] = self.pooled(weights)
        if head == self.num_heads - 1:  # all heads have attended
            self.share_out(self.entries[layer])

    def share_out(self, heads: list[list[Entry]]) -> None:
        if sum(map(len, heads)) <= len(heads) * self.budget:
            return
        window = min(self.window, self.num_new)
        pairs = [(-score, h, j) for h, scores in self.scored.items() for j, score in enumerate(scores)]
        winners = [h for _, h, _ in sorted(pairs)[: len(heads) * (self.budget - window)]]
        ends, exact = [0], Fraction(0)
        for h in range(len(heads)):
            exact += (1 - self.safeguard) * winners.count(h) + self.safeguard * (self.budget - window)
            ends.append(half_up(exact))
        for h, entries in enumerate(heads):
            before, count = len(self.scored[h]), ends[h + 1] - ends[h]
            kept = best(list(range(before)), self.scored[h].__getitem__, min(count, before))
            heads[h] = [entries[j] for j in kept] + entries[before:]


class KVzip(NaiveDecoder):
    """What is attended to when the text is repeated."""

    def setup(self, budget: int, repeat_ids, chunk_size: int = 2048, num_sink_tokens: int = 4) -> None:
        self.budget, self.requests, self.size, self.sinks = budget, repeat_ids, chunk_size, num_sink_tokens
        self.text: list[int] = []
        self.reading: tuple[int, int] | None = None
        self.is_done = False
        self.found: dict[tuple[int, int, int], float] = {}

    def feed(self, ids: Tensor, is_decode: bool) -> Tensor:
        self.text += ids.tolist()
        logits = super().feed(ids, is_decode)
        if not is_decode and not self.is_done and len(self.entries[0][0]) > self.budget:
            self.repeat()
            self.evict()
        return logits

    def repeat(self) -> None:
        entries, seen = self.entries, self.seen
        first, later, end = self.requests
        for start in range(0, seen, self.size):
            self.reading = start, min(start + self.size, seen)
            named = first if start == 0 else later + self.text[max(0, start - 8) : start]
            again = torch.tensor(named + end + self.text[start : start + self.size])
            self.entries = [[list(head) for head in layer] for layer in entries]
            super().feed(again, False)
            self.seen = seen
        self.entries, self.reading = entries, None

    def attend_head(self, layer: int, head: int, q: Tensor, entries: list[Entry]) -> tuple[Tensor, Tensor]:
        if self.reading is not None:
            start, stop = self.reading
            held = len(entries) - self.num_new
            for queries in self.turn(q, self.query_positions()):
                for i, query in enumerate(queries):
                    there = [*range(min(self.sinks, start)), *range(start, stop), *range(held, held + i + 1)]
                    logits = torch.stack([query @ entries[j].k for j in there]) / math.sqrt(self.head_dim)
                    for j, weight in zip(there, logits.softmax(0).tolist(), strict=True):
                        if start <= j < stop:
                            key = layer, head, j
                            self.found[key] = max(self.found.get(key, 0.0), weight)
        return super().attend_head(layer, head, q, entries)

    def evict(self) -> None:
        self.is_done = True
        total = self.num_layers * self.num_heads * self.budget
        ranked = sorted(self.found, key=lambda key: (key[2] >= self.sinks, -self.found[key], key))
        first = [key for key in ranked if key[2] < self.sinks]
        kept = {*first, *ranked[len(first) : total]}
        for layer, heads in enumerate(self.entries):
            for head, entries in enumerate(heads):
                heads[head] = [entry for j, entry in enumerate(entries) if (layer, head, j) in kept]


class ExpectedAttention(Streaming, NaiveDecoder):
    """The attention of a normally distributed query to come, times the norm of the value."""

    def setup(
        self,
        budget: int,
        num_sink_tokens: int = 4,
        num_future_positions: int = 512,
        epsilon: float = 0.01,
        chunk_size: int = 0,
    ) -> None:
        self.budget, self.chunk_size = budget, chunk_size
        self.rule = num_sink_tokens, num_future_positions, epsilon

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        entries = self.entries[layer][head]
        kept = expected_slots(self, layer, head, self.budget, *self.rule)
        self.entries[layer][head] = [entries[j] for j in kept]


def expected_slots(
    decoder: NaiveDecoder, layer: int, head: int, budget: int, sinks: int, future: int, epsilon: float
) -> list[int]:
    """What one KV head keeps at the end of a prompt.

    Weights come by the moment-generating function of every query head.
    """
    entries, d, groups = decoder.entries[layer][head], decoder.head_dim, decoder.groups
    if len(entries) <= budget:
        return list(range(len(entries)))
    first, seen = max(0, sinks - decoder.seen), decoder.seen + decoder.num_new
    keys = torch.stack([entry.k for entry in entries[sinks:]])
    # row i of the turned unit matrix is what a position makes of channel i
    turned = [decoder.turn(torch.eye(d, dtype=torch.float64), [p] * d).T for p in range(seen, seen + future)]
    rotation = sum(turned) / future
    total = torch.zeros(len(keys), dtype=torch.float64)
    for q in decoder.queries[layer][head * groups : (head + 1) * groups, first:]:
        covariance = torch.atleast_2d(torch.cov(q.T, correction=0))
        mean, covariance = rotation @ q.mean(0), rotation @ covariance @ rotation.T
        expected = torch.stack(
            [torch.exp(k @ mean / math.sqrt(d) + k @ covariance @ k / (2 * d)) for k in keys]
        )
        total += expected / expected.sum() / groups
    score = [
        (weight + epsilon) * entry.v.norm() for weight, entry in zip(total, entries[sinks:], strict=True)
    ]
    kept = best(list(range(sinks, len(entries))), lambda j: score[j - sinks], budget - sinks)
    return [*range(sinks), *kept]


def pyramid(num_layers: int, budget: int, window: int, beta: float, seen: int) -> list[int]:
    if num_layers == 1 or seen <= budget:
        return [budget] * num_layers
    smallest = max(window + 1, half_up(Fraction(budget) / Fraction(beta)))
    smallest = max(smallest, 2 * budget - seen)
    largest = 2 * budget - smallest
    ideal = [largest - Fraction((largest - smallest) * layer, num_layers - 1) for layer in range(num_layers)]
    ends = [half_up(sum(ideal[:layer])) for layer in range(num_layers + 1)]
    return [ends[layer + 1] - ends[layer] for layer in range(num_layers)]


class H2O(Streaming, NaiveDecoder):
    """Accumulated attention: heavy hitters and recent tokens."""

    def setup(self, budget: int, num_recent_tokens: int | None = None, chunk_size: int = 0) -> None:
        self.budget, self.chunk_size = budget, chunk_size
        self.recent = budget // 2 if num_recent_tokens is None else num_recent_tokens

    def accumulate(self, entries: list[Entry], weights: Tensor) -> None:
        """Add up sums over queries of A, of A², and the number of queries that saw the entry.

        ``weights`` are ``[G, m, held]``.
        """
        sums = weights.sum(1).mean(0).tolist()
        squares = (weights**2).sum(1).mean(0).tolist()
        for j, entry in enumerate(entries):
            before = max(0, j - (len(entries) - self.num_new))  # queries of the pass in front of it
            for name, more in [("sum", sums[j]), ("squares", squares[j]), ("count", self.num_new - before)]:
                entry.stats[name] = entry.stats.get(name, 0) + more

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        entries = self.entries[layer][head]
        self.accumulate(entries, weights)
        n = len(entries)
        if n > self.budget:
            kept = best(
                list(range(n - self.recent)), lambda j: entries[j].stats["sum"], self.budget - self.recent
            )
            self.entries[layer][head] = [entries[j] for j in kept] + entries[n - self.recent :]

    after_decode = after_prompt


class RoCo(H2O):
    """Mean attention, with the tokens of most variable attention protected."""

    def setup(
        self,
        budget: int,
        num_sink_tokens: int = 4,
        num_recent_tokens: int = 10,
        protect_prefill: float = 0.1,
        protect_decode: float = 0.3,
        chunk_size: int = 0,
    ) -> None:
        self.budget, self.chunk_size = budget, chunk_size
        self.sinks, self.recent = num_sink_tokens, num_recent_tokens
        self.shares = protect_prefill, protect_decode

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        entries = self.entries[layer][head]
        self.accumulate(entries, weights)
        n = len(entries)
        if n <= self.budget:
            return

        def mean(j: int) -> float:
            return entries[j].stats["sum"] / entries[j].stats["count"]

        def variance(j: int) -> float:
            return max(0.0, entries[j].stats["squares"] / entries[j].stats["count"] - mean(j) ** 2)

        protected = half_up(Fraction(str(self.shares[self.is_decode])) * self.budget)
        candidates = list(range(self.sinks, n - self.recent))
        safe = best(candidates, variance, protected)
        rest = [j for j in candidates if j not in safe]
        kept = best(rest, mean, self.budget - self.sinks - self.recent - protected)
        kept = sorted([*range(self.sinks), *safe, *kept, *range(n - self.recent, n)])
        self.entries[layer][head] = [entries[j] for j in kept]

    after_decode = after_prompt


ROUNDING = 1e-13
"""Cosines that differ by less are equal.

In layer 0 values depend on the token alone, and tokens come twice.
"""


class D2O(H2O):
    """Layer budgets by the variance of column sums; evicted tokens merge into their nearest kept key."""

    def setup(
        self,
        budget: int,
        num_sink_tokens: int = 4,
        alpha: float = 3.0,
        gate: float = 100.0,
        normalize_gate: bool = False,
        beta: float = 0.5,
        chunk_size: int = 0,
        recent_share: float = 0.25,
        budget_rule: str = "total",
        similarity: str = "keys",
        merge: str = "weighted",
    ) -> None:
        self.budget, self.chunk_size, self.sinks = budget, chunk_size, num_sink_tokens
        self.recent_share, self.budget_rule = Fraction(str(recent_share)), budget_rule
        self.compared, self.merge = {"keys": "k", "values": "v", "both": "kv"}[similarity], merge
        self.alpha, self.gate, self.normalize, self.beta = Fraction(alpha), gate, normalize_gate, beta
        self.layer_weights: list[Fraction] | None = None
        self.density: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        self.tau: dict[tuple[int, int, str], float] = {}
        self.weight_sums: list[float] = []

    def after_prompt(self, layer: int, head: int, weights: Tensor) -> None:
        self.accumulate(self.entries[layer][head], weights)
        if self.layer_weights is None:
            sums = weights.sum(1)  # [G, n]
            variance = ((sums - sums.mean(1, keepdim=True)) ** 2).mean(1)
            self.density[layer].append(variance / sums.shape[1] if self.normalize else variance)

    def after_decode(self, layer: int, head: int, weights: Tensor) -> None:
        self.accumulate(self.entries[layer][head], weights)

    def after_layers(self) -> None:
        if self.layer_weights is None:
            self.variances = [torch.cat(heads).mean().item() for heads in self.density]
            self.layer_weights = [Fraction(1) if f > self.gate else self.alpha for f in self.variances]
        seen = self.seen + self.num_new
        budgets = layer_budgets(self.layer_weights, self.budget, seen)
        if self.budget_rule == "printed":
            budgets = [min(seen, math.floor(w * self.budget)) for w in self.layer_weights]
        for layer, budget in enumerate(budgets):
            for head in range(self.num_heads):
                self.evict(layer, head, budget)

    def evict(self, layer: int, head: int, budget: int) -> None:
        entries = self.entries[layer][head]
        n = len(entries)
        if n <= budget:
            return
        recent = max(1, math.floor((budget - self.sinks) * self.recent_share))
        heavy = best(
            list(range(self.sinks, n - recent)),
            lambda j: entries[j].stats["sum"],
            budget - self.sinks - recent,
        )
        kept = [*range(self.sinks), *heavy, *range(n - recent, n)]
        evicted = [j for j in range(n) if j not in kept]
        to = {name: self.sources(layer, head, name, kept, evicted) for name in self.compared}
        of_keys, of_values = to.get("k", to.get("v")), to.get("v", to.get("k"))
        self.entries[layer][head] = [self.merged(entries, j, of_keys[j], of_values[j]) for j in kept]

    def sources(self, layer, head, name, kept, evicted) -> dict[int, list[tuple[int, float]]]:
        """Of every kept entry: what merges into it and how alike it is in ``name`` (k or v). Moves tau."""
        xs = [getattr(entry, name) for entry in self.entries[layer][head]]
        nearest = {}
        for i in evicted:
            cosines = cosine(xs[i], torch.stack([xs[j] for j in kept])).tolist()
            largest = max(cosines) - ROUNDING
            place = next(c for c, u in enumerate(cosines) if u >= largest)
            nearest[i] = kept[place], cosines[place]
        mean = sum(u for _, u in nearest.values()) / len(nearest)
        old = self.tau.get((layer, head, name))
        tau = self.beta * mean + (1 - self.beta) * old if self.is_decode and old is not None else mean
        self.tau[layer, head, name] = tau
        return {
            j: [(i, u) for i, (to, u) in nearest.items() if to == j and u >= tau - ROUNDING] for j in kept
        }

    def merged(self, entries: list[Entry], j: int, of_keys, of_values) -> Entry:
        """Eqs. 10 and 11 for one kept token."""

        def mean(name: str, sources: list[tuple[int, float]]) -> Tensor:
            own = getattr(entries[j], name)
            others = [getattr(entries[i], name) for i, _ in sources]
            if self.merge == "average":
                return (own + sum(others)) / (1 + len(others))
            total = math.e + sum(math.exp(u) for _, u in sources)
            shares = [math.e / total] + [math.exp(u) / total for _, u in sources]
            self.weight_sums.append(sum(shares))
            return sum(share * x for share, x in zip(shares, [own, *others], strict=True))

        k = mean("k", of_keys) if of_keys else entries[j].k
        v = mean("v", of_values) if of_values else entries[j].v
        return Entry(entries[j].position, entries[j].k_raw, k, v, stats=entries[j].stats)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of ``a`` ``[d]`` with every row of ``b`` ``[n, d]``."""
    return b @ a / (a.norm() * b.norm(dim=1))


def layer_budgets(weights: list[Fraction], budget: int, n: int) -> list[int]:
    """``b_l = min(n, floor(w_l S))`` with the largest S that the budget allows.

    The sum of ``min(n, w_l S)`` is then ``L * budget``. That sum grows with S and is linear between the
    points ``S = n / w_l``: walk these points, then solve.
    """
    total = len(weights) * budget
    if n <= budget:
        return [n] * len(weights)
    full: list[Fraction] = []  # weights of the layers that hold all n tokens
    for weight in sorted(weights, reverse=True):
        at = Fraction(n) / weight
        if sum(min(Fraction(n), w * at) for w in weights) <= total:
            full.append(weight)
    free = sorted(weights, reverse=True)[len(full) :]
    scale = (total - n * len(full)) / sum(free)
    return [min(n, math.floor(weight * scale)) for weight in weights]


class SimLayerKV(Streaming, NaiveDecoder):
    """Layers that look at sinks and recent tokens only keep nothing else."""

    def setup(
        self,
        threshold: float,
        detector: str,
        num_recent_tokens: int,
        num_sink_tokens: int = 4,
        num_last_queries: int = 32,
        exempt_last_layer: bool = False,
        chunk_size: int = 0,
    ) -> None:
        self.exempt = {self.num_layers - 1} if exempt_last_layer else set()
        self.threshold, self.detector, self.chunk_size = threshold, detector, chunk_size
        self.sinks, self.recent, self.last = num_sink_tokens, num_recent_tokens, num_last_queries
        self.lazy = [False] * self.num_layers
        self.undecided = False
        self.mass: list[list[Tensor]] = []
        self.history: list[list[float]] = []

    def observe(self, layer: int, head: int, weights: Tensor) -> None:
        if layer == 0 and head == 0:
            self.mass = [[] for _ in range(self.num_layers)]
        positions = [entry.position for entry in self.entries[layer][head]]
        queries = min(self.last, self.num_new)
        for row in range(self.num_new - queries, self.num_new):
            i = self.seen + row
            near = [c for c, j in enumerate(positions) if j < self.sinks or i - j < self.recent]
            self.mass[layer].append(weights[:, row, near].sum(1) / queries)

    after_prompt = observe
    after_decode = observe

    def after_layers(self) -> None:
        judges = self.undecided if self.is_decode else self.detector == "prefill"
        masses = [
            torch.cat(rows).sum().item() / (self.num_heads * self.groups) for rows in self.mass
        ]  # mean over heads of the mean over queries
        if judges:
            self.history.append(masses)
            for layer, mass in enumerate(masses):
                self.lazy[layer] |= mass > self.threshold and layer not in self.exempt
        self.undecided = self.detector == "decode" and not self.is_decode
        for layer in range(self.num_layers):
            for head in range(self.num_heads):
                entries = self.entries[layer][head]
                if self.lazy[layer] and len(entries) > self.sinks + self.recent:
                    self.entries[layer][head] = entries[: self.sinks] + entries[-self.recent :]
