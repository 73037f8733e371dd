"""ThinK (Xu et al., 2024, arXiv:2407.21018): keys of the prompt lose the channels that its last queries have least use for.

When the first prompt ends, channel ``j`` of a KV head is worth ``‖Q_j‖² ‖K_j‖²``: over the last queries of the prompt and over all of its
keys, both rotated, as in the authors' code, and mean over the query heads of a group, as in kvpress (theirs prunes a copy of the keys
for each). Keys of all tokens but the ``recent`` newest are held in the best channels then, and the end of a later prompt thins those
that came since to the same ones. Values stay whole, and keys of decoded tokens until then.
"""

import torch
from torch import Tensor

from pod.modeling.methods.base import Method, Request
from pod.modeling.methods.ranking import LastQueries, best_slots
from pod.modeling.methods.streaming import cache_of
from pod.modeling.shipped.attend import Tokens, attend, compute_dtype, takes_gradients
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.grouped import slot_logits, weigh_slots
from pod.modeling.shipped.layout import PodCacheLayer
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import TokenStore, numbers


class ThinLayer(PodCacheLayer):
    """A dense layer whose older keys have ``num_channels`` channels, for rows that are alike.

    Attributes:
        thin, num_thin: keys ``[B, H, num_thin, c]`` of the first tokens; whole keys of the others are native under any codec.
        channels: int16 ``[B, H, 1, c]``, which these are, ascending.
        queries: last queries of the prompt that runs.
    """

    def __init__(self, config: PodConfig, layer_idx: int, request: Request):
        kept = config.head_dim - int(config.head_dim * request.params["ratio"])
        parts = 8 // getattr(request.codec, "bits", 8)  # numbers of a token in a byte
        self.num_channels = -(-kept // parts) * parts
        self.recent, self.num_queries = request.params["recent"], request.params["queries"]
        super().__init__(config, layer_idx, request.codec)

    def clear(self) -> None:
        super().clear()
        self.lead_keys, self.channels, self.thin = TokenStore(), TokenStore(), self.codec.tokens("keys")
        self.queries, self.num_thin = LastQueries(self.num_queries), 0

    def stores(self) -> dict:
        return super().stores() | {"thin": self.thin, "channels": self.channels, "bookkeeping": self.queries}

    def predicted_nbytes(self, length: int) -> int:
        counts = {"keys": length - self.num_thin, "thin": self.num_thin, "channels": 1, "values": length}
        held = [(store, counts[name]) for name, store in self.stores().items() if name in counts]
        return sum(store.predicted_nbytes(count) for store, count in held if not store.is_empty)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        (q, k), length = step.rope.pair(q, k), step.max_length
        self.lead_keys.append(k, length - step.num_new - self.num_thin)
        self.all_values.append(v, length - step.num_new)
        if not step.is_decode:
            self.queries.observe(q, step)
        keys = self.lead_keys.read(length - self.num_thin)
        if step.num_new > 1 or takes_gradients(q, k, v):
            if self.num_thin:  # with zeros for what they lack
                thin = k.new_zeros(*k.shape[:2], self.num_thin, k.shape[3])
                thin.scatter_(3, self._index(self.num_thin), self.thin.read(self.num_thin))
                keys = torch.cat((thin, keys), dim=2)
            return attend(q, Tokens(keys, self.all_values.view(length)), backend=step.chunk_backend)[0]
        logits = slot_logits(q, keys, keys.shape[2], self.scale)
        if self.num_thin:
            own = q.gather(3, self._index(1).repeat_interleave(self.groups, dim=1))
            thin = slot_logits(own, self.thin.stored, self.num_thin, self.scale)
            logits = torch.cat((thin, logits), dim=3)
        return weigh_slots(logits.softmax(-1), self.all_values.stored, q.dtype)

    def _index(self, count: int) -> Tensor:
        """The channels held, ``[B, H, count, c]``."""
        return self.channels.read(1).long().expand(-1, -1, count, -1)

    def settle(self, step: Step) -> None:
        queries, held = self.queries.observed, step.max_length - self.num_thin
        if step.ends_prompt:
            self.queries = LastQueries(self.num_queries)
            if queries is not None and held > self.recent:
                self._drop_channels(queries, self.lead_keys.read(held), held - self.recent)
        if step.ends_prompt or step.is_decode:
            self.thin.settle(self.num_thin)
            self.all_values.settle(step.max_length)

    def _drop_channels(self, queries: Tensor, keys: Tensor, count: int) -> None:
        """Of the first ``count`` of whole keys ``[B, H, n, d]``."""
        if self.channels.is_empty:
            norms = (x.to(compute_dtype(x.dtype)).square().sum(2) for x in (queries, keys))
            of_queries, of_keys = (x.unflatten(1, (keys.shape[1], -1)).mean(2) for x in norms)
            self.channels.append(best_slots(of_queries * of_keys, self.num_channels)[:, :, None].short(), 0)
        self.thin.append(keys[:, :, :count].gather(3, self._index(count)), self.num_thin)
        later = numbers(keys.shape[2], keys.device)[count:].expand(*keys.shape[:2], -1)
        self.lead_keys.keep(later, keys.shape[2])
        self.num_thin += count


_HEADS = "heads of this layout do not all hold every key of their own, which is what loses channels"
METHOD = Method(
    name="think",
    paper="ThinK (Xu et al., 2024)",
    frees="the share ratio of the channels of the prompt's keys (a fifth of the bytes at 0.4); no token is dropped",
    axis="selection",
    build=cache_of(ThinLayer),
    parameters={
        "ratio": (
            0.4,
            "share of key channels that are dropped, rounded to whole bytes with a codec (share)",
            0,
            0.99,
        ),
        "queries": (32, "last queries of the prompt that choose the channels (tokens)", 1),
        "recent": (32, "tokens at the end of a prompt whose keys stay whole (tokens)", 0),
    },
    refuses=dict.fromkeys(("pod", "cla", "window"), _HEADS),
)
