"""Quest (Tang et al., 2024): store all tokens; a decoded token reads only the pages that may matter to it.

A page is ``page_size`` consecutive tokens. The smallest and the largest value of each key channel in a page
give an upper bound on the product of a query with any key of the page. Each query head reads the pages with
the largest bounds.

With PoD, leads choose the pages. Followers read the tokens that the same query heads of their lead read, and
use the lead's logits of distant tokens.
"""

from math import ceil, inf

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.modeling.methods.base import Builder, Request, cache_of
from pod.modeling.methods.ranking import best_slots
from pod.modeling.model.attend import compute_dtype, merge_heads, take_heads
from pod.modeling.model.config import PodConfig
from pod.modeling.model.grouped import chosen, slot_logits, weigh_slots
from pod.modeling.model.kv_buffer import KVBuffer, numbers, take_slots
from pod.modeling.model.layout import PodCacheLayer
from pod.modeling.model.step import Step


class QuestLayer(PodCacheLayer):
    """A layer of the model's own layout, with the bounds of its leads' pages; for rows of equal length.

    Attributes:
        num_read_pages: how many pages a query head reads when decoding: the budget, rounded up to whole
            pages.
        is_dense: whether its leads, and with them their followers, read all tokens.
        pages: a buffer ``[B, leads, pages, 2 d]`` with the minimum, then the maximum of each channel. It
            stays native under any codec, because packing would make bounds invalid.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.page_size = request.params["page_size"]
        self.num_read_pages = ceil(request.budget / self.page_size)
        self.is_dense = layer_idx < request.params["num_dense_layers"]
        super().__init__(config, layer_idx, request.quantizer)

    def clear(self) -> None:
        super().clear()
        self.pages = KVBuffer()

    def kv_buffers(self) -> dict[str, KVBuffer]:
        return super().kv_buffers() | {"pages": self.pages}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        (q, k), past, roles = step.ropes[self.layer_idx].pair(q, k), step.uniform_past, self.roles
        assert past is not None
        if roles.leads and not self.is_dense:
            self._update_pages(take_heads(k, roles.leads), past)
        reads_all = not step.is_decode or self.num_read_pages * self.page_size > past
        if reads_all or (self.is_dense and not roles.followed + roles.followers):
            return self.attend_rotated(q, k, v, step)
        for buffer, x, heads in ((self.lead_keys, k, roles.leads), (self.all_values, v, roles.held)):
            if heads:
                buffer.append(take_heads(x, heads), past)
        self._append_windows(k, v, step)
        return self._read_pages(q, step)

    def _update_pages(self, k: Tensor, past: int) -> None:
        """Update the bounds of pages with new rotated keys ``[B, leads, m, d]`` behind ``past`` tokens."""
        offset = past % self.page_size
        first = past // self.page_size
        if offset:  # the first page has tokens already: in their place, use its minimum and maximum as keys
            bounds = self.pages.read(first + 1)[:, :, first].unflatten(2, (2, -1))
            k = torch.cat((bounds.repeat(1, 1, ceil(offset / 2), 1)[:, :, :offset], k), dim=2)
        padding = 0, 0, 0, -k.shape[2] % self.page_size
        low = F.pad(k, padding, value=inf).unflatten(2, (-1, self.page_size))
        high = F.pad(k, padding, value=-inf).unflatten(2, (-1, self.page_size))
        self.pages.append(torch.cat((low.amin(3), high.amax(3)), dim=-1), first)

    def choose_pages(self, q: Tensor, num_pages: int) -> Tensor:
        """The pages that queries ``[B, h, G, d]`` read: the last page, and those with the best scores.

        A page's score is ``Σ_c max(q_c·min_c, q_c·max_c)`` over the channels (Quest, §3.3). In a tie the
        lower page wins.

        Returns:
            ``[B, h, G, num_read_pages]``, ascending.
        """
        q = q.to(compute_dtype(q.dtype))
        bounds = self.pages.read(num_pages - 1).to(q.dtype).transpose(2, 3)
        scores = torch.cat((q.clamp(max=0), q.clamp(min=0)), dim=-1) @ bounds
        return F.pad(best_slots(scores, self.num_read_pages - 1), (0, 1), value=num_pages - 1)

    def _read_pages(self, q: Tensor, step: Step) -> Tensor:
        """Attention of one new token per row, ``[B, Hq, 1, d]``, to the tokens of the chosen pages only."""
        read, roles, length = step.lead.read, self.roles, step.max_length
        parts = []
        if roles.leads:
            slots, logits = self._lead(take_heads(q, roles.leads, self.groups), length)
            for place, head in enumerate(roles.leads):
                read[head] = None if slots is None else slots[:, place], logits[:, place]
        whole = tuple(head for head in roles.held if read[head][0] is None)
        for heads in filter(None, (whole, tuple(head for head in roles.held if head not in whole))):
            parts.append((heads, self._attend_as_read(heads, q, step)))
        if roles.windows:
            parts.append((roles.windows, self._decode_near(q, step)))
        return merge_heads(parts, self.groups)

    def _lead(self, q: Tensor, length: int) -> tuple[Tensor | None, Tensor]:
        """The slots that the leads' queries ``[B, leads·G, 1, d]`` read, and their logits of these tokens.

        Returns:
            Slots ``[B, leads, G, n]``, or None for all slots; and logits ``[B, leads, G, n]``.
        """
        if self.is_dense:
            return None, slot_logits(q, self.lead_keys.stored, length, self.scale)
        last_page = (length - 1) // self.page_size
        groups = q.squeeze(2).unflatten(1, (-1, self.groups))
        pages = self.choose_pages(groups, last_page + 1)
        slots = torch.add(numbers(self.page_size, q.device), pages[..., None], alpha=self.page_size)
        behind = (last_page + 1) * self.page_size - length  # slots of the last page that are still empty
        slots = slots.flatten(3)[..., : slots.shape[3] * self.page_size - behind]
        logits = slot_logits(q, _taken(self.lead_keys.read(length), slots), slots.shape[3], self.scale)
        return slots, logits.view(slots.shape)

    def _attend_as_read(self, heads: tuple[int, ...], q: Tensor, step: Step) -> Tensor:
        """Attention ``[B, h·G, 1, d]`` of KV heads, to the tokens that ``step.lead.read`` names for them.

        Their leads must all read equally many tokens.
        """
        read, found = zip(*(step.lead.read[head] for head in heads), strict=True)
        slots = None if read[0] is None else torch.stack(read, 1)
        logits = torch.stack(found, 1)
        followers = tuple(head for head in heads if head in self.roles.followers)
        if followers:
            at = chosen(followers, heads)
            where = numbers(step.max_length, q.device) if slots is None else slots[:, at]
            logits[:, at] = self._with_near(followers, q, logits[:, at], where, step.max_length)
        weights, places = logits.softmax(-1), [*map(self.roles.held.index, heads)]
        if slots is None:
            return weigh_slots(weights, take_heads(self.all_values.stored, places), q.dtype)
        values = _taken(take_heads(self.all_values.read(step.max_length), places), slots)
        return weigh_slots(weights.flatten(1, 2)[:, :, None], values, q.dtype)

    def _with_near(self, heads: tuple[int, ...], q: Tensor, logits: Tensor, slots: Tensor, n: int) -> Tensor:
        """Replace leads' logits of proximal tokens by those of their followers, and return all logits.

        Args:
            heads: the followers.
            q: queries of all heads ``[B, Hq, 1, d]``.
            logits: ``[B, h, G, k]``, those of the leads.
            slots: the tokens of these logits, in a shape that broadcasts to it.
            n: number of tokens seen.
        """
        n_s, n_r = self.num_sink_tokens, self.num_recent_tokens
        keys = take_heads(self.window_keys.read(n), [*map(self.roles.followers.index, heads)])
        own = slot_logits(take_heads(q, heads, self.groups), keys, keys.shape[2], self.scale)
        is_sink = slots < n_s
        ring = torch.where(is_sink, slots, (slots - n_s) % n_r + n_s).expand_as(logits)
        return torch.where(is_sink | (slots >= n - n_r), own.gather(3, ring), logits)


def _taken(x: Tensor, slots: Tensor) -> Tensor:
    """Take slots ``[B, h, G, n]`` from ``[B, h, length, d]``: ``[B, h·G, n, d]``."""
    return take_slots(x, slots.flatten(2)).unflatten(2, slots.shape[2:]).flatten(1, 2)


BUILDERS = {"quest": Builder(build=cache_of(QuestLayer))}
