"""Oracles of fm, im and imdc: the schedule in exact fractions (eqs. 1–9) and the chunked decoder. fp64.

Settled here, schedule (METHODS.md §5, paper §3; all arithmetic exact: ``fractions.Fraction``, ``math.isqrt``; never floats):

* ``m_max = budget``, ``c = chunk_size`` (largest mean chunk), prompt of ``P`` tokens, ``h`` tokens held before it (0 for a first prompt; where layers
  differ: the floor of their mean). ``h + P <= m_max``: one chunk, nothing compressed, ever.
* Otherwise ``n = ceil(P / c)`` chunks of mean ``c̄ = P / n`` (so eq. 5 gives exactly P). ``m_0 = max(m_max / n, min(h, m_max))``: the paper's
  m_max / n for a first prompt; a later prompt starts from the memory it finds (full memory: m_i = m_max throughout).
* Real-valued m_i from eq. 1 (linear), 8 (square), 9 (sqrt); n = 1: m_0 := m_max. fm: m_i = m_max for all i. Each m_i is rounded to the
  nearest integer, halves up: ``floor(m_i + 1/2)``, at least 1. From here on m_i is the rounded one. square-sqrt: square in layers
  ``l < L // 2``, sqrt in the others. ``m_{n-1} = m_max`` always.
* fm and im: every chunk is c̄. imdc: ``c_0 = c̄``, ``c_i = c̄ + m̂ - m_{i-1}``, m̂ = mean(m_0 … m_{n-2}), with the *rounded* m (layer mean, a
  Fraction, where layers differ). Any real c_i < 1: ``ValueError`` before anything of this prompt is fed. Chunk i ends at token
  ``floor(c_0 + … + c_i + 1/2)``; the last one at P.
* The schedule depends on P, h, c, m_max, L alone, never on how forward passes cut the prompt. It needs P: an announced prompt
  (``begin_prompt``) or a pass of several tokens, which is a prompt of its own.

Settled here, steps:

* Step i attends causally to memory + chunk i, in every layer and head. Then memory + chunk is compressed to ``min(m_i, what is there)`` in
  each layer (``clamp to what exists``: an early memory may be smaller than the schedule says; chunks still follow the schedule). The last
  chunk is compressed too, to m_{n-1} = m_max. Decoded tokens are appended; nothing is compressed until the next prompt.
* Positions: in each layer its own slots 0 … (memory in order of age, then the chunk, then decoded tokens): keys and query are rotated at
  their slot, so layers with different memories use different positions. Keys are stored before RoPE. Uncompressed: natural.
* Pruner snapkv (window, kernel, pool; capacity m = min(m_i, there); the rule of snapkv in oracles_ranked.py with budget m and the chunk as the
  prompt): o = min(window, tokens of the chunk). The attention (softmax over memory + chunk, causal, rotated as above) of the last o queries,
  summed over queries, averaged over the group's query heads, pooled over the slots before the last o only (zero padding, avg divides by
  kernel). Kept: the best m - o of these (ties: lower slot) and the last o; if m <= o: the last m. m = there: everything.
* Pruner streamingllm (num_sink_tokens = 4): the first min(num_sink_tokens, m) slots of memory + chunk and the last m - that.
* adaptive (im and imdc; per row): chunks are those of linear, as is m_i for i = 0 and 1, and whenever all ratios are 0. For i >= 2 a layer's ratio is
  ``p = kept slots of step i-1 that were memory before that step / kept slots``, counts summed over its KV heads (eq. 2 for step i-1). Total
  ``T = L·m_i`` (linear, rounded). Real sizes ``x_l = clip(λ·p_l, lo_l, a_l)`` with the λ that makes them sum to T, ``a_l`` = tokens there,
  ``lo_l = min(m_0, a_l)``; if they cannot reach T (ratios of 0 stay at lo) every layer with p > 0 gets a_l and the rest of T is unused; if
  ``T >= Σ a_l`` all stay. Integers: floor, then + 1 to the largest fractions (lower layer first) until the sum is floor(Σ x).
"""
