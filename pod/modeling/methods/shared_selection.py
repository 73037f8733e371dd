"""PoD and a ranking of tokens together: the lead of a block chooses, and its whole block keeps the same tokens.

What is proximal or distant is judged by original positions. A head that follows holds its own keys only for kept
tokens that are still proximal and drops them as they age; it holds values for all kept tokens (paper §4, PoD+SnapKV).
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pod.modeling.methods.base import Request
from pod.modeling.methods.ranking import snapkv_slots
from pod.modeling.methods.rows import Chunks, GroupedCache
from pod.modeling.shipped.attend import CAUSAL, Lead, Tokens, Visibility, attend
from pod.modeling.shipped.attention import split_heads
from pod.modeling.shipped.blocked import Source, blocked_attention
from pod.modeling.shipped.cache import PodCache
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.sharing import is_followed
from pod.modeling.shipped.step import CacheLayer, Step
from pod.modeling.shipped.stores import Codec, Store

_AGED = 256  # a follower frees aged keys when they are more than this share (1/256) of its own keys


class _Lead(NamedTuple):
    """What a lead leaves for its followers in a pass: as it was before it chose.

    queries: ``[1, G, m, d]``; keys: ``[1, 1, n, d]``, None when decoding; positions: ``[n]``.
    """

    queries: Tensor
    keys: Tensor | None
    positions: Tensor


class _Head:
    """One KV head of one row: values of the kept tokens; keys of all of them (lead) or of the proximal ones (follower)."""

    def __init__(self, codec: Codec, is_lead: bool):
        self.is_lead = is_lead
        self.keys: Store = codec.tokens("keys", evicts=True)
        self.values: Store = codec.tokens("values", evicts=True)
        self.held = 0
        self.num_keys = 0
        self.positions: Tensor | None = None  # int32 [held] in a lead; its followers read the lead's
        self.queries: Tensor | None = (
            None  # a lead's last queries of the unfinished prompt, [1, G, <= window, d]
        )

    def append(self, k: Tensor, v: Tensor, step: Step) -> None:
        """Store ``[1, 1, m, d]``."""
        self.values.append(v, self.held)
        self.keys.append(k, self.num_keys)
        self.held += step.num_new
        self.num_keys += step.num_new
        if self.is_lead:
            new = step.positions[0].to(torch.int32)
            self.positions = new if self.positions is None else torch.cat((self.positions, new))

    def keep(self, index: Tensor) -> None:
        """Hold only the slots ``index`` ``[w]``."""
        self.values.keep(index[None, None], self.held)
        self.held = len(index)
        if self.is_lead:
            assert self.positions is not None
            self.keys.keep(index[None, None], self.num_keys)
            self.num_keys, self.positions = self.held, self.positions[index]

    def keep_keys(self, index: Tensor) -> None:
        """Of a follower's own keys, hold only ``index`` ``[w]``."""
        self.keys.keep(index[None, None], self.num_keys)
        self.num_keys = len(index)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        yield from (("keys" if self.is_lead else "window_keys", x) for x in self.keys.tensors())
        yield from (("values", x) for x in self.values.tensors())
        if self.positions is not None:
            yield "positions", self.positions
        if self.queries is not None:
            yield "bookkeeping", self.queries

    def predicted_nbytes(self) -> int:
        if self.values.is_empty:
            return 0
        positions = 4 * self.held if self.is_lead else 0
        return self.keys.predicted_nbytes(self.num_keys) + self.values.predicted_nbytes(self.held) + positions


