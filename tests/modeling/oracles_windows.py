"""Oracles of the methods that mask the prompt too: streamingllm, lm_infinite, wa. Plain n×n, fp64.

Settled here (METHODS.md §6; a query at position i, keys at j <= i, `budget` in tokens, the current one counted):

* None of the three looks at where a prompt ends: turns, chunks and decoding are one sequence with one rule per query. So any
  chunking, any continuation and any number of prompts give the same logits.
* ``n_s = num_sink_tokens``, ``n_r = budget - n_s`` (both at least 1). streamingllm and lm_infinite see ``j < n_s or i - j < n_r``
  (a union: nothing counts twice while the two overlap). wa sees ``i - j < budget`` and has no sinks.
* streamingllm: the visible tokens are numbered 0, 1, … in order of position; keys and query are rotated at these numbers (the query
  has the last one). Keys are stored before RoPE.
* lm_infinite: a logit is ``q·R(min(i - j, n_s + n_r))·k / sqrt(d)``: the natural distance up to ``budget = n_s + n_r``, that
  distance beyond it. Only sinks can be farther than n_r - 1, so only they are ever affected. Values as usual. Whether keys are stored
  before or after RoPE is an implementation matter.
* wa: natural positions, keys keep their rotation.
* ``budget`` >= tokens seen: full attention, exactly.
"""
