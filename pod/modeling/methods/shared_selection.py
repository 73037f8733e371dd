"""SnapKV and its relatives: when a prompt ends, keep the tokens with the best scores; alone or with PoD.

The usual scores are SnapKV's (Li et al., 2024). Each KV head keeps ``budget`` tokens: the last ``window``
tokens, and the best of the others by the attention that they get from these last tokens, summed and pooled.
All decoded tokens are kept.

With PoD, the lead of a block chooses, and its followers keep tokens at the same positions. Whether a token is
proximal or distant is judged by its original position. A follower holds own keys only for kept tokens that
are still proximal, and drops them as they age. It holds values for all kept tokens (paper §4, PoD+SnapKV).
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.ranking import EndAttention, Ranking, best_slots
from pod.modeling.model.attend import Segments, Tokens, attend, take_heads
from pod.modeling.model.config import PodConfig
from pod.modeling.model.grouped import attend_slots, slot_logits, weigh_slots
from pod.modeling.model.kv_buffer import KVBuffer, first_and_last
from pod.modeling.model.kv_quantizer import KVQuantizer
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.packed import Stored
from pod.modeling.model.sinks import add_sink
from pod.modeling.model.step import Selection, Step

_AGED = 64
"""Followers' own keys are freed only when 1/64 of them belong to distant tokens, because freeing copies the
others."""


class OwnKeys:
    """The own keys of followers: of the first ``sinks`` and the last ``recents`` of the ``held`` tokens.

    All rows and heads have equally many own keys. So in some of them, a few belong to tokens that are already
    distant there.

    A quantizer packs tokens in groups of consecutive slots. So keys are dropped in whole groups, and only
    after the values of their tokens were packed. Then the same tokens form a group whatever other rows are in
    the batch.

    Attributes:
        buffer: the own keys, those of the sinks first.
        held: tokens that each follower holds, with or without own keys.
        sinks, recents: how many of the first and of the last of these have own keys.
    """

    def __init__(self, quantizer: KVQuantizer, num_sink_tokens: int):
        self.buffer: KVBuffer = quantizer.tokens("keys", evicts=True)
        self.group_size = getattr(quantizer, "group_size", 1)
        self.residual = getattr(quantizer, "residual", 0)
        self.num_sink_tokens = num_sink_tokens
        self.held = self.sinks = self.recents = 0

    def __len__(self) -> int:
        return self.sinks + self.recents

    def append(self, k: Tensor) -> Stored:
        """Store new keys ``[B, followers, m, d]``, and return the own keys that a decoded token reads."""
        stored = self.buffer.append_and_read(k, len(self))
        self.recents += k.shape[2]
        self.held += k.shape[2]
        return stored

    def spread(self, own: Tensor, make: Callable[..., Tensor] = Tensor.new_empty) -> Tensor:
        """Turn numbers of own keys ``[…, slots]`` into numbers of all tokens held, ``[…, held]``.

        Tokens without an own key get the values that ``make`` puts into a new tensor.
        """
        out = make(own, (*own.shape[:-1], self.held))
        out[..., : self.sinks] = own[..., : self.sinks]
        out[..., self.held - self.recents :] = own[..., self.sinks :]
        return out

    def keep(self, kept: Tensor, recents: int) -> None:
        """Follow the followers, which keep only the tokens ``kept`` ``[B, F, w]``.

        Own keys stay of the first tokens kept and of at least the last ``recents``.
        """
        was = self.held - self.recents
        self.held = kept.shape[2]
        sinks, recents = self._sizes(recents)
        slots = kept[..., first_and_last(sinks, recents, self.held, kept.device)]
        slots = torch.where(slots < self.sinks, slots, (slots - was).clamp(min=0) + self.sinks)
        if len(self):
            self.buffer.keep(slots.clamp(max=len(self) - 1), len(self))
        self.sinks, self.recents = sinks, recents

    def free(self, recents: int) -> None:
        """Drop own keys of all but the sinks and last ``recents`` tokens, once they are many (``_AGED``)."""
        sinks, recents = self._sizes(recents)
        if sinks + recents + recents // _AGED < len(self):
            self.buffer.keep_ends(sinks, recents, len(self))
            self.sinks, self.recents = sinks, recents

    def _sizes(self, recents: int) -> tuple[int, int]:
        """How many first and last tokens must have own keys, if the last ``recents`` are needed."""
        sinks = min(self.num_sink_tokens, self.held)
        packed = max(0, self.held - self.residual) // self.group_size * self.group_size
        recents = min(max(recents, self.held - packed), self.held - sinks)
        return sinks, recents + (self.held - sinks - recents) % self.group_size


class ByRole(NamedTuple):
    """A tensor ``[B, heads or query heads, …]`` of a head group, divided by role. All three are views.

    Attributes:
        leads: the part of the leads.
        followers: the part of the followers.
        both: leads, then followers.
    """

    leads: Tensor
    followers: Tensor
    both: Tensor


class HeadGroup:
    """KV heads of a layer that hold equally many tokens at all times, in tensors ``[B, h, held, d]``.

    Attributes:
        leads, followers: KV heads of the group by role.
        followed: for each lead that has followers, its index in ``leads`` and its KV head.
        held: tokens held by each row and head.
        keys: keys of the leads.
        values: values of the leads, then of the followers.
        own: own keys of the followers.
        position_buffer: positions of the tokens held by leads, as ``[B, leads, held, 1]``.
        ranking: the ranking of the prompt that is being fed, by which the leads will choose.
        whole_from: position from which on every token is held, because it came after the last choice.
        chosen: for each lead, the last chosen positions before ``whole_from``, ascending. Of several
            rows, the largest position counts. None = they were not read from the device yet.
    """

    def __init__(self, layer: "SharedSelectionLayer", leads: list[int], followers: list[int]):
        self.leads, self.followers, self.shares = leads, followers, layer.shares
        self.followed = [(i, head) for i, head in enumerate(leads) if head in layer.roles.followed]
        self.ranking = layer.make_ranking()
        self.values: KVBuffer = layer.quantizer.tokens("values", layer.evicts)
        self.keys: KVBuffer = layer.quantizer.tokens("keys", layer.evicts)
        self.own = OwnKeys(layer.quantizer, layer.num_sink_tokens)
        self.held = self.whole_from = 0
        self.position_buffer = KVBuffer()
        self.position_buffer.is_tight = True
        self.chosen: list[list[int]] | None = [[] for _ in self.leads]

    def kv_buffers(self) -> list[tuple[str, KVBuffer, int]]:
        """Name, buffer and number of tokens of every buffer."""
        return [
            ("window_keys", self.own.buffer, len(self.own)),
            ("keys", self.keys, self.held),
            ("values", self.values, self.held),
            ("positions", self.position_buffer, self.held),
        ]

    @property
    def positions(self) -> Tensor:
        """Positions of the tokens held, int32 ``[B, leads, held]``; None where nothing is shared."""
        positions = self.position_buffer.data
        return None if positions is None else positions[..., 0]  # type: ignore[return-value]

    def append(self, k: Tensor, own: Tensor, v: Tensor, step: Step) -> tuple[Stored | None, ...]:
        """Store new tokens: keys ``[B, leads, m, d]``, own keys ``[B, followers, m, d]``, values of both.

        Returns:
            The keys, own keys and values that a decoded token reads. None where no head has such keys.
        """
        keys = own_keys = None
        values = self.values.append_and_read(v, self.held)
        if self.followers:
            own_keys = self.own.append(own)
        if self.leads:
            keys = self.keys.append_and_read(k, self.held)
        if self.leads and self.shares:
            seen = step.max_length
            new = torch.arange(seen - step.num_new, seen, dtype=torch.int32, device=k.device)
            self.position_buffer.append(new[:, None].expand(*k.shape[:2], -1, -1), self.held)
        self.held += step.num_new
        return keys, own_keys, values

    def scores(self, step: Step) -> Tensor:
        """The ranking's scores of the tokens that the leads hold, ``[B, leads, held]``."""
        values = take_heads(self.values.read(self.held), range(len(self.leads)))
        return self.ranking.scores(self.keys.read(self.held), values, step)