class SharedSelectionLayer(CacheLayer):
    """One layer of one row. Leads rank by SnapKV; followers keep the slots that their lead leaves in ``step.shared``.

    Args:
        budgets: tokens per KV head in this layer.
        params: SnapKV's ``window``, ``kernel`` and ``pool``.
    """

    def __init__(self, config: PodConfig, layer_idx: int, budgets: list[int], params: dict, codec: Codec):
        super().__init__()
        self.layer_idx, self.budgets, self.params, self.codec = layer_idx, budgets, params, codec
        self.lead = config.sharing_plan.lead
        self.leads, self.followers = split_heads(self.lead[layer_idx], layer_idx)
        self.num_sink_tokens, self.num_recent_tokens = config.num_sink_tokens, config.num_recent_tokens
        self.scale = config.head_dim**-0.5
        self.groups = config.num_key_value_groups
        self.clear()

    def clear(self) -> None:
        self.heads = [_Head(self.codec, head in self.leads) for head in range(len(self.lead[0]))]

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        for head in self.heads:
            yield from head.parts()

    def select_rows(self, index: Tensor) -> None:
        assert index.tolist() == [0], "one row per layer"
        for head in self.heads:
            for store in (head.keys, head.values):
                store.select_rows(index)
            head.positions = None if head.positions is None else head.positions.clone()
            head.queries = None if head.queries is None else head.queries.clone()

    def predicted_nbytes(self, length: int) -> int:
        """For the tokens held now, which depend on what was chosen."""
        return sum(head.predicted_nbytes() for head in self.heads)

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k = step.rope(q), step.rope(k)
        queries = q.split(self.groups, dim=1)
        for number, head in enumerate(self.heads):
            head.append(k[:, number : number + 1], v[:, number : number + 1], step)
            if head.positions is not None and is_followed(self.lead, self.layer_idx, number):
                keys = head.keys.read(head.held) if step.num_new > 1 else None
                step.shared[number] = _Lead(queries[number].clone(), keys, head.positions)
        if step.num_new == 1:
            out = torch.cat([self._decode(i, x, step) for i, x in enumerate(queries)], dim=1)
        elif step.uniform_past == 0 and step.backend != "reference":
            lead, see = None, CAUSAL
            if self.followers:
                lead = Lead(*self._lead_queries_and_keys(step), heads=tuple(self.followers))
                see = Visibility(self.num_sink_tokens, self.num_recent_tokens)
            out, _ = attend(q, Tokens(k, v), lead, see, backend=step.backend)
        else:
            out = torch.cat([self._attend_blocked(i, x, step) for i, x in enumerate(queries)], dim=1)
        if not step.is_decode:
            self._observe(queries)
        self._drop_aged(step)
        for number in self.followers:
            if not is_followed(self.lead, self.layer_idx, number):
                step.shared.pop(number)
        return out

    def _lead_queries_and_keys(self, step: Step) -> tuple[Tensor, Tensor]:
        shared = [step.shared[number] for number in self.followers]
        return torch.cat([x.queries for x in shared], dim=1), torch.cat([x.keys for x in shared], dim=1)

    def _decode(self, number: int, q: Tensor, step: Step) -> Tensor:
        """One new token, ``[1, G, 1, d]``: the lead's logits serve its block, but for proximal tokens."""
        head = self.heads[number]
        own = (q[0, :, 0] * self.scale) @ head.keys.read(head.num_keys)[0, 0].transpose(0, 1)
        own = own.to(torch.promote_types(q.dtype, torch.float32))
        logits = own
        if head.is_lead:
            step.shared[number, "logits"] = own
        else:
            logits = step.shared[number, "logits"]
            assert step.uniform_past is not None
            sinks, recent = self._proximal(number, step.shared[number].positions, step.uniform_past, step)
            logits[:, :sinks] = own[:, :sinks]
            logits[:, head.held - recent :] = own[:, head.num_keys - recent :]
        weights = logits.softmax(-1).to(q.dtype)
        return (weights @ head.values.read(head.held)[0, 0])[None, :, None]

    def _proximal(self, number: int, positions: Tensor, query: int, step: Step) -> tuple[int, int]:
        """How many of the first and of the last slots a query at position ``query`` sees as proximal.

        Counted once for a block in a pass: every follower has its lead's ``positions``, and a number that is read from a
        GPU waits for it.
        """
        block = number, self.lead[self.layer_idx][number], query
        if block not in step.shared:
            near = positions < self.num_sink_tokens, positions > query - self.num_recent_tokens
            sinks, recent = torch.stack(near).sum(1).tolist()
            step.shared[block] = sinks, min(recent, len(positions) - sinks)
        return step.shared[block]

    def _attend_blocked(self, number: int, q: Tensor, step: Step) -> Tensor:
        """A chunk ``[1, G, m, d]`` behind any past."""
        head, n_s, n_r = self.heads[number], self.num_sink_tokens, self.num_recent_tokens
        values = head.values.read(head.held)
        if head.positions is not None:
            causal = partial(_visible, positions=head.positions)
            sources = [Source(q[:, None], head.keys.read(head.held), values, causal)]
        else:
            lead: _Lead = step.shared[number]
            assert lead.keys is not None
            slots = self._own_slots(head, lead.positions)
            own = partial(_visible, positions=lead.positions[slots], proximal=(n_s, n_r))
            far = partial(_visible, positions=lead.positions, distant=(n_s, n_r))
            sources = [
                Source(q[:, None], head.keys.read(head.num_keys), values[:, :, slots], own),
                Source(lead.queries[:, None], lead.keys, values, far),
            ]
        return blocked_attention(sources, step.positions, self.scale)

    def _own_slots(self, head: _Head, positions: Tensor) -> Tensor:
        """Slots ``[num_keys]`` of the tokens whose own keys a follower holds: first ones, and the last ones."""
        slots = torch.arange(head.held, device=positions.device)
        sinks = min(int((positions < self.num_sink_tokens).sum()), head.num_keys)
        return torch.cat((slots[:sinks], slots[head.held - (head.num_keys - sinks) :]))

    # -- selection -------------------------------------------------------------------------------------------

    def _observe(self, queries: tuple[Tensor, ...]) -> None:
        for number in self.leads:
            head, window = self.heads[number], self.params["window"]
            seen = queries[number] if head.queries is None else torch.cat((head.queries, queries[number]), 2)
            head.queries = seen[:, :, -window:].clone()

    def _drop_aged(self, step: Step) -> None:
        for number in self.followers:
            head = self.heads[number]
            self._free_aged(number, step.shared[number].positions, step, head.num_keys // _AGED)

    def _free_aged(self, number: int, positions: Tensor, step: Step, slack: int) -> None:
        """Free own keys of tokens that no later query of this head will see as proximal, if they are more than ``slack``."""
        assert step.uniform_past is not None
        head, query = self.heads[number], step.uniform_past + step.num_new
        sinks, recent = self._proximal(number, positions, query, step)
        if head.num_keys - sinks - recent > slack:
            slots = torch.arange(head.num_keys, device=positions.device)
            head.keep_keys(torch.cat((slots[:sinks], slots[head.num_keys - recent :])))

    def settle(self, step: Step) -> None:
        if not (step.ends_prompt or step.is_decode):
            return
        if step.ends_prompt:
            for number in self.leads:
                self._choose(number, step)
            for number in self.followers:
                self._follow(number, step)
        for head in self.heads:
            head.values.settle(head.held)
            head.keys.settle(head.num_keys)

    def _choose(self, number: int, step: Step) -> None:
        """A lead ranks, and leaves for its followers which slots stay and where all slots were."""
        head, budget = self.heads[number], self.budgets[number]
        queries, head.queries = head.queries, None
        if queries is None or head.held <= budget:
            step.shared[number, "kept"] = None, head.positions
            return
        kernel, pool = self.params["kernel"], self.params["pool"]
        index = snapkv_slots(queries, head.keys.read(head.held), budget, kernel, pool, self.scale)[0, 0]
        step.shared[number, "kept"] = index, head.positions
        head.keep(index)

    def _follow(self, number: int, step: Step) -> None:
        """A follower keeps what its lead kept, and of its own keys those that are still proximal.

        Aged keys go without slack first: how many are left over depends on the chunks, and a codec packs by number.
        """
        head = self.heads[number]
        index, positions = step.shared[number, "kept"]
        if positions is None:
            return
        self._free_aged(number, positions, step, slack=0)
        if index is None:
            return
        own = self._own_slots(head, positions)
        at = torch.isin(own, index).nonzero()[:, 0]
        head.keep_keys(at)
        head.keep(index)


def _visible(
    query: Tensor, positions: Tensor, proximal: tuple | None = None, distant: tuple | None = None
) -> Tensor:
    """Which tokens at ``positions`` ``[S]`` queries at ``[1, r]`` see: ``[1, r, S]``."""
    key, query = positions, query[..., None]
    visible = key <= query
    if proximal is not None:
        visible &= (key < proximal[0]) | (query - key < proximal[1])
    if distant is not None:
        visible &= (key >= distant[0]) & (query - key >= distant[1])
    return visible


def shared_cache(
    config: PodConfig, request: Request, budgets: list[list[int]], chunks: Chunks | None
) -> PodCache:
    """The cache of ``pod`` with a ranking; ``budgets`` ``[L][H]`` in tokens."""

    def make_layer(config: PodConfig, layer_idx: int) -> SharedSelectionLayer:
        return SharedSelectionLayer(config, layer_idx, budgets[layer_idx], request.params, request.codec)

    return GroupedCache(config, make_layer, request.spec, rowwise=True, chunks=chunks)
