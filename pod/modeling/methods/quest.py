"""Quest (Tang et al., 2024): everything is stored, and a decoded token reads only the pages that may matter to it.

A page is ``page_size`` consecutive tokens. The smallest and the largest value of each key channel in it bound the
product of any query with any of its keys; each query head reads the pages with the largest bounds.
"""

from math import ceil, inf

import torch
from torch import Tensor
from torch.nn import functional as F

from pod.modeling.methods.base import Method, Request, cache_of
from pod.modeling.methods.ranking import best_slots
from pod.modeling.shipped.attend import compute_dtype
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.grouped import attend_slots
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import TokenStore, numbers, take_slots


class QuestLayer(PodCacheLayer):
    """A dense layer with the bounds of its pages, for rows that are alike.

    Attributes:
        num_read_pages: what a query head reads when decoding: the budget, rounded up to whole pages.
        is_dense: whether the layer reads everything.
        pages: ``[B, H, pages, 2 d]``: minimum, then maximum; native under any codec, as they are bounds.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        self.page_size = request.params["page_size"]
        self.num_read_pages = ceil(request.budget / self.page_size)
        self.is_dense = layer_idx < request.params["num_dense_layers"]
        super().__init__(config, layer_idx, request.codec)

    def clear(self) -> None:
        super().clear()
        self.pages = TokenStore()

    def stores(self) -> dict[str, TokenStore]:
        return super().stores() | {"pages": self.pages}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        (q, k), past = step.ropes[self.layer_idx].pair(q, k), step.uniform_past
        assert past is not None
        if self.is_dense:
            return self.attend_rotated(q, k, v, step)
        self._update_pages(k, past)
        num_pages = ceil((past + step.num_new) / self.page_size)
        if not step.is_decode or self.num_read_pages >= num_pages:
            return self.attend_rotated(q, k, v, step)
        self.lead_keys.append(k, past)
        self.all_values.append(v, past)
        return self._read_pages(q.unflatten(1, (-1, self.groups)).squeeze(3), past + 1)

    def _update_pages(self, k: Tensor, past: int) -> None:
        """Let rotated keys ``[B, H, m, d]`` enter their pages behind ``past`` tokens."""
        offset, first = past % self.page_size, past // self.page_size
        if offset:  # the first page has tokens already: its bounds, over and over, stand for them
            bounds = self.pages.read(first + 1)[:, :, first].unflatten(2, (2, -1))
            k = torch.cat((bounds.repeat(1, 1, ceil(offset / 2), 1)[:, :, :offset], k), dim=2)
        padding = 0, 0, 0, -k.shape[2] % self.page_size
        low, high = (F.pad(k, padding, value=x).unflatten(2, (-1, self.page_size)) for x in (inf, -inf))
        self.pages.append(torch.cat((low.amin(3), high.amax(3)), dim=-1), first)

    def choose_pages(self, q: Tensor, num_pages: int) -> Tensor:
        """The last page and the best of the others for queries ``[B, H, G, d]``: ``[B, H, G, num_read_pages]``, ascending.

        A page's score is ``Σ_c max(q_c·min_c, q_c·max_c)`` over the channels (Quest, §3.3); ties: the lower page.
        """
        q = q.to(compute_dtype(q.dtype))
        bounds = self.pages.read(num_pages - 1).to(q.dtype).transpose(2, 3)
        scores = torch.cat((q.clamp(max=0), q.clamp(min=0)), dim=-1) @ bounds
        return F.pad(best_slots(scores, self.num_read_pages - 1), (0, 1), value=num_pages - 1)

    def _read_pages(self, q: Tensor, length: int) -> Tensor:
        """Attention of one new token per row, ``[B, Hq, 1, d]``, to the tokens of its pages only."""
        last_page, pages = (length - 1) // self.page_size, self.choose_pages(q, ceil(length / self.page_size))
        tokens = torch.add(numbers(self.page_size, q.device), pages[..., None], alpha=self.page_size)
        behind = (last_page + 1) * self.page_size - length  # slots of the last page that are still empty
        tokens = tokens.flatten(3)[..., : tokens.shape[3] * self.page_size - behind]
        groups, count = tokens.shape[2:]
        keys, values = (
            take_slots(store.read(length), tokens.flatten(2)).unflatten(2, (groups, count)).flatten(1, 2)
            for store in (self.lead_keys, self.all_values)
        )
        return attend_slots(q.flatten(1, 2)[:, :, None], keys, values, self.scale)[0]


METHOD = Method(
    name="quest",
    paper="Quest (Tang et al., 2024)",
    frees="nothing: all tokens stay, with 1 / page_size more bytes for the bounds; decoding reads budget tokens per query "
    "head (behind a codec all are unpacked first: bytes are saved, time is not)",
    build=cache_of(QuestLayer),
    parameters={
        "page_size": (16, "consecutive tokens that are read or skipped together (tokens)", 1),
        "num_dense_layers": (2, "first layers, which read every token (layers)", 0),
    },
    takes_budget=True,
    refuses={
        "pod": "a follower takes its lead's logits for all distant tokens, and quest computes them for the pages that each "
        "layer chooses for itself",
        "cla": "its followers have no keys to bound pages of their own; pages shared by a block are another method",
        "window": "a window has few tokens, and all of them are read",
    },
)