class SharedSelectionLayer(PodCacheLayer):
    """One layer for rows of equal length. Leads choose tokens; followers keep the slots of their leads.

    Subclasses change the ranking (``ranks``), the budgets of layers and heads (``budgets``, with ``alike``),
    or the whole choice (``choose``).

    Attributes:
        ranks: ``(config, layer_idx, request) -> Ranking``; raises ``ValueError`` for a request that it cannot
            serve.
        budget: tokens of a KV head, as a mean over layers and heads; unlimited for methods that take no
            budget.
        head_groups: the layer's KV heads but windows, grouped by ``alike``.
        order: the KV heads, group after group, leads before followers, windows last.
    """

    evicts = True
    ranks: ClassVar[Callable[[PodConfig, int, Request], Ranking]] = EndAttention

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.budget, self.params = request.budget or sys.maxsize, request.params
        make_ranking = type(self).ranks
        self.make_ranking = lambda: make_ranking(config, layer_idx, request)
        self.make_ranking()  # checks the request, even where no head of the layer leads
        self.shares = config.sharing_plan.num_followers > 0
        super().__init__(config, layer_idx, request.quantizer)

    def alike(self, head: int) -> Hashable:
        """A label of a KV head. Heads with the same label must always hold equally many tokens."""
        return None

    def budgets(self, seen: int) -> list[list[int]]:
        """How many tokens each layer and KV head keeps, ``[L][H]``, if ``seen`` tokens were seen so far."""
        return [[self.budget] * len(row) for row in self.lead]

    def clear(self) -> None:
        members: dict[Hashable, tuple[list[int], list[int]]] = {}
        for head in self.roles.held:
            leads, followers = members.setdefault(self.alike(head), ([], []))
            if head in self.roles.leads:
                leads.append(head)
            else:
                followers.append(head)
        self.head_groups = [HeadGroup(self, *roles) for roles in members.values()]
        held = [head for group in self.head_groups for head in group.leads + group.followers]
        self.order = (*held, *self.roles.windows)
        counts = [len(x) for x in (self.roles.leads, self.roles.followers, self.roles.windows)]
        self.is_reordered = len(self.head_groups) > 1 or max(counts) < len(self.order)
        self.near_keys = self.quantizer.window("keys", self.num_sink_tokens, self.num_recent_tokens)
        self.near_values = self.quantizer.window("values", self.num_sink_tokens, self.num_recent_tokens)

    def _held(self, length: int) -> list[tuple[str, KVBuffer, int]]:
        """Name, buffer and number of tokens of each buffer that is not empty after ``length`` tokens."""
        found = [("near_keys", self.near_keys, length), ("near_values", self.near_values, length)]
        for number, group in enumerate(self.head_groups):
            found += [(f"{name} of {number}", buffer, held) for name, buffer, held in group.kv_buffers()]
        return [entry for entry in found if not entry[1].is_empty]

    def kv_buffers(self) -> dict[str, Any]:
        rankings = {f"bookkeeping of {i}": group.ranking for i, group in enumerate(self.head_groups)}
        return {name: buffer for name, buffer, _ in self._held(0)} | rankings

    # -- attention -------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        plain, (q, k) = q, step.ropes[self.layer_idx].pair(q, k)
        if not step.is_decode:
            self._observe(plain, q, step)
        takes_gradients = q.requires_grad or k.requires_grad or v.requires_grad
        if step.num_new == 1 and not takes_gradients:
            return self._attend_token(q, k, v, step)
        outs = []
        queries, _ = self._by_role(q)
        keys, _ = self._by_role(k)
        values, _ = self._by_role(v)
        for group, own_q, own_k, own_v in zip(self.head_groups, queries, keys, values, strict=True):
            group.append(own_k.leads, own_k.followers, own_v.both, step)
            self._publish(group, step)
            self._publish_tokens(group, own_q.leads, step)
            if not step.is_fresh:
                outs.append(self._attend_group(group, own_q, step))
        if step.is_fresh:
            out = self._prefill(q, k, v, step)
            self._append_near(k, v, step)
            return out
        if self.roles.windows:
            outs.append(self._attend_role(self.roles.windows, q, k, v, step))
            self._append_near(k, v, step)
        return self._in_order(outs)

    def _observe(self, plain: Tensor, q: Tensor, step: Step) -> None:
        """Show the queries of a prompt's chunk to rankings and buffers of keys, which may score with them.

        Args:
            plain: ``[B, Hq, m, d]``, not rotated.
            q: the same, rotated.
        """
        for group in self.head_groups:
            if group.leads:
                own = take_heads(plain if group.ranking.before_rope else q, group.leads, self.groups)
                group.ranking.observe(own, step)
                group.keys.observe(take_heads(q, group.leads, self.groups), step)

    def _attend_token(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention of one new token per row."""
        outs = []
        queries, near_q = self._by_role(q)
        keys, near_k = self._by_role(k)
        values, near_v = self._by_role(v)
        for group, own_q, own_k, own_v in zip(self.head_groups, queries, keys, values, strict=True):
            lead_keys, own_keys, held_values = group.append(own_k.leads, own_k.followers, own_v.both, step)
            self._publish(group, step)
            parts = []
            if group.leads:
                logits = slot_logits(own_q.leads, lead_keys, group.held, self.scale)
                self._publish_logits(group, logits, step)
                parts.append(logits)
            if group.followers:
                own = slot_logits(own_q.followers, own_keys, len(group.own), self.scale)
                parts.append(self._with_logits_of_leads(group, own, step))
            logits = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
            outs.append(weigh_slots(logits.softmax(-1), held_values, q.dtype))
        if self.roles.windows:
            outs.append(self._attend_windows(near_q, near_k, near_v, step))
        return self._in_order(outs)

    def _attend_windows(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention of one new token per row, for the heads that keep their windows."""
        past = step.uniform_past
        assert past is not None, "rows are alike"
        keys = self.near_keys.append_and_read(k, past)
        values = self.near_values.append_and_read(v, past)
        out, lse, _ = attend_slots(q, keys, values, self.scale)
        if step.sink is None:
            return out
        return add_sink(out, lse, *step.sink.of_heads(self.roles.windows).columns())[0]

    def _with_logits_of_leads(self, group: HeadGroup, own: Tensor, step: Step) -> Tensor:
        """Logits ``[B, followers, G, held]``: own ones for proximal tokens, the leads' for distant ones.

        Args:
            own: ``[B, followers, G, own keys]``.
        """
        far, near = [], []
        for head in group.followers:
            scored = step.lead.selections[head].scored
            assert scored is not None, "its lead attends first"
            far.append(scored[0])
            near.append(scored[1])
        return torch.where(torch.stack(near, 1)[:, :, None], group.own.spread(own), torch.stack(far, 1))

    def _by_role(self, x: Tensor) -> tuple[list[ByRole], Tensor]:
        """Split ``x`` ``[B, H or Hq, …]`` by head groups and roles, in a fixed number of operations.

        Returns:
            The heads of each head group, and the heads that keep their windows.
        """
        width = x.shape[1] // len(self.order)
        if self.is_reordered:
            x = x.index_select(1, head_index(self.order, width, x.device))
        found, start = [], 0
        for group in self.head_groups:
            leads = width * len(group.leads)
            followers = width * len(group.followers)
            both = x[:, start : start + leads + followers]
            found.append(ByRole(both[:, :leads], both[:, leads:], both))
            start += leads + followers
        return found, x[:, start:]

    def _in_order(self, outs: list[Tensor]) -> Tensor:
        """Join the outputs of head groups and windows to ``[B, Hq, m, d]``, in the order of the heads."""
        if not self.is_reordered:
            return outs[0]
        pieces = [piece for out in outs for piece in out.split(self.groups, dim=1)]
        return torch.cat([pieces[self.order.index(head)] for head in range(len(pieces))], dim=1)

    def _publish(self, group: HeadGroup, step: Step) -> None:
        """Leave in ``step``, for followers, the positions of the tokens that their leads hold now."""
        for place, head in group.followed:
            step.lead.selections[head] = Selection(group.positions[:, place])

    def _publish_tokens(self, group: HeadGroup, q: Tensor, step: Step) -> None:
        """Leave in ``step``, for followers, the queries and keys of their leads."""
        for place, head in group.followed:
            step.lead.queries[head] = take_heads(q, [place], self.groups).clone()
            step.lead.keys[head] = take_heads(group.keys.view(group.held), [place])

    def _publish_logits(self, group: HeadGroup, logits: Tensor, step: Step) -> None:
        """Leave in ``step``, for followers, the logits of their leads and which tokens are proximal."""
        if group.followed:
            is_recent = group.positions >= step.max_length - self.num_recent_tokens
            near = is_recent | (group.positions < self.num_sink_tokens)
            for place, head in group.followed:
                step.lead.selections[head].scored = logits[:, place], near[:, place]

    def _attend_group(self, group: HeadGroup, q: ByRole, step: Step) -> Tensor:
        """Attention of a chunk, when the cache holds tokens already, for the heads of a group.

        Slots are in the order of positions. While nothing was dropped, a slot is a position.

        Args:
            group: the head group, which holds the chunk already.
            q: queries of its leads and of its followers, ``[B, heads·G, m, d]`` each.
            step: the pass.
        """
        parts = []
        values = group.values.view(group.held)
        split = len(group.leads)
        segments = Segments.whole(len(step.rows), step.num_new, group.held)
        if group.leads:
            tokens = Tokens(group.keys.view(group.held), take_heads(values, range(split)))
            out, _ = attend(q.leads, tokens, segments=segments, scale=self.scale, backend=step.chunk_backend)
            parts.append(out)
        if group.followers:
            own = group.own.buffer.read(len(group.own)).transpose(2, 3)
            keys = group.own.spread(own, Tensor.new_zeros).transpose(2, 3).contiguous()
            see, past = self._visibility, group.held - step.num_new
            if past < step.rows[0][0]:
                positions = [step.lead.selections[head].positions for head in group.followers]
                see = see._replace(positions=torch.stack(positions, 1), start=step.rows[0][0])
            tokens = Tokens(keys, take_heads(values, range(split, split + len(group.followers))))
            lead = step.lead.take(group.followers, group.held)
            parts.append(attend(q.followers, tokens, lead, see, segments, self.scale, step.chunk_backend)[0])
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    # -- selection -------------------------------------------------------------------------------------------

    def flush(self, step: Step) -> None:
        if step.ends_prompt:
            for group, slots in zip(self.head_groups, self.choose(step), strict=True):
                self._select(group, slots, step)
                group.ranking = self.make_ranking()
        if self.quantizer.comes_to_rest and (step.ends_prompt or step.is_decode):
            for _, buffer, count in self._held(step.max_length):
                buffer.flush(count)

    def choose(self, step: Step) -> list[Tensor | None]:
        """The slots ``[B, leads, budget]`` that the leads of each head group keep, ascending. None = all."""
        if step.sizes is None:
            step.sizes = self.budgets(step.max_length)
        row = step.sizes[self.layer_idx]
        sized = [(group, row[group.leads[0]] if group.leads else group.held) for group in self.head_groups]
        return [best_slots(group.scores(step), n) if group.held > n else None for group, n in sized]

    def _select(self, group: HeadGroup, slots: Tensor | None, step: Step) -> None:
        """Keep only the slots ``slots`` in a group's leads, and in its followers those that their leads keep.

        Args:
            slots: from ``choose``.
        """
        kept = []
        if group.leads:
            kept.append(slots)
            if slots is not None:
                group.keys.keep(slots, group.held)
                if group.shares:
                    group.position_buffer.keep(slots, group.held)
                    group.chosen = None
            for place, head in group.followed:
                left = step.lead.selections.setdefault(head, Selection(group.positions[:, place]))
                left.kept = None if slots is None else slots[:, place]
        if group.followers:
            found = (step.lead.selections[head].kept for head in group.followers)
            chosen = [index for index in found if index is not None]  # all or none
            kept.append(torch.stack(chosen, 1) if chosen else None)
        if kept[0] is not None:
            group.values.keep(torch.cat(kept, dim=1), group.held)
            group.held = kept[0].shape[2]
            if group.followers:
                group.own.keep(kept[-1], self.num_recent_tokens - 1)


def free_own_keys(layers: list[SharedSelectionLayer], step: Step, label: None) -> None:
    """Free the own keys of followers for tokens that are distant for the next query.

    The host must know how many these are. So after leads have chosen tokens, the positions are read from the
    device once, for all layers.
    """
    head_groups = [(layer, group) for layer in layers for group in layer.head_groups]
    seen, n_r = step.max_length, next((layer.num_recent_tokens for layer, _ in head_groups), 1)
    unread = [group for _, group in head_groups if group.chosen is None]
    if unread:
        latest = [group.positions[:, :, -n_r:].amax(0) for group in unread]
        device = latest[0].device  # layers may lie on several devices
        numbers = torch.cat([x.flatten().to(device) for x in latest]).tolist()
        start = 0
        for group, x in zip(unread, latest, strict=True):
            group.whole_from = seen
            group.chosen = []
            for _ in group.leads:
                group.chosen.append(numbers[start : start + x.shape[1]])
                start += x.shape[1]
    near = {}
    for layer, group in head_groups:
        whole = min(seen - group.whole_from, n_r - 1)
        for head, chosen in zip(group.leads, group.chosen or (), strict=True):
            near[layer.layer_idx, head] = whole + len(chosen) - bisect_right(chosen, seen - n_r)
        if group.followers:
            most = max(near[layer.lead[layer.layer_idx][head], head] for head in group.followers)
            group.own.free(most)


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def head_index(heads: tuple[int, ...], width: int, device: torch.device) -> Tensor:
    """Indices ``[len(heads)·width]`` of the heads that belong to the KV heads ``heads``.

    ``width`` is 1 for keys and values, and ``G`` for queries.
    """
    return torch.tensor([head * width + i for head in heads for i in range(width)], device=device)


BUILDERS = {"snapkv": Builder(build=cache_of(SharedSelectionLayer, after_layers=free_own_keys))}
