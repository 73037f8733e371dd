"""Oracles of pod+snapkv and pod+pyramidkv: the lead chooses for its block. fp64.

Settled here (METHODS.md §1 last point, §6):

* Blocks are per KV head: (layer, head) follows ``lead = plan.lead[layer][head]`` of the same head. A lead's own lead is itself.
* The prompt runs as ``pod``: a query at i sees every j <= i; proximal (``j < n_s or i - j < n_r``) by own query and own key; distant ones in a
  follower by the lead's query and the lead's key, at natural positions; own values; one softmax over all.
* When a prompt ends, each lead selects exactly as snapkv (or pyramidkv) alone would in that layer and head: its own queries of the prompt's
  last min(window, tokens of this prompt) tokens, its own keys, softmax over everything it holds. Followers hold the same set. Tokens are judged
  proximal or distant by their original positions, and the query's position is the number of tokens seen.
* Later queries see the selected tokens and every token after that prompt. In a follower: own query and own key while ``j < n_s or i - j < n_r``,
  lead's query and lead's key beyond; own values. A token never becomes proximal again.
* Decoded tokens are appended everywhere. A later prompt attends fully to what is held and to itself; at its end selection runs again over what is
  held (in slot order, as snapkv does), if that exceeds the budget.
* pod+pyramidkv: let ``B_l`` be pyramidkv's budget of layer l (window w included; oracles_ranked.py). Head h of a block with lead l' holds at most
  ``w + floor((B_l' - w)·L·(budget - w) / Σ_l (B_{lead[l][h]} - w))``: per KV head the total over layers is at most L·budget. Heads of one
  layer may hold different numbers; each is compressed when it holds more than its own.
* num_sink_tokens and num_recent_tokens are the model's (its plan's windows). pod+snapkv with budget >= length: equal to ``pod`` exactly.
"""
