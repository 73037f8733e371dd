"""Oracle of RazorAttention for RoPE models, with the compensation token and with explicit copies of the mean token. fp64.

Settled here (METHODS.md §4, paper §3.2, eqs. 4, 5, Algorithm 1; positions of a row's own real tokens, from 0):

* Heads: given per layer as KV heads that stay full. A full head is ordinary attention over every token, always.
* ``N`` = tokens seen when a prompt ends, earlier turns included; ``L_h = max(S_0, floor(N / C))`` (``S_0`` = num_recent_tokens, ``C`` =
  compression, may be fractional), set at the end of every prompt and only there. N only grows, so L_h never shrinks. N_0 = sinks.
* The first prompt attends fully, however it is chunked. At its end a non-retrieval head keeps ``j < N_0`` and ``N - j <= L_h``
  (the last L_h tokens; a union with the sinks); all other tokens are *dropped*.
* Decode, query at position i: the new token joins first, then every held token with ``i - j >= L_h`` and ``j >= N_0`` is dropped, then
  the query attends. So the window counts the current token and holds exactly L_h tokens; a token that leaves in this step is
  already part of the compensation that this query sees.
* Compensation: one extra key and value, the means of the post-RoPE keys and of the values of *all* tokens dropped so far in that
  (layer, KV head), logit ``q·k̂/sqrt(d) + log N_d`` (in the softmax with everything else). A leaving token updates ``k̂ += (k - k̂)/N_d``
  with N_d counted after it. N_d = 0: no compensation token (no logit, not one with weight zero times something).
* A later prompt: nothing leaves while it runs. Each of its queries sees the sinks, the window as held when the prompt began, the
  compensation as it was then, and the prompt's own tokens up to itself. At its end L_h is set anew from the larger N and held tokens with
  ``N - j > L_h``, j >= N_0, are dropped into the compensation. Dropped tokens never come back, so the window may hold fewer than the
  new L_h tokens until decoding fills it (a token leaves by its position, not by a count).
* Sinks are absolute positions; a first prompt shorter than N_0 leaves the rest of the sinks to be filled by later tokens.
* No budget: memory grows with N / C by design. ``S_0 >= `` tokens seen: full attention, exactly.
"""
