"""Oracles of the methods that rank tokens by attention, written from the papers and the method sheets only.

Settled here, where paper and sheet leave a detail open
-------------------------------------------------------
Every method
    * One prompt: its tokens attend causally to everything held plus the prompt's earlier tokens; nothing is evicted
      before its last token. One decoded token: attends to everything held plus itself; then, in this order,
      statistics are updated with this step's attention, and the method evicts. So the query of a decode step sees
      one token more than the budget, and after the step at most the budget is held.
    * A statistic of a (row, layer, KV head, token) is the mean over the group's G query heads. Statistics of kept
      tokens survive evictions, decoding and later prompts; those of evicted tokens are forgotten. They start at 0
      for a new token and include its own attention to itself. Nothing is reset between turns.
    * Nothing is evicted while at most the (layer) budget is held. "Top k" keeps the lower position in a tie, in
      prefill and at decode: of two equally low tokens the later one goes.
    * "Recent" and "sinks" are counted among the held tokens in position order (last R held, first T held; the
      sinks are never evicted, so these are positions 0..T-1). Streaming: every c tokens of a prompt are a prompt.
    * Rounding is half up in exact arithmetic, floor(x + 1/2), where a share becomes a count of tokens.
SnapKV (budget, window, kernel, pool)
    * Observation window o = min(window, tokens of this prompt). Score of a held token = sum over the last o queries
      of the attention, mean over G; only tokens in front of the last o are pooled (zero padding counted in the
      average, kernel//2 to each side, nothing from the window) and ranked. Kept: top (budget - o) and the last o.
    * Decoded tokens are appended and never evicted before the next prompt's end, which ranks them too.
PyramidKV (budget = mean over layers, window, kernel, pool, beta)
    * smallest = max(window + 1, round(budget / beta)) in the top layer, largest = 2*budget - smallest in layer 0,
      linear in between, cumulative sums rounded half up, so that the layer budgets add up to L*budget exactly.
      One layer: the budget. Otherwise SnapKV with the layer's budget; a layer with more budget than tokens keeps all.
H2O (budget, num_recent_tokens = budget // 2)
    * Score = sum of A over all queries so far. If more than the budget is held: keep the last num_recent_tokens and
      the top (budget - num_recent_tokens) of the others. The same rule at a prompt's end and at a decode step.
RoCo (budget, num_sink_tokens = 4, num_recent_tokens = 10, protect_prefill = 0.1, protect_decode = 0.3)
    * Per token: count = queries that could see it (itself included), mean = S1/count, variance = S2/count - mean^2,
      at least 0; S1, S2 = mean over G of sum A and of sum A^2 (square per query head, then the mean).
    * Candidates = held tokens that are neither sinks nor recents. P = round(share * budget), share by phase (prompt's
      end: protect_prefill, decode: protect_decode); the P candidates with the largest variance are protected (all if
      fewer; ties: lower position). Of the other candidates the top (budget - sinks - recents - P) by mean are kept.
      num_sink_tokens + num_recent_tokens + round(share * budget) must not exceed the budget, for either share.
D2O (budget, num_sink_tokens T = 4, alpha = 3.0, gate g = 100.0, normalize_gate = False, beta = 0.5)
    * F_l = population variance (divide by the number of keys) over all keys of the first prompt of that prompt's
      column sums, per query head, mean over all Hq heads. normalize_gate: F_l / n, n = keys (column sums have mean 1
      and their variance grows like n). Weight w_l = 1 if F_l > g else alpha. The first prompt (in streaming its
      first chunk) decides the weights of a row for good: a short later prompt has a small variance everywhere.
    * Layer budgets are those of the sheet's rule with n = tokens seen so far, evaluated at every prompt's end and
      decode step: n <= budget: n. Otherwise the largest real S with sum_l min(n, w_l*S) <= L*budget, and
      b_l = min(n, floor(w_l*S)) in exact arithmetic (fractions.Fraction(alpha)). With a layers of weight alpha and o
      of weight 1: S = L*budget / (a*alpha + o); if alpha*S > n and o > 0: S = (L*budget - a*n) / o. So short prompts
      stay whole, the total never exceeds L*budget, and while n is below alpha*S the layers of weight 1 shrink a
      little as the others grow: one decode step may evict no token, one or several.
    * M = max(1, (b_l - T) // 4) recents, N = b_l - T - M by score; score as in H2O. Merging leaves scores alone.
    * Every evicted key i looks among all kept keys (sinks and recents too, as held: post-RoPE, already merged) for the
      largest cosine; ties: lower position. u_i = that maximum; m = mean of u_i over this eviction's tokens. First
      tau, then the decision: prompt's end tau = m; decode tau = beta*m + (1 - beta)*tau, or m if there was no tau.
      An eviction of nothing leaves tau alone. Token i is merged iff u_i >= tau, else dropped. Weights: eq. 11 with
      kept e/(D), evicted exp(u_i)/D, D = e + sum exp(u_i) of those merged into the same kept token; K and V alike.
SimLayerKV (num_sink_tokens = 4, num_recent_tokens = w = 1024, threshold, detector, number of last queries)
    * Mass of query i = sum of A[i, j] over j < num_sink_tokens or i - j < w (positions), mean over all Hq heads.
      "prefill": mean over the last min(number, prompt) queries at a prompt's end. "decode": the first decode step
      after a prompt. Lazy iff mass > threshold. A lazy layer stays lazy; the others are judged again next turn.
    * A lazy layer is trimmed to the sinks and the last w held at every prompt's end and after every decode step.
Local window (budget)
    * Keep the last budget tokens held, at a prompt's end and after every decode step.
"""
