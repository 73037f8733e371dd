"""ThinK (Xu et al., 2024, arXiv:2407.21018): keys of the prompt lose the channels that its last queries have least use for.

When the first prompt ends, channel ``j`` of a KV head is worth ``‖Q_j‖² ‖K_j‖²``: over the last queries of the prompt and over all keys
held, both rotated, as in the authors' code, and mean over the query heads of a group, as in kvpress (theirs prunes a copy of the keys
for each). Keys of all tokens but the ``recent`` newest are held in the best channels then, and the end of a later prompt thins those
that came since to the same ones. Values stay whole, and keys of decoded tokens until then. Behind a ranking (the paper has ThinK with H2O and
SnapKV) the prompt's tokens are chosen by whole keys, and those that stay are thinned; when a later prompt ends, by what is held.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pod.modeling.methods.base import Method, Request, cache_of
from pod.modeling.methods.ranking import LastQueries, best_slots
from pod.modeling.methods.shared_selection import SharedSelectionLayer
from pod.modeling.shipped.attend import compute_dtype
from pod.modeling.shipped.config import PodConfig
from pod.modeling.shipped.grouped import write_scores
from pod.modeling.shipped.step import Step
from pod.modeling.shipped.stores import Codec, TokenStore


class ThinCodec(Codec):
    """Another codec, and keys that lose channels; packed ones fill whole bytes."""

    def __init__(self, config: PodConfig, request: Request):
        kept = config.head_dim - int(config.head_dim * request.params["ratio"])
        parts = 8 // getattr(request.codec, "bits", 8)  # numbers of a token in a byte
        self.inner, self.num_channels = request.codec, -(-kept // parts) * parts
        self.num_queries, self.recent = request.params["queries"], request.params["recent"]
        self.window = self.inner.window

    def tokens(self, part: str, evicts: bool = False) -> TokenStore:
        return ThinKeys(self) if part == "keys" else self.inner.tokens(part, evicts)


class ThinKeys(TokenStore):
    """Keys of rows that are alike, the older ones in fewer channels. Whole keys, its ``data``, are native under any codec.

    Attributes:
        thin, num_thin: keys ``[B, h, num_thin, c]`` of the first tokens.
        channels: int64 ``[B, h, 1, c]``, which these are, ascending; None before any was thinned.
        queries: last queries of the prompt that runs.
    """

    def __init__(self, rule: ThinCodec):
        super().__init__()
        self.rule, self.queries = rule, LastQueries(rule.num_queries)
        self.channels: Any = None
        self.thin, self.num_thin = rule.inner.tokens("keys"), 0

    @property
    def shape(self) -> tuple[int, ...]:
        batch, heads, slots, head_dim = self.data.shape
        return batch, heads, self.num_thin + slots, head_dim

    @property
    def stored(self) -> Any:
        return self if self.num_thin else self.data

    def scores(self, q: Tensor, out: Tensor) -> None:
        """See ``Packed.scores``."""
        write_scores(q.gather(3, self._index(q.shape[2])), self.thin.stored, out[..., : self.num_thin])
        write_scores(q, self.data, out[..., self.num_thin :])

    def _index(self, count: int) -> Tensor:
        return self.channels.expand(-1, -1, count, -1)

    def tensors(self) -> list[Tensor]:
        channels = [] if self.channels is None else [self.channels]
        return [*super().tensors(), *self.thin.tensors(), *channels, *self.queries.tensors()]

    def observe(self, q: Tensor, step: Step) -> None:
        self.queries.observe(q, step)

    def append(self, x: Tensor, past: int) -> None:
        super().append(x, past - self.num_thin)

    def read(self, length: int) -> Tensor:
        """See ``TokenStore.read``; with zeros for what thin keys lack."""
        keys = super().read(length - self.num_thin)
        if self.num_thin:
            keys = F.pad(keys, (0, 0, self.num_thin, 0))
            keys.scatter_(3, self._index(self.num_thin), self.thin.read(self.num_thin))
        return keys

    def keep(self, index: Tensor, length: int) -> None:
        """See ``TokenStore.keep``. Heads keep unequally many thin keys: they have zeros until ``settle``."""
        self.data = self.read(length)
        self.thin, self.num_thin = self.rule.inner.tokens("keys"), 0
        super().keep(index, length)

    def settle(self, length: int) -> None:
        """See ``TokenStore.settle``: when a prompt has ended, thin all but the newest."""
        queries, keys = self.queries.observed, super().read(length - self.num_thin)
        count = keys.shape[2] - self.rule.recent
        self.queries = LastQueries(self.rule.num_queries)
        if queries is not None and count > 0:
            if self.channels is None:
                norms = (x.to(compute_dtype(x.dtype)).square().sum(2) for x in (queries, keys))
                of_queries, of_keys = (x.unflatten(1, (keys.shape[1], -1)).mean(2) for x in norms)
                self.channels = best_slots(of_queries * of_keys, self.rule.num_channels)[:, :, None]
            self.thin.append(keys[:, :, :count].gather(3, self._index(count)), self.num_thin)
            self.data, self.num_thin = keys[:, :, count:].clone(), self.num_thin + count
        if self.num_thin:
            self.thin.settle(self.num_thin)


class WholeLayer(SharedSelectionLayer):
    """Keeps every token."""

    evicts = False

    @staticmethod
    def ranks(config: PodConfig, layer_idx: int, request: Request) -> LastQueries:
        return LastQueries(0)


METHOD = Method(
    name="think",
    paper="ThinK (Xu et al., 2024)",
    frees="a share (ratio) of the channels in the prompt's keys, a fifth of the bytes at 0.4; no token is dropped",
    axis="channels",
    build=cache_of(WholeLayer),
    wraps=ThinCodec,
    parameters={
        "ratio": (0.4, "share of key channels dropped; with a codec in whole bytes (share)", 0, 0.99),
        "queries": (32, "last queries of the prompt that choose the channels (tokens)", 1),
        "recent": (32, "tokens at the end of a prompt whose keys stay whole (tokens)", 0),
    },
    behind=("snapkv", "pyramidkv", "adakv", "expected_attention"),
    refuses_pod="some heads of this layout keep no distant keys, and ThinK drops channels of keys",
)
