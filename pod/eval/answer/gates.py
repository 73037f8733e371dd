"""How often PoD's gate lets distant tokens be left out, counted while decoding (PoD appendix B.4), and what is predicted then."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pod.eval.answer.perplexity import nll_behind
from pod.modeling.shipped.attend import take_heads
from pod.modeling.shipped.grouped import attend_slots
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.step import Step

COUNTS = ("heads", "heads_skipped", "groups", "groups_skipped", "exact", "saved", "dense")


def counts_of(skipped: Tensor, length: int, window: int, leads: int) -> Counter[str]:
    """A layer's decision for one token of a row: skipped [f, G] of its following KV heads; leads: number of leading ones.

    heads, groups: query heads of followers, and their KV heads; skipped: whose gate reached tau (of groups: of all their query heads; only
    then the distant values stay unread). exact, saved, dense: multiply-adds of attention in units of head_dim, over all heads: of PoD
    without skipping, of what is left out, and of the dense model.
    """
    (followers, groups), heads_skipped = skipped.shape, int(skipped.sum())
    return Counter(
        heads=followers * groups,
        heads_skipped=heads_skipped,
        groups=followers,
        groups_skipped=int(skipped.all(-1).sum()),
        exact=groups * (leads * 2 * length + followers * (window + length)),
        saved=heads_skipped * (length - window),
        dense=groups * (leads + followers) * 2 * length,
    )


class GateProbe:
    """Sets `tau` of a PoD cache without an engine, and counts what its gates decide from then on.

    cache: of rows without padding; tau: None = the exact attention, nothing is skipped.
    Attributes: rows: sums of `counts_of` of every row, over decoded tokens that have distant tokens, and layers.
    """

    def __init__(self, cache: Any, tau: float | None):
        self.tau = tau
        self.rows: list[Counter[str]] = [Counter(dict.fromkeys(COUNTS, 0)) for _ in range(cache.batch_size)]
        for layer in cache.layers:
            assert isinstance(layer, PodCacheLayer) and cache.engine is None, "the ordinary PoD cache"
            layer.tau = tau
            layer._decode = self._before(layer, layer._decode)  # type: ignore[method-assign]

    def _before(self, layer: PodCacheLayer, decode: Callable[[Tensor, Step], Tensor]) -> Any:
        def observed(q: Tensor, step: Step) -> Tensor:
            out = decode(q, step)
            self._see(layer, q, step)
            return out

        return observed

    def _see(self, layer: PodCacheLayer, q: Tensor, step: Step) -> None:
        """q [B, Hq, 1, d] of one new token per row, which is stored; its leads have left their distant tokens."""
        length, heads = step.max_length, layer.roles.followers
        window = layer.num_sink_tokens + layer.num_recent_tokens
        if length <= window:
            return
        skipped = torch.zeros(len(self.rows), len(heads), layer.groups, dtype=torch.bool)
        if self.tau is not None and heads:
            keys = layer.window_keys.read(length)
            near = attend_slots(take_heads(q, heads, layer.groups), keys, keys, layer.scale)[1]
            assert step.lead.buffers is not None
            far = step.lead.buffers.distant_lse[:, heads]
            skipped = (torch.sigmoid(near.view(far.shape) - far) >= self.tau).cpu()
        for row, decided in zip(self.rows, skipped, strict=True):
            row.update(counts_of(decided, length, window, len(layer.roles.leads)))


def shares(counts: dict[str, int]) -> dict[str, float | None]:
    """What counts mean, in [0, 1]; None where nothing was counted (no follower, or no distant token).

    Returns: {skipped: of the followers' query heads, skipped_groups: of their KV heads, saved: of the attention's multiply-adds of PoD
    without skipping, saved_over_dense: of those of the dense model, what PoD saves anyway included}.
    """
    heads, groups, exact, dense = (counts[name] for name in ("heads", "groups", "exact", "dense"))
    return {
        "skipped": counts["heads_skipped"] / heads if heads else None,
        "skipped_groups": counts["groups_skipped"] / groups if groups else None,
        "saved": counts["saved"] / exact if exact else None,
        "saved_over_dense": 1 - (exact - counts["saved"]) / dense if dense else None,
    }


def total(rows: list[dict[str, int]]) -> dict[str, int]:
    """The sum of counts."""
    return {name: sum(row[name] for row in rows) for name in COUNTS}


@torch.no_grad()
def nll_by_tau(
    model: Any, cache: Any, tokens: Tensor, first: int, taus: Sequence[float | None]
) -> list[tuple[list[float], list[dict[str, int]], int]]:
    """Of every threshold: summed NLL (nats) of `tokens` [B, n] from position `first` on and gate counts, per row, and the bytes held.

    cache: a new one; it reads what stands before `first - 1`, and copies of it go on token by token, so that thresholds differ by tau alone.
    """
    model.model(input_ids=tokens[:, : first - 1], past_key_values=cache, use_cache=True)
    found = []
    for tau in taus:
        own = copy.deepcopy(cache)
        probe = GateProbe(own, tau)
        nll = nll_behind(model, own, tokens, first, tokens.shape[1])
        found.append((nll.double().sum(1).tolist(), list(map(dict, probe.rows)), own.nbytes))
    return found


@torch.no_grad()
def greedy_by_tau(
    model: Any, cache: Any, ids: Tensor, new_tokens: int, taus: Sequence[float | None]
) -> list[list[int]]:
    """The greedy answer to a prompt `ids` [1, n] under every threshold; already its first token is decoded from a copy of `cache`, a new one."""
    model.model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
    found = []
    for tau in taus:
        own, token, said = copy.deepcopy(cache), ids[:, -1:], []
        GateProbe(own, tau)
        for _ in range(new_tokens):
            output = model(input_ids=token, past_key_values=own, use_cache=True)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            said.append(int(token))
        found.append(said)
    return found
