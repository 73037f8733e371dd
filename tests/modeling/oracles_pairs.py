"""Oracles of quest (pages), alone and with PoD, and minicache (pairs of layers). fp64.

Settled here, quest (Tang et al. 2024):

* Page p holds positions ``p * page_size … (p + 1) * page_size - 1`` (page_size 16) of the row's own real
  tokens. Per page, layer and KV head: the per-channel minimum and maximum of the post-RoPE keys of the tokens
  that are in it so far.
* Selection happens only in a decode step (one generated token), in layers >= num_dense_layers (2). Prompts,
  first and later, in any chunking, attend to every token.
* In a decode step the new key enters its page first. With ``P`` pages so far and ``k = ceil(budget /
  page_size)``: if ``k >= P`` every token is read. Otherwise the last page (where the new token is, full or
  not) and the ``k - 1`` best of the other pages by ``Σ_c max(q_c·min_c, q_c·max_c)``; equal scores: the lower
  page. **Per query head**, with the post-RoPE query, no scale needed.
* Softmax over the tokens of the chosen pages with their own keys, natural positions. Nothing is ever evicted.
* pod+quest: bounds are those of lead's keys. A query head of a follower reads the positions that the same
  query head of its lead reads in this step, all if the lead's layer is < num_dense_layers; logits there as
  ``pod``'s. A head that keeps its window reads it.

Settled here, minicache (MiniCache, Liu et al. 2024):

* Pairs ``(s, s+1), (s+2, s+3), …`` with ``s = L // 2``; an odd last layer stays alone and, like layers below
  s, is ordinary.
* Every pass attends with what is held *before* merging: the prompt's own tokens are native for the whole
  prompt, in any chunking.
* When a prompt ends, after the last layer: all tokens that are still native in the pair (leftover decoded
  ones of the turn before and the prompt) are merged as **one group**. After a decode step: if exactly
  ``block`` (128) tokens are native they are merged as one group. So at most block - 1 native tokens wait
  between passes.
* Merging a group of T tokens, for K (post-RoPE) and for V separately, per KV head and token: ``a``, ``b`` the
  vectors of the shallower and the deeper layer, ``â = a/‖a‖``, ``b̂ = b/‖b‖`` (a zero vector stays zero), ``Ω
  = arccos(clamp(â·b̂, -1, 1))``. Shared direction ``sin((1-t)Ω)/sin Ω·â + sin(tΩ)/sin Ω·b̂`` with t = 0.6
  (towards the deeper layer). If ``sin Ω < 1e-4`` (parallel or opposite): ``(1-t)·â + t·b̂`` divided by its
  norm (zero if that norm is zero). Each layer keeps its own norms ``‖a‖``, ``‖b‖``.
* Kept apart: in each group the ``ceil(share·T - 1e-9)`` tokens (share 0.05; the 1e-9 only undoes rounding of
  0.05·140) with the largest Ω, for **each KV head, and for K and V, on their own**; equal angles: the lower
  position. Both layers keep these vectors natively.
* Read: a kept-apart token is its native vector; any other merged token is shared direction × the layer's own
  norm. Positions as ever (keys were rotated before merging).
* A later prompt attends to the restored old tokens, to native leftovers, and to its own native tokens.
* Nothing is evicted and there is no budget; share = 1 is full attention, exactly. ``retained`` = R in place
  of share: the groups keep apart R tokens in all, as many of each as are left of R.
* With a codec (oracles_quantizers.py): layers without a pair as dense ones. A pair's directions are one
  buffer, the deeper layer's vectors kept apart another (in order of position within each group), and both
  are flushed after each merge; keys per channel. The shallower layer's vectors kept apart are their own
  direction in the first buffer, times their norm. Norms and unmerged tokens are native.
"""

import math

import torch
from oracle_tools import NaiveDecoder
from oracles_pod_selected import PodSelected
from oracles_quantizers import NaiveBuffer, Packed


class Quest(NaiveDecoder):
    def setup(self, budget, page_size=16, num_dense_layers=2):
        self.page_size, self.num_dense_layers = page_size, num_dense_layers
        self.pages = math.ceil(budget / page_size)

    def weights(self, layer, head, q, entries):
        if not self.is_decode or layer < self.num_dense_layers:
            return super().weights(layer, head, q, entries)
        q = self.turn(q, self.query_positions())
        rows = torch.full((self.groups, 1, len(entries)), -math.inf, dtype=torch.float64)
        for group in range(self.groups):
            for j in self.read(q[group, 0], [entry.k for entry in entries]):
                rows[group, 0, j] = q[group, 0] @ entries[j].k / math.sqrt(self.head_dim)
        return rows.softmax(-1)

    def read(self, q, keys):
        """Positions that one query head reads."""
        last = (len(keys) - 1) // self.page_size
        pages = range(last + 1)
        if self.pages < len(pages):
            bounds = {page: self.bound(q, keys, page) for page in pages if page != last}
            best = sorted(bounds, key=lambda page: (-bounds[page], page))
            pages = [*best[: self.pages - 1], last]
        return [j for j in range(len(keys)) if j // self.page_size in pages]

    def bound(self, q, keys, page):
        inside = keys[page * self.page_size : (page + 1) * self.page_size]
        total = 0.0
        for channel in range(len(q)):
            values = [float(key[channel]) for key in inside]
            total += max(float(q[channel]) * min(values), float(q[channel]) * max(values))
        return total


class PodQuest(PodSelected):
    """PoD attention, in decode steps to the pages of the leads' query heads only."""

    def setup(self, budget, page_size=16, num_dense_layers=2):
        super().setup(selection=None)
        self.num_dense_layers, self.quest = num_dense_layers, Quest.__new__(Quest)
        self.quest.page_size, self.quest.pages = page_size, math.ceil(budget / page_size)

    def weights(self, layer, head, q, entries):
        found, lead = super().weights(layer, head, q, entries), self.lead[layer][head]
        if not self.is_decode or lead is None or lead < self.num_dense_layers:
            return found
        own = self.turn(
            self.queries[lead][head * self.groups : (head + 1) * self.groups], self.query_positions()
        )
        for group in range(self.groups):
            read = self.quest.read(own[group, 0], [entry.k for entry in self.entries[lead][head]])
            found[group, 0, [j for j in range(len(entries)) if j not in read]] = 0.0
        return found / found.sum(-1, keepdim=True)


class MiniCache(NaiveDecoder):
    """Merging overwrites ``entry.k`` and ``entry.v`` with what would be restored.

    ``stats["merged"]`` says so.
    """

    def setup(self, block=128, share=0.05, t=0.6, retained=None):
        self.block, self.share, self.t, self.retained = block, share, t, retained

    def num_apart(self, count, before):
        if self.retained is None:
            return math.ceil(self.share * count - 1e-9)
        return min(count, max(self.retained - before, 0))

    def after_layers(self):
        start = self.num_layers // 2
        for shallow in range(start, self.num_layers - 1, 2):
            for head in range(self.num_heads):
                self.merge(self.entries[shallow][head], self.entries[shallow + 1][head])

    def merge(self, shallow, deeper):
        pairs = [
            (a, b) for a, b in zip(shallow, deeper, strict=True) if not a.stats.get("merged")
        ]  # positions ascend
        if self.is_decode and len(pairs) < self.block:
            return
        for name in ("k", "v"):
            angles = [angle(getattr(a, name), getattr(b, name)) for a, b in pairs]
            order = sorted(range(len(pairs)), key=lambda i: (-angles[i], i))
            before = sum(a.stats.get(f"{name} apart", False) for a in shallow)
            apart = order[: self.num_apart(len(pairs), before)]
            for i in apart:
                pairs[i][0].stats[f"{name} apart"] = True
            for i, (a, b) in enumerate(pairs):
                if i not in apart:
                    x, y = getattr(a, name), getattr(b, name)
                    shared = slerp(unit(x), unit(y), angles[i], self.t)
                    setattr(a, name, shared * x.norm())
                    setattr(b, name, shared * y.norm())
        for a, b in pairs:
            a.stats["merged"] = b.stats["merged"] = True


class PackedMiniCache(Packed, MiniCache):
    """``stats["buffers"]`` of the shallower layer's first entry.

    By part: its directions, the deeper layer's vectors, and norms.
    """

    def after_layers(self):
        MiniCache.after_layers(self)
        start = self.num_layers // 2
        paired = range(start, start + (self.num_layers - start) // 2 * 2)
        for layer in set(range(self.num_layers)) - set(paired):
            for head, entries in enumerate(self.entries[layer]):
                self.pack_keys(layer, head, entries)
                for entry in self.resting(entries, None):
                    self.once(entry, "v")

    def merge(self, shallow, deeper):
        pairs = [(a, b) for a, b in zip(shallow, deeper, strict=True) if not a.stats.get("merged")]
        if self.is_decode and len(pairs) < self.block:
            return
        buffers = shallow[0].stats.setdefault("buffers", {})
        for name in ("k", "v"):
            size = self.bits, self.size, self.residual, name == "k"
            directions, natives, held = buffers.setdefault(name, (NaiveBuffer(*size), NaiveBuffer(*size), []))
            vectors = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
            angles = [angle(x, y) for x, y in vectors]
            order = sorted(range(len(pairs)), key=lambda i: (-angles[i], i))
            apart = order[: self.num_apart(len(pairs), len(natives.tokens))]
            for i, (x, y) in enumerate(vectors):
                own = unit(x) if i in apart else slerp(unit(x), unit(y), angles[i], self.t)
                directions.tokens.append([own, False])
                if i in apart:
                    natives.tokens.append([y, False])
                held.append((*pairs[i], x.norm(), y.norm(), i in apart))
            directions.flush()
            natives.flush()
            beside = iter([token for token, _ in natives.tokens])
            for (a, b, norm_a, norm_b, is_apart), direction in zip(held, directions.read(), strict=True):
                setattr(a, name, direction * norm_a)
                setattr(b, name, next(beside) if is_apart else direction * norm_b)
        for a, b in pairs:
            a.stats["merged"] = b.stats["merged"] = True


def unit(x):
    return x / x.norm() if x.norm() > 0 else x


def angle(x, y):
    return math.acos(max(-1.0, min(1.0, float(unit(x) @ unit(y)))))


def slerp(x, y, omega, t):
    """Direction between two unit vectors ``[d]`` at angle omega (radians)."""
    if math.sin(omega) < 1e-4:
        return unit((1 - t) * x + t * y)
    return (math.sin((1 - t) * omega) * x + math.sin(t * omega) * y) / math.sin(omega)
